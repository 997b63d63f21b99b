"""Publication under LoRA: frozen weights travel once, and again if they were changed."""

import pytest
import torch
from replays import own_engine, requests_of
from tiny_models import tiny_llama

from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.models.lora import LoRA, add_lora
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.models.weights import UNCHANGED, stream_weights
from lit_async_rl.rollouts.engine_listener import EngineCalls


def change_adapters(policy):
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)


def test_the_engine_has_the_merged_weights_though_unchanged_ones_do_not_travel(tmp_path):
    lm = tiny_llama(seed=0)
    engine = own_engine(lm, tmp_path)
    policy = CausalPolicy(add_lora(lm, LoRA(rank=2, target_modules=["q_proj"])))
    known = {}
    engine.load_weights(1, stream_weights(policy, known=known))
    change_adapters(policy)
    update = dict(stream_weights(policy, known=known))
    assert {name for name in update if update[name] is not UNCHANGED} == {n for n in update if "q_proj.weight" in n}
    engine.load_weights(2, update.items())
    engine.poll(0.0)
    own = dict(engine.engine.slots.lm.named_parameters())
    for name, weight in stream_weights(policy):
        torch.testing.assert_close(own[name], weight, atol=0, rtol=0)
    with torch.no_grad():
        policy.causal_lm.model.norm.weight.mul_(2)  # by a callback, or by loading a checkpoint
    assert dict(stream_weights(policy, known=known))["model.norm.weight"] is not UNCHANGED
    engine.run(requests_of([3]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("engine_dtype", ["float32", "bfloat16"])
def test_adapters_that_the_engine_merges_give_the_same_weights_bit_for_bit(tmp_path, dtype, engine_dtype):
    """The factors are those of the publication, whatever the trainer does before the engine's next token."""
    lm = tiny_llama(seed=0)
    engine = own_engine(lm, tmp_path, dtype=engine_dtype)
    policy = CausalPolicy(add_lora(lm.to(getattr(torch, dtype)), LoRA(rank=2, target_modules="all-linear")))
    change_adapters(policy)
    calls, known = EngineCalls(engine, 60.0), dict[str, int]()
    for version in (1, 2):
        change_adapters(policy)
        merged = {name: tensor.detach().clone() for name, tensor in stream_weights(policy)}
        calls.load_weights(version, stream_weights(policy, adapters=True, known=known))
    change_adapters(policy)
    engine.poll(0.0)
    for name, weight in engine.engine.slots.lm.named_parameters():
        assert torch.equal(weight, merged[name].to(weight.dtype)), name


def test_live_weights_are_handed_over_at_once_and_gathered_ones_one_by_one():
    """Two threads that take turns for each tensor wait for each other, and for the decode loop."""
    lm = tiny_llama(seed=0)
    asked: list[int] = []

    class Asking(EmbeddedEngine):
        def load_weights(self, version, weights):
            for _ in weights:
                asked.append(produced)

    def counted(weights):
        nonlocal produced
        for item in weights:
            produced += 1
            yield item

    policy = CausalPolicy(add_lora(lm, LoRA(rank=2, target_modules=["q_proj"])))
    for adapters in (True, False):
        produced = 0
        asked.clear()
        weights = list(stream_weights(policy, adapters=adapters))
        EngineCalls(Asking(), 60.0).load_weights(1, counted(stream_weights(policy, adapters=adapters)))
        assert asked[-1] == len(weights)
        assert (asked[0] == len(weights)) == adapters, "merged weights are gone when the next is asked for"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_are_merged_as_peft_merges_them(dtype):
    lm = tiny_llama(seed=0).to(getattr(torch, dtype))
    policy = CausalPolicy(add_lora(lm, LoRA(rank=2, alpha=7, target_modules=["q_proj", "down_proj", "embed_tokens"])))
    change_adapters(policy)
    streamed = dict(stream_weights(policy))
    merged = policy.lm.float().merge_and_unload()
    assert {name for name, _ in merged.named_parameters()} == streamed.keys()
    for name, weight in merged.named_parameters():
        torch.testing.assert_close(streamed[name].float(), weight, atol=1e-6, rtol=1e-6)
