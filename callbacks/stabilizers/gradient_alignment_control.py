"""Gradient alignment control (GAC)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_async_rl.stabilizers.alignment import (
    AlignedStep,
    AlignmentRule,
    ExactResidual,
    LastRaw,
    Reference,
    ReferenceGradients,
    Regime,
    Residual,
)
from lit_async_rl.stabilizers.gradients import GradientTreatment, GradSpaces
from lit_async_rl.stabilizers.step_lr import raw_optimizer
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


class GradientAlignmentControl(GradientTreatment):
    """Applies, projects or skips a step by the cosine c of its gradient with a reference (GAC, arXiv:2603.01501).

        c = <g, p> / (|g| |p|)
        c <= low          apply g
        low < c <= high   apply g - (1 - a) (<g, p> / |p|^2) p
        high < c          skip: neither weights nor moments nor weight decay move

    Stale rollouts align consecutive gradients, which acts like unwanted momentum. From the paper: the cosine of
    consecutive gradients as signal, projection by parallel and orthogonal part, thresholds between applying, projecting
    and skipping. Their values, a, p and the treatment of negative c could not be checked; each is an argument here,
    with our own default. See `lit_async_rl.stabilizers.alignment`.

    Runs on the accumulated, unclipped gradient: put it before `GradientClipping`. A skip removes the gradients, so that
    `PolicyModule` counts no version; Lightning still advances scheduler and `global_step`. A gradient with NaN or
    infinity is dropped in the same way, but is neither a skip nor the next reference.

    The reference takes the memory of one more gradient (this rank's shard), and is not checkpointed: the first step
    after a resume is applied unchanged.

    Logs `gac/cosine` (if there is a reference), `gac/regime` (0 applied, 1 projected, 2 skipped, 3 dropped),
    `gac/kept` (a), `gac/consecutive_skips`, `gac/norm`, `gac/low`, `gac/high`, `gac/num_dropped` (steps so far).

    For any LightningModule; in a custom loop:

    Example:
        ```python
        import torch

        import lit_async_rl as rl

        control = rl.GradientAlignmentControl(low=0.05, high=0.5)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(torch.randn(8, 4)).square().mean().backward()
            control.apply(model, optimizer)  # may project or drop the gradient
            optimizer.step()
            optimizer.zero_grad()
        ```

    Args:
        low: largest c at which the gradient is applied unchanged; 1 is the neutral setting.
        high: largest c at which it is projected; 1 never skips.
        residual: rule for a, the share of the parallel component to keep.
        reference: rule for p, the reference gradient.
        two_sided: treat strongly opposed gradients like aligned ones.
        max_consecutive_skips: after this many consecutive skips a step is projected instead; 0 never skips.
        min_remainder: a projection that leaves less than this share of the norm is a skip; one that must not be skipped
            keeps at least this share.
        calibrate_steps: record this many cosines without intervention, then set `low` to their quantile (`high` keeps
            its relative position between `low` and 1); these steps should be nearly on-policy.
        calibrate_quantile: that quantile, in [0, 1].
        optimizer: optimizer to control, by position or submodule name; None controls each independently.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        low: float = 0.05,
        high: float = 0.5,
        residual: Residual | None = None,
        reference: Reference | None = None,
        two_sided: bool = False,
        max_consecutive_skips: int = 1,
        min_remainder: float = 0.05,
        calibrate_steps: int = 0,
        calibrate_quantile: float = 0.9,
        optimizer: int | str | None = None,
    ) -> None:
        check_range("GradientAlignmentControl", "integer >= 0", calibrate_steps=calibrate_steps)
        check_range("GradientAlignmentControl", "in [0, 1]", calibrate_quantile=calibrate_quantile)
        self.rule = AlignmentRule(
            low=low,
            high=high,
            residual=residual or ExactResidual(),
            two_sided=two_sided,
            max_consecutive_skips=max_consecutive_skips,
            min_remainder=min_remainder,
        )
        self._initial_rule = self.rule  # the rule before any calibration
        self._has_trained = False
        self.reference = reference or LastRaw()
        self.calibrate_steps = calibrate_steps
        self.calibrate_quantile = calibrate_quantile
        self.optimizer = optimizer
        self._spaces = GradSpaces()
        self._references = ReferenceGradients()
        self._skips: dict[int, int] = {}  # optimizer index -> consecutive skips
        self._cosines: list[float] = []
        self.num_dropped = 0
        self._is_dropped: dict[int, bool] = {}  # optimizer index -> whether its last gradient was dropped

    def apply(self, root: nn.Module, optimizer: Optimizer, index: int = 0) -> dict[str, float]:
        """Controls the gradients between backward and step, in any loop; returns the metrics.

        Args:
            root: outermost module (the FSDP or DDP wrapper, if there is one).
            optimizer: optimizer of the gradients.
            index: position of the optimizer, if there are several.
        """
        space = self._spaces.of(root, raw_optimizer(optimizer))
        gradients = space.gradients()
        step = AlignedStep.of(*self._references.products(space, gradients, index).tolist())
        self._skips.setdefault(index, 0)
        self._decide(step, index)
        self._update(gradients, self._references.of(space, index), step)
        if step.regime >= Regime.SKIP:
            space.drop()
        self._is_dropped[index] = step.regime == Regime.DROP
        return self._metrics(step, self._skips[index])

    def _decide(self, step: AlignedStep, index: int) -> None:
        """Sets regime and residual share of the step, and counts skips."""
        if not math.isfinite(step.norm):
            if self.num_dropped == 0:
                rank_zero_warn(
                    "GradientAlignmentControl: a gradient contains NaN or infinity; steps with such a gradient are "
                    "dropped"
                )
            self.num_dropped += 1
            step.regime = Regime.DROP
            step.kept = 0.0
        elif step.cosine is None:
            self._skips[index] = 0
        elif len(self._cosines) < self.calibrate_steps:
            self._cosines.append(step.cosine)
            if len(self._cosines) == self.calibrate_steps:
                low, high = self.rule.calibrated(self._cosines, self.calibrate_quantile)
                self.rule = dataclasses.replace(self.rule, low=low, high=high)
                rank_zero_info(f"GradientAlignmentControl: calibrated to low={low:.4f}, high={high:.4f}")
        else:
            step.regime, step.kept = self.rule.decide(step.cosine, self._skips[index])
            self._skips[index] = self._skips[index] + 1 if step.regime == Regime.SKIP else 0

    @torch.no_grad()
    def _update(self, gradients: list[Tensor | None], reference: list[Tensor | None], step: AlignedStep) -> None:
        """Projects in place and updates the reference, by parameter, to save memory."""
        if step.regime == Regime.DROP or step.norm == 0:
            return
        for n, gradient in enumerate(gradients):
            previous = reference[n]
            if gradient is None:
                if previous is None:
                    continue
                gradient = torch.zeros_like(previous)
            if previous is None:
                previous = reference[n] = torch.zeros_like(gradient)
            raw = gradient
            if step.regime == Regime.PROJECT:
                raw = gradient.clone()
                gradient.add_(previous, alpha=-(1 - step.kept) * step.slope)
            self.reference.update(previous, raw, None if step.regime == Regime.SKIP else gradient)

    def _metrics(self, step: AlignedStep, num_skips: int) -> dict[str, float]:
        metrics = {"gac/low": self.rule.low, "gac/high": self.rule.high, "gac/num_dropped": float(self.num_dropped)}
        metrics |= {"gac/regime": float(step.regime), "gac/kept": step.kept, "gac/consecutive_skips": float(num_skips)}
        if step.regime != Regime.DROP:
            metrics["gac/norm"] = step.norm
        if step.cosine is not None:
            metrics["gac/cosine"] = step.cosine
        return metrics

    def has_dropped(self, index: int) -> bool:
        """Whether the last update of the optimizer at position `index` was dropped as not finite."""
        return self._is_dropped.get(index, False)

    # -- Lightning ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: AnyTrainer, pl_module: AnyModule, stage: str) -> None:
        """Resets the state of an earlier run, before a resume restores its own."""
        if stage == "fit" and self._has_trained:
            self.rule = self._initial_rule
            self._skips = {}
            self._cosines = []
            self.num_dropped = 0

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._references = ReferenceGradients()
        self._spaces = GradSpaces()
        self._has_trained = True

    def state_dict(self) -> dict[str, Any]:
        """State without the reference gradient; the same on all ranks."""
        return {
            "skips": {index: [skips] for index, skips in self._skips.items()},  # lists, as in older checkpoints
            "cosines": list(self._cosines),
            "low": self.rule.low,
            "high": self.rule.high,
            "num_dropped": self.num_dropped,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state; thresholds only if they were calibrated."""
        self._skips = {index: skips[0] for index, skips in state_dict["skips"].items()}
        self._cosines = list(state_dict["cosines"])
        self.num_dropped = state_dict["num_dropped"]
        if 0 < self.calibrate_steps <= len(self._cosines):
            self.rule = dataclasses.replace(self.rule, low=state_dict["low"], high=state_dict["high"])
