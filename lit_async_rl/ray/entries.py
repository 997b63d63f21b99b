"""Replicas as the trainer sees them: state, assignments, and validation of their answers."""

from __future__ import annotations

import enum
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lit_async_rl.engines.completion_check import find_fault
from lit_async_rl.engines.embedded.own_process import unpack_completions
from lit_async_rl.ray.logs import describe_place
from lit_async_rl.types import Completion, GenerationRequest

NUM_SAMPLES_TO_FORGIVE = 1000


class State(enum.Enum):
    """State of a replica, see `fleet`."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    GIVEN_UP = "given up"


@dataclass(frozen=True)
class Part:
    """Samples of a request that are to be assigned.

    Args:
        request: as it was submitted, or its rest.
        samples: which of the request's samples.
        unwanted: positions among them that have come before, and are sampled once more.
        num_lost: replicas in a row that were lost with it, without a sample of it in between.
        origin: id of the submitted request, if another replica continues its samples under a new id.
        begun: tokens of the only sample so far, as of that request; None if it starts over.
    """

    request: GenerationRequest
    samples: tuple[int, ...]
    unwanted: frozenset[int] = frozenset()
    num_lost: int = 0
    origin: int | None = None
    begun: Completion | None = None

    @property
    def submitted_id(self) -> int:
        """Id of the request that was submitted."""
        return self.request.id if self.origin is None else self.origin

    def without(self, positions: Set[int]) -> Part:
        """The rest of it when the samples at these positions have come.

        A request with a seed is sampled as a whole, because its random numbers depend on the samples' numbers.
        """
        if self.request.seed is not None:
            return replace(self, unwanted=self.unwanted | positions)
        left = tuple(sample for position, sample in enumerate(self.samples) if position not in positions)
        return replace(self, samples=left)


@dataclass(eq=False)
class Assignment:
    """A part that one replica has.

    Args:
        number: unique; answers to earlier assignments of the same request are late.
        part: what it is asked for; the replica numbers samples by their positions in it.
        oldest: version that its replica has at least.
        received: positions of the samples that have come, or that others continue.
    """

    number: int
    part: Part
    oldest: int
    received: set[int] = field(default_factory=set)

    @property
    def request(self) -> GenerationRequest:
        """Request of the part."""
        return self.part.request

    @property
    def as_sent(self) -> GenerationRequest:
        """The request for these samples."""
        return replace(self.request, num_samples=len(self.part.samples))

    @property
    def num_tokens(self) -> int:
        """Most tokens that it may still cost."""
        return len(self.request.prompt_ids) + self.num_missing * self.request.sampling.max_tokens

    @property
    def num_missing(self) -> int:
        """Samples that have not come."""
        return len(self.part.samples) - len(self.part.unwanted) - len(self.received)

    def fault(
        self, completion: Completion, *, newest: int, vocab_size: int, max_model_len: int, is_partial: bool
    ) -> str:
        """Fault in a completion with the replica's numbers and versions up to `newest`; empty if it is valid."""
        position = completion.sample_index
        num_samples = len(self.part.samples)
        if type(position) is not int or not 0 <= position < num_samples:
            return f"has sample_index={position!r}, must be an int from 0 to {num_samples - 1}"
        if position in self.received and not is_partial:
            return "has come already: sample_index is a duplicate"
        return find_fault(
            completion,
            self.as_sent,
            versions=(self.oldest, newest),
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            scores=False,
            is_partial=is_partial,
        )

    def again(self) -> Part:
        """Remaining part to sample."""
        num_lost = 1 if self.received else self.part.num_lost + 1
        return replace(self.part.without(self.received), num_lost=num_lost)

    def move(self, begun: Mapping[int, Completion], ids: Iterator[int]) -> list[Part]:
        """Cancels what has not come, and returns it as parts for other replicas; that is no loss.

        Args:
            begun: partial samples by the replica's numbers; the others start over.
            ids: unused ones: this replica may be asked for the request again, if the weights of a received sample turn
                out to be wrong.
        """
        if self.request.seed is not None:
            begun = {}
        origin = self.part.submitted_id
        parts = []
        for position, completion in begun.items():
            rest = self.request.rest(next(ids), completion.token_ids)
            samples = (self.part.samples[position],)
            parts.append(replace(self.part, request=rest, samples=samples, origin=origin, begun=completion))
            self.received.add(position)
        if self.num_missing:
            request = replace(self.request, id=next(ids))
            parts.append(replace(self.part.without(self.received), request=request, origin=origin))
        self.received |= set(range(len(self.part.samples))) - self.part.unwanted
        return parts

    def whole(self, completion: Completion) -> Completion:
        """A replica's completion as it was requested: renumbered, and with the tokens of an earlier replica."""
        part = self.part
        sample = part.samples[completion.sample_index]
        named = replace(completion, request_id=part.submitted_id, sample_index=sample)
        return named if part.begun is None else named.continuing(part.begun)


@dataclass(frozen=True, eq=False)
class Sample:
    """A completion that has come, at `position` of an assignment, whose cost falls by `num_tokens`."""

    assignment: Assignment
    position: int
    completion: Completion
    num_tokens: int


