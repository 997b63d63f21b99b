"""Idle time that the page reads from the timeline equals that of the bottleneck verdict, of real runs."""

from __future__ import annotations

import pytest
from flow import fit, make_data, make_module

from lit_async_rl.callbacks import BottleneckVerdict, Timeline
from lit_async_rl.report.run_data import RunData
from lit_async_rl.training.trackers import CSVLog


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 3])
def test_idle_time_equals_the_verdicts(tmp_path, max_staleness):
    data = make_data(max_staleness=max_staleness, groups_per_step=4, group_size=4)
    log = CSVLog(tmp_path, "x", version="v")
    fit(make_module(), data, 40, [Timeline(flush_s=0.05), BottleneckVerdict()], logger=log)
    found = RunData(tmp_path / "x" / "v").payload()
    read, said = found["idle"], found["verdict"]
    assert read["wall_s"] == pytest.approx(said["wall_s"], rel=0.01)
    for name in ("wait_s", "sync_s", "engine_busy_s"):
        assert read[name] / said["wall_s"] == pytest.approx(said[name] / said["wall_s"], abs=0.01), name
    if max_staleness == 0:
        assert read["wait_s"] > 0.1 * read["wall_s"], "a synchronous trainer waits"
