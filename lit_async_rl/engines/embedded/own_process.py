"""The embedded engine in a process of its own, as the trainer sees it."""

from __future__ import annotations

import inspect
import shutil
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_async_rl.engines.base import Completion, GenerationRequest
from lit_async_rl.engines.blocking import run_requests
from lit_async_rl.engines.embedded.channel import Message, pack_requests, unpack_completions
from lit_async_rl.engines.embedded.connection import Connection
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.engines.embedded.limits import check_requests, set_up
from lit_async_rl.engines.weight_files import chunks, write_folder
from lit_async_rl.engines.weight_folders import WeightFolders, folder_with_room
from lit_async_rl.errors import SetupError
from lit_async_rl.models.loading import find_device, weight_bytes
from lit_async_rl.models.received import UNCHANGED
from lit_async_rl.utils.spans import Spans

FILE_BYTES = 2**30  # of weights, and of the copy of them that the trainer holds while it writes them


class EmbeddedEngineProcess(EmbeddedEngine):
    """`EmbeddedEngine` with `own_process`: the engine of a child process, to which requests and weights are sent.

    Weights go through files in memory; in flight, the trainer does not wait for the process to read them. With LoRA the
    adapted layers travel whole: the process has no frozen weights to add adapters to.
    """

    takes_adapters = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connection: Connection | None = None
        self._folders: WeightFolders | None = None
        self._finished: deque[Completion] = deque()  # the reader appends, the producer's thread takes
        self._num_running = 0
        self._spans: Spans | None = None
        self._vocab_size, self._has_weights = 0, False
        self._update: tuple[int, Path] | None = None  # that was sent, and the folder of its weights

    @property
    def _process(self) -> Connection:
        return set_up(self._connection)

    def setup(self, model: str) -> None:
        """Starts the process, which builds the architecture."""
        self._connection = Connection(self._take_in)
        self._folders = WeightFolders(folder_with_room(weight_bytes(model, getattr(torch, self.dtype))))
        names = inspect.signature(EmbeddedEngine.__init__).parameters.keys() - {"self", "own_process", "max_model_len"}
        settings = {name: getattr(self, name) for name in names}
        settings |= {"max_model_len": self._max_model_len, "device": _with_number(self.device)}
        limit = f"data.engine.startup_timeout_s={self.startup_timeout_s:g}"
        limits, _ = self._process.ask("setup", self.startup_timeout_s, limit, model=model, settings=settings)
        self._max_model_len, self._vocab_size = limits["max_model_len"], limits["vocab_size"]
        if self._spans is not None:
            self._process.send({"kind": "observe"})

    @property
    def _update_limit(self) -> str:
        return f"data.engine.update_timeout_s={self.update_timeout_s:g}"

    def _ask(self, kind: str, tensors: Mapping[str, Tensor] | None = None, **fields: Any) -> Message:
        return self._process.ask(kind, self.update_timeout_s, self._update_limit, tensors, **fields)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        if not self._has_weights:
            raise SetupError("the engine was used before load_weights")
        check_requests(requests, self.max_model_len, self.vocab_size)
        self._process.send({"kind": "submit", "requests": pack_requests(requests)})

    def poll(self, timeout_s: float) -> list[Completion]:
        """Waits for finished samples."""
        if self._closed:
            return []
        try:
            self._process.wait_for(lambda: self._finished, timeout_s)
        except Exception:
            if not self._closed:  # in another thread, meanwhile
                raise
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def abort(self, request_ids: Sequence[int]) -> None:
        self._ask("abort", request_ids=list(request_ids))
        kept = [c for c in self.poll(0.0) if c.request_id not in set(request_ids)]
        self._finished.extendleft(reversed(kept))  # what was finished before has arrived before the answer

    def partial_completions(self) -> list[Completion]:
        fields, heads = self._ask("partial_completions")
        return unpack_completions(fields["completions"], heads)

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Samples from these weights from the next token on, or after all earlier requests (see `EmbeddedEngine`).

        Raises:
            ValueError: names or shapes are not the model's. In flight only the first update says so; a later one has
                `poll` raise it.
            StalledError: older updates were not used within `update_timeout_s`.
            OSError: the weights cannot be written where the process reads them.
            EngineError: the process has ended.
        """
        self._finish_update()
        folder, unchanged = set_up(self._folders).make(), list[str]()

        def changed() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                if tensor is UNCHANGED:
                    unchanged.append(name)
                else:
                    yield name, tensor

        try:
            shards = chunks(changed(), FILE_BYTES, "cpu", getattr(torch, self.dtype))
            write_folder(folder, shards, {"version": str(version)})
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        is_awaited = not self.in_flight_weight_updates or not self._has_weights
        fields: dict[str, Any] = {"version": version, "folder": str(folder), "unchanged": unchanged}
        self._update = self._process.begin("load_weights", must_succeed=not is_awaited, **fields), folder
        if is_awaited:
            self._finish_update()
        self._has_weights = True

    def _finish_update(self) -> None:
        """Waits until the process has taken in the last update; later messages are carried out after it anyway."""
        if self._update is not None:
            (number, folder), self._update = self._update, None
            try:
                limit_s = 2 * self.update_timeout_s  # the engine's own error says more
                self._process.answer(number, "load_weights", limit_s, self._update_limit)
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def random_state(self) -> Tensor:
        return self._ask("random_state")[1]["state"]

    def set_random_state(self, state: Tensor) -> None:
        self._ask("set_random_state", {"state": state})

    def _take_in(self, report: Message) -> None:
        fields, heads = report
        self._finished.extend(unpack_completions(fields["completions"], heads))
        self._record.busy_s, self._record.num_tokens = fields["busy_s"], fields["num_tokens"]
        self._num_running = fields["num_running"]
        if self._spans is not None:
            self._spans.add(fields["events"])

    @property
    def num_running(self) -> int:
        return self._num_running

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def run(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """All completions of each request, by sample index; blocks until they are finished. Needs no producer."""
        return run_requests(self, requests)

    def observe(self, spans: Spans) -> bool:
        self._spans = spans
        if self._connection is not None:
            self._process.send({"kind": "observe"})
        return True

    def close(self) -> None:
        """Ends the process and unblocks `poll` and all calls."""
        self._closed = True
        if self._connection is not None:
            self._connection.close()
        if self._update is not None:
            shutil.rmtree(self._update[1], ignore_errors=True)
        if self._folders is not None:
            self._folders.close()


def in_own_process(kind: type[EmbeddedEngine]) -> type[EmbeddedEngineProcess]:
    """Class for `own_process`.

    Raises:
        ValueError: `kind` is a class that the process does not know.
    """
    if not issubclass(EmbeddedEngineProcess, kind):
        raise ValueError(f"data.engine.own_process=True is for EmbeddedEngine itself, not for {kind.__name__}")
    return EmbeddedEngineProcess


def _with_number(device: str) -> str:
    """The device that this process (a rank of several) means; a new one would take the first."""
    found = find_device(device)
    if found.type == "cpu" or found.index is not None:
        return str(found)
    return f"{found.type}:{torch.accelerator.current_device_index()}"
