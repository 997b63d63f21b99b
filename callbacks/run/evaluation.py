"""Evaluation of held-out prompts concurrently with training."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer

from lit_async_rl.callbacks.parts import policy_module, rollout_data
from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.data.settings import check_ends
from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.prompts.records import Records
from lit_async_rl.prompts.sources import as_source
from lit_async_rl.rollouts.evaluation import (
    FIRST_ID,
    EvaluationPlan,
    EvaluationResult,
    EvaluationRun,
    Question,
    make_questions,
)
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer

log = logging.getLogger(__name__)


class Evaluation(pl.Callback):
    """Samples held-out prompts in the training engine, concurrently with training, and logs pass@1 and pass@k.

    The trainer waits at most `max_block_s` per evaluation, and `end_wait_s` at the end of training. The embedded engine
    schedules the samples (at most `max_concurrent` at a time) before queued rollouts, so neither starves the other.
    Training does not depend on it: with `data.admission: FixedLag` it is bit-identical. The policy evaluated is
    `eval/version`; with in-flight weight updates the last tokens may come from newer versions, up to
    `eval/newest_version`, unless the trainer waits for them (`max_block_s`). Without in-flight updates an evaluation
    uses one version, in a separate batch between two training batches.

    Logs `eval/<data set>/pass@1`, `pass@k` (unbiased: 1 - C(n - c, k) / C(n, k), Chen et al. 2021, arXiv:2107.03374),
    `reward` and `cut_share`, the same for all prompts together (without a data set), `eval/version`, `oldest_version`,
    `newest_version`, `mean_version`, `num_unscored`, `seconds` and `blocked_s`, on rank 0, at the step in which the
    evaluation ends.

    Args:
        datasets: held-out prompts by name of the dataset, each as `data.prompts`: a source, or records.
        every_n_steps: optimizer steps between the starts of evaluations, from the first step on. One that is due while
            another runs starts afterwards. After a resume the next starts at the step planned before, at most this many
            steps later.
        num_samples: completions per prompt, n.
        ks: values of k for pass@k; None is 1 and `num_samples`.
        sampling: sampling parameters; None is `data.val_sampling`.
        max_concurrent: largest number of samples in the engine.
        max_block_s: seconds that the trainer waits for an evaluation.
        timeout_s: seconds after which an evaluation is abandoned, with a log line.
        end_wait_s: seconds to wait for a running evaluation at the end of training.

    Attributes:
        results: results of all evaluations so far.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        datasets: dict[str, Records],
        every_n_steps: int = 50,
        num_samples: int = 1,
        ks: Sequence[int] | None = None,
        sampling: SamplingParams | None = None,
        max_concurrent: int = 16,
        max_block_s: float = 0.0,
        timeout_s: float = 600.0,
        end_wait_s: float = 60.0,
    ) -> None:
        check_range(
            "Evaluation",
            "integer >= 1",
            every_n_steps=every_n_steps,
            num_samples=num_samples,
            max_concurrent=max_concurrent,
        )
        check_range("Evaluation", ">= 0", max_block_s=max_block_s, end_wait_s=end_wait_s)
        check_range("Evaluation", "positive", timeout_s=timeout_s)
        if not datasets or not all(len(source) for source in datasets.values()):
            raise ValueError(f"Evaluation.datasets must map names to non-empty datasets, got {sorted(datasets)}")
        self.ks = sorted({1, num_samples} if ks is None else set(ks))
        if not self.ks or not 1 <= self.ks[0] <= self.ks[-1] <= num_samples:
            raise ValueError(f"Evaluation.ks={self.ks} must lie between 1 and num_samples={num_samples}")
        self.datasets = {name: as_source(one, f"Evaluation.datasets[{name!r}]") for name, one in datasets.items()}
        self.every_n_steps = every_n_steps
        self.num_samples = num_samples
        self.sampling = sampling
        self.max_concurrent = max_concurrent
        self.max_block_s = max_block_s
        self.timeout_s = timeout_s
        self.end_wait_s = end_wait_s
        self.results: list[EvaluationResult] = []
        self._questions: list[Question] | None = None  # None until they are read
        self._run: EvaluationRun | None = None
        self._next_step = self._began_step = 0
        self._next_id = FIRST_ID
        self._blocked_s = 0.0

    def setup(self, trainer: AnyTrainer, pl_module: AnyModule, stage: str) -> None:
        """Schedules an evaluation at the first step; `load_state_dict`, called later, restores the schedule."""
        if stage == "fit":
            self._run = None
            self._next_step = 0
            self._questions = None

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        """Checks the settings."""
        # a resumed run may have a shorter interval than the run before
        self._next_step = min(self._next_step, trainer.global_step + self.every_n_steps)
        data = rollout_data(trainer, "Evaluation")
        if data.tape is not None:
            raise ValueError("Evaluation needs an engine, but data.admission=FromTape has none")
        setting = "data.validation.sampling" if self.sampling is None else "Evaluation.sampling"
        data.engine.check_sampling(setting, self.sampling or data.val_sampling, self.num_samples)
        if (self.sampling or data.val_sampling).temperature == 0 and self.num_samples > 1:
            raise ValueError(
                f"Evaluation.num_samples={self.num_samples} with temperature 0: the samples of a prompt would be "
                "identical. Use num_samples: 1, or a temperature > 0"
            )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Starts an evaluation if one is due; reads the prompts before the first one."""
        data = rollout_data(trainer, "Evaluation")
        if self._questions is None:
            self._questions = self._read(data) if trainer.is_global_zero else []
        if not self._questions or self._run is not None or trainer.global_step < self._next_step:
            return
        self._began_step = trainer.global_step
        self._blocked_s = 0.0
        self._next_step = trainer.global_step + self.every_n_steps
        plan = EvaluationPlan(
            questions=self._questions,
            num_samples=self.num_samples,
            sampling=self.sampling or data.val_sampling,
            version=policy_module(pl_module, "Evaluation").version,
            max_concurrent=self.max_concurrent,
            first_id=self._next_id,
        )
        self._run = data.feed.source.evaluate(plan)
        self._next_id += len(self._questions)

    def _read(self, data: RolloutDataModule) -> list[Question]:
        """Prompts that fit; read here because the engine's maximal length is unknown until it has weights."""
        sampling = self.sampling or data.val_sampling
        for source in self.datasets.values():
            check_ends(data.codec, sampling, source)
        length = data.engine.max_model_len
        max_tokens = sampling.max_tokens
        why = f"the engine's max_model_len={length} leaves besides Evaluation's sampling.max_tokens={max_tokens}"
        return make_questions(self.datasets, data.codec, length - max_tokens, why=why, reward=data.reward)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Waits up to `max_block_s` for the evaluation before the step changes the policy."""
        remaining_s = self.max_block_s - self._blocked_s
        if self._run is not None and remaining_s > 0:
            began = time.monotonic()
            # the wait has a limit of its own: the watch on this rank's progress must not take it for a hang
            with rollout_data(trainer, "Evaluation").feed.ranks.progress.own_limit("waiting for an evaluation"):
                self._run.wait(remaining_s)
            self._blocked_s += time.monotonic() - began

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs a finished evaluation; abandons one that timed out."""
        if self._run is None:
            return
        if self._run.is_done:
            metrics = self._finish(trainer, self._run)
            pl_module.log_dict(metrics, logger=False, rank_zero_only=True)
        elif self._run.is_lost:
            self._abandon(self._run, "was lost when its engine was replaced, and will be repeated")
            self._next_step = trainer.global_step
        elif self._run.age_s > self.timeout_s:
            self._abandon(self._run, f"was abandoned after Evaluation.timeout_s={self.timeout_s:g}")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Waits up to `end_wait_s` for a running evaluation."""
        if self._run is None:
            return
        began = time.monotonic()
        is_done = self._run.wait(0.0 if trainer.received_sigterm else self.end_wait_s)
        self._blocked_s += time.monotonic() - began
        if is_done:
            self._finish(trainer, self._run)
        else:
            self._abandon(self._run, "had not finished when training ended")

    def on_exception(self, trainer: AnyTrainer, pl_module: AnyModule, exception: BaseException) -> None:
        self._run = None

    def _abandon(self, run: EvaluationRun, why: str) -> None:
        log.warning("the evaluation of version %d %s", run.version, why)
        run.abandon()
        self._run = None

    def _finish(self, trainer: pl.Trainer, run: EvaluationRun) -> dict[str, float]:
        held_out = rollout_data(trainer, "Evaluation").held_out
        result = run.result(held_out.success, self.ks)
        held_out.watch(result.rewards, result.metrics.get("cut_share", 0.0))
        self._run = None
        self.results.append(result)
        metrics = {f"eval/{name}": value for name, value in result.metrics.items()}
        for name in ("version", "oldest_version", "newest_version", "mean_version", "num_unscored", "seconds"):
            metrics[f"eval/{name}"] = float(getattr(result, name))
        metrics["eval/blocked_s"] = self._blocked_s
        for logger in trainer.loggers:  # not by `log`, which drops steps between multiples of `log_every_n_steps`
            logger.log_metrics(metrics, step=trainer.global_step)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Step of the next evaluation; a running one restarts after a resume."""
        return {"next_step": self._next_step if self._run is None else self._began_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._next_step = state_dict["next_step"]
