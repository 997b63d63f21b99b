"""Timeline of a run: what trainer, engine and rewards did, and when."""

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

from lit_async_rl.callbacks.parts import rollout_data, run_folder
from lit_async_rl.distributed.ranks import cpu_group
from lit_async_rl.types import RolloutBatch
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer
from lit_async_rl.utils.spans import TRAINER, WINDOW_S, Lane, Spans, TraceWriter

FOLDER = "timeline"
WINDOWS_PER_STEP = 10  # merged spans of a lane
MAX_MICRO_BATCHES = 8  # spans of a step; of more, neighbours are merged
STRIDES = ((0.5, 1), (0.75, 10), (0.875, 100), (1.0, 1000))  # share of `max_mb`, steps of which one is recorded
CLOCK_ROUNDS = 7
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

    Waits and busy time of the engine are those that `BottleneckVerdict` adds up. Spans of an engine or a reward worker
    within a window (50 ms, or a tenth of a step) are merged: the merged span begins with the first and has the sum of
    their seconds. On a GPU the spans of the trainer are those of its thread, which runs ahead of the device.

    Servers are recorded by the rank that sends them requests. The clocks of ranks on other machines are compared with
    that of rank 0 when training starts, by exchanging the time after barriers, and corrected by the median difference.

    A file is written every `flush_s` seconds, and can be read whenever the run is killed; a resumed run goes on in it.
    Of several timelines in one Trainer the first writes.

    Args:
        max_mb: of a file. Beyond half of it only one of ten steps is recorded, beyond three quarters one of a hundred.
        flush_s: seconds between two writes.

    Raises:
        ValueError: a number is not positive; when training starts, there is no `RolloutDataModule`.
    """

    def __init__(self, max_mb: float = 50.0, flush_s: float = 1.0) -> None:
        check_range("Timeline", "positive", max_mb=max_mb, flush_s=flush_s)
        self.max_mb = max_mb
        self.flush_s = flush_s
        self._spans: Spans | None = None
        self._lane: Lane | None = None  # of the trainer
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
        """Begins before `WeightSync` starts the engine."""
        if next(c for c in trainer.callbacks if isinstance(c, Timeline)) is not self:  # type: ignore[attr-defined]
            return
        data = rollout_data(trainer, "Timeline")  # a collective: asked for on all ranks
        folder = run_folder(trainer)
        offset_s = clock_offset(trainer)
        if folder is None:
            return
        self._prepare(trainer, folder / FOLDER)
        rank = trainer.global_rank
        self._spans = Spans(offset_s)
        self._spans.name_process(rank, f"rank {rank}")
        self._lane = self._spans.lane(rank, TRAINER, "trainer", "trainer", merges=False)
        data.feed.observe(self._spans, rank)
        self._writer = TraceWriter(folder / FOLDER / f"rank{rank}.json", self._spans, self.flush_s)
        self._step = trainer.global_step
        self._stride = 1
        self._step_began = time.monotonic()
        self._hooks = [optimizer.register_step_post_hook(self._on_stepped) for optimizer in trainer.optimizers]

    def _prepare(self, trainer: AnyTrainer, folder: Path) -> None:
        """A run that begins anew in a folder that was used sets the older timeline aside."""
        if trainer.is_global_zero:
            if folder.exists() and trainer.global_step == 0:
                older = next(path for n in range(1, 10**6) if not (path := folder.with_name(f"{FOLDER}.{n}")).exists())
                shutil.move(folder, older)
            folder.mkdir(parents=True, exist_ok=True)
        trainer.strategy.barrier("timeline")
        folder.mkdir(parents=True, exist_ok=True)  # of a machine with disks of its own

    def teardown(self, trainer: AnyTrainer, pl_module: AnyModule, stage: str) -> None:
        if stage == "fit":
            self._close()

    def on_exception(self, trainer: AnyTrainer, pl_module: AnyModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._spans is not None and self._writer is not None:
            self._writer.close()
            self._spans.record(False)
            if self._spans.num_lost:
                log.warning("%d events of the timeline were lost: its disk was too slow", self._spans.num_lost)
        for hook in self._hooks:
            hook.remove()
        self._writer = None
        self._lane = None
        self._hooks = []

    # -- steps --------------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: AnyTrainer, pl_module: AnyModule, batch: Any, batch_idx: int) -> None:
        self._batch_began = time.monotonic()
        self._optimizer_began = None
        self._version = int(getattr(pl_module, "version", 0))

    def on_before_optimizer_step(self, trainer: AnyTrainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        self._optimizer_began = self._optimizer_ended = time.monotonic()

    def _on_stepped(self, *_: Any) -> None:
        self._optimizer_ended = time.monotonic()

    def on_train_batch_end(
        self, trainer: AnyTrainer, pl_module: AnyModule, outputs: Any, batch: RolloutBatch, batch_idx: int
    ) -> None:
        if self._lane is None:
            return
        began = self._batch_began
        middle = time.monotonic() if self._optimizer_began is None else self._optimizer_began
        number = batch.micro_batch * MAX_MICRO_BATCHES // max(MAX_MICRO_BATCHES, batch.num_micro_batches)
        key = "forward_backward", batch.step, number if batch.num_micro_batches > MAX_MICRO_BATCHES else batch_idx
        self._lane.add("forward_backward", began, middle - began, key, **self._trained(batch))
        if self._optimizer_began is not None:
            self._lane.add(
                "optimizer", middle, self._optimizer_ended - middle, ("optimizer", batch.step), step=batch.step
            )
        if trainer.global_step > self._step:
            self._step = trainer.global_step
            self._end_step(time.monotonic())

    def _trained(self, batch: RolloutBatch) -> dict[str, Any]:
        found: dict[str, Any] = {"step": batch.step, "micro_batch": batch.micro_batch}
        versions = batch.versions[batch.loss_mask]
        if versions.numel():
            low, high = torch.aminmax(versions)
            found |= {"versions": [int(low), int(high)]}
            found["staleness"] = round(self._version - float(versions.float().mean()), 3)
        return found

    def _end_step(self, now: float) -> None:
        """Adapts the windows to the length of steps, and leaves steps out when the file grows long."""
        if self._spans is None or self._writer is None or self._lane is None:
            return
        seconds = now - self._step_began
        self._step_began = now
        self._spans.window_s = max(WINDOW_S, 0.9 * self._spans.window_s + 0.1 * seconds / WINDOWS_PER_STEP)
        share = self._writer.num_bytes / (1e6 * self.max_mb)
        stride = next((number for limit, number in STRIDES if share < limit), 0)
        if stride != self._stride:
            self._spans.record(True)
            self._lane.instant("recorded steps", every=stride)
            self._stride = stride
        self._spans.record(bool(stride) and self._step % stride == 0)

    # -- other work of the trainer ------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: AnyTrainer, pl_module: AnyModule, checkpoint: dict[str, Any]) -> None:
        """Lasts until the trainer does something else that is recorded."""
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
    """Seconds to add to this rank's clock so that it agrees with that of rank 0; 0 on the same machine. A collective.

    After a barrier all ranks read their clocks at nearly the same time; the median of several rounds is taken.
    """
    group = cpu_group()
    if group is None or trainer.world_size == 1:
        return 0.0
    host = torch.tensor(list(socket.gethostname().encode()[:64].ljust(64)), dtype=torch.uint8)
    hosts = [torch.empty_like(host) for _ in range(trainer.world_size)]
    dist.all_gather(hosts, host, group=group)
    differences = []
    for _ in range(CLOCK_ROUNDS):
        dist.barrier(group=group)
        now = torch.tensor([time.time()], dtype=torch.float64)
        times = [torch.empty_like(now) for _ in range(trainer.world_size)]
        dist.all_gather(times, now, group=group)
        differences.append(float(times[0]) - float(now))
    is_same_host = torch.equal(hosts[0], host)
    return 0.0 if is_same_host else sorted(differences)[CLOCK_ROUNDS // 2]
