"""Rollouts of the report: chosen within a budget, from samples and tape."""

from __future__ import annotations

import json

import pytest
from groups import group
from made_runs import rollout, write_held_out, write_samples

from lit_async_rl.replay.tape import TapeWriter
from lit_async_rl.report.run_data import HeldOut, RunData
from lit_async_rl.report.samples import MAX_TEXT_CHARS, Samples


def test_all_rollouts_of_a_short_run(tmp_path):
    write_samples(tmp_path, 5, 16)
    samples = Samples(tmp_path / "samples.jsonl")
    assert samples.refresh()
    assert not samples.refresh()
    groups = samples.payload()
    assert sum(len(group["rollouts"]) for group in groups) == 80
    first = groups[0]["rollouts"][0]
    assert first["tokens"] == ["word "] * 12
    assert "text" not in first, "the tokens are the text"
    assert len(first["log_ratios"]) == 12


@pytest.mark.slow
def test_a_long_run_is_sampled_from_its_first_to_its_last_step(tmp_path):
    write_samples(tmp_path, 400, 16, tokens=100)
    samples = Samples(tmp_path / "samples.jsonl")
    samples.refresh()
    size = (tmp_path / "samples.jsonl").stat().st_size
    assert size > 10 * 1_000_000
    groups = samples.payload(1_000_000)
    assert 200_000 < len(json.dumps(groups)) < 1_000_000
    steps = [group["step"] for group in groups]
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (1, 400)
    assert len(set(steps)) > 20


def test_torn_hostile_and_old_lines(tmp_path):
    path = tmp_path / "samples.jsonl"
    old = {"step": 1, "group": 0, "prompt": "p", "completion": "c" * 2 * MAX_TEXT_CHARS, "answer": None, "reward": 1.0}
    wrong = rollout(2, 1, 0, versions=[1], log_ratios="x", reward=None)
    lines = [json.dumps(old), json.dumps(wrong), "[1]", "{}", "nonsense", '{"step": 3, "group": 2, "reward": NaN}']
    path.write_text("\n".join(lines) + '\n{"step": 4, "gro')
    samples = Samples(path)
    samples.refresh()
    groups = samples.payload()
    assert [group["step"] for group in groups] == [1, 2, 3]
    assert len(groups[0]["rollouts"][0]["text"]) < MAX_TEXT_CHARS + 100
    assert "versions" not in groups[1]["rollouts"][0]
    assert json.dumps(groups, allow_nan=False)


def test_held_out_prompts_at_every_validation(tmp_path):
    write_held_out(tmp_path, (0, 25, 50))
    held_out = HeldOut(tmp_path)
    assert held_out.refresh()
    found = held_out.payload()
    assert [prompt["prompt"] for prompt in found] == ["held out 0=", "held out 1=", "held out 2="]
    assert [(s["step"], s["reward"]) for s in found[0]["samples"]] == [(0, 0.0), (25, 1.0), (50, 1.0)]


def test_rollouts_of_a_tape(tmp_path):
    writer = TapeWriter(tmp_path / "tape")
    for step in range(6):
        writer.append(step, step, [group([1.0, 0.0], index=step)])
        writer.flush()
    writer.close(1.0)
    run = RunData(tmp_path)
    groups = run.payload()["rollouts"]
    assert [group["step"] for group in groups] == [1, 2, 3, 4, 5, 6]
    assert [rollout["reward"] for rollout in groups[0]["rollouts"]] == [1.0, 0.0]
    next((tmp_path / "tape").glob("steps-000000002*")).write_bytes(b"damaged")
    damaged = RunData(tmp_path).payload()
    assert damaged["rollouts"] == []
    assert "damaged" in damaged["notes"][0]
