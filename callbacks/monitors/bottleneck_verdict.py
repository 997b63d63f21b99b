"""Bottleneck report: which side limits throughput, its cost, and the setting to change."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import deque
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_async_rl.callbacks.monitors.dropped_work import dropped_sentence
from lit_async_rl.callbacks.monitors.stale_data import StaleDataWords
from lit_async_rl.callbacks.parts import callbacks_of, rollout_data, signs_of, stats_of, writing_folder
from lit_async_rl.callbacks.run.weight_sync import WeightSync
from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.engines.base import RolloutEngine
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.environments.multi_request import MultiRequestEngine
from lit_async_rl.rewards import hooks
from lit_async_rl.rewards.calls import is_async
from lit_async_rl.rewards.functions import IsolatedReward
from lit_async_rl.rollouts.totals import ProducerStats
from lit_async_rl.runtime.files import append, tolerate_full_disk
from lit_async_rl.scheduling.admission import Bounded
from lit_async_rl.scheduling.bottleneck import (
    NO_TIME,
    Advice,
    Intervals,
    Setting,
    Settings,
    SteadyAdvice,
    StepWork,
    Verdict,
    advise,
    diagnose,
)
from lit_async_rl.stabilizers.collapse import CollapseTrend
from lit_async_rl.training.module import PolicyModule
from lit_async_rl.training.rate_by_bound import handling, rate_factor
from lit_async_rl.types import RolloutBatch
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer

# -- Settings to change, for each possible bottleneck and for a collapsing run ----------------------------------------


MAX_PADDING_SHARE = 0.25  # of the positions in a training pass; above, more micro-batches are advised
MAX_CPU_SHARE = 0.5  # of the scoring time; below, reward workers mostly wait, and more of them are advised
ADD_VCPO = "add --config configs/stabilizers/vcpo.yaml"
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # cgroup v2: microseconds of CPU time per period, and of the period


@dataclass
class StepLoad:
    """Load counters of a window of steps.

    Attributes:
        began: totals of the run at the beginning of the window.
        began_at: its beginning in seconds since 1970, as in the timeline.
        num_steps: optimizer steps.
        num_unfinished: groups in generation at the end of a step, summed over steps.
        min_queued: minimum over steps of the groups ready for training.
        num_tokens: tokens in training batches.
        num_positions: the same with padding.
        scoring_cpu_share: share of the scoring time in which reward workers computed.
    """

    began: Intervals = NO_TIME
    began_at: float = 0.0
    num_steps: int = 0
    num_unfinished: int = 0
    min_queued: int = 0
    num_tokens: int = 0
    num_positions: int = 0
    scoring_cpu_share: float = 0.0

    def add_batch(self, batch: RolloutBatch) -> None:
        self.num_tokens += int(batch.attention_mask.sum())
        self.num_positions += batch.attention_mask.numel()

    def add_step(self, stats: ProducerStats) -> None:
        self.min_queued = min(self.min_queued, stats.num_queued) if self.num_steps else stats.num_queued
        self.num_unfinished += stats.num_unfinished
        self.scoring_cpu_share = stats.scoring_cpu_share
        self.num_steps += 1


def adjustable_settings(data: RolloutDataModule, pl_module: AnyModule, load: StepLoad, num_ranks: int = 1) -> Settings:
    """For each possible bottleneck, a setting that can still be changed, with `num_ranks` trainers on this machine."""
    sync_steps = data.weight_sync_steps
    is_spare = num_busy_threads(data, pl_module, num_ranks) + num_ranks <= num_cores()
    return Settings(
        engine=_engine_setting(data, load.num_unfinished / max(1, load.num_steps), is_spare),
        trainer=_trainer_setting(data, pl_module, 1 - load.num_tokens / max(1, load.num_positions), is_spare=is_spare),
        reward=_reward_setting(data, load.scoring_cpu_share, is_spare),
        weight_sync=Setting(name="data.weight_sync_steps", present=sync_steps, suggested=2 * sync_steps),
        staleness=_staleness_setting(data),
        fresher=_fresher_setting(data, load.min_queued),
    )


def stabilizing_setting(trainer: AnyTrainer, pl_module: AnyModule) -> str:
    """Advice for a collapsing run: VCPO or the rate that fits the bound; if VCPO is in use, a smaller rate or bound."""
    data = trainer.datamodule
    resume = "and resume from a checkpoint before the collapse"
    if _lacks_baseline(pl_module):
        factor = fitting_rate(pl_module, data, data.max_staleness) if isinstance(data, RolloutDataModule) else 1.0
        rate = f", or set model.learning_rate to {factor:.2g} times that of a synchronous run" if factor < 1 else ""
        return f"{ADD_VCPO}{rate}, {resume}"
    bound = f" (now {data.max_staleness})" if isinstance(data, RolloutDataModule) else ""
    return f"lower model.learning_rate or data.max_staleness{bound}, {resume}"


def fitting_rate(pl_module: AnyModule, data: RolloutDataModule, max_staleness: int) -> float:
    """Multiple of a synchronous run's learning rate that fits a bound, by the objective; 1 for other modules."""
    if not isinstance(pl_module, PolicyModule):
        return 1.0
    objective = pl_module.objective
    kind = handling(objective.loss, objective.correction, objective.baseline)
    return rate_factor(max_staleness, kind, data.weight_sync_steps)


