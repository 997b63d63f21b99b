"""Spans of a run's timeline: what each part of it did, and when.

Any function of any thread asks for the `recorder()` of its process and adds to a lane of it. It is off, and costs next
to nothing, until somebody wants spans and calls `start_recording`; a run that ends calls `stop_recording`.

A part that works in a thread of its own asks once, when a run makes it or sets it up, and keeps the lane. What it adds
after the end of its run is dropped: the next run has another recorder. Memory is bounded.

The seconds of a lane are those that its owner also adds to its own total (`RolloutEngine.busy_s`, the trainer's
`wait_s`), so that a timeline and the metrics of a run cannot disagree. Consecutive spans of a lane are merged within a
short window: a merged span has the sum of their seconds, and begins with the first.
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

from lit_async_rl.utils.files import append, tolerate_full_disk

WINDOW_S = 0.05  # of merging; a longer step gets a longer one
MAX_IDLE_SHARE = 0.2  # of the window: an engine that is idle for longer ends it
MAX_PENDING = 20_000
FIRST_SERVER = 1000  # number of a process; smaller ones are ranks
MERGED: dict[str, Callable[[Any, Any], Any]] = {
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
    """Row of a timeline that each process may have.

    Args:
        tid: its number.
        category: of its spans.
        name: of the row.
        merges: whether spans of different keys within the window are merged.
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
    """The recorder of this process, which is off unless a run writes a timeline."""
    return _recorder


def start_recording(pid: int = 0, offset_s: float = 0.0) -> SpanRecorder:
    """Switches the recorder of this process on.

    Args:
        pid: number of this process in the timeline, its rank.
        offset_s: added to this machine's clock.
    """
    global _recorder
    if _recorder.is_started:  # by a run that goes on around this one, or was never ended: it keeps its own
        _recorder = SpanRecorder()
    _recorder.start(pid, offset_s)
    return _recorder


def stop_recording(recorder: SpanRecorder) -> None:
    """Switches a recorder off for good; `recorder()` returns another from now on."""
    global _recorder
    recorder.stop()
    if recorder is _recorder:
        _recorder = SpanRecorder()


class SpanRecorder:
    """Records events of one process, in the Trace Event format that Perfetto and Chrome read. Thread-safe.

    Attributes:
        is_started: whether a run takes the events.
        is_on: whether spans are recorded now: a long timeline leaves steps out.
        window_s: spans of an engine or a reward worker within so many seconds are merged.
        num_lost: events that were dropped because they were not taken in time.
    """

    def __init__(self) -> None:
        self._pid = 0
        self._epoch = 0.0
        self._pending: deque[Event] = deque()
        self._lanes: dict[tuple[int | None, int], Lane] = {}
        self.is_started = False
        self.is_on = False
        self.window_s = WINDOW_S
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
        """Leaves out what is added from now on, or no longer does."""
        if self.is_on and not is_on:
            for lane in list(self._lanes.values()):
                lane.end()
        self.is_on = is_on

    def name_process(self, name: str, pid: int | None = None) -> None:
        """Names this process, or a server."""
        pid = self._pid if pid is None else pid
        self._append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}})

    def lane(self, kind: LaneKind, pid: int | None = None, process: str = "") -> Lane:
        """The lane of a kind, made if it is new; it may be kept.

        Args:
            kind: such as `ENGINE`.
            pid: number of a server; None is this process.
            process: name of the server.
        """
        if (lane := self._lanes.get((pid, kind.tid))) is None:  # two threads may get here: one lane is used by both
            lane = self._lanes.setdefault((pid, kind.tid), Lane(self, kind, pid, process=process))
        return lane

    def add(self, events: Iterable[Event]) -> None:
        """Adds events that another process of this machine has recorded."""
        for event in events if self.is_on else ():
            self._append(event)

    def take(self, all_of_it: bool = False) -> list[Event]:
        """Events since the last call; `all_of_it` includes spans that could still be merged with later ones."""
        for lane in list(self._lanes.values()):
            lane.flush(0.0 if all_of_it else max(1.0, self.window_s))
        events = []
        while self._pending:
            events.append(self._pending.popleft())
        return events

    def put(self, phase: str, name: str, lane: Lane, began: float, seconds: float, args: dict[str, Any]) -> None:
        """Adds an event; `began` is of `time.monotonic`."""
        pid = self._pid if lane.pid is None else lane.pid
        tid = lane.kind.tid
        if not lane.is_named:  # with its first event: parts ask for lanes that they may never use
            lane.is_named = True
            if lane.process:
                self.name_process(lane.process, pid)
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


