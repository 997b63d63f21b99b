"""Callbacks: weight synchronisation, stabilizers that change the step, monitors that change nothing.

Each is imported when it is asked for: who takes one stabilizer into a trainer of their own loads no engine.
"""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_async_rl.callbacks.monitors.bottleneck_verdict import BottleneckVerdict
    from lit_async_rl.callbacks.monitors.gradient_monitor import GradientMonitor
    from lit_async_rl.callbacks.monitors.importance_monitor import ImportanceMonitor
    from lit_async_rl.callbacks.monitors.length_bias_monitor import LengthBiasMonitor
    from lit_async_rl.callbacks.monitors.replay_monitor import ReplayMonitor
    from lit_async_rl.callbacks.monitors.rollout_monitor import RolloutMonitor
    from lit_async_rl.callbacks.monitors.staleness_monitor import StalenessMonitor
    from lit_async_rl.callbacks.monitors.throughput_monitor import ThroughputMonitor
    from lit_async_rl.callbacks.run.evaluation import Evaluation
    from lit_async_rl.callbacks.run.progress import Progress
    from lit_async_rl.callbacks.run.rollout_tape import RolloutTape
    from lit_async_rl.callbacks.run.run_summary import RunSummary
    from lit_async_rl.callbacks.run.sample_logger import SampleLogger
    from lit_async_rl.callbacks.run.save_on_failure import SaveOnFailure
    from lit_async_rl.callbacks.run.save_on_sigterm import SaveOnSigterm
    from lit_async_rl.callbacks.run.weight_sync import WeightSync
    from lit_async_rl.callbacks.stabilizers.adaptive_staleness import AdaptiveStaleness
    from lit_async_rl.callbacks.stabilizers.anneal_beta import AnnealBeta
    from lit_async_rl.callbacks.stabilizers.collapse_alarm import CollapseAlarm
    from lit_async_rl.callbacks.stabilizers.ess_learning_rate import ESSLearningRate
    from lit_async_rl.callbacks.stabilizers.gradient_alignment_control import GradientAlignmentControl
    from lit_async_rl.callbacks.stabilizers.gradient_clipping import GradientClipping
    from lit_async_rl.callbacks.stabilizers.reference_reset import ReferenceReset
    from lit_async_rl.callbacks.stabilizers.skip_non_finite import SkipNonFinite

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
