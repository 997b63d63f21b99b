"""Engines that return one wrong thing, or hang in one call; all else they do is right."""

from __future__ import annotations

import copy
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from lit_async_rl.simulation.engine import SimulatedEngine
from lit_async_rl.simulation.latency import Constant
from lit_async_rl.types import Turn


def changed(**changes: Any):
    """A completion with other fields; a function is given the old value."""

    def corrupt(completion):
        wrong = copy.copy(completion)
        for name, value in changes.items():  # past the checks of types that tests have
            object.__setattr__(wrong, name, value(getattr(completion, name)) if callable(value) else value)
        return [wrong]

    return corrupt


def at(position: int, value: Any):
    """A tuple with another element."""
    return lambda values: (*values[:position], value, *values[position + 1 :])


def other_text(completion):
    """The same sample twice, with other tokens."""
    return [completion, dataclasses.replace(completion, token_ids=tuple(3 + n % 2 for n in completion.token_ids))]


def short(*names: str):
    return changed(**dict.fromkeys(names, lambda values: values[:-1]))


ALL = ("token_ids", "logprobs", "versions")
TWICE = dict.fromkeys(ALL, lambda values: values * 200)
# name: (corruption, what the error says of the field)
COMPLETIONS: dict[str, tuple[Any, str]] = {
    "duplicate, other text": (other_text, "sample_index is a duplicate"),
    "duplicate, same text": (lambda c: [c, c], "sample_index is a duplicate"),
    "three times": (lambda c: [c] * 3, "sample_index is a duplicate"),
    "request never asked for": (changed(request_id=10**6), "request_id=1000000, which was never asked for"),
    "negative request": (changed(request_id=-99999), "request_id=-99999, which was never asked for"),
    "evaluation never asked for": (changed(request_id=2**40 + 5), "which was never asked for"),
    "request is None": (changed(request_id=None), "request_id=None, which is not an int"),
    "request is a list": (changed(request_id=[1]), r"request_id=\[1\], which is not an int"),
    "request is a text": (changed(request_id=str), "which is not an int"),
    "sample too large": (changed(sample_index=2), "sample_index=2, must be an int from 0 to 1"),
    "sample negative": (changed(sample_index=-1), "sample_index=-1, must be"),
    "sample is a float": (changed(sample_index=float), r"sample_index=0\.0, must be"),
    "sample is None": (changed(sample_index=None), "sample_index=None, must be"),
    "logprob nan": (changed(logprobs=at(1, float("nan"))), r"logprobs\[1\]=nan"),
    "logprobs all nan": (changed(logprobs=lambda v: (float("nan"),) * len(v)), r"logprobs\[0\]=nan"),
    "logprob inf": (changed(logprobs=at(0, float("inf"))), r"logprobs\[0\]=inf"),
    "logprob -inf": (changed(logprobs=at(2, float("-inf"))), r"logprobs\[2\]=-inf"),
    "logprob +5": (changed(logprobs=at(1, 5.0)), r"logprobs\[1\]=5\.0"),
    "logprob +0.01": (changed(logprobs=at(1, 0.01)), r"logprobs\[1\]=0\.01"),
    "logprob -1e30": (changed(logprobs=at(1, -1e30)), r"logprobs\[1\]=-1e\+30"),
    "logprob -9999": (changed(logprobs=at(1, -9999.0)), r"logprobs\[1\]=-9999\.0"),
    "logprob None": (changed(logprobs=at(1, None)), "logprobs with elements of type NoneType"),
    "logprob a text": (changed(logprobs=at(1, "-1.0")), "logprobs with elements of type str"),
    "logprobs numpy": (changed(logprobs=lambda v: tuple(np.float32(v))), "logprobs with elements of type float32"),
    "logprobs a tensor": (changed(logprobs=torch.tensor), "logprobs of type Tensor, must be a tuple"),
    "logprobs a list": (changed(logprobs=list), "logprobs of type list, must be a tuple"),
    "logprobs None": (changed(logprobs=None), "logprobs of type NoneType, must be a tuple"),
    "fewer logprobs": (short("logprobs"), "has 4 logprobs for 5 token_ids"),
    "fewer versions": (short("versions"), "has 4 versions for 5 token_ids"),
    "fewer tokens": (short("token_ids"), "has 5 logprobs for 4 token_ids"),
    "short loss_mask": (changed(loss_mask=(True,)), "has 1 loss_mask for 5 token_ids"),
    "loss_mask of ints": (changed(loss_mask=(1,) * 5), "loss_mask with elements of type int"),
    "loss_mask all False": (changed(loss_mask=(False,) * 5), "loss_mask without a token of the policy"),
    "no tokens": (changed(**dict.fromkeys(ALL, ())), "has no token_ids"),
    "too many tokens": (changed(**TWICE), "has 1000 token_ids, more than max_tokens=5"),
    "one token too many": (changed(**dict.fromkeys(ALL, lambda v: (*v, v[-1]))), "has 6 token_ids, more than"),
    "too many, turns None, masked": (
        changed(**TWICE, loss_mask=(True, False) * 3 + (True,) * 994),
        "has 994 token_ids in one turn, more than max_tokens=5",
    ),
    "token outside": (changed(token_ids=at(1, 10**6)), r"token_ids\[1\]=1000000, which is not in the vocabulary"),
    "token just outside": (changed(token_ids=at(4, 98)), r"token_ids\[4\]=98, which is not in the vocabulary of 98"),
    "token negative": (changed(token_ids=at(0, -1)), r"token_ids\[0\]=-1, which is not in the vocabulary"),
    "token 2**70": (changed(token_ids=at(0, 2**70)), "which is not in the vocabulary"),
    "token a bool": (changed(token_ids=at(0, True)), "token_ids with elements of type bool"),
    "token a float": (changed(token_ids=at(0, 3.0)), "token_ids with elements of type float"),
    "tokens numpy": (changed(token_ids=lambda v: tuple(np.array(v))), "token_ids with elements of type int64"),
    "tokens a text": (changed(token_ids="12345"), "token_ids of type str, must be a tuple"),
    "version of the future": (changed(versions=at(4, 77)), r"versions\[4\]=77, newer than the policy's newest version"),
    "version before all": (changed(versions=at(0, -1)), r"versions\[0\]=-1, older than version \d"),
    "versions decrease": (changed(versions=lambda v: (v[0] + 1, *v[1:])), r"versions\[1\]=.*they cannot decrease"),
    "version a float": (changed(versions=at(0, 0.0)), "versions with elements of type float"),
    "version a bool": (changed(versions=at(0, False)), "versions with elements of type bool"),
    "reason unknown": (changed(finish_reason="banana"), "finish_reason='banana', must be 'stop' or 'length'"),
    "reason abort": (changed(finish_reason="abort"), "finish_reason='abort', must be"),
    "reason None": (changed(finish_reason=None), "finish_reason=None, must be"),
    "reason a list": (changed(finish_reason=["stop"]), r"finish_reason=\['stop'\], must be"),
    "reward not asked for": (changed(reward=100.0), r"reward=100\.0, but the engine does not score"),
    "turns not turns": (changed(turns=((1, 2.0, 3),)), "turns=.*, must be a tuple of Turn"),
    "turns with one that is none": (changed(turns=(Turn(2, 0.0, 0), (5, 0.0, 0))), "turns=.*, must be a tuple of Turn"),
    "turn before the end": (
        changed(turns=(Turn(2, 1.0, 0), Turn(4, 0.0, 0))),
        r"turns\[1\]\.end=4, must be 5: the last turn ends with the last token",
    ),
    "turn behind the end": (changed(turns=(Turn(99, 0.0, 0),)), r"turns\[0\]\.end=99, must be from 1 to 5"),
    "turn reward nan": (changed(turns=(Turn(5, float("nan"), 0),)), r"turns\[0\]\.reward=nan, must be a finite"),
    "a tuple": (lambda c: [dataclasses.astuple(c)], "instead of a Completion"),
    "None among them": (lambda c: [None], "returned None instead of a Completion"),
}
REWARDS: dict[str, tuple[Any, str]] = {
    "reward nan": (changed(reward=float("nan")), "reward=nan, must be a finite number"),
    "reward inf": (changed(reward=float("inf")), "reward=inf, must be a finite number"),
    "reward too large": (changed(reward=6e38), r"reward=6e\+38, must be a finite number in float32"),
    "reward beyond all floats": (changed(reward=10**400), "must be a finite number in float32"),
    "reward missing": (changed(reward=None), "reward=None, must be a finite number"),
    "reward a text": (changed(reward="1.0"), r"reward='1\.0', must be a finite number"),
}