def _lacks_baseline(pl_module: AnyModule) -> bool:
    return isinstance(pl_module, PolicyModule) and pl_module.objective.baseline is None


def num_cores() -> int:
    """Number of CPU cores available to this process, by affinity and by the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        quota, period = CPU_QUOTA.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def num_busy_threads(data: RolloutDataModule, pl_module: AnyModule, num_ranks: int) -> int:
    """Number of threads competing for cores: trainers, engine and reward workers."""
    trainers = num_ranks * (torch.get_num_threads() if pl_module.device.type == "cpu" else 1)
    engine = _sampling_engine(data)
    threads = getattr(engine, "num_threads", 1)  # vLLM's setting is per worker, on a CPU; of replicas elsewhere 0
    threads = torch.get_num_threads() if threads is None else threads
    if engine is not data.engine:  # the loop of its episodes
        threads += 1
    return trainers + threads + (1 if is_async(data.reward) else data.scoring.threads)


def _engine_setting(data: RolloutDataModule, unfinished: float, is_spare: bool) -> Setting | None:
    engine = _sampling_engine(data)
    is_inner = engine is not data.engine
    prefix = "data.engine.init_args.engine.init_args" if is_inner else "data.engine"
    needs = () if is_inner else _engine_arguments(engine)
    if engine.num_replicas is not None:
        return Setting(name=f"{prefix}.replicas", present=engine.num_replicas, suggested=engine.num_replicas + 1)
    slots = getattr(engine, "num_slots", None)  # None for vLLM: memory limits its batch
    if slots is not None and unfinished * data.group_size > slots:  # some rollouts wait for a slot
        return Setting(name=f"{prefix}.num_slots", present=slots, suggested=2 * slots, needs=needs)
    if not isinstance(engine, EmbeddedEngine) or engine.num_threads is None or not is_spare:
        return None
    if engine.device in ("auto", "cpu") and not torch.cuda.is_available():
        threads = engine.num_threads
        return Setting(name=f"{prefix}.num_threads", present=threads, suggested=threads + 1, needs=needs)
    return None


def _engine_arguments(engine: RolloutEngine) -> tuple[str, ...]:
    """Arguments that select the default engine; the command line needs them before the engine's settings."""
    if type(engine) is not EmbeddedEngine:
        return ()
    in_order = () if engine.in_flight_weight_updates else ("--data.engine.in_flight_weight_updates", "false")
    return ("--data.engine", "EmbeddedEngine", *in_order)


