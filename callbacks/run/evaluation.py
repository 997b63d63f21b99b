"""Held-out accuracy while training goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer

from lit_async_rl.callbacks.parts import policy_module, rollout_data
from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.errors import InvariantError
from lit_async_rl.prompts.sources import PromptSource
from lit_async_rl.rollouts.evaluation import (
    FIRST_ID,
    EvaluationPlan,
    EvaluationResult,
    EvaluationRun,
    Question,
    make_questions,
)
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer

log = logging.getLogger(__name__)


class Evaluation(pl.Callback):
    """Samples held-out prompts in the engine that samples for training, at the same time, and logs pass@1 and pass@k.

    The trainer never waits for it longer than `max_block_s` for one evaluation (and `end_wait_s` at the very end).
    Evaluation has at most `max_concurrent` samples in the engine, and in the embedded engine those are taken before
    waiting rollouts: neither side can starve the other. Nothing that trains depends on it: with `schedule: fixed_lag`
    training is the same to the bit. What is measured is the policy that `eval/version` names; an engine that goes on
    under new weights may sample the last tokens with newer ones, which `eval/newest_version` tells. A larger
    `max_block_s` makes the trainer wait that long before it changes the policy. Without in-flight updates it is always
    one version, and evaluation is a batch of its own between two of training.

    Logs `eval/<data set>/pass@1`, `pass@k` (unbiased: 1 - C(n - c, k) / C(n, k), Chen et al. 2021, arXiv:2107.03374)
    and `reward`, the same without a data set for all prompts together, `eval/version`, `oldest_version`,
    `newest_version`, `mean_version`, `seconds` and `blocked_s`, on rank 0, at the step when the evaluation has ended.

    Args:
        datasets: held-out prompts of each data set.
        every_n_steps: optimizer steps from the beginning of one evaluation to that of the next; the first begins with
            the first step. One that is due while another runs begins when that has ended.
        num_samples: completions of each prompt, n.
        ks: k of each pass@k; None is 1 and `num_samples`.
        sampling: how they are sampled; None is `data.val_sampling`.
        max_concurrent: most samples in the engine at a time.
        max_block_s: longest that the trainer waits for one evaluation.
        timeout_s: an evaluation that has not ended by then is given up, with a line in the log.
        end_wait_s: longest wait for a running evaluation when training ends.

    Attributes:
        results: of all evaluations so far.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        datasets: dict[str, PromptSource],
        every_n_steps: int = 50,
        num_samples: int = 1,
        ks: Sequence[int] | None = None,
        sampling: SamplingParams | None = None,
        max_concurrent: int = 16,
        max_block_s: float = 0.0,
        timeout_s: float = 600.0,
        end_wait_s: float = 60.0,
    ) -> None:
        least = dict(every_n_steps=every_n_steps, num_samples=num_samples, max_concurrent=max_concurrent)
        for name, value in least.items():
            if value < 1:
                raise ValueError(f"Evaluation.{name} must be >= 1, got {value}")
        for name, seconds in dict(max_block_s=max_block_s, end_wait_s=end_wait_s).items():
            if seconds < 0:
                raise ValueError(f"Evaluation.{name} must be >= 0, got {seconds}")
        if timeout_s <= 0:
            raise ValueError(f"Evaluation.timeout_s must be positive, got {timeout_s}")
        if not datasets or not all(len(source) for source in datasets.values()):
            raise ValueError(f"Evaluation.datasets needs data sets with prompts, got {sorted(datasets)}")
        self.ks = sorted({1, num_samples} if ks is None else set(ks))
        if not self.ks or not 1 <= self.ks[0] <= self.ks[-1] <= num_samples:
            raise ValueError(f"Evaluation.ks={self.ks} must lie between 1 and num_samples={num_samples}")
        self.datasets, self.every_n_steps, self.num_samples = datasets, every_n_steps, num_samples
        self.sampling, self.max_concurrent, self.max_block_s = sampling, max_concurrent, max_block_s
        self.timeout_s, self.end_wait_s = timeout_s, end_wait_s
        self.results: list[EvaluationResult] = []
        self._questions: list[Question] = []
        self._run: EvaluationRun | None = None
        self._next_step = self._began_step = 0
        self._next_id = FIRST_ID
        self._blocked_s = 0.0

    def setup(self, trainer: AnyTrainer, pl_module: AnyModule, stage: str) -> None:
        """A new run evaluates at its first step; a resumed one when `load_state_dict`, which comes next, says."""
        if stage == "fit":
            self._run, self._next_step = None, 0

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Reads the prompts, on rank 0."""
        data = rollout_data(trainer, "Evaluation")
        if data.tape is not None:
            raise ValueError("Evaluation needs an engine, and data.admission=FromTape has none")
        if (self.sampling or data.val_sampling).temperature == 0 and self.num_samples > 1:
            raise ValueError(f"Evaluation.num_samples={self.num_samples} at temperature 0 are copies of one completion")
        if trainer.is_global_zero and not self._questions:
            self._questions = make_questions(self.datasets, data.codec)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begins an evaluation if one is due."""
        if not self._questions or self._run is not None or trainer.global_step < self._next_step:
            return
        self._began_step, self._blocked_s = trainer.global_step, 0.0
        self._next_step = trainer.global_step + self.every_n_steps
        data = rollout_data(trainer, "Evaluation")
        plan = EvaluationPlan(
            questions=self._questions,
            num_samples=self.num_samples,
            sampling=self.sampling or data.val_sampling,
            version=policy_module(pl_module, "Evaluation").version,
            max_concurrent=self.max_concurrent,
            first_id=self._next_id,
        )
        self._run = data.shared_source.evaluate(plan)
        self._next_id += len(self._questions)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Waits for the evaluation, if it may: the step makes another policy."""
        left = self.max_block_s - self._blocked_s
        if self._run is not None and left > 0:
            began = time.monotonic()
            with rollout_data(trainer, "Evaluation").shared_source.bounded_wait("waiting for an evaluation"):
                self._run.wait(left)
            self._blocked_s += time.monotonic() - began

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs an evaluation that has ended; gives up one that does not."""
        if self._run is None:
            return
        if self._run.is_done:
            metrics = self._finish(trainer)
            pl_module.log_dict(metrics, logger=False, rank_zero_only=True)
        elif self._run.is_lost:
            log.warning("evaluation of version %d lost with its engine: it begins again", self._run.version)
            self._run, self._next_step = None, trainer.global_step
        elif self._run.age_s > self.timeout_s:
            log.warning("evaluation of version %d given up: Evaluation.timeout_s=%g", self._run.version, self.timeout_s)
            self._run.abandon()
            self._run = None

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Waits for what is under way, for a while."""
        if self._run is None:
            return
        began = time.monotonic()
        is_done = self._run.wait(0.0 if trainer.received_sigterm else self.end_wait_s)
        self._blocked_s += time.monotonic() - began
        if is_done:
            self._finish(trainer)
        else:
            log.warning("the evaluation of version %d had not ended when training did", self._run.version)
            self._run.abandon()
        self._run = None

    def on_exception(self, trainer: AnyTrainer, pl_module: AnyModule, exception: BaseException) -> None:
        """Forgets what is under way."""
        self._run = None

    def _finish(self, trainer: pl.Trainer) -> dict[str, float]:
        if self._run is None:
            raise InvariantError("no evaluation is running")
        result = self._run.result(rollout_data(trainer, "Evaluation").validation.success_reward, self.ks)
        self._run = None
        self.results.append(result)
        metrics = {f"eval/{name}": value for name, value in result.metrics.items()}
        for name in ("version", "oldest_version", "newest_version", "mean_version", "num_unscored", "seconds"):
            metrics[f"eval/{name}"] = float(getattr(result, name))
        metrics["eval/blocked_s"] = self._blocked_s
        for logger in trainer.loggers:  # not by `log`, which keeps only every `log_every_n_steps`-th step
            logger.log_metrics(metrics, step=trainer.global_step)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """When the next begins; one that is under way begins again after a resume."""
        return {"next_step": self._next_step if self._run is None else self._began_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on there."""
        self._next_step = state_dict["next_step"]
