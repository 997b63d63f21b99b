"""Logs sampled completions."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_only

from lit_async_rl.callbacks.parts import rollout_data, run_folder
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.training.trackers import log_table, step_in_trackers
from lit_async_rl.types import Rollout, RolloutBatch, RolloutGroup
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.files import FolderLock, append, replacing, tolerate_full_disk
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer

# -- Rows of `samples.jsonl`: a rollout with its tokens, and each token's values in the step that trained on it -------


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
        found = self._found[(group.index, (*group.prompt_ids, *rollout.token_ids), (0,) * begin + rollout.versions)]
        return {name: values[begin:] for name, values in found.pop(0).items()} if found else {}


def sample_row(
    group: RolloutGroup, sample: int, codec: TextCodec, trained: TrainedTokens, max_tokens: int
) -> dict[str, Any]:
    """Columns of one rollout that are not in the loggers' tables.

    Per-token lists hold at most `max_tokens` entries: of longer completions the beginning and the end, and `cut` is the
    position and length of the part left out.
    """
    rollout = group.rollouts[sample]
    length = len(rollout.token_ids)
    kept, cut = _kept(length, max_tokens)
    tokens: dict[str, Sequence[Any]] = {
        "tokens": codec.token_texts([rollout.token_ids[n] for n in kept]),
        "versions": [rollout.versions[n] for n in kept],
        "logprobs": [round(rollout.logprobs[n], 4) for n in kept],
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
    if rollout.reward_parts is not None:
        row["reward_parts"] = dict(rollout.reward_parts)
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


COLUMNS = ["step", "group", "prompt", "completion", "answer", "reward", "oldest_version", "newest_version"]


class SampleLogger(pl.Callback):
    """Every `every_n_steps` steps, some rollouts of that step: to `samples.jsonl` in the run's folder, and as a table
    to Weights & Biases, MLflow, Trackio and TensorBoard where they are used. Of several in one Trainer one writes.

    The file has each token's text, version, log-ratio, advantage and entropy, which `lit-async-rl report` shows. With
    several ranks the last three are there for rollouts that rank 0 trained on. After every validation, samples of the
    same held-out prompts go to `held_out.jsonl`.

    Args:
        every_n_steps: optimizer steps between samples.
        num_groups: prompts per sample, with all of their completions.
        num_held_out: completions per validation.
        max_tokens: tokens of a completion with values of their own; of longer ones the beginning and the end.
        max_mb: size of each file; a larger one loses every second step.

    Raises:
        ValueError: a number is out of range; when training starts, there is no `RolloutDataModule`.
        OSError: when training starts, another process writes to the run's folder.
    """  # noqa: D205

    def __init__(
        self,
        every_n_steps: int = 20,
        num_groups: int = 2,
        num_held_out: int = 8,
        max_tokens: int = 1024,
        max_mb: float = 64.0,
    ) -> None:
        check_range(
            "SampleLogger", "integer >= 1", every_n_steps=every_n_steps, num_groups=num_groups, max_tokens=max_tokens
        )
        check_range("SampleLogger", "integer >= 0", num_held_out=num_held_out)
        check_range("SampleLogger", "> 0", max_mb=max_mb)
        self.every_n_steps = every_n_steps
        self.num_groups = num_groups
        self.num_held_out = num_held_out
        self.max_tokens = max_tokens
        self.max_mb = max_mb
        self._trained = TrainedTokens()
        self._waiting: list[dict[str, Any]] = []  # of a validation before training, which has no folder yet
        self._step = 0
        self._writes = False
        self._folder: Path | None = None
        self._lock: FolderLock | None = None

    def setup(self, trainer: AnyTrainer, pl_module: AnyModule, stage: str) -> None:
        """Before a validation of another run than the last: its samples wait for the folder, as those of the first."""
        if stage == "validate" and self._folder is not None and run_folder(trainer) != self._folder:  # a collective
            self._folder = None

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        rollout_data(trainer, "SampleLogger")
        self._step = trainer.global_step  # a collective: asked for on all ranks
        self._folder = run_folder(trainer)
        self._writes = [c for c in trainer.callbacks if isinstance(c, SampleLogger)][-1] is self
        if self._writes and self._folder is not None and trainer.is_global_zero:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self._folder, "trainer.logger's folder")
            self._append("held_out.jsonl", self._waiting)
        self._waiting = []

    def on_train_end(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        self._release()

    def on_exception(self, trainer: AnyTrainer, pl_module: AnyModule, exception: BaseException) -> None:
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    @rank_zero_only
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Collects the values of each micro-batch's tokens, and writes after the step's last one."""
        if not self._writes:
            return
        data = rollout_data(trainer, "SampleLogger")
        groups = data.last_step_groups[: self.num_groups]
        if self._folder is not None and batch.step is not None and batch.step % self.every_n_steps == 0:
            signals = getattr(pl_module, "stabilizer_signals", {})
            self._trained.add(batch, signals, {group.index for group in groups})
        if trainer.global_step == self._step or (trainer.global_step - 1) % self.every_n_steps:
            return
        self._step = trainer.global_step
        trained = self._trained
        self._trained = TrainedTokens()
        rows = []
        more = []
        for group in groups:
            for sample, rollout in enumerate(group.rollouts):
                row = [trainer.global_step, group.index, group.prompt.text, rollout.text, group.prompt.answer]
                rows.append([*row, rollout.reward, *_range(rollout.versions)])
                if self._folder is not None:
                    more.append(sample_row(group, sample, data.codec, trained=trained, max_tokens=self.max_tokens))
        self._append(
            "samples.jsonl", [dict(zip(COLUMNS, a, strict=True)) | b for a, b in zip(rows, more, strict=False)]
        )
        self._log(trainer, rows)

    @rank_zero_only
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes completions of the first held-out prompts, the same in every validation."""
        validator = getattr(pl_module, "validator", None)
        if validator is None or trainer.sanity_checking or (self._folder is not None and not self._writes):
            return
        rows = [
            {
                **{"step": trainer.global_step, "prompt": sample.prompt.text, "completion": sample.completion},
                **{"answer": sample.prompt.answer, "reward": sample.reward},
            }
            for sample in validator.samples[: self.num_held_out]
        ]
        if self._folder is None:
            self._waiting = rows
        else:
            self._append("held_out.jsonl", rows)

    def _append(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        if self._folder is None or not rows:
            return
        path = self._folder / name
        with tolerate_full_disk(str(path)):
            append(path, "".join(json.dumps(row) + "\n" for row in rows))
            thin(path, int(self.max_mb * 2**20))

    def _log(self, trainer: pl.Trainer, rows: Sequence[Sequence[Any]]) -> None:
        """To trackers, at the step of the metrics of the same rollouts: it counts from 0 there, and from 1 in files."""
        step = step_in_trackers(trainer)
        for logger in trainer.loggers:
            log_table(logger, "samples", COLUMNS, rows=[[step, *row[1:]] for row in rows], step=step)


def _range(versions: Sequence[int]) -> tuple[int | None, int | None]:
    return min(versions, default=None), max(versions, default=None)
