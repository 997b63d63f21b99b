"""Several engines as Ray actors behind the interface of one.

`RayEngine` runs in the trainer's process, on the leading rank: admission, versions and the staleness bound are as with
any engine. It places requests, publishes weights, and brings replicas back that were lost. The life of a replica:

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
        |  it died, hangs, answered what cannot be right, or its weights differ: `_lose`
        v
    STARTING   in a new process, which Ray makes; its unfinished samples are those of other replicas now
        |  it was lost `MAX_FAILURES` times in a row without a finished sample in between, or did wrong so often
        v
    GIVEN_UP   the run goes on with the others; without any the engine fails, with the last reason

| who | waits for | woken by |
|---|---|---|
| `poll` (producer's thread) | the next answer of any replica, at most its timeout | Ray |
| `load_weights` in flight (trainer's thread) | the first replica that has accepted the weights before these | Ray |
| `load_weights` otherwise, and the first one | the first replica, and `OTHERS_S` for the others | Ray |
| `setup` | `min_replicas`, at most `startup_timeout_s` | Ray |

What a replica holds that is silent, or LOADING again, others continue after a while (`_move_on`): from its tokens so
far, if it answers.

All of these handle every answer that comes (`_turn`), whichever call it belongs to; `_lock` guards the state, and is
never held while something is awaited.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lit_async_rl.engines.base import EngineWrapper, Probe, RolloutEngine, check_request, set_up
from lit_async_rl.engines.completion_check import show
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.engines.embedded.own_process import pack_requests
from lit_async_rl.errors import EngineError, StalledError
from lit_async_rl.models.loading import base_of, load_config
from lit_async_rl.ray import runtime
from lit_async_rl.ray.actors import (
    RETRY_S,
    Resources,
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
from lit_async_rl.ray.placement import Placement
from lit_async_rl.ray.process import TakenOver, call_actor, stop_actors
from lit_async_rl.ray.weights import Table, WeightStore, find_difference
from lit_async_rl.runtime.files import LimitedLog
from lit_async_rl.runtime.threads import start_thread
from lit_async_rl.runtime.waiting import clock
from lit_async_rl.types import Completion, GenerationRequest
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.device_memory import free_cached_memory

MAX_FAILURES = 5  # of a replica in a row, see `ReplicaEntry`
MAX_LOSSES = 5  # of replicas in a row that had one request
NUM_SAMPLES_TO_FORGIVE = 1000
TAKE_TIMEOUT_S = 0.5  # a replica that has nothing finished answers after it
LOOK_INTERVAL_S = 0.1  # between two looks at all replicas
OTHERS_S = 10.0  # for other replicas to take weights that must be waited for, after the first one has
SHARE_FOR_OTHERS = 0.1  # of the time in which none has taken weights: further time for others, about as slow
ANSWER_S = 10.0  # for an answer that a checkpoint can do without
SILENT_S = 5.0  # without an answer, after which a line names a replica
BEHIND_S = 5.0  # after which others continue what one holds that is silent or behind; at least
NUM_TOKENS_BEHIND = 5  # times the median time of a token
FIRST_MOVED_ID = 2**62  # of requests that others continue; those of callers are smaller
IDLE_S = 30.0  # the same without a token, which may be due to long prompts, or to large weights
FROZEN_AFTER_S = 3.0
Handler = Callable[[ReplicaEntry, Any], None]  # of the answer of a replica
log = logging.getLogger(__name__)


class RayEngine(EngineWrapper):
    """Replicas of any engine, each a Ray actor; on this machine, or wherever a Ray cluster has room.

    Requests go to the replica with the fewest outstanding tokens, those of a session to the one that has its
    beginning. What a replica has not finished when it dies, hangs, or answers something that cannot be right, others
    sample; Ray starts it again, and it takes part as soon as it has proved to have the trainer's model and its current
    weights: by their checksums, by a sampled token, and by log-probabilities of a fixed sequence.

    With `sleep_level` of the inner engine, all replicas free their memory while a trainer on the same GPUs trains.

    With one replica, `in_flight_weight_updates` false and `FixedLag`, a run equals one without Ray to the bit.

    Example:
        ```python
        import lit_async_rl as rl

        engine = rl.RayEngine(rl.EmbeddedEngine(num_slots=32), replicas=4, num_cpus=2.0)
        assert (engine.replicas, engine.num_slots) == (4, 128)
        ```

    Args:
        engine: each replica makes one with the same arguments, and its number added to the seed; None is
            `EmbeddedEngine()`.
        replicas: how many.
        num_cpus: of each replica, by which Ray counts where it fits.
        num_gpus: of each replica, such as the engine's `tensor_parallel_size`; it sees only these.
        resources: other resources of each, by name.
        address: of a running Ray cluster; None is that of `RAY_ADDRESS`, or a Ray of this process on this machine.
        min_replicas: training begins when so many are there, and others join later; None is all.
        session_margin: a request leaves the replica that has its beginning when that has so many times the request's
            own tokens more to do than the least loaded one.
        spread: places replicas on different nodes where possible, rather than on few.
        delta: between nodes only what has changed bit by bit in the engine's dtype travels; the trainer and each
            replica keep a copy of the weights in host memory for it.

    Attributes:
        update_timeout_s: of the inner engine. A replica that takes longer for an update, or that holds requests and
            gives no token for so long, counts as hung and is replaced.
        startup_timeout_s: of the inner engine; also the longest time without any replica.
        num_lost: replicas lost so far.
        held_s: seconds in which the trainer waited for some replicas to take weights that others had, or that did not
            answer; while another replica is ready it does not wait.

    Raises:
        ValueError: a setting is out of range, or the engine cannot be a replica.
    """

    takes_changes = True
    records_spans = False
    held_s = 0.0

    def __init__(
        self,
        engine: RolloutEngine | None = None,
        replicas: int = 2,
        num_cpus: float = 1.0,
        num_gpus: float = 0.0,
        resources: dict[str, float] | None = None,
        *,
        address: str | None = None,
        min_replicas: int | None = None,
        session_margin: float = 4.0,
        spread: bool = True,
        delta: bool = False,
    ) -> None:
        check_range("data.engine", "integer positive", replicas=replicas)
        check_range("data.engine", ">= 0", num_cpus=num_cpus, num_gpus=num_gpus, session_margin=session_margin)
        check_range("data.engine", f"integer in [1, {replicas}]", min_replicas=min_replicas)
        super().__init__(engine or EmbeddedEngine())
        _check_inner(self.engine)
        self.replicas = replicas
        self.num_cpus = num_cpus
        self.num_gpus = num_gpus
        self.resources = resources
        self.address = address
        self.delta = delta
        self.min_replicas = replicas if min_replicas is None else min_replicas
        self.in_flight_weight_updates = self.engine.in_flight_weight_updates
        self.uses_probe = self.has_model
        self.num_lost = 0
        self._resources = Resources({"CPU": num_cpus, "GPU": num_gpus, **(resources or {})}, spread)
        self._ray: Any = None
        self._model = ""
        self._described: dict[str, Any] = {}  # the model
        self._vocab_size = 0
        self._max_model_len = 0
        self._replicas: ReplicaActors | None = None
        self._is_taken_over = False
        self._store: WeightStore | None = None
        self._table: Table | None = None  # of the newest weights; None before the first
        self._table_ref: Any = None
        self._probe: Probe | None = None  # of these weights
        self._can_probe = False  # whether the trainer had one of its first weights
        self._sums: dict[int, dict[str, int]] = {}  # checksums of the versions that replicas may still report
        self._version_before = -1  # of the weights before the newest
        self._has_been_ready = False
        self._looked = time.monotonic()
        self._lock = threading.RLock()  # guards all below
        self._entries: list[ReplicaEntry] = []
        self._placement = Placement(session_margin)
        self._calls: dict[Any, tuple[ReplicaEntry, Handler]] = {}  # without an answer, by its reference
        self._waiting: dict[int, Part] = {}  # requests that no replica samples, by request
        self._finished: deque[Completion] = deque()
        self._num_assignments = 0
        self._moved_ids = itertools.count(FIRST_MOVED_ID)
        self._token_s: deque[float] = deque(maxlen=101)  # seconds of a decode step, as replicas have reported
        self._error: Exception | None = None
        self._none_since: float | None = None  # since when no replica is ready, after the first weights
        self._is_asleep = False
        self._busy_s = 0.0
        self._num_tokens_before = 0  # of processes that are gone
        self._closed = False
        self._warnings = LimitedLog(log)

    def fresh(self, out_of_memory: bool = False) -> RolloutEngine:
        engine: Any = super().fresh(out_of_memory)
        engine.engine = self.engine.fresh(out_of_memory)  # also where it was not given
        return engine

    # -- settings -----------------------------------------------------------------------------------------------------

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        return self.replicas

    @property
    def num_slots(self) -> int:  # type: ignore[override]
        return self.replicas * self.engine.num_slots

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def busy_s(self) -> float:
        """Mean over the replicas."""
        return self._busy_s

    @property
    def num_tokens(self) -> int:
        with self._lock:
            return self._num_tokens_before + sum(entry.num_tokens for entry in self._entries)

    @property
    def num_running(self) -> int:
        with self._lock:
            return sum(entry.num_running for entry in self._entries)

    @property
    def needs_weights(self) -> bool:  # type: ignore[override]
        return self._is_asleep and self.sleep_level == 2

    @property
    def needs_probe(self) -> bool:  # type: ignore[override]
        """Whether a replica that comes back can prove only with them that it computes what the trainer computes."""
        with self._lock:
            return self._can_probe and self._probe is None and any(entry.may_prove for entry in self._entries)

    @property
    def starting(self) -> str:
        with self._lock:
            num = sum(entry.state in (State.LOADING, State.READY) for entry in self._entries)
        return f"{num} of {self.min_replicas} replicas have started; each loads the model, and {self._room()}"

    def _room(self) -> str:
        """Needs of a replica, and what the cluster has of that, for messages."""
        try:
            has = self._ray.cluster_resources()
            free = self._ray.available_resources()
        except Exception:  # Ray is not there yet, or not any more
            return f"needs {self._resources}"
        parts = [f"{name} {has.get(name, 0):g} ({free.get(name, 0):g} free)" for name in self._resources.by_name]
        return f"needs {self._resources}, where the cluster has {', '.join(parts) or 'enough'}"

    @property
    def num_ready(self) -> int:
        """Replicas that requests go to."""
        with self._lock:
            return len(self._placement)

    @property
    def pids(self) -> list[int]:
        """Processes of the replicas, as far as they are known."""
        with self._lock:
            return [entry.place["pid"] for entry in self._entries if entry.place]

    @property
    def _version(self) -> int:
        return -1 if self._table is None else self._table.version

    @property
    def _hang_s(self) -> float:
        return self.update_timeout_s or 600.0

    # -- trainer's thread ---------------------------------------------------------------------------------------------

    def setup(self, model: str) -> None:
        """Connects to Ray, starts the replicas, and waits until `min_replicas` have built their engines.

        Raises:
            SetupError: Ray is not installed, or not to be reached.
            StalledError: too few replicas had started within `startup_timeout_s`.
            EngineError: a replica's process ended. Errors of an engine are raised as they are.
        """
        self._ray = runtime.connect(self.address, self.replicas * self.num_cpus, user=self)
        self._model = model
        self._described = describe_model(base_of(model))
        self._vocab_size = int(load_config(base_of(model)).get_text_config().vocab_size)
        self._replicas = ReplicaActors(self._ray, self.engine, model=model, resources=self._resources)
        self._replicas.end_beyond(self.replicas)
        with self._lock:
            self._entries = [ReplicaEntry(number) for number in range(self.replicas)]
            for entry in self._entries:
                self._begin(entry)
        deadline = clock.now() + self.startup_timeout_s
        while (num := sum(entry.state is not State.STARTING for entry in self._entries)) < self.min_replicas:
            self._turn(0.2)
            self._check()
            if clock.now() > deadline:
                raise StalledError(
                    f"data.engine.min_replicas={self.min_replicas} replicas are needed, but only {num} had started "
                    f"within startup_timeout_s={self.startup_timeout_s:g}: each replica {self._room()}"
                )
        self.dtype = next(entry.place["dtype"] for entry in self._entries if "dtype" in entry.place)
        dtype = getattr(torch, self.dtype, None)
        self._store = WeightStore(self._ray, dtype if isinstance(dtype, torch.dtype) else None, delta=self.delta)

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Puts the weights into the object store once, and has all replicas load them.

        In flight the trainer does not wait for them: a replica samples no request that is submitted afterwards before
        it has accepted these weights, and what it samples from them counts when its checksums have come. One that has
        not even accepted the weights before these gets no requests until it has caught up.

        Raises:
            EngineError: the object store is full, or no replica is left.
            StalledError: no replica has accepted the weights within `update_timeout_s`.
            ValueError: names or shapes are not those of the engine's model, see `EmbeddedEngine`.
        """
        store = self._store
        self._check()  # after that: `close` takes the store away
        self._await_acceptance("the weights before these", others_s=0.0)
        if self._is_asleep:
            free_cached_memory()  # of the trainer, where the replicas need it now
        is_first = self._version < 0
        table = set_up(store).publish(version, weights)
        self._check()
        with self._lock:
            if version != self._version:
                self._version_before = self._version
            self._table_ref = self._ray.put([tuple(place) for place in table.contents])
            self._table = table
            self._probe = self.probe if self.probe is not None and self.probe.version == version else None
            self._can_probe = self._can_probe or self._probe is not None
            self._is_asleep = False
            known = [e.verified if e.has_proved else e.sent for e in self._entries if e.sent >= 0]
            oldest = min(known, default=version)
            self._sums = {v: sums for v, sums in self._sums.items() if v >= oldest} | {version: table.sums}
            if not len(self._placement):
                self._none_since = self._none_since or time.monotonic()
            for entry in self._entries:
                # one that is still loading gets the newest when it has accepted what it reads now
                if entry.state in (State.LOADING, State.READY) and entry.accepted == entry.sent:
                    self._send_weights(entry, table)
                elif entry.state is State.READY:  # it has caught up with the weights before while these were stored
                    self._fall_behind(entry)
        if is_first:
            self._await_first()
        elif not self.in_flight_weight_updates:
            self._await_acceptance(f"version {version}", others_s=OTHERS_S)

    def take_probe(self, probe: Probe) -> None:
        """Has the replicas that wait for it prove what they compute; those that still load do so later."""
        with self._lock:
            if probe.version != self._version:
                return
            self._probe = probe
            for entry in self._entries:
                if entry.may_prove and entry.sent == probe.version:
                    self._ask_for_proof(entry)

    def sleep(self) -> None:
        """Has all replicas free their memory until the next weights, unless requests are running.

        A replica that is lost meanwhile starts again when the others wake up.
        """
        with self._lock:
            is_idle = not self._waiting and not any(entry.held for entry in self._entries)
            if not self.sleep_level or self._is_asleep or not is_idle:
                return
            self._is_asleep = True  # before they are asked, so that a request that comes now wakes them
            asked = [entry for entry in self._entries if entry.state is State.READY]
        for entry, answer in zip(asked, self._ask_all("sleep", entries=asked), strict=True):
            with self._lock:
                if "error" in answer and entry.state is State.READY:
                    self._lose(entry, "did not free its memory, which the trainer needs")

    def _await_acceptance(self, what: str, others_s: float) -> None:
        """Waits until a replica has accepted what it was sent, and `others_s` for the others, which are behind then.

        If none accepts it within the limit, all are lost.
        """
        began = clock.now()
        others_until: float | None = None
        while True:
            with self._lock:
                ready = [entry for entry in self._entries if entry.state is State.READY]
                late = [entry for entry in ready if entry.accepted < entry.sent]
                if not late:
                    return
                now = clock.now()
                if any(entry.number in self._placement.load for entry in ready if entry not in late):
                    if others_until is None:
                        others_until = now + max(others_s, SHARE_FOR_OTHERS * (now - began))
                    if now >= others_until:
                        for entry in late:
                            self._fall_behind(entry)
                        return
                elif now - began > self._hang_s:
                    limit = f"data.engine.engine.update_timeout_s={self._hang_s:g}"
                    for entry in late:
                        self._lose(entry, f"did not accept {what} within {limit}")
            turned = time.monotonic()
            self._turn(0.2)
            self._check()
            if len(late) < len(ready) or any(entry.is_silent for entry in late):
                self.held_s += time.monotonic() - turned

    def _fall_behind(self, entry: ReplicaEntry) -> None:
        """Sends no requests to a replica until it has caught up, and no weights before those. The lock is held."""
        entry.state = State.LOADING
        entry.behind = entry.heard = time.monotonic()
        self._placement.remove(entry.number)

    def _await_first(self) -> None:
        """Waits for a replica that has proved to have the first weights, and `OTHERS_S` for `min_replicas` of them."""
        deadline = clock.now() + self._hang_s
        is_first = True
        while self.num_ready < self.min_replicas and clock.now() < deadline:
            self._turn(0.2)
            self._check()
            if is_first and self.num_ready:
                deadline = clock.now() + OTHERS_S
                is_first = False
        if not self.num_ready:
            raise StalledError(f"no replica received the first weights within update_timeout_s={self._hang_s:g}")

    def random_state(self) -> Tensor | None:
        """Of all replicas [replicas, bytes], of one alone as its engine has it; None unless all of them are there."""
        found = self._ask_all("random_state", limit_s=ANSWER_S)
        if len(found) < self.replicas or any(answer["state"] is None for answer in found):
            return None
        states = [torch.from_numpy(answer["state"].copy()) for answer in found]
        return states[0] if self.replicas == 1 else torch.stack(states)

    def set_random_state(self, state: Tensor) -> None:
        """Restores the states of as many replicas; those of another number of replicas are left out."""
        states = [state] if state.dim() == 1 else list(state)
        if len(states) != self.replicas:
            log.warning(
                "the checkpoint has the random states of %d replicas, but the run has %d replicas: no state is "
                "restored",
                len(states),
                self.replicas,
            )
            return
        self._ask_all("set_random_state", [(one.numpy(),) for one in states])

    # -- producer's thread --------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._check()
        for request in requests:  # here, where the caller gets the error; a replica would break
            check_request(request, self.max_model_len, self._vocab_size)
        with self._lock:
            if self._is_asleep and self.sleep_level == 1:
                free_cached_memory()
                self._is_asleep = False
            self._assign([Part(request, tuple(range(request.num_samples))) for request in requests])

    def poll(self, timeout_s: float) -> list[Completion]:
        deadline = time.monotonic() + timeout_s
        while not self._finished and not self._closed:
            self._check()
            self._turn(max(0.0, deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                break
        with self._lock:
            found = list(self._finished)
            self._finished.clear()
            return found

    def abort(self, request_ids: Sequence[int]) -> None:
        gone = set(request_ids)
        with self._lock:
            self._waiting = {n: part for n, part in self._waiting.items() if part.submitted_id not in gone}
            self._finished = deque(c for c in self._finished if c.request_id not in gone)
            for entry in self._entries:
                entry.unverified = [s for s in entry.unverified if s.completion.request_id not in gone]
                if mine := sorted(n for n, one in entry.held.items() if one.part.submitted_id in gone):
                    for request_id in mine:
                        self._placement.finish(entry.number, entry.held.pop(request_id).num_tokens)
                    self._call(entry, self._ignore, "abort", mine)

    def partial_completions(self) -> list[Completion]:
        with self._lock:
            asked = [entry for entry in self._entries if entry.held and not entry.is_silent]
            parts = [*self._waiting.values(), *(one.part for entry in self._entries for one in entry.held.values())]
            known = [part.begun for part in parts if part.begun is not None]
            finished = list(self._finished)
        answers = self._ask_all("partial_completions", entries=asked, limit_s=ANSWER_S)
        for entry, answer in zip(asked, answers, strict=False):
            with self._lock:
                samples, problem = self._unpack(entry, answer, is_partial=True)
                known += [sample.completion for sample in samples]
                if problem:
                    self._lose(entry, problem)
        return list({(c.request_id, c.sample_index): c for c in (*known, *finished)}.values())

    # -- placement ----------------------------------------------------------------------------------------------------

    def _assign(self, parts: Iterable[Part]) -> None:
        """Sends requests for these samples to replicas, in one call to each. The lock is held."""
        by_replica = dict[int, list[Assignment]]()
        for part in parts:
            request = part.request
            if not len(self._placement):
                self._waiting[request.id] = part
                continue
            self._num_assignments += 1
            new = Assignment(self._num_assignments, part, oldest=self._version)
            number = self._placement.place(request.session, new.num_tokens)
            by_replica.setdefault(number, []).append(new)
        for number, assignments in by_replica.items():
            entry = next(entry for entry in self._entries if entry.number == number)
            if not entry.held and not entry.is_stalled:
                entry.heard = time.monotonic()
            entry.held |= {one.request.id: one for one in assignments}
            entry.latest = assignments[-1].number
            packed = pack_requests([one.as_sent for one in assignments])
            numbers = [one.number for one in assignments]
            self._call(entry, self._ignore, "submit", packed, numbers, self._version)

    def _move_on(self, entry: ReplicaEntry, now: float) -> None:
        """Has others continue what a replica holds that is behind or silent, as far as they have room.

        Each request once. The lock is held.
        """
        if entry.number in self._placement.load or (entry.behind is None and not entry.is_silent):
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
                self._version,
            )
        is_answering = now - entry.answered < SILENT_S
        if entry.is_handing_back and is_answering:
            return
        chosen = []
        others = [one for one in self._entries if one.number in self._placement.load and not one.is_silent]
        busy = [sum(assignment.num_missing for assignment in one.held.values()) for one in others]
        room = sum(max(0, self.engine.num_slots - number) for number in busy)
        for one in entry.held.values():
            if room > 0 and one.part.origin is None:
                chosen.append(one)
                room -= one.num_missing
        if not chosen:
            return
        if is_answering:
            entry.is_handing_back = True
            handle = partial(self._handed_back, chosen=chosen)
            self._call(entry, handle, "hand_back", [one.request.id for one in chosen])
        else:
            self._continue_elsewhere(entry, chosen, {})

    def _handed_back(self, entry: ReplicaEntry, answer: Mapping[str, Any], chosen: Sequence[Assignment]) -> None:
        entry.is_handing_back = False
        if not self._receive(entry, answer):
            return
        samples, problem = self._unpack(entry, answer["begun"], is_partial=True)
        if problem:
            self._lose(entry, problem)
            return
        begun: dict[int, dict[int, Completion]] = {}
        for sample in samples:
            completion = sample.completion
            # without updates in flight all tokens are of one version; and no weights may be wrong
            if self.in_flight_weight_updates and completion.versions and completion.versions[-1] <= entry.verified:
                begun.setdefault(sample.assignment.number, {})[sample.position] = completion
        self._continue_elsewhere(entry, chosen, begun)

    def _continue_elsewhere(
        self, entry: ReplicaEntry, chosen: Sequence[Assignment], begun: Mapping[int, Mapping[int, Completion]]
    ) -> None:
        """Cancels assignments of a replica, and has others continue them. The lock is held.

        Args:
            entry: the replica.
            chosen: of its assignments, those that have come since are left out.
            begun: partial completions by assignment and position.
        """
        chosen = [one for one in chosen if entry.held.get(one.request.id) is one]
        for one in chosen:
            del entry.held[one.request.id]
            self._placement.finish(entry.number, one.num_tokens)  # if it has caught up meanwhile
        # also those that wait there for weights
        self._call(entry, self._ignore, "abort", [one.request.id for one in chosen])
        log.info("%s: other replicas continue %d of its requests", entry.where, len(chosen))
        self._assign([part for one in chosen for part in one.move(begun.get(one.number, {}), self._moved_ids)])

    # -- calls and their answers --------------------------------------------------------------------------------------

    def _call(self, entry: ReplicaEntry, handle: Handler, name: str, *args: Any) -> None:
        """Calls a replica; `handle` gets the answer, with the lock held. The lock is held."""
        try:
            ref = call_actor(entry.actor, name, self._actors.trainer, *args)
        except Exception as error:  # Ray itself is gone
            self._error = self._error or EngineError(f"Ray does not answer: {error}")
            return
        self._calls[ref] = entry, handle

    def _ignore(self, entry: ReplicaEntry, answer: Any) -> None:
        pass

    def _forget_calls(self, entry: ReplicaEntry) -> None:
        self._calls = {ref: call for ref, call in self._calls.items() if call[0] is not entry}

    def _turn(self, timeout_s: float) -> None:
        """Handles the answers that are there; waits at most `timeout_s` for the first."""
        with self._lock:
            self._look_after(time.monotonic())
            refs = list(self._calls)
        if not refs:
            time.sleep(min(timeout_s, 0.05))
            return
        self._ray.wait(refs, num_returns=1, timeout=timeout_s)
        ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
        for ref in ready:
            with self._lock:
                if ref in self._calls:  # else another thread was first, or the replica has been started anew since
                    self._handle(ref, *self._calls.pop(ref))

    def _handle(self, ref: Any, entry: ReplicaEntry, handle: Handler) -> None:
        start = entry.num_starts
        try:
            answer = self._ray.get(ref, timeout=self._hang_s)
        except Exception as error:  # of many kinds: its process or node is gone, out of memory, not to be read
            if entry.state is State.STARTING:
                entry.retry_at = time.monotonic() + RETRY_S
                if not self._may_still_start(entry, error):
                    self._lose(entry, f"did not start: {last_line(error)}", is_running=False)
                return
            self._lose(entry, f"has ended ({first_line(error)})", is_running=False)
            return
        if not isinstance(answer, dict):
            self._lose(entry, f"answered with {type(answer).__name__}")
            return
        try:
            handle(entry, answer)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = f"answered what cannot be read: {type(error).__name__}: {show(error.args)}"
            self._lose(entry, reason)
            return
        failure = answer.get("error")
        if isinstance(failure, dict) and failure.get("type") == TakenOver.__name__:
            self._is_taken_over = True  # nothing of it is ours to kill
            self._error = self._error or EngineError(f"another trainer has taken over {entry.where}")
            return
        if failure is not None and start == entry.num_starts:
            if not isinstance(failure, dict) or {"type", "message", "traceback"} - failure.keys():
                failure = _AS_ENGINE_ERROR | {"message": show(failure)}
            self._lose(entry, f"has failed: {failure['type']}: {failure['message']}", failure=failure)

    def _ask_all(
        self,
        name: str,
        args: Sequence[tuple[Any, ...]] | None = None,
        entries: Sequence[ReplicaEntry] | None = None,
        limit_s: float | None = None,
    ) -> list[dict[str, Any]]:
        """Answers of the replicas that are ready; `_NOTHING` with an `error` in place of one that does not come."""
        with self._lock:
            asked = [e for e in self._entries if e.state is State.READY] if entries is None else entries
            given = [()] * len(asked) if args is None else args
            trainer = self._actors.trainer
            refs = [call_actor(entry.actor, name, trainer, *one) for entry, one in zip(asked, given, strict=False)]
        answers = []
        for ref in refs:
            try:
                answer = self._ray.get(ref, timeout=min(limit_s or self._hang_s, self._hang_s))
            except Exception as error:
                log.warning("%s: a replica did not answer: %s", name, first_line(error))
                answer = {"error": True}
            answers.append(_NOTHING | answer)
        return answers

    # -- start and readmission ----------------------------------------------------------------------------------------

    def _begin(self, entry: ReplicaEntry) -> None:
        """Makes the actor, if there is none, claims it, and asks it to build its engine. The lock is held."""
        entry.retry_at = None
        if entry.actor is None:
            try:
                entry.actor = self._actors.actor(entry.number)
            except self._ray.exceptions.RayError as error:  # the command is gone, which owns the actors
                self._error = self._error or EngineError(f"Ray does not answer: {first_line(error)}")
                return
        entry.called = time.monotonic()
        entry.began = entry.began or entry.called
        self._call(entry, self._claimed, "claim")

    def _claimed(self, entry: ReplicaEntry, answer: Mapping[str, Any]) -> None:
        entry.called = time.monotonic()
        entry.place = read_place(answer)
        self._call(entry, self._started, "start", base_of(self._model))

    def _may_still_start(self, entry: ReplicaEntry, error: Exception) -> bool:
        """Whether Ray is still bringing a replica back. One that it has given up for good gets a new actor later."""
        if isinstance(error, self._ray.exceptions.ActorDiedError):  # such as a class that cannot be imported there
            self._actors.end(entry.number, entry.actor)
            entry.actor = None
            if not self._has_been_ready:
                self._error = self._error or EngineError(f"{entry.where} did not start: {last_line(error)}")
            return False
        has_time = time.monotonic() - entry.began <= self.startup_timeout_s
        return has_time and is_refused(self._ray, error, entry.called)

    def _started(self, entry: ReplicaEntry, answer: Mapping[str, Any]) -> None:
        if "error" in answer:
            return
        entry.place |= {"dtype": str(answer["dtype"])}
        longest = int(answer["max_model_len"])
        problem = find_other_model(answer["model"], self._described)
        if not problem and self._has_been_ready and longest < self._max_model_len:
            problem = (
                f"takes only {longest} tokens of prompt and completion, and the run needs {self._max_model_len}: its "
                "machine has less memory, or another vLLM"
            )
        if problem:
            self._lose(entry, problem, failure=_AS_ENGINE_ERROR)
            return
        entry.heard = entry.answered = time.monotonic()
        entry.state = State.LOADING
        if answer["weights"] is not None:
            version, sums = answer["weights"]
            entry.left = int(version), dict(sums)
        self._max_model_len = min(longest, self._max_model_len or longest)
        self._call(entry, self._taken, "take", TAKE_TIMEOUT_S)
        if self._table is not None:
            self._send_weights(entry, self._table)

    def _send_weights(self, entry: ReplicaEntry, table: Table) -> None:
        is_first = entry.sent < 0
        entry.sent = table.version
        if entry.state is State.LOADING:
            entry.heard = time.monotonic()
        # weights that wait for requests must not overtake them: these calls run in different threads there
        after = 0 if self.in_flight_weight_updates else entry.latest
        version, sums = entry.left or (-1, {})
        has_them = is_first and version == table.version and not find_difference(table.sums, sums)
        buckets = {} if has_them else dict(table.buckets)
        self._call(entry, self._accepted, "load", table.version, [self._table_ref], buckets, after, has_them)
        if entry.left and is_first:
            what = f"the weights of version {table.version}" if has_them else "its process, and reads new weights"
            log.warning("%s was already running: it keeps %s", entry.where, what)
        if entry.may_prove and (self._probe is not None or not self._can_probe):
            self._ask_for_proof(entry)

    def _ask_for_proof(self, entry: ReplicaEntry) -> None:
        """Once after each start; the replica takes no newer weights before it has answered. The lock is held."""
        entry.is_proving = True
        entry.heard = time.monotonic()
        token_ids = () if self._probe is None else self._probe.token_ids
        handle = partial(self._prove, version=entry.sent, probe=self._probe)
        self._call(entry, handle, "prove", token_ids)

    def _accepted(self, entry: ReplicaEntry, answer: Mapping[str, Any]) -> None:
        if "error" not in answer:
            if not -1 < (version := int(answer["version"])) <= entry.sent:
                raise ValueError(f"version {version}, which was never sent")
            entry.accepted = max(entry.accepted, version)
            if entry.state is State.LOADING and self._table is not None and entry.accepted < self._table.version:
                self._send_weights(entry, self._table)
            self._readmit(entry)

    def _prove(self, entry: ReplicaEntry, answer: Mapping[str, Any], version: int, probe: Probe | None) -> None:
        if "error" in answer:
            return
        if problem := find_other_arithmetic(answer, version, probe):
            self._lose(entry, problem, failure=_AS_ENGINE_ERROR)
            return
        entry.proved = version
        self._readmit(entry)

    def _readmit(self, entry: ReplicaEntry) -> None:
        """Lets requests go to a replica that has accepted the newest weights and has proved to have them.

        One that was behind has done so before: as of any that is READY, the weights before the newest will do.
        """
        if entry.state is not State.LOADING or entry.proved < 0:
            return
        was_behind = entry.behind is not None
        has_caught_up = was_behind and entry.accepted >= self._version_before
        if not has_caught_up and not entry.accepted == entry.verified == self._version:
            return
        is_back = entry.is_named if was_behind else bool(entry.num_failures or entry.num_starts)
        entry.state = State.READY
        entry.heard = time.monotonic()
        entry.behind = None
        entry.is_named = False
        self._has_been_ready = True
        if entry.is_draining:
            return
        self._let_in(entry)
        if is_back:
            log.warning("%s is back, with the weights of version %d", entry.where, entry.accepted)

    def _let_in(self, entry: ReplicaEntry) -> None:
        """Lets requests go to a replica. The lock is held."""
        self._placement.add(entry.number, sum(one.num_tokens for one in entry.held.values()))
        self._none_since = None
        waiting = list(self._waiting.values())
        self._waiting = {}
        self._assign(waiting)

    # -- answers with completions -------------------------------------------------------------------------------------

    def _taken(self, entry: ReplicaEntry, answer: Mapping[str, Any]) -> None:
        if self._receive(entry, answer):
            self._call(entry, self._taken, "take", TAKE_TIMEOUT_S)

    def _receive(self, entry: ReplicaEntry, answer: Mapping[str, Any]) -> bool:
        """Files what a replica hands over; False if that has failed, or the replica is lost with it."""
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
            if entry.state is State.READY and not entry.is_draining and entry.number not in self._placement.load:
                self._let_in(entry)
        if has_progress and entry.state is State.READY and not entry.is_stalled:
            entry.heard = now
        busy_s = float(answer["busy_s"])
        busy_since = max(0.0, busy_s - entry.busy_s)
        self._busy_s += busy_since / max(1, len(self._entries))
        entry.busy_s = busy_s
        num_since = int(answer["num_tokens"]) - entry.num_tokens
        entry.num_tokens = int(answer["num_tokens"])
        entry.num_running = int(answer["num_running"])
        if num_since > 0 and math.isfinite(busy_since):
            self._token_s.append(busy_since * max(1, entry.num_running) / num_since)
        for version, sums in answer["reports"]:
            if not self._verify(entry, version, sums):
                return False
        samples, problem = self._unpack(entry, answer)
        for sample in samples:
            self._placement.finish(entry.number, sample.num_tokens)
        self._file(entry, samples)  # those before one that is wrong are kept
        if problem:
            self._lose(entry, problem)
        return not problem

    def _unpack(
        self, entry: ReplicaEntry, answer: Mapping[str, Any], is_partial: bool = False
    ) -> tuple[list[Sample], str]:
        return entry.unpack(
            answer, vocab_size=self._vocab_size, max_model_len=self.max_model_len, is_partial=is_partial
        )

    def _verify(self, entry: ReplicaEntry, version: int, sums: Mapping[str, int]) -> bool:
        if version > self._version:
            self._lose(entry, f"reports weights of version {version}, which were never sent")
            return False
        entry.sums |= sums
        sent = self._sums.get(version)
        if sent is None:  # newer ones went out while it loaded these, and are compared as a whole
            return True
        if problem := find_difference(sent, entry.sums):
            self._lose(entry, f"{problem} (version {version})")
            return False
        entry.verified = max(entry.verified, version)
        self._readmit(entry)
        return True

    def _file(self, entry: ReplicaEntry, samples: Sequence[Sample]) -> None:
        pending = [*entry.unverified, *samples]
        proved = [sample for sample in pending if sample.completion.versions[-1] <= entry.verified]
        entry.unverified = [sample for sample in pending if sample.completion.versions[-1] > entry.verified]
        self._finished += [sample.completion for sample in proved]
        entry.num_good += len(proved)
        if proved:
            entry.num_failures = 0

    # -- more or fewer replicas ---------------------------------------------------------------------------------------

    def resize(self, replicas: int) -> None:
        """Starts further replicas, or takes some out: they finish what they have, and are ended then.

        Raises:
            ValueError: there must be at least one.
        """
        check_range("RayEngine.resize", "integer positive", replicas=replicas)
        with self._lock:
            staying = [entry for entry in self._entries if not entry.is_draining]
            for entry in [one for one in self._entries if one.is_draining][: max(0, replicas - len(staying))]:
                entry.is_draining = False  # it is still there
                if entry.state is State.READY:
                    self._placement.add(entry.number, sum(one.num_tokens for one in entry.held.values()))
                staying.append(entry)
            for _ in range(replicas - len(staying)):
                entry = ReplicaEntry(self._next_number())
                self._entries.append(entry)
                self._begin(entry)
            # those that are not ready yet first, then those with the least to do
            by_work = sorted(staying, key=lambda e: (e.state is State.READY, self._placement.load.get(e.number, 0)))
            for entry in by_work[: max(0, len(staying) - replicas)]:
                entry.is_draining = True
                self._placement.remove(entry.number)
            self.replicas = replicas
            self.min_replicas = min(self.min_replicas, replicas)
            log.info("%d replicas from now on", replicas)

    def _next_number(self) -> int:
        used = {entry.number for entry in self._entries}
        return next(number for number in range(len(used) + 1) if number not in used)

    def _remove(self, entry: ReplicaEntry) -> None:
        """Ends a replica that has finished what it had. The lock is held."""
        self._entries.remove(entry)
        self._num_tokens_before += entry.num_tokens
        self._forget_calls(entry)
        start_thread(self._stop, [entry], name="stop-replica")

    # -- faults -------------------------------------------------------------------------------------------------------

    def _look_after(self, now: float) -> None:
        """Starts replicas anew that wait for it, and loses those that hang. The lock is held."""
        still_s = now - self._looked  # nobody looked: this process stood still, or was not asked for tokens
        if still_s < LOOK_INTERVAL_S:
            return
        self._looked = now
        for entry in list(self._entries):
            if still_s > FROZEN_AFTER_S:
                entry.heard += still_s
                entry.answered += still_s
                entry.behind = entry.behind and entry.behind + still_s
            if entry.is_draining and not entry.held and not entry.unverified:
                self._remove(entry)
                continue
            if self._is_asleep:  # its memory is the trainer's now, and requests wait for it
                entry.heard = entry.answered = now
                self._none_since = self._none_since and now
                continue
            if entry.retry_at is not None and now >= entry.retry_at:
                self._begin(entry)
            self._say_if_silent(entry, now)
            if entry.is_silent and entry.number in self._placement.load and len(self._placement) > 1:
                self._placement.remove(entry.number)
            self._move_on(entry, now)
            if entry.is_asked and now - entry.heard > self._hang_s:
                limit = f"data.engine.engine.update_timeout_s={self._hang_s:g}"
                self._lose(entry, f"gave no token and no answer within {limit}")
        since = self._none_since
        if since is not None and not len(self._placement) and now - since > self.startup_timeout_s:
            limit = f"startup_timeout_s={self.startup_timeout_s:g}"
            reasons = "; ".join(f"{e.where} {e.why or 'has not started'}" for e in self._entries)
            self._error = self._error or StalledError(f"no replica was ready within {limit}: {reasons}")

    def _say_if_silent(self, entry: ReplicaEntry, now: float) -> None:
        """Names a replica that all others may have to wait for, long before it counts as hung."""
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
                self._hang_s,
            )

    def _lose(
        self, entry: ReplicaEntry, reason: str, *, is_running: bool = True, failure: Mapping[str, str] | None = None
    ) -> None:
        """Takes a replica out; others sample what it has not finished, and Ray starts it again. The lock is held.

        Args:
            entry: the replica.
            reason: completes "replica 3 ...".
            is_running: its process may still run, and is killed.
            failure: error of its engine, as plain data.
        """
        was_in = entry.state in (State.READY, State.LOADING)
        is_new = entry.left is None  # else its failure says nothing about a new process
        held = dict(entry.held)
        for sample in entry.unverified:  # of weights that were never proved right
            sample.assignment.received.discard(sample.position)
            held[sample.assignment.request.id] = sample.assignment
        entry.why = reason
        entry.num_failures += 1
        if is_running:
            entry.num_wrong = 1 if entry.num_good >= NUM_SAMPLES_TO_FORGIVE else entry.num_wrong + 1
            entry.num_good = 0
        self._num_tokens_before += entry.num_tokens
        entry.forget_process()
        self.num_lost += 1
        self._placement.remove(entry.number)
        self._forget_calls(entry)
        is_over = max(entry.num_failures, entry.num_wrong) >= MAX_FAILURES or entry.is_draining
        is_over |= failure is not None and not self._has_been_ready and is_new
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
                self._entries.remove(entry)
        else:
            entry.state = State.STARTING
            entry.began = time.monotonic()
            entry.retry_at = entry.began + RETRY_S
            text = f"{message}{{log}}; {len(held)} requests go to other replicas, and it is started again"
            warn_with_log(self._ray, text, place=entry.place)
        if all(one.state is State.GIVEN_UP for one in self._entries) or (is_over and not self._has_been_ready):
            self._error = self._error or as_error(message, failure)
            return
        if was_in and not len(self._placement):
            self._none_since = self._none_since or time.monotonic()
        again = [one.again() for one in held.values()]
        worst = max(again, key=lambda part: part.num_lost, default=None)
        if worst is not None and worst.num_lost >= MAX_LOSSES:
            self._error = self._error or EngineError(
                f"request {worst.submitted_id} was with {MAX_LOSSES} replicas that were lost, one after the other: "
                f"{message}"
            )
        self._assign(again)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    # -- end ----------------------------------------------------------------------------------------------------------

    @property
    def _actors(self) -> ReplicaActors:
        return set_up(self._replicas)

    def close(self) -> None:
        """Ends the replicas, or leaves them to the next start of the trainer; unblocks `poll` and `load_weights`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            is_sound = self._error is None and not self.has_failed
            self._error = self._error or EngineError("the engine was closed")
            entries = self._entries
            self._entries = []
            self._num_tokens_before += sum(entry.num_tokens for entry in entries)
            self._calls = {}
            self._table_ref = self._table = self._store = None
        if self._replicas is not None:
            self._replicas.leave()
        if self._is_taken_over:
            return
        if is_sound and self._replicas is not None and self._replicas.outlive_the_trainer:
            entries = [e for e in entries if e.state not in (State.LOADING, State.READY) or e.is_draining]
        self._stop(entries)

    def _stop(self, entries: Sequence[ReplicaEntry]) -> None:
        if self._ray is not None and self._ray.is_initialized():
            answering = [entry.actor for entry in entries if entry.state in (State.LOADING, State.READY)]
            stop_actors(self._ray, answering)
            for entry in entries:
                self._actors.end(entry.number, entry.actor)

    def end(self) -> None:
        """Ends a Ray that was started here, unless another engine of this process uses it."""
        runtime.release(self)
        super().end()


_NOTHING: dict[str, Any] = {"assignments": [], "completions": [], "tensors": {}, "state": None}
_AS_ENGINE_ERROR = {"type": "EngineError", "traceback": ""}


def _check_inner(engine: RolloutEngine) -> None:
    name = type(engine).__name__
    if engine.scores:
        raise ValueError(
            f"data.engine.engine must be an engine without an environment, got {name}: "
            "put RayEngine inside of the engine with the environment, as in EpisodeEngine(RayEngine(...), ...)"
        )
    if isinstance(engine, RayEngine):
        raise ValueError("data.engine.engine must be a single engine, got RayEngine")
