"""Prefix trees: same log-probabilities and gradients as rows of their own, less work, by the formula."""

import random
import shutil
from typing import get_type_hints

import pytest
import torch
from device_waits import DeviceWaits
from families import FAMILIES, SIZE
from flow import fit, make_data, make_module, parameters
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonargparse import ArgumentParser
from tiny_models import SPARSE, tiny_llama
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

from lit_async_rl.baselines.optimal import Norms, OptimalBaseline
from lit_async_rl.losses import Reinforce
from lit_async_rl.models import packing as packing_module
from lit_async_rl.models.lora import LoRA, add_lora
from lit_async_rl.models.packing import PrefixTreePacking, attention_mask, pack
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.models.routers import routers_of
from lit_async_rl.models.tree_attention import TreeMask, tree_mask
from lit_async_rl.training.module import CHECKPOINTING, PolicyModule
from lit_async_rl.utils.object_config import as_config, as_objects


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


def trees(seed, levels=6, leaves=64, width=31):
    """Rows of random trees in random order: some begin alike up to any depth, some are equal, or begin another one."""
    chance = random.Random(seed)

    def grow(prefix, level):
        prefix = prefix + [chance.randrange(3, 40) for _ in range(chance.randrange(5))]
        if level == 0 or len(prefix) > width - 5:
            return [[*prefix[: width - 1], chance.randrange(3, 40)]]
        return [row for _ in range(chance.randrange(1, 4)) for row in grow(prefix, level - 1)]

    rows = [(n, row) for n in range(chance.randrange(1, 4)) for row in grow([1], chance.randrange(1, levels + 1))]
    rows = chance.sample(rows, min(leaves, len(rows)))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    for number, (_, row) in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
        mask[number, 1 : len(row)] = torch.tensor([chance.random() < 0.6 for _ in row[1:]], dtype=torch.bool)
    return ids, mask, torch.tensor([n for n, _ in rows])


def slow_tree(ids, mask, group_index):
    """Each prefix that something depends on, once: its tokens and its ancestors."""
    prefixes = set()
    for row, trains, group in zip(ids.tolist(), mask.tolist(), group_index.tolist(), strict=True):
        length = max((place for place, on in enumerate(trains) if on), default=0)
        prefixes |= {(group, *row[:end]) for end in range(1, length + 1)}
    return len(prefixes), sum(len(prefix) - 1 for prefix in prefixes)


@pytest.fixture
def always_split(monkeypatch):
    """Small trees, too, are split at branches and not masked."""
    monkeypatch.setattr(packing_module, "split_is_cheaper", lambda lm, spans, shape: True)


def assert_same(lm, batch, bound, packing=None):
    """Loss and gradient, relative to the norms of those of separate rows."""
    if not batch[1].any():
        return
    expected = results(CausalPolicy(lm), *batch)
    found = results(CausalPolicy(lm, packing=packing or PrefixTreePacking()), *batch)
    for value, right in zip(found, expected, strict=True):
        assert (value - right).norm() <= bound * right.norm()


MIXED = [(7, (3, 5, 1)), (2, (4,)), (5, (0, 2, 6, 6)), (1, (3, 2))]


def sgd(params):
    """Adam would divide differences of rounding by a gradient of nearly nothing."""
    return torch.optim.SGD(params, lr=0.1)