class HostileEngine(SimulatedEngine):
    """Right for the first completions. Then it corrupts one, or hangs in a method until the test ends.

    Each engine that takes the place of another does the next thing of the list, until there is none left.
    """

    corruptions: ClassVar[list[Any]]  # of completions; see `COMPLETIONS`
    hangs: ClassVar[list[str]]  # names of methods
    released: ClassVar[threading.Event]
    num_good = 3

    def __init__(self) -> None:
        super().__init__(Constant(0.002), num_slots=2, tokens_per_s=1e6)
        self._num_given = 0
        self._is_done = False

    def _hang(self, where: str) -> None:
        if [where] == self.hangs[:1] and self._num_given >= self.num_good:
            self.hangs.pop()
            self.released.wait(60.0)

    def poll(self, timeout_s):
        with self._changed:
            self._hang("poll with the lock")
        self._hang("poll")
        found = []
        for completion in super().poll(timeout_s):
            if self.scores:
                completion = dataclasses.replace(completion, reward=1.0)
            self._num_given += 1
            is_due = self._num_given > self.num_good and completion.sample_index == 0
            if self.corruptions and is_due and not self._is_done:
                self._is_done = True
                found += self.corruptions.pop(0)(completion)
            else:
                found.append(completion)
        return found

    def load_weights(self, version, weights):
        for n, _ in enumerate(weights):
            self._hang("load_weights" if n == 1 else "")
        super().load_weights(version, [])

    def submit(self, requests):
        self._hang("submit")
        super().submit(requests)

    def abort(self, request_ids):
        self._hang("abort")
        super().abort(request_ids)

    def partial_completions(self):
        self._hang("partial_completions")
        return super().partial_completions()

    def random_state(self):
        self._hang("random_state")
        return super().random_state()

    @property
    def num_tokens(self):
        self._hang("num_tokens")
        with self._changed:  # as an engine may that takes its lock for everything
            return super().num_tokens

    def close(self):
        self._hang("close")
        super().close()


class ScoringHostileEngine(HostileEngine):
    """Brings its own rewards."""

    scores = True


def hostile(corruptions: Sequence[Any] = (), hangs: Sequence[str] = (), scores: bool = False) -> HostileEngine:
    """An engine of a class of its own, so that those that replace it go on with its lists."""
    base = ScoringHostileEngine if scores else HostileEngine
    fields = {"corruptions": [*corruptions], "hangs": [*hangs], "released": threading.Event()}
    kind: Any = type("HostileEngine", (base,), fields)
    return kind()


def wait_until(condition: Callable[[], object], limit_s: float = 20.0) -> None:
    """Looks again and again until it is true."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
