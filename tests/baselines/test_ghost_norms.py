"""Ghost norms against gradients of single trajectories by torch.func."""

import pytest
import torch
from families import FAMILIES, SIZE
from peft import LoraConfig, get_peft_model
from torch.func import functional_call, grad
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from lit_async_rl.baselines.ghost_norms import (
    GhostTape,
    InputGrams,
    LayerRecord,
    embedding_squared_norms,
    linear_squared_norms,
)
from lit_async_rl.baselines.optimal import per_trajectory_squared_norms
from lit_async_rl.models.policy import CausalPolicy


def lora(lm):
    targets = ["q_proj", "down_proj"]
    return get_peft_model(lm, LoraConfig(r=3, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False))


MODELS = {
    **FAMILIES,
    "llama, tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZE, tie_word_embeddings=True)),
    "qwen2 (biases)": lambda: Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in SIZE.items() if k != "head_dim"})),
    "gpt2, untied": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=2, n_positions=32, tie_word_embeddings=False)
    ),
    "llama, LoRA": lambda: lora(LlamaForCausalLM(LlamaConfig(**SIZE))),
}


@pytest.fixture
def batch():
    torch.manual_seed(0)
    ids = torch.randint(0, 9, (5, 14))  # few different ids, so that table rows meet; 0 is the padding row
    mask = torch.zeros(5, 14, dtype=torch.bool)
    for row, (begin, end) in enumerate([(3, 14), (5, 9), (4, 4), (1, 12), (6, 7)]):
        mask[row, begin:end] = True
    return ids, mask, torch.rand(5, 14) * 3


