"""Rollouts for the viewer from a rollout tape, of evenly spaced steps. Imports torch and transformers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.replay.tape import Tape, TapeStep
from lit_async_rl.report.samples import as_group
from lit_async_rl.types import RolloutGroup

log = logging.getLogger(__name__)

MAX_TAPE_STEPS = 100
MAX_TAPE_TOKENS = 1024
Texts = Callable[[Sequence[int]], list[str]]


def tape_groups(folder: Path, texts: Texts | None, known_steps: set[int], max_bytes: int) -> list[dict[str, Any]]:
    """Groups of a tape for the page.

    Args:
        folder: folder of the tape.
        texts: returns the text of each token; None shows no single tokens.
        known_steps: steps to leave out.
        max_bytes: approximate limit of the total size.

    Raises:
        ValueError: a file is damaged.
    """
    tape = Tape(folder)
    groups: list[dict[str, Any]] = []
    remaining = max_bytes
    share = max_bytes // MAX_TAPE_STEPS
    for step in tape.evenly_spaced_steps(MAX_TAPE_STEPS):
        if step.step + 1 in known_steps:
            continue
        remaining_of_step = min(share, remaining)
        for group in step.groups:
            rows = [_row(step, group, sample, texts=texts) for sample in range(len(group.rollouts))]
            size = sum(len(row["completion"]) + 12 * len(row["tokens"] or ()) + 200 for row in rows)
            if size > remaining or (remaining_of_step < share and size > remaining_of_step):
                break
            remaining -= size
            remaining_of_step -= size
            if (group_for_page := as_group(rows)) is not None:
                groups.append(group_for_page)
    return groups


def token_texts(folder: Path) -> Texts | None:
    """Decodes tokens with the tokenizer of the run's model, from `config.yaml`; None if it is not on this machine."""
    try:
        model = yaml.safe_load((folder / "config.yaml").read_text())["model"]["model"]
        return TextCodec(model).token_texts if Path(model).is_dir() else None
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        log.info("no tokenizer for %s: %s", folder, error)
        return None


def _row(step: TapeStep, group: RolloutGroup, sample: int, texts: Texts | None) -> dict[str, Any]:
    rollout = group.rollouts[sample]
    ids = rollout.token_ids[:MAX_TAPE_TOKENS]
    num_left_out = len(rollout.token_ids) - MAX_TAPE_TOKENS
    return {
        "step": step.step + 1,  # counted from 1, as in samples.jsonl
        "group": group.index,
        "sample": sample,
        "prompt": group.prompt.text,
        "messages": group.prompt.messages,
        "answer": group.prompt.answer,
        "completion": rollout.text,
        "reward": rollout.reward,
        "reward_parts": rollout.reward_parts,
        "policy_version": step.version,
        "oldest_version": min(rollout.all_versions, default=None),
        "newest_version": max(rollout.all_versions, default=None),
        "finish_reason": rollout.finish_reason,
        "num_tokens": len(rollout.token_ids),
        "turns": None if rollout.turns is None else [vars(turn) for turn in rollout.turns],
        "tokens": None if texts is None else texts(ids),
        "versions": rollout.versions[:MAX_TAPE_TOKENS],
        "mask": None if rollout.loss_mask is None else [int(trains) for trains in rollout.loss_mask[:MAX_TAPE_TOKENS]],
        "cut": (MAX_TAPE_TOKENS, num_left_out) if num_left_out > 0 else None,
    }
