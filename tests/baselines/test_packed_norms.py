"""Norms of trajectories in packed rows: which gradient is meant, by a loop over trajectories in rows of their own."""

import copy

import pytest
import torch
from families import FAMILIES, SIZE
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lit_async_rl.baselines.ghost_norms import GhostTape
from lit_async_rl.baselines.optimal import score_squared_norms
from lit_async_rl.models.packing import SharedPromptPacking
from lit_async_rl.models.policy import CausalPolicy

PROMPT = 4
LENGTHS = (5, 3, 6, 4), (2, 7)
MODELS = {
    **{name: FAMILIES[name] for name in ("llama", "qwen3", "gpt2")},
    "llama, tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZE, tie_word_embeddings=True)),
}


@pytest.fixture
def batch():
    """Ids, mask, groups and coefficients of two groups, whose completions differ from their first token on."""
    torch.manual_seed(0)
    rows, width = [n for lengths in LENGTHS for n in lengths], PROMPT + 7
    groups = torch.tensor([g for g, lengths in enumerate(LENGTHS) for _ in lengths])
    ids, mask = torch.randint(3, 12, (len(rows), width)), torch.zeros(len(rows), width, dtype=torch.bool)
    ids[:, :PROMPT] = torch.randint(3, 12, (2, PROMPT))[groups]
    ids[:, PROMPT] = torch.arange(len(rows)) + 3
    for row, n in enumerate(rows):
        mask[row, PROMPT : PROMPT + n] = True
    return ids, mask, groups, torch.rand(ids.shape, dtype=torch.double) * 3


def only_used_behind_the_prompt(policy):
    """Hooks after which parameters of the body get no gradient from their use at the prompt's positions."""
    for module in policy.causal_lm.base_model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            frozen = copy.deepcopy(module).requires_grad_(False)

            def cut(module, args, output, frozen=frozen):
                constant = frozen(*args)
                behind = torch.arange(output.shape[1]) >= PROMPT
                return torch.where(behind.view(-1, *[1] * (output.ndim - 2)), output, constant)

            module.register_forward_hook(cut)


def one_by_one(policy, ids, mask, coefficients, chosen):
    """The gradient of each trajectory, alone in its batch."""
    parameters = [p for name, p in policy.named_parameters() if chosen(name)]
    norms = []
    for row in range(len(ids)):
        one = slice(row, row + 1)
        total = (policy(ids[one], mask[one], 0.8).logprobs * coefficients[one]).sum()
        grads = torch.autograd.grad(total, parameters, allow_unused=True)
        norms.append(sum(g.square().sum() for g in grads if g is not None))
    return torch.stack(norms)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("row_tokens", [0, 100])
@pytest.mark.parametrize("last_blocks", [None, 1])
def test_norms_of_packed_rows_are_those_of_what_a_trajectory_does_not_share(model, row_tokens, last_blocks, batch):
    torch.manual_seed(1)
    lm = MODELS[model]().double().eval()
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    ids, mask, groups, coefficients = batch
    packed = CausalPolicy(lm, packing=SharedPromptPacking(row_tokens))
    with GhostTape(packed, last_blocks) as tape:
        stats = packed(ids, mask, 0.8, group_index=groups)
    found = tape.squared_norms(coefficients, ids, mask, 0.8, stats.rows)
    (coefficients * stats.logprobs).sum().backward()  # the graph is still there
    reference = CausalPolicy(copy.deepcopy(lm))
    if last_blocks and lm.get_output_embeddings().weight is lm.get_input_embeddings().weight:
        weight = nn.Parameter(lm.get_output_embeddings().weight.detach().clone())  # its use as a head only
        reference.causal_lm.get_output_embeddings().weight = weight
    only_used_behind_the_prompt(reference)
    last = "lm_head", "layers.1.", "h.1."
    expected = one_by_one(
        reference, ids, mask, coefficients, lambda name: not last_blocks or any(part in name for part in last)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-9)  # logits are float32


def test_nothing_is_left_out_where_nothing_flows_into_the_prompt(batch):
    """The first token and the keys and values are all through which a completion acts on the prompt's positions."""
    torch.manual_seed(1)
    lm = FAMILIES["llama"]().double().eval()
    for name, parameter in lm.named_parameters():
        parameter.requires_grad_("lm_head" in name or ("layers.1." in name and "_proj" in name and "self" not in name))
    ids, mask, groups, coefficients = batch
    mask = mask & (torch.arange(mask.shape[1]) > PROMPT)
    packed = CausalPolicy(lm, packing=SharedPromptPacking())
    with GhostTape(packed) as tape:
        stats = packed(ids, mask, 0.8, group_index=groups)
    found = tape.squared_norms(coefficients, ids, mask, 0.8, stats.rows)
    trainable = {name for name, p in packed.named_parameters() if p.requires_grad}
    expected = one_by_one(CausalPolicy(lm), ids, mask, coefficients, trainable.__contains__)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-9)


def test_the_score_bounds_the_gradient_with_respect_to_the_logits(batch):
    """c (onehot - p) has a squared norm between that of its own entry and twice as much."""
    torch.manual_seed(1)
    _, mask, _, coefficients = batch
    logits = torch.randn(*mask.shape, 12, dtype=torch.double)
    tokens = torch.randint(0, 12, mask.shape)
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, tokens[..., None])[..., 0]
    score = coefficients[..., None] * (nn.functional.one_hot(tokens, 12) - logprobs.exp())
    exact = (score.square().sum(-1) * mask).sum(-1)
    found = score_squared_norms(torch.where(mask, chosen, 0.0), coefficients, mask)
    assert ((found <= exact) & (exact <= 2 * found)).all()


def test_a_tape_of_the_last_blocks_needs_blocks():
    policy = CausalPolicy(FAMILIES["llama"]())
    policy.causal_lm.base_model.layers = nn.Identity()
    with pytest.raises(ValueError, match=r"last_blocks=1.*no list of transformer blocks"):
        GhostTape(policy, last_blocks=1)
