"""Failure detection among ranks: an error, a stop request, a silent, hanging or killed rank ends the run on all ranks.

Each rank has a thread that exchanges heartbeats through the key-value store of the process group. It takes part in no
collective, so it keeps running while the main thread waits in one.

| who | waits for | woken by |
|---|---|---|
| watch thread | nothing: one heartbeat a second | - |
| main thread, in `StepScatter` | other ranks | `check`, which raises errors received by the watch thread |
| main thread, in any other collective | other ranks | nothing: the process is ended after `GRACE_S` |
"""

from __future__ import annotations

import atexit
import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from lit_async_rl.distributed.progress import Progress, Report, find_stalled
from lit_async_rl.errors import RankError, StalledError

BEAT_S = 1.0
GRACE_S = 3.0  # from learning of a failure until a main thread that does not notice it is ended
EXIT_S = 30.0  # from noticing it until a process that does not exit is ended
ABANDON_S = 4.0  # longest that a process which is ended may close its engine
STORE_TIMEOUT = timedelta(seconds=10)
_FAILED, _STOP = "failed", "stop"
_KNOWS = b" knows"  # at the end of the beat of a rank that has learnt of a failure
_STALLED = "StalledError: "  # at the beginning of a failure that is one
_SETTING = "data.limits.rollout_timeout_s"
_links = itertools.count()  # links are made by all ranks together, so all count alike


