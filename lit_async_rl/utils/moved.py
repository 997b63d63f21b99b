"""Import of modules of version 0.1 under their old names, with a deprecation warning each."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Iterable
from types import ModuleType

MOVED = {
    "aggregation": "losses.aggregation",
    "alignment": "stabilizers.alignment",
    "callbacks.adaptive_staleness": "callbacks.stabilizers.adaptive_staleness",
    "callbacks.anneal_beta": "callbacks.stabilizers.anneal_beta",
    "callbacks.bottleneck_verdict": "callbacks.monitors.bottleneck_verdict",
    "callbacks.collapse_alarm": "callbacks.stabilizers.collapse_alarm",
    "callbacks.ess_learning_rate": "callbacks.stabilizers.ess_learning_rate",
    "callbacks.evaluation": "callbacks.run.evaluation",
    "callbacks.gradient_alignment_control": "callbacks.stabilizers.gradient_alignment_control",
    "callbacks.gradient_clipping": "callbacks.stabilizers.gradient_clipping",
    "callbacks.gradient_monitor": "callbacks.monitors.gradient_monitor",
    "callbacks.importance_monitor": "callbacks.monitors.importance_monitor",
    "callbacks.length_bias_monitor": "callbacks.monitors.length_bias_monitor",
    "callbacks.progress": "callbacks.run.progress",
    "callbacks.reference_reset": "callbacks.stabilizers.reference_reset",
    "callbacks.replay_monitor": "callbacks.monitors.replay_monitor",
    "callbacks.rollout_monitor": "callbacks.monitors.rollout_monitor",
    "callbacks.rollout_tape": "callbacks.run.rollout_tape",
    "callbacks.run_summary": "callbacks.monitors.run_summary",
    "callbacks.sample_logger": "callbacks.run.sample_logger",
    "callbacks.save_on_failure": "callbacks.run.save_on_failure",
    "callbacks.save_on_sigterm": "callbacks.run.save_on_sigterm",
    "callbacks.skip_non_finite": "callbacks.stabilizers.skip_non_finite",
    "callbacks.staleness_monitor": "callbacks.monitors.staleness_monitor",
    "callbacks.step_monitor": "callbacks.monitors.step_monitor",
    "callbacks.throughput_monitor": "callbacks.monitors.throughput_monitor",
    "callbacks.weight_sync": "callbacks.run.weight_sync",
    "checkpoint_io": "training.checkpoint_io",
    "csv_log": "training.csv_logger",
    "curriculum": "prompts.curriculum",
    "embedded_engine": "engines.embedded.engine",
    "engine": "engines.base",
    "episodes": "environments.episode_engine",
    "expiry": "scheduling.expiry",
    "filters": "rollouts.filters",
    "gpu_weight_transfer": "engines.vllm.gpu_weight_transfer",
    "intake": "rollouts.intake",
    "lora": "models.lora",
    "module": "training.module",
    "nigt": "stabilizers.nigt",
    "opob": "baselines.optimal",
    "packing": "models.packing",
    "proximal": "corrections.proximal",
    "replay_buffer": "replay.buffer",
    "replay_weighting": "replay.weighting",
    "ring": "scheduling.ring",
    "rollback": "stabilizers.rollback",
    "sharding": "models.sharding",
    "simulated_engine": "simulation.engine",
    "simulated_environment": "simulation.environment",
    "tape": "replay.tape",
    "text": "models.tokenizer",
    "turn_advantages": "advantages.turns",
    "vllm_engine": "engines.vllm.engine",
    "vllm_server_engine": "engines.vllm.servers.engine",
    "weight_transfer": "engines.vllm.weight_transfer",
}


class _MovedFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last finder on `sys.meta_path`: only asked for modules that do not exist."""

    def find_spec(
        self, fullname: str, path: Iterable[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        is_moved = fullname.removeprefix("lit_async_rl.") in MOVED
        return importlib.machinery.ModuleSpec(fullname, self) if is_moved else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        new = "lit_async_rl." + MOVED[spec.name.removeprefix("lit_async_rl.")]
        message = f"{spec.name} is now {new}; the old name will be removed in version 0.3"
        warnings.warn(message, FutureWarning, stacklevel=2)
        alias = ModuleType(spec.name)
        found = vars(importlib.import_module(new))
        alias.__dict__.update({name: value for name, value in found.items() if not name.startswith("__")})
        return alias

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """Makes the old names importable. Safe to call twice."""
    if not any(isinstance(finder, _MovedFinder) for finder in sys.meta_path):
        sys.meta_path.append(_MovedFinder())
