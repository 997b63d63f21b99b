"""Shared prompts: same log-probabilities and gradients as rows of their own, less work, by the formula."""

import shutil

import pytest
import torch
from device_waits import DeviceWaits
from families import FAMILIES, SIZE
from flow import fit, make_data, make_module, parameters
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

from lit_async_rl.baselines.optimal import Norms, OptimalBaseline
from lit_async_rl.losses import Reinforce
from lit_async_rl.models import packing as packing_module
from lit_async_rl.models.lora import LoRA, add_lora
from lit_async_rl.models.packing import SharedPromptPacking, attention_mask, group_cost, pack
from lit_async_rl.models.policy import CausalPolicy


def groups(shapes, width=None, seed=0):
    """Random ids of groups (prompt length, completion lengths), right-padded, with mask and group of each row."""
    generator = torch.Generator().manual_seed(seed)
    rows = [(n, p, c) for n, (p, completions) in enumerate(shapes) for c in completions]
    width = width or max(p + c for _, p, c in rows)
    prompts = [torch.randint(3, 40, (p,), generator=generator) for p, _ in shapes]
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.bool)
    for row, (n, p, c) in enumerate(rows):
        ids[row, : p + c] = torch.cat([prompts[n], torch.randint(3, 40, (c,), generator=generator)])
        mask[row, p : p + c] = True
    return ids, mask, torch.tensor([n for n, _, _ in rows])


MIXED = [(7, (3, 5, 1)), (2, (4,)), (5, (0, 2, 6, 6)), (1, (3, 2))]


def sgd(params):
    """Adam would divide differences of rounding by a gradient of nearly nothing."""
    return torch.optim.SGD(params, lr=0.1)


def results(policy, ids, mask, group_index):
    """Log-probabilities, entropies, and the gradient of a weighted sum of both."""
    policy.zero_grad()
    stats = policy(ids, mask, 0.7, entropy_grad=True, group_index=group_index)
    weights = torch.linspace(-1, 2, mask.numel()).view_as(stats.logprobs)
    (weights * stats.logprobs + 0.3 * stats.entropy).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])
    return stats.logprobs.detach(), stats.entropy.detach(), gradient


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("row_tokens", [0, 40])
def test_packed_equals_padded(family, attention, row_tokens):
    torch.manual_seed(1)
    lm = FAMILIES[family]().eval()
    lm.set_attn_implementation(attention)
    batch = groups(MIXED)
    expected = results(CausalPolicy(lm), *batch)
    found = results(CausalPolicy(lm, packing=SharedPromptPacking(row_tokens)), *batch)
    for value, right in zip(found, expected, strict=True):
        torch.testing.assert_close(value, right, atol=1e-5, rtol=1e-5)


@given(
    shapes=st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(0, 5), min_size=1, max_size=4)), max_size=4),
    row_tokens=st.sampled_from([0, 10, 100]),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_any_groups_in_any_order_with_holes_in_the_mask(shapes, row_tokens, order):
    torch.manual_seed(1)
    lm = LlamaForCausalLM(LlamaConfig(**SIZE)).double().eval()
    ids, mask, group_index = groups([*shapes, (2, (3, 3))], seed=order.randrange(100))
    rows = torch.tensor(order.sample(range(len(ids)), len(ids)))
    mask &= torch.rand(mask.shape) < 0.7  # tool outputs; and then some completions have nothing to train on
    batch = ids[rows], mask[rows], group_index[rows]
    plain, packed = CausalPolicy(lm), CausalPolicy(lm, packing=SharedPromptPacking(row_tokens))
    for value, right in zip(results(packed, *batch), results(plain, *batch), strict=True):
        torch.testing.assert_close(value, right, atol=1e-5, rtol=1e-5)  # statistics are float32


def test_a_batch_of_padding_reaches_every_parameter():
    lm = FAMILIES["llama"]()
    policy = CausalPolicy(lm, packing=SharedPromptPacking())
    ids, mask = torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 2, dtype=torch.bool)
    policy(ids, mask, group_index=torch.tensor([-1])).logprobs.sum().backward()
    assert all(p.grad is not None for p in policy.parameters())


