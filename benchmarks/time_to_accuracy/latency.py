"""Slow tools and rewards whose latency is slept, or only recorded and added to the clock afterwards.

What a synchronous run learns does not depend on how long a tool or reward takes: all rollouts of a step are complete
before it trains, and nothing else is under way meanwhile. Such a run need not sleep. Its rollouts wait concurrently,
so that a step waits for the last of them:

    added = max_i (ended_i + latency_i) - max_i ended_i

ended_i is when rollout i would have been complete without latency, in seconds since the last step, and latency_i the
sum of its own, because its turns follow each other. Training and publication begin after the last rollout and add
nothing. For rewards this is exact. For tools it is an upper bound: rollouts that come back one after the other are
decoded in smaller batches, in less time than ended_i, which is at most the time of generation too much.

Checked once, on a busy machine: six steps whose tools took 16 s in the mean lasted 641 s asleep, and 633 s by this
clock.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from lit_async_rl.environments.base import Environment, Episode, Observation
from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.functions import last_number
from lit_async_rl.scheduling.admission import Admission, AdmissionPolicy
from lit_async_rl.simulation.latency import LogNormal

LATENCIES = "latencies.csv"  # of a run's folder


@dataclass(frozen=True)
class Wait:
    """Latency of one rollout.

    Attributes:
        prompt: of the rollout.
        ended_s: processor time of this process at the rollout's last event, in seconds; other programs on the machine
            do not lengthen it, and a synchronous run does one thing at a time.
        latency_s: sum of the rollout's latencies, in seconds.
    """

    prompt: str
    ended_s: float
    latency_s: float


WAITS: list[Wait] = []  # of this process since the last `take_waits`


def take_waits() -> list[Wait]:
    """Pops the recorded latencies."""
    taken = WAITS[:]
    del WAITS[: len(taken)]
    return taken


class Latencies:
    """Log-normal latencies. Those of the n-th rollout of a prompt are the same in whichever order rollouts ask.

    Args:
        mean_s: mean, in seconds.
        sigma: standard deviation of the logarithm.
        seed: of the latencies.
    """

    def __init__(self, mean_s: float, sigma: float, seed: int) -> None:
        self._latency = LogNormal(mean_s, sigma)
        self._seed = seed
        self._rollouts = Counter[str]()

    def of(self, prompt: Prompt) -> RolloutLatencies:
        """Latencies of a prompt's next rollout."""
        self._rollouts[prompt.text] += 1
        return RolloutLatencies(self._latency, f"{self._seed} {self._rollouts[prompt.text]} {prompt.text}")


class RolloutLatencies:
    """Latencies of one rollout, in order."""

    def __init__(self, latency: LogNormal, key: str) -> None:
        self._latency = latency
        self._rng = random.Random(key)

    def next_s(self) -> float:
        """Draws one, in seconds."""
        return self._latency.draw(self._rng)


class SlowTool(Environment):
    """Another environment whose responses take time; the one that ends an episode takes none.

    Args:
        environment: to slow down.
        mean_s: mean latency of a response, in seconds.
        sigma: standard deviation of its logarithm.
        seed: of the latencies.
        sleeps: False only records them.
    """

    def __init__(
        self, environment: Environment, mean_s: float, sigma: float = 1.0, seed: int = 0, sleeps: bool = True
    ) -> None:
        self.environment = environment
        self.sleeps = sleeps
        self._latencies = Latencies(mean_s, sigma, seed)

    async def start(self, prompt: Prompt) -> SlowEpisode:
        episode = await self.environment.start(prompt)
        return SlowEpisode(episode, prompt, self._latencies.of(prompt), sleeps=self.sleeps)

    async def close(self) -> None:
        await self.environment.close()


