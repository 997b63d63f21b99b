"""Base class of engines around another engine."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from lit_async_rl.engines.base import RolloutEngine, SamplingParams
from lit_async_rl.utils.spans import Spans
from lit_async_rl.utils.tries import Work


class EngineWrapper(RolloutEngine):
    """Has the settings and abilities of the engine that it wraps, and hands on whatever a subclass does not change.

    Requests, partial completions and the random state are the subclass's own.

    Args:
        engine: the inner one, not set up.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self.records_heads, self.records_entropy = engine.records_heads, engine.records_entropy
        self.records_experts = engine.records_experts
        self.startup_timeout_s, self.update_timeout_s = engine.startup_timeout_s, engine.update_timeout_s
        self.takes_adapters, self.takes_changes = engine.takes_adapters, engine.takes_changes
        self.sleep_level, self.self_check = engine.sleep_level, engine.self_check
        self.has_model, self.uses_probe, self.dtype = engine.has_model, engine.uses_probe, engine.dtype

    def check_sampling(self, setting: str, sampling: SamplingParams, num_samples: int) -> None:
        self.engine.check_sampling(setting, sampling, num_samples)

    def setup(self, model: str) -> None:
        self.engine.setup(model)
        self.dtype = self.engine.dtype

    @property
    def is_used(self) -> bool:  # type: ignore[override]
        return self.engine.is_used

    @is_used.setter
    def is_used(self, is_used: bool) -> None:
        self.engine.is_used = is_used

    @property
    def scoring_identity(self) -> str | None:
        return self.engine.scoring_identity

    @property
    def num_slots(self) -> int:  # type: ignore[override]
        return self.engine.num_slots

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len

    @property
    def busy_s(self) -> float:
        return self.engine.busy_s

    @property
    def num_tokens(self) -> int:
        return self.engine.num_tokens

    @property
    def num_running(self) -> int | None:
        return self.engine.num_running

    @property
    def needs_weights(self) -> bool:  # type: ignore[override]
        return self.engine.needs_weights

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.engine.probe = self.probe
        self.engine.load_weights(version, weights)

    def take_given_up(self) -> list[int]:
        return self.engine.take_given_up()

    def outside_work(self) -> Work | None:
        return self.engine.outside_work()

    def end(self) -> None:
        self.engine.end()

    def sleep(self) -> None:
        self.engine.sleep()

    def observe(self, spans: Spans) -> bool:
        return self.engine.observe(spans)

    def close(self) -> None:
        self.engine.close()
