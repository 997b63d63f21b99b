"""Asynchronous loop around a simulated engine: in real time with the real threads, and computed without them.

Shows the `max_staleness` that a latency distribution needs, without a model.
"""

from __future__ import annotations

import heapq
import random
import time
from dataclasses import dataclass

from lit_async_rl.assets import asset
from lit_async_rl.engines.base import RolloutEngine, SamplingParams
from lit_async_rl.environments.base import Environment
from lit_async_rl.environments.episode_engine import EpisodeEngine
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.prompts.stream import PromptStream
from lit_async_rl.rewards.scorer import Scorer
from lit_async_rl.rollouts.producer import Producer
from lit_async_rl.scheduling.admission import Admission
from lit_async_rl.scheduling.bottleneck import Intervals
from lit_async_rl.simulation.engine import SimulatedEngine
from lit_async_rl.simulation.latency import Latency
from lit_async_rl.tasks import SortDigits
from lit_async_rl.types import Prompt


def no_reward(prompt: Prompt, completion: str) -> float:
    """Reward that takes no time."""
    return 0.0


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """A run of `num_steps` optimizer steps of `train_s` seconds each, measured after `warmup_steps` of them.

    The engine is as fast as the trainer ("balanced") when the latency's mean is
    `train_s * num_slots / (groups_per_step * group_size)`. With `streams` each group is trained on when it is taken,
    not all when all are there (Periodic Asynchrony, arXiv:2511.18871, if `max_staleness` is 0). With an environment
    each turn takes the latency.
    """

    latency: Latency
    max_staleness: int
    train_s: float
    num_slots: int = 8
    groups_per_step: int = 8
    group_size: int = 4
    num_steps: int = 30
    warmup_steps: int = 8
    seed: int = 0
    streams: bool = False
    environment: Environment | None = None

    def measure(self) -> Intervals:
        """Wall time with the real producer, admission and scorer; the trainer sleeps."""
        engine: RolloutEngine = SimulatedEngine(
            self.latency,
            num_slots=self.num_slots,
            finish_reason="length" if self.environment is None else "stop",
            seed=self.seed,
        )
        if self.environment is not None:
            engine = EpisodeEngine(engine, self.environment, max_turns=1000)
            engine.setup(asset("sort_policy"))
        producer = Producer(
            engine=engine,
            stream=PromptStream(SortDigits(8, size=1000)),
            codec=TextCodec(asset("sort_policy")),
            scorer=Scorer(None if engine.scores else no_reward),
            admission=Admission(self.groups_per_step, self.max_staleness),
            group_size=self.group_size,
            sampling=SamplingParams(max_tokens=1),
            timeout_s=60.0,
        )
        producer.start(0)
        began = now = _totals(producer)
        try:
            for step in range(self.num_steps):
                for _ in range(self.groups_per_step):
                    producer.take()
                    if self.streams:
                        time.sleep(self.train_s / self.groups_per_step)
                if not self.streams:
                    time.sleep(self.train_s)
                producer.listener.load_weights(step + 1, [])
                producer.advance(step + 1)
                now = _totals(producer)
                if step + 1 == self.warmup_steps:
                    began = now
        finally:
            producer.stop()
            engine.close()
        return now - began

    def ideal(self) -> Intervals:
        """Wall time with the same latencies and no overhead: the optimum within the bound, without `streams`.

        Block k, the groups that train in round k, is admitted when round k - max_staleness begins. Round k begins when
        round k - 1 is over and all samples of blocks 0 ... k are back.
        """
        rng = random.Random(self.seed)
        free_at = [0.0] * self.num_slots
        work: list[tuple[float, float]] = []  # begin and end of every sample
        back_at: list[float] = []  # when all of blocks 0 ... k are back

        def admit(now: float) -> None:
            back = back_at[-1] if back_at else 0.0
            for _ in range(self.groups_per_step * self.group_size):
                begin = max(now, free_at[0])
                end = begin + self.latency.draw(rng)
                heapq.heapreplace(free_at, end)
                work.append((begin, end))
                back = max(back, end)
            back_at.append(back)

        def totals(now: float, waited: float) -> Intervals:
            busy = sum(max(0.0, min(now, end) - begin) for begin, end in work) / self.num_slots
            return Intervals(wall_s=now, wait_s=waited, sync_s=0.0, engine_busy_s=busy)

        for _ in range(self.max_staleness + 1):
            admit(0.0)
        now = waited = 0.0
        began = totals(now, waited)
        for step in range(self.num_steps):
            begin = max(now, back_at[step])
            waited += begin - now
            now = begin + self.train_s
            admit(now)
            if step + 1 == self.warmup_steps:
                began = totals(now, waited)
        return totals(now, waited) - began


def _totals(producer: Producer) -> Intervals:
    stats = producer.stats()
    return Intervals(
        wall_s=time.monotonic(),
        wait_s=stats.wait_s,
        sync_s=0.0,
        engine_busy_s=stats.engine_busy_s,
        scoring_s=stats.scoring_s,
    )
