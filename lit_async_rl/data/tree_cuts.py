"""Micro-batches of prefix trees: cut between trees, and within those larger than a micro-batch.

A tree is a group, whose rows share prefixes (`PrefixTreePacking`). Its size is the number of computed tokens, each
shared prefix once. It is cut between rollouts, whose rows stay together; each part computes the prefix that parts have
in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from lit_async_rl.models.tree_attention import TreeWork


@runtime_checkable
class TokenSequence(Protocol):
    """A row of tokens."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """All of them."""


Row = TypeVar("Row", bound=TokenSequence)


@dataclass(frozen=True)
class TreePart(Generic[Row]):
    """A micro-batch: its rows, and the work of each of its trees."""

    rows: list[Row]
    trees: list[TreeWork]


@dataclass(frozen=True)
class TreeSizes:
    """Sizes of parts of a tree. Rows are numbered in the order of their tokens.

    Attributes:
        lengths: of the rows.
        common: tokens that each row has in common with its predecessor.
    """

    lengths: Sequence[int]
    common: Sequence[int]

    @classmethod
    def of(cls, rows: Sequence[tuple[int, ...]]) -> TreeSizes:
        """Sizes of the tree of some rows, in the order of their tokens."""
        common = [0, *(_num_common(*pair) for pair in pairwise(rows))]
        return cls([len(row) for row in rows], common)

    def of_part(self, numbers: Sequence[int]) -> int:
        """Number of tokens of the tree of some rows, by their numbers in ascending order."""
        return sum(length - shared for length, shared in self._rows(numbers))

    def work(self, numbers: Sequence[int]) -> TreeWork:
        """Work of the tree of some rows, likewise."""
        rows = list(self._rows(numbers))
        pairs = sum(length * (length + 1) - shared * (shared + 1) for length, shared in rows) // 2
        num_branchings = 0
        depths = [0]  # of the branchings on the path to the present row
        for _, shared in rows:
            while depths[-1] > shared:
                depths.pop()
            if depths[-1] < shared:
                depths.append(shared)
                num_branchings += 1
        num_tokens = sum(length - shared for length, shared in rows)
        return TreeWork(num_tokens, pairs, num_calls=len(rows) + 2 * num_branchings)

    def _rows(self, numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Length of each row, and number of its tokens that earlier ones have."""
        before = None
        for number in numbers:
            yield self.lengths[number], 0 if before is None else min(self.common[before + 1 : number + 1])
            before = number


def _num_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Length of the common prefix, by bisection: slices compare at once."""
    low = 0
    high = min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True, eq=False)
class _Tree:
    """A group: its rollouts by the order of their first rows, and the row numbers of each."""

    rollouts: Sequence[Sequence[TokenSequence]]
    numbers: Sequence[Sequence[int]]
    sizes: TreeSizes

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self.of_part(range(len(self.rollouts)))

    def of_part(self, rollouts: Sequence[int]) -> int:
        """Number of tokens of some rollouts."""
        return self.sizes.of_part(self._numbers(rollouts))

    def work(self, rollouts: Sequence[int]) -> TreeWork:
        """Work of some rollouts."""
        return self.sizes.work(self._numbers(rollouts))

    def _numbers(self, rollouts: Sequence[int]) -> list[int]:
        return sorted(number for n in rollouts for number in self.numbers[n])


def _tree(rollouts: Sequence[Sequence[TokenSequence]]) -> _Tree:
    rows = sorted((row.tokens, n) for n, rollout in enumerate(rollouts) for row in rollout)
    numbers: dict[int, list[int]] = {}
    for number, (_, n) in enumerate(rows):
        numbers.setdefault(n, []).append(number)
    sizes = TreeSizes.of([tokens for tokens, _ in rows])
    return _Tree([rollouts[n] for n in numbers], list(numbers.values()), sizes)


def split_trees(groups: Sequence[Sequence[Sequence[Row]]], num_parts: int, keep_whole: bool) -> list[TreePart[Row]]:
    """Partitions groups into `num_parts` parts, the largest as small as this search finds.

    Groups are sorted by size. Parts may be empty.

    Args:
        groups: rows of each rollout of each group.
        num_parts: number of micro-batches.
        keep_whole: never cut a group.
    """
    trees = sorted((_tree(group) for group in groups if group), key=lambda tree: tree.size)
    sizes = [tree.size for tree in trees]
    uncut = sizes if keep_whole else [tree.of_part([n]) for tree in trees for n in range(len(tree.rollouts))]
    high = sum(sizes)
    low = max([-(-high // num_parts), *uncut])
    while low < high:
        middle = (low + high) // 2
        if len(_fill(trees, sizes, middle, keep_whole=keep_whole)) <= num_parts:
            high = middle
        else:
            low = middle + 1
    found: list[TreePart[Row]] = []
    for part in _fill(trees, sizes, high, keep_whole=keep_whole):
        rows: Any = [row for tree, n in part for row in tree.rollouts[n]]
        members = [(tree, [n for _, n in pieces]) for tree, pieces in groupby(part, key=lambda piece: piece[0])]
        found.append(TreePart(rows, [tree.work(rollouts) for tree, rollouts in members]))
    return found + [TreePart([], []) for _ in range(num_parts - len(found))]


def _fill(
    trees: Sequence[_Tree], sizes: Sequence[int], capacity: int, keep_whole: bool
) -> list[list[tuple[_Tree, int]]]:
    """Parts of at most `capacity` tokens, in order; only trees that exceed it are cut."""
    parts: list[list[tuple[_Tree, int]]] = []
    used = capacity + 1  # of the last part
    for tree, size in zip(trees, sizes, strict=True):
        whole = range(len(tree.rollouts))
        pieces = [whole] if keep_whole or size <= capacity else [range(n, n + 1) for n in whole]
        before = used
        begun: list[int] = []  # rollouts of the tree in the last part
        for piece in pieces:
            enlarged = before + (size if piece is whole else tree.of_part([*begun, *piece]))
            if enlarged > capacity:
                parts.append([])
                before = 0
                begun = []
                enlarged = size if piece is whole else tree.of_part(piece)
            begun += piece
            used = enlarged
            parts[-1] += [(tree, n) for n in piece]
    return parts
