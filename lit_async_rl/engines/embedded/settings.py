"""Settings of decoding, checked when they are made, and sent as they are to an engine in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass

from lit_async_rl.utils.checks import MANY, check_device, check_dtype, check_range


@dataclass
class DecodeSettings:
    """The arguments of `EmbeddedEngine` that its decode loop reads, wherever that runs.

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
