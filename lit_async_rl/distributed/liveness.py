"""Failure detection among ranks: an error, a stop request, a silent, hanging or killed rank ends the run on all ranks.

A thread of each rank exchanges heartbeats through the key-value store of the process group, without collectives, so
that it keeps running while the main thread waits in one.

| who | waits for | woken by |
|---|---|---|
| watch thread | nothing: one heartbeat a second | - |
| main thread, in `StepScatter` | other ranks | `check`, which raises errors received by the watch thread |
| main thread, in any other collective | other ranks | nothing: the process is ended after `GRACE_S` |
"""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import json
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import lightning.pytorch as pl
import torch.distributed as dist

from lit_async_rl.errors import RankError, StalledError
from lit_async_rl.runtime.threads import new_thread, start_thread
from lit_async_rl.runtime.waiting import MAX_GAP_S
from lit_async_rl.utils.lightning_types import AnyTrainer

# -- Progress of each rank's training thread, and detection of the rank that the others wait for ----------------------
# All ranks pass the same milestones in the same order (Lightning's hooks, each exchange, each gathered weight), so the
# others wait for the rank that has passed the fewest. The watch thread of every rank sends its report with each
# heartbeat; rank 0 compares the reports (`find_stalled`).


LONG_PHASE_LIMIT_S = 1800.0  # for phases without milestones: preparation, compilation, checkpoints, the end
_MILESTONES_PER_EXCHANGE = 2**32  # an upper bound of the milestones between two exchanges
_COMPILERS = ("torch._dynamo.convert_frame", "torch._inductor.compile_fx")
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Report:
    """State of one rank's training thread.

    Attributes:
        place: number of milestones passed.
        idle_s: seconds without progress, excluding time in which the process was stopped.
        limit_s: limit of `idle_s` in this phase; infinite if the wait has its own timeout.
        phase: of the run.
        where: function being executed.
        is_in_torch: whether that function is torch's, which may be waiting for other ranks.
        host: name of the machine.
    """

    place: int
    idle_s: float
    limit_s: float
    phase: str
    where: str
    is_in_torch: bool
    host: str

    def to_json(self) -> str:
        """Serializes the report for the heartbeat."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Report:
        """Inverse of `to_json`."""
        return Report(**json.loads(text))


class Progress:
    """Progress of the training thread, which must construct it; the watch thread calls `report`.

    It needs no lock: only one of the two threads writes each attribute, and a single read or write is atomic.

    Args:
        limit_s: maximum time without progress, in seconds.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.long_s = max(limit_s, LONG_PHASE_LIMIT_S)
        self._thread = threading.get_ident()
        self._place = self._num_reports = 0
        self._phase = ("preparing the run", self.long_s)
        self._idle_s = 0.0
        self._reported_at = time.monotonic()
        self._seen = (0, 0)

    # -- training thread ----------------------------------------------------------------------------------------------

    def reach(self, phase: str, limit_s: float | None = None) -> None:
        """Passes a milestone. All ranks must pass the same milestones in the same order.

        Args:
            phase: that begins.
            limit_s: maximum time without progress in it, in seconds; None is the run's limit.
        """
        self._phase = (phase, self.limit_s if limit_s is None else limit_s)
        self._place += 1

    def align(self, phase: str, limit_s: float | None = None) -> None:
        """Passes a milestone at which all ranks exchange data, and aligns their counts of milestones."""
        self._place += _MILESTONES_PER_EXCHANGE - 1 - self._place % _MILESTONES_PER_EXCHANGE
        self.reach(phase, limit_s)

    def report_progress(self) -> None:
        """Reports progress within a phase, on this rank only."""
        self._num_reports += 1

    @contextmanager
    def own_limit(self, phase: str) -> Iterator[None]:
        """Context of a phase on this rank in which every wait has its own timeout."""
        before = self._phase
        self._phase = (phase, math.inf)
        try:
            yield
        finally:
            self._phase = before
            self.report_progress()

    def over(self, items: Iterable[Item], phase: str) -> Iterator[Item]:
        """Iterates over items that a collective yields, each a milestone. The caller's phase resumes in between."""
        iterator = iter(items)
        while True:
            outside = self._phase
            self.reach(phase)
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self._phase = outside
            yield item

    # -- watch thread -------------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """The current state; intervals above `MAX_GAP_S` between calls count as a stopped process.

        Not a `Wait`: another thread waits, and rank 0 compares the seconds of all ranks.
        """
        now = time.monotonic()
        seen = (self._place, self._num_reports)
        phase, limit_s = self._phase
        gap = now - self._reported_at
        self._reported_at = now
        self._idle_s = self._idle_s + min(gap, MAX_GAP_S) if seen == self._seen else 0.0
        self._seen = seen
        frames = [f for f, _ in traceback.walk_stack(sys._current_frames().get(self._thread))]
        modules = [str(frame.f_globals.get("__name__")) for frame in frames]
        if any(module in _COMPILERS for module in modules):
            phase = f"compiling, {phase}"
            limit_s = max(limit_s, self.long_s)
        return Report(
            place=seen[0],
            idle_s=self._idle_s,
            limit_s=limit_s,
            phase=phase,
            where=_describe(frames[0]) if frames else "a thread that has ended",
            is_in_torch=bool(modules) and modules[0].partition(".")[0] == "torch",
            host=socket.gethostname(),
        )


def _describe(frame: Any) -> str:
    folder, name = os.path.split(frame.f_code.co_filename)
    return f"{frame.f_code.co_name} ({os.path.basename(folder)}/{name}:{frame.f_lineno})"


def find_stalled(reports: Mapping[int, Report], setting: str, limit_s: float) -> str:
    """Describes the rank that the others have waited for beyond its limit; empty if there is none.

    The ranks with the fewest milestones determine the limit. It counts from the last progress of any rank, because they
    may have waited for the others until then. Ranks that were stopped for a while (SIGSTOP), or wait with their own
    timeout, do not count as stalled. Of several that are equally far behind, those inside torch are assumed to wait for
    the others.

    Args:
        reports: of all ranks that have not finished.
        setting: name of the setting that limits the time without progress.
        limit_s: its value, in seconds.
    """
    behind = min((report.place for report in reports.values()), default=0)
    last = {rank: report for rank, report in reports.items() if report.place == behind}
    quiet_s = min((report.idle_s for report in reports.values()), default=0.0)
    if not last or any(quiet_s <= report.limit_s for report in last.values()):
        return ""
    hung = {rank: report for rank, report in last.items() if not report.is_in_torch} or last
    who = ", ".join(f"rank {rank} ({report.host}) in {report.where}" for rank, report in hung.items())
    report = next(iter(hung.values()))
    limit = f"{setting}={limit_s:g}" + (f", in this phase {report.limit_s:g}" if report.limit_s != limit_s else "")
    return (
        f"no progress for {quiet_s:.0f} s ({limit}) in the phase {report.phase!r}: {who}. The process lives, and "
        f"the other ranks wait for it. Raise {setting} if that can take so long."
    )


HEARTBEAT_INTERVAL_S = 1.0
GRACE_S = 3.0  # from learning of a failure until a main thread that does not notice it is ended
EXIT_S = 30.0  # from noticing it until a process that does not exit is ended
ABANDON_S = 4.0  # longest time for an ended process to close its engine
STORE_TIMEOUT = timedelta(seconds=10)
_FAILED = "failed"
_STOP = "stop"
_KNOWS = b" knows"  # suffix of the heartbeat of a rank that has received a failure
_STALLED = "StalledError: "  # prefix of a failure of this class
_SETTING = "data.limits.rollout_timeout_s"
_links = itertools.count()  # watches are constructed by all ranks together, so that the numbers agree


class RankWatch:
    """Detects within seconds that another rank failed, and reports failures of this one.

    Constructed by all ranks together; needs an initialized process group.

    Args:
        timeout_s: seconds without a heartbeat after which a rank counts as dead (killed, or its machine lost).
        stall_s: seconds without progress of a rank's training thread, while others wait for it, after which it counts
            as hung.
        on_abandon: called before the process is ended because its main thread hangs.

    Attributes:
        progress: of this rank's training thread.
    """

    def __init__(self, timeout_s: float, stall_s: float, on_abandon: Callable[[], None]) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.progress = Progress(stall_s)
        self.timeout_s = timeout_s
        self._on_abandon = on_abandon
        # another connection, because the main thread may be waiting on the first one
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"lit_async_rl/{next(_links)}", store.clone())
        self._store.set_timeout(STORE_TIMEOUT)
        self.failure = ""
        self.is_stop_requested = False
        self._is_noticed = False
        self._ends_at = float("inf")
        self._num_beats = 0
        self._last_beats: dict[int, tuple[bytes, float]] = {}  # by rank: last beat, and time of its change
        self._closed = threading.Event()
        self._thread = new_thread(self._run, name="rank-watch")
        self._store.set(_FAILED, "")
        self._store.set(_STOP, "")
        self._beat()

    def start(self) -> None:
        """Starts the watch thread, after all ranks have been constructed."""
        atexit.register(self._exits)
        self._thread.start()

    def take_over_sigterm(self) -> None:
        """Has SIGTERM on any rank request all ranks to stop.

        Lightning's own handler broadcasts between other collectives, which can deadlock. Call this after `setup`, when
        Lightning has installed its handler; Lightning removes ours at the end of the run.
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
            self._is_noticed = True
            self._ends_at = time.monotonic() + EXIT_S
            raise self._error()

    def _error(self) -> Exception:
        if self.failure.startswith(_STALLED):
            return StalledError(self.failure.removeprefix(_STALLED))
        return RankError(self.failure)

    def explain(self, error: RuntimeError) -> NoReturn:
        """Replaces a connection error by the other rank's reason.

        Raises:
            RankError, StalledError: always.
        """
        self.fail(RankError("the connection to another rank broke: it was killed, or its machine lost"))
        raise self._error() from error

    def _wait_for_reason(self) -> None:
        """Waits up to `GRACE_S` for the watch thread to receive another rank's error."""
        noticed = time.monotonic()
        while not self.failure and time.monotonic() < noticed + GRACE_S:
            time.sleep(0.1)

    def request_stop(self) -> None:
        """Requests all ranks to stop; safe in a signal handler."""
        self.is_stop_requested = True

    def fail(self, error: BaseException) -> None:
        """Reports a failure of this rank to all ranks, or prints the earlier failure that has caused it."""
        if self._closed.is_set():
            return
        own = f"rank {self.rank} ({socket.gethostname()}) failed: {type(error).__name__}: {error}"
        self.failure = self.failure or self._publish_failure(own)
        was_noticed = self._is_noticed
        self._is_noticed = True
        self._ends_at = time.monotonic() + EXIT_S
        if self.failure != own and not was_noticed:  # such as a broken connection after another rank's error
            print(f"rank {self.rank} ends, because {self.failure}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Marks this rank as finished: missing heartbeats are no failure then. Safe to call twice."""
        if self._closed.is_set():
            return
        if self.failure and self.rank == 0:
            self._wait_for_readers()
        self._closed.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(STORE_TIMEOUT.total_seconds())
        with suppress(RuntimeError):  # the store's host has exited, so that no rank can read this
            self._store.set(str(self.rank), "closed")
        if not self.failure:
            atexit.unregister(self._exits)

    def _wait_for_readers(self) -> None:
        """Keeps rank 0, which may host the store, alive until the others have read the failure."""
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
        """Reports an unfinished run as failed at exit, and ends a process that hangs there."""
        self.fail(SystemExit("the process exited in the middle of the run"))
        if self.failure:
            _end_process_after(EXIT_S)

    # -- watch thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.wait(HEARTBEAT_INTERVAL_S):
            try:
                self._beat()
                self._listen()
            except RuntimeError:  # torch's errors of a broken connection
                self._record_failure("rank 0, or the launcher that brought the ranks together, is gone")
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
            self._record_failure(failed.decode())
        now = time.monotonic()
        for rank, beat in zip(watched, beats, strict=True):
            before, since = self._last_beats.get(rank, (b"", now))
            self._last_beats[rank] = (beat, now if beat != before else since)
            if beat != b"closed" and now - self._last_beats[rank][1] > self.timeout_s:
                silent = (
                    f"rank {rank} has not been heard from for {self.timeout_s:g} s (data.limits.rank_timeout_s): was "
                    "it killed, or its machine lost?"
                )
                self._record_failure(self._publish_failure(silent))
        if self.rank == 0 and not self.failure:
            reports = {rank: _report(beat) for rank, beat in enumerate(beats) if beat != b"closed"}
            if stalled := find_stalled(reports, _SETTING, self.progress.limit_s):
                self._record_failure(self._publish_failure(_STALLED + stalled))

    def _record_failure(self, failure: str) -> None:
        if not self.failure:
            self.failure = failure
            self._ends_at = time.monotonic() + GRACE_S

    def _publish_failure(self, failure: str) -> str:
        """Publishes a failure; returns the first one published by any rank."""
        try:
            told: bytes | str = self._store.compare_set(_FAILED, "", failure)
        except RuntimeError as error:  # no other rank is left
            self._wait_for_reason()
            print(f"rank {self.rank} could not report a failure to the other ranks: {error}", file=sys.stderr)
            return self.failure or failure
        return told.decode() if isinstance(told, bytes) else told

    def _abandon(self) -> None:
        """Ends the process, because its main thread hangs where no exception can be raised."""
        where = "does not exit" if self._is_noticed else "hangs or waits for other ranks, and cannot be woken"
        print(f"rank {self.rank} {where}; ending it, because {self.failure}", file=sys.stderr, flush=True)
        _end_process_after(ABANDON_S)
        if self.rank == 0:
            self._wait_for_readers()
        self._on_abandon()
        os._exit(1)


def _report(beat: bytes) -> Report:
    return Report.from_json(beat.removesuffix(_KNOWS).partition(b" ")[2])


def _end_process_after(seconds: float) -> None:
    def end() -> None:
        time.sleep(seconds)
        os._exit(1)

    start_thread(end, name="end-of-process")


# -- Milestones of a rank's training thread: Lightning's hooks, which all ranks pass in the same order ----------------


def watch_hooks(trainer: AnyTrainer, progress: Progress, fail: Callable[[BaseException], None]) -> None:
    """Adds a callback, before all others, that passes a milestone at each of Lightning's hooks.

    It calls `fail` with an exception before other callbacks handle it by collectives (a last checkpoint).
    """
    others = [c for c in trainer.callbacks if not isinstance(c, _Milestones)]  # drops that of an earlier run
    trainer.callbacks[:] = [_Milestones(progress, fail), *others]


class _Milestones(pl.Callback):
    def __init__(self, progress: Progress, fail: Callable[[BaseException], None]) -> None:
        self._progress = progress
        self._fail = fail

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._fail(exception)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._progress.reach("the start of training")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._progress.reach(f"forward of micro-batch {batch_idx}, step {trainer.global_step}")

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Any) -> None:
        self._progress.reach(f"backward, step {trainer.global_step}")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._progress.reach(f"after backward, step {trainer.global_step}")

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self._progress.reach(f"optimizer step {trainer.global_step}")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._progress.reach(f"end of micro-batch {batch_idx}, step {trainer.global_step}")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._progress.reach("the start of validation")

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._progress.reach(f"validation batch {batch_idx}")

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._progress.reach(f"end of validation batch {batch_idx}")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._progress.reach("the end of validation")

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._progress.reach("saving a checkpoint", self._progress.long_s)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._progress.reach("the end of training", self._progress.long_s)
