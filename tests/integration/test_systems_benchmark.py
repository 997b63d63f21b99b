"""The table of systems: accuracy at equal tokens and in equal time, from logs as Lightning writes them."""

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "performance"


@pytest.fixture
def systems(monkeypatch):
    monkeypatch.chdir(BENCHMARKS.parents[1])
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("systems")


def write(run, accuracy, step_s, tokens_per_s):
    """A log of `num_steps` steps with a validation before, in the middle and after, numbered as Lightning does."""
    columns = ["step", "val/pass@1", "perf/step_s", "perf/tokens_per_s", "sample/staleness_mean"]
    columns += ["sample/staleness_max", "perf/engine_idle_share", "perf/trainer_wait_share"]
    lines = [",".join(columns), f"0,{accuracy[0]}" + "," * 6]
    half = run.num_steps // 2
    for step in range(run.num_steps):
        lines.append(f"{step},,{step_s},{tokens_per_s},1.5,3,0.25,0.5")
        if step == half - 1:
            lines.append(f"{step},{accuracy[1]}" + "," * 6)
    lines.append(f"{run.num_steps - 1},{accuracy[2]}" + "," * 6)
    lines.append(f"{run.num_steps},{accuracy[2]}" + "," * 6)
    run.folder.mkdir(parents=True)
    (run.folder / "metrics.csv").write_text("\n".join(lines))
    (run.folder / "finished.json").write_text(json.dumps({"num_steps": run.num_steps}))


def test_accuracy_is_that_after_so_many_steps(systems, tmp_path):
    run = systems.Run(tmp_path, "roll", 0, 20, 10)
    write(run, (0.2, 0.6, 0.8), 0.5, 100)
    assert [run.accuracy_at(n) for n in (0, 5, 10, 15, 20)] == pytest.approx([0.2, 0.4, 0.6, 0.7, 0.8])
    assert run.steps_for(250) == pytest.approx(5)


def test_equal_tokens_and_equal_time_differ_where_the_pace_does(systems, tmp_path):
    """A system twice as slow has half of its steps when the fast one has finished."""
    paces, runs = {}, {}
    for name, step_s in (("roll", 0.5), ("areal", 1.0)):
        runs[name] = [systems.Run(tmp_path, name, 0, 20, 10)]
        paces[name] = systems.Run(tmp_path, name, None, 20, 20)
        write(runs[name][0], (0.2, 0.6, 0.8), step_s, 100 / step_s)
        write(paces[name], (0.2, 0.6, 0.8), step_s, 100 / step_s)
    rows = systems.table(paces, runs).splitlines()
    assert rows[0].split(" | ")[2:5] == ["20 steps", "2 k tokens", "10 s"]
    all_of_it, half = "0.800 (0.800 to 0.800)", "0.600 (0.600 to 0.600)"
    assert rows[2] == f"| roll | 1 | {all_of_it} | {all_of_it} | {all_of_it} | 0.50 | 1.5, 3 | 25% | 50% |"
    assert rows[3].startswith(f"| areal | 1 | {all_of_it} | {all_of_it} | {half} | 1.00 |")


def test_age_counts_the_steps_since_weights_were_published(systems, tmp_path):
    """OAPL publishes every eight steps: the data of its versions 1.5 and 3 behind are up to 7 steps older than that."""
    run = systems.Run(tmp_path, "oapl", 0, 16, 8)
    write(run, (0.2, 0.6, 0.8), 0.5, 100)
    assert run.age() == pytest.approx((1.5 * 8 + 3.5, 3 * 8 + 7))


def test_a_system_without_a_finished_run_is_left_out(systems, tmp_path):
    run, pace = systems.Run(tmp_path, "roll", 0, 20, 10), systems.Run(tmp_path, "roll", None, 20, 20)
    write(run, (0.2, 0.6, 0.8), 0.5, 100)
    assert "no system" in systems.table({"roll": pace}, {"roll": [run]})
