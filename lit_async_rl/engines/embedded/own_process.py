"""Trainer's side of an embedded engine in a child process; `child.py` is the process."""

from __future__ import annotations

import builtins
import itertools
import logging
import shutil
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from lit_async_rl import errors
from lit_async_rl.engines.base import set_up
from lit_async_rl.engines.embedded.settings import Decoder, DecodeSettings
from lit_async_rl.engines.weight_files import WeightFolders, chunks, folder_with_room, write_folder
from lit_async_rl.errors import EngineError
from lit_async_rl.models.loading import find_device, weight_bytes
from lit_async_rl.models.weights import UNCHANGED
from lit_async_rl.runtime.files import absolute
from lit_async_rl.runtime.process import Child, end_reason
from lit_async_rl.runtime.spans import SpanRecorder, recorder
from lit_async_rl.runtime.waiting import Wait
from lit_async_rl.sampler_records import pack_choices, pack_heads, unpack_choices, unpack_heads
from lit_async_rl.types import Completion, GenerationRequest, SamplingParams

PROGRAM = [sys.executable, "-c", "from lit_async_rl.engines.embedded.child import main; main()"]
FILE_BYTES = 2**30  # size of a file of weights; the trainer holds a copy of one file while it writes
CLOSE_TIMEOUT_S = 5.0
MAX_TRACEBACK_CHARS = 4000  # of an error of the process; the last ones
log = logging.getLogger(__name__)


class DecodeProcess(Decoder):
    """Sends requests and weights to a decode loop in a child process.

    Weights go through files in memory; with in-flight updates, the trainer does not wait until the process has read
    them. With LoRA, merged layers are sent: the process has no frozen weights to add adapters to.
    """

    num_running = 0

    def __init__(self, settings: DecodeSettings) -> None:
        super().__init__(settings)
        self._connection: Connection | None = None
        self._folders: WeightFolders | None = None
        self._finished: deque[Completion] = deque()  # appended to by the reader's thread
        self._taking = threading.Lock()  # of `poll` and `abort`, which take from it in different threads
        self._recorder: SpanRecorder = recorder()  # `setup` sets the recorder of the run
        self._update: tuple[int, Path] | None = None  # message number and folder of the last update sent

    def setup(self, model: str) -> None:
        """Starts the process, which builds the architecture."""
        self._recorder = recorder()  # kept, because a late report must not go to the recorder of the next run
        self._connection = Connection(self._receive_report)
        self._folders = WeightFolders(folder_with_room(weight_bytes(model, getattr(torch, self.dtype))))
        answer, _ = self.connection.ask(
            "setup",
            self.startup_timeout_s,
            f"data.engine.startup_timeout_s={self.startup_timeout_s:g}",
            model=model,
            settings=asdict(self.settings) | {"device": _with_number(self.settings.device)},
        )
        self._max_model_len = answer["max_model_len"]
        self._vocab_size = answer["vocab_size"]

    @property
    def connection(self) -> Connection:
        """Connection to the process.

        Raises:
            SetupError: the process was not started yet.
        """
        return set_up(self._connection)

    # -- producer's thread --------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._check(requests)  # here, so that the caller gets the error; in the process it would end the engine
        self.connection.send({"kind": "submit", "requests": pack_requests(requests)})

    def poll(self, timeout_s: float) -> list[Completion]:
        """Waits for finished samples."""
        if self._closed:
            return []
        try:
            self.connection.wait_for(lambda: self._finished, timeout_s)
        except Exception:
            if not self._closed:  # another thread may have closed the engine
                raise
        with self._taking:
            return self._take()

    def _take(self) -> list[Completion]:
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def abort(self, request_ids: Sequence[int]) -> None:
        self._ask("abort", request_ids=list(request_ids))
        # completions finished before the abort have arrived before its answer, see `Child`
        with self._taking:
            kept = [c for c in self._take() if c.request_id not in set(request_ids)]
            self._finished.extendleft(reversed(kept))

    def partial_completions(self) -> list[Completion]:
        fields, tensors = self._ask("partial_completions")
        return unpack_completions(fields["completions"], tensors)

    # -- trainer's thread ---------------------------------------------------------------------------------------------

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Samples from these weights from the next token on, or after all earlier requests (see `EmbeddedEngine`).

        Raises:
            ValueError: names or shapes are not the model's; with in-flight updates `poll` raises it, but for the first
                update.
            StalledError: older updates were not used within `update_timeout_s`.
            OSError: the files of weights cannot be written.
            EngineError: the process has ended.
        """
        self._finish_update()
        folder = set_up(self._folders).make()
        unchanged = list[str]()

        def changed() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                if tensor is UNCHANGED:
                    unchanged.append(name)
                else:
                    yield name, tensor

        try:
            shards = chunks(changed(), FILE_BYTES, "cpu", dtype=getattr(torch, self.dtype))
            write_folder(folder, shards, {"version": str(version)})
            is_awaited = not self.in_flight_weight_updates or not self._has_weights
            number = self.connection.begin(
                "load_weights",
                must_succeed=not is_awaited,
                version=version,
                folder=str(folder),
                unchanged=unchanged,
                is_recorded=self._recorder.is_started,  # in time: nothing is sampled before the first weights
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._update = (number, folder)
        if is_awaited:
            self._finish_update()
        self._has_weights = True

    def _finish_update(self) -> None:
        """Waits until the process has read the last update, and removes its files.

        With in-flight updates, this happens before the next update is written. Nobody waits earlier: messages are
        executed in order, so requests submitted after an update are sampled with its weights.
        """
        if self._update is None:
            return
        number, folder = self._update
        self._update = None
        try:
            # twice the limit, so that the process times out first: its error names the reason
            self.connection.answer(number, "load_weights", 2 * self.update_timeout_s, self._update_limit)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        found: list[float] = self._ask("prompt_logprobs", token_ids=list(token_ids))[0]["logprobs"]
        return found

    def random_state(self) -> Tensor:
        return self._ask("random_state")[1]["state"]

    def set_random_state(self, state: Tensor) -> None:
        self._ask("set_random_state", {"state": state})

    # -- any thread ---------------------------------------------------------------------------------------------------

    def _ask(self, kind: str, tensors: Mapping[str, Tensor] | None = None, **fields: Any) -> Message:
        return self.connection.ask(kind, self.update_timeout_s, self._update_limit, tensors, **fields)

    def _receive_report(self, report: Message) -> None:
        """Stores a report; called by the reader's thread."""
        fields, tensors = report
        self._finished.extend(unpack_completions(fields["completions"], tensors))
        self.busy_s = fields["busy_s"]
        self.num_tokens = fields["num_tokens"]
        self.num_running = fields["num_running"]
        self._recorder.add(fields["events"])

    def close(self) -> None:
        """Ends the process and unblocks `poll` and all calls."""
        self._closed = True
        if self._connection is not None:
            self._connection.close()
        if self._folders is not None:
            self._folders.close()


