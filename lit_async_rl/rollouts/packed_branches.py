"""Branches and turns of completions as flat tensors of a checkpoint, without pickle.

R completions, K branches of all of them, N tokens of all branches, P tokens that completions or branches follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lit_async_rl.sampler_records import pack_choices, pack_heads, unpack_choices, unpack_heads
from lit_async_rl.types import Branch, Completion, TokenRow, Turn

PREFIX = "branch_"


def pack_branches(completions: Sequence[Completion]) -> dict[str, Tensor]:
    """Own prompts, credits and branches of completions; empty if none has any.

    `branch_own` [R] is the length of each completion's prompt, -1 for its group's, and `branch_own_credit` [R] its
    credit. `branch_rows` [K, 3] is the completion of each branch and the lengths of its prompt and tokens; the other
    tensors hold one value for each branch or token, prompts of completions first.
    """
    if not any(c.prompt_ids is not None or c.credit != 1 or c.branches for c in completions):
        return {}
    owned = [(number, branch) for number, c in enumerate(completions) for branch in c.branches]
    branches = [branch for _, branch in owned]
    prompts = [c.prompt_ids or () for c in completions] + [branch.prompt_ids for branch in branches]
    rows = [[number, len(branch.prompt_ids), len(branch.token_ids)] for number, branch in owned]
    recorded = (
        pack_heads([b.head for b in branches]) | pack_choices([b.experts for b in branches]) | pack_turns(branches)
    )
    return {f"{PREFIX}{name}": values for name, values in recorded.items()} | {
        "branch_own": torch.tensor([-1 if c.prompt_ids is None else len(c.prompt_ids) for c in completions]),
        "branch_own_credit": torch.tensor([c.credit for c in completions], dtype=torch.float64),
        "branch_rows": torch.tensor(rows, dtype=torch.long).reshape(-1, 3),
        "branch_credit": torch.tensor([b.credit for b in branches], dtype=torch.float64),
        "branch_prompt_ids": torch.tensor([token for ids in prompts for token in ids], dtype=torch.long),
        "branch_token_ids": torch.tensor([token for b in branches for token in b.token_ids], dtype=torch.long),
        "branch_logprobs": torch.tensor([value for b in branches for value in b.logprobs], dtype=torch.float64),
        "branch_versions": torch.tensor([version for b in branches for version in b.versions], dtype=torch.long),
        "branch_loss_mask": torch.tensor([on for b in branches for on in b.loss_mask], dtype=torch.bool),
    }


def unpack_branches(packed: dict[str, Tensor], number: int) -> list[dict[str, Any]]:
    """Inverse of `pack_branches`: its fields of each of `number` completions, empty if it saved none."""
    if "branch_own" not in packed:
        return [{}] * number
    recorded = {name.removeprefix(PREFIX): values for name, values in packed.items() if name.startswith(PREFIX)}
    own = packed["branch_own"].tolist()
    rows = packed["branch_rows"].tolist()
    prompt_sizes = [max(0, length) for length in own] + [length for _, length, _ in rows]
    prompts = [tuple(part.tolist()) for part in packed["branch_prompt_ids"].split(prompt_sizes)]
    sizes = [length for _, _, length in rows]
    names = ("token_ids", "logprobs", "versions", "loss_mask")
    tokens = [[tuple(part.tolist()) for part in packed[f"{PREFIX}{name}"].split(sizes)] for name in names]
    heads = unpack_heads(recorded, len(rows))
    experts = unpack_choices(recorded, len(rows))
    turns = unpack_turns(recorded)
    branches: list[list[Branch]] = [[] for _ in range(number)]
    for n, ((completion, _, _), credit) in enumerate(zip(rows, packed["branch_credit"].tolist(), strict=True)):
        branch = Branch(
            prompt_ids=prompts[number + n],
            token_ids=tokens[0][n],
            logprobs=tokens[1][n],
            versions=tokens[2][n],
            loss_mask=tokens[3][n],
            head=heads[n],
            experts=experts[n],
            credit=credit,
            turns=turns.get(n),
        )
        branches[completion].append(branch)
    return [
        {"prompt_ids": None if length < 0 else prompts[n], "credit": credit, "branches": tuple(branches[n])}
        for n, (length, credit) in enumerate(zip(own, packed["branch_own_credit"].tolist(), strict=True))
    ]


def pack_turns(rows: Sequence[TokenRow]) -> dict[str, Tensor]:
    """Turns of rows: `turns` [K, 3], row, end and state of each, `turn_rewards` and `turn_calls` [K], -1 for None."""
    turns = [(n, turn) for n, row in enumerate(rows) for turn in row.turns or ()]
    return {
        "turns": torch.tensor([[n, turn.end, turn.state] for n, turn in turns], dtype=torch.long).reshape(-1, 3),
        "turn_rewards": torch.tensor([turn.reward for _, turn in turns], dtype=torch.float64),
        "turn_calls": torch.tensor([-1 if turn.call is None else turn.call for _, turn in turns], dtype=torch.long),
    }


def unpack_turns(packed: Mapping[str, Tensor]) -> dict[int, tuple[Turn, ...]]:
    """Inverse of `pack_turns`, by row; earlier checkpoints have no calls, and none of branches."""
    if "turns" not in packed:
        return {}
    places = packed["turns"].tolist()
    calls = packed["turn_calls"].tolist() if "turn_calls" in packed else [-1] * len(places)
    turns: dict[int, list[Turn]] = {}
    for (row, end, state), reward, call in zip(places, packed["turn_rewards"].tolist(), calls, strict=True):
        turns.setdefault(row, []).append(Turn(end, reward, state, call=None if call < 0 else call))
    return {row: tuple(own) for row, own in turns.items()}
