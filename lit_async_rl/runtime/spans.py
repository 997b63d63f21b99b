"""Spans of a run's timeline: activities of engines, trainer, rewards and environments, with their times.

Every process has one `recorder()`; any thread may add spans to one of its lanes. It is on between `start_recording` and
`stop_recording` of a run; otherwise it costs almost nothing.

A component with its own thread gets its lane once, when a run constructs it or sets it up. Spans that it adds after
that run are dropped, because the next run has another recorder. Memory is bounded.

The owner of a lane adds the same seconds to its total (`RolloutEngine.busy_s`, the trainer's `wait_s`), so that
timeline and metrics agree. Consecutive spans of a lane within a short window are merged: the merged span begins with
the first, and its duration is their sum.
"""

from __future__ import annotations

import json
import math
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_async_rl.runtime.files import append, tolerate_full_disk
from lit_async_rl.runtime.threads import new_thread

MERGE_WINDOW_S = 0.05  # minimum; proportional to the duration of a step
MAX_IDLE_SHARE = 0.2  # of the window; it ends when an engine is idle for longer
MAX_PENDING = 20_000  # events
MERGE_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "tokens": operator.add,
    "groups": operator.add,
    "turns": operator.add,
    "completions": operator.add,
    "slots": max,
    "ok": operator.and_,
}

Event = dict[str, Any]


@dataclass(frozen=True)
class LaneKind:
    """Kind of a timeline's rows; each process has at most one row of a kind.

    Args:
        tid: number of the row.
        category: of its spans.
        name: displayed name.
        merges: whether the window limits the duration of a merged span.
        shows_idle: whether the time between spans is recorded as `idle`.
    """

    tid: int
    category: str
    name: str
    merges: bool = True
    shows_idle: bool = False


TRAINER = LaneKind(0, "trainer", "trainer", merges=False)
ENGINE = LaneKind(1, "engine", "engine", shows_idle=True)
WEIGHTS = LaneKind(2, "engine", "weight updates")
ENVIRONMENT = LaneKind(3, "environment", "environments")


def reward_lane(worker: int) -> LaneKind:
    """Row of a reward worker."""
    return LaneKind(10 + worker, "reward", f"reward {worker}")


def recorder() -> SpanRecorder:
    """This process's recorder, off unless a run writes a timeline."""
    return getattr(_own, "recorder", _recorder)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Context in which this thread records no spans: an engine beside the policy's has no lane."""
    _own.recorder = SpanRecorder()
    try:
        yield
    finally:
        del _own.recorder


def start_recording(pid: int = 0, offset_s: float = 0.0) -> SpanRecorder:
    """Switches this process's recorder on.

    Args:
        pid: number of this process in the timeline, its rank.
        offset_s: seconds added to this machine's clock.
    """
    global _recorder
    if _recorder.is_started:  # by an enclosing run, or by one that was never ended: that run keeps its recorder
        _recorder = SpanRecorder()
    _recorder.start(pid, offset_s)
    return _recorder


def stop_recording(recorder: SpanRecorder) -> None:
    """Switches a recorder off for good; `recorder()` then returns a new one."""
    global _recorder
    recorder.stop()
    if recorder is _recorder:
        _recorder = SpanRecorder()


