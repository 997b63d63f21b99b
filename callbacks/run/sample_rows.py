"""Rows of `samples.jsonl`: a rollout with its tokens, and each token's values in the step that trained on it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.types import Rollout, RolloutBatch, RolloutGroup
from lit_async_rl.utils.files import replacing

SIGNALS = {"log_ratio": "log_ratios", "advantages": "advantages", "entropy": "entropies"}
STEP = re.compile(r'\{"step": (\d+)')


class TrainedTokens:
    """Log-ratio, advantage and entropy of each token of some groups, from the micro-batches of this rank."""

    def __init__(self) -> None:
        self.version: int | None = None
        self._found: defaultdict[tuple[Any, ...], list[dict[str, list[float]]]] = defaultdict(list)

    def add(self, batch: RolloutBatch, signals: Mapping[str, Any], groups: Collection[int]) -> None:
        """Adds one micro-batch: its rows that belong to `groups`, by index."""
        self.version = signals.get("version", self.version)
        for row, index in enumerate(batch.group_index.tolist()):
            if index not in groups:
                continue
            there = batch.attention_mask[row]
            key = index, tuple(batch.input_ids[row][there].tolist()), tuple(batch.versions[row][there].tolist())
            values = {SIGNALS[name]: signals[name][row][there] for name in SIGNALS if name in signals}
            self._found[key].append({name: [round(v, 4) for v in value.tolist()] for name, value in values.items()})

    def take(self, group: RolloutGroup, rollout: Rollout) -> dict[str, list[float]]:
        """Values of the completion's tokens; empty for a rollout that another rank, or no one, trained on."""
        begin = len(group.prompt_ids)
        found = self._found[
            (group.index, (*group.prompt_ids, *rollout.completion_ids), (0,) * begin + rollout.versions)
        ]
        return {name: values[begin:] for name, values in found.pop(0).items()} if found else {}


def sample_row(
    group: RolloutGroup, sample: int, codec: TextCodec, trained: TrainedTokens, max_tokens: int
) -> dict[str, Any]:
    """Columns of one rollout that are not in the loggers' tables.

    Per-token lists hold at most `max_tokens` entries: of longer completions the beginning and the end, and `cut` is the
    position and length of the part left out.
    """
    rollout = group.rollouts[sample]
    length = len(rollout.completion_ids)
    kept, cut = _kept(length, max_tokens)
    tokens: dict[str, Sequence[Any]] = {
        "tokens": codec.token_texts([rollout.completion_ids[n] for n in kept]),
        "versions": [rollout.versions[n] for n in kept],
        "logprobs": [round(rollout.behavior_logprobs[n], 4) for n in kept],
    }
    if rollout.loss_mask is not None:
        tokens["mask"] = [int(rollout.loss_mask[n]) for n in kept]
    tokens |= {name: [values[n] for n in kept] for name, values in trained.take(group, rollout).items()}
    row: dict[str, Any] = {
        "sample": sample,
        "policy_version": trained.version,
        "finish_reason": rollout.finish_reason,
        "num_tokens": length,
        "generation_s": round(group.generation_s, 4),
        "queue_s": round(group.queue_s, 4),
        **tokens,
    }
    if cut is not None:
        row["cut"] = cut
    if group.prompt.messages is not None:
        row["messages"] = group.prompt.messages
    if rollout.turns is not None:
        row["turns"] = [vars(turn) for turn in rollout.turns]
    return row


def _kept(length: int, max_tokens: int) -> tuple[Sequence[int], tuple[int, int] | None]:
    """Positions to keep, three quarters of them at the beginning, and the gap."""
    if length <= max_tokens:
        return range(length), None
    end = max_tokens // 4
    begin = max_tokens - end
    return [*range(begin), *range(length - end, length)], (begin, length - max_tokens)


def thin(path: Path, max_bytes: int) -> None:
    """Drops every second step of a table until it has at most `max_bytes`; the last step stays."""
    while path.stat().st_size > max_bytes:
        with path.open() as lines:
            steps = sorted({step for line in lines if (step := _step(line)) is not None})
        kept = set(steps[::-1][::2])
        if len(kept) == len(steps):
            return
        with path.open() as lines, replacing(path) as new:
            new.writelines(line.encode() for line in lines if _step(line) in kept)


def _step(line: str) -> int | None:
    found = STEP.match(line)
    return None if found is None else int(found[1])
