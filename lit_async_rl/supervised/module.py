"""LightningModule of supervised fine-tuning: the cross-entropy of the next token, on the model that RL trains."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor

from lit_async_rl.distributed.ranks import data_parallel
from lit_async_rl.losses import Reinforce
from lit_async_rl.models.lora import LoRA
from lit_async_rl.models.packing import PrefixTreePacking
from lit_async_rl.models.policy import TokenStats
from lit_async_rl.models.sharding import Sharding
from lit_async_rl.training.module import PolicyModule
from lit_async_rl.training.optimizer import RateSchedule
from lit_async_rl.types import PromptBatch, RolloutBatch

LEARNING_RATE = 2e-5


class SFTModule(PolicyModule):
    """A causal language model that learns to write what records have.

    The loss is -log pi, averaged over the trained tokens of the whole optimizer step. Everything else is as in RL:
    weights, optimizer, schedules, sharding, checkpoints.

    Example:
        ```python
        import lit_async_rl as rl

        module = rl.SFTModule(rl.asset("sort_policy"), learning_rate=1e-4, packing=rl.PrefixTreePacking())
        ```

    Args:
        model: Hugging Face name or folder of a causal LM.
        learning_rate: peak of the schedule; None is that of `optimizer`, or 2e-5. `weight_decay`, `betas`: of AdamW.
        optimizer: as of `PolicyModule`, and so are the arguments from here on.
        scheduler: likewise.
        logprob_chunk_tokens: logits of at most this many tokens exist at a time.
        lora: train low-rank adapters instead of all weights.
        gradient_checkpointing: compute activations again in the backward pass instead of keeping them.
        torch_compile: as of `PolicyModule`.
        sharding: how sharding strategies divide the model, and when its weights are read.
        dtype: of the weights.
        attn_implementation: as in transformers; None is its default.
        random_init: take only the architecture from `model`, with random weights.
        packing: several rows in one without padding and without attention between them, `PrefixTreePacking()`.
        self_check: as of `PolicyModule`.
    """

    def __init__(
        self,
        model: str,
        learning_rate: float | None = None,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        optimizer: OptimizerCallable | None = None,
        scheduler: RateSchedule | LRSchedulerCallable | None = None,
        logprob_chunk_tokens: int = 4096,
        lora: LoRA | None = None,
        gradient_checkpointing: bool = False,
        torch_compile: bool = False,
        sharding: Sharding = Sharding(),  # noqa: B008  frozen
        dtype: str = "float32",
        attn_implementation: str | None = None,
        random_init: bool = False,
        packing: PrefixTreePacking | None = None,
        self_check: bool = True,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        rate = LEARNING_RATE if learning_rate is None and optimizer is None else learning_rate
        super().__init__(**(given | {"learning_rate": rate}), loss=Reinforce())
        self.given = given
        self._sums: list[Tensor] = []  # of the step's micro-batches: loss, trained tokens
        self._held_out: list[Tensor] = []  # of the validation's: loss, likeliest tokens, tokens

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> Tensor:
        """Loss of one micro-batch, scaled so that the gradients of a step sum to that of the mean over its tokens."""
        self.steps.guard.admit(batch, batch_idx, self.trainer.global_step, self.version)
        stats = self._stats(batch)
        loss = -(batch.token_weights * stats.logprobs).sum()
        self._sums.append(torch.stack([loss.detach(), batch.loss_mask.sum().to(loss.dtype)]))
        if batch.micro_batch + 1 == batch.num_micro_batches:
            mean, number = self._over_ranks(self._sums)
            self.log("train/loss", mean, prog_bar=True)
            self.log("train/tokens", number)
            self._sums = []
        return loss * self.trainer.accumulate_grad_batches * data_parallel(self.trainer)[0]

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Makes the step, and counts the version as a publication does in RL."""
        super().optimizer_step(*args, **kwargs)
        self.version += self.take_updated()

    def _stats(self, batch: RolloutBatch) -> TokenStats:
        stats: TokenStats = self.policy(
            batch.input_ids, batch.loss_mask, group_index=batch.group_index, needs_entropy=False
        )
        return stats

    def _over_ranks(self, parts: list[Tensor]) -> Tensor:
        """Sum of the parts on all data-parallel positions. A collective."""
        own = torch.stack(parts).sum(0)
        reduced: Any = self.trainer.strategy.reduce(own, reduce_op="mean")  # tensor-parallel ranks have the same
        return reduced * data_parallel(self.trainer)[0]

    # -- validation: loss and token accuracy of held-out records, and samples of held-out prompts ---------------------

    @property
    def _samples(self) -> bool:
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        return data.validation.source is not None

    def on_validation_epoch_start(self) -> None:
        self._held_out = [torch.zeros(3, device=self.device)]
        if self._samples:
            super().on_validation_epoch_start()

    def validation_step(self, batch: RolloutBatch | PromptBatch, batch_idx: int) -> None:
        if isinstance(batch, PromptBatch):
            super().validation_step(batch, batch_idx)
            return
        stats = self._stats(batch)
        found = (-stats.logprobs, stats.is_greedy, batch.loss_mask)
        self._held_out.append(torch.stack([value.sum().float() for value in found if value is not None]))

    def on_validation_epoch_end(self) -> None:
        """Logs the held-out loss and accuracy, and with prompts what a validation of RL logs."""
        loss, greedy, number = self._over_ranks(self._held_out)
        if number > 0:
            self.log_validation({"val/loss": loss / number, "val/token_accuracy": greedy / number})
        if self._samples:
            super().on_validation_epoch_end()
        self.note_validated()

    def on_test_epoch_start(self) -> None:
        self.on_validation_epoch_start()

    def test_step(self, batch: RolloutBatch | PromptBatch, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)
