"""Kernels that ignore settings of a configuration: soft caps small enough to matter, in every part that computes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from every_family import SAMPLED, UNBUILDABLE, full_logprobs, load, model_types, tiny_config
from flow import fit, make_data, make_module
from replays import own_engine, requests_of
from tiny_models import EOS, save, tiny_tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from lit_async_rl import SharedPromptPacking
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.errors import UnsupportedModelError
from lit_async_rl.models import attention
from lit_async_rl.models.attention import choose_attention, decoding_attention, eager_kernels, ignored_setting
from lit_async_rl.models.loading import load_policy
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.models.self_check import check_policy, random_tokens
from lit_async_rl.tasks import SortDigits
from lit_async_rl.training.validation import decodable

CAP = 0.05
CAPPED = ["gemma2", "vaultgemma"]


def capped(name: str, folder: Path, **changes) -> PreTrainedModel:
    return load(tiny_config(model_types()[name], attn_logit_softcapping=CAP, **changes), folder)


@pytest.fixture
def _flex_on_cpu() -> Iterator[None]:
    """FlexAttention without compilation, which takes minutes on a CPU; its forward pass is the same."""
    with torch.compiler.set_stance("force_eager"):
        yield


def batch(lm: PreTrainedModel) -> tuple[Tensor, Tensor, Tensor]:
    """Three completions of one prompt."""
    prompt = random_tokens(lm, 3)
    ids = torch.tensor([prompt + random_tokens(lm, 4, seed=n + 1) for n in range(3)])
    return ids, torch.tensor([[False] * 3 + [True] * 4] * 3), torch.zeros(3, dtype=torch.long)


def logprobs(lm: PreTrainedModel, packing: SharedPromptPacking | None = None) -> Tensor:
    ids, mask, groups = batch(lm)
    with torch.no_grad():
        return CausalPolicy(lm, packing=packing)(ids, mask, group_index=groups).logprobs[mask]


def expected_logprobs(lm: PreTrainedModel) -> Tensor:
    return torch.cat([full_logprobs(lm, row.tolist())[2:] for row in batch(lm)[0]])


def by_hand(lm: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits of Gemma 2 with its soft cap computed here, by replacing the product of one attention at a time."""
    cap = lm.config.attn_logit_softcapping

    def forward(module, query, key, value, mask, scaling, softcap=None, **rest):
        repeats = module.num_key_value_groups
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        scores = torch.tanh(torch.einsum("bhqd,bhkd->bhqk", query, key) * scaling / cap) * cap
        length = scores.shape[-1]
        allowed = torch.ones(length, length, dtype=torch.bool).tril()
        weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
        return torch.einsum("bhqk,bhkd->bqhd", weights, value), weights

    module = sys.modules[type(lm).__module__]
    original, module.eager_attention_forward = module.eager_attention_forward, forward
    try:
        with torch.no_grad():
            return lm(input_ids=ids, use_cache=False).logits
    finally:
        module.eager_attention_forward = original


