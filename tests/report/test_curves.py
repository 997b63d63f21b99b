"""Curves of the report: read as they are written, and thinned."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from made_runs import write_metrics
from metric_page import find

import lit_async_rl.report
from lit_async_rl.report.run_data import Curves, RunData, thinned


def test_the_charts_are_of_metrics_that_exist():
    page = (Path(lit_async_rl.report.__file__).parent / "page/charts.js").read_text()
    lists = re.findall(r"names: \[([^\]]+)\]", page)
    names = [name for found in lists for name in re.findall(r'"([^"]+)"', found)]
    assert {"ratio/staleness", "drift/half_lag", "reward/mean"} <= set(names)
    assert [name for name in names if not find(name)] == []


def test_rows_are_read_once_and_only_when_they_are_complete(tmp_path):
    curves, path = Curves(tmp_path), tmp_path / "metrics.csv"
    assert not curves.refresh()
    path.write_text("epoch,a,step,val/x\n0,1.5,0,\n0,,1,0.5\n0,2.")
    assert curves.refresh()
    assert curves.payload() == {
        "axes": [[1]],
        "series": {"a": {"axis": 0, "y": [1.5]}, "val/x": {"axis": 0, "y": [0.5]}},
    }
    with path.open("a") as file:
        file.write("5,1,\n0,nan,2,\n")
    assert curves.refresh()
    assert not curves.refresh()
    assert curves.payload()["series"]["a"]["y"] == [1.5, 2.5, None]
    assert curves.values("a").tolist() == [1.5, 2.5]
    assert curves.num_steps == 3


def test_validations_are_at_the_number_of_steps_before_them(tmp_path):
    """As Lightning writes a run of four steps with a validation before, after every two, and at the end."""
    rows = ["a,step,val/x", ",0,1", "1,0,", "1,1,", ",1,2", "1,2,", "1,3,", ",3,3", ",4,4"]
    (tmp_path / "metrics.csv").write_text("\n".join(rows) + "\n")
    curves = Curves(tmp_path)
    curves.refresh()
    found = curves.payload()
    assert found["axes"][found["series"]["val/x"]["axis"]] == [0, 2, 4, 4]
    assert found["axes"][found["series"]["a"]["axis"]] == [1, 2, 3, 4]


def test_a_run_that_logs_every_other_step_does_not_pass_for_its_whole_time(tmp_path):
    for steps, label in (
        ([0, 1, 2, 3], "time in steps"),
        ([50, 51], "time in steps"),
        ([1, 3], "time in the 2 logged steps"),
    ):
        (tmp_path / "metrics.csv").write_text("perf/step_s,step\n" + "".join(f"0.5,{step}\n" for step in steps))
        summary = dict(RunData(tmp_path).payload()["summary"])
        assert summary[label] == f"{0.5 * len(steps)} s, 0.50 s a step"


def test_a_table_with_another_header_is_read_anew(tmp_path):
    curves, path = Curves(tmp_path), tmp_path / "metrics.csv"
    path.write_text("a,step\n1,0\n2,1\n")
    curves.refresh()
    (tmp_path / "new").write_text("a,b,step\n1,3,0\n")
    (tmp_path / "new").replace(path)
    assert curves.refresh()
    assert {name: series["y"] for name, series in curves.payload()["series"].items()} == {"a": [1], "b": [3]}


def test_long_curves_keep_their_peaks():
    x = np.arange(100_000.0)
    y = np.sin(x / 1000)
    y[77_777], y[5] = 9.0, -9.0
    few_x, few_y = thinned(x, y)
    assert len(few_x) <= 1502
    assert {9.0, -9.0} <= set(few_y)
    assert (np.diff(few_x) > 0).all()
    assert thinned(x[:100], y[:100])[0].tolist() == x[:100].tolist()


def test_all_steps_of_a_long_run_are_read(tmp_path):
    write_metrics(tmp_path, 3000)
    curves = Curves(tmp_path)
    curves.refresh()
    assert curves.num_steps == 3000
    assert len(curves.values("reward/mean")) == 3000
    assert all(len(axis) <= 1502 for axis in curves.payload()["axes"])
