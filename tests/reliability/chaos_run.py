"""The run that `tests/reliability/chaos.py` disturbs: a tiny training with a hook for each kind of fault.

Faults are requested by lines on standard input. Standard output is a journal, lines that begin with `@`: groups
finished, contents of checkpoints, and groups left at the end.
"""

from __future__ import annotations

import hashlib
import logging
import os
import resource
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_async_rl.assets import asset
from lit_async_rl.callbacks import RolloutTape, SaveOnFailure, SaveOnSigterm, SkipNonFinite, WeightSync
from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.data.settings import Limits, Scoring
from lit_async_rl.engines.base import Completion, SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.functions import share_correct
from lit_async_rl.rollouts.group_book import GroupBook
from lit_async_rl.scheduling.admission import Bounded, FixedLag
from lit_async_rl.tasks import SortDigits
from lit_async_rl.training.checkpoint_io import AtomicCheckpointIO
from lit_async_rl.training.module import PolicyModule
from lit_async_rl.types import RolloutGroup

LAG = 2
GROUPS = 2
ROLLOUT_TIMEOUT_S = 8.0
REWARD_TIMEOUT_S = 3.0
FOR_GOOD = ("engine gone", "NaN for good")
log = logging.getLogger(__name__)


def say(*words: Any) -> None:
    """Writes a line of the journal, unbuffered."""
    os.write(1, f"@{' '.join(map(str, words))}\n".encode())


def digest(group: RolloutGroup) -> str:
    """Digest of all tokens and rewards."""
    content = [(rollout.token_ids, rollout.versions, rollout.reward) for rollout in group.rollouts]
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


class Faults(logging.Handler):
    """Requested faults that have not happened yet. As a log handler it detects messages about a full disk."""

    def __init__(self) -> None:
        super().__init__()
        self._wanted: list[str] = []
        self._disk_was_full = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with os.fdopen(0, closefd=False) as lines:  # multiprocessing has closed `sys.stdin`
            for line in lines:
                if line.strip() == "disk full":
                    self._fill_disk()
                else:
                    self._wanted.append(line.strip())

    def take(self, kind: str) -> bool:
        """Whether this fault is to happen here and now."""
        if kind not in self._wanted:
            return False
        if kind not in FOR_GOOD:
            self._wanted.remove(kind)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        if "disk is full" in record.getMessage():
            self._disk_was_full.set()

    def _fill_disk(self) -> None:
        """Limits the file size to 100 bytes until the full disk was logged, and a second longer."""
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        self._disk_was_full.clear()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        self._disk_was_full.wait(60.0)
        time.sleep(1.0)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


class DisturbedEngine(EmbeddedEngine):
    """Hangs on request, with its lock held."""

    faults: Faults

    def poll(self, timeout_s: float) -> list[Completion]:
        """As usual; a pause shorter than the timeout is no hang."""
        if self.faults.take("engine slow"):
            time.sleep(0.85 * ROLLOUT_TIMEOUT_S)
        return super().poll(timeout_s)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        decode_step = self.engine.step

        def step() -> list[Completion]:
            self._break_down()
            return decode_step()

        self.engine.step = step  # type: ignore[method-assign, union-attr]

    def _break_down(self) -> None:
        if self.faults.take("engine hang"):
            time.sleep(1e9)
        if self.faults.take("engine crash") or self.faults.take("engine gone"):
            raise RuntimeError("injected crash of the engine")
        if self.faults.take("engine out of memory"):
            raise torch.OutOfMemoryError("CUDA out of memory. injected")


class DisturbedReward:
    """`share_correct`, except when a fault is requested."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._poisoned: set[str] = set()

    def __call__(self, prompt: Prompt, completion: str) -> float:
        if self._faults.take("reward slow"):
            time.sleep(0.75 * REWARD_TIMEOUT_S)
        if self._faults.take("reward hang"):
            time.sleep(1e9)
        if self._faults.take("reward poison"):
            self._poisoned.add(prompt.text)
        if self._faults.take("reward crash") or prompt.text in self._poisoned:
            raise RuntimeError("injected crash of the reward")
        return share_correct(prompt, completion)


class DisturbedTrainer(pl.Callback):
    """Puts NaN into a gradient on request; journals restored groups."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """After `WeightSync`, which restores."""
        say("started", trainer.global_step)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """One number is enough."""
        if self._faults.take("NaN gradient") or self._faults.take("NaN for good"):
            gradient = next(p.grad for p in pl_module.parameters() if p.grad is not None)
            gradient.view(-1)[0] = torch.nan


class JournalIO(AtomicCheckpointIO):
    """Journals the checkpoints written."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        if not self.disk_is_full:
            say("written", Path(path).name)


def keep_journal() -> None:
    """Journals each finished group and each saved state, in order."""
    finish = GroupBook._finish
    save = GroupBook.save

    def journal_finish(book: GroupBook, group: Any) -> None:
        finish(book, group)
        say("finished", group.index, digest(group.finished))

    def journal_save(book: GroupBook, *others: Any) -> Any:
        say("saved")
        return save(book, *others)

    GroupBook._finish = journal_finish  # type: ignore[method-assign]
    GroupBook.save = journal_save


def train(folder: Path, steps: int, schedule: Any, checkpoint: Path | None, pipes: Sequence[Connection]) -> None:
    """Goes on from the checkpoint; leaves a digest of the final parameters.

    Args:
        folder: of the run.
        steps: of the whole run.
        schedule: see `RolloutDataModule`.
        checkpoint: None begins anew.
        pipes: take the place of standard input, output and error.
    """
    for number, pipe in enumerate(pipes):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    torch.set_num_threads(1)
    keep_journal()
    faults = Faults()
    logging.getLogger().addHandler(faults)
    logging.getLogger().addHandler(logging.StreamHandler())
    DisturbedEngine.faults = faults
    model = asset("sort_policy")
    data = RolloutDataModule(
        model,
        SortDigits(8, size=1000),
        DisturbedReward(faults),
        engine=DisturbedEngine(num_slots=16, in_flight_weight_updates=schedule == "free", update_timeout_s=15.0),
        admission=Bounded() if schedule == "free" else FixedLag(),
        max_staleness=LAG,
        groups_per_step=GROUPS,
        group_size=4,
        sampling=SamplingParams(max_tokens=10),
        limits=Limits(rollout_timeout_s=ROLLOUT_TIMEOUT_S),
        scoring=Scoring(timeout_s=REWARD_TIMEOUT_S, tries=3),
    )
    module = PolicyModule(model, learning_rate=1e-4)
    keep = ModelCheckpoint(folder / "checkpoints", "{step}", every_n_train_steps=3, save_top_k=-1)
    ours = [WeightSync(), DisturbedTrainer(faults), SkipNonFinite(max_in_a_row=3), RolloutTape(str(folder / "tape"))]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[JournalIO()],
        callbacks=[*ours, SaveOnFailure(), SaveOnSigterm(), keep],
    )
    say("begun", checkpoint.name if checkpoint else "anew")
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint)
    if trainer.global_step == steps:
        say("left", *sorted(data._slots.deadlines))
        weights = b"".join(p.detach().numpy().tobytes() for p in module.policy.parameters())
        (folder / "digest").write_text(hashlib.sha256(weights).hexdigest())
