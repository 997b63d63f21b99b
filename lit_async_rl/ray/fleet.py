"""The replicas of an engine: how each starts, proves what it has, answers, falls silent or behind, and is replaced.

The life of a replica:

    STARTING   its process builds the engine; nothing else may be asked of it
        |  it has said where it runs, and its model is the same; one that an earlier trainer has left says what it has
        v
    LOADING    it reads the newest weights unless it has them, samples a token, and computes log-probabilities of a
        |      fixed sequence
        |  it has accepted them, their checksums are those of what was sent, the token is tagged with their version,
        |  and the log-probabilities are the trainer's
        v
    READY      requests go to it, unless it is silent while another is not
        |  it has not accepted the weights before the newest, and another has: LOADING again, until it has them
        |  it died, hangs, answered what cannot be right, or its weights differ: `lose`
        v
    STARTING   in a new process, which Ray makes; its unfinished samples are those of other replicas now
        |  it was lost `MAX_FAILURES` times in a row without a finished sample in between, or did wrong so often
        v
    GIVEN_UP   the run goes on with the others; without any the engine fails, with the last reason

After a while, others continue the requests of a replica that is silent, or LOADING again (`_move_on`): from its tokens
so far, if it answers.

Only `turn` waits here; `engine.py` has the interface of an engine and the waits of its callers.
"""

from __future__ import annotations

import logging
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from lit_async_rl.engines.base import Probe, RolloutEngine, set_up
from lit_async_rl.engines.completion_check import show
from lit_async_rl.errors import EngineError, StalledError
from lit_async_rl.models.end_tokens import sampled_model
from lit_async_rl.models.loading import base_of, load_config
from lit_async_rl.ray.actors import (
    RETRY_S,
    as_error,
    first_line,
    is_refused,
    kill_actor,
    last_line,
    log_of,
    warn_with_log,
)
from lit_async_rl.ray.entries import Assignment, Part, ReplicaEntry, Sample, State
from lit_async_rl.ray.identity import describe_model, find_other_arithmetic, find_other_model
from lit_async_rl.ray.logs import read_place
from lit_async_rl.ray.ownership import ReplicaActors
from lit_async_rl.ray.process import TakenOver, call_actor, stop_actors
from lit_async_rl.ray.requests import Requests
from lit_async_rl.ray.weights import GivenWeights, Table, find_difference
from lit_async_rl.runtime.limited_log import LimitedLog
from lit_async_rl.runtime.threads import start_thread
from lit_async_rl.types import Completion

MAX_FAILURES = 5  # of a replica in a row, see `ReplicaEntry`
MAX_LOSSES = 5  # of replicas in a row that had one request
TAKE_TIMEOUT_S = 0.5  # a replica that has nothing finished answers after it
LOOK_INTERVAL_S = 0.1  # between two looks at all replicas
SILENT_S = 5.0  # without an answer, after which a line names a replica
BEHIND_S = 5.0  # after which others continue what one holds that is silent or behind; at least
NUM_TOKENS_BEHIND = 5  # times the median time of a token
IDLE_S = 30.0  # the same without a token, which may be due to long prompts, or to large weights
FROZEN_AFTER_S = 3.0
Handler = Callable[[ReplicaEntry, Any], None]  # of the answer of a replica
log = logging.getLogger(__name__)


