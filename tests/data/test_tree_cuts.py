"""Micro-batches of trees: sizes are those of sets of prefixes, and every row is in one part."""

import csv
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from flow import fit, make_data, make_module
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from lit_async_rl.advantages.group import GroupMeanStd
from lit_async_rl.callbacks import RunSummary, ThroughputMonitor
from lit_async_rl.data.collate import collate_step
from lit_async_rl.data.tree_cuts import TreeSizes, split_trees
from lit_async_rl.losses.aggregation import TokenMean
from lit_async_rl.models.packing import PrefixTreePacking
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.problem import Prompt
from lit_async_rl.training.token_stats import token_stats
from lit_async_rl.training.trackers import CSVLog
from lit_async_rl.types import Rollout, RolloutGroup


@dataclass(frozen=True)
class Row:
    tokens: tuple[int, ...]
    rollout: int


def random_groups(seed, num_groups=4):
    """Rollouts of one to three rows that begin with the tokens of an earlier row."""
    chance = random.Random(seed)
    groups = []
    for index in range(num_groups):
        rows = [(index, 1, 2)]
        rollouts = []
        for n in range(chance.randrange(1, 7)):
            own = []
            for _ in range(chance.randrange(1, 4)):
                start = chance.choice(rows)[: chance.randrange(1, 12)]
                rows.append(start + tuple(chance.randrange(3) for _ in range(chance.randrange(1, 9))))
                own.append(Row(rows[-1], n))
            rollouts.append(own)
        groups.append(rollouts)
    return groups


def slow_size(rows):
    return len({row.tokens[:end] for row in rows for end in range(1, len(row.tokens) + 1)})


@pytest.mark.parametrize("seed", range(20))
def test_a_tree_has_as_many_tokens_as_prefixes(seed):
    for rollouts in random_groups(seed):
        rows = [row for rollout in rollouts for row in rollout]
        sizes = TreeSizes.of(sorted(row.tokens for row in rows))
        assert sizes.of_part(range(len(rows))) == slow_size(rows)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_parts", [1, 2, 3, 8, 40])
@pytest.mark.parametrize("keep_whole", [False, True])
def test_parts_hold_every_row_once_and_rollouts_whole(seed, num_parts, keep_whole):
    groups = random_groups(seed)
    found = split_trees(groups, num_parts, keep_whole=keep_whole)
    parts = [part.rows for part in found]
    assert len(parts) == num_parts
    assert [sum(tree.num_tokens for tree in part.trees) for part in found] == list(map(slow_size, parts))
    for part in found:
        prefixes = {row.tokens[:end] for row in part.rows for end in range(1, len(row.tokens) + 1)}
        assert sum(tree.num_pairs for tree in part.trees) == sum(map(len, prefixes))
        ends = {row.tokens for row in part.rows}
        forks = Counter(prefix[:-1] for prefix in prefixes)
        branchings = {prefix for prefix, number in forks.items() if prefix and (number > 1 or prefix in ends)}
        assert sum(tree.num_calls for tree in part.trees) <= len(part.rows) + 2 * len(branchings)
    rows = [row for group in groups for rollout in group for row in rollout]
    assert sorted(map(id, rows)) == sorted(id(row) for part in parts for row in part)
    where = {id(row): n for n, part in enumerate(parts) for row in part}
    units = groups if keep_whole else [[rollout] for group in groups for rollout in group]
    for unit in units:
        assert len({where[id(row)] for rollout in unit for row in rollout}) == 1
    largest = max(map(slow_size, parts))
    total = sum(slow_size([row for rollout in group for row in rollout]) for group in groups)
    biggest = max(slow_size([row for rollout in unit for row in rollout]) for unit in units)
    assert largest <= total / num_parts + max(
        slow_size([row for rollout in group for row in rollout]) for group in groups
    )
    assert largest >= biggest


def test_a_tree_is_cut_only_if_it_is_larger_than_a_micro_batch():
    small = [[Row((1, 2, n), n)] for n in range(2)]
    large = [[Row((3, *range(40), n), n)] for n in range(4)]
    parts = [part.rows for part in split_trees([large, small], 2, keep_whole=False)]
    assert [{row.tokens[0] for row in part} for part in parts] == [{1}, {3}]
    parts = [part.rows for part in split_trees([large], 2, keep_whole=False)]
    assert [len(part) for part in parts] == [2, 2]
    assert [slow_size(part) for part in parts] == [43, 43]


# -- trees or rows ----------------------------------------------------------------------------------------------------


SIZE = dict(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)


