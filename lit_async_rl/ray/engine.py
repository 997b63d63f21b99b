"""Several engines as Ray actors behind the interface of one.

`RayEngine` runs in the trainer's process, on the leading rank: admission, versions and the staleness bound are as with
any engine. It publishes weights and waits for its replicas; `fleet.Fleet` manages them, and `requests.Requests` assigns
requests to them.

| who | waits for | woken by |
|---|---|---|
| `poll` (producer's thread) | the next answer of any replica, at most its timeout | Ray |
| `load_weights` in flight (trainer's thread) | the first replica that has accepted the weights before these | Ray |
| `load_weights` otherwise, and the first one | the first replica, then at least `OTHERS_S` for the others | Ray |
| `setup` | `min_replicas`, at most `startup_timeout_s` | Ray |

Each of these waits handles every answer that comes (`Fleet.turn`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_async_rl.engines.base import EngineWrapper, Probe, RolloutEngine, check_request, set_up
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.errors import StalledError
from lit_async_rl.ray import runtime
from lit_async_rl.ray.actors import Resources, first_line
from lit_async_rl.ray.entries import Part, ReplicaEntry, State
from lit_async_rl.ray.fleet import Fleet
from lit_async_rl.ray.ownership import ReplicaActors
from lit_async_rl.ray.weights import WeightStore
from lit_async_rl.runtime.waiting import clock
from lit_async_rl.types import Completion, GenerationRequest
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.device_memory import free_cached_memory

OTHERS_S = 10.0  # for other replicas to take weights that must be waited for, after the first one has
SHARE_FOR_OTHERS = 0.1  # of the time in which none has taken weights: further time for others, about as slow
ANSWER_S = 10.0  # for an answer that a checkpoint can do without
log = logging.getLogger(__name__)


class RayEngine(EngineWrapper):
    """Replicas of any engine, each a Ray actor; on this machine, or wherever a Ray cluster has room.

    Requests go to the replica with the fewest outstanding tokens, those of a session to the one that has its beginning.
    When a replica dies, hangs, or gives an invalid answer, others sample what it has not finished, and Ray starts it
    again. It takes part once it has proved to have the trainer's model and current weights: by their checksums, by a
    sampled token, and by log-probabilities of a fixed sequence.

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
        min_replicas: training begins with so many, and others join later; None is all.
        session_margin: a request leaves its session's replica if that has more outstanding tokens than the least loaded
            one, by more than so many times the request's own.
        spread: places replicas on different nodes where possible, rather than on few.
        delta: send only the bitwise changes of weights, in the engine's dtype, between nodes; the trainer and each
            replica keep a copy of the weights in host memory for it.

    Attributes:
        update_timeout_s: of the inner engine. A replica that takes longer for an update, or gives no token for so long
            while it holds requests, counts as hung and is replaced.
        startup_timeout_s: of the inner engine; also the longest time without any replica.
        num_lost: replicas lost so far.
        held_s: seconds in which the trainer waited for replicas that did not answer, or that were later than others to
            take weights; it does not wait while another replica is ready.

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
        self._resources = Resources({"CPU": num_cpus, "GPU": num_gpus, **(resources or {})}, spread)
        self._ray: Any = None
        self._store: WeightStore | None = None
        self._fleet = Fleet(session_margin)

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
        return self._fleet.max_model_len

    @property
    def busy_s(self) -> float:
        """Mean over the replicas."""
        return self._fleet.busy_s

    @property
    def num_lost(self) -> int:
        """Replicas lost so far."""
        return self._fleet.num_lost

    @property
    def num_tokens(self) -> int:
        return self._fleet.num_tokens

    @property
    def num_running(self) -> int:
        with self._fleet.lock:
            return sum(entry.num_running for entry in self._fleet.entries)

    @property
    def needs_weights(self) -> bool:  # type: ignore[override]
        return self._fleet.is_asleep and self.sleep_level == 2

    @property
    def needs_probe(self) -> bool:  # type: ignore[override]
        return self._fleet.needs_probe

    @property
    def starting(self) -> str:
        with self._fleet.lock:
            num = sum(entry.state in (State.LOADING, State.READY) for entry in self._fleet.entries)
        return f"{num} of {self.min_replicas} replicas have started; each loads the model, and {self._room()}"

    def _room(self) -> str:
        """Needs of a replica, and the cluster's supply, for messages."""
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
        with self._fleet.lock:
            return self._fleet.requests.num_replicas

    @property
    def pids(self) -> list[int]:
        """Known processes of the replicas."""
        with self._fleet.lock:
            return [entry.place["pid"] for entry in self._fleet.entries if entry.place]

    # -- trainer's thread ---------------------------------------------------------------------------------------------

    def setup(self, model: str) -> None:
        """Connects to Ray, starts the replicas, and waits until `min_replicas` have built their engines.

        Raises:
            SetupError: Ray is not installed, or not to be reached.
            StalledError: too few replicas had started within `startup_timeout_s`.
            EngineError: a replica's process ended. An engine's own errors are raised as they are.
        """
        self._ray = runtime.connect(self.address, self.replicas * self.num_cpus, user=self)
        actors = ReplicaActors(self._ray, self.engine, model=model, resources=self._resources)
        self._fleet.start(self._ray, self.engine, model=model, actors=actors, number=self.replicas)
        deadline = clock.now() + self.startup_timeout_s
        while (num := sum(entry.state is not State.STARTING for entry in self._fleet.entries)) < self.min_replicas:
            self._fleet.turn(0.2)
            self._fleet.check()
            if clock.now() > deadline:
                raise StalledError(
                    f"data.engine.min_replicas={self.min_replicas} replicas are needed, but only {num} had started "
                    f"within startup_timeout_s={self.startup_timeout_s:g}: each replica {self._room()}"
                )
        self.dtype = next(entry.place["dtype"] for entry in self._fleet.entries if "dtype" in entry.place)
        dtype = getattr(torch, self.dtype, None)
        self._store = WeightStore(self._ray, dtype if isinstance(dtype, torch.dtype) else None, delta=self.delta)

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Puts the weights into the object store once, and has all replicas load them.

        In flight, the trainer does not wait for them: a replica samples later requests only after it has accepted these
        weights, and samples from them count once its checksums have come. A replica that has not even accepted the
        previous weights gets no requests until it has caught up.

        Raises:
            EngineError: the object store is full, or no replica is left.
            StalledError: no replica has accepted the weights within `update_timeout_s`.
            ValueError: names or shapes are not those of the engine's model, see `EmbeddedEngine`.
        """
        store = self._store
        self._fleet.check()  # after that: `close` takes the store away
        self._await_acceptance("the weights before these", others_s=0.0)
        if self._fleet.is_asleep:
            free_cached_memory()  # of the trainer, where the replicas need it now
        is_first = self._fleet.weights.version < 0
        table = set_up(store).publish(version, weights)
        self._fleet.check()
        is_current = self.probe is not None and self.probe.version == version
        self._fleet.give(table, self.probe if is_current else None)
        if is_first:
            self._await_first()
        elif not self.in_flight_weight_updates:
            self._await_acceptance(f"version {version}", others_s=OTHERS_S)

    def take_probe(self, probe: Probe) -> None:
        self._fleet.take_probe(probe)

    def sleep(self) -> None:
        """Has all replicas free their memory until the next weights, unless requests are running.

        A replica that is lost meanwhile starts again when the others wake up.
        """
        fleet = self._fleet
        with fleet.lock:
            is_idle = not fleet.requests.waiting and not any(entry.held for entry in fleet.entries)
            if not self.sleep_level or fleet.is_asleep or not is_idle:
                return
            fleet.is_asleep = True  # before they are asked, so that a request that comes now wakes them
            asked = fleet.ready
        for entry, answer in zip(asked, self._ask_all("sleep", entries=asked), strict=True):
            with fleet.lock:
                if "error" in answer and entry.state is State.READY:
                    fleet.lose(entry, "did not free its memory, which the trainer needs")

    def _await_acceptance(self, what: str, others_s: float) -> None:
        """Waits for a replica to accept what it was sent, then for the others, which are behind afterwards.

        The others get `others_s`, or `SHARE_FOR_OTHERS` of the time that the first one took if that is longer. If none
        accepts it within the limit, all are lost.
        """
        fleet = self._fleet
        began = clock.now()
        others_until: float | None = None
        while True:
            with fleet.lock:
                ready = fleet.ready
                late = [entry for entry in ready if entry.accepted < entry.sent]
                if not late:
                    return
                now = clock.now()
                if any(fleet.requests.go_to(entry) for entry in ready if entry not in late):
                    if others_until is None:
                        others_until = now + max(others_s, SHARE_FOR_OTHERS * (now - began))
                    if now >= others_until:
                        for entry in late:
                            fleet.fall_behind(entry)
                        return
                elif now - began > fleet.hang_s:
                    limit = f"data.engine.engine.update_timeout_s={fleet.hang_s:g}"
                    for entry in late:
                        fleet.lose(entry, f"did not accept {what} within {limit}")
            turned = time.monotonic()
            fleet.turn(0.2)
            fleet.check()
            if len(late) < len(ready) or any(entry.is_silent for entry in late):
                self.held_s += time.monotonic() - turned

    def _await_first(self) -> None:
        """Waits until a replica has proved to have the first weights, and `OTHERS_S` for `min_replicas` of them."""
        deadline = clock.now() + self._fleet.hang_s
        is_first = True
        while self.num_ready < self.min_replicas and clock.now() < deadline:
            self._fleet.turn(0.2)
            self._fleet.check()
            if is_first and self.num_ready:
                deadline = clock.now() + OTHERS_S
                is_first = False
        if not self.num_ready:
            raise StalledError(f"no replica received the first weights within update_timeout_s={self._fleet.hang_s:g}")

    def random_state(self) -> Tensor | None:
        """Of all replicas [replicas, bytes], of one alone as its engine has it; None unless all of them are there."""
        found = self._ask_all("random_state", limit_s=ANSWER_S)
        if len(found) < self.replicas or any(answer["state"] is None for answer in found):
            return None
        states = [torch.from_numpy(answer["state"].copy()) for answer in found]
        return states[0] if self.replicas == 1 else torch.stack(states)

    def set_random_state(self, state: Tensor) -> None:
        """Restores the states; ignores those of another number of replicas."""
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
        self._fleet.check()
        for request in requests:  # here, where the caller gets the error; a replica would break
            check_request(request, self.max_model_len, self._fleet.vocab_size)
        with self._fleet.lock:
            if self._fleet.is_asleep and self.sleep_level == 1:
                free_cached_memory()
                self._fleet.is_asleep = False
            self._fleet.assign([Part(request, tuple(range(request.num_samples))) for request in requests])

    def poll(self, timeout_s: float) -> list[Completion]:
        deadline = time.monotonic() + timeout_s
        while not self._fleet.requests.finished and not self._fleet.closed:
            self._fleet.check()
            self._fleet.turn(max(0.0, deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                break
        with self._fleet.lock:
            return self._fleet.requests.take_finished()

    def abort(self, request_ids: Sequence[int]) -> None:
        with self._fleet.lock:
            self._fleet.requests.abort(set(request_ids), self._fleet.entries)

    def partial_completions(self) -> list[Completion]:
        fleet = self._fleet
        with fleet.lock:
            asked = [entry for entry in fleet.entries if entry.held and not entry.is_silent]
            known = fleet.requests.begun(fleet.entries)
            finished = list(fleet.requests.finished)
        answers = self._ask_all("partial_completions", entries=asked, limit_s=ANSWER_S)
        for entry, answer in zip(asked, answers, strict=False):
            with fleet.lock:
                samples, problem = fleet.unpack(entry, answer, is_partial=True)
                known += [sample.completion for sample in samples]
                if problem:
                    fleet.lose(entry, problem)
        return list({(c.request_id, c.sample_index): c for c in (*known, *finished)}.values())

    def _ask_all(
        self,
        name: str,
        args: Sequence[tuple[Any, ...]] | None = None,
        entries: Sequence[ReplicaEntry] | None = None,
        limit_s: float | None = None,
    ) -> list[dict[str, Any]]:
        """Answers of the replicas that are ready; `_NOTHING` with an `error` in place of one that does not come."""
        with self._fleet.lock:
            asked = self._fleet.ready if entries is None else entries
            refs = self._fleet.ask(asked, name, args or [()] * len(asked))
        answers = []
        for ref in refs:
            try:
                answer = self._ray.get(ref, timeout=min(limit_s or self._fleet.hang_s, self._fleet.hang_s))
            except Exception as error:
                log.warning("%s: a replica did not answer: %s", name, first_line(error))
                answer = {"error": True}
            answers.append(_NOTHING | answer)
        return answers

    # -- more or fewer replicas ---------------------------------------------------------------------------------------

    def resize(self, replicas: int) -> None:
        """Starts further replicas, or ends some after all requests that they hold.

        Raises:
            ValueError: there must be at least one.
        """
        check_range("RayEngine.resize", "integer positive", replicas=replicas)
        self._fleet.resize(replicas)
        self.replicas = replicas
        self.min_replicas = min(self.min_replicas, replicas)
        log.info("%d replicas from now on", replicas)

    # -- end ----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the replicas, or leaves them to the trainer's next start; unblocks `poll` and `load_weights`."""
        self._fleet.close(self.has_failed)
        self._store = None

    def end(self) -> None:
        """Ends a Ray that was started here, unless another engine of this process uses it."""
        runtime.release(self)
        super().end()


_NOTHING: dict[str, Any] = {"assignments": [], "completions": [], "tensors": {}, "state": None}


def _check_inner(engine: RolloutEngine) -> None:
    name = type(engine).__name__
    if engine.scores:
        raise ValueError(
            f"data.engine.engine must be an engine without an environment, got {name}: "
            "put RayEngine inside of the engine with the environment, as in EpisodeEngine(RayEngine(...), ...)"
        )
    if isinstance(engine, RayEngine):
        raise ValueError("data.engine.engine must be a single engine, got RayEngine")
