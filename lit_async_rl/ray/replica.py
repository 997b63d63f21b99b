"""One engine in a Ray actor: the process that `RayEngine` sends requests and weights to.

| thread | does | waits for |
|---|---|---|
| `generate` | polls the engine, and keeps what is finished | the engine, at most `POLL_S` |
| Ray's for `control` | `start`, `submit`, `abort`, ... in the order of the calls | the versions that requests need |
| Ray's for `update` | `load` and `prove` in the order of the calls | the engine |
| Ray's for `poll` | `take`: hands over what is finished | something finished, at most its timeout |
| the same | `hand_back` and `partial_completions`: hands over what is not | the engine |
| Ray's for `claim` | `claim`: which trainer the replica works for | - |

Each call names its trainer, and is refused unless that was the last to claim the replica. A trainer that finds a
replica with its engine built takes it over with process, weights and their checksums (`_hand_over`).

Answers are plain data, errors included: type and message.
"""

from __future__ import annotations

import faulthandler
import functools
import inspect
import os
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from torch import Tensor

from lit_async_rl.engines.base import RolloutEngine, set_up
from lit_async_rl.engines.embedded.own_process import as_json, pack_completions, unpack_requests
from lit_async_rl.errors import StalledError
from lit_async_rl.models.weights import LORA_A
from lit_async_rl.ray.identity import describe_model
from lit_async_rl.ray.logs import where_it_is
from lit_async_rl.ray.process import TakenOver
from lit_async_rl.ray.weights import Place, WeightReader, checksum, is_factor
from lit_async_rl.runtime.threads import start_thread
from lit_async_rl.runtime.waiting import FairLock
from lit_async_rl.types import Completion, GenerationRequest, SamplingParams

POLL_S = 0.05  # an abort waits for at most this
GATHER_S = 0.01  # an answer costs both processes a millisecond or two, and others are about to be finished
HAND_OVER_S = 5.0  # for what an earlier trainer had asked for to end
PROOF = -(2**62)  # id of the request that proves which weights sample; resumed samples count down from -1


@dataclass(frozen=True)
class Recipe:
    """Class and arguments of an engine, from which each replica makes its own.

    Args:
        kind: the class, which the replica imports by name.
        settings: arguments by name; engines among them are recipes, too.
    """

    kind: Callable[..., RolloutEngine]
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, engine: RolloutEngine) -> Recipe:
        """Recipe of an engine that was not set up."""
        args, kwargs = engine._made_with
        signature = inspect.signature(type(engine))
        settings = dict[str, Any]()
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            is_rest = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            settings |= value if is_rest else {name: value}
        if "num_slots" in signature.parameters:
            settings["num_slots"] = engine.num_slots  # fewer after one that ran out of memory
        parts = {name: cls.of(value) if isinstance(value, RolloutEngine) else value for name, value in settings.items()}
        return cls(type(engine), parts)

    def make(self, number: int) -> RolloutEngine:
        """The engine of a replica: number 0 has the seed as given, others draw other random numbers."""
        given = self.settings.items()
        settings = {name: part.make(number) if isinstance(part, Recipe) else part for name, part in given}
        if (seed := inspect.signature(self.kind).parameters.get("seed")) is not None:
            settings["seed"] = settings.get("seed", seed.default) + number
        return self.kind(**settings)


