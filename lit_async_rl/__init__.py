"""Asynchronous reinforcement learning of language models on Lightning.

    Prompt -> Rollout -> RolloutGroup -> RolloutBatch -> loss per token -> gradient -> weights -> engine
    prompts   engines    rollouts        data            losses           training     WeightSync

Nothing downstream calls upstream, except `WeightSync`, which gives the engine the new weights, and the producer its
slots back. All public names (`NAMES`) are attributes of this package, imported on first use; `__all__` and `dir` show
those that most runs begin with, the documentation shows all.
"""

import sys
import warnings
from typing import Any

import lazy_loader

__version__ = "0.1.0"
_NEED_ALL = ("fit", "sft", "Trainer", "PolicyModule", "RolloutDataModule")
_found, _, NAMES = lazy_loader.attach_stub(__name__, __file__)
__all__ = [  # in the order of a run
    *("fit", "sft", "Trainer", "PolicyModule", "RolloutDataModule", "Limits", "Scoring", "Validation"),
    *("InMemoryPrompts", "JsonlPrompts", "HuggingFacePrompts", "PromptSource", "Prompt", "Curriculum"),
    *("Addition", "Calculator", "MentalArithmetic", "ReasoningGym"),
    *("EmbeddedEngine", "VLLMEngine", "RayEngine", "RayCluster", "RolloutEngine", "SamplingParams"),
    *("Environment", "AgentEpisode", "ProcessAgent", "CommandAgent", "McpAgent"),
    *("exact_match", "last_number", "MathVerify", "CodeReward", "JudgeReward", "RewardModel", "CombinedReward"),
    *("FixedLag", "Bounded", "Drop", "DynamicSampling", "RecencyReplay"),
    *("Rollout", "RolloutGroup", "RolloutBatch"),
    *("GroupMean", "GroupMeanStd", "LeaveOneOut", "OptimalBaseline"),
    *("Reinforce", "PPOClip", "CISPO", "GSPO", "PolicyLoss", "TokenMean", "SequenceMean"),
    *("TokenTruncatedIS", "SequenceTruncatedIS", "IcePop", "Correction"),
    *("ESSLearningRate", "GradientAlignmentControl", "StalenessController", "CollapseAlarm", "StalenessMonitor"),
    *("LoRA", "PrefixTreePacking", "SharedPromptPacking", "FSDPStrategy", "ModelParallelStrategy"),
]
warnings.filterwarnings("ignore", message="IProgress not found")  # in notebooks, of bars that are off here


def __getattr__(name: str) -> Any:
    """Imports a public name; in a terminal, announces the first import that needs all libraries."""
    if name in _NEED_ALL and sys.stderr is not None and sys.stderr.isatty():
        from lit_async_rl.utils.loading import loading

        with loading():
            return _strict(_found(name))
    return _strict(_found(name))


def _strict(found: Any) -> Any:
    """A public name; constructors of classes refuse None where annotations do."""
    if isinstance(found, type):
        from lit_async_rl.utils.checks import refuse_none

        refuse_none(found)
    return found


def __dir__() -> list[str]:
    return __all__
