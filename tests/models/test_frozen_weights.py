"""Publication under LoRA: frozen weights travel once, and again if they were changed."""

import pytest
import torch
from replays import own_engine, requests_of
from tiny_models import save, tiny_llama

from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.models.lora import LoRA, add_lora
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.models.weights import stream_weights


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
    travelled = dict(stream_weights(policy, known=known))
    assert travelled.keys() == {name for name, _ in stream_weights(policy) if "q_proj.weight" in name}
    engine.load_weights(2, travelled.items())
    own = dict(engine._active_slots.lm.named_parameters())
    for name, weight in stream_weights(policy):
        torch.testing.assert_close(own[name], weight, atol=0, rtol=0)
    with torch.no_grad():
        policy.causal_lm.model.norm.weight.mul_(2)  # by a callback, or by loading a checkpoint
    assert dict(stream_weights(policy, known=known)).keys() - travelled.keys() == {"model.norm.weight"}
    engine.run(requests_of([3]))


def test_an_engine_takes_changes_only_after_all_weights(tmp_path):
    lm = tiny_llama(seed=0)
    engine = EmbeddedEngine(device="cpu")
    engine.setup(save(lm, tmp_path))
    name, weight = next(iter(lm.named_parameters()))
    with pytest.raises(ValueError, match="lack what the engine's model has"):  # they would be random
        engine.load_weights(1, [(name, weight)])
