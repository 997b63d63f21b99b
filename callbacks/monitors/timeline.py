"""Timeline of a run: spans of trainer, engine, environments and rewards as a Chrome trace."""

from __future__ import annotations

import logging
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lit_async_rl.callbacks.parts import rollout_data, writing_folder
from lit_async_rl.distributed.ranks import cpu_group
from lit_async_rl.runtime.spans import (
    MERGE_WINDOW_S,
    TRAINER,
    Lane,
    SpanRecorder,
    TraceWriter,
    start_recording,
    stop_recording,
)
from lit_async_rl.types import RolloutBatch
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer

FOLDER_NAME = "timeline"
MERGED_SPANS_PER_STEP = 10  # of an engine's or reward worker's lane
MAX_SPANS_PER_STEP = 8  # of micro-batches in the trainer's lane; more are merged with their neighbours
STEP_STRIDES = ((0.5, 1), (0.75, 10), (0.875, 100), (1.0, 1000))  # up to this share of `max_mb`, every n-th step
NUM_CLOCK_ROUNDS = 7
log = logging.getLogger(__name__)


class Timeline(pl.Callback):
    """Writes spans of the run to `timeline/rank0.json` in its folder, a file for each rank, as a Chrome trace.

    | category | spans |
    |---|---|
    | `engine` | `prefill`, `decode` (with `version`, `slots`, `tokens`), `idle`, `update_weights` |
    | `reward` | `score` (with the first `group`, the number of `completions`; `ok`) |
    | `environment` | `answer` |
    | `trainer` | `wait`, `forward_backward` (with `step`, `micro_batch`, `versions`, `staleness`), `optimizer`, |
    | | `publish`, `checkpoint`, `validation` |

    Waits and busy times of the engine agree with `BottleneckVerdict`. An engine's or reward worker's spans within a
    window (50 ms, or a tenth of a step) are merged: the merged span begins with the first and lasts for the sum of
    their durations. On a GPU, spans of the trainer are host time: its thread runs ahead of the device.

    When training starts, ranks on other machines measure and correct the offset of their clocks from rank 0's.

    Files are readable at any time, also after a kill; a resumed run appends to them. With several timelines in one
    Trainer only the first writes.

    Args:
        max_mb: largest size of a file. Beyond half of it every 10th step is recorded, beyond three quarters every
            100th, beyond seven eighths every 1000th.
        flush_s: seconds between two writes.

    Raises:
        ValueError: a number is not positive; when training starts, there is no `RolloutDataModule`.
    """

    def __init__(self, max_mb: float = 50.0, flush_s: float = 1.0) -> None:
        check_range("Timeline", "positive", max_mb=max_mb, flush_s=flush_s)
        self.max_mb = max_mb
        self.flush_s = flush_s
        self._recorder: SpanRecorder | None = None
        self._lane: Lane | None = None  # the trainer's; None on ranks and in callbacks that do not record
        self._writer: TraceWriter | None = None
        self._step = 0
        self._stride = 1
        self._step_began = self._batch_began = self._validation_began = 0.0
        self._optimizer_began: float | None = None
        self._optimizer_ended = 0.0
        self._hooks: list[Any] = []
        self._version = 0

    # -- begin and end ------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Starts recording, before `WeightSync` starts the engine."""
        if next(c for c in trainer.callbacks if isinstance(c, Timeline)) is not self:  # type: ignore[attr-defined]
            return
        rollout_data(trainer, "Timeline")
        folder = writing_folder(trainer)  # this and the next are collectives: all ranks call before any may return
        offset_s = clock_offset(trainer)
        if folder is None:
            return
        self._prepare(trainer, folder / FOLDER_NAME)
        rank = trainer.global_rank
        self._recorder = start_recording(rank, offset_s)
        self._recorder.name_process(f"rank {rank}")
        self._lane = self._recorder.lane(TRAINER)
        self._writer = TraceWriter(folder / FOLDER_NAME / f"rank{rank}.json", self._recorder, self.flush_s)
        self._step = trainer.global_step
        self._stride = 1
        self._step_began = time.monotonic()
        self._hooks = [
            optimizer.register_step_post_hook(self._record_optimizer_end) for optimizer in trainer.optimizers
        ]

    def _prepare(self, trainer: AnyTrainer, folder: Path) -> None:
        """Creates the folder; a run that does not resume renames an existing timeline first."""
        if trainer.is_global_zero:
            if folder.exists() and trainer.global_step == 0:
                candidates = (folder.with_name(f"{FOLDER_NAME}.{n}") for n in range(1, 10**6))
                shutil.move(folder, next(path for path in candidates if not path.exists()))
            folder.mkdir(parents=True, exist_ok=True)
        trainer.strategy.barrier("timeline")  # no rank may open a file before the old folder is renamed
        folder.mkdir(parents=True, exist_ok=True)  # on machines that do not share the disk of rank 0

    def teardown(self, trainer: AnyTrainer, pl_module: AnyModule, stage: str) -> None:
        if stage == "fit":
            self._close()

    def on_exception(self, trainer: AnyTrainer, pl_module: AnyModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._recorder is not None:
            stop_recording(self._recorder)
            if self._recorder.num_lost:
                log.warning("%d timeline events were lost, because the disk was too slow", self._recorder.num_lost)
        for hook in self._hooks:
            hook.remove()
        self._writer = None
        self._recorder = None
        self._lane = None
        self._hooks = []

    # -- steps --------------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: AnyTrainer, pl_module: AnyModule, batch: Any, batch_idx: int) -> None:
        self._batch_began = time.monotonic()
        self._optimizer_began = None
        self._version = int(getattr(pl_module, "version", 0))

    def on_before_optimizer_step(self, trainer: AnyTrainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        self._optimizer_began = self._optimizer_ended = time.monotonic()

    def _record_optimizer_end(self, *_: Any) -> None:
        self._optimizer_ended = time.monotonic()

    def on_train_batch_end(
        self, trainer: AnyTrainer, pl_module: AnyModule, outputs: Any, batch: RolloutBatch, batch_idx: int
    ) -> None:
        if self._lane is None:
            return
        began = self._batch_began
        middle = time.monotonic() if self._optimizer_began is None else self._optimizer_began
        number = batch.micro_batch * MAX_SPANS_PER_STEP // max(MAX_SPANS_PER_STEP, batch.num_micro_batches)
        key = "forward_backward", batch.step, number if batch.num_micro_batches > MAX_SPANS_PER_STEP else batch_idx
        self._lane.add("forward_backward", began, middle - began, key, **self._trained(batch))
        if self._optimizer_began is not None:
            self._lane.add(
                "optimizer", middle, self._optimizer_ended - middle, ("optimizer", batch.step), step=batch.step
            )
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            self._end_step(time.monotonic())

    def _trained(self, batch: RolloutBatch) -> dict[str, Any]:
        """Arguments of the span of a micro-batch: step, position, and range and mean age of its token versions."""
        arguments: dict[str, Any] = {"step": batch.step, "micro_batch": batch.micro_batch}
        versions = batch.versions[batch.loss_mask]
        if versions.numel():
            low, high = torch.aminmax(versions)
            arguments["versions"] = [int(low), int(high)]
            arguments["staleness"] = round(self._version - float(versions.float().mean()), 3)
        return arguments

    def _end_step(self, now: float) -> None:
        """Adapts the merge window to the duration of steps, and skips steps as the file grows."""
        if self._recorder is None or self._writer is None or self._lane is None:
            return
        seconds = now - self._step_began
        self._step_began = now
        window_s = 0.9 * self._recorder.window_s + 0.1 * seconds / MERGED_SPANS_PER_STEP
        self._recorder.window_s = max(MERGE_WINDOW_S, window_s)
        share = self._writer.num_bytes / (1e6 * self.max_mb)
        stride = next((number for limit, number in STEP_STRIDES if share < limit), 0)
        if stride != self._stride:
            self._recorder.record(True)
            self._lane.instant("recorded steps", every=stride)
            self._stride = stride
        self._recorder.record(bool(stride) and self._step % stride == 0)

    # -- other work of the trainer ------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: AnyTrainer, pl_module: AnyModule, checkpoint: dict[str, Any]) -> None:
        """Begins a span that lasts until the trainer's next one."""
        if self._lane is not None:
            self._lane.begin("checkpoint", step=trainer.global_step)

    def on_validation_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        self._validation_began = time.monotonic()

    def on_validation_end(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        if self._lane is not None:
            seconds = time.monotonic() - self._validation_began
            key = "validation", trainer.global_step
            self._lane.add("validation", self._validation_began, seconds, key, step=trainer.global_step)


def clock_offset(trainer: AnyTrainer) -> float:
    """Seconds by which the clock of rank 0 is ahead of this rank's; 0 on the same machine. A collective.

    All ranks read their clocks right after a barrier; the result is the median of several rounds.
    """
    group = cpu_group()
    if group is None or trainer.world_size == 1:
        return 0.0
    host = torch.tensor(list(socket.gethostname().encode()[:64].ljust(64)), dtype=torch.uint8)
    hosts = [torch.empty_like(host) for _ in range(trainer.world_size)]
    dist.all_gather(hosts, host, group=group)
    differences = []
    for _ in range(NUM_CLOCK_ROUNDS):
        dist.barrier(group=group)
        now = torch.tensor([time.time()], dtype=torch.float64)
        times = [torch.empty_like(now) for _ in range(trainer.world_size)]
        dist.all_gather(times, now, group=group)
        differences.append(float(times[0]) - float(now))
    is_same_host = torch.equal(hosts[0], host)
    return 0.0 if is_same_host else sorted(differences)[NUM_CLOCK_ROUNDS // 2]
