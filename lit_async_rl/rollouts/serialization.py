"""Groups admitted but not trained on as tensors of a checkpoint, without pickle.

Prompts are saved as positions in the stream, and their token ids are compared on loading. G groups, R completions of
all of them (finished or partial), N tokens of all completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from lit_async_rl.engines.base import Completion
from lit_async_rl.expert_choices import pack_choices, unpack_choices
from lit_async_rl.sampler_head import pack_heads, unpack_heads
from lit_async_rl.types import FinishReason, Turn

REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort")


@dataclass(frozen=True, kw_only=True)
class SavedGroup:
    """An admitted group.

    Attributes:
        index: `RolloutGroup.index`; `position`: of its prompt in the stream; `deadline`: last round it may train in.
        is_finished: whether all completions are present and scored.
        completions: finished ones, and partial ones with `finish_reason` `abort`.
    """

    index: int
    position: int
    prompt_ids: tuple[int, ...]
    admitted_version: int
    deadline: int
    generation_s: float = 0.0
    is_finished: bool = False
    completions: tuple[Completion, ...] = field(default=())


def pack_groups(groups: Sequence[SavedGroup]) -> dict[str, Tensor]:
    """Flat tensors: `groups` [G, 7], `generation_s` [G], `rows` [R, 4], `rewards` [R], and [N] for each token.

    Rollouts of several turns have `turns` [K, 3], row, end and state of each, and `turn_rewards` [K]. Recorded
    distributions are in `head_*` and chosen experts in `expert_*`, if there are any.
    """
    rows = [completion for group in groups for completion in group.completions]
    masks = [c.loss_mask if c.loss_mask is not None else (True,) * len(c.token_ids) for c in rows]
    heads = [
        [g.index, g.position, g.admitted_version, g.deadline, g.is_finished, len(g.completions), len(g.prompt_ids)]
        for g in groups
    ]
    labels = [[c.sample_index, len(c.token_ids), REASONS.index(c.finish_reason), c.loss_mask is not None] for c in rows]
    turns = [(n, turn) for n, c in enumerate(rows) if c.turns is not None for turn in c.turns]
    no_reward = float("nan")
    recorded = pack_heads([c.head for c in rows]) | pack_choices([c.experts for c in rows])
    return recorded | {
        "groups": torch.tensor(heads, dtype=torch.long).reshape(-1, 7),
        "generation_s": torch.tensor([group.generation_s for group in groups], dtype=torch.float64),
        "prompt_ids": _flat([g.prompt_ids for g in groups], torch.long),
        "rows": torch.tensor(labels, dtype=torch.long).reshape(-1, 4),
        "rewards": torch.tensor([no_reward if c.reward is None else c.reward for c in rows], dtype=torch.float64),
        "token_ids": _flat([c.token_ids for c in rows], torch.long),
        "logprobs": _flat([c.logprobs for c in rows], torch.float64),
        "versions": _flat([c.versions for c in rows], torch.long),
        "loss_mask": _flat(masks, torch.bool),
        "turns": torch.tensor([[n, turn.end, turn.state] for n, turn in turns], dtype=torch.long).reshape(-1, 3),
        "turn_rewards": torch.tensor([turn.reward for _, turn in turns], dtype=torch.float64),
    }


def _flat(values: Sequence[Sequence[Any]], dtype: torch.dtype) -> Tensor:
    return torch.tensor([value for row in values for value in row], dtype=dtype)


def unpack_groups(packed: dict[str, Tensor]) -> list[SavedGroup]:
    """Inverse of `pack_groups`: the saved groups."""
    lists = {name: tensor.tolist() for name, tensor in packed.items() if not name.startswith(("head_", "expert_"))}
    size = len(lists["rows"])
    heads, experts = unpack_heads(packed, size), unpack_choices(packed, size)
    groups, token, prompt_token, number = [], 0, 0, 0
    turns: dict[int, list[Turn]] = {}
    for (row, end, state), reward in zip(lists["turns"], lists["turn_rewards"], strict=True):
        turns.setdefault(row, []).append(Turn(end, reward, state))
    rows = iter(zip(lists["rows"], lists["rewards"], strict=True))
    for head, generation_s in zip(lists["groups"], lists["generation_s"], strict=True):
        index, position, version, deadline, is_finished, num_rows, prompt_length = head
        completions = []
        for (sample, length, reason, has_mask), reward in islice(rows, num_rows):
            here = slice(token, token := token + length)
            completions.append(
                Completion(
                    request_id=index,
                    sample_index=sample,
                    token_ids=tuple(lists["token_ids"][here]),
                    logprobs=tuple(lists["logprobs"][here]),
                    versions=tuple(lists["versions"][here]),
                    finish_reason=REASONS[reason],
                    loss_mask=tuple(lists["loss_mask"][here]) if has_mask else None,
                    reward=None if reward != reward else reward,
                    turns=tuple(turns[number]) if number in turns else None,
                    head=heads[number],
                    experts=experts[number],
                )
            )
            number += 1
        prompt_ids = lists["prompt_ids"][prompt_token : (prompt_token := prompt_token + prompt_length)]
        groups.append(
            SavedGroup(
                index=index,
                position=position,
                prompt_ids=tuple(prompt_ids),
                admitted_version=version,
                deadline=deadline,
                generation_s=generation_s,
                is_finished=bool(is_finished),
                completions=tuple(completions),
            )
        )
    return groups
