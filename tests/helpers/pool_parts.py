"""Rewards and environments that tests have in actors of a pool: some end their process, hang, or count."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

from lit_async_rl.environments.base import Environment, Episode, Observation
from lit_async_rl.errors import FinalRewardError, RewardSetupError
from lit_async_rl.problem import Score
from lit_async_rl.utils.elsewhere import Rebuildable


def length(prompt, completion):
    return float(len(completion))


def napping(prompt, completion):
    time.sleep(0.2)
    return float(len(completion))


def described(prompt, completion, token_ids):
    """Whether a prompt arrives as it was sent, with the token ids."""
    is_there = prompt.answer == "42" and prompt.metadata == {"unit": "m"} and list(prompt.other_answers) == ["43"]
    return float(is_there) + len(token_ids)


def pid(prompt, completion):
    return float(os.getpid())


def faulty(prompt, completion):
    """Does what the completion says."""
    print("last words", file=sys.stderr, flush=True)
    if completion == "raise":
        raise KeyError("no such case")
    if completion == "final":
        raise FinalRewardError("has tried itself")
    if completion == "setup":
        raise RewardSetupError("no key")
    if completion == "exit":
        sys.exit(3)
    if completion == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    if completion == "hang":
        time.sleep(10_000.0)
    values = {"none": None, "text": "0.5", "nan": float("nan"), "score": Score(1.5, {"a": 1.0, "b": 0.5})}
    return values.get(completion, 1.0)


def once(prompt, completion):
    """Kills its process the first time that it gets a completion; the completion is a file's path."""
    time.sleep(0.02)
    if completion.endswith("-"):
        try:
            Path(completion).touch(exist_ok=False)
        except FileExistsError:
            return 1.0
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


async def slow(prompt, completion):
    if completion == "hang":
        await asyncio.sleep(10_000.0)
    if completion == "block":
        time.sleep(10_000.0)
    await asyncio.sleep(0.01)
    return float(len(completion))


async def in_steps(prompt, completion, begun=lambda: None):
    """Says that it gets on, and does so in less than the limit in the test, unless it hangs."""
    for _ in range(4):
        begun()
        await asyncio.sleep(1.5)
    if completion == "hang":
        await asyncio.sleep(10_000.0)
    return 1.0


def batched(prompts, completions):
    """The size of the batch, and the length of the prompt."""
    pairs = zip(prompts, completions, strict=True)
    return [None if text == "none" else len(completions) + len(prompt.text) / 1000 for prompt, text in pairs]


class Counting(Rebuildable):
    """A reward with all that a reward may have, and a queue of its own."""

    max_concurrent = 8

    def __init__(self, folder, name="counting"):
        self.folder = folder
        self.name = name
        self._num = 0
        self._used = None

    async def __call__(self, prompt, completion, begun=lambda: None):
        if completion == "late":
            await asyncio.sleep(5.0)  # longer than the limit in the test, which does not count yet
        begun()
        self._num += 1
        return float(self._num)

    def score_group(self, prompt, completions):
        return [float(len(completions))] * len(completions)

    def metrics(self):
        return {"counting/num_calls": float(self._num), "counting/latency_s": 0.5}

    def use_folder(self, folder):
        self._used = folder

    def save_state(self):
        return {"num": self._num}

    def restore_state(self, state):
        self._num = int(state.get("num", 0))

    def close(self):
        note(self.folder, f"closed {self._num} {self._used}")


class Ladder(Environment):
    """An episode of three turns, which writes down when it begins and ends; some turns do what they say."""

    def __init__(self, folder):
        self.folder = folder

    async def start(self, prompt):
        if prompt.text == "slow start":
            try:
                await asyncio.sleep(10_000.0)
            finally:
                note(self.folder, "start cancelled")
        return Rung(self.folder)

    async def close(self):
        note(self.folder, "environment closed")


class Rung(Episode):
    def __init__(self, folder):
        self.folder = folder
        self.turns = 0
        note(folder, f"begun {id(self)} {os.getpid()}")

    async def step(self, completion):
        self.turns += 1
        if completion == "raise":
            raise ValueError("no such rung")
        if completion == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if completion == "hang":
            await asyncio.sleep(10_000.0)
        if completion == "block":
            time.sleep(10_000.0)
        return Observation(text=str(os.getpid()), reward=0.5, done=self.turns == 3, state=f"turn {self.turns}")

    async def step_cut(self, completion):
        return Observation(reward=-1.0, done=True)

    async def close(self):
        note(self.folder, f"ended {id(self)} {os.getpid()}")


def note(folder, line):
    with open(Path(folder) / "notes", "a") as file:
        file.write(line + "\n")


def notes(folder, word):
    """Lines that begin with a word."""
    path = Path(folder) / "notes"
    return [line for line in path.read_text().splitlines() if line.startswith(word)] if path.exists() else []