class RankWatch:
    """Detects within seconds that another rank failed, and reports failures of this one.

    Constructed by all ranks together; needs an initialized process group.

    Args:
        timeout_s: seconds without a heartbeat before a rank counts as dead (killed, or its machine lost).
        stall_s: seconds without progress of a rank's training thread, while others wait for it, before it counts as
            hung.
        on_abandon: called before the process is ended because its main thread hangs.

    Attributes:
        progress: of this rank's training thread.
    """

    def __init__(self, timeout_s: float, stall_s: float, on_abandon: Callable[[], None]) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.progress = Progress(stall_s)
        self.timeout_s, self._on_abandon = timeout_s, on_abandon
        # a connection of its own: the main thread may be waiting on the first one
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"lit_async_rl/{next(_links)}", store.clone())
        self._store.set_timeout(STORE_TIMEOUT)
        self.failure = ""
        self.is_stop_requested = False
        self._is_noticed = False
        self._ends_at = float("inf")
        self._num_beats = 0
        self._heard: dict[int, tuple[bytes, float]] = {}  # rank -> its last beat, and when it changed
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self._store.set(_FAILED, "")
        self._store.set(_STOP, "")
        self._beat()

    def start(self) -> None:
        """Starts the watch thread, after all ranks have been constructed."""
        atexit.register(self._exits)
        self._thread.start()

    def take_over_sigterm(self) -> None:
        """From now on SIGTERM on any rank requests all ranks to stop.

        Lightning's own handler broadcasts inside the signal handler, between other collectives, which can deadlock.
        This one is installed after `setup`, and removed by Lightning at the end of the run.
        """
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: self.request_stop())

    # -- main thread --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises errors received by the watch thread.

        Raises:
            RankError: another rank failed.
            StalledError: a rank hangs.
        """
        if self.failure:
            self._is_noticed, self._ends_at = True, time.monotonic() + EXIT_S
            raise self._error()

    def _error(self) -> Exception:
        if self.failure.startswith(_STALLED):
            return StalledError(self.failure.removeprefix(_STALLED))
        return RankError(self.failure)

    def explain(self, error: RuntimeError) -> NoReturn:
        """Replaces a connection error by the reason reported by the other rank.

        Raises:
            RankError, StalledError: always.
        """
        self.fail(RankError("the connection to another rank broke: it was killed, or its machine lost"))
        raise self._error() from error

    def _await_reason(self) -> None:
        """Waits briefly for the watch thread to receive another rank's error."""
        noticed = time.monotonic()
        while not self.failure and time.monotonic() < noticed + GRACE_S:
            time.sleep(0.1)

    def request_stop(self) -> None:
        """Requests all ranks to stop; safe in a signal handler."""
        self.is_stop_requested = True

    def fail(self, error: BaseException) -> None:
        """Reports a failure of this rank to all ranks, or raises the earlier failure that caused it."""
        if self._closed.is_set():
            return
        own = f"rank {self.rank} ({socket.gethostname()}) failed: {type(error).__name__}: {error}"
        self.failure = self.failure or self._tell(own)
        was_noticed, self._is_noticed, self._ends_at = self._is_noticed, True, time.monotonic() + EXIT_S
        if self.failure != own and not was_noticed:  # a broken connection, say
            print(f"rank {self.rank} ends, because {self.failure}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Marks this rank as finished, so that its silence is no failure. Safe to call twice."""
        if self._closed.is_set():
            return
        if self.failure and self.rank == 0:
            self._linger()
        self._closed.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(STORE_TIMEOUT.total_seconds())
        self._set(str(self.rank), "closed")
        if not self.failure:
            atexit.unregister(self._exits)

    def _linger(self) -> None:
        """Keeps rank 0, which may host the store, alive until the others have read why it ends."""
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            try:
                beats = self._store.multi_get([str(rank) for rank in range(1, self.world_size)])
            except RuntimeError:
                return
            if all(beat.endswith((_KNOWS, b"closed")) for beat in beats):
                return
            time.sleep(0.1)

    def _exits(self) -> None:
        """Exit handler: reports an unfinished run as failed, and ends a process that hangs on exit."""
        self.fail(SystemExit("the process exited in the middle of the run"))
        if self.failure:
            _end_process_after(EXIT_S)

    # -- watch thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.wait(BEAT_S):
            try:
                self._beat()
                self._listen()
            except RuntimeError:  # torch's errors of a broken connection
                self._learn("rank 0, or the launcher that brought the ranks together, is gone")
            if time.monotonic() > self._ends_at:
                self._abandon()

    def _beat(self) -> None:
        self._num_beats += 1
        knows = _KNOWS.decode() if self.failure else ""
        self._store.set(str(self.rank), f"{self._num_beats} {self.progress.report().to_json()}{knows}")

    def _listen(self) -> None:
        if self.is_stop_requested:
            self._store.set(_STOP, "yes")
        watched = range(self.world_size) if self.rank == 0 else [0]
        failed, stop, *beats = self._store.multi_get([_FAILED, _STOP, *map(str, watched)])
        self.is_stop_requested = self.is_stop_requested or stop == b"yes"
        if failed:
            self._learn(failed.decode())
        now = time.monotonic()
        for rank, beat in zip(watched, beats, strict=True):
            before, since = self._heard.get(rank, (b"", now))
            self._heard[rank] = (beat, now if beat != before else since)
            if beat != b"closed" and now - self._heard[rank][1] > self.timeout_s:
                silent = (
                    f"rank {rank} has not been heard from for {self.timeout_s:g} s (data.limits.rank_timeout_s): was "
                    "it killed, or its machine lost?"
                )
                self._learn(self._tell(silent))
        if self.rank == 0 and not self.failure:
            reports = {rank: _report(beat) for rank, beat in enumerate(beats) if beat != b"closed"}
            if stalled := find_stalled(reports, _SETTING, self.progress.limit_s):
                self._learn(self._tell(_STALLED + stalled))

    def _learn(self, failure: str) -> None:
        if not self.failure:
            self.failure, self._ends_at = failure, time.monotonic() + GRACE_S

    def _tell(self, failure: str) -> str:
        """Publishes a failure; returns the first one published by any rank."""
        try:
            told: bytes | str = self._store.compare_set(_FAILED, "", failure)
        except RuntimeError as error:  # no other rank is left
            self._await_reason()
            print(f"rank {self.rank} could not tell the others: {error}", file=sys.stderr)
            return self.failure or failure
        return told.decode() if isinstance(told, bytes) else told

    def _set(self, key: str, value: str) -> None:
        try:
            self._store.set(key, value)
        except RuntimeError:  # the store's host has left already, which is what this would have announced
            return

    def _abandon(self) -> None:
        """Ends the process: its main thread hangs where no exception can be raised."""
        where = "does not exit" if self._is_noticed else "hangs or waits for other ranks, and cannot be woken"
        print(f"rank {self.rank} {where}; ending it, because {self.failure}", file=sys.stderr, flush=True)
        _end_process_after(ABANDON_S)
        if self.rank == 0:
            self._linger()
        self._on_abandon()
        os._exit(1)


def _report(beat: bytes) -> Report:
    return Report.from_json(beat.removesuffix(_KNOWS).partition(b" ")[2])


def _end_process_after(seconds: float) -> None:
    timer = threading.Timer(seconds, os._exit, [1])
    timer.daemon = True
    timer.start()
