"""Callbacks: weight synchronisation, stabilizers that change the step, monitors that change nothing.

Each is imported when it is asked for: who takes one stabilizer into a trainer of their own loads no engine.
"""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_async_rl.callbacks.adaptive_staleness import AdaptiveStaleness
    from lit_async_rl.callbacks.anneal_beta import AnnealBeta
    from lit_async_rl.callbacks.bottleneck_verdict import BottleneckVerdict
    from lit_async_rl.callbacks.collapse_alarm import CollapseAlarm
    from lit_async_rl.callbacks.ess_learning_rate import ESSLearningRate
    from lit_async_rl.callbacks.evaluation import Evaluation
    from lit_async_rl.callbacks.gradient_alignment_control import GradientAlignmentControl
    from lit_async_rl.callbacks.gradient_clipping import GradientClipping
    from lit_async_rl.callbacks.gradient_monitor import GradientMonitor
    from lit_async_rl.callbacks.importance_monitor import ImportanceMonitor
    from lit_async_rl.callbacks.length_bias_monitor import LengthBiasMonitor
    from lit_async_rl.callbacks.progress import Progress
    from lit_async_rl.callbacks.reference_reset import ReferenceReset
    from lit_async_rl.callbacks.replay_monitor import ReplayMonitor
    from lit_async_rl.callbacks.rollout_monitor import RolloutMonitor
    from lit_async_rl.callbacks.rollout_tape import RolloutTape
    from lit_async_rl.callbacks.run_summary import RunSummary
    from lit_async_rl.callbacks.sample_logger import SampleLogger
    from lit_async_rl.callbacks.save_on_failure import SaveOnFailure
    from lit_async_rl.callbacks.save_on_sigterm import SaveOnSigterm
    from lit_async_rl.callbacks.skip_non_finite import SkipNonFinite
    from lit_async_rl.callbacks.staleness_monitor import StalenessMonitor
    from lit_async_rl.callbacks.throughput_monitor import ThroughputMonitor
    from lit_async_rl.callbacks.weight_sync import WeightSync

__all__ = [
    "AdaptiveStaleness",
    "AnnealBeta",
    "BottleneckVerdict",
    "CollapseAlarm",
    "ESSLearningRate",
    "Evaluation",
    "GradientAlignmentControl",
    "GradientClipping",
    "GradientMonitor",
    "ImportanceMonitor",
    "LengthBiasMonitor",
    "Progress",
    "ReferenceReset",
    "ReplayMonitor",
    "RolloutMonitor",
    "RolloutTape",
    "RunSummary",
    "SampleLogger",
    "SaveOnFailure",
    "SaveOnSigterm",
    "SkipNonFinite",
    "StalenessMonitor",
    "ThroughputMonitor",
    "WeightSync",
]


def __getattr__(name: str) -> Any:
    """PEP 562: `ESSLearningRate` is in `ess_learning_rate`, and so on."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    snake = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    return getattr(importlib.import_module(f"lit_async_rl.callbacks.{snake}"), name)
