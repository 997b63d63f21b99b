"""Reward functions, graders, and threaded scoring of completions."""

from lit_async_rl.utils.public_names import attach

JUDGES = ("JudgeBudget", "JudgeLimits", "JudgeReward", "RewardModel")
__getattr__, __dir__, __all__ = attach(__name__, __file__, moved=(*JUDGES, "CodeReward"))