def reference(policy, ids, mask, coefficients, temperature):
    """One gradient for each trajectory, alone in its batch."""
    parameters = {n: p.detach() for n, p in policy.named_parameters() if p.requires_grad}

    def total(theta, row):
        stats = functional_call(policy, theta, (ids[row : row + 1], mask[row : row + 1], temperature), tie_weights=True)
        return (stats.logprobs[0] * coefficients[row]).sum()

    return torch.stack(
        [sum(g.square().sum() for g in grad(total)(parameters, row).values()) for row in range(len(ids))]
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("chunk_tokens", [4096, 20])
def test_ghost_and_exact_norms_equal_those_of_single_trajectories(model, chunk_tokens, batch):
    torch.manual_seed(1)
    policy = CausalPolicy(MODELS[model]().eval(), chunk_tokens)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    ids, mask, coefficients = batch
    expected = reference(policy, ids, mask, coefficients, 0.8)
    with GhostTape(policy) as tape:
        stats = policy(ids, mask, 0.8)
    ghost = tape.squared_norms(coefficients, ids, mask, 0.8)
    exact = per_trajectory_squared_norms(policy, stats.logprobs, coefficients)
    assert expected[2] == 0
    torch.testing.assert_close(ghost, expected, rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(exact, expected, rtol=1e-4, atol=1e-9)
    stats.logprobs.sum().backward()  # the graph is still there
    assert all(p.grad is not None for p in policy.parameters() if p.requires_grad)


def test_padding_and_other_rows_do_not_matter(batch):
    torch.manual_seed(1)
    policy = CausalPolicy(FAMILIES["llama"]())
    ids, mask, coefficients = batch
    pad = torch.nn.functional.pad

    def norms(ids, mask, coefficients):
        with GhostTape(policy) as tape:
            policy(ids, mask)
        return tape.squared_norms(coefficients, ids, mask)

    alone = norms(ids[3:4], mask[3:4], coefficients[3:4])
    among = norms(pad(ids, (0, 5), value=7), pad(mask, (0, 5)), pad(coefficients, (0, 5), value=1e6))[3:4]
    torch.testing.assert_close(alone, among, rtol=1e-4, atol=0)


@pytest.mark.parametrize(("length", "inputs", "outputs"), [(2, 40, 50), (60, 3, 4)])
def test_both_ways_to_a_linear_layers_norm_agree(length, inputs, outputs):
    x, e = torch.randn(3, length, inputs), torch.randn(3, length, outputs)
    expected = torch.einsum("btk,btd->bkd", e, x).square().sum((1, 2))
    torch.testing.assert_close(
        linear_squared_norms(LayerRecord(torch.nn.Identity(), x, e), InputGrams()), expected, rtol=1e-4, atol=1e-4
    )


def test_equal_ids_add_up():
    ids, e = torch.tensor([[1, 1, 2]]), torch.randn(1, 3, 4)
    expected = (e[0, 0] + e[0, 1]).square().sum() + e[0, 2].square().sum()
    torch.testing.assert_close(embedding_squared_norms(ids, e)[0], expected)


@pytest.mark.parametrize("settings", [{"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["lm_head"]}])
@pytest.mark.parametrize("last_blocks", [None, 1])
def test_a_head_that_is_no_single_layer_is_refused_and_not_left_untrained(settings, last_blocks):
    """PEFT's wrapper has no parameters of its own: norms and the gradient made of them left the head out, silently."""
    config = LoraConfig(r=3, task_type="CAUSAL_LM", **({"target_modules": ["q_proj"]} | settings))
    lm = get_peft_model(LlamaForCausalLM(LlamaConfig(**SIZE)), config)
    with pytest.raises(ValueError, match=r"model\.baseline.*'lm_head\..*PER_TRAJECTORY or SCORE"):
        GhostTape(CausalPolicy(lm), last_blocks)


def test_a_head_of_another_type_is_refused():
    class Halved(torch.nn.Linear):
        def forward(self, features):
            return super().forward(features) / 2

    lm = FAMILIES["llama"]()
    lm.lm_head = Halved(32, 40)
    with pytest.raises(ValueError, match=r"'lm_head' of type Halved"):
        GhostTape(CausalPolicy(lm))


def test_an_unknown_layer_is_named():
    lm = FAMILIES["llama"]()
    lm.model.layers[1].mlp = torch.nn.Sequential(torch.nn.PReLU(2), torch.nn.Conv2d(1, 1, 3))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp.*Conv2d"):
        GhostTape(CausalPolicy(lm))


@pytest.mark.parametrize("model", ["llama", "qwen3", "gemma2 (soft-capped logits)"])
@pytest.mark.parametrize("sharpness", [1.0, 30.0], ids=["broad", "confident"])
def test_norms_of_a_bfloat16_model_are_those_of_its_gradients_added_in_float64(model, sharpness):
    """Rounded log-probabilities of nearly certain tokens would be wrong by their own size: 1 - p has no digit left."""
    torch.manual_seed(1)
    policy = CausalPolicy(FAMILIES[model]().eval())
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        policy.causal_lm.get_output_embeddings().weight.mul_(sharpness)
    policy.bfloat16()
    ids = torch.randint(0, 9, (16, 14))
    mask = torch.zeros(16, 14, dtype=torch.bool)
    mask[:, 6:9] = True
    with torch.no_grad():
        for column in range(6, 9):
            ids[:, column] = policy.causal_lm(ids[:, :column]).logits[:, -1].argmax(-1)
    coefficients = torch.where(mask, torch.rand(16, 14) * 3, 0.0)
    with GhostTape(policy) as tape:
        stats = policy(ids, mask)
    ghost = tape.squared_norms(coefficients, ids, mask)
    exact = per_trajectory_squared_norms(policy, stats.logprobs, coefficients)
    expected = []
    for row in range(16):
        grads = torch.autograd.grad(
            (stats.logprobs[row] * coefficients[row]).sum(), list(policy.parameters()), retain_graph=True
        )
        expected.append(sum(grad.double().square().sum() for grad in grads))
    expected = torch.stack(expected)
    torch.testing.assert_close(ghost.double(), expected, rtol=4e-3, atol=0)
    torch.testing.assert_close(exact.double(), expected, rtol=1e-5, atol=0)
    assert ghost.dtype is exact.dtype is torch.float32, (
        "their logarithms are weights: bfloat16 has three digits of them"
    )