@pytest.mark.parametrize(("prompt", "completions"), [(12, (3,) * 8), (5, (1, 4, 2)), (1, (6, 6))])
def test_tokens_and_pairs_are_those_of_the_formula(prompt, completions):
    ids, mask, group_index = groups([(prompt, completions)])
    ids[:, prompt] = torch.arange(len(ids))  # completions differ from their first token on
    rows = pack(ids[:, :-1], mask[:, 1:], group_index.tolist())
    last_left_out = [n - 1 for n in completions]
    tokens, pairs = group_cost(prompt, last_left_out, shared=True)
    assert rows.num_tokens == tokens
    assert int(attention_mask(FAMILIES["llama"](), rows).sum()) == pairs
    alone = [group_cost(prompt, (n,), shared=False) for n in completions]
    assert group_cost(prompt, completions, shared=False) == tuple(map(sum, zip(*alone, strict=True)))
    saved_pairs = group_cost(prompt, completions, shared=False)[1] - group_cost(prompt, completions, shared=True)[1]
    assert saved_pairs == (len(completions) - 1) * prompt * (prompt + 1) // 2


def test_groups_share_rows_up_to_the_limit():
    ids, mask, group_index = groups(MIXED)
    rows = {limit: pack(ids[:, :-1], mask[:, 1:], group_index.tolist(), limit) for limit in (0, 20, 1000)}
    assert [len(packed.branch) for packed in rows.values()] == [4, 2, 1]
    assert rows[20].branch.shape[1] <= 20
    assert len({packed.num_tokens for packed in rows.values()}) == 1


def test_flex_attention_sees_what_the_dense_mask_sees():
    lm = FAMILIES["llama"]().eval()
    ids, mask, group_index = groups([(40, (30, 20, 35)), (3, (50, 60)), (120, (9,))])
    rows = pack(ids[:, :-1], mask[:, 1:], group_index.tolist(), 300)
    dense = attention_mask(lm, rows)
    lm.set_attn_implementation("flex_attention")
    block_mask = attention_mask(lm, rows)
    length = dense.shape[-1]
    places = torch.arange(length)
    rebuilt = torch.stack([block_mask.mask_mod(torch.tensor(n), 0, places[:, None], places) for n in range(len(dense))])
    assert torch.equal(rebuilt, dense[:, 0])
    blocks = block_mask.to_dense()[:, 0].bool().repeat_interleave(128, 1).repeat_interleave(128, 2)
    assert not (dense[:, 0] & ~blocks[:, :length, :length]).any(), "no pair is in a block that is skipped"