def results(policy, ids, mask, group_index, experts=None):
    """Log-probabilities, entropies, and the gradient of a weighted sum of both."""
    policy.zero_grad()
    stats = policy(ids, mask, 0.7, entropy_grad=True, group_index=group_index, experts=experts)
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
    found = results(CausalPolicy(lm, packing=PrefixTreePacking(row_tokens)), *batch)
    for value, right in zip(found, expected, strict=True):
        torch.testing.assert_close(value, right, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
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
    plain, packed = CausalPolicy(lm), CausalPolicy(lm, packing=PrefixTreePacking(row_tokens))
    for value, right in zip(results(packed, *batch), results(plain, *batch), strict=True):
        torch.testing.assert_close(value, right, atol=1e-5, rtol=1e-5)  # statistics are float32


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.usefixtures("always_split", "in_float64")
def test_random_trees_that_are_split_at_branches_equal_rows(family, seed):
    torch.manual_seed(1)
    lm = FAMILIES[family]().eval()
    assert_same(lm, trees(seed), 1e-5)
    assert_same(lm.double(), trees(seed), 1e-9)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("row_tokens", [0, 60])
@pytest.mark.usefixtures("in_float64")
def test_random_trees_with_a_mask_equal_rows(attention, row_tokens):
    torch.manual_seed(1)
    lm = FAMILIES["llama"]().double().eval()
    lm.set_attn_implementation(attention)
    for seed in (2, 3):
        assert_same(lm, trees(seed), 1e-9, PrefixTreePacking(row_tokens))


def experts_of(ids, lm, seed):
    """Recorded experts that depend on a token's prefix; some rows' differ from those of equal prefixes."""
    shape = (len(list(routers_of(lm))), lm.config.num_experts_per_tok)
    experts = torch.zeros(*ids.shape, *shape, dtype=torch.int16)
    chance = random.Random(seed)
    for number, row in enumerate(ids.tolist()):
        own = chance.randrange(2, len(row)) if chance.random() < 0.3 else len(row)  # from here on
        for place in range(len(row)):
            drawn = random.Random(str((row[: place + 1], number if place >= own else -1)))
            experts[number, place] = torch.tensor(
                [drawn.sample(range(lm.config.num_experts), shape[1]) for _ in range(shape[0])]
            )
    return experts


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("make", list(SPARSE.values()), ids=list(SPARSE))
@pytest.mark.usefixtures("in_float64")
def test_random_trees_with_replayed_experts_equal_rows(make, split, monkeypatch):
    """Six levels deep; where experts differ, equal tokens are computed apart."""
    monkeypatch.setattr(packing_module, "split_is_cheaper", lambda lm, spans, shape: split)
    lm = make().double().eval()
    lm.set_experts_implementation("eager")  # the grouped kernel takes no float64
    for seed in (0, 4):
        batch = trees(seed)
        experts = experts_of(batch[0], lm, seed)
        rows, packed = CausalPolicy(lm), CausalPolicy(lm, packing=PrefixTreePacking())
        expected = results(rows, *batch, experts=experts)
        for value, right in zip(results(packed, *batch, experts=experts), expected, strict=True):
            assert (value - right).norm() <= 1e-9 * right.norm()
        others = results(packed, *batch)[0]
        assert (others - expected[0])[batch[1]].abs().max() > 0.01, "the routers did not follow the experts"
        ids, mask, group_index = batch
        sizes = [
            packed.packing.features(lm, ids[:, :-1], mask[:, 1:], group_index, chosen)[1].num_tokens
            for chosen in (None, experts[:, :-1])
        ]
        assert sizes[0] < sizes[1] < mask.numel()


@pytest.mark.parametrize(
    "seeds",  # the first two trees of each family, and two hundred in a sweep
    [pytest.param(range(12), marks=pytest.mark.slow), pytest.param(range(12, 50), marks=pytest.mark.sweep)],
    ids=["sampled", "others"],
)
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_random_trees_equal_rows(split, checkpointing, seeds, monkeypatch, request):
    request.getfixturevalue("in_float64")
    monkeypatch.setattr(packing_module, "split_is_cheaper", lambda lm, spans, shape: split)
    for seed in seeds:
        torch.manual_seed(seed)
        lm = list(FAMILIES.values())[seed % len(FAMILIES)]().eval()
        if checkpointing:
            lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING)
            lm.train()
        for module in lm.modules():
            if isinstance(module, nn.Dropout):  # as `load_policy` does
                module.p = 0.0
        batch = trees(1000 * split + 100 * checkpointing + seed)
        assert_same(lm, batch, 1e-5)
        assert_same(lm.double(), batch, 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_each_prefix_is_computed_once_and_sees_its_ancestors(seed):
    ids, mask, group_index = trees(seed)
    rows = pack(ids[:, :-1], mask[:, 1:], group_index.tolist(), None)
    assert (rows.num_tokens, rows.num_pairs) == slow_tree(ids, mask, group_index)
    assert rows.until.shape == (1, rows.num_tokens)
    row, query, key = attention_mask(FAMILIES["llama"](), rows)[:, 0].nonzero().T
    first = ids[:, :-1].flatten()[rows.source[row, query]], ids[:, :-1].flatten()[rows.source[row, key]]
    assert len(query) == rows.num_pairs
    assert (rows.position[row, key] <= rows.position[row, query]).all()
    whole = {tuple(one[: end + 1]) for one in ids.tolist() for end in range(len(one))}
    for place in range(0, rows.num_tokens, 7):
        ancestors = first[1][query == place].tolist()
        assert tuple(ancestors) in whole
        assert len(ancestors) == int(rows.position[0, place]) + 1


@pytest.mark.usefixtures("always_split")
def test_a_model_that_changes_the_mask_gets_a_dense_one():
    lm = FAMILIES["llama"]().eval()
    ids, mask, group_index = trees(0)
    rows = pack(ids[:, :-1], mask[:, 1:], group_index.tolist(), None)
    tree = attention_mask(lm, rows)
    assert type(tree) is TreeMask
    dense = tree_mask(rows.until)
    assert tree.shape == dense.shape
    for changed, right in ((tree[..., :9], dense[..., :9]), (~tree, ~dense), (tree.clone(), dense)):
        assert type(changed) is torch.Tensor
        assert torch.equal(changed, right)
    query = torch.randn(1, 2, rows.num_tokens, 8)
    value = torch.randn(1, 2, rows.num_tokens, 4)  # the kernel that splits takes heads of one size
    sdpa = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(sdpa(query, query, value, attn_mask=tree), sdpa(query, query, value, attn_mask=dense))
    found = sdpa(query, query, query, attn_mask=tree, scale=0.3)
    torch.testing.assert_close(found, sdpa(query, query, query, attn_mask=dense, scale=0.3))


def test_small_trees_are_masked_and_large_ones_split():
    lm = FAMILIES["llama"]()
    for prompt, completions, is_split in ((7, (3,) * 8, False), (2000, (60,) * 8, True)):
        ids, mask, group_index = groups([(prompt, completions)] * 2)
        rows = PrefixTreePacking().layout(lm, ids[:, :-1], mask[:, 1:], group_index.tolist())
        assert isinstance(attention_mask(lm, rows), TreeMask) is is_split
        assert len(rows.until) == (1 if is_split else 2)


def test_tokens_whose_recorded_experts_differ_are_not_shared():
    lm = FAMILIES["llama"]().eval()
    ids, mask, group_index = groups([(6, (3, 3))])
    experts = torch.zeros(*ids.shape, 2, 1, dtype=torch.int16)
    experts[1, 2] = 1
    sizes = [
        PrefixTreePacking().features(lm, ids[:, :-1], mask[:, 1:], group_index, chosen)[1].num_tokens
        for chosen in (None, experts[:, :-1] * 0, experts[:, :-1])
    ]
    assert sizes == [10, 10, 14]


@pytest.mark.parametrize("name", ["SharedPromptPacking", "PrefixTreePacking"])
def test_the_former_name_works_in_files_of_settings_and_checkpoints(name):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--packing", type=get_type_hints(PolicyModule.__init__)["packing"])
    for text in (name, f"{{class_path: {name}, init_args: {{row_tokens: 0}}}}", "{row_tokens: 0}"):
        packing = parser.instantiate(parser.parse_args(["--packing", text])).packing
        assert isinstance(packing, PrefixTreePacking)
        assert packing.row_tokens == 0
    held, named = as_config({"model": {"packing": getattr(packing_module, name)(3)}})
    assert not named
    assert as_objects(held["model"]) == {"packing": getattr(packing_module, name)(3)}


def test_a_batch_of_padding_reaches_every_parameter():
    lm = FAMILIES["llama"]()
    policy = CausalPolicy(lm, packing=PrefixTreePacking())
    ids, mask = torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 2, dtype=torch.bool)
    policy(ids, mask, group_index=torch.tensor([-1])).logprobs.sum().backward()
    assert all(p.grad is not None for p in policy.parameters())