class SpanRecorder:
    """Records events of one process, in the Trace Event format that Perfetto and Chrome read. Thread-safe.

    Attributes:
        is_started: whether a run records.
        is_on: whether spans are recorded at present: a long timeline omits steps.
        window_s: seconds within which spans of an engine or a reward worker are merged.
        num_lost: events dropped because `MAX_PENDING` were waiting.
    """

    def __init__(self) -> None:
        self._pid = 0
        self._epoch = 0.0
        self._pending: deque[Event] = deque()
        self._lanes: dict[int, Lane] = {}
        self.is_started = False
        self.is_on = False
        self.window_s = MERGE_WINDOW_S
        self.num_lost = 0

    def start(self, pid: int, offset_s: float) -> None:
        """See `start_recording`."""
        self._pid = pid
        self._epoch = time.time() - time.monotonic() + offset_s
        self.is_started = True
        self.is_on = True

    def stop(self) -> None:
        """See `stop_recording`."""
        self.record(False)
        self.is_started = False

    def record(self, is_on: bool) -> None:
        """Switches recording of spans on or off within a run."""
        if self.is_on and not is_on:
            for lane in list(self._lanes.values()):
                lane.end()
        self.is_on = is_on

    def name_process(self, name: str) -> None:
        """Names this process."""
        self._append({"ph": "M", "name": "process_name", "pid": self._pid, "tid": 0, "args": {"name": name}})

    def lane(self, kind: LaneKind) -> Lane:
        """The lane of a kind, such as `ENGINE`, created by the first call; callers may keep it."""
        if (lane := self._lanes.get(kind.tid)) is None:  # `setdefault` is atomic: two threads get the same lane
            lane = self._lanes.setdefault(kind.tid, Lane(self, kind))
        return lane

    def add(self, events: Iterable[Event]) -> None:
        """Adds events recorded by another process of this machine."""
        for event in events if self.is_on else ():
            self._append(event)

    def take(self, include_open: bool = False) -> list[Event]:
        """Events since the last call; `include_open` includes spans that could still be merged with later ones.

        One thread takes while others add: appending to a deque and popping from it are atomic.
        """
        for lane in list(self._lanes.values()):
            lane.flush(0.0 if include_open else max(1.0, self.window_s))
        events = []
        while self._pending:
            events.append(self._pending.popleft())
        return events

    def put(self, phase: str, name: str, lane: Lane, began: float, seconds: float, args: dict[str, Any]) -> None:
        """Adds an event that began at a time of `time.monotonic`; `phase` is `X` for a span, `i` for an instant."""
        pid = self._pid
        tid = lane.kind.tid
        if not lane.is_named:  # with the first event: many lanes are never used
            lane.is_named = True
            self._append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane.kind.name}})
        event: Event = {"name": name, "cat": lane.kind.category, "ph": phase, "ts": round(1e6 * (began + self._epoch))}
        if phase == "X":
            event["dur"] = round(1e6 * seconds)
        else:
            event["s"] = "p"
        event["pid"] = pid
        event["tid"] = tid
        event["args"] = args
        self._append(event)

    def _append(self, event: Event) -> None:
        if len(self._pending) < MAX_PENDING:
            self._pending.append(event)
        else:
            self.num_lost += 1


_recorder = SpanRecorder()
_own = threading.local()  # recorder of a thread, in `unrecorded`


class Lane:
    """Row of a timeline with spans that do not overlap; constructed by `SpanRecorder.lane`. Thread-safe.

    Attributes:
        is_named: whether the recorder has an event with the lane's name.
    """

    def __init__(self, recorder: SpanRecorder, kind: LaneKind) -> None:
        self.kind = kind
        self.is_named = False
        self._recorder = recorder
        self._lock = threading.Lock()  # of merging only: nobody who adds waits for the disk
        self._added: deque[tuple[str, float, float, Any, dict[str, Any]]] = deque()
        self._window: dict[str, tuple[list[float], dict[str, Any]]] = {}  # by name: seconds (one item) and arguments
        self._key: Any = None
        self._began = self._ended = 0.0
        self._recorded_until: float | None = None
        self._open: tuple[str, float, dict[str, Any]] | None = None

    def add(self, name: str, began: float, seconds: float, key: Any = None, **args: Any) -> None:
        """Adds a span; spans with different keys are never merged.

        Spans are merged when the events are taken, or `MAX_PENDING` wait: between two steps of a model, code and data
        of merging would have to be loaded into the processor's cache again.
        """
        if not self._recorder.is_on:
            return
        self._added.append((name, began, seconds, key, args))
        if len(self._added) >= MAX_PENDING:
            with self._lock:
                self._merge_added()

    def _merge_added(self) -> None:
        while self._added:
            name, began, seconds, key, args = self._added.popleft()
            if self._open is not None:
                self._close_open(began)
            if self._window:
                limit = self._recorder.window_s if self.kind.merges else math.inf
                is_apart = began - self._began > limit or (
                    self.kind.shows_idle and began - self._ended > MAX_IDLE_SHARE * limit
                )
                if is_apart or key != self._key:
                    self._flush()
            if not self._window:
                self._began = began
                self._key = key
            if (known := self._window.get(name)) is None:
                self._window[name] = [seconds], args
            else:
                known[0][0] += seconds
                _merge_arguments(known[1], args)
            self._ended = began + seconds

    def begin(self, name: str, **args: Any) -> None:
        """Opens a span that lasts until the next span of the lane begins."""
        if self._recorder.is_on:
            with self._lock:
                self._merge_added()
                now = time.monotonic()
                self._close_open(now)
                self._open = name, now, args

    def instant(self, name: str, **args: Any) -> None:
        """Adds an event without a duration."""
        if self._recorder.is_on:
            self._recorder.put("i", name, self, time.monotonic(), 0.0, args)

    def flush(self, age_s: float) -> None:
        """Passes spans that ended at least `age_s` ago to the recorder; 0 also ends the open span."""
        with self._lock:
            self._merge_added()
            now = time.monotonic()
            if age_s == 0.0:
                self._close_open(now)
            if self._window and (age_s == 0.0 or now - self._ended >= age_s):
                self._flush()

    def end(self) -> None:
        """Passes all spans to the recorder; the time until the next span is not recorded as idle."""
        self.flush(0.0)
        with self._lock:
            self._recorded_until = None

    def _close_open(self, until: float) -> None:
        if self._open is not None:
            name, began, args = self._open
            self._open = None
            self._flush()
            self._recorder.put("X", name, self, began, max(0.0, until - began), args)

    def _flush(self) -> None:
        at = self._began
        recorded_until = self._recorded_until
        if self.kind.shows_idle and self._window and recorded_until is not None and at > recorded_until:
            self._recorder.put("X", "idle", self, recorded_until, at - recorded_until, {})
        for name, ((seconds,), args) in self._window.items():
            self._recorder.put("X", name, self, at, seconds, args)
            at += seconds
        self._recorded_until = at if self._window else recorded_until
        self._window = {}


