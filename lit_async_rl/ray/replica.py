"""One engine in a Ray actor: the process that `RayEngine` sends requests and weights to.

| thread | does | waits for |
|---|---|---|
| `generate` | polls the engine, and keeps what is finished | the engine, at most `POLL_S` |
| Ray's for `control` | `start`, `submit`, `abort`, ... in the order of the calls | the versions that requests need |
| Ray's for `update` | `load` and `prove` in the order of the calls | the engine |
| Ray's for `poll` | `take`: hands over what is finished | something finished, at most its timeout |

An error never crosses as an object: each answer is plain data, with the error's type and message where there is one.
"""

from __future__ import annotations

import faulthandler
import functools
import inspect
import os
import socket
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
from lit_async_rl.engines.embedded.own_process import pack_completions, unpack_requests
from lit_async_rl.errors import StalledError
from lit_async_rl.models.weights import LORA_A, LORA_B
from lit_async_rl.ray.identity import describe_model
from lit_async_rl.ray.weights import Place, WeightReader, checksum
from lit_async_rl.types import Completion, GenerationRequest, SamplingParams
from lit_async_rl.utils.waiting import FairLock

POLL_S = 0.05  # an abort waits for at most this
MAX_ERROR_CHARS = 4000
MAX_LINE_CHARS = 300
NOT_OF_INTEREST = (":job_id:", ":actor_name:", "Extension modules:")  # lines of a worker's log
PROOF = -1  # number of the request that proves which weights sample