@pytest.fixture
def _flex_on_cpu():
    """FlexAttention without compilation, which takes minutes on a CPU; its forward pass is the same."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.usefixtures("_flex_on_cpu")
def test_rows_of_flex_attention_are_whole_blocks():
    lm = FAMILIES["llama"]().eval()
    ids, mask, group_index = groups(MIXED)
    packing = SharedPromptPacking(40)
    with torch.no_grad():
        expected = CausalPolicy(lm)(ids, mask).logprobs
        lm.set_attn_implementation("flex_attention")
        stats = CausalPolicy(lm, packing=packing)(ids, mask, group_index=group_index)
    assert stats.rows is not None
    assert stats.rows.branch.shape[1] == 128
    torch.testing.assert_close(stats.logprobs, expected, atol=1e-5, rtol=1e-5)


def test_the_layout_takes_one_transfer_from_the_device():
    lm = FAMILIES["llama"]().eval()
    ids, mask, group_index = groups(MIXED)
    with torch.no_grad(), DeviceWaits() as counted:
        features, rows = SharedPromptPacking(40).features(lm, ids[:, :-1], mask[:, 1:], group_index)
    assert counted.found["cpu"] == 1
    assert rows.branch.shape[1] <= 40
    assert len(features) == int(mask[:, 1:].sum())


def test_on_a_gpu_block_masks_are_made_by_compiled_code(monkeypatch):
    """Which function makes them; that compiled masks are equal is a slow test."""
    made = []
    monkeypatch.setattr(torch, "compile", lambda function: made.append(function) or (lambda *args, **kwargs: "mask"))
    packing_module._compiled_block_mask.cache_clear()
    assert packing_module._block_mask_maker(torch.device("cpu")) is packing_module.create_block_mask
    for _ in range(2):
        assert packing_module._block_mask_maker(torch.device("cuda"))() == "mask"
    assert made == [packing_module.create_block_mask]
    packing_module._compiled_block_mask.cache_clear()


@pytest.mark.sweep  # torch compiles for minutes
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
def test_compiled_block_masks_are_those_of_the_uncompiled_function(monkeypatch):
    lm = FAMILIES["llama"]().eval()
    lm.set_attn_implementation("flex_attention")
    compiled = packing_module._compiled_block_mask()
    for seed, prompt in enumerate((40, 44, 300)):
        ids, mask, group_index = groups([(prompt, (30, 20, 35)), (3, (50, 60)), (120, (9,))], seed=seed)
        rows = pack(ids[:, :-1], mask[:, 1:], group_index.tolist(), 300, multiple=128)
        expected = attention_mask(lm, rows)
        monkeypatch.setattr(packing_module, "_block_mask_maker", lambda device: compiled)
        assert torch.equal(attention_mask(lm, rows).to_dense(), expected.to_dense())
        monkeypatch.undo()


@pytest.mark.slow
def test_a_run_ends_at_the_same_parameters_with_reference_lora_and_checkpointing():
    for options in (
        dict(kl_coefficient=0.1, entropy_coefficient=0.01),
        dict(lora=LoRA(rank=2), gradient_checkpointing=True),
    ):
        ends = []
        for packing in (None, SharedPromptPacking()):
            torch.manual_seed(3)
            module = make_module(packing=packing, optimizer=sgd, **options)
            fit(module, make_data(max_staleness=0), 3)
            ends.append(parameters(module))
        torch.testing.assert_close(ends[1], ends[0], atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("norms", [Norms.PER_TRAJECTORY, Norms.SCORE])
def test_an_optimal_baseline_that_does_not_depend_on_the_layout_makes_the_same_update(norms):
    ends = []
    for packing in (None, SharedPromptPacking()):
        module = make_module(packing=packing, loss=Reinforce(), baseline=OptimalBaseline(norms), optimizer=sgd)
        fit(module, make_data(max_staleness=0), 2)
        ends.append(parameters(module))
    torch.testing.assert_close(ends[1], ends[0], atol=1e-5, rtol=0)


def test_what_cannot_be_packed_is_refused_by_name():
    with pytest.raises(ValueError, match="row_tokens"):
        SharedPromptPacking(-1)
    mamba = MambaForCausalLM(MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(ValueError, match="MambaForCausalLM"):
        CausalPolicy(mamba, packing=SharedPromptPacking())
    short = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=1, n_positions=8))
    with pytest.raises(ValueError, match="window is 8"):
        CausalPolicy(short, packing=SharedPromptPacking())(*groups([(7, (4,))])[:2], group_index=torch.tensor([0]))
    flash = FAMILIES["llama"]()
    flash.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="flash_attention_2"):
        CausalPolicy(flash, packing=SharedPromptPacking())(*groups([(2, (4,))])[:2], group_index=torch.tensor([0]))


def test_lora_is_seen_through():
    torch.manual_seed(1)
    lm = add_lora(FAMILIES["llama"]().eval(), LoRA(rank=2))
    batch = groups(MIXED)
    found = CausalPolicy(lm, packing=SharedPromptPacking())(*batch[:2], group_index=batch[2]).logprobs
    torch.testing.assert_close(found, CausalPolicy(lm)(*batch[:2]).logprobs, atol=1e-5, rtol=0)
