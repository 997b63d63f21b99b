"""A training process that lives and hangs ends the run within the limit, with its rank, its phase and the setting."""

import dataclasses
import math
import threading
import time
from pathlib import Path

import pytest
from launch import finish, start

from lit_async_rl.distributed.liveness import Progress, Report, find_stalled

SCRIPT = Path(__file__).parents[1] / "helpers" / "distributed_hangs.py"
LIMIT_S = 5.0


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("strategy", "rank", "where", "phase"),
    [
        ("fsdp2", 1, "forward", "forward of micro-batch 2, step 2"),
        ("ddp", 0, "optimizer", "optimizer step 2"),
    ],
)
def test_a_rank_that_hangs_is_named_and_all_end(strategy, rank, where, phase):
    processes = start(SCRIPT, [strategy, str(rank), where, str(LIMIT_S)], 2)
    seen = next((line for line in processes[rank].stdout if "hanging now" in line), None)
    began = time.monotonic()
    outputs = finish(processes, 120)
    assert seen, outputs
    took = time.monotonic() - began
    print(f"{strategy}, rank {rank} hangs in {where}: noticed and ended after {took:.1f} s")
    assert took < LIMIT_S + 10.0
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode not in (0, -9), output
        assert "StalledError: no progress for" in output
        assert "data.limits.rollout_timeout_s=5" in output
        assert f"in the phase {phase!r}: rank {rank} (" in output
        assert "distributed_hangs.py:" in output


# -- which rank it is -------------------------------------------------------------------------------------------------


def make_report(place=5, idle_s=20.0, limit_s=15.0, is_in_torch=False, phase="forward") -> Report:
    where = "all_gather (torch/x.py:1)" if is_in_torch else "judge (mine/y.py:2)"
    return Report(
        place=place, idle_s=idle_s, limit_s=limit_s, phase=phase, where=where, is_in_torch=is_in_torch, host="here"
    )


def stalled(**reports: Report) -> str:
    return find_stalled({int(name[1:]): report for name, report in reports.items()}, "data.x_s", 15.0)


def test_the_rank_that_is_behind_hangs():
    found = stalled(r0=make_report(place=7), r1=make_report(place=6, phase="backward"), r2=make_report(place=7))
    assert found.startswith("no progress for 20 s (data.x_s=15) in the phase 'backward': rank 1 (here) in judge (mine")


def test_of_several_at_the_same_place_those_in_torch_wait():
    assert "rank 1 (here) in judge" in stalled(r0=make_report(is_in_torch=True), r1=make_report())
    both = stalled(r0=make_report(is_in_torch=True), r1=make_report(is_in_torch=True))
    assert "rank 0 (here) in all_gather (torch/x.py:1), rank 1 (here) in all_gather" in both


def test_nobody_hangs_who_shows_progress_was_stopped_or_has_a_timeout_of_its_own():
    assert not stalled(r0=make_report(), r1=make_report(idle_s=1.0)), "at the same place, stopped for a while"
    assert not stalled(r0=make_report(place=9), r1=make_report(idle_s=14.0)), "behind, but it sampled a token"
    assert not stalled(r0=make_report(limit_s=math.inf), r1=make_report(place=6)), "waits for rollouts"
    assert not stalled(r0=make_report(place=9, idle_s=0.5), r1=make_report()), "it waited for rank 0 until now"
    assert not stalled()


def test_a_longer_limit_of_a_phase_is_named():
    assert "(data.x_s=15, in this phase 18)" in stalled(r0=make_report(limit_s=18.0))


def test_seconds_without_progress_leave_out_those_in_which_the_process_stood_still(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = Progress(60.0)

    def idle_after(seconds: float) -> float:
        now[0] += seconds
        return progress.report().idle_s

    assert [idle_after(1.0), idle_after(1.0), idle_after(500.0)] == [1.0, 2.0, 5.0]
    progress.report_progress()
    assert [idle_after(1.0), idle_after(1.0)] == [0.0, 1.0]
    progress.reach("backward")
    assert idle_after(1.0) == 0.0
    assert progress.report().phase == "backward"


def test_ranks_that_counted_differently_agree_after_an_exchange():
    a, b = Progress(60.0), Progress(60.0)
    a.reach("only here")
    for progress in (a, b):
        progress.align("the exchange")
        progress.reach("forward")
    assert a.report().place == b.report().place


def test_phases_inside_of_others():
    progress, seen = Progress(60.0), []

    def weights():
        for n in range(2):
            seen.append((progress.report().phase, progress.report().limit_s))
            yield n

    progress.reach("the end of the step")
    with progress.own_limit("the engine takes the weights"):
        for _ in progress.over(weights(), "gathering the weights"):
            seen.append((progress.report().phase, progress.report().limit_s))
    assert seen == [("gathering the weights", 60.0), ("the engine takes the weights", math.inf)] * 2
    assert progress.report().phase == "the end of the step"
    assert progress.report().place == 4


def test_the_report_says_where_the_training_thread_is():
    progress, reports = Progress(60.0), []
    watch = threading.Thread(target=lambda: reports.append(progress.report()))
    watch.start()
    watch.join()
    assert "/threading.py:" in reports[0].where
    assert not reports[0].is_in_torch


def test_a_report_arrives_as_it_was_sent():
    report = make_report(limit_s=math.inf)
    assert dataclasses.asdict(Report.from_json(report.to_json().encode())) == dataclasses.asdict(report)
