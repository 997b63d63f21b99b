"""A run whose log-ratios are split token by token beside the monitor, in one process or, as a script, in two.

python ratio_watch.py
"""

import math
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from flow import fit, make_data, make_module, parameters
from lightning.pytorch.strategies import DDPStrategy

from lit_async_rl.callbacks import EngineCheck, FreshDataMonitor
from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine

NAMES = ("ratio/discrepancy", "ratio/staleness")


class ShiftedEngine(EmbeddedEngine):
    """Says that tokens were less likely than they were, by their number: a discrepancy beyond rounding.

    Args:
        shift: nats for one step of the number, modulo four.
    """

    def __init__(self, shift: float = 0.03, **settings: Any) -> None:
        super().__init__(**settings)
        self.shift = shift

    def poll(self, timeout_s: float) -> list[Any]:
        return [
            replace(one, logprobs=tuple(p - self.shift * (token % 4) for p, token in zip(*pair, strict=True)))
            for one in super().poll(timeout_s)
            for pair in [(one.logprobs, one.token_ids)]
        ]


class Tokens(pl.Callback):
    """Log-ratio and freshness of every token, and the replayed log-ratios; stands before the monitor."""

    def __init__(self, check: EngineCheck) -> None:
        self.check = check
        self.trained: list[tuple[float, bool]] = []
        self.replayed: list[float] = []
        self.version = -1  # of the policy in this step; `WeightSync` may have published the next one at its end
        self.published = torch.empty(0)  # weights of that version
        self.is_current = False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.version != self.version:
            self.version = pl_module.version
            self.published = parameters(pl_module)
        self.is_current = torch.equal(self.published, parameters(pl_module))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        log_ratios = pl_module.stabilizer_signals["log_ratio"].tolist()
        for values, mask, versions in zip(log_ratios, batch.loss_mask.tolist(), batch.versions.tolist(), strict=True):
            is_fresh = self.is_current
            for value, counts, version in zip(values, mask, versions, strict=True):
                if counts:
                    is_fresh = is_fresh and version == self.version
                    self.trained.append((value, is_fresh))
        for log_ratio, _ in self.check.replayed:
            self.replayed += log_ratio.tolist()


class Compare(pl.Callback):
    """Compares what was logged at the end of a step; stands behind the monitor."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.weighted: list[list[float]] = []  # squares of the fresh tokens of each step that had some
        self.found: list[tuple[float, ...]] = []
        self.seen = {"fresh": 0, "stale": 0, "replayed": 0}
        self._step = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        trained = of_all_ranks(self.tokens.trained)
        replayed = of_all_ranks(self.tokens.replayed)
        self.tokens.trained = []
        self.tokens.replayed = []
        fresh = [value for value, is_fresh in trained if is_fresh]
        stale = [value for value, is_fresh in trained if not is_fresh]
        self.seen["fresh"] += len(fresh)
        self.seen["stale"] += len(stale)
        self.seen["replayed"] += len(replayed)
        if fresh or replayed:
            self.weighted.append([value**2 for value in fresh + replayed])
        if not self.weighted:
            assert not set(NAMES) & set(trainer.callback_metrics)
            return
        expected = self.expected(stale, len(trained))
        self.found.append(tuple(float(trainer.callback_metrics[name]) for name in NAMES))
        for value, other, name in zip(self.found[-1], expected, NAMES, strict=True):
            assert math.isclose(value, other, rel_tol=1e-4, abs_tol=1e-6), (self._step, name, value, other)

    def expected(self, stale: list[float], number: int) -> tuple[float, float]:
        """Every step's fresh tokens weigh 0.9 times those of the next step that had some."""
        squares = weight = 0.0
        for age, found in enumerate(reversed(self.weighted)):
            squares += 0.9**age * math.fsum(found)
            weight += 0.9**age * len(found)
        discrepancy = squares / weight
        beyond = math.fsum(value**2 - discrepancy for value in stale) / number
        return math.sqrt(discrepancy), math.sqrt(max(0.0, beyond))


def of_all_ranks(values: list[Any]) -> list[Any]:
    if not dist.is_initialized():
        return values
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, values)
    return [value for one in everybody for value in one]


def watched(in_flight: bool, max_steps: int = 6, trainer: dict[str, Any] | None = None, **data: Any) -> Compare:
    """A run of steps in two micro-batches, each of which was compared."""
    check = EngineCheck(num_rollouts=100, bound=10.0)
    tokens = Tokens(check)
    compare = Compare(tokens)
    source = make_data(
        engine=ShiftedEngine(in_flight_weight_updates=in_flight, seed=1),
        sampling=SamplingParams(max_tokens=8),
        micro_batches_per_step=2,
        **(dict(max_staleness=2) | data),
    )
    callbacks = [check, tokens, FreshDataMonitor(), compare]
    fit(make_module(), source, max_steps, callbacks=callbacks, **(trainer or {}))
    assert len(compare.found) == max_steps, "the first step is fresh"
    return compare


if __name__ == "__main__":
    for in_flight in (True, False):
        ranks = dict(strategy=DDPStrategy(process_group_backend="gloo"), devices=2)
        seen = watched(in_flight, trainer=ranks).seen
        assert min(seen["fresh"], seen["stale"]) > 0, seen
