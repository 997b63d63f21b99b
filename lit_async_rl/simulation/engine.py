"""Simulated engine: slots are occupied for random times, without model or computation.

The gain from asynchrony depends on the distribution of completion times. Here that is a setting, and any machine can
measure the gain, because waiting needs no cores.
"""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from lit_async_rl.engines.base import RolloutEngine
from lit_async_rl.simulation.latency import Latency
from lit_async_rl.types import Completion, FinishReason, GenerationRequest
from lit_async_rl.utils.checks import MANY, check_range


@dataclass(frozen=True)
class _Sample:
    begin: float
    end: float  # when the sample leaves its slot
    completion: Completion


def _partial(sample: _Sample, now: float) -> Completion:
    """Part of a sample in proportion to the elapsed time."""
    whole = sample.completion
    length = int(min(1.0, (now - sample.begin) / (sample.end - sample.begin)) * len(whole.token_ids))
    return replace(
        whole,
        finish_reason="abort",
        token_ids=whole.token_ids[:length],
        logprobs=whole.logprobs[:length],
        versions=whole.versions[:length],
    )


class SimulatedEngine(RolloutEngine):
    """Engine with `num_slots` slots in FIFO order; a sample repeats the last token of its prompt.

    Tokens have the newest version at submission, the oldest that `RolloutEngine` allows. Stop strings are ignored: the
    latency determines a sample's length.

    Args:
        latency: seconds that a sample occupies a slot.
        num_slots: samples generated concurrently.
        environment: further seconds until a sample is returned (tools, a sandbox), outside of its slot; None is 0.
        in_flight_weight_updates: False: the requests of one `submit` start only when all earlier ones are finished.
        load_s: seconds of a weight update.
        tokens_per_s: tokens of a sample per second of its latency, at most `sampling.max_tokens`.
        finish_reason: finish reason of all samples; `stop` lets an environment respond.
        seed: of the latencies.
    """

    has_model = False

    def __init__(
        self,
        latency: Latency,
        num_slots: int = 64,
        environment: Latency | None = None,
        in_flight_weight_updates: bool = True,
        load_s: float = 0.0,
        tokens_per_s: float = 100.0,
        finish_reason: FinishReason = "length",
        seed: int = 0,
    ) -> None:
        check_range("data.engine", "integer >= 1", num_slots=num_slots)
        check_range("data.engine", f"<= {MANY}", num_slots=num_slots)
        check_range("data.engine", "integer", seed=seed)
        self.latency = latency
        self.num_slots = num_slots
        self.environment = environment
        self.in_flight_weight_updates = in_flight_weight_updates
        self.load_s = load_s
        self.tokens_per_s = tokens_per_s
        self.finish_reason: FinishReason = finish_reason
        self._rng = random.Random(seed)
        self._changed = threading.Condition()
        self._free_at = [0.0] * num_slots  # heap: time at which each slot becomes free
        self._samples: list[tuple[float, int, _Sample]] = []  # heap: (time of its return, counter, sample)
        self._version = self._count = self._num_tokens = 0
        self._returned_s = 0.0  # slot-seconds of samples no longer in `_samples`
        self._last_end = 0.0
        self._closed = False

    def setup(self, model: str) -> None:
        """Does nothing."""

    @property
    def max_model_len(self) -> int:
        return 2**31 - 1

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Assigns every sample to the slot that becomes free first."""
        with self._changed:
            now = time.monotonic() if self.in_flight_weight_updates else max(time.monotonic(), self._last_end)
            for request in requests:
                for index in range(request.num_samples):
                    self._schedule(request, index, now)
            self._changed.notify_all()

    def _schedule(self, request: GenerationRequest, index: int, earliest: float) -> None:
        seconds = self.latency.draw(self._rng)
        begin = max(earliest, self._free_at[0])
        end = begin + seconds
        heapq.heapreplace(self._free_at, end)
        self._last_end = max(self._last_end, end)
        num_tokens = min(request.sampling.max_tokens, max(1, round(seconds * self.tokens_per_s)))
        completion = Completion(
            request_id=request.id,
            sample_index=index,
            token_ids=(request.prompt_ids[-1],) * num_tokens,
            logprobs=(-1.0,) * num_tokens,
            versions=(self._version,) * num_tokens,
            finish_reason=self.finish_reason,
        )
        back = end + (self.environment.draw(self._rng) if self.environment is not None else 0.0)
        self._count += 1
        heapq.heappush(self._samples, (back, self._count, _Sample(begin, end, completion)))

    def poll(self, timeout_s: float) -> list[Completion]:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                finished = []
                while self._samples and self._samples[0][0] <= now:
                    sample = heapq.heappop(self._samples)[2]
                    self._returned_s += sample.end - sample.begin
                    self._num_tokens += len(sample.completion.token_ids)
                    finished.append(sample.completion)
                if finished or now >= deadline:
                    return finished
                back = self._samples[0][0] if self._samples else deadline
                self._changed.wait(max(0.0, min(back, deadline) - now))
        return []

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Sleeps for `load_s`; later requests are tagged `version`."""
        for _ in weights:
            pass
        if self.load_s:
            time.sleep(self.load_s)
        with self._changed:
            self._version = version

    def abort(self, request_ids: Sequence[int]) -> None:
        """Drops these requests; their slots stay occupied as planned."""
        aborted = set(request_ids)
        with self._changed:
            self._samples = [item for item in self._samples if item[2].completion.request_id not in aborted]
            heapq.heapify(self._samples)

    def partial_completions(self) -> list[Completion]:
        """Tokens of running samples in proportion to elapsed time."""
        with self._changed:
            now = time.monotonic()
            return [_partial(sample, now) for _, _, sample in self._samples if sample.begin < now]

    def close(self) -> None:
        """Unblocks `poll`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def busy_s(self) -> float:
        """Slot-seconds of work so far, divided by the number of slots."""
        with self._changed:
            now = time.monotonic()
            running = sum(max(0.0, min(now, sample.end) - sample.begin) for _, _, sample in self._samples)
            return (self._returned_s + running) / self.num_slots

    @property
    def num_tokens(self) -> int:
        """Tokens of the samples returned so far."""
        return self._num_tokens