@dataclass(frozen=True)
class Recipe:
    """Class and arguments of an engine, from which each replica makes its own.

    Args:
        kind: the class, imported by its name in the replica.
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
        """The engine of a replica: that of number 0 is as it was described, others draw other random numbers."""
        settings = {name: part.make(number) if isinstance(part, Recipe) else part for name, part in self._of(number)}
        return self.kind(**settings)

    def _of(self, number: int) -> Iterable[tuple[str, Any]]:
        seed = inspect.signature(self.kind).parameters.get("seed")
        if seed is None:
            return self.settings.items()
        return (dict(self.settings) | {"seed": self.settings.get("seed", seed.default) + number}).items()


def guarded(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Has a method of the actor answer with its error's type and message instead of raising it."""

    @functools.wraps(method)
    def answer(self: Replica, *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            traceback.print_exc()  # into the log of this process
            return {"error": as_data(error)}

    return answer


def as_data(error: BaseException) -> dict[str, str]:
    """An error as plain data, see `from_json` of the embedded engine."""
    text = "".join(traceback.format_exception(error))[-MAX_ERROR_CHARS:]
    return {"type": type(error).__name__, "message": str(error), "traceback": text}


class Replica:
    """The actor. Its constructor does nothing: Ray makes it anew after a crash, and `start` must be called again.

    Args:
        recipe: of the engine.
        number: of this replica, from 0.
    """

    def __init__(self, recipe: Recipe, number: int) -> None:
        faulthandler.enable()
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self._recipe = recipe
        self._number = number
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
        self._was_started = False
        self._limit_s = 600.0
        self._merged: set[str] = set()  # weights with adapters: the engine adds them, in its own arithmetic
        self._sent_dtypes: dict[str, torch.dtype] = {}
        self._received: dict[int, dict[str, Tensor]] = {}  # not reported yet, by version

    @property
    def engine(self) -> RolloutEngine:
        """The engine, set up."""
        return set_up(self._engine)

    # -- control ------------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="control")
    @guarded
    def start(self, model: str) -> dict[str, Any]:
        """Builds the engine, and says where and what it is."""
        if self._was_started:  # the trainer has lost this process, and may not know what still runs in it
            os._exit(1)
        self._was_started = True
        engine = self._recipe.make(self._number)
        limit_s = self._limit_s = engine.update_timeout_s or self._limit_s
        self._turn = FairLock(limit_s, f"the engine's poll (update_timeout_s={limit_s:g})")
        engine.setup(model)
        self._is_watched = engine.watch_weights(self._report)
        self._reader = WeightReader(ray.get, engine.takes_changes)
        self._engine = engine
        threading.Thread(target=self._generate, name="generate", daemon=True).start()
        return {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "node": ray.get_runtime_context().get_node_id(),
            "logs": [os.readlink(f"/proc/self/fd/{fd}") for fd in (1, 2) if os.path.exists(f"/proc/self/fd/{fd}")],
            "model": describe_model(model),
            "max_model_len": int(self.engine.max_model_len),
            "dtype": str(self.engine.dtype),
        }

    @ray.method(concurrency_group="control")
    @guarded
    def submit(self, requests: Sequence[dict[str, Any]], assignments: Sequence[int], version: int) -> dict[str, Any]:
        """Submits packed requests once the engine has accepted the weights of `version`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._loaded >= version or self._failure, self._limit_s):
                raise StalledError(f"weights of version {version} were not accepted within {self._limit_s:g} s")
            unpacked = unpack_requests(requests)
            for request, assignment in zip(unpacked, assignments, strict=True):
                self._assignments[request.id] = assignment
        self.engine.submit(unpacked)
        with self._changed:
            self._submitted = max(assignments, default=self._submitted)
            self._changed.notify_all()
        return {}

    @ray.method(concurrency_group="control")
    @guarded
    def abort(self, request_ids: Sequence[int]) -> dict[str, Any]:
        """Aborts requests, and drops what is finished of them."""
        gone = set(request_ids)
        with self._turn.hold():
            self.engine.abort(request_ids)
            with self._changed:
                self._finished = [(n, c) for n, c in self._finished if c.request_id not in gone]
                for request_id in gone:
                    self._assignments.pop(request_id, None)
        return {}

    @ray.method(concurrency_group="control")
    @guarded
    def partial_completions(self) -> dict[str, Any]:
        """Packed partial completions, with their assignments."""
        with self._turn.hold(), self._changed:
            found = self.engine.partial_completions()
            return _packed([(self._assignments.get(c.request_id, -1), c) for c in found])

    @ray.method(concurrency_group="control")
    @guarded
    def random_state(self) -> dict[str, Any]:
        """State of the engine's random numbers."""
        state = self.engine.random_state()
        return {"state": None if state is None else state.numpy()}

    @ray.method(concurrency_group="control")
    @guarded
    def set_random_state(self, state: Any) -> dict[str, Any]:
        """Restores a state of random numbers."""
        self.engine.set_random_state(torch.from_numpy(state.copy()))
        return {}

    # -- update -------------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="update")
    @guarded
    def load(self, version: int, table: Sequence[Any], buckets: Mapping[int, Any], after: int) -> dict[str, Any]:
        """Loads weights from the object store.

        Args:
            version: of the weights.
            table: reference of the list of places, in a list, so that Ray does not read it for us.
            buckets: references of the buckets by number.
            after: number of the assignment that the engine must have before.
        """
        places = [Place(*place) for place in ray.get(table[0])]
        received = dict[str, Tensor]()
        with self._changed:
            if not self._changed.wait_for(lambda: self._submitted >= after or self._failure, self._limit_s):
                raise StalledError(f"requests before version {version} were not submitted within {self._limit_s:g} s")
            self._merged = {p.name.removesuffix(LORA_A) + ".weight" for p in places if p.name.endswith(LORA_A)}
            self._sent_dtypes |= {place.name: getattr(torch, place.dtype) for place in places}
            self._received[version] = received
        self.engine.load_weights(version, self._reader.stream(places, buckets, received))
        with self._changed:
            self._loaded = version
            self._changed.notify_all()
        if not self._is_watched:
            self._report(version, ())
        return {"version": version}

    @ray.method(concurrency_group="update")
    @guarded
    def prove(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """Samples a token and computes log-probabilities with the weights loaded last; before any request of the run.

        The engine's random numbers are afterwards as they were.

        Args:
            token_ids: a sequence whose log-probabilities are computed; may be empty.
        """
        engine = self.engine
        state = engine.random_state()
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        prompt = tuple(token_ids[:1]) or (0,)
        engine.submit([GenerationRequest(id=PROOF, prompt_ids=prompt, num_samples=1, sampling=sampling)])
        with self._changed:
            self._changed.wait_for(lambda: self._proof is not None or self._failure is not None, self._limit_s)
            proof = self._proof
        if proof is None:
            raise StalledError(f"no token was sampled within {self._limit_s:g} s")
        logprobs = engine.prompt_logprobs(token_ids) if token_ids else None
        if state is not None:
            engine.set_random_state(state)
        return {"versions": list(proof.versions), "logprobs": logprobs, "dtype": str(engine.dtype)}

    def _report(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Called by the engine, in whatever thread has updated it, before the next token."""
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
            if not self._is_watched or name in self._merged or name.endswith((LORA_A, LORA_B)):
                sums[name] = checksum(tensor)
        with self._changed:
            self._reports.append((version, sums))
            self._changed.notify_all()

    # -- poll ---------------------------------------------------------------------------------------------------------

    @ray.method(concurrency_group="poll")
    @guarded
    def take(self, timeout_s: float) -> dict[str, Any]:
        """What was finished since the last call, packed; waits at most `timeout_s` for the first."""
        engine = self.engine
        with self._changed:
            self._changed.wait_for(lambda: self._finished or self._reports or self._failure, timeout_s)
            finished = self._finished
            reports = self._reports
            self._finished = []
            self._reports = []
        answer = _packed(finished)
        answer |= {
            "reports": reports,
            "busy_s": float(engine.busy_s),
            "num_tokens": int(engine.num_tokens),
            "num_running": int(engine.num_running or 0),
        }
        return answer if self._failure is None else {**answer, "error": self._failure}

    def _generate(self) -> None:
        engine = self.engine
        try:
            while not self._is_stopped:
                with self._turn.hold():
                    finished = engine.poll(POLL_S)
                    if finished:
                        self._keep(finished)
        except Exception as error:
            traceback.print_exc()
            with self._changed:
                self._failure = as_data(error)
                self._changed.notify_all()

    def _keep(self, finished: Sequence[Completion]) -> None:
        with self._changed:
            self._proof = next((c for c in finished if c.request_id == PROOF), self._proof)
            self._finished += [(self._assignments.get(c.request_id, -1), c) for c in finished if c.request_id != PROOF]
            self._changed.notify_all()

    @ray.method(concurrency_group="control")
    @guarded
    def sleep(self) -> dict[str, Any]:
        """Has the engine free its memory until the next weights, or the next request."""
        self.engine.sleep()
        return {}

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """Closes the engine, whose own processes end with that; then the actor may be killed."""
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


def tail(paths: Sequence[str], num_lines: int) -> str:
    """The last lines of log files, those of each after the other; empty where none can be read."""
    lines = []
    for path in paths:
        try:
            with open(path, errors="replace") as file:
                lines += [line.rstrip()[:MAX_LINE_CHARS] for line in file.readlines()[-num_lines:]]
        except OSError:
            continue
    return "\n".join(line for line in lines if line and not line.startswith(NOT_OF_INTEREST))
