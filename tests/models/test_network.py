"""Log-probabilities of the policy network: equal to the model's own logits, for every family and chunk size."""

import pytest
import torch
from families import FAMILIES, SIZE
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
)

from lit_async_rl.models.policy import CausalPolicy


@pytest.fixture
def batch():
    torch.manual_seed(0)
    ids = torch.randint(3, 40, (5, 12))
    mask = torch.zeros(5, 12, dtype=torch.bool)
    for row, (begin, end) in enumerate([(3, 12), (5, 9), (4, 4), (1, 12), (6, 7)]):
        mask[row, begin:end] = True
    return ids, mask


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_and_entropy_equal_those_of_the_models_own_logits(family, temperature, batch):
    torch.manual_seed(1)
    lm = FAMILIES[family]().eval()
    ids, mask = batch
    stats = CausalPolicy(lm)(ids, mask, temperature)
    log_p = torch.log_softmax(lm(input_ids=ids).logits.float() / temperature, -1)
    expected = log_p[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)[:, :-1]
    zero = torch.zeros(())
    torch.testing.assert_close(stats.logprobs[:, 1:], torch.where(mask[:, 1:], expected, zero), atol=1e-5, rtol=0)
    torch.testing.assert_close(stats.entropy[:, 1:], torch.where(mask[:, 1:], entropy, zero), atol=1e-5, rtol=0)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 1000])
def test_chunks_change_neither_values_nor_gradients(chunk_tokens, batch):
    ids, mask = batch
    found = []
    for size in (4096, chunk_tokens):
        torch.manual_seed(1)
        policy = CausalPolicy(FAMILIES["llama"](), size)
        stats = policy(ids, mask, entropy_grad=True)
        (stats.logprobs.sum() + 0.3 * stats.entropy.sum()).backward()
        found.append((stats.logprobs, torch.cat([p.grad.flatten() for p in policy.parameters()])))
    torch.testing.assert_close(found[1][0], found[0][0], atol=1e-6, rtol=0)
    torch.testing.assert_close(found[1][1], found[0][1], atol=1e-5, rtol=1e-4)


def test_peak_logits_memory_grows_with_the_chunk_and_not_with_the_batch():
    """The largest tensor that autograd keeps is of the chunk's size, for a vocabulary of 152,000."""
    torch.manual_seed(0)
    lm = LlamaForCausalLM(LlamaConfig(**{**SIZE, "vocab_size": 152_000, "num_hidden_layers": 1}))
    policy, ids, mask = CausalPolicy(lm, 8), torch.randint(3, 1000, (2, 30)), torch.ones(2, 30, dtype=torch.bool)
    kept: list[int] = []
    parameters = {p.data_ptr() for p in lm.parameters()}

    def pack(tensor):
        if tensor.data_ptr() not in parameters:
            kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        policy(ids, mask).logprobs.sum()
    assert max(kept) < 152_000, "no logits are kept for the backward pass"


def test_entropy_has_a_gradient_only_where_it_is_asked_for(batch):
    ids, mask = batch
    policy = CausalPolicy(FAMILIES["llama"]())
    assert not policy(ids, mask).entropy.requires_grad
    assert policy(ids, mask, entropy_grad=True).entropy.requires_grad
