"""The verdict names the side that is the limit: on worked numbers, on random ones, and in real runs."""

import json
import time

import lightning.pytorch as pl
import pytest
from flow import fit, make_data, make_module
from hypothesis import given
from hypothesis import strategies as st

from lit_async_rl.callbacks import BottleneckVerdict, RunSummary
from lit_async_rl.callbacks.monitors import bottleneck_verdict
from lit_async_rl.report.run_data import RunData
from lit_async_rl.scheduling.bottleneck import MIN_SHARE, Intervals, Setting, Settings, diagnose
from lit_async_rl.simulation.engine import SimulatedEngine
from lit_async_rl.simulation.latency import Constant
from lit_async_rl.training.trackers import CSVLog


def intervals(wall=10.0, wait=0.0, sync=0.0, busy=0.0, scoring=0.0, held=0.0):
    seconds = dict(wall_s=wall, wait_s=wait, sync_s=sync, engine_busy_s=busy, scoring_s=scoring, held_s=held)
    return Intervals(**{name: float(value) for name, value in seconds.items()})


@pytest.mark.parametrize(
    ("measured", "side", "won_s", "efficiency"),
    [
        (intervals(wait=5, busy=5), "staleness bound", 5.0, 0.0),  # one after the other
        (intervals(wait=4.1, busy=10), "engine", 4.1, 1.0),
        (intervals(wait=0, busy=4), "trainer", 6.0, 1.0),
        (intervals(wait=2, busy=7), "staleness bound", 2.0, 5 / 7),
        (intervals(wait=6, busy=3, scoring=9.8), "reward", 6.0, -1.0),
        (intervals(wait=0, busy=4, sync=3), "weight sync", 3.0, 1.0),
        (intervals(wait=0.1, busy=9.9), "both sides", 0.0, 9.8 / 9.9),
        (intervals(wait=6, busy=3, sync=1.5, held=5), "slowest replica", 5.0, -1.0),
    ],
)
def test_the_limit_is_named(measured, side, won_s, efficiency):
    verdict = diagnose(measured, Settings())
    assert verdict.side == side
    assert verdict.won_s == pytest.approx(won_s)
    assert measured.overlap_efficiency == pytest.approx(efficiency)
    said = {"staleness bound": "they wait for each other, up to"}
    said["both sides"] = "less than 10% to gain without faster hardware or less work"
    assert said.get(side, f"the {side} is the bottleneck, up to") in str(verdict)


def test_the_words_say_shares_time_and_setting():
    setting = Setting(name="data.engine.num_slots", present=32, suggested=64)
    assert str(diagnose(intervals(wait=4.1, busy=10, sync=0.2), Settings(engine=setting))) == (
        "the trainer waits 41% of the time, the engine is busy 100%, publishing takes 2%: "
        "the engine is the bottleneck, up to 4.1 s of 10 s (41%) to gain; change data.engine.num_slots from 32 to 64"
    )


@given(*[st.floats(0, 1)] * 4)
def test_what_is_won_is_never_more_than_perfect_overlap_or_the_waiting_could_give(wait, sync, busy, scoring):
    measured = intervals(1.0, wait, (1 - wait) * sync, busy, scoring)
    verdict = diagnose(measured, Settings())
    assert 0 <= verdict.won_s <= 1
    assert verdict.side == "both sides" or verdict.won_s > MIN_SHARE / 2
    if verdict.side in ("engine", "reward"):
        assert verdict.won_s == wait
    if verdict.side == "staleness bound":
        assert verdict.won_s == pytest.approx(1 - max(busy, 1 - wait, scoring))


def slow_reward(prompt, completion):
    time.sleep(0.05)
    return float(len(completion) % 2)


class SlowTrainer(pl.Callback):
    """Makes the trainer the limit on any machine."""

    def __init__(self, seconds=0.1):
        self.seconds = seconds

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        time.sleep(self.seconds)


