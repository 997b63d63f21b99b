"""Settings of decoding, and the base class of the engines that follow them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lit_async_rl.engines.base import RolloutEngine, check_request, set_up
from lit_async_rl.errors import SetupError
from lit_async_rl.types import GenerationRequest
from lit_async_rl.utils.checks import MANY, check_device, check_dtype, check_range


@dataclass
class DecodeSettings:
    """Arguments of `EmbeddedEngine` that its decode loop reads; checked on creation.

    Raises:
        ValueError: a setting is out of range.
    """

    num_slots: int
    seed: int
    in_flight_weight_updates: bool
    device: str
    dtype: str
    num_threads: int | None
    max_model_len: int | None
    update_timeout_s: float
    self_check: bool
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        check_range("data.engine", "integer >= 1", num_slots=self.num_slots, num_threads=self.num_threads)
        check_range("data.engine", f"<= {MANY}", num_slots=self.num_slots, num_threads=self.num_threads)
        check_range("data.engine", "integer >= 2", max_model_len=self.max_model_len)
        check_range("data.engine", "positive", update_timeout_s=self.update_timeout_s)
        check_device("data.engine.device", self.device)
        check_dtype("data.engine.dtype", self.dtype)
        check_range("data.engine", "integer", seed=self.seed)


class Decoder(RolloutEngine):
    """Base class of the engines behind `EmbeddedEngine`: the decode loop, and that in a child process."""

    records_heads = True
    records_entropy = True
    records_experts = True
    records_spans = True
    takes_changes = True
    busy_s = 0.0
    num_tokens = 0

    def __init__(self, settings: DecodeSettings) -> None:
        self.settings = settings
        self.in_flight_weight_updates = settings.in_flight_weight_updates
        self.dtype = settings.dtype
        self.update_timeout_s = settings.update_timeout_s
        self.self_check = settings.self_check
        self._max_model_len = settings.max_model_len  # `setup` replaces None by the model's limit
        self._vocab_size = 0  # set by `setup`
        self._has_weights = False
        self._closed = False

    @property
    def num_slots(self) -> int:  # type: ignore[override]
        return self.settings.num_slots

    @property
    def max_model_len(self) -> int:
        return set_up(self._max_model_len)

    def _check(self, requests: Sequence[GenerationRequest]) -> None:
        """Refuses requests before the first weights, and those that can never be served."""
        if not self._has_weights:
            raise SetupError("the engine was used before load_weights")
        for request in requests:
            check_request(request, self.max_model_len, self._vocab_size)

    @property
    def _update_limit(self) -> str:
        return f"data.engine.update_timeout_s={self.update_timeout_s:g}"
