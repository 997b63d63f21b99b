"""LightningModule of policy, loss and optimizer.

A micro-batch is a Lightning batch, an optimizer step a version of the policy. Optimization is automatic, so clipping,
precision, schedulers and all sharding strategies work as in any Lightning project.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, get_args

import lightning.pytorch as pl
import torch
import xxhash
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lit_async_rl import rules
from lit_async_rl.baselines.optimal import OptimalBaseline
from lit_async_rl.corrections import Correction
from lit_async_rl.corrections.weights import BehaviorProximal, Proximal
from lit_async_rl.distributed.ranks import data_parallel
from lit_async_rl.engines.base import default_bound
from lit_async_rl.losses import PolicyLoss, PPOClip
from lit_async_rl.losses.reference_kl import KLEstimator
from lit_async_rl.models.compilation import compile_blocks
from lit_async_rl.models.loading import adapter_folder, check_finite, has_adapter, is_on_meta, load_policy
from lit_async_rl.models.lora import LoRA, add_lora, alpha_of, without_adapters
from lit_async_rl.models.packing import PrefixTreePacking, SharedPromptPacking
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.models.routers import checkpoint_contexts
from lit_async_rl.models.self_check import check_policy, compute_dtype
from lit_async_rl.models.sharding import Sharding
from lit_async_rl.models.weights import is_sharded, is_wrapped, stream_weights, without_reference
from lit_async_rl.runtime.checkpoint_files import OF_POLICY, check_content
from lit_async_rl.runtime.files import expanded
from lit_async_rl.stabilizers.step_lr import group_settings, overflows
from lit_async_rl.training.checkpoint_io import check_checkpoint, check_is_one_file, check_same_model
from lit_async_rl.training.distillation import Distillation, Distiller
from lit_async_rl.training.end_check import check_end
from lit_async_rl.training.objective import Objective
from lit_async_rl.training.optimizer import (
    ConstantRate,
    RateSchedule,
    adopt_settings,
    bind_scheduler,
    check_constants,
    check_resumable,
    check_saved_groups,
    gradients,
    make_adamw,
    make_optimizer,
    scheduled_rate,
    warn_of_lost_updates,
)
from lit_async_rl.training.token_stats import Reference
from lit_async_rl.training.trackers import log_validation
from lit_async_rl.training.validation import Prediction, Validator
from lit_async_rl.training.whole_steps import WholeSteps
from lit_async_rl.types import PromptBatch, RolloutBatch
from lit_async_rl.utils.checks import check_choice, check_kinds, check_range
from lit_async_rl.utils.object_config import as_config, as_objects
from lit_async_rl.utils.saving import check_last_is_saved

# -- The policy that trains, and the frozen one of the KL penalty -----------------------------------------------------


log = logging.getLogger(__name__)
SETTINGS = "policy_settings"  # key of a checkpoint: the module's arguments, as far as plain values can hold them
CHECKPOINTING = {"use_reentrant": False, "context_fn": checkpoint_contexts}


def load_policies(
    model: str,
    logprob_chunk_tokens: int,
    packing: PrefixTreePacking | None,
    lora: LoRA | None,
    on_meta_device: bool,
    needs_reference: bool,
    gradient_checkpointing: bool,
    torch_compile: bool,
    **load: Any,
) -> tuple[CausalPolicy, CausalPolicy | None]:
    """Policy and reference; the latter is a frozen copy, or None if none is needed or only adapters train.

    Arguments are those of `PolicyModule`, but for `on_meta_device` (weights are loaded later, when they are sharded),
    `needs_reference` (there is a KL penalty) and further ones of `load_policy` in `load`.

    Raises:
        ValueError: weights that are not loaded would have to be on the meta device; or the model cannot be compiled.
    """
    random_init = bool(load.get("random_init"))
    rules.refuse(rules.of_weights(model, on_meta_device, random_init, lora=lora))
    continued = lora is not None and lora.continue_adapter
    adapter: Any = "leave_out" if continued else "merge"
    lm = load_policy(model, **load, device="meta" if on_meta_device else "cpu", adapter=adapter)
    if has_adapter(model) and not random_init:
        done = "is trained further" if continued else "is merged into the weights"
        flag = str(continued).lower()
        log.warning(
            "model.model=%r holds an adapter. This adapter %s, because model.lora.continue_adapter is %s",
            model,
            done,
            flag,
        )
    reference = None
    if needs_reference and (lora is None or lora.modules_to_save or continued):
        # a continued adapter cannot be switched off to get the policy that training began with
        start = load_policy(model, **load) if continued else copy.deepcopy(lm)
        reference = CausalPolicy(start, logprob_chunk_tokens, packing).requires_grad_(False)
    if gradient_checkpointing:
        lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING)
        lm.train()  # transformers checkpoints in this mode only; without dropout the two are the same
    adapted = lm if lora is None else add_lora(lm, lora, adapter_folder(model))
    if torch_compile:
        compile_blocks(lm)
    return CausalPolicy(adapted, logprob_chunk_tokens, packing), reference


# -- The weights in a checkpoint: what training changes, and the digest of the frozen base that adapters belong to


class SavedWeights:
    """Omits the reference, and the base of LoRA adapters, from a module's checkpoints.

    Sharded checkpoints keep them: these are loaded completely or not at all.

    Args:
        module: has the parts `policy` and `reference`.
        model: name of the base.
    """

    def __init__(self, module: torch.nn.Module, model: str) -> None:
        self._module = module
        self._model = model
        self._digest = ""

    def reduce(self, checkpoint: dict[str, Any], policy: CausalPolicy) -> None:
        """Drops frozen weights; notes the base of adapters."""
        if is_sharded(self._module):
            return
        checkpoint["state_dict"] = without_reference(checkpoint["state_dict"])
        if policy.has_adapters:
            checkpoint["state_dict"] = without_frozen(self._module, checkpoint["state_dict"])
            checkpoint["base"] = {"model": self._model, "digest": self.digest(policy), "alpha": alpha_of(policy)}

    def check(self, checkpoint: dict[str, Any], policy: CausalPolicy) -> None:
        """Refuses weights of another model, adapters of another base or scale, and values that are not finite.

        Drops a reference, which sharded policies save, where this run has none.

        Raises:
            ValueError: says which.
        """
        if "state_dict" not in checkpoint or is_wrapped(self._module):  # no rank has the shapes of FSDP1's weights
            return
        if "base" in checkpoint and policy.has_adapters:  # earlier checkpoints hold the base
            _check_base(checkpoint["base"], self._model, self.digest(policy), alpha=alpha_of(policy))
        saved = self.check_names(checkpoint, policy)
        check_finite(saved.items(), "the checkpoint")
        if getattr(self._module, "reference", None) is None:
            checkpoint["state_dict"] = saved

    def check_names(self, checkpoint: Mapping[str, Any], policy: CausalPolicy) -> dict[str, Tensor]:
        """The saved weights without a reference.

        Raises:
            ValueError: their names or shapes are those of another model.
        """
        saved = without_reference(checkpoint["state_dict"])
        own = without_reference(self._module.state_dict())
        if "base" in checkpoint and policy.has_adapters:
            own = without_frozen(self._module, own)
        check_same_model(saved, own)
        return saved

    def digest(self, policy: CausalPolicy) -> str:
        """XXH3 of names, dtypes, shapes and values of the frozen parameters; computed once. A collective if sharded."""
        if not self._digest:
            self._digest = _frozen_digest(policy)
        return self._digest


def without_frozen(module: torch.nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The part of a state dict that training changes."""
    frozen = {name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return {name: tensor for name, tensor in state.items() if name not in frozen}


@torch.no_grad()
def _frozen_digest(policy: CausalPolicy) -> str:
    digest = xxhash.xxh3_128()
    for name, parameter in sorted(policy.named_parameters()):
        if not parameter.requires_grad:
            digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            digest.update(whole.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _check_base(saved: Mapping[str, Any], model: str, digest: str, alpha: float) -> None:
    if saved["digest"] != digest:
        raise ValueError(
            f"the checkpoint's adapters belong to another model: model.model={saved['model']!r} had weights with the "
            f"digest {saved['digest'][:12]} when the checkpoint was saved, but model.model={model!r} now has weights "
            f"with the digest {digest[:12]}. Other values of model.dtype and model.lora.modules_to_save change the "
            "digest, too"
        )
    if saved.get("alpha", alpha) != alpha:  # earlier checkpoints do not say
        raise ValueError(
            f"model.lora.alpha is {alpha:g}, but was {saved['alpha']:g} when the checkpoint was saved: the saved "
            "adapters would be scaled differently than in training"
        )


class PolicyModule(pl.LightningModule):
    """A causal language model trained by policy gradient on rollouts of older versions of itself.

    Loss, averaging, correction and advantage are independent choices: loss and correction are made here, the others in
    `RolloutDataModule`, which knows the whole step.

    Example:
        ```python
        import lit_async_rl as rl

        module = rl.PolicyModule(
            rl.asset("sort_policy"),
            loss=rl.PPOClip(clip_low=0.2, clip_high=0.28),
            correction=rl.SequenceTruncatedIS(cap=8.0),
            proximal=rl.CurrentProximal(),
            learning_rate=5e-5,
        )
        ```

    Args:
        model: Hugging Face name or folder of a causal LM.
        loss: per-token loss; None is `PPOClip()`.
        proximal: proximal policy, the denominator of the loss's ratio; None is `BehaviorProximal()`.
        correction: importance weights between proximal and behavior policy; None is no correction.
        baseline: VCPO's off-policy optimal baseline in place of `data.advantage`; needs a loss without ratio.
        learning_rate: peak of the schedule; None is that of `optimizer`, or 1e-6. `weight_decay`, `betas`: of AdamW.
        optimizer: replaces AdamW: a class, a `functools.partial` of one (either takes `learning_rate` unless it has an
            `lr` of its own), or a function of the parameters.
        scheduler: `ConstantRate` (None), `Linear`, `Cosine`, `StableDecay` or `OneCycle`, with height `learning_rate`
            and length `trainer.max_steps`, or any of torch's, by optimizer step.
        kl_coefficient: weight of the penalty KL(policy || reference); 0 needs no reference. The reference is a frozen
            copy of the weights, or the policy without adapters where only these train.
        kl_estimator: `token`, `sequence` or `k3`, see `lit_async_rl.losses.reference_kl.reference_kl`.
        entropy_coefficient: weight of the entropy bonus; a negative one is a penalty on entropy.
        logprob_chunk_tokens: logits of at most this many tokens exist at a time.
        lora: train low-rank adapters instead of all weights.
        gradient_checkpointing: compute activations again in the backward pass instead of keeping them.
        torch_compile: compile the transformer blocks, in the first steps; changes rounding. Not with routed experts or
            tensor parallelism.
        sharding: how sharding strategies divide the policy, and when its weights are read.
        dtype: of the weights; float16 is for frozen weights, and needs `trainer.precision: 16-mixed`.
        attn_implementation: as in transformers; None is its default, or `eager` where that ignores a setting of the
            model (the soft cap of Gemma 2's attention).
        random_init: take only the architecture from `model`, with random weights.
        packing: compute the prefixes that rows of a group share only once, `PrefixTreePacking()`.
        self_check: before training, refuse an unsharded model that differs from plain (eager) forward passes on a few
            tokens.
        distillation: train on the divergence from a teacher, alone or beside the reward.

    Attributes:
        objective: loss, proximal policy, correction, baseline and penalties.
        version: number of weight publications so far; checkpointed.
        steps: checks that each step consists of its micro-batches, and aligns checkpoints with steps.
        validator: holds the samples of the last validation.
        given: the arguments above, as they were given, for the record of a run.
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
        torch_compile: bool = False,
        sharding: Sharding = Sharding(),  # noqa: B008  frozen
        dtype: str = "float32",
        attn_implementation: str | None = None,
        random_init: bool = False,
        packing: PrefixTreePacking | SharedPromptPacking | None = None,  # a parser takes no other subclass
        self_check: bool = True,
        distillation: Distillation | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__()
        self.given = given
        model = expanded(model)
        check_kinds("model", PolicyModule.__init__, given)
        check_range("model", "positive", learning_rate=learning_rate)
        check_range("model", ">= 0 and finite", weight_decay=weight_decay, kl_coefficient=kl_coefficient)
        check_range("model", "finite", entropy_coefficient=entropy_coefficient)
        check_choice("model", get_args(KLEstimator), kl_estimator=kl_estimator)
        self.objective = Objective(
            loss=loss or PPOClip(),
            proximal=proximal or BehaviorProximal(),
            correction=correction,
            baseline=baseline,
            kl_coefficient=kl_coefficient,
            entropy_coefficient=entropy_coefficient,
            kl_estimator=kl_estimator,
            distiller=None if distillation is None else Distiller(distillation),
        )
        rules.refuse(rules.of_compilation(torch_compile, baseline))
        check_range("model", "in [0, 1)", **dict(zip(("betas[0]", "betas[1]"), betas, strict=True)))
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.betas = tuple(betas)
        self.make_optimizer = optimizer
        self.scheduler = scheduler or ConstantRate()
        self.policy, reference = load_policies(
            model,
            logprob_chunk_tokens,
            packing,
            lora=lora,
            on_meta_device=sharding.meta_device,
            needs_reference=self.objective.needs_reference,
            gradient_checkpointing=gradient_checkpointing,
            torch_compile=torch_compile,
            dtype=dtype,
            attn_implementation=attn_implementation,
            random_init=random_init,
        )
        self.reference = reference  # behind the policy: Lightning finds an optimizer's states by their place
        self.strict_loading = reference is None and lora is None  # checkpoints lack it, and the base of adapters
        self.model = model
        self.sharding = sharding
        self.version = 0
        self._updated = False  # since `version` was published
        self.steps = WholeSteps()
        self.self_check = self_check
        self.stabilizer_signals: dict[str, Any] = {}
        self.saved_weights = SavedWeights(self, model)
        self.validator = Validator()
        self._validated: tuple[int, int] | None = None  # weights of the last validation within a fit
        self._gradient_scale = 1.0
        self._settings: list[dict[str, Any]] = []  # of the optimizer's parameter groups, as it was made
        self._is_compiled = torch_compile

    @property
    def wants_whole_groups(self) -> bool:
        """Whether all completions of a prompt must be in one micro-batch."""
        return self.objective.needs_whole_groups

    @property
    def is_changed(self) -> bool:
        """Whether the weights changed since their publication."""
        return self._updated

    def mark_updated(self) -> None:
        """Marks the weights as changed other than by the optimizer, to be published."""
        self._updated = True

    def take_updated(self) -> bool:
        """Whether the weights have changed since the last call."""
        updated = self._updated
        self._updated = False
        return updated

    # -- start and end of a fit ---------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Refuses contradictory rates and lengths, kernels that cannot train and norms that vanish."""
        if stage == "fit":
            self.steps.begin_fit(self.trainer)
            rules.refuse(rules.of_fit(self.trainer, self))
        if stage == "fit" or self.trainer.max_steps > 0:
            self.configure_optimizers()

    def configure_model(self) -> None:
        """Applies the sharding strategy to policy and reference, and loads deferred weights.

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
        if (distiller := self.objective.distiller) is not None:
            mesh = None if self.device_mesh is None else self.device_mesh["data_parallel"]
            distiller.open(self.policy, self.device, mesh)
        if self.self_check and not is_sharded(self.trainer.strategy.model or self):
            with self.trainer.precision_plugin.train_step_context():
                check_policy(self.policy, default_bound(compute_dtype(self.policy.causal_lm)))

    def on_train_start(self) -> None:
        if type(self).configure_optimizers is PolicyModule.configure_optimizers and self.trainer.ckpt_path:
            adopt_settings(self.trainer.optimizers[0], self._settings, self.scheduler)
        for optimizer in self.trainer.optimizers:
            check_constants(optimizer)
        check_end(self.trainer, self.policy, self.model)
        warn_of_lost_updates(self.policy.parameters(), float(self.trainer.optimizers[0].defaults.get("lr", 0.0)))

    def teardown(self, stage: str) -> None:
        """Ends a run that was not interrupted.

        Raises:
            LastCheckpointError: a full disk did not take the last checkpoint.
        """
        self.steps.end_fit()
        if self.objective.distiller is not None:
            self.objective.distiller.close()
        if stage == "fit":
            check_last_is_saved(self.trainer)

    # -- training -----------------------------------------------------------------------------------------------------

    def training_step(self, batch: RolloutBatch, batch_idx: int) -> Tensor:
        """Loss of one micro-batch, scaled so that the gradients of a step sum to that of its average."""
        self.steps.guard.admit(batch, batch_idx, self.trainer.global_step, self.version)
        reference: Reference | None = self.reference
        if self.objective.needs_reference and reference is None:
            reference = partial(without_adapters, self.policy)
        loss, self.stabilizer_signals = self.objective(self.policy, reference, batch, self.version)
        self._gradient_scale = batch.gradient_scale
        # Lightning divides by the number of micro-batches, data parallelism by that of ranks; token weights
        # account for neither
        return loss * self.trainer.accumulate_grad_batches * data_parallel(self.trainer)[0]

    def on_after_backward(self) -> None:
        """Rescales streamed gradients, whose average is known only now; before all that reads gradients.

        Runs after all callbacks.
        """
        if self._gradient_scale != 1.0:
            for optimizer in self.trainer.optimizers:
                for gradient in gradients(optimizer):
                    gradient.mul_(self._gradient_scale)
        self.steps.guard.accumulated()

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Backward pass that recomputes compiled blocks in the thread that compiled them.

        In another one, whose number of threads may differ, they would be compiled anew, and keep other tensors.
        """
        with torch.autograd.set_multithreading_enabled(False) if self._is_compiled else nullcontext():
            super().backward(loss, *args, **kwargs)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Raises if micro-batches of the step are missing; after all callbacks, which may drop the gradients."""
        self.steps.guard.check_whole()
        self._updated |= any(True for _ in gradients(optimizer)) and not overflows(self.trainer, optimizer)
        self.log("optim/lr", scheduled_rate(self.trainer, optimizer))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Makes the step, and frees the gradients: what is published and the next activations need memory, too.

        Lightning frees them after the next `training_step`, which is also too late for norms under FSDP1.
        """
        super().optimizer_step(*args, **kwargs)
        for optimizer in self.trainer.optimizers:
            optimizer.zero_grad()

    def on_train_batch_end(self, outputs: Any, batch: RolloutBatch, batch_idx: int) -> None:
        self.steps.end_update()

    def stream_weights(
        self, adapters: bool = False, known: dict[str, int] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Full weights under their Hugging Face names, one at a time; a collective if sharded.

        Args:
            adapters: leave LoRA unmerged, see `lit_async_rl.models.weights.stream_weights`.
            known: frozen weights that the receiver has, see there.
        """
        return stream_weights(self.policy, self.trainer.strategy.model, adapters, known=known)

    def configure_optimizers(self) -> Any:
        """The optimizer and its schedule, bound to this run.

        Raises:
            ValueError: optimizer or scheduler state another rate or length than `learning_rate` and `max_steps`.
        """
        # frozen ones, too (LoRA): torch finds an optimizer's state by the number of the parameter in the module
        parameters = list(self.policy.parameters())
        adamw = partial(
            make_adamw,
            trainer=self.trainer,
            lr=self.learning_rate,
            weight_decay=self.weight_decay,
            betas=self.betas,
        )
        optimizer = make_optimizer(self.make_optimizer or adamw, parameters, learning_rate=self.learning_rate)
        self._settings = group_settings(optimizer)  # before a schedule or a checkpoint changes them
        scheduler = bind_scheduler(self.scheduler, optimizer, self.learning_rate, max_steps=self.trainer.max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    # -- validation ---------------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        self.validator.begin(self)

    def validation_step(self, batch: PromptBatch, batch_idx: int) -> None:
        self.validator.step(self, batch)

    def on_validation_epoch_end(self) -> None:
        metrics = self.validator.compute()
        self.log_validation(metrics)
        if self.trainer.is_global_zero:
            data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
            rewards = [sample.reward for sample in self.validator.samples]
            data.held_out.watch(rewards, float(metrics["val/cut_share"]))
        self.validator.end()
        self.note_validated()

    def log_validation(self, metrics: Mapping[str, Tensor]) -> None:
        """Logs what a validation has measured."""
        is_within_fit = self.trainer.state.fn == "fit"
        # `Trainer.validate` returns what loggers get; True would warn where there are none
        self.log_dict(metrics, prog_bar=True, logger=False if is_within_fit else None)
        if is_within_fit and not self.trainer.sanity_checking:
            log_validation(self.trainer, {name: float(value) for name, value in metrics.items()})

    def note_validated(self) -> None:
        """Notes that the present weights were validated, see `is_validated`."""
        if self.trainer.state.fn == "fit" and not self.trainer.sanity_checking:
            self._validated = self._weights_now()

    def _weights_now(self) -> tuple[int, int]:
        """Number of steps, and torch's counters of changes of the weights, also by callbacks."""
        return self.trainer.global_step, sum(parameter._version for parameter in self.policy.parameters())

    @property
    def is_validated(self) -> bool:
        """Whether the present weights are those of the last validation within a fit."""
        return self._validated == self._weights_now()

    # -- test and prediction ------------------------------------------------------------------------------------------

    def on_test_epoch_start(self) -> None:
        self.validator.begin(self)

    def test_step(self, batch: PromptBatch, batch_idx: int) -> None:
        self.validator.step(self, batch)

    def on_test_epoch_end(self) -> None:
        """Logs what a validation logs, under `test/`; the samples are in `validator.samples`."""
        metrics = self.validator.compute()
        self.log_dict({f"test/{name.removeprefix('val/')}": value for name, value in metrics.items()})
        self.validator.end()

    def on_predict_epoch_start(self) -> None:
        self.validator.begin(self)

    def predict_step(self, batch: PromptBatch, batch_idx: int) -> list[Prediction]:
        """`data.validation.num_samples` completions of each prompt, sampled as in a validation, unscored."""
        return self.validator.predict(self, batch)

    def on_predict_epoch_end(self) -> None:
        self.validator.end()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: str | os.PathLike[str], map_location: Any = None, **settings: Any
    ) -> PolicyModule:
        """The module of a checkpoint, with its weights and settings.

        Nothing in the file is executed: settings are made of classes of this package and of `torch.optim` only.

        Example: `PolicyModule.load_from_checkpoint("runs/version_0/checkpoints/last.ckpt").policy`.

        Args:
            checkpoint_path: one file, not a folder of shards.
            map_location: device of the weights.
            **settings: of the constructor, in place of those in the checkpoint. What a checkpoint cannot hold
                (functions of a script, classes of other packages) has its default unless given.

        Raises:
            FileNotFoundError: there is no such checkpoint, or no longer the model that it was trained from.
            ValueError: it is refused, or has no settings (earlier versions) and `model` is not given.
        """
        path = os.path.expanduser(checkpoint_path)
        check_checkpoint(path)
        check_is_one_file(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        saved = checkpoint.get(SETTINGS, {"held": {}, "named": {}})
        left_out = [f"{name} ({text})" for name, text in saved["named"].items() if name not in settings]
        if left_out:
            log.warning(
                "the checkpoint %s lacks these settings, so their defaults are used: %s", path, ", ".join(left_out)
            )
        known = {name: value for name, value in saved["held"].items() if name not in settings}
        given = {**as_objects(known), **settings}
        if "betas" in given:
            given["betas"] = tuple(given["betas"])
        if "model" not in given:
            raise ValueError(f"{path} does not name the model it was trained from: pass model=...")
        module = cls(**given)
        module.on_load_checkpoint(checkpoint)
        module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading)
        return module if map_location is None else module.to(map_location)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds version and settings; drops frozen weights, see `SavedWeights`."""
        checkpoint["version"] = self.version
        checkpoint["updated"] = self._updated
        self.steps.save(checkpoint, self.trainer)
        held, named = as_config({"": self.given})
        checkpoint[SETTINGS] = {
            "held": held.get("", {}),
            "named": {name.removeprefix("."): text for name, text in named.items()},
        }
        self.saved_weights.reduce(checkpoint, self.policy)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        where = "the checkpoint" if self._trainer is None else f"ckpt_path={self.trainer.ckpt_path!r}"
        check_content(checkpoint, where, OF_POLICY)
        self.version = checkpoint["version"]
        self._updated = checkpoint["updated"]
        self.steps.load(checkpoint, self._trainer)
        if self._trainer is not None and self.trainer.state.fn == "fit":
            self.check_resumable(checkpoint)
        self.saved_weights.check(checkpoint, self.policy)

    def check_resumable(self, checkpoint: Mapping[str, Any]) -> None:
        """Checks that optimizer and schedule of this module can go on from a checkpoint; needs a trainer.

        Raises:
            ValueError: they are of another kind or length.
        """
        check_resumable(self.scheduler, checkpoint, self.trainer.max_steps)
        saved = [state["param_groups"] for state in checkpoint.get("optimizer_states", []) if "param_groups" in state]
        if saved and type(self).configure_optimizers is PolicyModule.configure_optimizers:
            optimizer = self.configure_optimizers()["optimizer"]
            check_saved_groups(optimizer, saved[0], self._settings)