@pytest.mark.slow
@pytest.mark.usefixtures("_flex_on_cpu")
@pytest.mark.parametrize("name", CAPPED)
def test_a_soft_cap_is_in_what_trainer_packing_and_engine_compute(name, tmp_path):
    lm = capped(name, tmp_path)
    assert lm.config._attn_implementation == "eager"
    ids = batch(lm)[0]
    own = by_hand(lm, ids).log_softmax(-1)[:, 2:-1].gather(-1, ids[:, 3:, None])[..., 0].flatten()
    expected = expected_logprobs(lm)
    torch.testing.assert_close(expected, own, atol=1e-5, rtol=0)
    lm.set_attn_implementation("sdpa")
    assert (logprobs(lm) - expected).abs().max() > 0.05, "the cap is small enough to be missed"
    lm.set_attn_implementation("eager")
    for packing in (None, SharedPromptPacking()):
        torch.testing.assert_close(logprobs(lm, packing), expected, atol=1e-5, rtol=0)
    lm.set_attn_implementation("flex_attention")
    torch.testing.assert_close(logprobs(lm, SharedPromptPacking()), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(expected_logprobs(lm), expected, atol=0, rtol=0)
    lm.set_attn_implementation("eager")
    loaded = own_engine(lm, tmp_path / "engine", num_slots=2)
    for engine in (loaded, EmbeddedEngine.from_module(lm, num_slots=2)):
        for request, completions in zip(
            requests := requests_of([3, 2], max_tokens=5), engine.run(requests), strict=True
        ):
            for completion in completions:
                whole = full_logprobs(lm, request.prompt_ids + completion.token_ids)[len(request.prompt_ids) - 1 :]
                torch.testing.assert_close(torch.tensor(completion.logprobs), whole, atol=1e-5, rtol=0)


def test_the_self_check_sees_what_both_sides_ignore(tmp_path):
    lm = capped("gemma2", tmp_path)
    check_policy(CausalPolicy(lm, packing=SharedPromptPacking()), 1e-4)
    lm.set_attn_implementation("sdpa")
    with pytest.raises(UnsupportedModelError, match=r"model type 'gemma2'.*padded rows differ from those of a plain"):
        check_policy(CausalPolicy(lm), 1e-4)
    with pytest.raises(
        ValueError, match=r"model type 'gemma2'.*'sdpa' ignores the setting attn_logit_softcapping=0.05"
    ):
        EmbeddedEngine.from_module(lm, self_check=False)


@pytest.mark.slow
@pytest.mark.usefixtures("_flex_on_cpu")
def test_doges_flex_attention_which_drops_its_dynamic_mask_is_refused(tmp_path):
    lm = load(tiny_config(model_types()["doge"]), tmp_path)
    check_policy(CausalPolicy(lm), 1e-4)
    lm.set_attn_implementation("flex_attention")
    with pytest.raises(UnsupportedModelError, match=r"model type 'doge'.*differ from those of a plain"):
        check_policy(CausalPolicy(lm), 1e-4)


def test_a_kernel_that_was_named_is_refused_and_others_are_kept(tmp_path, caplog):
    capped("gemma2", tmp_path)
    with pytest.raises(ValueError, match=r"model\.attn_implementation='sdpa' ignores attn_logit_softcapping=0\.05 of"):
        load_policy(str(tmp_path), attn_implementation="sdpa", random_init=True)
    for named in ("eager", "flex_attention"):
        lm = load_policy(str(tmp_path), attn_implementation=named, random_init=True)
        assert lm.config._attn_implementation == named
    plain = tmp_path / "plain"
    lm = load(tiny_config(model_types()["gemma2"], attn_logit_softcapping=None), plain)
    assert lm.config._attn_implementation == "sdpa"
    assert load_policy(str(plain), attn_implementation="sdpa", random_init=True).config._attn_implementation == "sdpa"
    attention._announce_eager.cache_clear()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "lit_async_rl"):
        for _ in range(3):
            load_policy(str(tmp_path), device="meta")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "because the default implementation sdpa ignores the model's attn_logit_softcapping" in said[0]


def test_validation_decodes_with_a_kernel_that_honours_the_configuration(tmp_path):
    for changes, expected in ((dict(attn_logit_softcapping=CAP), "eager"), (dict(attn_logit_softcapping=None), "sdpa")):
        lm = load(tiny_config(model_types()["gemma2"], **changes), tmp_path / expected)
        assert decoding_attention(lm) == expected
        lm.set_attn_implementation("flex_attention")
        with decodable(lm):
            assert lm.config._attn_implementation == expected
        assert lm.config._attn_implementation == "flex_attention"
    sinks = load(tiny_config(model_types()["gpt_oss"]), tmp_path / "sinks")
    assert decoding_attention(sinks) == "eager"


