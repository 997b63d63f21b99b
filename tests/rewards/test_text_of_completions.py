"""Texts of completions with the special tokens that `data.scoring.special_tokens` chooses, and token ids."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
from chat_families import FAMILIES, Family, build
from tiny_models import save, tiny_llama

import lit_async_rl as rl
from lit_async_rl.data.settings import Scoring
from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.models.end_tokens import eos_token_ids, stored_eos_token_ids
from lit_async_rl.models.loading import load_policy
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.calls import score
from lit_async_rl.vllm.requests import sampling_arguments


def model(folder: Path, family: Family) -> str:
    tokenizer = build(family)
    lm = tiny_llama(vocab=len(tokenizer))
    ends = [tokenizer.convert_tokens_to_ids(token) for token in family.config or ()]
    lm.config.eos_token_id = lm.generation_config.eos_token_id = ends
    return save(lm, folder, tokenizer)


def test_a_reward_gets_token_ids_if_it_names_them() -> None:
    prompt = Prompt(text="q")
    assert score(lambda prompt, completion, token_ids: sum(token_ids), prompt, "x", token_ids=[1, 2]) == 3
    assert score(lambda prompt, completion: len(completion), prompt, "x", token_ids=[1, 2]) == 1


def test_an_isolated_reward_gets_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counting_rewards.py").write_text(
        "def count(prompt, completion, token_ids):\n    return float(len(token_ids))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = rl.IsolatedReward("counting_rewards.count", timeout_s=60.0)
    assert score(reward, Prompt(text="q"), "x", token_ids=(4, 5, 6)) == 3.0


def test_a_stop_string_ends_the_text_and_no_tag_hides_it(tmp_path: Path) -> None:
    codec = TextCodec(model(tmp_path, FAMILIES["special-think"]))

    def ids(text: str) -> list[int]:
        return codec.tokenizer(text, add_special_tokens=False)["input_ids"]

    assert codec.decode(ids("<think>a</think>4 stop"), ["stop"]) == "<think>a</think>4 "
    assert codec.decode(ids("<think>a</think>4"), [">"]) == "<think>a</think>4"  # no stop string: tags are no text
    assert codec.decode(ids("<think>ab</think>c!"), ["bc"]) == "<think>a"


def test_a_stop_token_is_an_end_and_no_tag(tmp_path: Path) -> None:
    codec = TextCodec(model(tmp_path, FAMILIES["special-think"]))
    ids = codec.tokenizer("<think>a</think>", add_special_tokens=False)["input_ids"]
    assert codec.decode(ids) == "<think>a</think>"
    assert codec.decode(ids, stop_token_ids=ids[-1:]) == "<think>a"


def test_an_unknown_choice_is_refused() -> None:
    made = object.__new__(Scoring)
    for name, value in dict(workers=1, timeout_s=1.0, tries=None, special_tokens="keep").items():
        object.__setattr__(made, name, value)
    with pytest.raises(ValueError, match=r"data.scoring.special_tokens must be tags, none or all, got 'keep'"):
        made.__post_init__()


def test_every_engine_ends_at_the_same_tokens(tmp_path: Path) -> None:
    """A base model with ChatML, whose files name `<|endoftext|>` alone: its completions ran past `<|im_end|>`."""
    folder = model(tmp_path, FAMILIES["qwen2.5-base"])
    lm, turn_end = load_policy(folder), 2
    ends = eos_token_ids(lm)
    assert set(ends) == set(stored_eos_token_ids(folder)) == {0, turn_end}
    sampling = SamplingParams(max_tokens=200)
    request = GenerationRequest(id=0, prompt_ids=(10, 11), num_samples=64, sampling=sampling)
    completions = EmbeddedEngine.from_module(lm, num_slots=64).run([request])[0]
    ended = [c for c in completions if c.finish_reason == "stop"]
    assert {c.token_ids[-1] for c in ended} == {0, turn_end}
    assert not any({0, turn_end}.intersection(c.token_ids[:-1]) for c in completions)
    arguments = sampling_arguments(request, ends)
    assert arguments["stop_token_ids"] == [0, turn_end]
    assert arguments["ignore_eos"]


def test_end_tokens_can_be_chosen(tmp_path: Path) -> None:
    lm = load_policy(model(tmp_path, FAMILIES["qwen2.5-base"]))
    sampling = SamplingParams(max_tokens=100, end_token_ids=(0,))
    request = GenerationRequest(id=0, prompt_ids=(10, 11), num_samples=64, sampling=sampling)
    completions = EmbeddedEngine.from_module(lm, num_slots=64).run([request])[0]
    assert {c.token_ids[-1] for c in completions if c.finish_reason == "stop"} == {0}
    assert any(2 in c.token_ids for c in completions)
    assert sampling_arguments(request, eos_token_ids(lm))["stop_token_ids"] == [0]


@pytest.mark.slow
def test_training_and_validation_score_the_same_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Special tags reach the reward in training and in validation, and no end token does; one line names the ends."""
    tokens = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
    family = Family(
        special=tokens,
        eos=tokens[0],
        config=tokens[:1],
        ends=(tokens[0], tokens[2]),
        template=FAMILIES["yi"].template,
    )
    texts: list[tuple[str, str, tuple[int, ...]]] = []

    def tagged(prompt: Prompt, completion: str, token_ids: tuple[int, ...]) -> float:
        texts.append((prompt.text, completion, token_ids))
        return float("think>" in completion)

    chat = [{"messages": [{"role": "user", "content": text}]} for text in "abcdefgh"]
    monkeypatch.chdir(tmp_path)
    pl.seed_everything(0, verbose=False)
    rl.fit(
        model(tmp_path / "model", family),
        chat,
        tagged,
        validation=rl.Validation(prompts=[{"prompt": "held-out"}], num_samples=16),
        max_steps=1,
        groups_per_step=2,
        group_size=32,
        sampling=SamplingParams(max_tokens=40),
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
    )
    held_out = [row for row in texts if row[0] == "held-out"]
    training = [row for row in texts if row[0] != "held-out"]
    for rows in (held_out, training):
        assert any(3 in ids and "<think>" in text for _, text, ids in rows)
        assert all(("<think>" in text) == (3 in ids) for _, text, ids in rows)
        assert not any(end in text for _, text, _ in rows for end in (tokens[0], tokens[2]))
    assert sum("completions end at each of" in record.getMessage() for record in caplog.records) == 1