@pytest.mark.parametrize(("prompt", "completions"), [(12, (3,) * 8), (5, (1, 4, 2)), (1, (6, 6))])
def test_tokens_and_pairs_are_those_of_the_formula(prompt, completions):
    ids, mask, group_index = groups([(prompt, completions)])
    ids[:, prompt] = torch.arange(len(ids))  # completions differ from their first token on
    rows = pack(ids[:, :-1], mask[:, 1:], group_index.tolist())
    last_left_out = [n - 1 for n in completions]
    assert rows.num_tokens == prompt + sum(last_left_out)
    pairs = prompt * (prompt + 1) // 2 + sum(prompt * n + n * (n + 1) // 2 for n in last_left_out)
    assert rows.num_pairs == int(attention_mask(FAMILIES["llama"](), rows).sum()) == pairs


def test_groups_share_rows_up_to_the_limit():
    ids, mask, group_index = groups(MIXED)
    rows = {limit: pack(ids[:, :-1], mask[:, 1:], group_index.tolist(), limit) for limit in (0, 20, 1000)}
    assert [len(packed.uses) for packed in rows.values()] == [4, 2, 1]
    assert rows[20].uses.shape[1] <= 20
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
    packing = PrefixTreePacking(40)
    with torch.no_grad():
        expected = CausalPolicy(lm)(ids, mask).logprobs
        lm.set_attn_implementation("flex_attention")
        stats = CausalPolicy(lm, packing=packing)(ids, mask, group_index=group_index)
    assert stats.rows is not None
    assert stats.rows.uses.shape[1] == 128
    torch.testing.assert_close(stats.logprobs, expected, atol=1e-5, rtol=1e-5)


