"""Reward functions, graders, and threaded scoring of completions."""

from typing import Any

import lazy_loader

_found, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
_JUDGES = ("JudgeBudget", "JudgeLimits", "JudgeReward", "RewardModel")  # were here


def __getattr__(name: str) -> Any:
    if name not in _JUDGES:
        return _found(name)
    import lit_async_rl

    return getattr(lit_async_rl, name)