def test_the_reference_kernels_are_those_of_before_afterwards(tmp_path):
    for name in ("qwen3_moe", "llama4"):
        lm = load(tiny_config(model_types()[name]), tmp_path / name)
        parts = [part for part in lm.modules() if isinstance(part, PreTrainedModel)]
        before = [(p.config._attn_implementation, p.config._experts_implementation) for p in parts]
        with eager_kernels(lm):
            kernels = {(p.config._attn_implementation, p.config._experts_implementation) for p in parts}
            assert kernels == {("eager", "eager")}
        assert [(p.config._attn_implementation, p.config._experts_implementation) for p in parts] == before


class LogRatios(pl.Callback):
    def __init__(self) -> None:
        self.largest: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        ratio = pl_module.stabilizer_signals["log_ratio"][batch.loss_mask & (batch.versions == pl_module.version - 1)]
        self.largest.append(float(ratio.abs().max()) if ratio.numel() else 0.0)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_run_of_a_capped_model_trains_and_validates(precision, tmp_path):
    """Under autocast, too, where the self-check's reference stays in float32."""
    lm = capped("gemma2", tmp_path, vocab_size=64, eos_token_id=EOS, sliding_window=64)
    model = save(lm, tmp_path, tiny_tokenizer(64))
    ratios = LogRatios()
    data = make_data(model=model, max_staleness=0, val_prompts=SortDigits(4, size=2, split="held_out"))
    trainer = fit(make_module(model=model), data, 1, [ratios], val_check_interval=1, precision=precision)
    assert trainer.lightning_module.policy.causal_lm.config._attn_implementation == "eager"
    assert "val/reward" in trainer.callback_metrics
    assert ratios.largest[0] < (1e-4 if precision == "32-true" else 0.3)


@pytest.mark.parametrize(
    ("names", "least"),
    [
        pytest.param(SAMPLED, 60, marks=pytest.mark.slow, id="sampled"),
        pytest.param(model_types().keys() - SAMPLED, 120, marks=pytest.mark.sweep, id="others"),
    ],
)
def test_of_all_families_the_default_kernel_honours_what_eager_attention_does(names, least, tmp_path):
    """With every number and switch of attention in the configuration exaggerated, one at a time."""
    num_compared = 0
    for name in sorted(names - UNBUILDABLE.keys()):
        kind = model_types()[name]
        for change in exaggerations(kind):
            config = tiny_config(kind)
            text = config.get_text_config()
            for setting, value in change.items():
                setattr(text, setting, value)
            try:
                lm = load(config, tmp_path / "model")
                ids = torch.tensor([random_tokens(lm, 7)])
                with torch.no_grad():
                    found = lm(input_ids=ids, use_cache=False).logits.log_softmax(-1)
            except (ValueError, RuntimeError, NotImplementedError, KeyError):  # it cannot be built so
                continue
            with torch.no_grad(), eager_kernels(lm):
                expected = lm(input_ids=ids, use_cache=False).logits.log_softmax(-1)
            assert not (found - expected).abs().max() > 1e-4, f"{name} with {change}: {lm.config._attn_implementation}"
            num_compared += lm.config._attn_implementation != "eager"
    assert num_compared > least


def exaggerations(kind) -> Iterator[dict[str, float | bool]]:
    yield {}
    words = ("cap", "attn_", "attention_", "qk_", "clip", "sink", "alibi", "temperature")
    for setting, value in vars(tiny_config(kind).get_text_config()).items():
        if setting.startswith("_") or "drop" in setting or not any(word in setting for word in words):
            continue
        if isinstance(value, bool):
            yield {setting: not value}
        elif isinstance(value, float) or (value is None and ("cap" in setting or "clip" in setting)):
            yield {setting: 0.1}


def test_what_is_not_ignored_is_not_named(tmp_path):
    lm = load(tiny_config(model_types()["llama"]), tmp_path)
    assert ignored_setting(lm) == ""
    choose_attention(lm, "sdpa")
    choose_attention(lm, None)
    assert lm.config._attn_implementation == "sdpa"