@dataclass(eq=False, kw_only=True)
class ReplicaProcess:
    """State of one process of a replica; the next process begins with a new one."""

    held: dict[int, Assignment] = field(default_factory=dict)  # by request
    latest: int = 0  # number of its latest assignment
    sent: int = -1  # newest version that it was given
    accepted: int = -1
    verified: int = -1  # newest version whose checksums it has reported
    proved: int = -1  # version with which it has sampled a token, and given fixed log-probabilities
    is_proving: bool = False  # it was asked to
    behind: float | None = None  # since when it is LOADING because others had newer weights, after it was READY
    is_named: bool = False  # as such, in a line
    is_handing_back: bool = False  # it was asked for what others are to continue
    sums: dict[str, int] = field(default_factory=dict)  # of its weights, as reported
    unverified: list[Sample] = field(default_factory=list)  # with tokens of newer versions than that
    answered: float = 0.0  # when it last said anything
    is_silent: bool = False  # and a line has said so
    is_stalled: bool = False  # it answered, and gave no token; until it does, whatever others continue meanwhile
    heard: float = 0.0  # when it last had all it was asked for, or gave a token; while it loads, when it was asked to
    busy_s: float = 0.0
    num_tokens: int = 0
    num_running: int = 0
    left: tuple[int, dict[str, int]] | None = None  # version and checksums of weights that an earlier trainer has left


@dataclass(eq=False)
class ReplicaEntry(ReplicaProcess):
    """A replica as the trainer sees it."""

    number: int
    actor: Any = None
    state: State = State.STARTING
    place: dict[str, Any] = field(default_factory=dict)  # answer of `claim`, and `dtype` of that of `start`
    why: str = ""  # it was lost last
    began: float = 0.0  # of its latest start
    called: float = 0.0  # when `start` was called
    num_failures: int = 0  # in a row, without a finished sample in between
    num_wrong: int = 0  # of them, or within `NUM_SAMPLES_TO_FORGIVE`, those in which its process did wrong
    num_good: int = 0  # samples since then
    num_starts: int = 0
    retry_at: float | None = None
    is_draining: bool = False

    @property
    def where(self) -> str:
        """For messages."""
        if not self.place:
            return f"replica {self.number}"
        return f"replica {self.number} ({describe_place(self.place)})"

    def fail(self, reason: str, is_running: bool) -> None:
        """Counts a loss, whose `reason` completes "replica 3 ...".

        With `is_running`, the process did wrong, and did not just end.
        """
        self.why = reason
        self.num_failures += 1
        if is_running:
            self.num_wrong = 1 if self.num_good >= NUM_SAMPLES_TO_FORGIVE else self.num_wrong + 1
            self.num_good = 0

    def forget_process(self) -> None:
        """Begins with the next process, of which nothing is known."""
        self.num_starts += 1
        vars(self).update(vars(ReplicaProcess()))

    def skip(self, seconds: float) -> None:
        """Excludes from its times a while in which nobody could hear it."""
        self.began = self.began and self.began + seconds
        self.heard += seconds
        self.answered += seconds
        self.behind = self.behind and self.behind + seconds

    @property
    def may_prove(self) -> bool:
        """Whether it has weights, and was not asked yet to prove what it computes with them."""
        return self.state is State.LOADING and self.sent >= 0 and not self.is_proving

    @property
    def has_proved(self) -> bool:
        """Whether it has been READY since its start."""
        return self.state is State.READY or self.behind is not None

    @property
    def is_asked(self) -> bool:
        """Whether an answer is due."""
        if self.state is State.LOADING and self.sent >= 0:  # else it waits for the trainer
            return not self.may_prove or min(self.accepted, self.verified) < self.sent
        return self.state is State.READY

    def hold(self, assignments: Sequence[Assignment]) -> None:
        """Notes assignments that it is sent."""
        if not self.held and not self.is_stalled:
            self.heard = time.monotonic()
        self.held |= {one.request.id: one for one in assignments}
        self.latest = assignments[-1].number

    def unpack(
        self, answer: Mapping[str, Any], *, vocab_size: int, max_model_len: int, is_partial: bool = False
    ) -> tuple[list[Sample], str]:
        """Valid completions of an answer up to the first that is wrong, and its fault.

        The answer is that of `take`, whose samples count as received from now on, or of `partial_completions`.

        Raises:
            KeyError, TypeError, ValueError: it is no such answer.
        """
        tensors = {name: torch.from_numpy(value.copy()) for name, value in answer["tensors"].items()}
        unpacked = unpack_completions(answer["completions"], tensors)
        found = list[Sample]()
        for number, completion in list(zip(answer["assignments"], unpacked, strict=True)):
            one = self.held.get(completion.request_id)
            if one is None or one.number != number:
                continue  # late: aborted, or another replica's now
            try:
                problem = one.fault(
                    completion,
                    newest=self.sent,
                    vocab_size=vocab_size,
                    max_model_len=max_model_len,
                    is_partial=is_partial,
                )
            except (TypeError, ValueError, AttributeError) as error:
                problem = f"cannot be read: {error}"
            position = completion.sample_index
            if problem:
                which = f"request {completion.request_id}, sample {position}"
                return found, f"returned a wrong completion: {which} {problem}"
            if position in one.part.unwanted or (is_partial and position in one.received):
                continue
            num_tokens = 0 if is_partial else self._receive(one, position)
            found.append(Sample(one, position, one.whole(completion), num_tokens=num_tokens))
        return found, ""

    def _receive(self, one: Assignment, position: int) -> int:
        before = one.num_tokens
        one.received.add(position)
        if one.num_missing:
            return before - one.num_tokens
        del self.held[one.request.id]
        return before
