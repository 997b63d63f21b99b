"""The files that one optimizer step runs through: a reader has to follow the same way.

Noted between the ends of two batches, with no callback but the one that publishes weights. A file that is not named
here joins the path of every step: name it if it has to, or leave it out of the path.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
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
TRAINERS_THREAD = """
    advantages: group
    callbacks: parts
    callbacks/run: weight_sync
    corrections: weights
    data: collate engine_restarts module rollout_source
    distributed: liveness ranks scatter
    engines: base completion_check
    .: importance problem types
    losses: aggregation base clipped
    models: architecture policy routers tokenizer weights
    prompts: curriculum records sources stream
    rollouts: engine_listener group_book group_wait intake producer request_owners totals
    scheduling: admission
    stabilizers: step_lr
    training: module objective optimizer token_stats whole_steps
    runtime: guarded_calls spans waiting
    utils: checks logged_rows plain
"""
OTHER_THREADS = """
    engines/embedded: cuda_stream engine forward kv_cache queue sampling settings slots
    rewards: calls forms functions references scorer success
    runtime: retries
    utils: device_memory
"""  # of the engine, the producer and the rewards
MAX_FRAMES = 3  # from the one that Lightning's `next(feed)` calls to the one that calls Admission.take


def named(files: str) -> set[str]:
    """Paths from lines of `folder: file file`."""
    rows = (line.strip().split(": ") for line in files.strip().splitlines())
    return {f"{folder}/{name}.py".removeprefix("./") for folder, names in rows for name in names.split()}


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


def files_of(functions: set[CodeType]) -> set[str]:
    return {str(Path(code.co_filename).relative_to(PACKAGE)) for code in functions}


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_one_step_runs_through_the_files_that_are_named(max_staleness: int, profile: StepProfile) -> None:
    # prompts of the user's own, as in most runs: those of a shipped task would add its files
    prompts = [{"prompt": f"{number}=", "answer": str(number)} for number in range(10, 99)]
    data = make_data(prompts=prompts, max_staleness=max_staleness)
    trainer = fit(make_module(), data, max_steps=5, callbacks=[profile])
    assert trainer.global_step == 5
    assert len(profile.steps) == 4
    assert profile.ways, "Admission.take was not called in the trainer's thread"
    files = files_of(set().union(*profile.steps))
    all_files = files_of({*profile.others}.union(*profile.steps))
    way = max(profile.ways, key=len)
    assert {"scheduling/admission.py", "training/objective.py", "callbacks/run/weight_sync.py"} <= files
    assert sorted(files - named(TRAINERS_THREAD)) == []
    assert sorted(all_files - named(TRAINERS_THREAD) - named(OTHER_THREADS)) == []
    assert 2 <= len(way) <= MAX_FRAMES, " -> ".join(way)
