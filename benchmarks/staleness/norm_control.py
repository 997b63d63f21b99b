"""Control for gradient alignment control: shorter gradients in the same direction."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lit_async_rl.callbacks import GradientAlignmentControl
from lit_async_rl.stabilizers.alignment import AlignedStep, Regime
from lit_async_rl.stabilizers.gradients import GradSpace


class NormControl(GradientAlignmentControl):
    """Where GAC would project, scales the gradient to the norm that the projection would leave.

    If it does as well as GAC, GAC owes its effect to the size of the steps and not to their direction.
    """

    @torch.no_grad()
    def _update(
        self, space: GradSpace, gradients: list[Tensor | None], reference: list[Tensor | None], steps: list[AlignedStep]
    ) -> None:
        kept = [step.kept for step in steps]
        for step in steps:
            step.kept = 1.0  # nothing is projected, the reference is updated as ever
        super()._update(space, gradients, reference, steps=steps)
        for step, share in zip(steps, kept, strict=True):
            step.kept = share
        for gradient, group in zip(gradients, space.group_of, strict=True):
            step = steps[group]
            if gradient is not None and step.regime == Regime.PROJECT and step.cosine is not None:
                gradient.mul_(math.sqrt(1 - step.cosine**2 + (step.kept * step.cosine) ** 2))