@pytest.fixture
def soon(monkeypatch):
    """Verdicts of runs that would be too short for one."""
    monkeypatch.setattr(bottleneck_verdict, "MIN_STEPS_FOR_VERDICT", 0)


@pytest.mark.slow
@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    ("latency_s", "changes", "side", "setting"),
    [
        (0.8, {"max_staleness": 4}, "engine", "data.engine"),
        (0.001, {"max_staleness": 4}, "trainer", "data.micro_batches_per_step from 2 to 1"),
        (0.3, {"max_staleness": 0}, "staleness bound", "data.max_staleness from 0 to 1"),
        (0.001, {"reward": slow_reward}, "reward", "data.scoring.workers from 1 to 2"),
    ],
)
def test_real_runs_get_the_verdict_that_was_built_into_them(latency_s, changes, side, setting, capsys):
    for seconds in (0.1, 0.3, 0.9):  # other programs may slow down the other sides of a run
        engine = SimulatedEngine(Constant(latency_s), num_slots=16)
        data = make_data(engine=engine, micro_batches_per_step=2, **changes)
        judge = BottleneckVerdict(every_n_steps=2)
        slow = [SlowTrainer(seconds)] if side == "trainer" else []
        trainer = fit(make_module(), data, max_steps=4, callbacks=[judge, *slow])
        printed = capsys.readouterr().out
        if judge.verdict.side == side:
            break
    assert judge.verdict.side == side, judge.verdict
    lines = [line for line in printed.splitlines() if "the trainer waits" in line]
    assert [line.split(":")[0] for line in lines] == ["step 2", "step 4", "whole run"]
    assert setting in lines[-1] or judge.verdict.setting is None
    assert trainer.callback_metrics["perf/trainer_share"] <= 1.001


@pytest.mark.usefixtures("soon")
def test_finished_rollouts_that_pile_up_mean_that_the_bound_can_be_lower(capsys):
    for seconds in (0.1, 0.3, 0.9):
        data = make_data(engine=SimulatedEngine(Constant(0.001), num_slots=16), max_staleness=6)
        judge = BottleneckVerdict(every_n_steps=4)
        fit(make_module(), data, max_steps=4, callbacks=[judge, SlowTrainer(seconds)])
        if judge.verdict.fresher is not None:
            break
    assert judge.verdict.fresher is not None
    assert judge.verdict.fresher.suggested < 6


@pytest.mark.slow
def test_no_side_is_named_before_twenty_steps_after_the_first(capsys, tmp_path):
    """Time shares are printed and written all the while."""
    for steps in (1, 20, 21):
        summary = RunSummary()
        judge = BottleneckVerdict(every_n_steps=5)
        data = make_data(engine=SimulatedEngine(Constant(0.001), num_slots=16), groups_per_step=1, max_staleness=6)
        trainer = fit(make_module(), data, steps, [judge, summary], logger=CSVLog(tmp_path, "x", version=f"{steps}"))
        lines = [line for line in capsys.readouterr().out.splitlines() if "the trainer waits" in line]
        assert len(lines) == steps // 5 + 1
        rows = (tmp_path / "x" / f"{steps}" / "verdicts.jsonl").read_text().splitlines()
        for text in [*lines[: 20 // 5 + (steps < 21)], *(json.loads(row)["text"] for row in rows[: 2 * (20 // 5)])]:
            for word in ("bottleneck", "to gain", "change", "worth"):
                assert word not in text, text
        table = dict(zip(*(column.cells for column in summary.table(trainer).columns), strict=True))
        is_early = steps < 21
        assert (judge.verdict is None) == judge.is_early == is_early
        assert lines[-1].endswith("too few steps for a verdict") == is_early
        assert (table["bottleneck"] == "not named: too few steps") == is_early
        (tmp_path / "x" / f"{steps}" / "config.yaml").touch()
        reported = dict(RunData(tmp_path / "x" / f"{steps}").payload()["summary"])
        assert reported["tokens generated"] == table["tokens generated"]
