"""Trains the cells of a suite, several at a time, each in its own process; finished ones are skipped."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from benchmarks.common.process import FULL, RESULT, write_result
from lit_async_rl.utils.checks import check_range

POLL_S = 0.1
SAVING_S = 120.0  # for a cell that was asked to end: a step, and its checkpoint


class Cell(Protocol):
    """One run of a benchmark; hashable."""

    @property
    def folder(self) -> Path:
        """Folder of its results, relative to the benchmark's."""
        ...

    def arguments(self) -> list[str]:
        """Arguments of `scripts/train.py` for the same run."""
        ...


C = TypeVar("C", bound=Cell)


class Grid(Generic[C]):
    """Runs cells. An interrupted grid is resumed: cells whose folder holds a result are finished.

    Args:
        run_cell: trains one cell, in a process of its own, and writes its result.
        out: the benchmark's folder.
        num_processes: cells trained concurrently; one core each. When one finds the memory of the machine or its GPU
            full, it is tried again at the end, and one fewer runs at a time. Alone, that is its result.
        cell_timeout_s: a cell that takes longer is killed and counts as failed.
        budget_s: after so long the grid ends. Cells that are running get SIGTERM, and time to save a checkpoint.
    """

    def __init__(
        self,
        run_cell: Callable[[C, Path], None],
        out: Path,
        num_processes: int,
        cell_timeout_s: float,
        *,
        budget_s: float | None = None,
    ) -> None:
        check_range("", ">= 1", num_processes=num_processes)
        self.run_cell = run_cell
        self.out = out
        self.num_processes = num_processes
        self.cell_timeout_s = cell_timeout_s
        self.ends_at = None if budget_s is None else time.monotonic() + budget_s
        # a forked child need not import torch, Lightning and transformers again: seconds saved for each cell
        self._context = multiprocessing.get_context("fork" if hasattr(os, "fork") else "spawn")
        self._running: dict[C, tuple[BaseProcess, float]] = {}
        self._alone: C | None = None  # the last one that was started with nothing beside it, now or later

    def run(self, cells: Iterable[C]) -> None:
        """Trains all cells; kills its processes when interrupted.

        Raises:
            TimeoutError: the budget is spent.
        """
        waiting = [cell for cell in dict.fromkeys(cells) if not (self.out / cell.folder / RESULT).is_file()]
        total = len(waiting)
        began = time.monotonic()
        try:
            while waiting or self._running:
                while waiting and len(self._running) < self.num_processes:
                    cell = waiting.pop(0)
                    if not (self.out / cell.folder / RESULT).is_file():  # another grid may have finished it since
                        self._start(cell)
                ended, refused = self._reap()
                waiting += refused
                for cell in ended:
                    done = total - len(waiting) - len(self._running)
                    left_s = (time.monotonic() - began) / done * (total - done)
                    print(f"{done}/{total}  {cell.folder}  (about {left_s / 60:.0f} min left)", flush=True)
                if self.ends_at is not None and time.monotonic() > self.ends_at and (waiting or self._running):
                    raise TimeoutError(f"{len(waiting) + len(self._running)} of {total} runs have not finished")
                time.sleep(POLL_S)
        except TimeoutError:
            for process, _ in self._running.values():
                process.terminate()
            saved_by = time.monotonic() + SAVING_S
            for process, _ in self._running.values():
                process.join(max(0.0, saved_by - time.monotonic()))
            raise
        finally:
            for process, _ in self._running.values():
                process.kill()
                process.join()

    def _start(self, cell: C) -> None:
        process = self._context.Process(target=_run, args=(self.run_cell, cell, self.out, os.getpid()))  # type: ignore[attr-defined]
        process.start()
        # not whether it is alone when it ends: what took its memory may have ended by then
        self._alone = cell if self.num_processes == 1 and not self._running else None
        self._running[cell] = (process, time.monotonic())

    def _reap(self) -> tuple[list[C], list[C]]:
        """Cells that have ended, and those to be tried again. One without a result gets an error as its result."""
        ended = list[C]()
        refused = list[C]()
        for cell, (process, began) in list(self._running.items()):
            overdue = time.monotonic() - began > self.cell_timeout_s
            if process.is_alive() and not overdue:
                continue
            if overdue:
                process.kill()
            process.join()
            del self._running[cell]
            folder = self.out / cell.folder
            if (folder / FULL).is_file():
                if cell != self._alone:
                    self.num_processes = max(1, self.num_processes - 1)
                    refused.append(cell)
                    print(f"{cell.folder}: out of memory; {self.num_processes} at a time from now on", flush=True)
                    continue
                (folder / FULL).rename(folder / RESULT)
            if not (folder / RESULT).is_file():
                reason = f"took more than {self.cell_timeout_s:g} s" if overdue else f"died: exit {process.exitcode}"
                folder.mkdir(parents=True, exist_ok=True)
                write_result(folder, {"error": reason, "wall_s": time.monotonic() - began, "command": cell.arguments()})
            ended.append(cell)
        return ended, refused


def _run(run_cell: Callable[[C, Path], None], cell: C, out: Path, parent: int) -> None:
    """Process of a cell; dies with the grid, so that no later grid trains the cell concurrently."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the grid decides
    run_cell(cell, out)
