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

from lit_async_rl.callbacks.parts import callbacks_of, rollout_data, writing_folder
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.runtime.files import FolderLock, append, replacing, tolerate_full_disk
from lit_async_rl.training.trackers import log_table, step_in_trackers
from lit_async_rl.types import Rollout, RolloutBatch, RolloutGroup
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer

# -- Rows of `samples.jsonl`: a rollout with its tokens, and each token's values in the step that trained on it -------


SIGNALS = {"log_ratio": "log_ratios", "advantages": "advantages", "entropy": "entropies"}
STEP = re.compile(r'\{"step": (\d+)')


class TrainedTokens:
    """Log-ratio, advantage and entropy of each token of the sampled groups, from the micro-batches of this rank."""

    def __init__(self) -> None:
        self.version: int | None = None
        self._values: defaultdict[tuple[Any, ...], list[dict[str, list[float]]]] = defaultdict(list)

    def add(self, batch: RolloutBatch, signals: Mapping[str, Any], groups: Collection[int]) -> None:
        """Adds one micro-batch: its rows that belong to `groups`, by index."""
        self.version = signals.get("version", self.version)
        for row, index in enumerate(batch.group_index.tolist()):
            if index not in groups:
                continue
            mask = batch.attention_mask[row]
            token_ids = tuple(batch.input_ids[row][mask].tolist())
            versions = tuple(batch.versions[row][mask].tolist())
            key = (index, token_ids, versions)  # rows have no number of their own within a group
            values = {SIGNALS[name]: signals[name][row][mask] for name in SIGNALS if name in signals}
            self._values[key].append({name: [round(v, 4) for v in value.tolist()] for name, value in values.items()})

    def take(self, group: RolloutGroup, rollout: Rollout) -> dict[str, list[float]]:
        """Values of the completion's tokens; empty if this rank did not train on the rollout."""
        prompt_ids = group.prompt_ids if rollout.prompt_ids is None else rollout.prompt_ids
        begin = len(prompt_ids)
        token_ids = (*prompt_ids, *rollout.token_ids)
        versions = (0,) * begin + rollout.versions
        equal_rollouts = self._values[(group.index, token_ids, versions)]
        if not equal_rollouts:
            return {}
        return {name: values[begin:] for name, values in equal_rollouts.pop(0).items()}


def sample_row(
    group: RolloutGroup, sample: int, codec: TextCodec, trained: TrainedTokens, max_tokens: int
) -> dict[str, Any]:
    """Columns of one rollout in `samples.jsonl`, beyond those of the loggers' tables.

    Completions longer than `max_tokens` lose their middle in per-token lists; `cut` is then its position and length, in
    tokens.
    """
    rollout = group.rollouts[sample]
    length = len(rollout.token_ids)
    kept, cut = _kept_positions(length, max_tokens)
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
    if rollout.branches:
        row["num_branches"] = len(rollout.branches)
    if rollout.turns is not None:
        row["turns"] = [vars(turn) for turn in rollout.turns]
    return row


def _kept_positions(length: int, max_tokens: int) -> tuple[Sequence[int], tuple[int, int] | None]:
    """Positions to keep (three quarters at the beginning, the rest at the end), and position and length of the gap."""
    if length <= max_tokens:
        return range(length), None
    end = max_tokens // 4
    begin = max_tokens - end
    return [*range(begin), *range(length - end, length)], (begin, length - max_tokens)


def thin_out(path: Path, max_bytes: int) -> None:
    """Drops the samples of every other step of a table until it has at most `max_bytes`; the last step is kept."""
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
    """Writes rollouts of every n-th step to `samples.jsonl` in the run's folder, and as a table to trackers.

    Trackers are the run's Weights & Biases, MLflow, Trackio and TensorBoard. Of several sample loggers in one Trainer
    only the last writes.

    The file has each token's text, version, log-ratio, advantage and entropy, for `lit-async-rl report`. With several
    ranks the last three are recorded only for rollouts that rank 0 trained on. After every validation, samples of the
    same held-out prompts go to `held_out.jsonl`.

    Args:
        every_n_steps: optimizer steps between samples.
        num_groups: prompts per sample, with all of their completions.
        num_held_out: completions per validation.
        max_tokens: tokens per completion with values; longer ones lose their middle.
        max_mb: size of a file beyond which the samples of every other step are dropped.

    Raises:
        ValueError: a number is out of range; when training starts, there is no `RolloutDataModule`.
        OSError: when training starts, another process writes to the run's folder.
    """

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
        self._unwritten_rows: list[dict[str, Any]] = []  # of a validation before training, when there is no folder yet
        self._step = 0
        self._is_writer = False
        self._folder: Path | None = None
        self._lock: FolderLock | None = None

    def setup(self, trainer: AnyTrainer, pl_module: AnyModule, stage: str) -> None:
        """Closes the folder of an earlier run: samples of a validation wait for the next run's."""
        # `writing_folder` is a collective; the conditions before it are the same on all ranks
        if stage == "validate" and self._folder is not None and writing_folder(trainer) != self._folder:
            self._folder = None

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        rollout_data(trainer, "SampleLogger")
        self._step = trainer.global_step
        self._folder = writing_folder(trainer)  # a collective: all ranks call, though only one writes
        self._is_writer = callbacks_of(trainer, SampleLogger)[-1] is self
        if self._is_writer and self._folder is not None and trainer.is_global_zero:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self._folder, "trainer.logger's folder")
            self._append("held_out.jsonl", self._unwritten_rows)
        self._unwritten_rows = []

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
        """Collects each micro-batch's values, and writes after the step's last one."""
        if not self._is_writer:
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
        table = []  # rows for trackers
        file_rows = []
        for group in groups:
            for sample, rollout in enumerate(group.rollouts):
                row = [trainer.global_step, group.index, group.prompt.text, rollout.text, group.prompt.answer]
                versions = rollout.all_versions
                row += [rollout.reward, min(versions, default=None), max(versions, default=None)]
                table.append(row)
                if self._folder is not None:
                    details = sample_row(group, sample, data.codec, trained=trained, max_tokens=self.max_tokens)
                    file_rows.append(dict(zip(COLUMNS, row, strict=True)) | details)
        self._append("samples.jsonl", file_rows)
        self._log(trainer, table)

    @rank_zero_only
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Writes completions of the first held-out prompts, the same in every validation."""
        validator = getattr(pl_module, "validator", None)
        if validator is None or trainer.sanity_checking or (self._folder is not None and not self._is_writer):
            return
        rows = [
            {
                "step": trainer.global_step,
                "prompt": sample.prompt.text,
                "completion": sample.completion,
                "answer": sample.prompt.answer,
                "reward": sample.reward,
            }
            for sample in validator.samples[: self.num_held_out]
        ]
        if self._folder is None:
            self._unwritten_rows = rows
        else:
            self._append("held_out.jsonl", rows)

    def _append(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        if self._folder is None or not rows:
            return
        path = self._folder / name
        with tolerate_full_disk(str(path)):
            append(path, "".join(json.dumps(row) + "\n" for row in rows))
            thin_out(path, int(self.max_mb * 2**20))

    def _log(self, trainer: pl.Trainer, rows: Sequence[Sequence[Any]]) -> None:
        """Logs to trackers at the step of the rollouts' metrics: trackers count from 0, our files from 1."""
        step = step_in_trackers(trainer)
        for logger in trainer.loggers:
            log_table(logger, "samples", COLUMNS, rows=[[step, *row[1:]] for row in rows], step=step)