def test_the_layout_takes_one_transfer_from_the_device():
    lm = FAMILIES["llama"]().eval()
    ids, mask, group_index = groups(MIXED)
    with torch.no_grad(), DeviceWaits() as counted:
        features, rows = PrefixTreePacking(40).features(lm, ids[:, :-1], mask[:, 1:], group_index)
    assert counted.found["cpu"] == 1
    assert rows.uses.shape[1] <= 40
    assert len(features) == int(mask[:, 1:].sum())


def test_equal_rows_of_two_groups_share_nothing():
    lm = FAMILIES["llama"]().eval()
    ids, mask, group_index = groups(MIXED)
    given = ids[:, :-1], mask[:, 1:], group_index
    _, once = PrefixTreePacking().features(lm, *given)
    others = (*given[:2], group_index + len(MIXED))
    _, twice = PrefixTreePacking().features(lm, *(torch.cat(both) for both in zip(given, others, strict=True)))
    assert twice.num_tokens == 2 * once.num_tokens


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
        for packing in (None, PrefixTreePacking()):
            torch.manual_seed(3)
            module = make_module(packing=packing, optimizer=sgd, **options)
            fit(module, make_data(max_staleness=0), 3)
            ends.append(parameters(module))
        torch.testing.assert_close(ends[1], ends[0], atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("norms", [Norms.PER_TRAJECTORY, Norms.SCORE])
def test_an_optimal_baseline_that_does_not_depend_on_the_layout_makes_the_same_update(norms):
    ends = []
    for packing in (None, PrefixTreePacking()):
        module = make_module(packing=packing, loss=Reinforce(), baseline=OptimalBaseline(norms), optimizer=sgd)
        fit(module, make_data(max_staleness=0), 2)
        ends.append(parameters(module))
    torch.testing.assert_close(ends[1], ends[0], atol=1e-5, rtol=0)


def test_a_model_that_takes_no_tree_gets_rows_and_a_line(caplog):
    mamba = MambaForCausalLM(MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, state_size=4)).eval()
    batch = groups(MIXED)
    for _ in range(2):  # policy and reference
        policy = CausalPolicy(mamba, packing=PrefixTreePacking())
        assert policy.tree_costs is None
        stats = policy(*batch[:2], group_index=batch[2])
        assert stats.rows is None
    torch.testing.assert_close(stats.logprobs, CausalPolicy(mamba)(*batch[:2]).logprobs, atol=0, rtol=0)
    (line,) = [record.getMessage() for record in caplog.records if "model.packing" in record.getMessage()]
    assert line.endswith(
        "MambaForCausalLM has linear_attention layers, which take no mask; rows are computed separately"
    )


def test_what_cannot_be_packed_is_refused_by_name():
    with pytest.raises(ValueError, match="row_tokens"):
        PrefixTreePacking(-1)
    short = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=1, n_positions=8))
    with pytest.raises(ValueError, match="window has only 8 tokens"):
        CausalPolicy(short, packing=PrefixTreePacking())(*groups([(7, (4,))])[:2], group_index=torch.tensor([0]))
    flash = FAMILIES["llama"]()
    flash.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="flash_attention_2"):
        CausalPolicy(flash, packing=PrefixTreePacking())(*groups([(2, (4,))])[:2], group_index=torch.tensor([0]))


def test_lora_is_seen_through():
    torch.manual_seed(1)
    lm = add_lora(FAMILIES["llama"]().eval(), LoRA(rank=2))
    batch = groups(MIXED)
    found = CausalPolicy(lm, packing=PrefixTreePacking())(*batch[:2], group_index=batch[2]).logprobs
    torch.testing.assert_close(found, CausalPolicy(lm)(*batch[:2]).logprobs, atol=1e-5, rtol=0)


def test_records_share_rows_as_long_as_the_longest_where_a_mask_keeps_them_apart():
    """In fine-tuning each record is a group of its own: a row for each would save nothing."""
    lm = tiny_llama()
    lm.set_attn_implementation("eager")
    lengths = [12, 3, 4, 5, 6, 6]
    ids = torch.randint(2, 20, (len(lengths), max(lengths)))
    needed = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    rows = PrefixTreePacking().layout(lm, ids, needed, group_index=list(range(len(lengths))))
    assert rows.source.shape == (3, 12)
    plain, packed = CausalPolicy(lm), CausalPolicy(lm, packing=PrefixTreePacking())
    index = torch.arange(len(lengths))
    expected = plain(ids, needed, group_index=index).logprobs[needed]
    torch.testing.assert_close(packed(ids, needed, group_index=index).logprobs[needed], expected)
