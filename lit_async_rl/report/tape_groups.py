"""Rollouts for the viewer from a rollout tape, which has all of them; only files of evenly spaced steps are read."""

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

MAX_STEPS, MAX_TOKENS = 100, 1024
Texts = Callable[[Sequence[int]], list[str]]
log = logging.getLogger(__name__)


def tape_groups(folder: Path, texts: Texts | None, known_steps: set[int], max_bytes: int) -> list[dict[str, Any]]:
    """Groups of steps that are not known yet, at most `max_bytes` of them.

    Raises:
        ValueError: a file is damaged.
    """
    tape = Tape(folder)
    found: list[dict[str, Any]] = []
    left = max_bytes
    share = max_bytes // MAX_STEPS
    for step in tape.some_steps(MAX_STEPS):
        if step.step + 1 in known_steps:
            continue
        of_step = min(share, left)
        for group in step.groups:
            rows = [_row(step, group, sample, texts) for sample in range(len(group.rollouts))]
            size = sum(len(row["completion"]) + 12 * len(row["tokens"] or ()) + 200 for row in rows)
            if size > left or (of_step < share and size > of_step):
                break
            left, of_step = left - size, of_step - size
            if (made := as_group(rows)) is not None:
                found.append(made)
    return found


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
    ids = rollout.completion_ids[:MAX_TOKENS]
    cut = None if len(rollout.completion_ids) <= MAX_TOKENS else (MAX_TOKENS, len(rollout.completion_ids) - MAX_TOKENS)
    return {
        "step": step.step + 1,  # counted from 1, as in samples.jsonl
        "group": group.index,
        "sample": sample,
        "prompt": group.prompt.text,
        "messages": group.prompt.messages,
        "answer": group.prompt.answer,
        "completion": rollout.text,
        "reward": rollout.reward,
        "policy_version": step.version,
        "oldest_version": min(rollout.versions, default=None),
        "newest_version": max(rollout.versions, default=None),
        "finish_reason": rollout.finish_reason,
        "num_tokens": len(rollout.completion_ids),
        "turns": None if rollout.turns is None else [vars(turn) for turn in rollout.turns],
        "tokens": None if texts is None else texts(ids),
        "versions": rollout.versions[:MAX_TOKENS],
        "mask": None if rollout.loss_mask is None else [int(trains) for trains in rollout.loss_mask[:MAX_TOKENS]],
        "cut": cut,
    }
