"""Layers that train in full beside adapters: which, what is published of them, and what is refused."""

import pytest
import torch
from tiny_models import tiny_llama

from lit_async_rl.models.lora import LoRA, add_lora
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.models.received import UNCHANGED
from lit_async_rl.models.weights import stream_weights


def trained(lm):
    """Names of weights that train, but the adapters."""
    names = {name for name, parameter in lm.named_parameters() if parameter.requires_grad and ".lora_" not in name}
    return {name.removeprefix("base_model.model.model.") for name in names}


def test_without_modules_to_save_adapters_alone_train():
    assert trained(add_lora(tiny_llama(), LoRA(rank=2, target_modules=["q_proj"]))) == set()


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (["embed_tokens"], {"embed_tokens.weight"}),
        (["norm"], {"norm.weight"}),
        (
            ["layers.1.mlp", "norm"],
            {f"layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")} | {"norm.weight"},
        ),
    ],
)
def test_layers_train_where_they_are(modules, expected):
    lm = add_lora(tiny_llama(), LoRA(rank=2, target_modules=["q_proj"], modules_to_save=modules))
    assert trained(lm) == expected


def test_they_are_published_when_they_change_and_the_head_that_is_tied_to_them_with_them():
    lm = add_lora(tiny_llama(tied=True), LoRA(rank=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"]))
    policy = CausalPolicy(lm)
    known = {}
    list(stream_weights(policy, known=known))
    tokens = torch.arange(6)[None]
    before = lm(tokens).logits
    with torch.no_grad():
        policy.causal_lm.model.embed_tokens.weight.mul_(2)
    sent = {name: weight for name, weight in stream_weights(policy, known=known) if weight is not UNCHANGED}
    assert set(sent) == {name for name in sent if "q_proj.weight" in name} | {"model.embed_tokens.weight"}
    torch.testing.assert_close(sent["model.embed_tokens.weight"], lm.get_output_embeddings().weight, rtol=0, atol=0)
    assert not torch.allclose(lm(tokens).logits, before)


@pytest.mark.parametrize("modules", [["embed_token"], ["rotary_emb"], ["tokens"], ["base_layer"], [""]])
def test_layers_that_are_not_there_or_have_no_weights_are_refused(modules):
    with pytest.raises(ValueError, match=rf"model.lora.modules_to_save: '{modules[0]}': the model has no weights"):
        add_lora(tiny_llama(), LoRA(rank=2, target_modules=["q_proj"], modules_to_save=modules))


@pytest.mark.parametrize("module", ["q_proj", "self_attn", "layers.0"])
def test_a_layer_has_adapters_or_trains_in_full(module):
    with pytest.raises(ValueError, match=rf"model.lora.modules_to_save: '{module}' has adapters, too"):
        add_lora(tiny_llama(), LoRA(rank=2, target_modules=["q_proj"], modules_to_save=[module]))
