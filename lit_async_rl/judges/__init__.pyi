from .judge import JudgeBudget as JudgeBudget
from .judge import JudgeReward as JudgeReward
from .judge_models import JudgeLimits as JudgeLimits
from .model import RewardModel as RewardModel