def _with_number(device: str) -> str:
    """The device with the index of this rank's: without one, the child would use device 0."""
    resolved = find_device(device)
    if resolved.type == "cpu" or resolved.index is not None:
        return str(resolved)
    return f"{resolved.type}:{torch.accelerator.current_device_index()}"


# -- The trainer's connection to the process of an embedded engine (`child.py`) ---------------------------------------
# | who | waits for | woken by |
# |---|---|---|
# | `ask` (any thread) | its answer, at most its limit | the reader, `close`, the end of the process |
# | `wait_for` (producer's thread) | its condition, at most its timeout | the reader, `close`, the end of the process |
# | the reader | the next message | the process; ended by `close` and by the end of the process |


class Connection:
    """Starts the child process, and exchanges messages with it. The child ends with this process or `close`.

    Args:
        on_report: called by the reader's thread with each report, before waiting threads are woken.
    """

    def __init__(self, on_report: Callable[[Message], None]) -> None:
        self._child = Child(PROGRAM, name="embedded engine", stdout=None, cwd=absolute("."))
        self._on_report = on_report
        self._numbers = itertools.count()
        self._answers = dict[int, Message]()
        # Numbers of messages with fatal errors, because no thread waits for their answers; None stands for messages
        # without a number.
        self._must_succeed: set[int | None] = {None}
        self._error: Exception | None = None  # the first fatal error; raised by every later call
        self._changed = threading.Condition()  # of answers and error; notified by every message, and at the end
        self._child.listen(self._take, thread="embedded-engine")

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._child.pid

    def send(self, fields: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> None:
        """Sends a message.

        Raises:
            EngineError: the process has ended. Fatal errors of the engine are raised as they are.
        """
        if self._error is not None:
            raise self._error
        try:
            self._child.send(fields, as_bytes(tensors or {}))
        except OSError:
            raise EngineError("the embedded engine's process has ended, or the engine was closed") from None

    def ask(
        self, kind: str, limit_s: float, setting: str, tensors: Mapping[str, Tensor] | None = None, **fields: Any
    ) -> Message:
        """Sends a message and returns its answer, see `answer`."""
        return self.answer(self.begin(kind, tensors, **fields), kind, limit_s, setting=setting)

    def begin(
        self, kind: str, tensors: Mapping[str, Tensor] | None = None, must_succeed: bool = False, **fields: Any
    ) -> int:
        """Sends a message and returns its number, for `answer`.

        With `must_succeed`, every later call raises an error of the process, not only `answer`.
        """
        number = next(self._numbers)
        if must_succeed:
            self._must_succeed.add(number)
        self.send({"kind": kind, "call": number, **fields}, tensors)
        return number

    def answer(self, number: int, kind: str, limit_s: float, setting: str) -> Message:
        """Waits for the answer to a message of `begin`.

        Raises:
            StalledError: no answer within `limit_s` seconds; names the call `kind` and the setting of the limit.
            EngineError: the process has ended. Errors of the engine are raised as they are.
        """
        what = f"{kind}: the embedded engine's process did not answer within {limit_s:g} s (set by {setting})"
        Wait(limit_s, what).until(lambda seconds: self.wait_for(lambda: number in self._answers, seconds))
        answer = self._answers.pop(number)
        self._must_succeed.discard(number)
        if "error" in answer[0]:
            raise from_json(answer[0]["error"])
        return answer

    def wait_for(self, condition: Callable[[], Any], timeout_s: float) -> bool:
        """Waits until the condition holds; False on timeout.

        Raises:
            EngineError: the process has ended, or `close` was called. Errors of the engine are raised as they are.
        """
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._error is not None, timeout_s)
            if not condition() and self._error is not None:
                raise self._error
            return bool(condition())

    def _take(self, message: tuple[dict[str, Any], bytes] | None) -> None:
        if message is None:
            status = self._child.status(CLOSE_TIMEOUT_S)
            end = "it still runs" if status is None else end_reason(status)
            self._break(EngineError(f"the embedded engine's process ended ({end})"))
            return
        fields, blob = message
        with self._changed:
            if fields["kind"] == "report":
                self._on_report((fields, as_tensors(blob)))
            elif fields["kind"] == "answer":
                self._answers[fields["call"]] = fields, as_tensors(blob)
            if "error" in fields and fields.get("call") in self._must_succeed:
                self._error = self._error or from_json(fields["error"])
            self._changed.notify_all()

    def _break(self, error: Exception) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the process and unblocks all waits."""
        self._break(EngineError("the engine was closed"))
        self._child.end(patience_s=CLOSE_TIMEOUT_S)


def as_json(error: BaseException) -> dict[str, str]:
    """Fields of an error for the trainer, see `from_json`."""
    text = "".join(traceback.format_exception(error))[-MAX_TRACEBACK_CHARS:]
    return {"type": type(error).__name__, "message": str(error), "traceback": text}


def from_json(error: Mapping[str, str]) -> Exception:
    """The exception that the engine would have raised in this process."""
    name = error["type"]
    message = error["message"]
    of_torch = getattr(torch, name) if name in ("OutOfMemoryError", "AcceleratorError") else None
    kind = of_torch or getattr(errors, name, None) or getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        return kind(message)
    log.error("the embedded engine's process failed:\n%s", error["traceback"])
    return EngineError(f"{name}: {message}")


# -- Messages between the trainer's process and an engine's: JSON, with tensors beside it. Reading one runs no code


Message = tuple[dict[str, Any], dict[str, Tensor]]


def as_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors as the bytes of a message."""
    return save({name: tensor.contiguous() for name, tensor in tensors.items()}) if tensors else b""