class Lane:
    """Row of a timeline; its spans do not overlap. Made by `SpanRecorder.lane`; thread-safe.

    Attributes:
        is_named: whether the timeline has its name.
    """

    def __init__(self, recorder: SpanRecorder, kind: LaneKind, pid: int | None, process: str) -> None:
        self.kind = kind
        self.pid = pid
        self.process = process
        self.is_named = False
        self._recorder = recorder
        self._lock = threading.Lock()  # of the merging: `add` must not wait for the thread that writes
        self._added: deque[tuple[str, float, float, Any, dict[str, Any]]] = deque()
        self._window: dict[str, tuple[list[float], dict[str, Any]]] = {}  # name -> seconds and arguments, merged
        self._key: Any = None
        self._began = self._ended = 0.0
        self._drawn_until: float | None = None
        self._open: tuple[str, float, dict[str, Any]] | None = None

    def add(self, name: str, began: float, seconds: float, key: Any = None, **args: Any) -> None:
        """Adds a span; one of another `key` is never merged with it.

        Spans are merged when the events are taken: between two steps of a model all of this would have to come back
        into the processor's cache.
        """
        if not self._recorder.is_on:
            return
        if len(self._added) < MAX_PENDING:
            self._added.append((name, began, seconds, key, args))
        else:
            self._recorder.num_lost += 1

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
                _merge(known[1], args)
            self._ended = began + seconds

    def begin(self, name: str, **args: Any) -> None:
        """Opens a span that lasts until the lane's next one begins."""
        if self._recorder.is_on:
            with self._lock:
                self._merge_added()
                now = time.monotonic()
                self._close_open(now)
                self._open = name, now, args

    def instant(self, name: str, **args: Any) -> None:
        """Adds a moment."""
        if self._recorder.is_on:
            self._recorder.put("i", name, self, time.monotonic(), 0.0, args)

    def flush(self, age_s: float) -> None:
        """Passes on what ended at least `age_s` ago."""
        with self._lock:
            self._merge_added()
            now = time.monotonic()
            if age_s == 0.0:
                self._close_open(now)
            if self._window and (age_s == 0.0 or now - self._ended >= age_s):
                self._flush()

    def end(self) -> None:
        """Passes on everything; what follows is not idle time."""
        self.flush(0.0)
        with self._lock:
            self._drawn_until = None

    def _close_open(self, until: float) -> None:
        if self._open is not None:
            (name, began, args) = self._open
            self._open = None
            self._flush()
            self._recorder.put("X", name, self, began, max(0.0, until - began), args)

    def _flush(self) -> None:
        at = self._began
        drawn = self._drawn_until
        if self.kind.shows_idle and self._window and drawn is not None and at > drawn:
            self._recorder.put("X", "idle", self, drawn, at - drawn, {})
        for name, ((seconds,), args) in self._window.items():
            self._recorder.put("X", name, self, at, seconds, args)
            at += seconds
        self._drawn_until = at if self._window else drawn
        self._window = {}


class Overlap:
    """Records the time in which at least one of several concurrent activities goes on; thread-safe.

    Args:
        name: of the spans.
        lane: of the spans; None records nothing.
    """

    def __init__(self, name: str, lane: Lane | None = None) -> None:
        self.name = name
        self.lane = lane
        self._lock = threading.Lock()
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


def _merge(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Adds the arguments of a span to those of the one that it is merged into."""
    for name, value in new.items():
        if (operation := MERGED.get(name)) is not None:
            old[name] = operation(old[name], value) if name in old else value


# -- Files of a run's timeline: one JSON event a line, in the array format of Chrome's Trace Events -------------------
# The format needs no closing bracket, and none is written: a file is whole after every line, whenever its run is
# killed, and a run that is resumed goes on in it. Perfetto (ui.perfetto.dev) and chrome://tracing open it.


HEAD = "[\n"
encode = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would make an encoder for each event


class TraceWriter:
    """Appends what a recorder collects to a file, in a thread of its own.

    Args:
        path: of the file; goes on in one that is there.
        recorder: of the events.
        flush_s: seconds between two writes.

    Attributes:
        num_bytes: length of the file.
    """

    def __init__(self, path: Path, recorder: SpanRecorder, flush_s: float) -> None:
        self.path = path
        self._recorder = recorder
        self._flush_s = flush_s
        self.num_bytes = _mend(path)
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="timeline", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 10.0) -> None:
        """Writes the rest and ends the thread."""
        self._is_ending.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._is_ending.wait(self._flush_s):
            self._write(self._recorder.take())
        self._write(self._recorder.take(all_of_it=True))

    def _write(self, events: Sequence[Event]) -> None:
        if events:
            text = "".join(f"{encode(event)},\n" for event in events)
            with tolerate_full_disk(str(self.path)):
                append(self.path, text)
                self.num_bytes += len(text)


def read_trace(path: Path) -> list[Event]:
    """Events of a file; a last line that was cut off is left out.

    Raises:
        OSError: it cannot be read.
    """
    events = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                event = json.loads(line.strip().rstrip(",]"))
            except ValueError:  # the bracket, or a line that was cut off
                continue
            if isinstance(event, dict):
                events.append(event)
    return events


def trace_files(folder: Path) -> list[Path]:
    """Files of a run's timeline, one per rank."""
    return sorted(folder.glob("rank*.json"))


def merge_traces(paths: Iterable[Path], out: Path) -> None:
    """Writes the events of several ranks into one file, a JSON array that any reader takes.

    Raises:
        ValueError: there are no files.
        OSError: one cannot be read or written.
    """
    if not (paths := list(paths)):
        raise ValueError("there is no timeline: the run has no files timeline/rank*.json")
    events = [event for path in paths for event in read_trace(path)]
    lines = ",\n".join(map(encode, events))
    out.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def _mend(path: Path) -> int:
    """Begins a file, or removes a line that was cut off from one that is there; returns its length."""
    if not path.exists() or path.stat().st_size < len(HEAD):
        path.write_text(HEAD)
        return len(HEAD)
    with path.open("rb+") as file:
        size = end = file.seek(0, 2)
        while end > len(HEAD):
            begin = max(0, end - 4096)
            file.seek(begin)
            found = file.read(end - begin).rfind(b"\n")
            if found >= 0:
                end = begin + found + 1
                break
            end = begin
        if end < size:
            file.truncate(max(end, len(HEAD)))
        return max(end, len(HEAD))
