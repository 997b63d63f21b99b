"""Arrow schema of the rollout tape, one row per rollout.

`docs/checkpoints.md` describes the columns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import torch

from lit_async_rl.expert_choices import ExpertChoices
from lit_async_rl.sampler_head import SamplerHead
from lit_async_rl.types import Prompt, Rollout, RolloutGroup, Turn

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),  # optimizer step that was trained on it, from 0
        ("policy_version", pa.int64()),  # of the policy in that step
        ("group", pa.int64()),
        ("sample", pa.int32()),
        ("admitted_version", pa.int64()),
        ("prompt", pa.string()),
        ("answer", pa.string()),
        ("metadata", pa.string()),  # JSON
        ("prompt_ids", pa.list_(pa.int32())),
        ("completion_ids", pa.list_(pa.int32())),
        ("behavior_logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int64())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("finish_reason", pa.string()),
        ("text", pa.string()),
        ("reward", pa.float64()),
        ("generation_s", pa.float64()),
        ("queue_s", pa.float64()),
        ("turns", pa.list_(pa.struct([("end", pa.int32()), ("reward", pa.float64()), ("state", pa.int64())]))),
        ("written_at", pa.float64()),  # seconds since 1970
        ("head_width", pa.int32()),  # entries per token of the recorded distributions, null if there are none
        ("head_entropy", pa.list_(pa.float32())),
        ("head_ids", pa.list_(pa.int32())),  # of all tokens, one after the other
        ("head_logprobs", pa.list_(pa.float32())),
        ("expert_shape", pa.list_(pa.int32())),  # routers and experts per token of the chosen experts, null without
        ("experts", pa.list_(pa.int16())),  # of all tokens of prompt and completion but the last, one after the other
        ("messages", pa.string()),  # JSON, of prompts that are messages; their `prompt` is for reading
        ("sampling", pa.string()),  # JSON: settings that the log-probabilities depend on
    ]
)


def to_row(group: RolloutGroup, sample: int) -> dict[str, Any]:
    """Columns of one rollout except those of its step: `step`, `policy_version` and `written_at`."""
    rollout = group.rollouts[sample]
    return {
        "group": group.index,
        "sample": sample,
        "admitted_version": group.admitted_version,
        "prompt": group.prompt.text,
        "messages": None if group.prompt.messages is None else json.dumps(group.prompt.messages),
        "answer": group.prompt.answer,
        "metadata": json.dumps(dict(group.prompt.metadata), default=str),
        "prompt_ids": group.prompt_ids,
        "completion_ids": rollout.completion_ids,
        "behavior_logprobs": rollout.behavior_logprobs,
        "versions": rollout.versions,
        "loss_mask": rollout.loss_mask,
        "finish_reason": rollout.finish_reason,
        "text": rollout.text,
        "reward": rollout.reward,
        "generation_s": group.generation_s,
        "queue_s": group.queue_s,
        "turns": None if rollout.turns is None else [vars(turn) for turn in rollout.turns],
        **_head_columns(rollout.head),
        "expert_shape": None if rollout.experts is None else rollout.experts.shape,
        "experts": None if rollout.experts is None else rollout.experts.experts.flatten().numpy(),
    }


def from_rows(rows: Sequence[dict[str, Any]]) -> RolloutGroup:
    """The group with these rollouts, one row each."""
    head = rows[0]
    return RolloutGroup(
        index=head["group"],
        prompt=_prompt(head),
        prompt_ids=tuple(head["prompt_ids"]),
        rollouts=tuple(
            Rollout(
                completion_ids=tuple(row["completion_ids"]),
                behavior_logprobs=tuple(row["behavior_logprobs"]),
                versions=tuple(row["versions"]),
                finish_reason=row["finish_reason"],
                text=row["text"],
                reward=row["reward"],
                loss_mask=None if row["loss_mask"] is None else tuple(row["loss_mask"]),
                turns=_turns(row.get("turns")),  # tapes written before there were turns have no such column
                head=_head(row),
                experts=_experts(row),
            )
            for row in rows
        ),
        admitted_version=head["admitted_version"],
        generation_s=head["generation_s"],
        queue_s=head["queue_s"],
    )


def _head_columns(head: SamplerHead | None) -> dict[str, Any]:
    if head is None:
        return {"head_width": None, "head_entropy": None, "head_ids": None, "head_logprobs": None}
    entropy, ids, logprobs = (values.flatten().numpy() for values in head.tensors)
    return {"head_width": head.width, "head_entropy": entropy, "head_ids": ids, "head_logprobs": logprobs}


def _head(row: dict[str, Any]) -> SamplerHead | None:
    width = row.get("head_width")
    if width is None:
        return None
    length = len(row["head_entropy"])
    return SamplerHead(
        torch.tensor(row["head_entropy"], dtype=torch.float32),
        torch.tensor(row["head_ids"], dtype=torch.int32).reshape(length, width),
        torch.tensor(row["head_logprobs"], dtype=torch.float32).reshape(length, width),
    )


def _experts(row: dict[str, Any]) -> ExpertChoices | None:
    shape = row.get("expert_shape")  # older tapes have no such column
    if shape is None:
        return None
    return ExpertChoices(torch.tensor(row["experts"], dtype=torch.int16).reshape(-1, *shape))


def _prompt(row: dict[str, Any]) -> Prompt:
    messages = row.get("messages")  # older tapes have no such column
    what = {"text": row["prompt"]} if messages is None else {"messages": json.loads(messages)}
    return Prompt(**what, answer=row["answer"], metadata=json.loads(row["metadata"]))


def _turns(rows: list[dict[str, Any]] | None) -> tuple[Turn, ...] | None:
    return None if rows is None else tuple(Turn(**row) for row in rows)
