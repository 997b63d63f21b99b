"""How much of the package one optimizer step runs through: a reader has to follow the same way.

Counted between the ends of two batches, with no callback but the one that publishes weights. Comprehensions and lambdas
are not counted as functions, and wrappers that decorators of other packages add are not counted as frames.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from inspect import unwrap
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import lightning.pytorch as pl
import pytest
from flow import fit, make_data, make_module

import lit_async_rl
from lit_async_rl.scheduling.admission import Admission

PACKAGE = Path(lit_async_rl.__file__).parent
LIGHTNING = Path(pl.__file__).parent
MAX_FILES = 41  # in the trainer's thread
MAX_FILES_OF_ALL_THREADS = 56  # with those of the engine, the producer and the rewards
MAX_FUNCTIONS = 216  # in the trainer's thread; the last few depend on what it finds finished
MAX_FRAMES = 3  # from the one that Lightning's `next(feed)` calls to the one that calls Admission.take


def is_function(code: CodeType) -> bool:
    return code.co_filename.startswith(str(PACKAGE)) and not code.co_name.startswith("<")


def callers(frame: FrameType) -> list[str]:
    """Names of the package's functions from the one that Lightning calls to the caller of `frame`, as file:function."""
    names: list[str] = []
    caller = frame.f_back
    while caller is not None and not caller.f_code.co_filename.startswith(str(LIGHTNING)):
        if is_function(caller.f_code):
            names.append(f"{Path(caller.f_code.co_filename).name}:{caller.f_code.co_name}")
        caller = caller.f_back
    return names[::-1]


class StepProfile(pl.Callback):
    """Records the functions of each step but the first, which also imports, and of the threads at work meanwhile."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.steps: list[set[CodeType]] = []  # in the trainer's thread
        self.others: set[CodeType] = set()
        self.ways: set[tuple[str, ...]] = set()
        self.is_recording = False

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.is_recording = trainer.global_step < trainer.max_steps
        if self.is_recording:
            self.steps.append(set())

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not self.is_recording or not is_function(frame.f_code):
            return
        if threading.current_thread() is not self.thread:
            self.others.add(frame.f_code)
            return
        self.steps[-1].add(frame.f_code)
        if frame.f_code is unwrap(Admission.take).__code__:
            self.ways.add(tuple(callers(frame)))


@pytest.fixture
def profile() -> Iterator[StepProfile]:
    """A callback that is told of all calls, also by threads that start from now on."""
    profile = StepProfile()
    before = sys.getprofile()
    before_in_threads = threading.getprofile()
    threading.setprofile(profile.note)
    sys.setprofile(profile.note)
    yield profile
    sys.setprofile(before)
    threading.setprofile(before_in_threads)


def files_of(functions: set[CodeType]) -> list[str]:
    return sorted({str(Path(code.co_filename).relative_to(PACKAGE)) for code in functions})


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_one_step_runs_through_few_files_and_functions(
    max_staleness: int, profile: StepProfile, record_property: Callable[[str, object], None]
) -> None:
    # prompts of the user's own, as in most runs: those of a shipped task would count its files
    prompts = [{"prompt": f"{number}=", "answer": str(number)} for number in range(10, 99)]
    data = make_data(prompts=prompts, max_staleness=max_staleness)
    trainer = fit(make_module(), data, max_steps=5, callbacks=[profile])
    assert trainer.global_step == 5
    assert len(profile.steps) == 4
    assert profile.ways, "Admission.take was not called in the trainer's thread"
    functions = max(profile.steps, key=len)
    files = files_of(set().union(*profile.steps))
    all_files = files_of(set().union(*profile.steps, profile.others))
    way = max(profile.ways, key=len)
    assert "admission.py" in {Path(name).name for name in files}
    assert len(way) >= 2
    numbers = {"functions": functions, "files": files, "files_of_all_threads": all_files, "frames": way}
    for name, counted in numbers.items():
        record_property(name, len(counted))
    report = (
        f"functions of a step in the trainer's thread: {len(functions)}, limit {MAX_FUNCTIONS}; "
        f"files: {len(files)}, limit {MAX_FILES}; of all threads: {len(all_files)}, limit {MAX_FILES_OF_ALL_THREADS}; "
        f"frames from the feed to Admission.take: {len(way)}, limit {MAX_FRAMES}: {' -> '.join(way)}; "
        f"in {', '.join(files)}; only in other threads: {', '.join(sorted({*all_files}.difference(files)))}"
    )
    assert len(functions) <= MAX_FUNCTIONS, report
    assert len(files) <= MAX_FILES, report
    assert len(all_files) <= MAX_FILES_OF_ALL_THREADS, report
    assert len(way) <= MAX_FRAMES, report
