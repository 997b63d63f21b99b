"""Asynchronous training loop around a simulated engine: measured with the real threads, and computed without overhead.

Shows the `max_staleness` that a latency distribution needs, without a model.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass

from lit_async_rl.assets import asset
from lit_async_rl.engines.base import RolloutEngine
from lit_async_rl.environments.base import Environment, Episode, Observation
from lit_async_rl.environments.episode_engine import EpisodeEngine
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.problem import Prompt
from lit_async_rl.prompts.stream import PromptStream
from lit_async_rl.rewards.functions import no_reward
from lit_async_rl.rewards.scorer import Scorer
from lit_async_rl.rollouts.producer import Producer
from lit_async_rl.scheduling.admission import Admission
from lit_async_rl.scheduling.bottleneck import Intervals
from lit_async_rl.simulation.engine import SimulatedEngine
from lit_async_rl.simulation.latency import Latency
from lit_async_rl.simulation.virtual import VirtualRun
from lit_async_rl.tasks import SortDigits
from lit_async_rl.types import SamplingParams


class Sleeping(Environment):
    """Responds to each of `num_turns` turns after a random delay; the last response ends the episode.

    Args:
        latency: seconds per response.
        num_turns: turns of the policy in an episode.
        seed: seed of the latencies.
    """

    def __init__(self, latency: Latency, num_turns: int = 2, seed: int = 0) -> None:
        self.latency = latency
        self.num_turns = num_turns
        self._rng = random.Random(seed)

    async def start(self, prompt: Prompt) -> SleepingEpisode:
        return SleepingEpisode([self.latency.draw(self._rng) for _ in range(self.num_turns)])


class SleepingEpisode(Episode):
    """Episode with given delays."""

    def __init__(self, seconds: list[float]) -> None:
        self._seconds = seconds

    async def step(self, completion: str) -> Observation:
        await asyncio.sleep(self._seconds.pop())
        return Observation(text="1", done=not self._seconds)


@dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """A run of `num_steps` optimizer steps of `train_s` seconds each, measured after `warmup_steps` of them.

    The engine is as fast as the trainer ("balanced") if the mean latency is
    `train_s * num_slots / (groups_per_step * group_size)`.

    Attributes:
        latency: time that a sample occupies a slot; with an environment, the time of each turn.
        max_staleness: bound in versions.
        train_s: seconds of training per step.
        num_slots: samples generated concurrently.
        groups_per_step: groups per optimizer step.
        group_size: samples per group.
        num_steps: optimizer steps.
        warmup_steps: leading steps that are not measured.
        seed: seed of the latencies.
        streams: train on each group when it is taken, not on all groups together (Periodic Asynchrony,
            arXiv:2511.18871, if `max_staleness` is 0).
        environment: environment of multi-turn rollouts; None for single turns.
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
        """Wall time with the same latencies and no overhead: the optimum within the bound, without `streams`."""
        run = VirtualRun(
            Admission(self.groups_per_step, self.max_staleness, in_order=True),
            self.latency,
            num_slots=self.num_slots,
            train_s=self.train_s,
            group_size=self.group_size,
            seed=self.seed,
        )
        before = run.totals(self.warmup_steps)
        return run.totals(self.num_steps - self.warmup_steps) - before


def _totals(producer: Producer) -> Intervals:
    stats = producer.stats()
    return Intervals(
        wall_s=time.monotonic(),
        wait_s=stats.wait_s,
        sync_s=0.0,
        engine_busy_s=stats.engine_busy_s,
        scoring_s=stats.scoring_s,
    )
