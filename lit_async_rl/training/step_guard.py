"""Checks that every optimizer step consists of exactly its micro-batches, each once, and that no token is too old.

A micro-batch carries the step it was made for, its index there, and the staleness bound of each row. A checkpoint saved
within a step starts with that step, because its gradients are not saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_async_rl.errors import StalenessError, StepError
from lit_async_rl.types import RolloutBatch


class StepGuard:
    """Tracks the micro-batches of a run.

    Attributes:
        step: global step of the last admitted micro-batch; -1 before the first one.
        num_admitted: micro-batches of that step so far, of `num_micro_batches`.
        random_state: torch's, when that step began.
    """

    def __init__(self) -> None:
        self.step = -1
        self.num_admitted = self.num_micro_batches = 0
        self.random_state: Tensor | None = None
        self._last_batch_idx = -1
        self._is_accumulated = False

    def admit(self, batch: RolloutBatch, batch_idx: int, global_step: int, version: int) -> None:
        """Checks the next micro-batch; one without a step (of another data module) only for the age of its tokens.

        Args:
            batch: to be trained on.
            batch_idx: Lightning's; repeated by an optimizer that evaluates the loss several times.
            global_step: optimizer steps so far.
            version: of the policy.

        Raises:
            StepError: it was made for another step, is repeated, or its predecessor is missing.
            StalenessError: a token is too old.
        """
        if batch.step is not None:
            self._admit(batch, batch_idx, global_step)
        check_staleness(batch, version)

    def _admit(self, batch: RolloutBatch, batch_idx: int, global_step: int) -> None:
        is_repeated = self.step == global_step and self._last_batch_idx == batch_idx
        if self.step != global_step:
            self.num_admitted = 0
        expected = self.num_admitted - is_repeated
        if batch.step != global_step or batch.micro_batch != expected:
            raise StepError(
                f"optimizer step {global_step} needs micro-batch {expected}, and got micro-batch {batch.micro_batch} "
                f"(of {batch.num_micro_batches}) of step {batch.step}: trainer.accumulate_grad_batches must be "
                f"data.micro_batches_per_step={batch.num_micro_batches}, and trainer.limit_train_batches a multiple"
            )
        if expected == 0 and not is_repeated:
            self.random_state = torch.get_rng_state()
        self.step, self.num_admitted, self.num_micro_batches = global_step, expected + 1, batch.num_micro_batches
        self._last_batch_idx, self._is_accumulated = batch_idx, False

    def accumulated(self) -> None:
        """Records that the micro-batch's gradients were accumulated."""
        self._is_accumulated = True

    def check_whole(self) -> None:
        """Checks that the step is complete; called before the optimizer's step.

        Raises:
            StepError: micro-batches are missing.
        """
        if self.num_admitted != self.num_micro_batches:
            raise StepError(
                f"optimizer step {self.step} would be made of {self.num_admitted} of its {self.num_micro_batches} "
                "micro-batches: trainer.accumulate_grad_batches must be data.micro_batches_per_step, and "
                "trainer.limit_train_batches a multiple of it"
            )

    def is_within(self, global_step: int) -> bool:
        """Whether some of the step's micro-batches were trained on, and the optimizer has not stepped."""
        return self.step == global_step

    def is_updating(self, global_step: int) -> bool:
        """Whether the step's gradient is complete, so that callbacks and optimizer are about to use it."""
        return self.is_within(global_step) and self._is_accumulated and self.num_admitted == self.num_micro_batches


def check_staleness(batch: RolloutBatch, version: int) -> None:
    """Checks every trained token against its row's bound.

    Raises:
        StalenessError: a token exceeds the bound, or is newer than the policy.
    """
    if batch.max_staleness is None:
        return
    staleness = version - batch.versions
    is_wrong = batch.loss_mask & ((staleness > batch.max_staleness[:, None]) | (staleness < 0))
    if bool(is_wrong.any()):
        row, position = is_wrong.nonzero()[0].tolist()
        found, bound = int(batch.versions[row, position]), int(batch.max_staleness[row])
        raise StalenessError(
            f"a token of version {found} reached version {version} of the policy (group {int(batch.group_index[row])}, "
            f"{int(is_wrong.sum())} tokens in all): it must be neither newer nor more than max_staleness={bound} older"
        )


def count_whole_steps(checkpoint: dict[str, Any], micro_batches_per_step: int, in_future: int | None = None) -> None:
    """Resets a checkpoint saved within an optimizer step to the start of that step.

    The step's gradients are not saved. `processed` counts a step's last micro-batch only after the optimizer's step.

    Args:
        checkpoint: changed in place.
        micro_batches_per_step: of the run that saved it.
        in_future: of the run that resumes from it; None is the same number.
    """
    if "loops" not in checkpoint:  # weights only
        return
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    current, total = progress["current"], progress["total"]
    steps, number = current["processed"] // micro_batches_per_step, in_future or micro_batches_per_step
    is_within = current["ready"] != steps * micro_batches_per_step
    before = (total["ready"] - current["ready"]) // micro_batches_per_step
    if is_within:
        progress["is_last_batch"] = False
    for counts, whole in ((current, steps), (total, before + steps)):
        lag = 0 if is_within else counts["ready"] - counts["completed"]  # saved at the end of the step's last one
        counts.update(dict.fromkeys(counts, whole * number))
        counts["completed"] -= lag
