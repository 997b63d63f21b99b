"""LightningModule of the policy, its loss and its optimizer.

A micro-batch is a Lightning batch, an optimizer step a version of the policy. Optimization is automatic, so clipping,
precision, schedulers and all sharding strategies work as in any Lightning project.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor
from torch.optim import Optimizer

from lit_async_rl.baselines.optimal import OptimalBaseline
from lit_async_rl.corrections import Correction
from lit_async_rl.corrections.proximal import BehaviorProximal, Proximal
from lit_async_rl.distributed.ranks import data_parallel
from lit_async_rl.engines.logprob_error import default_bound
from lit_async_rl.losses import PolicyLoss, PPOClip
from lit_async_rl.losses.reference_kl import KLEstimator, check_estimator
from lit_async_rl.models.lora import LoRA, without_adapters
from lit_async_rl.models.meta_loading import is_on_meta
from lit_async_rl.models.packing import SharedPromptPacking
from lit_async_rl.models.self_check import check_policy, compute_dtype
from lit_async_rl.models.sharding import Sharding
from lit_async_rl.models.weights import is_sharded, stream_weights
from lit_async_rl.training.compatibility import check_baseline, check_norms, check_trainable_attention
from lit_async_rl.training.end_check import check_end
from lit_async_rl.training.objective import Objective, Reference
from lit_async_rl.training.optimizer import (
    adopt_settings,
    check_constants,
    check_trained_dtypes,
    gradients,
    make_adamw,
    make_optimizer,
    warn_of_lost_updates,
)
from lit_async_rl.training.policies import load_policies
from lit_async_rl.training.saved_weights import SavedWeights
from lit_async_rl.training.scheduler import bind_scheduler, check_resumable, scheduled_rate
from lit_async_rl.training.schedules import ConstantRate, RateSchedule
from lit_async_rl.training.trackers import log_validation
from lit_async_rl.training.validation import Validator
from lit_async_rl.training.whole_steps import WholeSteps
from lit_async_rl.types import PromptBatch, RolloutBatch
from lit_async_rl.utils.checks import check_objects, check_range

log = logging.getLogger(__name__)


class PolicyModule(WholeSteps):
    """A causal language model trained by policy gradient on rollouts of older versions of itself.

    Loss, averaging, correction and advantage are four independent choices; the first and third are made here, the
    others in `RolloutDataModule`, where the whole step is known.

    Args:
        model: Hugging Face name or folder of a causal LM.
        loss: per-token loss; None is `PPOClip()`.
        proximal: proximal policy, the denominator of the loss's ratio; None is `BehaviorProximal()`.
        correction: importance weights between proximal and behavior policy; None is no correction.
        baseline: VCPO's off-policy optimal baseline in place of `data.advantage`; needs a loss without ratio.
        learning_rate: peak of the schedule; None is that of `optimizer`, or 1e-6. `weight_decay`, `betas`: of AdamW.
        optimizer: another optimizer than AdamW.
        scheduler: `ConstantRate` (None), `Linear`, `Cosine`, `StableDecay` or `OneCycle`, whose height and length are
            those of `learning_rate` and `trainer.max_steps`, or any of torch's, by optimizer step.
        kl_coefficient: weight of the penalty KL(policy || reference); 0 needs no reference. The reference is a frozen
            copy of the weights, or the policy without its adapters where nothing else trains.
        kl_estimator: `token`, `sequence` or `k3`, see `lit_async_rl.losses.reference_kl.reference_kl`.
        entropy_coefficient: weight of the entropy bonus; a negative one is a penalty on entropy.
        logprob_chunk_tokens: logits of at most this many tokens exist at a time.
        lora: train low-rank adapters instead of all weights.
        gradient_checkpointing: compute activations again in the backward pass instead of keeping them.
        sharding: how sharding strategies divide the policy, and when its weights are read.
        dtype: of the weights; float16 is for weights that do not train, and needs `trainer.precision: 16-mixed`.
        attn_implementation: as in transformers; None is its default, or `eager` where that ignores a setting of the
            model's configuration (the soft cap of Gemma 2's attention).
        random_init: take only the architecture from `model`, with random weights.
        packing: compute what the completions of one prompt share only once, `SharedPromptPacking()`.
        self_check: refuse an unsharded model of which a few tokens differ from plain (eager) forward passes, before
            training.

    Attributes:
        objective: loss, proximal policy, correction, baseline and penalties.
        version: number of weight publications so far; checkpointed.
        validator: holds the samples of the last validation.
        given: the arguments above, as they were given; what a run writes down of itself.
        stabilizer_signals: what callbacks may read after every `training_step`, see `lit_async_rl.stabilizers.signals`.
    """

    def __init__(
        self,
        model: str,
        loss: PolicyLoss | None = None,
        proximal: Proximal | None = None,
        correction: Correction | None = None,
        baseline: OptimalBaseline | None = None,
        learning_rate: float | None = None,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        optimizer: OptimizerCallable | None = None,
        scheduler: RateSchedule | LRSchedulerCallable | None = None,
        kl_coefficient: float = 0.0,
        kl_estimator: KLEstimator = "token",
        entropy_coefficient: float = 0.0,
        logprob_chunk_tokens: int = 4096,
        lora: LoRA | None = None,
        gradient_checkpointing: bool = False,
        sharding: Sharding = Sharding(),  # noqa: B008  frozen
        dtype: str = "float32",
        attn_implementation: str | None = None,
        random_init: bool = False,
        packing: SharedPromptPacking | None = None,
        self_check: bool = True,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__()
        self.given = given
        check_objects("model", loss=loss, proximal=proximal, correction=correction, baseline=baseline)
        check_objects("model", lora=lora, sharding=sharding, packing=packing)
        check_range("model", "positive", learning_rate=learning_rate)
        check_range("model", ">= 0 and finite", weight_decay=weight_decay, kl_coefficient=kl_coefficient)
        check_range("model", "finite", entropy_coefficient=entropy_coefficient)
        check_estimator(kl_estimator)
        chosen = loss or PPOClip(), proximal or BehaviorProximal(), correction, baseline
        self.objective = Objective(*chosen, kl_coefficient, entropy_coefficient, kl_estimator)
        check_baseline(self.objective.loss, baseline)
        check_range("model", "in [0, 1)", **dict(zip(("betas[0]", "betas[1]"), betas, strict=True)))
        self.learning_rate, self.weight_decay, self.betas = learning_rate, weight_decay, tuple(betas)
        self.make_optimizer, self.scheduler = optimizer, scheduler or ConstantRate()
        load: dict[str, Any] = dict(dtype=dtype, attn_implementation=attn_implementation, random_init=random_init)
        ours = sharding.meta_device, self.objective.needs_reference, gradient_checkpointing
        self.policy, reference = load_policies(model, logprob_chunk_tokens, packing, lora, *ours, **load)
        self.reference = reference  # behind the policy: Lightning finds an optimizer's states by their place
        self.strict_loading = reference is None and lora is None  # checkpoints lack it, and the base of adapters
        self.model, self.sharding, self.version, self.self_check = model, sharding, 0, self_check
        self.stabilizer_signals: dict[str, Any] = {}
        self.saved_weights, self.validator, self._gradient_scale = SavedWeights(self, model), Validator(), 1.0

    @property
    def wants_whole_groups(self) -> bool:
        """Whether all completions of a prompt must be in one micro-batch."""
        return self.objective.needs_whole_groups or self.policy.packing is not None

    def setup(self, stage: str) -> None:
        """Refuses rates and lengths that contradict each other, kernels that cannot train and norms that vanish."""
        super().setup(stage)
        if stage == "fit":
            check_trainable_attention(self.policy.causal_lm, self.trainer.strategy.root_device)
            check_norms(self.objective.baseline, str(self.trainer.precision))
            check_trained_dtypes(self.policy.parameters(), self.trainer)
        if stage == "fit" or self.trainer.max_steps > 0:
            self.configure_optimizers()

    def configure_model(self) -> None:
        """Applies the sharding strategy to policy and reference; loads weights whose loading was deferred.

        Raises:
            ValueError: `sharding.meta_device` under FSDP1 with a baseline whose norms read weights.
        """
        if self._trainer is not None and self._reads_weights and self.device_mesh is None:  # an export has none
            # its norms need the head after the forward pass, where FSDP1 has given the policy's weights back; if the
            # strategy wraps the whole module instead, they are there until the end of `training_step`
            if is_on_meta(self.policy):
                raise ValueError("model.sharding.meta_device=true with model.baseline needs FSDP2 (configs/strategies)")
            return
        self.policy = self.sharding.divide(self.policy, self.device_mesh, self.model)
        if self.reference is not None:
            self.reference = self.sharding.divide(self.reference, self.device_mesh, self.model)

    @property
    def _reads_weights(self) -> bool:
        """Whether the baseline needs the policy's weights after the forward pass."""
        return self.objective.baseline is not None and self.objective.baseline.reads_weights

    def on_fit_start(self) -> None:
        if self.self_check and not is_sharded(self.trainer.strategy.model or self):
            with self.trainer.precision_plugin.train_step_context():
                check_policy(self.policy, default_bound(compute_dtype(self.policy.causal_lm)))

    def on_train_start(self) -> None:
        if self.objective.kl_coefficient > 0 and self.objective.kl_estimator == "token" and self.trainer.is_global_zero:
            log.warning(
                "model.kl_coefficient=%g: the gradient of the penalty is that of KL(policy || reference), with "
                "importance weights for stale tokens. model.kl_estimator: k3 is the former penalty, whose gradient is "
                "that of KL(reference || policy), without weights",
                self.objective.kl_coefficient,
            )
        if type(self).configure_optimizers is PolicyModule.configure_optimizers:
            adopt_settings(self.trainer.optimizers[0], self.scheduler)
        for optimizer in self.trainer.optimizers:
            check_constants(optimizer)
        check_end(self.trainer, self.policy, self.model)
        warn_of_lost_updates(self.policy.parameters(), float(self.trainer.optimizers[0].defaults.get("lr", 0.0)))

    # -- training -----------------------------------------------------------------------------------------------------

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> Tensor:
        """Loss of one micro-batch, scaled so that the gradients of a step sum to that of its average."""
        self.guard.admit(batch, batch_idx, self.trainer.global_step, self.version)
        reference: Reference | None = self.reference
        if self.objective.needs_reference and reference is None:
            reference = partial(without_adapters, self.policy)
        loss, self.stabilizer_signals = self.objective(self.policy, reference, batch, self.version)
        self._gradient_scale = batch.gradient_scale
        # Lightning divides by the number of micro-batches, data parallelism by that of ranks; token weights
        # account for neither
        return loss * self.trainer.accumulate_grad_batches * data_parallel(self.trainer)[0]

    def on_after_backward(self) -> None:
        """Rescales streamed gradients, whose average is known only now; before all that reads gradients."""
        if self._gradient_scale != 1.0:
            for optimizer in self.trainer.optimizers:
                for gradient in gradients(optimizer):
                    gradient.mul_(self._gradient_scale)
        super().on_after_backward()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        self.log("optim/lr", scheduled_rate(self.trainer, optimizer))

    def stream_weights(
        self, adapters: bool = False, known: dict[str, int] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Full weights under their Hugging Face names, one at a time; a collective if sharded.

        Args:
            adapters: LoRA is not merged, see `lit_async_rl.models.weights.stream_weights`.
            known: frozen weights that the receiver has and that do not travel, see there.
        """
        return stream_weights(self.policy, self.trainer.strategy.model, adapters, known)

    def configure_optimizers(self) -> Any:
        """AdamW unless another was given, and the schedule, bound to this run.

        Raises:
            ValueError: optimizer or scheduler state another rate or length than `learning_rate` and `max_steps`.
        """
        # frozen ones, too (LoRA): torch finds an optimizer's state by the number of the parameter in the module
        parameters = list(self.policy.parameters())
        settings: dict[str, Any] = dict(lr=self.learning_rate, weight_decay=self.weight_decay, betas=self.betas)
        adamw = partial(make_adamw, trainer=self.trainer, **settings)
        optimizer = make_optimizer(self.make_optimizer or adamw, parameters)
        scheduler = bind_scheduler(self.scheduler, optimizer, self.learning_rate, self.trainer.max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    # -- validation ---------------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        self.validator.begin(self)

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        self.validator.step(self, batch)

    def on_validation_epoch_end(self) -> None:
        metrics = self.validator.compute()
        is_within_fit = self.trainer.state.fn == "fit"
        # `Trainer.validate` returns what loggers get; True would warn where there are none
        self.log_dict(metrics, prog_bar=True, logger=False if is_within_fit else None)
        if is_within_fit and not self.trainer.sanity_checking:
            log_validation(self.trainer, {name: float(value) for name, value in metrics.items()})
        if self.trainer.is_global_zero:
            data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
            data.held_out.watch(sample.reward for sample in self.validator.samples)
        self.validator.end()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the version; drops the frozen reference and the base of adapters, see `SavedWeights`."""
        checkpoint["version"] = self.version
        super().on_save_checkpoint(checkpoint)
        self.saved_weights.reduce(checkpoint, self.policy)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.version = checkpoint["version"]
        super().on_load_checkpoint(checkpoint)
        if self._trainer is not None and self.trainer.state.fn == "fit":
            check_resumable(self.scheduler, checkpoint, self.trainer.max_steps)
        self.saved_weights.check(checkpoint, self.policy)
