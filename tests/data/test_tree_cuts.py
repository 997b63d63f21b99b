"""Micro-batches of trees: sizes are those of sets of prefixes, and every row is in one part."""

import random
from dataclasses import dataclass

import pytest

from lit_async_rl.data.tree_cuts import split_trees, tree_size


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
        assert tree_size(rollouts) == slow_size([row for rollout in rollouts for row in rollout])


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_parts", [1, 2, 3, 8, 40])
@pytest.mark.parametrize("keep_whole", [False, True])
def test_parts_hold_every_row_once_and_rollouts_whole(seed, num_parts, keep_whole):
    groups = random_groups(seed)
    parts = split_trees(groups, num_parts, keep_whole=keep_whole)
    assert len(parts) == num_parts
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
    assert [{row.tokens[0] for row in part} for part in split_trees([large, small], 2, keep_whole=False)] == [{1}, {3}]
    parts = split_trees([large], 2, keep_whole=False)
    assert [len(part) for part in parts] == [2, 2]
    assert [slow_size(part) for part in parts] == [43, 43]