def _reward_setting(data: RolloutDataModule, cpu_share: float, is_spare: bool) -> Setting | None:
    """More workers, unless they would compete: for the GIL if rewards compute, or for cores if processes do."""
    if (actors := hooks.num_actors(data.reward)) is not None:
        return Setting(name="cluster.rewards.actors", present=actors, suggested=2 * actors)
    is_computing = cpu_share > MAX_CPU_SHARE
    if is_computing or (isinstance(data.reward, IsolatedReward) and not is_spare):
        return None
    reward: Any = data.reward
    if hasattr(reward, "concurrency_setting"):
        setting = reward.concurrency_setting
        if setting is None:
            return None
        return Setting(name=f"data.reward.init_args.{setting[0]}", present=setting[1], suggested=2 * setting[1])
    is_waiting = any(is_async(part) for part in hooks.parts_of(reward))
    workers = data.scoring.calls if is_waiting else data.scoring.threads
    return Setting(name="data.scoring.workers", present=workers, suggested=2 * workers)


def _trainer_setting(data: RolloutDataModule, pl_module: AnyModule, padding: float, is_spare: bool) -> Setting | None:
    parts = data.micro_batches_per_step
    if padding > MAX_PADDING_SHARE and not (data.keep_groups_whole or data.shares_prefixes):  # sorted by length
        return Setting(name="data.micro_batches_per_step", present=parts, suggested=2 * parts)
    if parts > 1 and padding < MAX_PADDING_SHARE / 2:
        return Setting(name="data.micro_batches_per_step", present=parts, suggested=parts // 2)
    if isinstance(pl_module, PolicyModule) and pl_module.policy.causal_lm.is_gradient_checkpointing:
        return Setting(name="model.gradient_checkpointing", present=True, suggested=False)
    threads = torch.get_num_threads()
    if pl_module.device.type == "cpu" and is_spare:
        return Setting(name="num_threads", present=threads, suggested=threads + 1)
    return None


def _staleness_setting(data: RolloutDataModule) -> Setting | None:
    bound = data.max_staleness
    if bound and data.admission.in_order:
        return Setting(name="data.admission", present=type(data.admission).__name__, suggested="Bounded")
    ratio = data.admission.async_ratio if isinstance(data.admission, Bounded) else None
    if ratio is not None and ratio < bound:
        return Setting(name="data.admission.async_ratio", present=ratio, suggested=min(bound, max(1, 2 * ratio)))
    if bound and not data.engine.in_flight_weight_updates:
        return Setting(name="data.engine.in_flight_weight_updates", present=False, suggested=True)
    if bound != data.configured_bound:  # controlled by a callback; the setting is only its upper limit
        return None
    return Setting(name="data.max_staleness", present=bound, suggested=max(1, 2 * bound))


def _fresher_setting(data: RolloutDataModule, min_queued: int) -> Setting | None:
    """A smaller staleness bound, if more than one round was always ready."""
    bound = data.max_staleness
    spare = min_queued // data.groups_per_round - 1
    if bound != data.configured_bound:
        return None
    suggested = max(1, bound - spare)
    return Setting(name="data.max_staleness", present=bound, suggested=suggested) if 0 < suggested < bound else None


# -- Inputs of `scheduling.bottleneck`: generation times of groups, effective sample sizes, CPU time -------------------


MAX_SAMPLES = 4096  # groups, and steps
MIN_STEPS = 8  # for a recommendation


class StalenessAdvice:
    """Recommends a staleness bound for runs like this one."""

    def __init__(self) -> None:
        self._waits: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._ess: deque[float] = deque(maxlen=MAX_SAMPLES)

    def observe(self, data: RolloutDataModule, ess_ratio: float | None) -> None:
        """Adds one optimizer step."""
        self._waits.extend(group.generation_s for group in data.last_step_groups)
        if ess_ratio is not None:
            self._ess.append(ess_ratio)

    def work(self, data: RolloutDataModule, pl_module: AnyModule, *, run: Intervals, load: StepLoad) -> StepWork | None:
        """Work of the run so far for each version of the policy; None if it was too short."""
        if load.num_steps < MIN_STEPS or not self._waits:
            return None
        steps = load.num_steps / data.weight_sync_steps  # a version of the policy is what a bound counts
        engine = _sampling_engine(data)
        cpu_s = run.cpu_s if pl_module.device.type == "cpu" else 0.0
        if cpu_s and getattr(engine, "own_process", False):  # add CPU time of the engine's process
            cpu_s += run.engine_busy_s * (getattr(engine, "num_threads", None) or torch.get_num_threads())
        return StepWork(
            train_s=run.trainer_s / steps,
            engine_s=run.engine_busy_s / steps,
            waits=tuple(self._waits),
            busy_share=run.engine_busy_s / run.wall_s,
            groups_per_step=data.groups_per_round,
            core_s=cpu_s / num_cores() / steps,
        )

    def advice(self, data: RolloutDataModule, pl_module: AnyModule, run: Intervals, load: StepLoad) -> Advice | None:
        """The recommendation; None for a short run, or one without a constant staleness bound."""
        work = self.work(data, pl_module, run=run, load=load)
        is_constant = isinstance(data.admission, Bounded) and data.max_staleness == data.configured_bound
        if work is None or not is_constant:
            return None
        return advise(
            work,
            ess_ratio=statistics.median(self._ess) if self._ess else None,
            present=data.max_staleness,
            num_slots=getattr(_sampling_engine(data), "num_slots", None),
            waiting_rollouts=load.num_unfinished / load.num_steps * data.group_size,
            rate_factor=partial(fitting_rate, pl_module, data),
        )


def _sampling_engine(data: RolloutDataModule) -> RolloutEngine:
    return data.engine.engine if isinstance(data.engine, MultiRequestEngine) else data.engine


ESS = "importance/ess_ratio"
REWARD = "reward/mean"
NO_SIGNAL = "rollout/no_signal_share"
MIN_STEPS_WITHOUT_SIGNAL = 10  # consecutive steps before the report that nothing is learned
MIN_STEPS_FOR_VERDICT = 20  # after the first one, in which threads, caches and compilers start


class BottleneckVerdict(pl.Callback):
    """Prints the verdict of `scheduling.bottleneck` every `every_n_steps` steps, and on the whole run at the end.

    The verdict at the end includes the gain from asynchrony and a sufficient staleness bound. Verdicts on each window,
    and on the run until then, also go to `verdicts.jsonl` in the run's folder.

    Until twenty steps after the first, it prints time shares only, and neither names a side nor advises. A setting is
    advised if a tenth of the time can be gained, according to two consecutive windows; other advice follows only after
    the load has changed (`SteadyAdvice`). A large share of dropped tokens is reported first.

    With each verdict it logs `perf/overlap_efficiency`, `perf/trainer_share`, `perf/weight_sync_share`,
    `perf/scoring_share` and `perf/share_to_win`, and of the run so far `perf/steady_staleness`. Validation time is
    excluded. A replay of a tape has no engine, and gets no verdict.

    For a collapsing run (`CollapseTrend` of the metrics of `ImportanceMonitor` and `RolloutMonitor`), it reports the
    collapse and a configuration against it instead of a verdict on speed. It also reports if all completions of each
    prompt had equal rewards in the last ten steps or more, for example because a reward is always 0; and at the end, if
    data were older than the learning rate allows, or if engine and trainer differ more than versions do
    (`StaleDataWords`).

    Args:
        every_n_steps: optimizer steps per window.

    Attributes:
        verdict: last verdict; None before the first.
        is_early: whether the run was still too short for a verdict at the last report.
        words: printed text of the last verdict.
        collapse: description of an ongoing collapse; None while training is healthy.
        advice: advice on the staleness bound at the end of a run; None before, or without any.
        stats: statistics of the whole run at its end; None before.

    Raises:
        ValueError: `every_n_steps` is not positive; when training starts, there is no `RolloutDataModule`.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        check_range("BottleneckVerdict", "integer >= 1", every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps
        self._reset()

    def _reset(self) -> None:
        self.verdict: Verdict | None = None
        self.is_early = False
        self.words: str | None = None
        self.collapse: str | None = None
        self.advice: Advice | None = None
        self.stats: ProducerStats | None = None
        self._trend = CollapseTrend()
        self._staleness = StalenessAdvice()
        self._stale_data = StaleDataWords()
        self._steady = SteadyAdvice()
        self._stats_before: ProducerStats | None = None  # at the beginning of the window
        self._left_out = self._validation_began = NO_TIME
        self._run: StepLoad | None = None
        self._window = StepLoad()
        self._step = self._without_signal = 0
        self._folder: Path | None = None

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        rollout_data(trainer, "BottleneckVerdict")
        self._reset()
        self._step = trainer.global_step
        folder = writing_folder(trainer)  # a collective: all ranks must call it
        self._folder = folder if trainer.is_global_zero else None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Starts the clock at the first rollouts: no setting avoids the initial wait."""
        data = rollout_data(trainer, "BottleneckVerdict")
        if self._run is None and data.tape is None and data.stats() is not None:  # this rank has the producer
            began = self._totals(trainer)
            now = time.time()
            self._run = StepLoad(began, now)
            self._window = StepLoad(began, now)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validation_began = self._totals(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._left_out = self._left_out + (self._totals(trainer) - self._validation_began)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Updates counters after every step, and reports after every window."""
        if self._run is None:
            return
        self._run.add_batch(batch)
        self._window.add_batch(batch)
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        stats = trainer.datamodule.stats()  # type: ignore[attr-defined]
        self._run.add_step(stats)
        self._window.add_step(stats)
        self._observe(trainer)
        if self._step % self.every_n_steps:
            return
        so_far = self._diagnose(trainer, pl_module, self._run)
        verdict = self._diagnose(trainer, pl_module, self._window)
        in_window = verdict.shares if self.is_early else self._steady.for_window(verdict)
        dropped = dropped_sentence(stats, self._stats_before)
        self.words = self._words(trainer, pl_module, in_window, dropped=dropped)
        self._stats_before = stats
        advised = None if self.is_early else self._steady.for_run(so_far, is_over=False)
        text = self._words(trainer, pl_module, str(advised or so_far.shares), dropped=dropped_sentence(stats))
        self._record(trainer, so_far, text, load=self._run, stats=stats)
        self._record(trainer, verdict, self.words, load=self._window)
        self._window = StepLoad(self._totals(trainer), time.time())
        for name, value in _metrics(verdict).items():
            pl_module.log(name, value)
        data = rollout_data(trainer, "BottleneckVerdict")
        work = self._staleness.work(data, pl_module, run=so_far.intervals, load=self._run)
        if work is not None and (steady := work.steady_staleness()) is not None:
            pl_module.log("perf/steady_staleness", steady)
        _print(trainer, f"step {self._step}: {self.words}")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reports on the whole run."""
        if self._run is not None and self._run.num_steps:
            verdict = self._diagnose(trainer, pl_module, self._run)
            data = rollout_data(trainer, "BottleneckVerdict")
            advised = None if self.is_early else self._steady.for_run(verdict, is_over=True)
            self.stats = stats = data.stats()
            dropped = None if stats is None else dropped_sentence(stats)
            about_data = self._stale_data.sentences(ADD_VCPO if _lacks_baseline(pl_module) else "")
            few = "; too few steps for a verdict" if self.is_early else ""
            speed = ". ".join([*about_data, f"{advised or verdict.shares}{few}"])
            words = self._words(trainer, pl_module, speed, dropped=dropped)
            self._record(trainer, verdict, words, load=self._run, stats=stats)
            if self.collapse is None and dropped is None and not self.is_early:
                self.advice = self._staleness.advice(data, pl_module, verdict.intervals, self._run)
            names_bound = not self._steady.has_named("data.max_staleness", advised)
            advice = "" if self.advice is None else self.advice.text(names_bound)
            self.words = f"{words}; {advice}" if advice else words
            _print(trainer, f"whole run: {self.words}")
        self._run = None

    def on_exception(self, trainer: AnyTrainer, pl_module: AnyModule, exception: BaseException) -> None:
        """Reports on a run ended by SIGTERM or Ctrl-C, like `on_train_end`."""
        if isinstance(exception, SIGTERMException):
            self.on_train_end(trainer, pl_module)

    def _observe(self, trainer: AnyTrainer) -> None:
        metrics = trainer.callback_metrics
        self._stale_data.observe(metrics)
        ess = float(metrics[ESS]) if ESS in metrics else None
        self._staleness.observe(rollout_data(trainer, "BottleneckVerdict"), ess)
        objective = getattr(trainer.lightning_module, "objective", None)
        if NO_SIGNAL in metrics and getattr(objective, "trains_rewards", True):
            self._without_signal = self._without_signal + 1 if float(metrics[NO_SIGNAL]) == 1 else 0
        if ESS in metrics and REWARD in metrics:  # logged by monitors before this one in the list
            self.collapse = self._trend.observe(float(metrics[ESS]), float(metrics[REWARD]))

    def _words(self, trainer: AnyTrainer, pl_module: AnyModule, speed: str, dropped: str | None) -> str:
        """Text of a report: only the collapse during one; else steps without signal, dropped tokens, and speed."""
        if self.collapse is not None:
            return f"training is collapsing: {self.collapse}; {stabilizing_setting(trainer, pl_module)}"
        sentences = []
        if self._without_signal >= MIN_STEPS_WITHOUT_SIGNAL:
            same = "all completions of a prompt had the same reward: look at data.reward and samples.jsonl"
            sentences.append(f"nothing was learned in the last {self._without_signal} steps, {same}")
        if signs := signs_of(trainer):
            sentences.append(f"signs of reward hacking: {'; '.join(signs.values())}")
        if dropped is not None:
            sentences.append(dropped)
        return ". ".join([*sentences, speed])

    def _diagnose(self, trainer: pl.Trainer, pl_module: pl.LightningModule, load: StepLoad) -> Verdict:
        data = rollout_data(trainer, "BottleneckVerdict")
        settings = adjustable_settings(data, pl_module, load, num_ranks=trainer.num_devices)
        verdict = diagnose(self._totals(trainer) - load.began, settings)
        self.is_early = self._run is None or self._run.num_steps <= MIN_STEPS_FOR_VERDICT
        self.verdict = None if self.is_early else verdict
        return verdict

    def _record(
        self, trainer: AnyTrainer, verdict: Verdict, text: str, load: StepLoad, stats: ProducerStats | None = None
    ) -> None:
        if self._folder is None:
            return
        row = {
            "step": trainer.global_step,
            "whole_run": load is self._run,
            "began_at": load.began_at,
            "ended_at": time.time(),
            **asdict(verdict.intervals),
            "side": verdict.side,
            "share_won": verdict.share_won,
            "text": text,
        }
        if stats is not None:
            row["num_tokens"] = stats.num_tokens
        path = self._folder / "verdicts.jsonl"
        with tolerate_full_disk(str(path)):
            self._folder.mkdir(parents=True, exist_ok=True)
            append(path, json.dumps(row) + "\n")

    def _totals(self, trainer: pl.Trainer) -> Intervals:
        """Totals since the start of the run, without validation."""
        now = intervals_of(trainer)
        return NO_TIME if now is None else now - self._left_out


def intervals_of(trainer: AnyTrainer) -> Intervals | None:
    """Totals since the start of the run; None on ranks without the engine."""
    stats = stats_of(trainer)
    if stats is None:
        return None
    syncs = callbacks_of(trainer, WeightSync)
    held_s = sum(sync.held_s for sync in syncs)
    return Intervals(
        wall_s=time.monotonic(),
        wait_s=stats.wait_s + held_s,
        sync_s=sum(sync.total_s for sync in syncs),
        engine_busy_s=stats.engine_busy_s,
        scoring_s=stats.scoring_s,
        cpu_s=time.process_time(),
        held_s=held_s,
    )


def _metrics(verdict: Verdict) -> dict[str, float]:
    i = verdict.intervals
    return {
        "perf/overlap_efficiency": i.overlap_efficiency,
        "perf/trainer_share": i.trainer_s / i.wall_s,
        "perf/weight_sync_share": i.sync_s / i.wall_s,
        "perf/scoring_share": i.scoring_s / i.wall_s,
        "perf/share_to_win": verdict.share_won,
    }


def _print(trainer: pl.Trainer, text: str) -> None:
    """Prints above the progress bar, if there is one."""
    if trainer.is_global_zero:
        bar = trainer.progress_bar_callback
        print(text) if bar is None else bar.print(text)
