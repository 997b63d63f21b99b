"""Spans: merging keeps the seconds, memory and files stay bounded, files open whatever happened to their run."""

import json
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_async_rl.runtime import spans as module
from lit_async_rl.runtime.spans import (
    ENGINE,
    ENVIRONMENT,
    FILE_HEADER,
    TRAINER,
    Overlap,
    TraceWriter,
    merge_traces,
    read_trace,
    recorder,
    reward_lane,
    start_recording,
    stop_recording,
)
from lit_async_rl.vllm.requests import RequestBook


@pytest.fixture(autouse=True)
def _stopped():
    """Ends what a test has begun, as a run does."""
    yield
    stop_recording(recorder())


pieces = st.lists(
    st.tuples(st.sampled_from(["prefill", "decode"]), st.floats(0, 0.1), st.floats(0, 0.1), st.integers(0, 2))
)


def drawn(events, name=None):
    return [e for e in events if e["ph"] == "X" and name in (None, e["name"])]


def test_without_a_run_nothing_is_kept():
    lane = recorder().lane(ENGINE)
    lane.add("decode", time.monotonic(), 1.0)
    lane.begin("checkpoint")
    lane.instant("restart")
    assert recorder().take(include_open=True) == []
    assert not recorder().is_started


def test_a_lane_that_was_asked_for_before_the_run_is_recorded():
    lane = recorder().lane(ENGINE)
    spans = start_recording(pid=3)
    lane.add("decode", time.monotonic(), 1.0)
    events = spans.take(include_open=True)
    assert [(e["ph"], e["pid"]) for e in events] == [("M", 3), ("X", 3)]
    assert events[0]["args"] == {"name": "engine"}


def test_what_a_thread_of_an_earlier_run_adds_is_dropped():
    first = start_recording()
    late = recorder().lane(ENGINE)
    late.add("decode", time.monotonic(), 1.0)
    stop_recording(first)
    second = start_recording()
    assert second is not first
    late.add("decode", time.monotonic(), 1.0)
    recorder().lane(ENGINE).add("prefill", time.monotonic(), 1.0)
    assert [e["name"] for e in drawn(second.take(include_open=True))] == ["prefill"]
    assert [e["name"] for e in drawn(first.take(include_open=True))] == ["decode"], "the first run's own"


def test_a_run_within_a_run_has_its_own_recorder():
    outer = start_recording()
    lane = recorder().lane(ENGINE)
    inner = start_recording()
    recorder().lane(ENGINE).add("prefill", time.monotonic(), 1.0)
    stop_recording(inner)
    lane.add("decode", time.monotonic(), 1.0)
    assert [e["name"] for e in drawn(inner.take(include_open=True))] == ["prefill"]
    assert [e["name"] for e in drawn(outer.take(include_open=True))] == ["decode"]
    stop_recording(outer)


def test_threads_share_a_recorder_and_lose_nothing():
    spans, together = start_recording(), threading.Barrier(8)

    def work(number):
        together.wait(30.0)
        for n in range(200):
            recorder().lane(ENGINE).add("decode", float(n), 0.001, number, tokens=1)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        spans.lane(ENGINE).flush(0.0)  # as the thread that writes does
    events = spans.take(include_open=True)
    assert sum(e["args"]["tokens"] for e in drawn(events, "decode")) == 1600
    assert len([e for e in events if e["ph"] == "M"]) == 1


@given(pieces)
def test_merging_keeps_seconds_tokens_and_order(parts):
    spans, now = start_recording(), time.monotonic()
    lane = spans.lane(ENGINE)
    for name, pause, seconds, version in parts:
        now += pause
        lane.add(name, now, seconds, version, version=version, tokens=1)
        now += seconds
    events = drawn(spans.take(include_open=True))
    for name in ("prefill", "decode"):
        for version in range(3):
            kept = [e for e in drawn(events, name) if e["args"]["version"] == version]
            given_s = sum(s for n, _, s, v in parts if (n, v) == (name, version))
            assert sum(e["dur"] for e in kept) == pytest.approx(1e6 * given_s, abs=len(kept) + 1)
            assert sum(e["args"]["tokens"] for e in kept) == sum((n, v) == (name, version) for n, _, _, v in parts)
    ordered = sorted(events, key=lambda e: e["ts"])
    ends = [e["ts"] + e["dur"] for e in ordered]
    assert all(end <= e["ts"] + 3 for end, e in zip(ends, ordered[1:], strict=False))
    if parts:  # spans and idle time fill the lane
        assert sum(e["dur"] for e in events) == pytest.approx(ends[-1] - ordered[0]["ts"], abs=2 * len(events))


