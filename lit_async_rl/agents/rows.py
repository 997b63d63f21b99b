"""From the turns of an episode to the rows of tokens that train.

Each turn of the policy that trains does so in exactly one row, with all tokens before it as context. Each leaf, where a
conversation ends, is a row; what leaves have in common trains in the first of them, the main conversation's before all
others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lit_async_rl.agents.credit import BranchCredit, BranchInfo
from lit_async_rl.agents.graph import SampledTurn
from lit_async_rl.environments.episode_engine import GrowingRow, hash63
from lit_async_rl.errors import EnvironmentFailure
from lit_async_rl.types import Branch, Completion, GenerationRequest


@dataclass(frozen=True)
class Row:
    """A row of an episode.

    Attributes:
        tokens: the row.
        own: turns that train in it.
    """

    tokens: Branch
    own: tuple[SampledTurn, ...]

    @property
    def leaf(self) -> SampledTurn:
        """Its last turn."""
        return self.own[-1]


def trained_turns(turns: Sequence[SampledTurn]) -> list[SampledTurn]:
    """Turns that train: their reply has reached the agent, or was continued, and they are no side calls."""
    kept: set[int] = set()
    for turn in reversed(turns):  # a turn comes before those that continue it
        if turn.is_kept or id(turn) in kept:
            kept.add(id(turn))
            if turn.parent is not None:
                kept.add(id(turn.parent))
    return [turn for turn in turns if id(turn) in kept and not turn.is_side]


def rows_of(turns: Sequence[SampledTurn]) -> list[Row]:
    """The rows of an episode, that of the first call first; empty if nothing trains."""
    trained = trained_turns(turns)
    if not trained:
        return []
    continued = {id(turn.parent) for turn in trained}
    leaves = [turn for turn in trained if id(turn) not in continued]
    first = trained[0]
    of_first = [leaf for leaf in leaves if first in leaf.path]
    main = of_first[-1]
    taken: set[int] = set()
    rows = []
    for leaf in [main, *(leaf for leaf in leaves if leaf is not main)]:
        rows.append(_row(leaf, taken))
        taken.update(id(turn) for turn in leaf.path)
    return rows


def _row(leaf: SampledTurn, taken: set[int]) -> Row:
    """The row of a conversation; turns `taken` train elsewhere."""
    path = leaf.path
    begin = next(n for n, turn in enumerate(path) if id(turn) not in taken)
    own = path[begin:]
    before = () if begin == 0 else path[begin - 1].ids
    prompt_ids = before + own[0].given_ids
    row = GrowingRow()
    for turn in path[:begin]:
        row.add_experts(turn.completion)
    for turn in own:
        if row.turns:
            row.add_given(turn.given_ids)
        row.add_sampled(turn.completion, hash63(turn.given_text), call=turn.call)
    return Row(Branch(prompt_ids=prompt_ids, **row.fields(len(prompt_ids))), own=tuple(own))


def completion_of(
    request: GenerationRequest,
    sample_index: int,
    turns: Sequence[SampledTurn],
    credit: BranchCredit,
) -> Completion:
    """The sample without its reward.

    Raises:
        EnvironmentFailure: no turn of the policy trains.
        ValueError: the credit is not one finite number for each row.
    """
    rows = rows_of(turns)
    if not rows:
        raise EnvironmentFailure("the agent did not read the reply to any of its calls")
    credits = [float(value) for value in credit(tuple(_info(row, number) for number, row in enumerate(rows)))]
    if len(credits) != len(rows) or not all(map(math.isfinite, credits)):
        raise ValueError(f"{type(credit).__name__} must return {len(rows)} finite numbers, got {credits}")
    main, *others = (replace(row.tokens, credit=value) for row, value in zip(rows, credits, strict=True))
    return Completion(
        **(vars(main) | {"prompt_ids": None if main.prompt_ids == request.prompt_ids else main.prompt_ids}),
        request_id=request.id,
        sample_index=sample_index,
        finish_reason="length" if rows[0].leaf.completion.finish_reason == "length" else "stop",
        branches=tuple(others),
    )


def _info(row: Row, number: int) -> BranchInfo:
    return BranchInfo(
        is_main=number == 0,
        last_call=row.leaf.call,
        num_turns=len(row.own),
        num_tokens=row.tokens.num_own_tokens,
        system=row.leaf.system,
    )