class Overlap:
    """Records, as spans, the time in which at least one of several concurrent activities runs; thread-safe.

    A lane of None records nothing.
    """

    def __init__(self, name: str, lane: Lane | None = None) -> None:
        self.name = name
        self.lane = lane
        self._lock = threading.Lock()  # activities begin and end in several threads
        self._number = 0
        self._since = 0.0

    @contextmanager
    def one(self, **args: Any) -> Iterator[None]:
        """Context of one activity; `args` are recorded at its end."""
        with self._lock:
            if not self._number:
                self._since = time.monotonic()
            self._number += 1
        try:
            yield
        finally:
            with self._lock:
                now = time.monotonic()
                self._number -= 1
                if self.lane is not None:
                    self.lane.add(self.name, self._since, now - self._since, **args)
                self._since = now


def _merge_arguments(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Merges the arguments of a span into those of an earlier one."""
    for name, value in new.items():
        if (operation := MERGE_OPERATIONS.get(name)) is not None:
            old[name] = operation(old[name], value) if name in old else value


# -- Files of a run's timeline: one JSON event a line, in the array format of Chrome's Trace Events -------------------
# The format needs no closing bracket, and none is written: the file is valid after every line, even if the run is
# killed, and a resumed run appends to it. Perfetto (ui.perfetto.dev) and chrome://tracing open it.


FILE_HEADER = "[\n"
encode = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would construct an encoder per event


class TraceWriter:
    """Appends the events of a recorder to a file, in its own thread.

    Args:
        path: of the file; an existing one is continued.
        recorder: of the events.
        flush_s: seconds between two writes.

    Attributes:
        num_bytes: length of the file.
    """

    def __init__(self, path: Path, recorder: SpanRecorder, flush_s: float) -> None:
        self.path = path
        self._recorder = recorder
        self._flush_s = flush_s
        self.num_bytes = _remove_partial_line(path)
        self._is_ending = threading.Event()
        self._thread = new_thread(self._run, name="timeline")
        self._thread.start()

    def close(self, timeout_s: float = 10.0) -> None:
        """Writes the remaining events and ends the thread, within `timeout_s`."""
        self._is_ending.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._is_ending.wait(self._flush_s):
            self._write(self._recorder.take())
        self._write(self._recorder.take(include_open=True))

    def _write(self, events: Sequence[Event]) -> None:
        if events:
            text = "".join(f"{encode(event)},\n" for event in events)
            with tolerate_full_disk(str(self.path)):
                append(self.path, text)
                self.num_bytes += len(text)


def read_trace(path: Path) -> list[Event]:
    """Events of a file, without an incomplete last line.

    Raises:
        OSError: the file cannot be read.
    """
    events = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                event = json.loads(line.strip().rstrip(",]"))
            except ValueError:  # the opening bracket, or an incomplete line
                continue
            if isinstance(event, dict):
                events.append(event)
    return events


def trace_files(folder: Path) -> list[Path]:
    """Files of a run's timeline, one per rank."""
    return sorted(folder.glob("rank*.json"))


def merge_traces(paths: Iterable[Path], out: Path) -> None:
    """Writes the events of several ranks into one file, a complete JSON array.

    Raises:
        ValueError: `paths` is empty.
        OSError: a file cannot be read or written.
    """
    if not (paths := list(paths)):
        raise ValueError("there is no timeline: the run has no files timeline/rank*.json")
    events = [event for path in paths for event in read_trace(path)]
    lines = ",\n".join(map(encode, events))
    out.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def _remove_partial_line(path: Path) -> int:
    """Removes an incomplete last line of a file, or begins a new one; returns its length in bytes."""
    if not path.exists() or path.stat().st_size < len(FILE_HEADER):
        path.write_text(FILE_HEADER)
        return len(FILE_HEADER)
    with path.open("rb+") as file:
        size = end = file.seek(0, 2)
        while end > len(FILE_HEADER):
            begin = max(0, end - 4096)
            file.seek(begin)
            newline = file.read(end - begin).rfind(b"\n")
            if newline >= 0:
                end = begin + newline + 1
                break
            end = begin
        if end < size:
            file.truncate(max(end, len(FILE_HEADER)))
        return max(end, len(FILE_HEADER))
