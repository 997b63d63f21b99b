"""Publishes the trained weights to the engine, counts versions, and links module, data module and trainer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl

from lit_async_rl import rules
from lit_async_rl.callbacks.parts import callbacks_of, policy_module, rollout_data
from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.models.loading import check_vocabulary
from lit_async_rl.models.routers import check_routers
from lit_async_rl.runtime.spans import TRAINER, recorder
from lit_async_rl.training.module import PolicyModule
from lit_async_rl.training.probe import make_probe
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer


class WeightSync(pl.Callback):
    """Publishes the policy every `data.weight_sync_steps` optimizer steps.

    It publishes weights, and increments the version, only if they changed: if every update since the last publication
    was skipped (for example by `GradientAlignmentControl`), the engine keeps its weights. Admission advances either
    way. Logs `perf/weight_sync_s`, the seconds that the trainer spent publishing.

    Before training it copies settings, so that each is given once: `data.model` is by default the module's,
    `accumulate_grad_batches` is `data.micro_batches_per_step`, and groups stay whole if the loss or baseline needs it.
    The tokenizer must fit the model.

    Attributes:
        weight_sync_steps: optimizer steps between publications, from the data module.
        total_s: seconds spent publishing since training began.
        held_s: further seconds in which publications waited for the slowest of several replicas.

    Raises:
        ValueError: settings of module, data module and trainer contradict each other.
    """

    def __init__(self) -> None:
        self.weight_sync_steps = 1
        self.total_s = 0.0
        self.held_s = 0.0
        self._published_step: int | None = None  # None before training
        self._steps_before = 0  # of a resumed run: steps from the last publication to the checkpoint
        self._published_weights: dict[str, int] = {}  # frozen weights that the engine has already

    def setup(self, trainer: AnyTrainer, pl_module: AnyModule, stage: str) -> None:
        if len(callbacks_of(trainer, WeightSync)) > 1:
            raise ValueError(
                "trainer.callbacks holds several WeightSync callbacks, and each would start the engine: keep one"
            )
        module = policy_module(pl_module, "WeightSync")
        data = rollout_data(trainer, "WeightSync")
        self.link(trainer, module, data)
        self.weight_sync_steps = data.weight_sync_steps
        if stage == "fit":  # the callback may have been used in an earlier fit
            self._published_step = None
            self._steps_before = 0

    def link(self, trainer: AnyTrainer, module: PolicyModule, data: RolloutDataModule) -> None:
        """Copies settings that module, data module and trainer share.

        Raises:
            ValueError: two of them contradict each other.
        """
        data.use_model(module.model)
        rules.refuse(rules.of_run(trainer, module, data))
        if module.objective.distiller is not None:
            module.objective.distiller.check(module.policy, module.model)
        vocab_size = module.policy.causal_lm.config.get_text_config().vocab_size
        check_vocabulary(data.codec.tokenizer, vocab_size, module.model)
        if data.sampling.experts:
            check_routers(module.policy.causal_lm)
        data.keep_groups_whole = module.wants_whole_groups
        data.tree_costs = module.policy.tree_costs
        data.needs_single_rows = module.objective.needs_single_rows
        data.source_of = module.objective.source_of
        trainer.accumulate_grad_batches = data.micro_batches_per_step

    def on_fit_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Checks that the run ends."""
        rules.refuse(rules.of_length(trainer))

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Loads the current (possibly resumed) weights before the first prompt is sampled."""
        module = policy_module(pl_module, "WeightSync")
        data = rollout_data(trainer, "WeightSync")
        self._published_step = trainer.global_step - self._steps_before
        self.total_s = 0.0
        self.held_s = 0.0
        self._published_weights = {}
        self._publish(module, data, is_first=True)
        stream = partial(module.stream_weights, adapters=data.engine.takes_adapters)
        data.feed.start(
            module.version,
            trainer.global_step,
            stream,
            should_stop=lambda: data.is_asked_to_stop,
            make_probe=partial(make_probe, module),
        )
        self._sync_if_due(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: AnyTrainer, pl_module: AnyModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (seconds := self._sync_if_due(trainer, pl_module)) is not None:
            pl_module.log("perf/weight_sync_s", seconds)

    def _sync_if_due(self, trainer: AnyTrainer, pl_module: AnyModule) -> float | None:
        if self._steps_since(trainer) < self.weight_sync_steps:
            return None
        self._published_step = trainer.global_step
        module = policy_module(pl_module, "WeightSync")
        data = rollout_data(trainer, "WeightSync")
        began = time.monotonic()
        held_before = data.engine.held_s
        # over all ranks, because one may hold a shard without gradients, and publishing is a collective
        if data.feed.ranks.any(module.take_updated()):
            module.version += 1
            self._publish(module, data)
        elif data.engine.sleep_level == 2 and data.feed.ranks.any(data.engine.needs_weights):
            self._publish(module, data)  # the same weights again: sleep level 2 dropped the engine's copy
        # after the publication: slots returned earlier would admit groups that the old weights sample
        data.feed.advance(module.version)
        held_s = data.engine.held_s - held_before
        seconds = time.monotonic() - began - held_s
        self.held_s += held_s
        self.total_s += seconds
        lane = recorder().lane(TRAINER)
        if held_s:
            lane.add("wait", began, held_s)
        lane.add("publish", began + held_s, seconds, ("publish", module.version), version=module.version)
        return seconds

    def _publish(self, module: PolicyModule, data: RolloutDataModule, is_first: bool = False) -> None:
        # later ones are computed when they are asked for, which is too late if the weights are newer by then
        if data.engine.uses_probe and (is_first or self.weight_sync_steps > 1):
            data.engine.probe = make_probe(module)
        known = self._published_weights if data.engine.takes_changes else None
        data.feed.publish(module.version, module.stream_weights(data.engine.takes_adapters, known))

    def on_exception(self, trainer: AnyTrainer, pl_module: AnyModule, exception: BaseException) -> None:
        """Ends the teacher: Lightning does not call the module's `teardown` after an exception."""
        if isinstance(pl_module, PolicyModule) and pl_module.objective.distiller is not None:
            pl_module.objective.distiller.close()

    def on_save_checkpoint(self, trainer: AnyTrainer, pl_module: AnyModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["steps_since_publication"] = self._steps_since(trainer)

    def on_load_checkpoint(self, trainer: AnyTrainer, pl_module: AnyModule, checkpoint: dict[str, Any]) -> None:
        """Restores the count of steps, and the data module's state if its class was renamed."""
        self._steps_before = checkpoint["steps_since_publication"]
        if trainer.state.fn == "validate":  # of a checkpoint, to be resumed: log at its step, not at step 0
            trainer.fit_loop.epoch_loop._batches_that_stepped = checkpoint["global_step"]
        if trainer.state.fn == "fit":
            restore_renamed(rollout_data(trainer, "WeightSync"), checkpoint)

    def _steps_since(self, trainer: AnyTrainer) -> int:
        return self._steps_before if self._published_step is None else trainer.global_step - self._published_step


def restore_renamed(data: RolloutDataModule, checkpoint: Mapping[str, Any]) -> None:
    """Restores the data module's state from a checkpoint that was saved under another class name.

    Raises:
        ValueError: see `RolloutDataModule.saved_state`.
    """
    if type(data).__qualname__ not in checkpoint and (state := data.saved_state(checkpoint)) is not None:
        data.load_state_dict(state)  # else Lightning has restored it
