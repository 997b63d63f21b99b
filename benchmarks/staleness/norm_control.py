"""Control for gradient alignment control: shorter gradients in the same direction."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lit_async_rl.callbacks import GradientAlignmentControl
from lit_async_rl.stabilizers.alignment import AlignedStep, Regime


class NormControl(GradientAlignmentControl):
    """Where GAC would project, scales the gradient to the norm that the projection would leave.

    If it does as well as GAC, GAC owes its effect to the size of the steps and not to their direction.
    """

    @torch.no_grad()
    def _update(self, gradients: list[Tensor | None], reference: list[Tensor | None], step: AlignedStep) -> None:
        kept = step.kept
        step.kept = 1.0  # nothing is projected, the reference is updated as ever
        super()._update(gradients, reference, step)
        step.kept = kept
        if step.regime != Regime.PROJECT or step.cosine is None:
            return
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(math.sqrt(1 - step.cosine**2 + (step.kept * step.cosine) ** 2))
