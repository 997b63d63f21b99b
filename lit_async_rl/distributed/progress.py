"""Progress of each rank's training thread, and detection of the rank that the others wait for.

All ranks pass the same milestones in the same order (Lightning's hooks, each exchange, each gathered weight), so the
rank that has passed the fewest is the one that the others wait for. The watch thread of every rank sends its report
with each heartbeat; that of rank 0 compares them (`find_stalled`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from lit_async_rl.utils.clocks import STILL_S

LONG_S = 1800.0  # for what may take long and can say nothing meanwhile: preparing, compiling, checkpoints, the end
_FAR = 2**32  # more than the milestones between two exchanges
_COMPILERS = ("torch._dynamo.convert_frame", "torch._inductor.compile_fx")
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Report:
    """State of one rank's training thread.

    Attributes:
        place: milestones passed.
        idle_s: seconds without progress, excluding time in which the process was stopped.
        limit_s: limit of `idle_s` in this phase; infinite if the wait has its own timeout.
        phase: of the run.
        where: function being executed.
        is_in_torch: whether that function belongs to torch, which may be waiting for other ranks.
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
    """Progress of the training thread, which constructs it; read by the watch thread.

    Args:
        limit_s: maximum time without progress.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s, self.long_s = limit_s, max(limit_s, LONG_S)
        self._thread = threading.get_ident()
        self._place = self._num_signs = 0
        self._phase = ("preparing the run", self.long_s)
        self._idle_s, self._looked_at, self._seen = 0.0, time.monotonic(), (0, 0)

    # -- training thread ----------------------------------------------------------------------------------------------

    def reach(self, phase: str, limit_s: float | None = None) -> None:
        """Passes a milestone. All ranks must pass the same ones in the same order.

        Args:
            phase: that begins.
            limit_s: maximum time without progress in it; None is the run's limit.
        """
        self._phase = (phase, self.limit_s if limit_s is None else limit_s)
        self._place += 1

    def meet(self, phase: str, limit_s: float | None = None) -> None:
        """Passes a milestone at which all ranks exchange data; aligns their counts."""
        self._place += _FAR - 1 - self._place % _FAR
        self.reach(phase, limit_s)

    def sign(self) -> None:
        """Reports progress within a phase, on this rank alone."""
        self._num_signs += 1

    @contextmanager
    def own_limit(self, phase: str) -> Iterator[None]:
        """Context of a phase of this rank whose waits have their own timeouts."""
        before, self._phase = self._phase, (phase, math.inf)
        try:
            yield
        finally:
            self._phase = before
            self.sign()

    def over(self, items: Iterable[Item], phase: str) -> Iterator[Item]:
        """Iterates over items produced by a collective; each is a milestone. The caller's phase resumes in between."""
        iterator, outside = iter(items), self._phase
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
        """The current state; call it at intervals below `STILL_S`, longer ones count as a stopped process."""
        now, seen, (phase, limit_s) = time.monotonic(), (self._place, self._num_signs), self._phase
        gap, self._looked_at = now - self._looked_at, now
        self._idle_s = self._idle_s + min(gap, STILL_S) if seen == self._seen else 0.0
        self._seen = seen
        frames = [f for f, _ in traceback.walk_stack(sys._current_frames().get(self._thread))]
        modules = [str(frame.f_globals.get("__name__")) for frame in frames]
        if any(module in _COMPILERS for module in modules):
            phase, limit_s = f"compiling, {phase}", max(limit_s, self.long_s)
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
    """Describes the rank that the others have waited for too long; empty if there is none.

    The limit is that of the ranks with the fewest milestones, and counts from the last progress of any rank, because
    they may have waited for the others until then. Ranks that were stopped for a while (SIGSTOP), or wait with a
    timeout of their own, do not count as stalled. If several are equally far behind, those inside torch are assumed to
    wait for the others.

    Args:
        reports: of all ranks that have not finished.
        setting: that limits the time without progress, with its prefix.
        limit_s: its value.
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
