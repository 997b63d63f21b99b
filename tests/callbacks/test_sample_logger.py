"""`samples.jsonl` and `held_out.jsonl`: tokens with their values, within a bound; and verdicts as a file."""

from __future__ import annotations

import json
import math

import pytest
from flow import MODEL, fit, make_data, make_module

import lit_async_rl as rl
from lit_async_rl.callbacks import BottleneckVerdict, SampleLogger
from lit_async_rl.callbacks.run.sample_logger import thin_out
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.rewards.functions import exact_match
from lit_async_rl.tasks import SortDigits
from lit_async_rl.training.trackers import CSVLog


def rows(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_token_has_its_text_version_and_values(tmp_path):
    logger = SampleLogger(every_n_steps=1, num_groups=2)
    fit(make_module(), make_data(group_size=3), 3, [logger], logger=CSVLog(tmp_path, "x", version="v"))
    found = rows(tmp_path / "x" / "v" / "samples.jsonl")
    assert len(found) == 3 * 2 * 3
    codec = TextCodec(MODEL)
    for row in found:
        assert row["num_tokens"] == len(row["tokens"]) == len(row["versions"])
        for name in ("logprobs", "log_ratios", "advantages", "entropies"):
            assert len(row[name]) == len(row["tokens"]), name
            assert all(map(math.isfinite, row[name])), name
        assert all(entropy >= 0 for entropy in row["entropies"])
        assert (min(row["versions"]), max(row["versions"])) == (row["oldest_version"], row["newest_version"])
        assert row["policy_version"] == row["step"] - 1
        special = [token for token in row["tokens"] if token in codec.tokenizer.all_special_tokens]
        assert "".join(token for token in row["tokens"] if token not in special) == row["completion"]
    assert any(abs(ratio) > 1e-3 for row in found[-6:] for ratio in row["log_ratios"]), "stale tokens"
    groups = {(row["step"], row["group"]) for row in found}
    for step, group in groups:
        rewards = {row["reward"]: row["advantages"][0] for row in found if (row["step"], row["group"]) == (step, group)}
        assert [rewards[r] for r in sorted(rewards)] == sorted(rewards.values()), "more reward, more advantage"


@pytest.mark.slow
def test_held_out_samples_of_a_second_run_lie_in_its_own_folder(tmp_path):
    logger, held_out = SampleLogger(num_held_out=3), SortDigits(8, size=4, split="held_out")
    settings = dict(validation=rl.Validation(prompts=held_out), groups_per_step=2, group_size=2, callbacks=logger)
    settings |= dict(accelerator="cpu", devices=1, enable_progress_bar=False, sampling=rl.SamplingParams(max_tokens=9))
    for version in "ab":
        log = CSVLog(tmp_path, "x", version=version)
        rl.fit(MODEL, SortDigits(8, size=1000), exact_match, max_steps=1, logger=log, **settings)
    for version in "ab":
        steps = [row["step"] for row in rows(tmp_path / "x" / version / "held_out.jsonl")]
        assert steps == [0, 0, 0, 1, 1, 1], "before training and after the step, which is the end, too"


def test_long_completions_keep_beginning_and_end(tmp_path):
    logger = SampleLogger(every_n_steps=1, num_groups=1, max_tokens=4)
    fit(make_module(), make_data(group_size=2), 1, [logger], logger=CSVLog(tmp_path, "x", version="v"))
    for row in rows(tmp_path / "x" / "v" / "samples.jsonl"):
        if row["num_tokens"] > 4:
            assert len(row["tokens"]) == len(row["entropies"]) == len(row["versions"]) == 4
            assert row["cut"] == [3, row["num_tokens"] - 4]
            break
    else:
        pytest.fail("no completion had more than 4 tokens")


def test_the_file_stays_within_its_bound(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps({"step": step, "x": "y" * 100}) + "\n" for step in range(1, 101) for _ in "ab"))
    size = path.stat().st_size
    thin_out(path, size)
    assert path.stat().st_size == size
    thin_out(path, size // 3)
    assert path.stat().st_size <= size // 3
    steps = [row["step"] for row in rows(path)]
    assert steps[-2:] == [100, 100]
    assert set(steps) == set(range(4, 101, 4))
    path.write_text('{"step": 7, "x": "' + "y" * 100 + '"}\n')
    thin_out(path, 10)
    assert rows(path)[0]["step"] == 7, "one step is never dropped"


def test_settings_are_checked():
    for changes in ({"max_tokens": 0}, {"num_held_out": -1}, {"max_mb": 0.0}):
        with pytest.raises(ValueError, match=f"SampleLogger.{next(iter(changes))} must be"):
            SampleLogger(**changes)


def test_tokens_of_one_character_are_decoded_together():
    class Bytes:
        all_special_tokens = ()

        def decode(self, ids):
            return bytes(ids).decode(errors="replace")

        def convert_ids_to_tokens(self, number):
            return None if number == 0 else "▁x" if number == 120 else "x"

    codec = TextCodec.__new__(TextCodec)
    codec.tokenizer, codec._texts = Bytes(), {}
    text = "a€é𝄞x"
    texts = codec.token_texts(list(text.encode()))
    assert "".join(texts) == "a€é𝄞 x"
    assert texts[:5] == ["a", "", "", "€", ""]
    assert codec.token_texts([0xE2, 97]) == ["\ufffd", "a"]


@pytest.mark.slow
def test_verdicts_are_written_with_their_window(tmp_path):
    judge = BottleneckVerdict(every_n_steps=2)
    fit(make_module(), make_data(), 5, [judge], logger=CSVLog(tmp_path, "x", version="v"))
    found = rows(tmp_path / "x" / "v" / "verdicts.jsonl")
    assert [(row["step"], row["whole_run"]) for row in found] == [
        *((2, True), (2, False), (4, True), (4, False)),
        (5, True),
    ]
    for row in found:
        assert row["ended_at"] - row["began_at"] >= row["wall_s"] - 0.01
        assert 0 <= row["wait_s"] <= row["wall_s"]
    assert found[2]["began_at"] == found[0]["began_at"]
    assert found[3]["began_at"] >= found[1]["ended_at"] - 0.01
    assert "the trainer waits" in found[-1]["text"]