def made_groups(prompt, completions):
    """Two groups of completions of these lengths."""
    chance = random.Random(0)
    found = []
    for index in range(2):
        rollouts = [
            Rollout(
                token_ids=tuple(chance.randrange(3, 40) for _ in range(length)),
                logprobs=(-1.0,) * length,
                versions=(0,) * length,
                finish_reason="stop",
                reward=float(n),
            )
            for n, length in enumerate(completions)
        ]
        prompt_ids = tuple(chance.randrange(3, 40) for _ in range(prompt))
        group = RolloutGroup(
            index=index, prompt=Prompt(text=""), prompt_ids=prompt_ids, rollouts=tuple(rollouts), admitted_version=0
        )
        found.append(group)
    return found


def collated(groups, policy=None, **changes):
    costs = None if policy is None else policy.tree_costs
    settings = dict(advantage=GroupMeanStd(), aggregation=TokenMean(), num_micro_batches=2, tree_costs=costs)
    return collate_step(groups, pad_token_id=0, temperature=1.0, **(settings | changes))


def llama(attention):
    lm = LlamaForCausalLM(LlamaConfig(**SIZE)).eval()
    lm.set_attn_implementation(attention)
    return CausalPolicy(lm, packing=PrefixTreePacking())


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
def test_where_much_is_shared_trees_are_computed(attention):
    groups = made_groups(60, (3, 4, 5, 2))
    batches = collated(groups, policy := llama(attention))
    expected = collated(groups, shares_prefixes=True)
    for batch, other in zip(batches, expected, strict=True):
        assert not batch.as_rows
        assert torch.equal(batch.input_ids, other.input_ids)
    if attention != "flex_attention":  # which has no backward pass on a CPU, and compiles for minutes
        assert token_stats(policy, batches[0]).rows is not None


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_where_a_tree_would_lose_rows_are_computed_and_say_why(attention):
    groups = made_groups(2, (200, 10, 190, 180))
    policy = llama(attention)
    batches = collated(groups, policy)
    if attention == "sdpa":  # split at branches, a tree computes no more than rows
        assert not any(batch.as_rows for batch in batches)
        return
    for batch, other in zip(batches, collated(groups), strict=True):
        assert batch.as_rows == "trees would take longer, because rows have 1% of their tokens in common"
        for name in ("input_ids", "token_weights", "advantages", "group_index"):
            assert torch.equal(getattr(batch, name), getattr(other, name))
        assert token_stats(policy, batch).rows is None


def test_rows_longer_than_a_sliding_window_are_computed_separately():
    lm = MistralForCausalLM(MistralConfig(**SIZE, num_key_value_heads=2, sliding_window=50)).eval()
    policy = CausalPolicy(lm, packing=PrefixTreePacking())
    assert not any(batch.as_rows for batch in collated(made_groups(40, (9, 9, 9)), policy))
    batches = collated(groups := made_groups(60, (9, 9, 9)), policy)
    assert {batch.as_rows for batch in batches} == {"the longest has 69 tokens, and the model's attention window 50"}
    for batch, other in zip(batches, collated(groups), strict=True):
        found = token_stats(policy, batch).logprobs
        assert torch.equal(found, token_stats(CausalPolicy(lm), other).logprobs)


@pytest.mark.parametrize("is_tree", [True, False])
def test_a_run_says_what_was_saved_and_once_that_rows_are_computed(is_tree, tmp_path, caplog, monkeypatch):
    if not is_tree:
        monkeypatch.setattr("lit_async_rl.models.packing.rows_cost", lambda lm, num_rows, length: 0.0)
    module = make_module(packing=PrefixTreePacking())
    summary = RunSummary()
    log = CSVLog(tmp_path, name="", version="")
    data = make_data(max_staleness=0)
    trainer = fit(module, data, 2, [ThroughputMonitor(), summary], logger=log, log_every_n_steps=1)
    with Path(tmp_path, "metrics.csv").open(newline="") as file:
        shares = [float(row["perf/computed_share"]) for row in csv.DictReader(file) if row["perf/computed_share"]]
    said = [record.getMessage() for record in caplog.records if "model.packing" in record.getMessage()]
    table = summary.table(trainer)
    cells = dict(zip(*(column.cells for column in table.columns), strict=True))
    assert len(shares) == 2
    if is_tree:
        assert max(shares) < 1
        assert not said
        groups = [[[group.prompt_ids + r.token_ids] for r in group.rollouts] for group in data.last_step_groups]
        needed = [[row[:-1] for (row,) in group] for group in groups]
        computed = sum(len({row[:end] for row in group for end in range(1, len(row) + 1)}) for group in needed)
        assert shares[-1] == pytest.approx(computed / sum(len(row) for group in needed for row in group))
        assert cells["tokens computed"] == f"{sum(shares) / 2:.0%} of those of separate rows"
    else:
        assert shares == [1.0, 1.0]
        (line,) = said
        assert "rows are computed separately, not as trees of shared prefixes: trees would take longer" in line
        assert cells["tokens computed"] == "100% of those of separate rows"