def as_tensors(blob: bytes) -> dict[str, Tensor]:
    """Inverse of `as_bytes`."""
    return load(blob) if blob else {}


def pack_requests(requests: Sequence[GenerationRequest]) -> list[dict[str, Any]]:
    """Requests as JSON, without the `prompt`, which this engine does not use."""
    return [vars(request) | {"sampling": asdict(request.sampling), "prompt": None} for request in requests]


def unpack_requests(packed: Sequence[dict[str, Any]]) -> list[GenerationRequest]:
    """Inverse of `pack_requests`."""
    return [
        GenerationRequest(**{**fields, "prompt_ids": tuple(fields["prompt_ids"]), "sampling": _sampling(fields)})
        for fields in packed
    ]


def _sampling(fields: dict[str, Any]) -> SamplingParams:
    sampling = fields["sampling"]
    names = ("stop_token_ids", "stop", "end_token_ids")
    tuples = {name: tuple(sampling[name]) for name in names if sampling[name] is not None}
    return SamplingParams(**{**sampling, **tuples})


def pack_completions(completions: Sequence[Completion]) -> tuple[list[list[Any]], dict[str, Tensor]]:
    """Completions of an engine without an environment, as JSON (numbers are exact) and tensors."""
    packed = [[c.request_id, c.sample_index, c.token_ids, c.logprobs, c.versions, c.finish_reason] for c in completions]
    return packed, pack_heads([c.head for c in completions]) | pack_choices([c.experts for c in completions])


def unpack_completions(packed: Sequence[list[Any]], tensors: dict[str, Tensor]) -> list[Completion]:
    """Inverse of `pack_completions`."""
    heads = unpack_heads(tensors, len(packed))
    experts = unpack_choices(tensors, len(packed))
    return [
        Completion(
            request_id=request_id,
            sample_index=sample_index,
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
            versions=tuple(versions),
            finish_reason=finish_reason,
            head=head,
            experts=choices,
        )
        for (request_id, sample_index, token_ids, logprobs, versions, finish_reason), head, choices in zip(
            packed, heads, experts, strict=True
        )
    ]