def guarded(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Has a method of the replica answer with its error's type and message instead of raising it.

    The first argument is the calling trainer, which is refused unless it has the replica.
    """

    @functools.wraps(method)
    def answer(self: Replica, trainer: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._caller.trainer = trainer
        try:
            self._check_trainer()
            return method(self, *args, **kwargs)
        except Exception as error:
            traceback.print_exc()  # into the log of this process
            return {"error": as_json(error)}

    return answer


class Replica:
    """An engine in an actor. After a crash Ray constructs it anew, and `start` is called again."""

    def __init__(self, recipe: Recipe, number: int) -> None:
        faulthandler.enable()
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self._recipe = recipe
        self._number = number
        self._trainer = ""  # the latest that has claimed it
        self._caller = threading.local()  # `trainer`: whose call this thread answers
        self._described: dict[str, Any] = {}  # answer of `start`
        self._served = ""  # trainer that `start` was called by; empty in a new process
        self._engine: RolloutEngine | None = None
        self._changed = threading.Condition()  # guards all below
        self._finished: list[tuple[int, Completion]] = []  # with the assignment that each belongs to
        self._assignments: dict[int, int] = {}  # the latest, by request
        self._submitted = 0  # number of the latest assignment that the engine has
        self._reports: list[tuple[int, dict[str, int]]] = []  # versions with checksums
        self._failure: dict[str, str] | None = None
        self._proof: Completion | None = None
        self._is_stopped = False
        self._loaded = -1  # newest version that the engine has accepted
        self._limit_s = 600.0
        self._merged: set[str] = set()  # weights with adapters: the engine adds them, in its own arithmetic
        self._sent_dtypes: dict[str, torch.dtype] = {}
        self._received: dict[int, dict[str, Tensor]] = {}  # not reported yet, by version
        self._sums: dict[str, int] = {}  # of the weights in use, as reported; empty if they are not known
        self._version = -1  # of these
        self._updating = threading.Lock()  # while weights are loaded or proved
        self._first_random_state: Tensor | None = None  # before the first token
        self._before = (0.0, 0)  # seconds and tokens for earlier trainers

    @property
    def engine(self) -> RolloutEngine:
        """The engine, set up."""
        return set_up(self._engine)

    # -- control ------------------------------------------------------------------------------------------------------

    def claim(self, trainer: str) -> dict[str, Any]:
        """Gives the replica to a trainer, and returns its place; calls of an earlier trainer that wait here end."""
        with self._changed:
            self._trainer = trainer
            self._changed.notify_all()
        return where_it_is(ray)

    @guarded
    def start(self, model: str) -> dict[str, Any]:
        """Builds the engine, unless an earlier trainer has, and describes it.

        For an engine that is there already, the answer has version and checksums of its weights.
        """
        before = self._served
        self._served = self._caller.trainer
        if before:
            # the trainer has lost this process, and may not know what still runs in it
            if before == self._served or not self._is_usable(model) or not self._hand_over():
                os._exit(1)
            needs_all = self.engine.needs_weights or not self._sums
            return self._described | {"weights": None if needs_all else (self._version, dict(self._sums))}
        engine = self._recipe.make(self._number)
        limit_s = self._limit_s = engine.update_timeout_s or self._limit_s
        self._turn = FairLock(limit_s, f"the engine's poll (update_timeout_s={limit_s:g})")
        engine.setup(model)
        self._is_watched = engine.watch_weights(self._report)
        self._reader = WeightReader(ray.get, engine.takes_changes)
        self._engine = engine
        start_thread(self._generate, name="generate")
        self._described = {
            "model": describe_model(model),
            "max_model_len": int(self.engine.max_model_len),
            "dtype": str(self.engine.dtype),
        }
        return self._described | {"weights": None}

    def _is_usable(self, model: str) -> bool:
        """Whether there is an engine that works, and its model is unchanged."""
        if self._engine is None or self._failure is not None or self._is_stopped:
            return False
        return bool(self._described["model"] == describe_model(model))

    def _hand_over(self) -> bool:
        """Ends an earlier trainer's requests; False if that takes too long, as with an engine that hangs.

        Afterwards the engine is as after its start, random numbers included, except for its weights.
        """
        engine = self.engine
        try:
            with self._turn.hold(HAND_OVER_S):
                engine.abort([*self._assignments, PROOF])
        except StalledError:
            return False
        if not self._updating.acquire(timeout=HAND_OVER_S):
            return False
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: not self._received or self._failure, HAND_OVER_S):
                    return False
                self._finished = []
                self._assignments = {}
                self._reports = []
                self._submitted = 0
                self._loaded = -1
                self._proof = None
                self._before = (float(engine.busy_s), int(engine.num_tokens))
                self._reader = WeightReader(ray.get, engine.takes_changes)
            if self._first_random_state is not None:
                engine.set_random_state(self._first_random_state)
        finally:
            self._updating.release()
        return self._failure is None

    def _wait(self, condition: Callable[[], Any], limit_s: float | None = None) -> bool:
        """Waits for the engine with `_changed` held; False after the limit.

        Raises:
            TakenOver: another trainer has claimed the replica.
        """

        def is_over() -> Any:
            return condition() or self._failure or not self._is_current

        found = self._changed.wait_for(is_over, self._limit_s if limit_s is None else limit_s)
        self._check_trainer()
        return bool(found)

    @property
    def _is_current(self) -> bool:
        """Whether the trainer whose call this thread answers still has the replica."""
        return bool(self._trainer == self._caller.trainer)

    def _check_trainer(self) -> None:
        if not self._is_current:
            raise TakenOver("another trainer has it")

    @guarded
    def submit(self, requests: Sequence[dict[str, Any]], assignments: Sequence[int], version: int) -> dict[str, Any]:
        """Submits packed requests once the engine has accepted the weights of `version`."""
        with self._changed:
            if not self._wait(lambda: self._loaded >= version):
                raise StalledError(
                    f"the engine did not accept the weights of version {version} within {self._limit_s:g} s"
                )
            unpacked = unpack_requests(requests)
            for request, assignment in zip(unpacked, assignments, strict=True):
                self._assignments[request.id] = assignment
        self.engine.submit(unpacked)
        with self._changed:
            self._submitted = max(assignments, default=self._submitted)
            self._changed.notify_all()
        return {}

    @guarded
    def abort(self, request_ids: Sequence[int]) -> dict[str, Any]:
        """Aborts requests, and drops their finished samples."""
        gone = set(request_ids)
        with self._turn.hold():
            self.engine.abort(request_ids)
            with self._changed:
                self._finished = [(n, c) for n, c in self._finished if c.request_id not in gone]
                for request_id in gone:
                    self._assignments.pop(request_id, None)
        return {}

    @guarded
    def partial_completions(self) -> dict[str, Any]:
        """Packed partial completions, with their assignments."""
        with self._turn.hold(), self._changed:
            return _packed(self._numbered(self.engine.partial_completions()))

    @guarded
    def random_state(self) -> dict[str, Any]:
        """State of the engine's random numbers."""
        state = self.engine.random_state()
        return {"state": None if state is None else state.numpy()}

    @guarded
    def set_random_state(self, state: Any) -> dict[str, Any]:
        """Restores a state of random numbers."""
        self.engine.set_random_state(torch.from_numpy(state.copy()))
        return {}

    # -- update -------------------------------------------------------------------------------------------------------

    @guarded
    def load(
        self, version: int, table: Sequence[Any], buckets: Mapping[int, Any], after: int, has_them: bool = False
    ) -> dict[str, Any]:
        """Loads weights from the object store.

        Args:
            version: of the weights.
            table: reference of the list of places, in a list, so that Ray does not read it for us.
            buckets: references by number.
            after: number of the assignment that the engine must have before.
            has_them: load nothing, because the engine has these weights from an earlier trainer.
        """
        with self._updating:
            self._check_trainer()
            return self._keep_weights(version, table) if has_them else self._load(version, table, buckets, after=after)

    def _keep_weights(self, version: int, table: Sequence[Any]) -> dict[str, Any]:
        """Counts the weights in use as loaded, and reports their checksums."""
        places = [Place(*place) for place in ray.get(table[0])]
        self._reader.keep(places)
        with self._changed:
            self._loaded = version
            self._reports.append((version, dict(self._sums)))
            self._changed.notify_all()
        return {"version": version}

    def _load(self, version: int, table: Sequence[Any], buckets: Mapping[int, Any], after: int) -> dict[str, Any]:
        places = [Place(*place) for place in ray.get(table[0])]
        received = dict[str, Tensor]()
        with self._changed:
            if not self._wait(lambda: self._submitted >= after):
                raise StalledError(
                    f"the weights of version {version} cannot be loaded: earlier requests did not reach the "
                    f"engine within {self._limit_s:g} s"
                )
            self._merged = {p.name.removesuffix(LORA_A) + ".weight" for p in places if p.name.endswith(LORA_A)}
            self._sent_dtypes |= {place.name: getattr(torch, place.dtype) for place in places}
            self._received[version] = received
        try:
            self.engine.load_weights(version, self._reader.stream(places, buckets, received))
        except BaseException:  # such as that of a trainer that has died, whose objects are gone
            with self._changed:
                self._received.pop(version, None)
                self._sums = {}  # what it has is not known
            raise
        with self._changed:
            self._loaded = version
            self._changed.notify_all()
        if not self._is_watched:
            self._report(version, ())
        return {"version": version}

    @guarded
    def prove(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """Samples a token, and computes log-probabilities of `token_ids` unless empty, with the weights loaded last.

        It runs before any request of the run, and leaves the engine's random numbers as they were.
        """
        engine = self.engine
        with self._updating:
            self._check_trainer()
            state = engine.random_state()
            if self._first_random_state is None:  # here: with its first weights an engine checks itself
                self._first_random_state = state
            sampling = SamplingParams(max_tokens=1, temperature=0.0)
            prompt = tuple(token_ids[:1]) or (0,)
            engine.submit([GenerationRequest(id=PROOF, prompt_ids=prompt, num_samples=1, sampling=sampling)])
            with self._changed:
                self._wait(lambda: self._proof is not None)
                proof = self._proof
            if proof is None:
                raise StalledError(f"no token was sampled within {self._limit_s:g} s")
            logprobs = engine.prompt_logprobs(token_ids) if token_ids else None
            if state is not None:
                engine.set_random_state(state)
            return {"versions": list(proof.versions), "logprobs": logprobs, "dtype": str(engine.dtype)}

    def _report(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Called by the engine before the next token, in the thread that has updated it."""
        with self._changed:
            received = dict[str, Tensor]()
            for number in sorted(n for n in self._received if n <= version):  # updates may have been joined
                received |= self._received.pop(number)
        sums = {}
        for name, tensor in weights:
            if name not in self._merged:
                # back to the dtype that was sent, which is exact where the engine's is wider
                sums[name] = checksum(tensor.to(self._sent_dtypes.get(name, tensor.dtype)))
        for name, tensor in received.items():
            if not self._is_watched or name in self._merged or is_factor(name):
                sums[name] = checksum(tensor)
        with self._changed:
            self._reports.append((version, sums))
            self._sums = self._sums | sums
            self._version = version
            self._changed.notify_all()

    # -- poll ---------------------------------------------------------------------------------------------------------

    @guarded
    def take(self, timeout_s: float) -> dict[str, Any]:
        """Results finished since the last call, packed; waits at most `timeout_s` for the first."""
        engine = self.engine
        with self._changed:
            self._wait(lambda: self._finished or self._reports, timeout_s)
            if engine.num_running:  # the last ones are not kept waiting
                self._wait(lambda: self._reports or not engine.num_running, GATHER_S)
        return self._take()

    @guarded
    def hand_back(self, request_ids: Sequence[int]) -> dict[str, Any]:
        """Aborts requests, except those that still wait for weights; answers as `take`, with their partial samples."""
        gone = set(request_ids)
        with self._turn.hold():
            partial = [c for c in self.engine.partial_completions() if c.request_id in gone]
            self._keep(self.engine.poll(0.0))  # what has finished meanwhile would be dropped
            self.engine.abort(request_ids)
            answer = self._take()
        with self._changed:
            return answer | {"begun": _packed(self._numbered(partial))}

    def _take(self) -> dict[str, Any]:
        """Results, reports and progress since the last call."""
        engine = self.engine
        with self._changed:
            finished = self._finished
            reports = self._reports
            self._finished = []
            self._reports = []
        answer = _packed(finished)
        answer |= {
            "reports": reports,
            "busy_s": float(engine.busy_s) - self._before[0],
            "num_tokens": int(engine.num_tokens) - self._before[1],
            "num_running": int(engine.num_running or 0),
        }
        return answer if self._failure is None else {**answer, "error": self._failure}

    def _generate(self) -> None:
        engine = self.engine
        try:
            while not self._is_stopped:
                with self._turn.hold():
                    self._keep(engine.poll(POLL_S))
        except Exception as error:
            traceback.print_exc()
            with self._changed:
                self._failure = as_json(error)
                self._changed.notify_all()

    def _keep(self, finished: Sequence[Completion]) -> None:
        if not finished:
            return
        with self._changed:
            self._proof = next((c for c in finished if c.request_id == PROOF), self._proof)
            self._finished += self._numbered(c for c in finished if c.request_id != PROOF)
            self._changed.notify_all()

    def _numbered(self, completions: Iterable[Completion]) -> list[tuple[int, Completion]]:
        """Completions with the numbers of their assignments, -1 for an ended request; `_changed` is held."""
        return [(self._assignments.get(c.request_id, -1), c) for c in completions]

    @guarded
    def sleep(self) -> dict[str, Any]:
        """Has the engine free its memory until the next weights, or the next request."""
        self.engine.sleep()
        return {}

    def stop(self) -> None:
        """Closes the engine, which ends its own processes; then the actor may be killed. Anybody may call it."""
        self._is_stopped = True
        if self._engine is not None:
            self._engine.close()


def _packed(completions: Sequence[tuple[int, Completion]]) -> dict[str, Any]:
    """Completions with their assignments, as plain data."""
    packed, tensors = pack_completions([completion for _, completion in completions])
    return {
        "assignments": [assignment for assignment, _ in completions],
        "completions": packed,
        "tensors": {name: tensor.numpy() for name, tensor in tensors.items()},
    }
