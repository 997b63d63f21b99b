"""All that the page shows of one run, read from its folder; nothing in the folder is written or locked."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from lit_async_rl.report.curves import Curves
from lit_async_rl.report.held_out import HeldOut
from lit_async_rl.report.samples import MAX_BYTES, Samples, parsed
from lit_async_rl.report.tail import Tail
from lit_async_rl.report.timeline import Timeline

FILES = ("metrics.csv", "samples.jsonl", "timeline", "tape", "config.yaml")
MAX_CONFIG = 100_000  # characters
TAPE_S = 20.0  # between two looks at the tape, which is read as a whole


class RunData:
    """A run's curves, rollouts, timeline and verdicts. `refresh` reads only what was written since the last time.

    Args:
        folder: of the run.
        tape: folder of its rollout tape; None is `tape` in the run's folder.
        share: of the page's budget for rollouts, where there are several runs on it.

    Raises:
        ValueError: the folder is not that of a run, or there is no such tape.
    """

    def __init__(self, folder: str | Path, tape: str | Path | None = None, share: float = 1.0) -> None:
        self.folder = Path(folder)
        if not _is_run(self.folder):
            none = f"{str(folder)!r} is not the folder of a run: it has none of {', '.join(FILES)}"
            raise ValueError(none + _meant_folder(self.folder))
        if tape is not None and not Path(tape).is_dir():
            raise ValueError(f"tape={str(tape)!r}: there is no such folder")
        self._max_bytes = int(MAX_BYTES * share)
        self._tape = self.folder / "tape" if tape is None else Path(tape)
        self._curves, self._timeline = Curves(self.folder), Timeline(self.folder)
        self._samples, self._held_out = Samples(self.folder / "samples.jsonl"), HeldOut(self.folder)
        self._verdict_tail, self._verdicts = Tail(self.folder / "verdicts.jsonl"), list[dict[str, Any]]()
        self._of_tape: list[dict[str, Any]] = []
        self._tape_read_at, self._tape_size = -TAPE_S, 0
        self._notes: list[str] = []
        self._numbers = {"curves": 0, "timeline": 0, "rollouts": 0, "held_out": 0}

    def refresh(self) -> dict[str, int]:
        """Reads new lines; returns a number for each part of the page, which grows when it changes."""
        verdicts = self._read_verdicts()
        changed = {
            "curves": self._curves.refresh() or verdicts,
            "timeline": self._timeline.refresh() or verdicts,
            "rollouts": self._samples.refresh() or self._tape_has_grown(),
            "held_out": self._held_out.refresh(),
        }
        for name, has_changed in changed.items():
            self._numbers[name] += has_changed
        return dict(self._numbers)

    def _read_verdicts(self) -> bool:
        generation = self._verdict_tail.generation
        if not self._verdict_tail.begin():
            return False
        if self._verdict_tail.generation != generation:
            self._verdicts.clear()
        for _, line in self._verdict_tail.lines():
            if (row := parsed(line)) is not None:
                self._verdicts.append(row)
        return True

    def payload(self, known: dict[str, int] | None = None) -> dict[str, Any]:
        """The run for the page, without the parts whose number is in `known`."""
        numbers = self.refresh()
        made: dict[str, Any] = {"name": self._name(), "folder": str(self.folder), "parts": numbers}
        wanted = {name for name, number in numbers.items() if (known or {}).get(name) != number}
        if "curves" in wanted:
            made |= {"curves": self._curves.payload(), "summary": self._summary(), "config": self._config()}
        if "timeline" in wanted:
            verdict = self._verdict()
            window = (verdict["began_at"], verdict["ended_at"]) if verdict else (None, None)
            made |= {"timeline": self._timeline.payload(), "idle": self._timeline.idle(*window), "verdict": verdict}
            made["verdicts"] = [row for row in self._verdicts if row.get("whole_run") is False][-200:]
        if "rollouts" in wanted:
            made["rollouts"] = self._groups()
        if "held_out" in wanted:
            made["held_out"] = self._held_out.payload()
        return made | {"notes": self._notes}

    def _name(self) -> str:
        folder = self.folder.resolve()
        return f"{folder.parent.name}/{folder.name}"

    def _verdict(self) -> dict[str, Any] | None:
        """The last verdict on the whole run so far."""
        needed = {"began_at", "ended_at", "wall_s", "wait_s", "engine_busy_s", "text"}
        rows = [row for row in self._verdicts if row.get("whole_run") is True and needed <= row.keys()]
        return rows[-1] if rows else None

    def _tape_has_grown(self) -> bool:
        """Whether the tape's files are others than when it was read; looks only every `TAPE_S` seconds."""
        if time.monotonic() < self._tape_read_at + TAPE_S or not self._tape.is_dir():
            return False
        self._tape_read_at = time.monotonic()
        size = sum(1 for _ in self._tape.glob("*.arrow"))
        if size == self._tape_size:
            return False
        self._tape_size = size
        from lit_async_rl.report.tape_groups import tape_groups, token_texts  # imports torch and transformers

        try:
            known = self._samples.steps()
            self._of_tape = tape_groups(self._tape, token_texts(self.folder), known, self._max_bytes // 2)
            self._notes = []
        except (ValueError, OSError) as error:
            self._of_tape, self._notes = [], [f"The tape was left out: {error}"]
        return True

    def _groups(self) -> list[dict[str, Any]]:
        groups = self._samples.payload(self._max_bytes // (2 if self._of_tape else 1))
        known = {(group["step"], group["group"]) for group in groups}
        more = [group for group in self._of_tape if (group["step"], group["group"]) not in known]
        return sorted(groups + more, key=lambda group: (group["step"], group["group"]))

    def _config(self) -> str:
        try:
            return (self.folder / "config.yaml").read_text(errors="replace")[:MAX_CONFIG]
        except OSError:
            return ""

    def _summary(self) -> list[list[str]]:
        """Rows of the summary: label and value."""
        rows = [["optimizer steps", f"{self._curves.num_steps:,}"]]
        for name in ("val/pass@1", "val/reward"):
            if len(values := self._curves.values(name)):
                rows.append(
                    [f"held-out {name.removeprefix('val/')}, first and last", f"{values[0]:.3f}, {values[-1]:.3f}"]
                )
                break
        reward = self._curves.values("reward/mean")
        if len(reward):
            part = max(1, len(reward) // 10)
            rows.append(
                ["mean reward, first and last tenth", f"{reward[:part].mean():.3f}, {reward[-part:].mean():.3f}"]
            )
        if len(seconds := self._curves.values("perf/step_s")):
            which = "steps" if self._curves.has_all_steps("perf/step_s") else f"the {len(seconds):,} logged steps"
            rows.append([f"time in {which}", f"{seconds.sum():,.1f} s, {seconds.mean():.2f} s a step"])
        mean, most = self._curves.values("sample/staleness_mean"), self._curves.values("sample/staleness_max")
        if len(mean) and len(most):
            rows.append(["staleness, mean and largest", f"{mean.mean():.2f}, {most.max():.0f} versions"])
        if len(tokens := self._curves.values("sample/total_tokens")):
            rows.append(["tokens generated", f"{tokens[-1]:,.0f}"])
        return rows


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in FILES)


def _meant_folder(folder: Path) -> str:
    """`; did you mean ...?` for a file of a run, or the newest run below a folder."""
    if folder.is_file():
        near = [folder.parent, folder.parent.parent]
    else:
        below = [path for path in (*folder.glob("*"), *folder.glob("*/*")) if path.is_dir()]
        near = sorted(below, key=lambda path: path.stat().st_mtime, reverse=True)
    return next((f"; did you mean {path}?" for path in near if _is_run(path)), "")