def test_ten_thousand_steps_stay_below_fifty_megabytes():
    """Of the quick start, a quarter of a second each, with an engine and a reward worker that never rest."""
    spans, now, steps = start_recording(), time.monotonic(), 40
    trainer = spans.lane(TRAINER)
    engine = spans.lane(ENGINE)
    reward = spans.lane(reward_lane(0))
    for step in range(steps):
        for name in ("wait", "forward_backward", "optimizer", "publish"):
            trainer.add(name, now, 0.06, (name, step), step=step, micro_batch=0, versions=[step, step], staleness=1.0)
        for _ in range(60):
            now += 0.25 / 60
            engine.add("decode", now, 0.002, step, version=step, slots=64, tokens=64)
            engine.add("prefill", now + 0.002, 0.001, step, version=step, slots=64, tokens=64)
            reward.add("score", now, 0.002, group=step, ok=True)
    num_bytes = sum(len(json.dumps(event, separators=(",", ":"))) + 2 for event in spans.take(include_open=True))
    assert num_bytes / steps * 10_000 < 50e6


def test_memory_is_bounded_while_nothing_can_be_written(monkeypatch):
    monkeypatch.setattr(module, "MAX_PENDING", 50)
    spans = start_recording()
    lane = spans.lane(TRAINER)
    for n in range(200):
        lane.add("wait", float(n), 0.5, n)
    assert len(spans.take(include_open=True)) == 50
    assert spans.num_lost == 151  # and the lane's name came first


def test_what_is_switched_off_is_neither_recorded_nor_idle():
    spans, now = start_recording(), time.monotonic()
    lane = spans.lane(ENGINE)
    lane.add("decode", now, 1.0)
    spans.record(False)
    lane.add("decode", now + 2, 1.0)
    spans.record(True)
    lane.add("decode", now + 5, 1.0)
    events = drawn(spans.take(include_open=True))
    assert [(e["name"], e["dur"]) for e in events] == [("decode", 1_000_000)] * 2


def test_an_open_span_ends_with_the_next():
    spans = start_recording()
    lane = spans.lane(TRAINER)
    lane.begin("checkpoint", step=3)
    lane.add("wait", time.monotonic() + 2.0, 1.0)
    saved, waited = drawn(spans.take(include_open=True))
    assert saved["args"] == {"step": 3}
    assert saved["ts"] + saved["dur"] == pytest.approx(waited["ts"], abs=2)


def test_overlapping_work_is_counted_once():
    spans = start_recording()
    work = Overlap("answer", spans.lane(ENVIRONMENT))
    began = time.monotonic()
    with work.one(turns=1), work.one(turns=1):
        time.sleep(0.05)
    total = time.monotonic() - began
    events = drawn(spans.take(include_open=True))
    assert 0.05 <= sum(e["dur"] for e in events) / 1e6 <= total + 0.001
    assert sum(e["args"]["turns"] for e in events) == 2


def test_the_book_of_an_engine_draws_what_it_counts_as_busy():
    book = RequestBook()  # before the run
    spans = start_recording()
    book.begin([1, 2])
    time.sleep(0.05)
    book.add(1, 10, [])
    book.end([1])
    time.sleep(0.05)
    book.add(2, 7, [])  # in the pause
    book.pause(0.03)
    book.version = 1
    time.sleep(0.05)
    book.end([2])
    time.sleep(0.05)
    book.begin([3])
    time.sleep(0.02)
    book.end([3])
    events = drawn(spans.take(include_open=True), "decode")
    assert sum(e["dur"] for e in events) / 1e6 == pytest.approx(book.busy_s, abs=1e-4)
    assert sum(e["args"]["tokens"] for e in events) == 17
    assert {e["args"]["version"] for e in events} == {0, 1}


@pytest.mark.parametrize("cut", [0, 1, 2, 40, 70, 10_000])
def test_a_file_cut_off_anywhere_is_read_and_gone_on_with(cut, tmp_path):
    spans = start_recording()
    path = tmp_path / "rank0.json"
    lane = spans.lane(TRAINER)
    lane.add("wait", time.monotonic(), 0.5, 1)
    lane.add("publish", time.monotonic() + 1, 0.5, 2, version=3)
    TraceWriter(path, spans, 60.0).close()
    whole = path.read_bytes()
    assert whole.startswith(FILE_HEADER.encode())
    path.write_bytes(whole[:cut])
    before = read_trace(path)
    lane.add("wait", time.monotonic(), 0.5, 4)
    TraceWriter(path, spans, 60.0).close()
    assert [e["name"] for e in read_trace(path)] == [*(e["name"] for e in before), "wait"]
    merge_traces([path, path], tmp_path / "both.json")
    assert len(json.loads((tmp_path / "both.json").read_text())) == 2 * (len(before) + 1)


def test_a_named_process_has_its_name_in_the_trace():
    spans = start_recording(pid=3)
    spans.name_process("trainer")
    (event,) = spans.take(include_open=True)
    assert (event["name"], event["pid"], event["args"]) == ("process_name", 3, {"name": "trainer"})
