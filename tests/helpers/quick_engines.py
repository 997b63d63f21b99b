"""An engine without a model that answers at once, or as it is told to; each replica has a seed of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import ClassVar

from lit_async_rl.engines.base import RolloutEngine
from lit_async_rl.types import Completion


class Quick(RolloutEngine):
    """Samples nothing but 5. What replicas do and what they were asked is kept in attributes of the class.

    Args:
        seed: tells replicas apart.
        update_timeout_s: after it a replica counts as hung.
        sleep_level: of a vLLM.
    """

    in_flight_weight_updates = True
    has_model = False
    dtype = "float32"
    num_slots = 8
    act: ClassVar[Callable[[int, str, object], None]] = lambda seed, what, given: None
    calls: ClassVar[list[tuple[int, str, object]]] = []
    last_id: ClassVar[int | None] = None  # token that ends each completion; None leaves that to its limit

    def __init__(self, seed: int = 0, update_timeout_s: float = 30.0, sleep_level: int = 0) -> None:
        self.seed = seed
        self.update_timeout_s = update_timeout_s
        self.sleep_level = sleep_level
        self.version = -1
        self.busy = 0.0
        self.tokens = 0
        self.requests = []
        self.lock = threading.Lock()

    @classmethod
    def reset(cls, act: Callable[[int, str, object], None] = lambda seed, what, given: None) -> None:
        cls.act = act
        cls.calls = []
        cls.last_id = None

    def note(self, what: str, given: object = None) -> None:
        Quick.calls.append((self.seed, what, given))
        Quick.act(self.seed, what, given)

    def setup(self, model):
        self.note("setup")

    @property
    def max_model_len(self):
        return 256

    @property
    def busy_s(self):
        return self.busy

    @property
    def num_tokens(self):
        return self.tokens

    def load_weights(self, version, weights):
        dict(weights)
        self.note("load_weights", version)
        self.version = version

    def submit(self, requests):
        for request in requests:
            self.note("submit", request)
        with self.lock:
            self.requests += requests

    def abort(self, request_ids):
        with self.lock:
            self.requests = [request for request in self.requests if request.id not in request_ids]

    def poll(self, timeout_s):
        with self.lock:
            taken = self.requests[:1]
            self.requests = self.requests[1:]
        if not taken:
            time.sleep(0.002)
            return []
        (request,) = taken
        self.note("poll", request)
        length = request.sampling.max_tokens
        self.tokens += length * request.num_samples
        return [
            Completion(
                request_id=request.id,
                sample_index=n,
                token_ids=(5,) * (length - (self.last_id is not None)) + (self.last_id,) * (self.last_id is not None),
                logprobs=(-1.0,) * length,
                versions=(self.version,) * length,
                finish_reason="length" if self.last_id is None else "stop",
            )
            for n in range(request.num_samples)
        ]

    def sleep(self):
        self.note("sleep")

    def close(self):
        pass
