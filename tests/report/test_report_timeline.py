"""The timeline of the report: idle time, windows, and files of runs that were killed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from made_runs import BEGAN, event, step_events, write_timeline

from lit_async_rl.report.trace_files import MAX_SPANS, Spans, Timeline


def spans(*pairs: tuple[float, float]) -> Spans:
    return Spans(np.array([a for a, _ in pairs]), np.array([b for _, b in pairs]))


def read(folder) -> Timeline:
    timeline = Timeline(folder)
    assert timeline.refresh()
    return timeline


def test_arithmetic_of_spans():
    overlapping = spans((5, 6), (0, 2), (1, 3), (3, 4))
    assert overlapping.union().begin.tolist() == [0, 5]
    assert overlapping.union().end.tolist() == [4, 6]
    assert overlapping.within(1.5, 5.5) == pytest.approx(0.5 + 1.5 + 1 + 0.5)
    assert overlapping.outside(spans((1, 2), (3.5, 5.25)), 0.0, 10.0) == pytest.approx(1 + 1.5 + 0.75)
    assert overlapping.outside(spans((1, 2), (3.5, 5.25)), 0.5, 3.0) == pytest.approx(0.5 + 1)
    assert spans().outside(spans((1, 2)), 0.0, 10.0) == 0
    assert spans().union().within(0.0, 1.0) == 0


def test_spans_agree_with_a_count_of_small_parts():
    rng = np.random.default_rng(0)
    begin = rng.uniform(0, 10, 40)
    found, hidden = spans(*zip(begin, begin + rng.uniform(0, 1, 40), strict=True)), spans((2, 3), (7, 7.5))
    times = (np.arange(100_000) + 0.5) / 10_000
    inside = ((found.begin <= times[:, None]) & (times[:, None] < found.end)).any(1)
    seen = inside & ~((times >= 2) & (times < 3)) & ~((times >= 7) & (times < 7.5))
    assert found.outside(hidden, 0.0, 10.0) == pytest.approx(seen.mean() * 10, abs=0.02)


@pytest.mark.parametrize(("lag", "wait", "busy"), [(2, 0.1, 0.9), (0, 0.5, 0.5)])
def test_idle_time_of_a_killed_run(tmp_path, lag, wait, busy):
    write_timeline(tmp_path, 100, lag)
    idle = read(tmp_path).idle(BEGAN, BEGAN + 100)
    validations = 4 * 0.05
    assert idle["wall_s"] == pytest.approx(100 - validations)
    assert idle["wait_s"] == pytest.approx(100 * wait)
    hidden = 0.05 * 4 if lag else 0.0  # of the engine's time, beside validations
    assert idle["engine_busy_s"] == pytest.approx(100 * busy - hidden, rel=0.01)
    assert idle["sync_s"] == pytest.approx(6)


def test_short_runs_have_all_spans_and_long_ones_windows(tmp_path):
    write_timeline(tmp_path, 20, 2)
    payload = read(tmp_path).payload()
    assert [len(window["spans"]) for window in payload["windows"]] == [payload["num_spans"]]
    assert payload["windows"][0]["steps"] == [1, 20]
    steps = [args["step"] for *_, args in payload["windows"][0]["spans"] if "step" in args]
    assert sorted(set(steps)) == list(range(1, 21)), "counted as those of the window"
    (tmp_path / "long").mkdir()
    write_timeline(tmp_path / "long", 2000, 2)
    payload = read(tmp_path / "long").payload()
    assert payload["num_spans"] > 2000 * 12 > MAX_SPANS
    assert len(payload["windows"]) == 8
    assert payload["windows"][0]["steps"][0] == 1
    assert payload["windows"][-1]["steps"][1] == 2000
    assert all(len(window["spans"]) <= MAX_SPANS for window in payload["windows"])
    shares = payload["bins"]["shares"]
    assert np.mean(shares["trainer/wait"]) == pytest.approx(0.1, abs=0.01)
    assert np.mean(shares["engine/decode"]) == pytest.approx(0.85, abs=0.01)


def test_new_events_are_added_and_hostile_lines_left_out(tmp_path):
    write_timeline(tmp_path, 2, 2)
    path = tmp_path / "timeline" / "rank0.json"
    path.write_text(path.read_text().rpartition("\n")[0] + "\n")
    timeline = read(tmp_path)
    before = len(timeline)
    with path.open("a") as file:
        file.writelines(step_events(2, 2))
        file.write('{"ph": "X"},\n[1, 2],\nnull,\n{"ph":"X","ts":"x","dur":1},\n' + "[" * 5000 + "\n")
        file.write(json.dumps({"ph": "M", "name": "thread_name", "args": {}}) + ",\n]\n")
    assert timeline.refresh()
    assert len(timeline) == before + len(step_events(2, 2))
    assert not timeline.refresh()
    (tmp_path / "empty" / "timeline").mkdir(parents=True)
    (tmp_path / "empty" / "timeline" / "rank0.json").write_text("[\n")
    assert read(tmp_path / "empty").payload() is None
    assert read(tmp_path / "empty").idle() is None


def test_idle_time_ends_where_steps_are_left_out(tmp_path):
    write_timeline(tmp_path, 10, 2)
    path = tmp_path / "timeline" / "rank0.json"
    note = {"ph": "i", "name": "recorded steps", "cat": "trainer", "ts": (BEGAN + 10) * 1e6, "args": {"every": 10}}
    path.write_text(
        f"{path.read_text().rpartition(chr(10))[0]}\n{json.dumps(note)},\n{event('trainer', 'publish', 90, 1)}"
    )
    idle = read(tmp_path).idle(BEGAN, BEGAN + 91)
    assert (idle["wall_s"], idle["wait_s"]) == (pytest.approx(10), pytest.approx(1))