class SlowEpisode(Episode):
    """Episode whose responses take time."""

    def __init__(self, episode: Episode, prompt: Prompt, latencies: RolloutLatencies, sleeps: bool) -> None:
        self._episode = episode
        self._prompt = prompt
        self._latencies = latencies
        self._sleeps = sleeps
        self._ended_s = 0.0
        self._latency_s = 0.0

    async def step(self, completion: str) -> Observation:
        observation = await self._episode.step(completion)
        if not observation.done:
            latency_s = self._latencies.next_s()
            self._latency_s += latency_s
            if self._sleeps:
                await asyncio.sleep(latency_s)
        self._ended_s = time.process_time()
        return observation

    async def step_cut(self, completion: str) -> Observation:
        observation = await self._episode.step_cut(completion)
        self._ended_s = time.process_time()
        return observation

    async def close(self) -> None:
        WAITS.append(Wait(self._prompt.text, self._ended_s, self._latency_s))
        await self._episode.close()


class SlowAnswer:
    """`last_number`, which takes time.

    Args:
        mean_s: mean latency, in seconds.
        sigma: standard deviation of its logarithm.
        seed: of the latencies.
        sleeps: False only records them.
    """

    def __init__(self, mean_s: float, sigma: float = 1.0, seed: int = 0, sleeps: bool = True) -> None:
        self.sleeps = sleeps
        self._latencies = Latencies(mean_s, sigma, seed)

    async def __call__(self, prompt: Prompt, completion: str) -> float:
        """1 if the last number is the answer, else 0."""
        latency_s = self._latencies.of(prompt).next_s()
        WAITS.append(Wait(prompt.text, time.process_time(), latency_s))
        if self.sleeps:
            await asyncio.sleep(latency_s)
        return last_number(prompt, completion)


@dataclass(frozen=True)
class InOrder(AdmissionPolicy):
    """Trains step n on groups admitted at version n - `max_staleness`, as `FixedLag` does.

    The engine need not keep a completion to one version, as an engine of episodes cannot. So a run does not repeat bit
    for bit, and its tokens are younger than its groups, by what an engine that is behind samples later: a version here.
    """

    def make(self, groups_per_round: int, max_staleness: int) -> Admission:
        return Admission(groups_per_round, max_staleness, in_order=True)


def waits_of_step(step: int, waits: list[Wait], began_s: float) -> list[dict[str, object]]:
    """Rows of `latencies.csv`.

    Args:
        step: optimizer step that trained on the rollouts.
        waits: of its rollouts.
        began_s: processor time of this process at the end of the step before.
    """
    return [
        {"step": step, "prompt": one.prompt, "ended_s": one.ended_s - began_s, "latency_s": one.latency_s}
        for one in waits
    ]


def added_s(waits: pd.DataFrame, factor: float = 1.0) -> pd.Series:
    """Seconds by which each step would have been longer, had its rollouts slept.

    Args:
        waits: as in `latencies.csv`.
        factor: multiplies the latencies: log-normal times of any mean are multiples of the same draws.
    """
    ends = (waits["ended_s"] + factor * waits["latency_s"]).groupby(waits["step"]).max()
    return ends - waits["ended_s"].groupby(waits["step"]).max()


def with_clock(curve: pd.DataFrame, folder: Path, factor: float = 1.0) -> pd.DataFrame:
    """A curve over `step` with `wall_s` by the `clock` of the finished run in a folder; 0 before the first step."""
    steps = pd.read_csv(folder / "metrics.csv").dropna(subset="bench/cpu_s")
    seconds = clock(steps.assign(step=range(1, len(steps) + 1)), pd.read_csv(folder / LATENCIES), factor)
    return curve.assign(wall_s=curve["step"].map(seconds).fillna(0.0))


def clock(steps: pd.DataFrame, waits: pd.DataFrame, factor: float = 1.0) -> pd.Series:
    """Seconds of training until the end of each step, by step: processor time, plus what would have been slept.

    Args:
        steps: `step` and `bench/cpu_s` of a synchronous run that did not sleep, in order.
        waits: as in `latencies.csv`.
        factor: multiplies the latencies.
    """
    slept_s = added_s(waits, factor).reindex(steps["step"], fill_value=0.0).cumsum()
    return pd.Series(steps["bench/cpu_s"].to_numpy() + slept_s.to_numpy(), index=steps["step"].to_numpy())
