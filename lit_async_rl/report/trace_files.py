"""Timeline of a run for the page, from the trace files `timeline/rank*.json`.

Each file is a JSON array in Chrome's trace format with one event per line; the closing bracket may be missing, and the
last line cut off. Shares over the whole run are exact; single spans are shown for all of a short run, and a few windows
of a long one.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lit_async_rl.report.samples import parsed
from lit_async_rl.report.tail import Tail

MAX_SPANS = 3000
NUM_WINDOWS = 8
MAX_BINS = 400
STEPS_PER_BIN = 4  # at least, because the chart of single spans shows shares within a step
BUSY_KINDS = ("engine/prefill", "engine/decode")
KINDS = (
    "trainer/wait",
    "trainer/forward_backward",
    "trainer/optimizer",
    "trainer/publish",
    "trainer/checkpoint",
    "trainer/validation",
    "engine/prefill",
    "engine/decode",
    "engine/update_weights",
    "reward/score",
    "environment/answer",
)


class Timeline:
    """Incremental reader of a run's trace files. Times are seconds since 1970."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "timeline"
        self._tails: dict[str, Tail] = {}
        self._clear()

    def _clear(self) -> None:
        self._begin = array("d")
        self._duration = array("d")
        self._kind = array("i")
        self._lane = array("i")
        self._step = array("i")
        self._version = array("i")
        self._file = array("i")
        self._offset = array("q")
        self._kinds: dict[str, int] = {}
        self._lanes: dict[tuple[str, int, int], int] = {}
        self._names: dict[tuple[int, int], str] = {}
        self._processes: dict[int, str] = {}
        self._complete_until: float | None = None

    def refresh(self) -> bool:
        """Reads new events; returns whether there were any."""
        paths = sorted(self._folder.glob("*.json"))
        for path in paths:
            self._tails.setdefault(path.name, Tail(path))
        if not sum(tail.begin() for tail in self._tails.values()):  # not `any`, which would skip some
            return False
        if any(tail.was_replaced for tail in self._tails.values()):
            self._clear()
            self._tails = {path.name: Tail(path) for path in paths}
            for tail in self._tails.values():
                tail.begin()
        for number, tail in enumerate(self._tails.values()):
            for offset, line in tail.lines():
                self._add(number, offset, line)
        return True

    def _add(self, file: int, offset: int, line: bytes) -> None:
        event = parsed(line.strip().lstrip(b"[").rstrip(b"],"))
        if event is None:
            return
        try:
            thread = int(event.get("pid", 0)), int(event.get("tid", 0))
            if event.get("ph") != "X":
                self._record_name(event, thread)
                return
            begin = float(event["ts"]) / 1e6
            duration = max(0.0, float(event["dur"])) / 1e6
            args = event.get("args") or {}
            step = _as_index(args.get("step"))
            version = _as_index(args.get("version"))
        except (KeyError, TypeError, ValueError, AttributeError):
            return
        category = str(event.get("cat"))
        kind = f"{event.get('cat')}/{event.get('name')}"
        self._begin.append(begin)
        self._duration.append(duration)
        self._kind.append(self._kinds.setdefault(kind, len(self._kinds)))
        self._lane.append(self._lanes.setdefault((category, *thread), len(self._lanes)))
        self._step.append(step)
        self._version.append(version)
        self._file.append(file)
        self._offset.append(offset)

    def _record_name(self, event: dict[str, Any], thread: tuple[int, int]) -> None:
        """Records names of processes and threads, and the time from which only some steps were recorded."""
        kind = event.get("ph")
        name = event.get("name")
        args = event.get("args") or {}
        if kind == "M" and name == "thread_name":
            self._names[thread] = str(args["name"])
        elif kind == "M" and name == "process_name":
            self._processes[thread[0]] = str(args["name"])
        elif name == "recorded steps" and args.get("every") != 1 and self._complete_until is None:
            self._complete_until = float(event["ts"]) / 1e6

    def __len__(self) -> int:
        return len(self._begin)

    def spans(self, *kinds: str) -> Spans:
        """All spans of the given kinds (`category/name`), from all ranks and threads."""
        numbers = [self._kinds[kind] for kind in kinds if kind in self._kinds]
        is_of_kind = np.isin(np.asarray(self._kind), numbers)
        begin = np.asarray(self._begin)[is_of_kind]
        return Spans(begin, begin + np.asarray(self._duration)[is_of_kind])

    def idle(self, began_at: float | None = None, ended_at: float | None = None) -> dict[str, float] | None:
        """Idle and busy seconds of a window without validation, as in the verdict; None before training.

        Args:
            began_at: begin of the window; None is that of the first micro-batch.
            ended_at: end of the window; None is that of the last span.
        """
        training = self.spans("trainer/forward_backward")
        if not len(training.begin):
            return None
        begin = float(training.begin.min()) if began_at is None else began_at
        end = float(self._ends().max()) if ended_at is None else ended_at
        end = max(begin, min(end, self._complete_until or end))
        validation = self.spans("trainer/validation")
        return {
            "began_at": begin,
            "ended_at": end,
            "wall_s": Spans(np.array([begin]), np.array([end])).outside(validation, begin, end),
            "wait_s": self.spans("trainer/wait").outside(validation, begin, end),
            "sync_s": self.spans("trainer/publish").outside(validation, begin, end),
            "engine_busy_s": self.spans(*BUSY_KINDS).outside(validation, begin, end),
        }

    def _ends(self) -> np.ndarray:
        return np.asarray(self._begin) + np.asarray(self._duration)

    def payload(self) -> dict[str, Any] | None:
        """Lanes, shares of time of each kind in bins of the run, and windows with single spans."""
        if not len(self):
            return None
        first = float(np.asarray(self._begin).min())
        last = float(self._ends().max())
        steps = max(self._step) + 1
        bins = max(10, min(MAX_BINS, steps // STEPS_PER_BIN))
        edges = np.linspace(first, max(last, first + 1e-6), bins + 1)
        width = edges[1] - edges[0]
        shares = {
            kind: [round(float(v), 4) for v in np.diff(self._seconds(kind).covered(edges)) / width]
            for kind in KINDS
            if kind in self._kinds
        }
        return {
            "origin": first,
            "duration": last - first,
            "num_spans": len(self),
            "lanes": [self._lane_name(lane) for lane in self._lanes],
            "bins": {"width": width, "shares": shares},
            "windows": self._windows(first),
        }

    def _seconds(self, kind: str) -> Spans:
        spans = self.spans(kind)
        return spans if kind.startswith("reward/") else spans.union()  # concurrent workers add up

    def _lane_name(self, lane: tuple[str, int, int]) -> dict[str, Any]:
        category, process, thread = lane
        name = self._names.get((process, thread), category)
        several = len({process for _, process, _ in self._lanes}) > 1
        where = self._processes.get(process, f"process {process}") if several else ""
        return {"category": category, "name": name, "process": process, "where": where, "thread": thread}

    def _windows(self, origin: float) -> list[dict[str, Any]]:
        order = np.argsort(np.asarray(self._begin), kind="stable")
        if len(order) <= MAX_SPANS:
            return [self._window(order, origin)]
        size = 2 * MAX_SPANS // 3
        begins = [round(n * (len(order) - size) / (NUM_WINDOWS - 1)) for n in range(NUM_WINDOWS)]
        return [self._window(order[begin : begin + size], origin) for begin in begins]

    def _window(self, numbers: np.ndarray, origin: float) -> dict[str, Any]:
        kinds = list(self._kinds)
        steps = np.asarray(self._step)[numbers]
        steps = steps[steps >= 0]
        return {
            "steps": [int(steps.min()) + 1, int(steps.max()) + 1] if len(steps) else None,
            "kinds": kinds,
            "spans": [
                [
                    self._lane[n],
                    self._kind[n],
                    round(self._begin[n] - origin, 5),
                    round(self._duration[n], 5),
                    self._version[n],
                    self._args(n),
                ]
                for n in numbers.tolist()
            ],
        }

    def _args(self, number: int) -> dict[str, Any]:
        path = list(self._tails.values())[self._file[number]].path
        try:
            with path.open("rb") as file:
                file.seek(self._offset[number])
                event = parsed(file.readline().strip().lstrip(b"[").rstrip(b"],"))
        except OSError:
            return {}
        args = (event or {}).get("args")
        if not isinstance(args, dict) or len(json.dumps(args)) > 400:
            return {}
        return args | {"step": args["step"] + 1} if isinstance(args.get("step"), int) else args  # counted from 1


def _as_index(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**31 else -1


# -- Arithmetic of time spans -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spans:
    """Intervals of time in seconds, as arrays; they may overlap."""

    begin: np.ndarray
    end: np.ndarray

    def union(self) -> Spans:
        """Union of the spans as disjoint intervals, in order."""
        if not len(self.begin):
            return self
        order = np.argsort(self.begin, kind="stable")
        begin = self.begin[order]
        end = np.maximum.accumulate(self.end[order])
        first = np.concatenate([[True], begin[1:] > end[:-1]])
        return Spans(begin[first], end[np.concatenate([first[1:], [True]])])

    def covered(self, times: np.ndarray) -> np.ndarray:
        """Total duration of the spans before each time t: F(t) = sum of (t - begin)+ - (t - end)+."""
        return _before(self.begin, times) - _before(self.end, times)

    def within(self, begin: float, end: float) -> float:
        """Total duration of the spans within a window, in seconds."""
        low, high = self.covered(np.array([begin, end]))
        return float(high - low)

    def outside(self, excluded: Spans, begin: float, end: float) -> float:
        """Seconds of a window covered by these spans, and not by the excluded ones."""
        both = Spans(np.concatenate([self.begin, excluded.begin]), np.concatenate([self.end, excluded.end]))
        return both.union().within(begin, end) - excluded.union().within(begin, end)


def _before(points: np.ndarray, times: np.ndarray) -> np.ndarray:
    if not len(points):
        return np.zeros(len(times))
    origin = points.min()  # sums of seconds since 1970 would lose digits
    ordered = np.sort(points) - origin
    times = times - origin
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    number = np.searchsorted(ordered, times)
    return number * times - sums[number]
