"""Child process of `EmbeddedEngine(own_process=True)`; `own_process.py` is the trainer's side.

| thread | does | waits for |
|---|---|---|
| main | samples one token for every row at a time, sends finished completions | work |
| commands | executes the trainer's messages in order | the next message; the process ends with the connection |
| updates | `load_weights` without in-flight updates | room for another update, see `DecodeLoop` |
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lit_async_rl.engines.embedded.engine import DecodeLoop
from lit_async_rl.engines.embedded.own_process import as_bytes, as_json, as_tensors, pack_completions, unpack_requests
from lit_async_rl.engines.embedded.settings import DecodeSettings
from lit_async_rl.engines.weight_files import read_folder
from lit_async_rl.models.weights import UNCHANGED
from lit_async_rl.runtime.process import Channel
from lit_async_rl.runtime.spans import recorder, start_recording
from lit_async_rl.runtime.threads import ThreadPool, start_thread
from lit_async_rl.runtime.waiting import FairLock
from lit_async_rl.types import Completion

REPORT_INTERVAL_S = 0.1  # while no completion is finished
IDLE_INTERVAL_S = 0.5  # while there are no requests


def main() -> None:
    """Entry point."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the trainer handles them, and ends this process after saving
        signal.signal(number, signal.SIG_IGN)
    channel = Channel.of_parent()
    message = channel.receive()
    if message is None:
        return
    fields = message[0]
    try:
        engine = DecodeLoop(DecodeSettings(**fields["settings"]))
        if engine.settings.num_threads is not None:
            torch.set_num_threads(engine.settings.num_threads)  # applies to threads started from here on
        engine.setup(fields["model"])
    except Exception as error:
        channel.send({"kind": "answer", "call": fields["call"], "error": as_json(error)})
        return
    limits = {"max_model_len": engine.max_model_len, "vocab_size": engine.slots.vocab_size}
    channel.send({"kind": "answer", "call": fields["call"], **limits})
    Child(channel, engine).serve()


class Child:
    """Generates, and executes the commands of the trainer's process.

    Args:
        channel: connection to the trainer.
        engine: decode loop after `setup`.
    """

    def __init__(self, channel: Channel, engine: DecodeLoop) -> None:
        self._channel = channel
        self._engine = engine
        limit_s = engine.update_timeout_s
        what = f"the token that the embedded engine's process computes (data.engine.update_timeout_s={limit_s:g})"
        # Held from a poll until its completions are sent, so that the trainer receives completions finished before an
        # abort earlier than the answer to the abort.
        self._poll_lock = FairLock(limit_s, what)
        self._work = threading.Event()
        self._updates = ThreadPool(1, name="updates")  # one thread, so that updates stay in order
        self._last_report = 0.0
        self._trainer = os.getppid()

    def serve(self) -> None:
        """Generates until the trainer ends the connection, and with it the process."""
        start_thread(self._execute_commands, name="commands")
        try:
            while True:
                self._work.wait(IDLE_INTERVAL_S)
                self._work.clear()  # before decoding: work that arrives during it sets the event again
                while self._decode():
                    pass
                self._report([])
        except Exception as error:
            self._channel.send({"kind": "failed", "error": as_json(error)})
        threading.Event().wait()  # the commands' thread ends the process when the trainer closes the connection

    def _decode(self) -> bool:
        """Samples one token for every row; False if there was nothing to do."""
        engine = self._engine
        with self._poll_lock.hold():
            before = engine.num_tokens
            finished = engine.poll(0.0)
            if finished or time.monotonic() - self._last_report > REPORT_INTERVAL_S:
                self._report(finished)
            return bool(finished) or engine.num_tokens != before

    def _report(self, finished: Sequence[Completion]) -> None:
        if os.getppid() != self._trainer:  # the trainer has ended, but one of its forks keeps the connection open
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
        self._channel.send(report, as_bytes(tensors))

    def _execute_commands(self) -> None:
        try:
            while (message := self._channel.receive()) is not None:
                fields, blob = message
                tensors = as_tensors(blob)
                if fields["kind"] == "load_weights" and not self._engine.in_flight_weight_updates:
                    # in another thread: it may wait for running requests, and a later command may abort those
                    self._updates.submit(self._answer, fields, tensors)
                else:
                    self._answer(fields, tensors)
        finally:
            os._exit(0)

    def _answer(self, fields: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Executes a command, and answers it if it has a number."""
        number = fields.get("call")
        try:
            answer, state = self._execute(fields, tensors)
            if number is not None:
                self._channel.send({"kind": "answer", "call": number, **answer}, as_bytes(state))
        except Exception as error:
            to = {"kind": "failed"} if number is None else {"kind": "answer", "call": number}
            self._channel.send({**to, "error": as_json(error)})

    def _execute(self, fields: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Executes a command; returns fields and tensors of the answer."""
        engine = self._engine
        match fields["kind"]:
            case "submit":
                engine.submit(unpack_requests(fields["requests"]))
                self._work.set()
            case "load_weights":
                if fields["is_recorded"] and not recorder().is_started:
                    start_recording()
                unchanged = ((name, UNCHANGED) for name in fields["unchanged"])
                engine.load_weights(fields["version"], itertools.chain(read_folder(fields["folder"]), unchanged))
                self._work.set()
            case "abort":
                with self._poll_lock.hold():
                    engine.abort(fields["request_ids"])
            case "partial_completions":
                completions, heads = pack_completions(engine.partial_completions())
                return {"completions": completions}, heads
            case "prompt_logprobs":
                return {"logprobs": engine.prompt_logprobs(fields["token_ids"])}, {}
            case "random_state":
                return {}, {"state": engine.random_state()}
            case "set_random_state":
                engine.set_random_state(tensors["state"])
        return {}, {}
