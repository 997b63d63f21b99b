"""Spans: merging keeps the seconds, memory and files stay bounded, files open whatever happened to their run."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lit_async_rl.engines.vllm.requests import RequestBook
from lit_async_rl.utils import spans as module
from lit_async_rl.utils.spans import ENGINE, HEAD, TRAINER, Overlap, Spans, TraceWriter, merge_traces, read_trace

pieces = st.lists(
    st.tuples(st.sampled_from(["prefill", "decode"]), st.floats(0, 0.1), st.floats(0, 0.1), st.integers(0, 2))
)


def drawn(events, name=None):
    return [e for e in events if e["ph"] == "X" and name in (None, e["name"])]


@given(pieces)
def test_merging_keeps_seconds_tokens_and_order(parts):
    spans, now = Spans(), time.monotonic()
    lane = spans.lane(0, ENGINE, "engine", "engine", shows_idle=True)
    for name, pause, seconds, version in parts:
        now += pause
        lane.add(name, now, seconds, version, version=version, tokens=1)
        now += seconds
    events = drawn(spans.take(all_of_it=True))
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
    spans, now, steps = Spans(), time.monotonic(), 40
    trainer = spans.lane(0, TRAINER, "trainer", "trainer", merges=False)
    engine = spans.lane(0, ENGINE, "engine", "engine", shows_idle=True)
    reward = spans.lane(0, 10, "reward", "reward 0")
    for step in range(steps):
        for name in ("wait", "forward_backward", "optimizer", "publish"):
            trainer.add(name, now, 0.06, (name, step), step=step, micro_batch=0, versions=[step, step], staleness=1.0)
        for _ in range(60):
            now += 0.25 / 60
            engine.add("decode", now, 0.002, step, version=step, slots=64, tokens=64)
            engine.add("prefill", now + 0.002, 0.001, step, version=step, slots=64, tokens=64)
            reward.add("score", now, 0.002, group=step, ok=True)
    num_bytes = sum(len(json.dumps(event, separators=(",", ":"))) + 2 for event in spans.take(all_of_it=True))
    assert num_bytes / steps * 10_000 < 50e6


def test_memory_is_bounded_while_nothing_can_be_written(monkeypatch):
    monkeypatch.setattr(module, "MAX_PENDING", 50)
    spans = Spans()
    lane = spans.lane(0, 0, "trainer", "trainer", merges=False)
    for n in range(200):
        lane.add("wait", float(n), 0.5, n)
    assert len(spans.take(all_of_it=True)) == 50
    assert spans.num_lost == 151  # and the lane's name came first


def test_what_is_switched_off_is_neither_recorded_nor_idle():
    spans, now = Spans(), time.monotonic()
    lane = spans.lane(0, ENGINE, "engine", "engine", shows_idle=True)
    lane.add("decode", now, 1.0)
    spans.record(False)
    lane.add("decode", now + 2, 1.0)
    spans.record(True)
    lane.add("decode", now + 5, 1.0)
    events = drawn(spans.take(all_of_it=True))
    assert [(e["name"], e["dur"]) for e in events] == [("decode", 1_000_000)] * 2


def test_an_open_span_ends_with_the_next():
    spans = Spans()
    lane = spans.lane(0, TRAINER, "trainer", "trainer", merges=False)
    lane.begin("checkpoint", step=3)
    lane.add("wait", time.monotonic() + 2.0, 1.0)
    saved, waited = drawn(spans.take(all_of_it=True))
    assert saved["args"] == {"step": 3}
    assert saved["ts"] + saved["dur"] == pytest.approx(waited["ts"], abs=2)


def test_overlapping_work_is_counted_once():
    spans, work = Spans(), Overlap("answer")
    work.lane = spans.lane(0, ENGINE, "environment", "environments")
    began = time.monotonic()
    with work.one(turns=1), work.one(turns=1):
        time.sleep(0.05)
    total = time.monotonic() - began
    events = drawn(spans.take(all_of_it=True))
    assert 0.05 <= sum(e["dur"] for e in events) / 1e6 <= total + 0.001
    assert sum(e["args"]["turns"] for e in events) == 2


def test_the_book_of_an_engine_draws_what_it_counts_as_busy():
    spans, book = Spans(), RequestBook("it")
    book.lane = spans.lane(0, ENGINE, "engine", "engine", shows_idle=True)
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
    events = drawn(spans.take(all_of_it=True), "decode")
    assert sum(e["dur"] for e in events) / 1e6 == pytest.approx(book.busy_s, abs=1e-4)
    assert sum(e["args"]["tokens"] for e in events) == 17
    assert {e["args"]["version"] for e in events} == {0, 1}


@pytest.mark.parametrize("cut", [0, 1, 2, 40, 70, 10_000])
def test_a_file_cut_off_anywhere_is_read_and_gone_on_with(cut, tmp_path):
    spans, path = Spans(), tmp_path / "rank0.json"
    lane = spans.lane(0, 0, "trainer", "trainer", merges=False)
    lane.add("wait", time.monotonic(), 0.5, 1)
    lane.add("publish", time.monotonic() + 1, 0.5, 2, version=3)
    TraceWriter(path, spans, 60.0).close()
    whole = path.read_bytes()
    assert whole.startswith(HEAD.encode())
    path.write_bytes(whole[:cut])
    before = read_trace(path)
    lane.add("wait", time.monotonic(), 0.5, 4)
    TraceWriter(path, spans, 60.0).close()
    assert [e["name"] for e in read_trace(path)] == [*(e["name"] for e in before), "wait"]
    merge_traces([path, path], tmp_path / "both.json")
    assert len(json.loads((tmp_path / "both.json").read_text())) == 2 * (len(before) + 1)
