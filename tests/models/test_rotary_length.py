"""Rotary embeddings that change with the longest row: right up to where they change, refused beyond."""

import pytest
import torch
from every_family import full_logprobs, load, random_tokens
from flow import fit, make_data, make_module
from replays import assert_exact, own_engine, requests_of
from tiny_models import EOS, save, tiny_tokenizer
from transformers import LlamaConfig, Phi3Config

from lit_async_rl import SharedPromptPacking
from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.models.architecture import context_length, rotary_length
from lit_async_rl.models.policy import CausalPolicy

LIMIT = 16
SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, bos_token_id=0, eos_token_id=EOS, pad_token_id=0)


def phi3_config(**changes) -> Phi3Config:
    """As Phi-4-mini: other frequencies from `LIMIT` tokens on."""
    rope = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4, long_factor=[4.0] * 4)
    sizes = dict(max_position_embeddings=64, original_max_position_embeddings=LIMIT, sliding_window=None)
    return Phi3Config(**(SIZES | sizes | changes), rope_parameters=rope | dict(original_max_position_embeddings=LIMIT))


def dynamic_config() -> LlamaConfig:
    rope = dict(rope_type="dynamic", rope_theta=1e4, factor=4.0)
    return LlamaConfig(**SIZES, max_position_embeddings=LIMIT, rope_parameters=rope)


@pytest.fixture(params=[phi3_config, dynamic_config])
def lm(request, tmp_path):
    return load(request.param(), tmp_path / "loaded")


def test_transformers_computes_short_rows_differently_beside_a_long_one(lm):
    """The reason for all of this; once it is no longer so, the limit may go."""
    short, long = random_tokens(lm, LIMIT // 2), random_tokens(lm, 2 * LIMIT, seed=1)
    padded = short + [0] * (len(long) - len(short))
    with torch.no_grad():
        both = lm(torch.tensor([padded, long])).logits[0, : len(short)].log_softmax(-1)
        alone = lm(torch.tensor([short])).logits[0].log_softmax(-1)
    assert (both - alone).abs().max() > 0.01


def test_the_context_ends_where_frequencies_change(lm):
    assert rotary_length(lm.config) == context_length(lm) == LIMIT


def test_other_rotary_embeddings_have_no_such_end():
    for rope in ({}, dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0))):
        config = LlamaConfig(**SIZES, max_position_embeddings=64, **rope)
        assert rotary_length(config) is None


@pytest.mark.parametrize("packing", [None, SharedPromptPacking()])
def test_the_trainer_is_right_up_to_the_limit_and_refuses_longer_rows(lm, packing):
    policy = CausalPolicy(lm, packing=packing)
    prompt = random_tokens(lm, 4)
    rows = [prompt + random_tokens(lm, n, seed=n) for n in (3, LIMIT - 4)]
    ids = torch.tensor([row + [0] * (LIMIT - len(row)) for row in rows])
    places = torch.arange(LIMIT)
    mask = torch.stack([(places >= 4) & (places < len(row)) for row in rows])
    found = policy(ids, mask, group_index=torch.zeros(2, dtype=torch.long)).logprobs
    for row, part, values in zip(rows, mask, found, strict=True):
        torch.testing.assert_close(values[part], full_logprobs(lm, row)[3:], atol=1e-5, rtol=0)
    longer = torch.nn.functional.pad(ids, (0, 1), value=5)
    with pytest.raises(
        ValueError, match=rf"have {LIMIT + 1} tokens. With more than {LIMIT} tokens, the model's rotary"
    ):
        policy(longer, torch.nn.functional.pad(mask, (0, 1), value=True), group_index=torch.zeros(2, dtype=torch.long))


def test_the_engine_is_right_up_to_the_limit_and_refuses_longer_requests(lm, tmp_path):
    engine = own_engine(lm, tmp_path, num_slots=3)
    requests = requests_of([1, 4, 6], max_tokens=LIMIT - 6)
    assert_exact(lm, requests, engine.run(requests))
    with pytest.raises(ValueError, match=f"max_model_len={LIMIT}"):
        engine.submit(requests_of([6], max_tokens=LIMIT - 5))


def test_a_run_with_longer_completions_ends_at_set_up(tmp_path):
    model = save(load(phi3_config(), tmp_path), tmp_path, tiny_tokenizer(64))
    with pytest.raises(ValueError, match=f"{LIMIT}"):
        fit(make_module(model=model), make_data(model=model, sampling=SamplingParams(max_tokens=LIMIT)), 1)
