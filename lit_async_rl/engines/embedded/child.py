"""The process in which `EmbeddedEngine(own_process=True)` generates; `own_process.py` is the trainer's side.

| thread | does | waits for |
|---|---|---|
| main | one token for every row at a time, and sends what is finished | work |
| commands | what the trainer's messages say, in order | the next one; without a trainer the process ends |
| updates | `load_weights` without in-flight updates | room for one more, see `DecodeLoop` |
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from lit_async_rl.engines.embedded.engine import DecodeLoop
from lit_async_rl.engines.embedded.own_process import Channel, pack_completions, unpack_requests
from lit_async_rl.engines.embedded.settings import DecodeSettings
from lit_async_rl.engines.weight_files import read_folder
from lit_async_rl.models.weights import UNCHANGED
from lit_async_rl.types import Completion
from lit_async_rl.utils.spans import recorder, start_recording
from lit_async_rl.utils.waiting import FairLock

REPORT_INTERVAL_S = 0.1  # of a process that finishes nothing
IDLE_INTERVAL_S = 0.5  # of reports of a process that has nothing to do


def main() -> None:
    """Entry point: the number of the connection's file descriptor is the only argument."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the trainer saves, and ends the connection
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    message = channel.receive()
    if message is None:
        return
    fields = message[0]
    try:
        engine = DecodeLoop(DecodeSettings(**fields["settings"]))
        if engine.settings.num_threads is not None:
            torch.set_num_threads(engine.settings.num_threads)  # also of the threads that load the model
        engine.setup(fields["model"])
    except Exception as error:
        channel.send({"kind": "answer", "call": fields["call"], "error": as_json(error)})
        return
    limits = {"max_model_len": engine.max_model_len, "vocab_size": engine.slots.vocab_size}
    channel.send({"kind": "answer", "call": fields["call"], **limits})
    Child(channel, engine).serve()


class Child:
    """Generates, and does what the trainer's process asks for.

    Args:
        channel: to the trainer.
        engine: of this process, set up.
    """

    def __init__(self, channel: Channel, engine: DecodeLoop) -> None:
        self._channel = channel
        self._engine = engine
        limit_s = engine.update_timeout_s
        what = f"the token that the embedded engine's process computes (data.engine.update_timeout_s={limit_s:g})"
        # Held from a poll until its completions are sent: what was finished before an abort arrives before its answer.
        self._turn = FairLock(limit_s, what)
        self._work = threading.Event()
        self._updates = ThreadPoolExecutor(1)  # one thread, so that updates stay in order
        self._last_report = 0.0
        self._trainer = os.getppid()

    def serve(self) -> None:
        """Generates until the trainer ends the connection, which ends the process."""
        threading.Thread(target=self._carry_out_commands, daemon=True).start()
        try:
            while True:
                self._work.wait(IDLE_INTERVAL_S)
                self._work.clear()  # before the look: work that comes during it is seen by the next one
                while self._decode():
                    pass
                self._report([])
        except Exception as error:
            self._channel.send({"kind": "failed", "error": as_json(error)})
        threading.Event().wait()  # the other thread ends the process when the trainer has read the error

    def _decode(self) -> bool:
        """Samples one token for every row; False if there was nothing to do."""
        engine = self._engine
        with self._turn.hold():
            before = engine.num_tokens
            finished = engine.poll(0.0)
            if finished or time.monotonic() - self._last_report > REPORT_INTERVAL_S:
                self._report(finished)
            return bool(finished) or engine.num_tokens != before

    def _report(self, finished: Sequence[Completion]) -> None:
        if os.getppid() != self._trainer:  # a process that the trainer forked may still hold the connection
            os._exit(0)
        engine = self._engine
        self._last_report = time.monotonic()
        completions, tensors = pack_completions(finished)
        report = {
            "kind": "report",
            "completions": completions,
            "events": recorder().take(),
            "busy_s": engine.busy_s,
            "num_tokens": engine.num_tokens,
            "num_running": engine.num_running,
        }
        self._channel.send(report, tensors)

    def _carry_out_commands(self) -> None:
        try:
            while (message := self._channel.receive()) is not None:
                fields, tensors = message
                if fields["kind"] == "load_weights" and not self._engine.in_flight_weight_updates:
                    # may wait for running requests, which later commands abort
                    self._updates.submit(self._answer, fields, tensors)
                else:
                    self._answer(fields, tensors)
        finally:
            os._exit(0)

    def _answer(self, fields: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Carries out a command, and answers one that has a number."""
        number = fields.get("call")
        try:
            answer, state = self._carry_out(fields, tensors)
            if number is not None:
                self._channel.send({"kind": "answer", "call": number, **answer}, state)
        except Exception as error:
            to = {"kind": "failed"} if number is None else {"kind": "answer", "call": number}
            self._channel.send({**to, "error": as_json(error)})

    def _carry_out(
        self, fields: dict[str, Any], tensors: dict[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Fields and tensors of the answer."""
        engine = self._engine
        match fields["kind"]:
            case "submit":
                engine.submit(unpack_requests(fields["requests"]))
                self._work.set()
            case "load_weights":
                if fields["is_recorded"] and not recorder().is_started:
                    start_recording()
                engine.load_weights(fields["version"], read_weights(fields["folder"], fields["unchanged"]))
                self._work.set()
            case "abort":
                with self._turn.hold():
                    engine.abort(fields["request_ids"])
            case "partial_completions":
                completions, heads = pack_completions(engine.partial_completions())
                return {"completions": completions}, heads
            case "random_state":
                return {}, {"state": engine.random_state()}
            case "set_random_state":
                engine.set_random_state(tensors["state"])
        return {}, {}


def read_weights(folder: str, unchanged: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the weights in a folder, then the names of those that are as before."""
    yield from read_folder(folder)
    for name in unchanged:
        yield name, UNCHANGED


def as_json(error: BaseException) -> dict[str, str]:
    """An error as the trainer reads it, see `from_json`."""
    return {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
