"""Engines that fail as they are told, and what tests of failures look at."""

import time
from typing import ClassVar

import lightning.pytorch as pl
import torch

from lit_async_rl.engines.embedded.engine import EmbeddedEngine


class Watch(pl.Callback):
    """Which groups were trained on, and that each was within the bound."""

    def __init__(self) -> None:
        self.trained: list[int] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        for group in trainer.datamodule.last_step_groups:
            self.trained.append(group.index)
            oldest = min(min(rollout.versions) for rollout in group.rollouts)
            assert pl_module.stabilizer_signals["version"] - oldest <= trainer.datamodule.max_staleness


class FailingEngine(EmbeddedEngine):
    """Fails in one method when some tokens were sampled, as often as `failures` says, counted over all restarts."""

    where = "step"
    how = "crash"
    failures: ClassVar[list[int]] = [0]
    after = 100

    def _maybe_fail(self, where: str) -> None:
        if where == self.where and self.failures[0] > 0 and self.num_tokens > self.after:
            self.failures[0] -= 1
            if self.how == "hang":
                time.sleep(1e6)
            raise {"crash": KeyError("broken"), "out of memory": torch.OutOfMemoryError("CUDA out of memory.")}[
                self.how
            ]

    def __init__(self, **settings):
        super().__init__(**settings)
        step = self.engine.step

        def failing_step():
            self._maybe_fail("step")
            return step()

        self.engine.step = failing_step

    def poll(self, timeout_s):
        self._maybe_fail("poll")
        return super().poll(timeout_s)

    def submit(self, requests):
        self._maybe_fail("submit")
        super().submit(requests)

    def load_weights(self, version, weights):
        self._maybe_fail("load_weights")
        super().load_weights(version, weights)


def failing(where: str, how: str, times: int, after: int = 100, **changes) -> EmbeddedEngine:
    kind = type("FailingEngine", (FailingEngine,), {"where": where, "how": how, "failures": [times], "after": after})
    return kind(**{"update_timeout_s": 2.0, **changes})


def said(caplog, text: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]
