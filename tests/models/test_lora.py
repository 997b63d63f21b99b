"""Layers that train in full beside adapters: which, what is published of them, and what is refused."""

import pytest
import torch
from every_family import UNBUILDABLE, model_types, params, tiny_config
from flow import fit, make_data, make_module
from tiny_models import save, tiny_gpt2, tiny_llama, tiny_qwen2, tiny_tokenizer
from transformers import AutoModelForCausalLM

from lit_async_rl.models.architecture import stored_buffers
from lit_async_rl.models.lora import LoRA, add_lora
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.models.weights import LORA_A, LORA_B, UNCHANGED, adapted_layers, stream_weights


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
    with pytest.raises(
        ValueError, match=rf"model.lora.modules_to_save: '{module}' is trained in full and also has adapters"
    ):
        add_lora(tiny_llama(), LoRA(rank=2, target_modules=["q_proj"], modules_to_save=[module]))


USUAL = {"qwen2", "gpt2", "gpt_neox", "opt", "phi", "starcoder2", "llama", "gemma4_text"}
FAMILIES = {name: kind for name, kind in model_types().items() if name not in UNBUILDABLE}


@pytest.mark.parametrize("name", params(FAMILIES, usual=USUAL, sampled=pytest.mark.slow, rest=pytest.mark.sweep))
@pytest.mark.parametrize("adapters", [False, True], ids=["merged", "factors"])
def test_weights_of_adapted_layers_travel_under_the_names_of_the_plain_model(name, adapters):
    """In the first publication and in later ones, where weights that have not changed are only named."""
    torch.manual_seed(0)
    try:
        plain = AutoModelForCausalLM.from_config(tiny_config(FAMILIES[name]), dtype=torch.float32).eval()
        expected = {n: p.detach().clone() for n, p in plain.named_parameters()}
        lm = add_lora(plain, LoRA(rank=2, target_modules="all-linear"))
    except ValueError as refused:
        if "model.lora.target_modules" in str(refused):
            pytest.skip(f"refused by name: {refused}")
        raise
    policy = CausalPolicy(lm)
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    known = {}
    for _ in range(3):
        sent = dict(stream_weights(policy, adapters=adapters, known=known))
        weights = {n: t for n, t in sent.items() if not n.endswith((LORA_A, LORA_B))}
        assert weights.keys() >= expected.keys()
        assert {n for n, _ in stored_buffers(plain)} >= weights.keys() - expected.keys() - {"lm_head.weight"}
        for n, tensor in weights.items():
            if n.endswith(".bias") and tensor is not UNCHANGED:
                assert torch.equal(tensor, expected[n]), n
    layers = adapted_layers(policy.causal_lm)
    assert layers, "nothing was adapted"
    for owner, layer in layers.items():
        if not adapters and f"{owner}.weight" in expected:
            change = layer.get_delta_weight("default")
            torch.testing.assert_close(sent[f"{owner}.weight"], expected[f"{owner}.weight"] + change, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [tiny_llama, tiny_qwen2, tiny_gpt2])
@pytest.mark.parametrize("bound", [0, 4])
def test_a_run_with_adapters_on_layers_with_a_bias_restarts_no_engine(kind, bound, tmp_path):
    model = save(kind(vocab=70, hidden=16, layers=1), tmp_path, tiny_tokenizer(64))
    module = make_module(model=model, lora=LoRA(rank=4))
    data = make_data(
        model=model,
        prompts=["2A", "3B", "4C", "5D"],
        reward=lambda prompt, completion: float(sum(map(ord, completion)) % 7) / 7,
        groups_per_step=2,
        group_size=3,
        max_staleness=bound,
        engine_restarts=0,
    )
    fit(module, data, 6)
    assert data.feed.num_restarts == 0
    assert module.version == 6