class Fleet:
    """All replicas of an engine, as the trainer sees them.

    `turn` handles every answer that comes, in the thread that calls it. `lock` guards the state, and is never held
    during a wait; public methods take it themselves unless they say otherwise.

    Args:
        session_margin: of `Placement`.

    Attributes:
        engine: of which each replica makes one, from `start` on.
        entries: the replicas.
        requests: those that they sample.
        weights: those that they sample from.
        error: why the engine has failed; None while it has not.
        closed: whether `close` was called.
        has_been_ready: whether any replica ever was.
        none_since: time since when no replica is ready, after the first weights; None while one is.
        is_asleep: whether the replicas were asked to free their memory.
        num_lost: replicas lost so far.
        busy_s: mean over the replicas.
        max_model_len: tokens of prompt and completion, of the replica that takes the fewest.
        vocab_size: of the model.
    """

    engine: RolloutEngine

    def __init__(self, session_margin: float) -> None:
        self.lock = threading.RLock()
        self.entries: list[ReplicaEntry] = []
        self.requests = Requests(session_margin, self._tell)
        self.weights = GivenWeights()
        self.error: Exception | None = None
        self.closed = False
        self.has_been_ready = False
        self.none_since: float | None = None
        self.is_asleep = False
        self.num_lost = 0
        self.busy_s = 0.0
        self.max_model_len = 0
        self.vocab_size = 0
        self._ray: Any = None
        self._model = ""
        self._described: dict[str, Any] = {}  # the model
        self._made: ReplicaActors | None = None
        self._is_taken_over = False
        self._looked = time.monotonic()
        self._calls: dict[Any, tuple[ReplicaEntry, Handler]] = {}  # without an answer, by its reference
        self._token_s: deque[float] = deque(maxlen=101)  # seconds of a decode step, as replicas have reported
        self._num_tokens_before = 0  # of processes that are gone
        self._warnings = LimitedLog(log)

    @property
    def hang_s(self) -> float:
        """The longest time for an update, and without a token."""
        return self.engine.update_timeout_s or 600.0

    @property
    def ready(self) -> list[ReplicaEntry]:
        """Replicas that have proved to have the newest weights, or the previous ones. The lock is held."""
        return [entry for entry in self.entries if entry.state is State.READY]

    @property
    def num_tokens(self) -> int:
        """Tokens sampled so far, by all processes."""
        with self.lock:
            return self._num_tokens_before + sum(entry.num_tokens for entry in self.entries)

    @property
    def needs_probe(self) -> bool:
        """Whether a replica that comes back needs a probe to prove that it computes what the trainer does."""
        with self.lock:
            is_missing = self.weights.can_probe and self.weights.probe is None
            return is_missing and any(entry.may_prove for entry in self.entries)

    def start(self, ray: Any, engine: RolloutEngine, *, model: str, actors: ReplicaActors, number: int) -> None:
        """Starts `number` replicas, and ends those beyond it that an earlier start of the trainer has left.

        Raises:
            EngineError: `close` was called before.
        """
        self.engine = engine
        self._ray = ray
        self._model = model
        self._described = describe_model(base_of(model))
        self.vocab_size = int(load_config(base_of(model)).get_text_config().vocab_size)
        self._made = actors
        if not self.closed:
            actors.end_beyond(number)
        with self.lock:
            if self.closed:
                actors.leave()
                self.check()
            self.entries = [ReplicaEntry(number) for number in range(number)]
            for entry in self.entries:
                self._begin(entry)

    def check(self) -> None:
        """Raises the error of an engine that has failed."""
        if self.error is not None:
            raise self.error

    # -- weights ------------------------------------------------------------------------------------------------------

    def give(self, table: Table, probe: Probe | None) -> None:
        """Has all replicas load these weights; one that still loads does so after those that it reads now."""
        with self.lock:
            ref = self._ray.put([tuple(place) for place in table.contents])
            self.weights.replace(table, ref, probe, entries=self.entries)
            self.is_asleep = False
            if not self.requests.num_replicas:
                self.none_since = self.none_since or time.monotonic()
            for entry in self.entries:
                if entry.state in (State.LOADING, State.READY) and entry.accepted == entry.sent:
                    self._send_weights(entry)
                elif entry.state is State.READY:  # it has caught up with the weights before while these were stored
                    self.fall_behind(entry)

    def take_probe(self, probe: Probe) -> None:
        """Has the replicas that wait for it prove what they compute, and later those that still load."""
        with self.lock:
            if probe.version != self.weights.version:
                return
            self.weights.probe = probe
            for entry in self.entries:
                if entry.may_prove and entry.sent == probe.version:
                    self._ask_for_proof(entry)

    def fall_behind(self, entry: ReplicaEntry) -> None:
        """Sends a replica neither requests nor newer weights until it has caught up. The lock is held."""
        entry.state = State.LOADING
        entry.behind = entry.heard = time.monotonic()
        self.requests.placement.remove(entry.number)

    def _send_weights(self, entry: ReplicaEntry) -> None:
        """Has a replica load the newest weights, if there are any yet. The lock is held."""
        table = self.weights.table
        if table is None:
            return
        is_first = entry.sent < 0
        entry.sent = table.version
        if entry.state is State.LOADING:
            entry.heard = time.monotonic()
        # weights that wait for requests must not overtake them: these calls run in different threads there
        after = 0 if self.engine.in_flight_weight_updates else entry.latest
        version, sums = entry.left or (-1, {})
        has_them = is_first and version == table.version and not find_difference(table.sums, sums)
        buckets = {} if has_them else dict(table.buckets)
        self._call(entry, self._accepted, "load", table.version, [self.weights.ref], buckets, after, has_them)
        if entry.left and is_first:
            what = f"the weights of version {table.version}" if has_them else "its process, and reads new weights"
            log.warning("%s was already running: it keeps %s", entry.where, what)
        if entry.may_prove and (self.weights.probe is not None or not self.weights.can_probe):
            self._ask_for_proof(entry)

    def _ask_for_proof(self, entry: ReplicaEntry) -> None:
        """Asks once after each start; the replica takes no newer weights before it has answered. The lock is held."""
        entry.is_proving = True
        entry.heard = time.monotonic()
        token_ids = () if self.weights.probe is None else self.weights.probe.token_ids
        handle = partial(self._prove, version=entry.sent, probe=self.weights.probe)
        self._call(entry, handle, "prove", token_ids)

    def _accepted(self, entry: ReplicaEntry, answer: Mapping[str, Any]) -> None:
        if "error" not in answer:
            if not -1 < (version := int(answer["version"])) <= entry.sent:
                raise ValueError(f"version {version}, which was never sent")
            entry.accepted = max(entry.accepted, version)
            if entry.state is State.LOADING and entry.accepted < self.weights.version:
                self._send_weights(entry)
            self._readmit(entry)

    def _prove(self, entry: ReplicaEntry, answer: Mapping[str, Any], version: int, probe: Probe | None) -> None:
        if "error" in answer:
            return
        if problem := find_other_arithmetic(answer, version, probe):
            self.lose(entry, problem, failure=_AS_ENGINE_ERROR)
            return
        entry.proved = version
        self._readmit(entry)

    def _readmit(self, entry: ReplicaEntry) -> None:
        """Lets requests go to a replica that has accepted the newest weights and has proved to have them.

        A replica that was behind has proved itself before: the previous weights suffice, as for any that is READY.
        """
        if entry.state is not State.LOADING or entry.proved < 0:
            return
        was_behind = entry.behind is not None
        has_caught_up = was_behind and entry.accepted >= self.weights.version_before
        if not has_caught_up and not entry.accepted == entry.verified == self.weights.version:
            return
        is_back = entry.is_named if was_behind else bool(entry.num_failures or entry.num_starts)
        entry.state = State.READY
        entry.heard = time.monotonic()
        entry.behind = None
        entry.is_named = False
        self.has_been_ready = True
        if entry.is_draining:
            return
        self._let_in(entry)
        if is_back:
            log.warning("%s is back, with the weights of version %d", entry.where, entry.accepted)

    def _let_in(self, entry: ReplicaEntry) -> None:
        """Lets requests go to a replica. The lock is held."""
        self.requests.let_in(entry)
        self.none_since = None
        self.assign(self.requests.take_waiting())

    # -- more or fewer ------------------------------------------------------------------------------------------------

    def resize(self, replicas: int) -> None:
        """Starts further replicas, or ends some after all requests that they hold."""
        with self.lock:
            staying = [entry for entry in self.entries if not entry.is_draining]
            for entry in [one for one in self.entries if one.is_draining][: max(0, replicas - len(staying))]:
                entry.is_draining = False  # it is still there
                if entry.state is State.READY:
                    self._let_in(entry)
                staying.append(entry)
            for _ in range(replicas - len(staying)):
                used = {entry.number for entry in self.entries}
                entry = ReplicaEntry(min(set(range(len(used) + 1)) - used))
                self.entries.append(entry)
                self._begin(entry)
            # those that are not ready yet first, then those with the least to do
            load = self.requests.placement.load
            by_work = sorted(staying, key=lambda e: (e.state is State.READY, load.get(e.number, 0)))
            for entry in by_work[: max(0, len(staying) - replicas)]:
                entry.is_draining = True
                self.requests.placement.remove(entry.number)

    def _remove(self, entry: ReplicaEntry) -> None:
        """Ends a replica that has finished what it had. The lock is held."""
        self.entries.remove(entry)
        self._num_tokens_before += entry.num_tokens
        self._forget_calls(entry)
        start_thread(self._stop, [entry], name="stop-replica")

    # -- start --------------------------------------------------------------------------------------------------------

    def _begin(self, entry: ReplicaEntry) -> None:
        """Makes the actor, if there is none, claims it, and asks it to build its engine. The lock is held."""
        entry.retry_at = None
        if entry.actor is None:
            try:
                entry.actor = self._actors.actor(entry.number)
            except self._ray.exceptions.RayError as error:  # the command is gone, which owns the actors
                self.error = self.error or EngineError(f"Ray does not answer: {first_line(error)}")
                return
        entry.called = time.monotonic()
        entry.began = entry.began or entry.called
        self._call(entry, self._claimed, "claim")

    def _claimed(self, entry: ReplicaEntry, answer: Mapping[str, Any]) -> None:
        entry.called = time.monotonic()
        entry.place = read_place(answer)
        self._call(entry, self._started, "start", sampled_model(self._model))

    def _may_still_start(self, entry: ReplicaEntry, error: Exception) -> bool:
        """Whether Ray is still bringing a replica back. If it has given up, the replica gets a new actor later."""
        if isinstance(error, self._ray.exceptions.ActorDiedError):  # such as a class that cannot be imported there
            self._actors.end(entry.number, entry.actor)
            entry.actor = None
            if not self.has_been_ready:
                self.error = self.error or EngineError(f"{entry.where} did not start: {last_line(error)}")
            return False
        has_time = time.monotonic() - entry.began <= self.engine.startup_timeout_s
        return has_time and is_refused(self._ray, error, entry.called)

    def _started(self, entry: ReplicaEntry, answer: Mapping[str, Any]) -> None:
        if "error" in answer:
            return
        entry.place |= {"dtype": str(answer["dtype"])}
        longest = int(answer["max_model_len"])
        problem = find_other_model(answer["model"], self._described)
        if not problem and self.has_been_ready and longest < self.max_model_len:
            problem = (
                f"takes only {longest} tokens of prompt and completion, and the run needs {self.max_model_len}: its "
                "machine has less memory, or another vLLM"
            )
        if problem:
            self.lose(entry, problem, failure=_AS_ENGINE_ERROR)
            return
        entry.heard = entry.answered = time.monotonic()
        entry.state = State.LOADING
        if answer["weights"] is not None:
            version, sums = answer["weights"]
            entry.left = int(version), dict(sums)
        self.max_model_len = min(longest, self.max_model_len or longest)
        self._call(entry, self._taken, "take", TAKE_TIMEOUT_S)
        self._send_weights(entry)

    # -- requests and completions -------------------------------------------------------------------------------------

    def assign(self, parts: Iterable[Part]) -> None:
        """Sends requests for these samples to replicas. The lock is held."""
        self.requests.assign(parts, self.entries, self.weights.version)

    def unpack(
        self, entry: ReplicaEntry, answer: Mapping[str, Any], is_partial: bool = False
    ) -> tuple[list[Sample], str]:
        """Completions of an answer, and what is wrong with them, see `ReplicaEntry.unpack`. The lock is held."""
        return entry.unpack(answer, vocab_size=self.vocab_size, max_model_len=self.max_model_len, is_partial=is_partial)

    def _taken(self, entry: ReplicaEntry, answer: Mapping[str, Any]) -> None:
        if self._receive(entry, answer):
            self._call(entry, self._taken, "take", TAKE_TIMEOUT_S)

    def _receive(self, entry: ReplicaEntry, answer: Mapping[str, Any]) -> bool:
        """Files what a replica hands over; False if that has failed or has lost the replica."""
        if "reports" not in answer:
            return False
        now = time.monotonic()
        has_tokens = answer["num_tokens"] != entry.num_tokens or bool(answer["completions"])
        has_progress = has_tokens or not entry.held
        entry.is_stalled = entry.is_stalled and not has_tokens
        entry.answered = now
        if has_progress and entry.is_silent:
            entry.is_silent = False
            self._warnings.warning("%s responds again", entry.where)
            if entry.state is State.READY and not entry.is_draining and not self.requests.go_to(entry):
                self._let_in(entry)
        if has_progress and entry.state is State.READY and not entry.is_stalled:
            entry.heard = now
        busy_s = float(answer["busy_s"])
        busy_since = max(0.0, busy_s - entry.busy_s)
        self.busy_s += busy_since / max(1, len(self.entries))
        entry.busy_s = busy_s
        num_since = int(answer["num_tokens"]) - entry.num_tokens
        entry.num_tokens = int(answer["num_tokens"])
        entry.num_running = int(answer["num_running"])
        if num_since > 0 and math.isfinite(busy_since):
            self._token_s.append(busy_since * max(1, entry.num_running) / num_since)
        for version, sums in answer["reports"]:
            if problem := self.weights.verify(entry, version, sums):
                self.lose(entry, problem)
                return False
            self._readmit(entry)
        samples, problem = self.unpack(entry, answer)
        self.requests.file(entry, samples)  # those before one that is wrong are kept
        if problem:
            self.lose(entry, problem)
        return not problem

    def _move_on(self, entry: ReplicaEntry, now: float) -> None:
        """Has others continue what a replica that is behind or silent holds, as far as they have room.

        Each request moves once. The lock is held.
        """
        if self.requests.go_to(entry) or (entry.behind is None and not entry.is_silent):
            return
        since = min(entry.answered, entry.heard if entry.behind is None else entry.behind)
        if now - since < max(BEHIND_S, NUM_TOKENS_BEHIND * statistics.median(self._token_s or [0.0])):
            return
        if entry.behind is not None and not entry.is_named:
            entry.is_named = True
            self._warnings.warning(
                "the engine's %s gets no requests until it has newer weights: it has been behind for %.0f s, "
                "and is loading version %d, but the newest version is %d",
                entry.where,
                now - entry.behind,
                entry.sent,
                self.weights.version,
            )
        is_answering = now - entry.answered < SILENT_S
        if entry.is_handing_back and is_answering:
            return
        chosen = self.requests.movable(entry, self.entries, self.engine.num_slots)
        if not chosen:
            return
        if is_answering:
            entry.is_handing_back = True
            handle = partial(self._handed_back, chosen=chosen)
            self._call(entry, handle, "hand_back", [one.request.id for one in chosen])
        else:
            self.assign(self.requests.take_away(entry, chosen, {}))

    def _handed_back(self, entry: ReplicaEntry, answer: Mapping[str, Any], chosen: Sequence[Assignment]) -> None:
        entry.is_handing_back = False
        if not self._receive(entry, answer):
            return
        samples, problem = self.unpack(entry, answer["begun"], is_partial=True)
        if problem:
            self.lose(entry, problem)
            return
        begun: dict[int, dict[int, Completion]] = {}
        for sample in samples:
            completion = sample.completion
            is_proved = bool(completion.versions) and completion.versions[-1] <= entry.verified
            if is_proved and self.engine.in_flight_weight_updates:  # without these all tokens are of one version
                begun.setdefault(sample.assignment.number, {})[sample.position] = completion
        self.assign(self.requests.take_away(entry, chosen, begun))

    # -- faults -------------------------------------------------------------------------------------------------------

    def _look_after(self, now: float) -> None:
        """Restarts replicas that wait for it, and loses those that hang. The lock is held."""
        still_s = now - self._looked  # nobody looked: this process stood still, or was not asked for tokens
        if still_s < LOOK_INTERVAL_S:
            return
        self._looked = now
        if still_s > FROZEN_AFTER_S:
            self.none_since = self.none_since and self.none_since + still_s
        for entry in list(self.entries):
            if still_s > FROZEN_AFTER_S:
                entry.skip(still_s)
            if entry.is_draining and not entry.held and not entry.unverified:
                self._remove(entry)
                continue
            if self.is_asleep:  # its memory is the trainer's now, and requests wait for it
                entry.heard = entry.answered = now
                self.none_since = self.none_since and now
                continue
            if entry.retry_at is not None and now >= entry.retry_at:
                self._begin(entry)
            self._say_if_silent(entry, now)
            if entry.is_silent and self.requests.go_to(entry) and self.requests.num_replicas > 1:
                self.requests.placement.remove(entry.number)
            self._move_on(entry, now)
            if entry.is_asked and now - entry.heard > self.hang_s:
                limit = f"data.engine.engine.update_timeout_s={self.hang_s:g}"
                self.lose(entry, f"gave no token and no answer within {limit}")
        since = self.none_since
        if since is not None and not self.requests.num_replicas and now - since > self.engine.startup_timeout_s:
            limit = f"startup_timeout_s={self.engine.startup_timeout_s:g}"
            reasons = "; ".join(f"{e.where} {e.why or 'has not started'}" for e in self.entries)
            self.error = self.error or StalledError(f"no replica was ready within {limit}: {reasons}")

    def _say_if_silent(self, entry: ReplicaEntry, now: float) -> None:
        """Warns of a replica that the run may be waiting for, long before it counts as hung."""
        if entry.state not in (State.LOADING, State.READY) or entry.is_silent:
            return
        is_idle = entry.state is State.READY and bool(entry.held) and now - entry.heard > IDLE_S
        if is_idle or now - entry.answered > SILENT_S:
            entry.is_silent = True
            entry.is_stalled = is_idle
            self._warnings.warning(
                "the engine's %s has sent no %s for %.0f s, and the run may be waiting for this replica. Has its "
                "process or machine stopped? The replica is replaced after data.engine.engine.update_timeout_s=%g",
                entry.where,
                "token" if is_idle else "answer",
                now - (entry.heard if is_idle else entry.answered),
                self.hang_s,
            )

    def lose(
        self, entry: ReplicaEntry, reason: str, *, is_running: bool = True, failure: Mapping[str, str] | None = None
    ) -> None:
        """Removes a replica; others sample what it has not finished. The lock is held.

        Ray starts it again, unless it drains, has failed too often, or its engine failed before any was ready. `reason`
        completes "replica 3 ...", and `failure` is an error of its engine as plain data. With `is_running`, its process
        may still run, and is killed.
        """
        was_in = entry.state in (State.READY, State.LOADING)
        is_new = entry.left is None  # else its failure says nothing about a new process
        held = dict(entry.held)
        for sample in entry.unverified:  # of weights that were never proved right
            sample.assignment.received.discard(sample.position)
            held[sample.assignment.request.id] = sample.assignment
        entry.fail(reason, is_running)
        self._num_tokens_before += entry.num_tokens
        entry.forget_process()
        self.num_lost += 1
        self.requests.placement.remove(entry.number)
        self._forget_calls(entry)
        is_over = max(entry.num_failures, entry.num_wrong) >= MAX_FAILURES or entry.is_draining
        is_over |= failure is not None and not self.has_been_ready and is_new
        if is_over:
            self._actors.end(entry.number, entry.actor)
        elif is_running:
            kill_actor(self._ray, entry.actor, is_for_good=False)
        message = f"{entry.where} {reason}"
        if is_over:
            message += log_of(self._ray, entry.place)
            entry.state = State.GIVEN_UP
            log.warning(
                "%s; it is not restarted again after %d failures", message, max(entry.num_failures, entry.num_wrong)
            )
            if entry.is_draining:
                self.entries.remove(entry)
        else:
            entry.state = State.STARTING
            entry.began = time.monotonic()
            entry.retry_at = entry.began + RETRY_S
            text = f"{message}{{log}}; {len(held)} requests go to other replicas, and it is started again"
            warn_with_log(self._ray, text, place=entry.place)
        if all(one.state is State.GIVEN_UP for one in self.entries) or (is_over and not self.has_been_ready):
            self.error = self.error or as_error(message, failure)
            return
        if was_in and not self.requests.num_replicas:
            self.none_since = self.none_since or time.monotonic()
        again = [one.again() for one in held.values()]
        worst = max(again, key=lambda part: part.num_lost, default=None)
        if worst is not None and worst.num_lost >= MAX_LOSSES:
            self.error = self.error or EngineError(
                f"request {worst.submitted_id} was with {MAX_LOSSES} replicas that were lost, one after the other: "
                f"{message}"
            )
        self.assign(again)

    # -- calls and their answers --------------------------------------------------------------------------------------

    def _call(self, entry: ReplicaEntry, handle: Handler, name: str, *args: Any) -> None:
        """Calls a replica; `handle` gets the answer, with the lock held. The lock is held."""
        try:
            ref = call_actor(entry.actor, name, self._actors.trainer, *args)
        except Exception as error:  # Ray itself is gone
            self.error = self.error or EngineError(f"Ray does not answer: {error}")
            return
        self._calls[ref] = entry, handle

    def _tell(self, entry: ReplicaEntry, name: str, *args: Any) -> None:
        """Calls a replica, and ignores its answer unless that is an error. The lock is held."""
        self._call(entry, lambda entry, answer: None, name, *args)

    def _forget_calls(self, entry: ReplicaEntry) -> None:
        self._calls = {ref: call for ref, call in self._calls.items() if call[0] is not entry}

    def turn(self, timeout_s: float) -> None:
        """Handles the answers that are there; waits at most `timeout_s` for the first."""
        with self.lock:
            self._look_after(time.monotonic())
            refs = list(self._calls)
        if not refs:
            time.sleep(min(timeout_s, 0.05))
            return
        self._ray.wait(refs, num_returns=1, timeout=timeout_s)
        ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
        for ref in ready:
            with self.lock:
                if ref in self._calls:  # else another thread was first, or the replica has been started anew since
                    self._handle(ref, *self._calls.pop(ref))

    def _handle(self, ref: Any, entry: ReplicaEntry, handle: Handler) -> None:
        start = entry.num_starts
        try:
            answer = self._ray.get(ref, timeout=self.hang_s)
        except Exception as error:  # of many kinds: its process or node is gone, out of memory, not to be read
            if entry.state is State.STARTING:
                entry.retry_at = time.monotonic() + RETRY_S
                if not self._may_still_start(entry, error):
                    self.lose(entry, f"did not start: {last_line(error)}", is_running=False)
                return
            self.lose(entry, f"has ended ({first_line(error)})", is_running=False)
            return
        if not isinstance(answer, dict):
            self.lose(entry, f"answered with {type(answer).__name__}")
            return
        try:
            handle(entry, answer)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = f"answered what cannot be read: {type(error).__name__}: {show(error.args)}"
            self.lose(entry, reason)
            return
        failure = answer.get("error")
        if isinstance(failure, dict) and failure.get("type") == TakenOver.__name__:
            self._is_taken_over = True  # nothing of it is ours to kill
            self.error = self.error or EngineError(f"another trainer has taken over {entry.where}")
            return
        if failure is not None and start == entry.num_starts:
            if not isinstance(failure, dict) or {"type", "message", "traceback"} - failure.keys():
                failure = _AS_ENGINE_ERROR | {"message": show(failure)}
            self.lose(entry, f"has failed: {failure['type']}: {failure['message']}", failure=failure)

    def ask(self, entries: Sequence[ReplicaEntry], name: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """References of answers that only the caller waits for. The lock is held."""
        trainer = self._actors.trainer
        return [call_actor(entry.actor, name, trainer, *one) for entry, one in zip(entries, args, strict=True)]

    # -- end ----------------------------------------------------------------------------------------------------------

    def close(self, has_failed: bool) -> None:
        """Ends the replicas, or leaves them to the trainer's next start unless the engine has failed."""
        with self.lock:
            if self.closed:
                return
            self.closed = True
            is_sound = self.error is None and not has_failed
            self.error = self.error or EngineError("the engine was closed")
            entries = self.entries
            self.entries = []
            self._num_tokens_before += sum(entry.num_tokens for entry in entries)
            self._calls = {}
            self.weights.ref = self.weights.table = None
        if self._made is not None:
            self._made.leave()
        if self._is_taken_over:
            return
        if is_sound and self._made is not None and self._made.outlive_the_trainer:
            entries = [e for e in entries if e.state not in (State.LOADING, State.READY) or e.is_draining]
        self._stop(entries)

    @property
    def _actors(self) -> ReplicaActors:
        return set_up(self._made)

    def _stop(self, entries: Sequence[ReplicaEntry]) -> None:
        if self._ray is not None and self._ray.is_initialized():
            answering = [entry.actor for entry in entries if entry.state in (State.LOADING, State.READY)]
            stop_actors(self._ray, answering)
            for entry in entries:
                self._actors.end(entry.number, entry.actor)


_AS_ENGINE_ERROR = {"type": "EngineError", "traceback": ""}
