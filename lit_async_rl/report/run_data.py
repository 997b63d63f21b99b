"""Data of one run for the page, read from its folder without writing to it or locking it."""

from __future__ import annotations

import csv
import io
import logging
import math
import time
from array import array
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from lit_async_rl.report.samples import MAX_ROLLOUT_BYTES, Samples, evenly, parsed, shortened
from lit_async_rl.report.tail import Tail
from lit_async_rl.report.trace_files import Timeline

log = logging.getLogger(__name__)
RUN_FILES = ("metrics.csv", "samples.jsonl", "timeline", "tape", "config.yaml")
MAX_CONFIG_CHARS = 100_000
TAPE_POLL_INTERVAL_S = 20.0  # long, because the tape is not read incrementally


class RunData:
    """A run's curves, rollouts, timeline and verdicts; `refresh` reads new lines only.

    Args:
        folder: folder of the run.
        tape: folder of its rollout tape; None is `tape` in the run's folder.
        share: share of the page's budget for rollouts, if the page shows several runs.

    Raises:
        ValueError: the folder is not a run's folder, or there is no such tape.
    """

    def __init__(self, folder: str | Path, tape: str | Path | None = None, share: float = 1.0) -> None:
        self.folder = Path(folder)
        if not _is_run(self.folder):
            none = f"{str(folder)!r} is not the folder of a run: it has none of {', '.join(RUN_FILES)}"
            raise ValueError(none + _suggested_folder(self.folder))
        if tape is not None and not Path(tape).is_dir():
            raise ValueError(f"tape={str(tape)!r}: there is no such folder")
        self._max_bytes = int(MAX_ROLLOUT_BYTES * share)
        self._tape = self.folder / "tape" if tape is None else Path(tape)
        self._curves = Curves(self.folder)
        self._timeline = Timeline(self.folder)
        self._samples = Samples(self.folder / "samples.jsonl")
        self._held_out = HeldOut(self.folder)
        self._verdict_tail = Tail(self.folder / "verdicts.jsonl")
        self._verdicts = list[dict[str, Any]]()
        self._of_tape: list[dict[str, Any]] = []
        self._tape_read_at = -TAPE_POLL_INTERVAL_S
        self._tape_size = 0
        self._notes: list[str] = []
        self._numbers = {"curves": 0, "timeline": 0, "rollouts": 0, "held_out": 0}

    def refresh(self) -> dict[str, int]:
        """Reads new lines; returns a number for each part of the page, which grows with every change."""
        verdicts = self._verdict_tail.refresh(self._verdicts.clear, self._add_verdict)
        changed = {
            "curves": self._curves.refresh() or verdicts,
            "timeline": self._timeline.refresh() or verdicts,
            "rollouts": self._samples.refresh() or self._read_tape(),
            "held_out": self._held_out.refresh(),
        }
        for name, has_changed in changed.items():
            self._numbers[name] += has_changed
        return dict(self._numbers)

    def _add_verdict(self, _: int, line: bytes) -> None:
        if (row := parsed(line)) is not None:
            self._verdicts.append(row)

    def payload(self, known: dict[str, int] | None = None) -> dict[str, Any]:
        """The run as JSON for the page, without the unchanged parts.

        Args:
            known: numbers of the parts that the page has, see `refresh`; None returns all parts.
        """
        numbers = self.refresh()
        content: dict[str, Any] = {"name": self._name(), "folder": str(self.folder), "parts": numbers}
        changed = {name for name, number in numbers.items() if (known or {}).get(name) != number}
        if "curves" in changed:
            content["curves"] = self._curves.payload()
            content["summary"] = self._summary()
            content["config"] = self._config()
        if "timeline" in changed:
            verdict = self._verdict()
            window = (verdict["began_at"], verdict["ended_at"]) if verdict else ()
            content["timeline"] = self._timeline.payload()
            content["idle"] = self._timeline.idle(*window)
            content["verdict"] = verdict
            content["verdicts"] = [row for row in self._verdicts if row.get("whole_run") is False][-200:]
        if "rollouts" in changed:
            content["rollouts"] = self._groups()
        if "held_out" in changed:
            content["held_out"] = self._held_out.payload()
        content["notes"] = self._notes
        return content

    def _name(self) -> str:
        folder = self.folder.resolve()
        return f"{folder.parent.name}/{folder.name}"

    def _verdict(self) -> dict[str, Any] | None:
        """The last verdict on the whole run so far."""
        needed = {"began_at", "ended_at", "wall_s", "wait_s", "engine_busy_s", "text"}
        rows = [row for row in self._verdicts if row.get("whole_run") is True and needed <= row.keys()]
        return rows[-1] if rows else None

    def _read_tape(self) -> bool:
        """Reads a tape with new files, at most every `TAPE_POLL_INTERVAL_S`; returns whether it did."""
        if time.monotonic() < self._tape_read_at + TAPE_POLL_INTERVAL_S or not self._tape.is_dir():
            return False
        self._tape_read_at = time.monotonic()
        size = sum(1 for _ in self._tape.glob("*.arrow"))
        if size == self._tape_size:
            return False
        self._tape_size = size
        from lit_async_rl.report.tape_groups import tape_groups, token_texts  # whose imports take seconds

        try:
            known = self._samples.steps()
            self._of_tape = tape_groups(self._tape, token_texts(self.folder), known, max_bytes=self._max_bytes // 2)
            self._notes = []
        except (ValueError, OSError) as error:
            self._of_tape = []
            self._notes = [f"The tape was left out: {error}"]
        return True

    def _groups(self) -> list[dict[str, Any]]:
        groups = self._samples.payload(self._max_bytes // (2 if self._of_tape else 1))
        known = {(group["step"], group["group"]) for group in groups}
        more = [group for group in self._of_tape if (group["step"], group["group"]) not in known]
        return sorted(groups + more, key=lambda group: (group["step"], group["group"]))

    def _config(self) -> str:
        try:
            return (self.folder / "config.yaml").read_text(errors="replace")[:MAX_CONFIG_CHARS]
        except OSError:
            return ""

    def _summary(self) -> list[list[str]]:
        """Rows of the summary: label and value."""
        rows = [["optimizer steps", f"{self._curves.num_steps:,}"]]
        for name, label in (("val/pass@1", "held-out accuracy"), ("val/reward", "held-out reward")):
            if len(values := self._curves.values(name)):
                rows.append([f"{label}, first and last", f"{values[0]:.3f}, {values[-1]:.3f}"])
                break
        if len(losses := self._curves.values("val/loss")):
            rows.append(["held-out loss, first and last", f"{losses[0]:.3f}, {losses[-1]:.3f}"])
        reward = self._curves.values("reward/mean")
        if len(reward):
            part = max(1, len(reward) // 10)
            rows.append(
                ["mean reward, first and last tenth", f"{reward[:part].mean():.3f}, {reward[-part:].mean():.3f}"]
            )
        if len(seconds := self._curves.values("perf/step_s")):
            which = "steps" if self._curves.has_all_steps("perf/step_s") else f"the {len(seconds):,} logged steps"
            rows.append([f"time in {which}", f"{seconds.sum():,.1f} s, {seconds.mean():.2f} s a step"])
        mean = self._curves.values("sample/staleness_mean")
        maximum = self._curves.values("sample/staleness_max")
        if len(mean) and len(maximum):
            rows.append(["staleness, mean and largest", f"{mean.mean():.2f}, {maximum.max():.0f} versions"])
        if len(shares := self._curves.values("perf/computed_share")):
            rows.append(["tokens computed in training", f"{shares.mean():.0%} of those of separate rows"])
        verdict = self._verdict()
        if verdict and "num_tokens" in verdict and verdict.get("step", 0) >= self._curves.num_steps:
            rows.append(["tokens generated", f"{verdict['num_tokens']:,.0f}"])
        elif len(tokens := self._curves.values("sample/total_tokens")):
            rows.append(["tokens generated until the last logged step", f"{tokens[-1]:,.0f}"])
        return rows


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in RUN_FILES)


def _suggested_folder(folder: Path) -> str:
    """`; did you mean ...?` for a file of a run, or the newest run below a folder."""
    if folder.is_file():
        near = [folder.parent, folder.parent.parent if len(folder.parts) > 2 else folder.absolute().parent.parent]
    else:
        below = [path for path in (*folder.glob("*"), *folder.glob("*/*")) if path.is_dir()]
        near = sorted(below, key=lambda path: path.stat().st_mtime, reverse=True)
    return next((f"; did you mean {path}?" for path in near if _is_run(path)), "")


# -- Metrics of a run: every column of `metrics.csv` by optimizer step, thinned for drawing ---------------------------


MAX_CURVE_POINTS = 1500  # more than a chart has pixels
BOOKKEEPING_COLUMNS = {"step", "epoch"}
VALIDATION_PREFIXES = ("val/", "eval/")


class Curves:
    """Incremental reader of `metrics.csv`.

    Steps count from 1, as in `samples.jsonl`; Lightning counts them from 0. Validations are at the number of steps
    before them; within training Lightning writes them one step too early.
    """

    def __init__(self, folder: Path) -> None:
        self._tail = Tail(folder / "metrics.csv")
        self._clear()

    def _clear(self) -> None:
        self._header: list[str] = []
        self._last_step = -1.0
        self._series: defaultdict[str, tuple[array[float], array[float]]] = defaultdict(_series)

    def refresh(self) -> bool:
        """Reads new rows; returns whether there were any."""
        return self._tail.refresh(self._clear, self._add)

    def _add(self, _: int, line: bytes) -> None:
        cells = next(csv.reader(io.StringIO(line.decode(errors="replace"))), [])
        if not self._header:
            self._header = cells
            return
        if cells == self._header:
            return
        row = dict(zip(self._header, cells, strict=False))
        step = _number(row.get("step"))
        if step is None:
            return
        metrics = {name: _number(text) for name, text in row.items() if text and name not in BOOKKEEPING_COLUMNS}
        if any(not name.startswith(VALIDATION_PREFIXES) for name in metrics):
            self._last_step = step
        x = step + (step <= self._last_step)  # the row of a step comes before that of a validation after it
        for name, value in metrics.items():
            if value is not None:
                steps, values = self._series[name]
                steps.append(x)
                values.append(value)

    def values(self, name: str) -> np.ndarray:
        """All finite values of a metric, in order."""
        values = np.asarray(self._series[name][1]) if name in self._series else np.empty(0)
        return values[np.isfinite(values)]

    def has_all_steps(self, name: str) -> bool:
        """Whether a metric has a value at every step from its first to its last, as with `log_every_n_steps: 1`."""
        steps = self._series[name][0] if name in self._series else ()
        return len(steps) > 0 and max(steps) - min(steps) < len(steps)

    @property
    def num_steps(self) -> int:
        """Optimizer steps, by the last logged one."""
        return int(max((max(steps) for steps, _ in self._series.values() if steps), default=0))

    def payload(self) -> dict[str, Any]:
        """Curves for the page; metrics logged at the same steps share a list of steps."""
        axes: dict[tuple[float, ...], int] = {}
        series = {}
        for name, (steps, values) in sorted(self._series.items()):
            x, y = thinned(np.asarray(steps), np.asarray(values))
            axis = axes.setdefault(tuple(x.tolist()), len(axes))
            series[name] = {"axis": axis, "y": [_short(value) for value in y.tolist()]}
        return {"axes": [[int(step) for step in axis] for axis in axes], "series": series}


def thinned(x: np.ndarray, y: np.ndarray, max_points: int = MAX_CURVE_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Reduces a curve to about `max_points`: the minimum and maximum of each of `max_points / 2` parts."""
    if len(x) <= max_points:
        return x, y
    finite = np.where(np.isfinite(y), y, np.nanmean(np.where(np.isfinite(y), y, np.nan)) if len(y) else 0.0)
    kept: set[int] = {0, len(x) - 1}
    for part in np.array_split(np.arange(len(x)), max_points // 2):
        kept |= {int(part[finite[part].argmin()]), int(part[finite[part].argmax()])}
    kept |= {int(n) for n in np.flatnonzero(~np.isfinite(y))[:100]}
    order = np.array(sorted(kept))
    return x[order], y[order]


def _series() -> tuple[array[float], array[float]]:
    return array("d"), array("d")


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


def _short(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


# -- Samples of the same held-out prompts at every validation, from `held_out.jsonl` ----------------------------------


MAX_HELD_OUT_VALIDATIONS = 60
MAX_HELD_OUT_PROMPTS = 8
MAX_HELD_OUT_BYTES = 1_000_000


class HeldOut:
    """Incremental reader of `held_out.jsonl`."""

    def __init__(self, folder: Path) -> None:
        self._tail = Tail(folder / "held_out.jsonl")
        self._rows: dict[str, dict[int, dict[str, Any]]] = {}

    def refresh(self) -> bool:
        """Reads new rows; returns whether there were any."""
        return self._tail.refresh(self._rows.clear, self._add)

    def _add(self, _: int, line: bytes) -> None:
        row = parsed(line)
        if row is not None and isinstance(row.get("prompt"), str) and isinstance(row.get("step"), int):
            self._rows.setdefault(row["prompt"], {}).setdefault(row["step"], row)

    def payload(self) -> list[dict[str, Any]]:
        """Prompts with their answers, and a completion at each of several evenly spaced validations."""
        prompts = []
        remaining = MAX_HELD_OUT_BYTES
        for prompt, rows in list(self._rows.items())[:MAX_HELD_OUT_PROMPTS]:
            samples = []
            for step in sorted(evenly(sorted(rows), MAX_HELD_OUT_VALIDATIONS)):
                text = shortened(rows[step].get("completion"))
                remaining -= len(text.encode())
                if remaining > 0:
                    samples.append({"step": step, "text": text, "reward": rows[step].get("reward")})
            if samples:
                answer = next(iter(rows.values())).get("answer")
                prompts.append({"prompt": shortened(prompt), "answer": answer, "samples": samples})
        return prompts
