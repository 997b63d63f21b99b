"""Weights that the embedded engine keeps as oneDNN reads them: the same numbers, in one copy."""

import pytest
import torch
import torch.nn.functional as F
from replays import assert_exact, collect, full_logprobs, own_engine, replayed_logprobs, requests_of
from tiny_models import ALL, tiny_llama
from torch import nn

from lit_async_rl.engines.embedded import packed_linear
from lit_async_rl.engines.embedded.packed_linear import PackedLinear, in_modules
from lit_async_rl.errors import UnsupportedModelError
from lit_async_rl.models.lora import LoRA, add_lora
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.models.weights import UNCHANGED, stream_weights
from lit_async_rl.rollouts.engine_listener import EngineCalls

FAMILIES = ["llama", "llama-tied", "qwen2", "qwen3-tied"]


@pytest.fixture(autouse=True)
def pack_small_ones(monkeypatch):
    monkeypatch.setattr(packed_linear, "MIN_ELEMENTS", 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_products_are_those_of_torch(dtype, bias):
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor has no products in bfloat16, and the engine packs no such weights here")
    torch.manual_seed(0)
    linear = nn.Linear(96, 80, bias=bias, dtype=dtype)
    layer, weight = PackedLinear(linear), linear.weight.clone()
    memory = weight.clone()  # reused by its owner: nothing may be read from it later
    layer.write(memory)
    memory.zero_()
    bound = 1e-5 if dtype == torch.float32 else 0.02
    for shape in ((1, 1), (3, 1), (64, 1), (2, 300)):
        x, other = torch.randn(*shape, 96, dtype=dtype), torch.randn(*shape, 80, dtype=dtype)
        expected = F.linear(x, weight, linear.bias)
        for found, value in (
            (layer(x), expected),
            (layer(x, "swish"), F.silu(expected)),
            (layer.combine(x, "add", other), expected + other),
            (layer.combine(x, "mul", other), expected * other),
        ):
            torch.testing.assert_close(found, value, atol=bound, rtol=bound)
    assert linear.weight.untyped_storage().nbytes() == dtype.itemsize
    assert linear.weight.isnan().all(), "whoever reads the parameter must notice"
    assert torch.equal(layer.dense(), weight)
    x = torch.randn(3, 96, dtype=dtype)
    with in_modules([layer]):
        assert torch.equal(linear(x), F.linear(x, weight, linear.bias))
    with layer.in_module(unpacked=False):
        torch.testing.assert_close(linear(x), F.linear(x, weight, linear.bias), atol=bound, rtol=bound)
    assert linear(x).isnan().all()


@pytest.mark.parametrize("family", FAMILIES)
def test_updates_in_flight_with_unchanged_weights(family, tmp_path):
    lms = [ALL[family](seed=seed) for seed in range(3)]
    engine = own_engine(lms[0], tmp_path, num_slots=6)
    assert engine.engine.slots.packed
    requests = requests_of([4, 11, 1], max_tokens=30, num_samples=3)
    engine.submit(requests)
    found = []
    for version in (1, 2):
        for _ in range(7):
            found += engine.poll(0.0)
        kept = "k_proj" if version == 2 else "none"
        update = ((n, UNCHANGED if kept in n and "weight" in n else w) for n, w in lms[version].named_parameters())
        engine.load_weights(version, update)
    with torch.no_grad():
        for name, weight in lms[2].named_parameters():
            if "k_proj.weight" in name:
                weight.copy_(lms[1].get_parameter(name))
    found += collect(engine, 9 - len(found))
    assert any(set(c.versions) == {0, 1, 2} for c in found)
    for c in found:
        expected = replayed_logprobs(lms, requests[c.request_id].prompt_ids, c)
        torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_near_to_float32_as_transformers(family, tmp_path):
    lm = ALL[family](seed=0)
    engine = own_engine(lm, tmp_path, dtype="bfloat16")
    requests = requests_of([5, 9], max_tokens=30, num_samples=4)
    half = ALL[family](seed=0).bfloat16()
    errors, theirs = [], []
    for request, completions in zip(requests, engine.run(requests), strict=True):
        for c in completions:
            exact = full_logprobs(lm, request.prompt_ids, c.token_ids)
            errors.append(torch.tensor(c.logprobs) - exact)
            theirs.append(full_logprobs(half, request.prompt_ids, c.token_ids) - exact)
    assert torch.cat(errors).square().mean() <= 1.5 * torch.cat(theirs).square().mean()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_adapters_are_those_of_the_trainer_bit_for_bit(dtype, tmp_path):
    lm = tiny_llama(seed=0)
    engine = own_engine(lm, tmp_path, dtype=dtype)
    policy = CausalPolicy(add_lora(lm, LoRA(rank=2, target_modules="all-linear")))
    calls, known = EngineCalls(engine, 60.0), dict[str, int]()
    for version in (1, 2):
        with torch.no_grad():
            for parameter in policy.parameters():
                if parameter.requires_grad:
                    parameter += 0.1
        calls.load_weights(version, stream_weights(policy, adapters=True, known=known))
    engine.poll(0.0)
    merged = dict(stream_weights(policy))
    layers = engine.engine.slots.packed
    for name, weight in engine.engine.slots.lm.named_parameters():
        weight = layers[name].dense() if name in layers else weight
        assert torch.equal(weight, merged[name].to(weight.dtype)), name


@pytest.mark.slow
@pytest.mark.parametrize("own_process", [False, True])
def test_there_is_one_copy_and_the_self_check_leaves_it_packed(own_process, tmp_path, monkeypatch):
    monkeypatch.setattr(packed_linear, "MIN_ELEMENTS", 2**16)
    lm = tiny_llama(hidden=256)  # packed in a child, too, which knows nothing of this test's settings
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter *= 0.5  # wide and random, its logits are too large for float32's rounding to stay below the bound
    engine = own_engine(lm, tmp_path, own_process=own_process)
    requests = requests_of([3, 8])
    assert_exact(lm, requests, engine.run(requests))
    if not own_process:
        layers = engine.engine.slots.packed
        assert "lm_head.weight" in layers
        assert sum("layers." in name for name in layers) == 2 * 7
        assert all(layer.parameter.untyped_storage().nbytes() == 4 for layer in layers.values())
    engine.close()


def test_a_wrong_product_is_refused_before_training(tmp_path, monkeypatch):
    """The packed weights are what the self-check compares with the model's own forward pass."""
    monkeypatch.setattr(
        PackedLinear, "__call__", lambda self, x, activation="none": F.linear(x, self._packed.to_dense())
    )
    with pytest.raises(UnsupportedModelError, match="differ from those of a plain forward pass"):
        own_engine(tiny_llama(), tmp_path)  # the gate lacks its activation


def test_small_models_are_not_packed(tmp_path, monkeypatch):
    monkeypatch.undo()
    assert not own_engine(tiny_llama(), tmp_path).engine.slots.packed
