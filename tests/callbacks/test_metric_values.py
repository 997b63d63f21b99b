"""Every logged metric against a calculation of its own: plain and slow, in float64, from rollouts, weights and rewards.

Four short runs with two micro-batches a step are recorded: the weights before each step, the groups that it trained on,
and what its row of `metrics.csv` says. Log-probabilities come from one forward pass for each completion, gradients from
a loss that is written out here. A new metric joins by one line in `OWN`, or in `NOT_HERE` with the reason.
"""

from __future__ import annotations

import copy
import csv
import itertools
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any, ClassVar

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from flow import MODEL, fit, make_data, make_module
from metric_page import METRICS
from transformers import AutoTokenizer

from lit_async_rl.advantages.group import GroupMean
from lit_async_rl.callbacks import (
    AdaptiveStaleness,
    CollapseAlarm,
    EngineCheck,
    ESSLearningRate,
    Evaluation,
    FreshDataMonitor,
    GradientAlignmentControl,
    GradientClipping,
    GradientMonitor,
    ImportanceMonitor,
    LengthBiasMonitor,
    ReplayMonitor,
    RolloutMonitor,
    SkipNonFinite,
    StalenessMonitor,
    ThroughputMonitor,
)
from lit_async_rl.corrections import TokenTruncatedIS
from lit_async_rl.corrections.weights import CurrentProximal
from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.losses import PPOClip, Reinforce, TrajectoryBalance
from lit_async_rl.losses.aggregation import FixedLength
from lit_async_rl.replay.buffer import ReplayBuffer
from lit_async_rl.rollouts.intake import GroupFilter
from lit_async_rl.tasks import SortDigits
from lit_async_rl.training.optimizer import Linear
from lit_async_rl.training.trackers import CSVLog
from lit_async_rl.types import Rollout, RolloutGroup

STEPS, PEAK, TEMPERATURE = 5, 2e-3, 1.2
BASE = 1000.0  # rewards far from 0 show what is computed as a difference of large numbers
SUCCESS = BASE + 0.3
KL, ENTROPY, CAP, MAX_NORM, BASE_ESS = 0.1, 0.01, 1.02, 0.05, 0.9
LOW, HIGH = 0.02, 0.6
BETA = 0.5
CAPACITY, MAX_AGE, FRESH_GROUPS = 12, 1, 2


def reward_of(answer: str, text: str) -> float:
    right = sum(a == b for a, b in zip(text, answer, strict=False))
    return BASE + right / len(answer) + len(text) / 64


def reward(prompt: Any, completion: str) -> float:
    return reward_of(prompt.answer, completion)


class ShiftedEngine(EmbeddedEngine):
    """Says that every token was a little less likely than it was: ratios differ from 1 by more than rounding."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.evaluated: list[Any] = []

    def poll(self, timeout_s: float) -> list[Any]:
        found = super().poll(timeout_s)
        self.evaluated += [one for one in found if one.request_id >= 2**40]
        return [
            replace(one, logprobs=tuple(p - 0.03 * (token % 4) for p, token in zip(*pair, strict=True)))
            for one in found
            for pair in [(one.logprobs, one.token_ids)]
        ]


class DropThird(GroupFilter):
    """Drops every third group, and notes the rewards of all."""

    drops: ClassVar[bool] = True
    fate: ClassVar[str] = "third"

    def __init__(self) -> None:
        self.seen: list[tuple[float, bool]] = []

    def __call__(self, group: RolloutGroup) -> RolloutGroup | None:
        is_dropped = len(self.seen) % 3 == 1
        self.seen.append((sum(one.reward for one in group.rollouts) / len(group.rollouts), is_dropped))
        return None if is_dropped else group


@dataclass
class Step:
    """What a step was computed from, and its own slow statistics."""

    lm: Any
    version: int
    groups: list[RolloutGroup]
    first_rows: list[tuple[int, ...]]  # tokens of the completions in the first micro-batch
    seen: int = 0  # groups that had their rewards before the monitors looked
    seen_after: int = 0
    logged: dict[str, float] = field(default_factory=dict)

    @cached_property
    def rollouts(self) -> list[tuple[RolloutGroup, Rollout]]:
        return [(group, rollout) for group in self.groups for rollout in group.rollouts]

    def logprobs(self, lm: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Log-probability and entropy of each token of each completion, one forward pass each."""
        found = []
        for group, rollout in self.rollouts:
            ids = torch.tensor([[*group.prompt_ids, *rollout.token_ids]])
            logits = lm(ids).logits[0, len(group.prompt_ids) - 1 : -1] / TEMPERATURE
            log_p = logits - torch.logsumexp(logits, -1, keepdim=True)
            chosen = log_p[range(len(log_p)), list(rollout.token_ids)]
            found.append((chosen, -(log_p.exp() * log_p).sum(-1)))
        return found

    @cached_property
    def stats(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        with torch.no_grad():
            return self.logprobs(self.lm)

    @cached_property
    def log_ratios(self) -> list[np.ndarray]:
        behavior = [np.array(rollout.logprobs) for _, rollout in self.rollouts]
        return [log_p.numpy() - mu for (log_p, _), mu in zip(self.stats, behavior, strict=True)]

    @property
    def tokens(self) -> np.ndarray:
        return np.concatenate(self.log_ratios)

    @property
    def entropies(self) -> np.ndarray:
        return np.concatenate([entropy.numpy() for _, entropy in self.stats])

    @property
    def rewards(self) -> np.ndarray:
        """Of the texts, decoded anew."""
        texts = [tokenizer().decode(one.token_ids, skip_special_tokens=True) for _, one in self.rollouts]
        answers = ["".join(sorted(group.prompt.text.removesuffix("="))) for group, _ in self.rollouts]
        return np.array([reward_of(answer, text) for answer, text in zip(answers, texts, strict=True)])

    def advantages(self, standardize: bool) -> list[float]:
        values: list[float] = []
        rewards = iter(self.rewards.tolist())
        for group in self.groups:
            own = [next(rewards) for _ in group.rollouts]
            mean = math.fsum(own) / len(own)
            std = math.sqrt(math.fsum((one - mean) ** 2 for one in own) / len(own))
            is_equal = max(own) == min(own)
            values += [0.0 if is_equal else (one - mean) / (std + 1e-6 if standardize else 1.0) for one in own]
        return values

    @property
    def ages(self) -> list[list[int]]:
        return [[self.version - version for version in one.versions] for _, one in self.rollouts]


@dataclass
class Run:
    """A recorded run."""

    steps: list[Step]
    reference: Any
    engine: ShiftedEngine
    filter: DropThird
    loss: Callable[[Run, int, Any], torch.Tensor]
    validations: list[tuple[int, list[Any]]]
    rows: list[dict[str, str]]
    known: dict[int, tuple[float, torch.Tensor]] = field(default_factory=dict)

    def loss_and_gradient(self, k: int) -> tuple[float, torch.Tensor]:
        """Of the loss that is written out below, in float64."""
        if k not in self.known:
            lm = self.steps[k].lm
            value = self.loss(self, k, lm)
            parameters = [p for p in lm.parameters() if p.requires_grad]
            pieces = torch.autograd.grad(value, parameters)
            self.known[k] = float(value.detach()), torch.cat([piece.flatten() for piece in pieces])
        return self.known[k]

    def norm(self, k: int) -> float:
        return float(self.loss_and_gradient(k)[1].norm())

    def cosine(self, k: int) -> float | None:
        if k == 0:
            return None
        now, before = self.loss_and_gradient(k)[1], self.loss_and_gradient(k - 1)[1]
        return float(now @ before / now.norm() / before.norm())


class Recorder(pl.Callback):
    """Keeps what a step is computed from; stands before all monitors."""

    def __init__(self, counts: DropThird) -> None:
        self.counts = counts
        self.steps: list[Step] = []
        self.validations: list[tuple[int, list[Any]]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch.micro_batch != 0:
            return
        rows = [
            tuple(ids[mask].tolist())
            for ids, mask, index in zip(batch.input_ids, batch.loss_mask, batch.group_index, strict=True)
            if index >= 0
        ]
        lm = copy.deepcopy(pl_module.policy.causal_lm).double()
        groups = list(trainer.datamodule.last_step_groups)
        self.steps.append(Step(lm, pl_module.version, groups, rows))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.steps[-1].seen = len(self.counts.seen)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.validations.append((trainer.global_step, list(pl_module.validator.samples)))


class LastLook(pl.Callback):
    """Counts the groups that had their rewards after the monitors looked."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def on_train_batch_end(self, *_: Any) -> None:
        self.recorder.steps[-1].seen_after = len(self.recorder.counts.seen)


class Poison(pl.Callback):
    """A gradient of NaN in one step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == self.step:
            next(p for p in pl_module.policy.parameters() if p.grad is not None).grad.fill_(math.nan)


def weighted(step: Step, per_token: list[torch.Tensor]) -> torch.Tensor:
    """Mean over all tokens of the step."""
    return torch.cat(per_token).sum() / sum(map(len, per_token))


def clipped_loss(run: Run, k: int, lm: Any, kl: float = 0.0, bonus: float = 0.0) -> torch.Tensor:
    """PPO's clipped surrogate against the behavior policy, a KL penalty to the reference, and an entropy bonus."""
    step = run.steps[k]
    with torch.no_grad():
        reference = [log_p for log_p, _ in step.logprobs(run.reference)]
    terms = []
    for (log_p, entropy), ref, advantage, (_, one) in zip(
        step.logprobs(lm), reference, step.advantages(True), step.rollouts, strict=True
    ):
        ratio = torch.exp(log_p - torch.tensor(one.logprobs, dtype=torch.float64))
        surrogate = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        gap = (log_p - ref).detach()
        weight = ratio.detach()
        value = weight * (torch.exp(-gap) - 1 + gap)
        penalty = value + weight * gap * (log_p - log_p.detach())
        terms.append(surrogate + kl * penalty - bonus * entropy)
    return weighted(step, terms)


def reinforce_loss(run: Run, k: int, lm: Any) -> torch.Tensor:
    """REINFORCE with truncated importance weights of tokens."""
    step = run.steps[k]
    terms = []
    for (log_p, _), advantage, (_, one) in zip(step.logprobs(lm), step.advantages(True), step.rollouts, strict=True):
        ratio = torch.exp(log_p.detach() - torch.tensor(one.logprobs, dtype=torch.float64))
        terms.append(-ratio.clamp(max=CAP) * advantage * log_p)
    return weighted(step, terms)


def balance_loss(run: Run, k: int, lm: Any) -> torch.Tensor:
    """Trajectory balance: the mean of squared residuals, with log Z without gradient."""
    step = run.steps[k]
    with torch.no_grad():
        reference = [log_p.sum() for log_p, _ in step.logprobs(run.reference)]
    gaps = [log_p.sum() - ref for (log_p, _), ref in zip(step.logprobs(lm), reference, strict=True)]
    residuals = []
    rest = iter(zip(gaps, step.advantages(False), strict=True))
    for group in step.groups:
        own = [next(rest) for _ in group.rollouts]
        mean = sum(gap.detach() for gap, _ in own) / len(own)
        residuals += [(gap - mean - advantage / BETA) ** 2 for gap, advantage in own]
    return torch.stack(residuals).mean()


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


@cache
def record(name: str) -> Run:
    """Trains, and reads the log."""
    counts = DropThird()
    recorder = Recorder(counts)
    engine = ShiftedEngine(in_flight_weight_updates=name == "stale", seed=1)
    # stabilizers that change the gradient stand behind those that measure it
    monitors = [RolloutMonitor(), StalenessMonitor(), ImportanceMonitor(), ThroughputMonitor(), GradientMonitor()]
    data: dict[str, Any] = dict(max_staleness=0, prompts=SortDigits(6, size=8))
    module: dict[str, Any] = dict(loss=PPOClip(), scheduler=Linear(warmup=2, final=0.1), learning_rate=PEAK)
    loss: Any = clipped_loss
    trainer: dict[str, Any] = {}
    if name == "stale":
        loss = partial(clipped_loss, kl=KL, bonus=ENTROPY)
        data |= dict(max_staleness=2, reward_success=SUCCESS)
        module |= dict(kl_coefficient=KL, entropy_coefficient=ENTROPY)
        alarm = CollapseAlarm(min_ess_ratio=None, max_kl=None, max_cosine=1.0)  # an alarm would forget the gradient
        adaptive = AdaptiveStaleness(target_ess_ratio=1.0, band=0.0, smoothing=0.5)
        callbacks = [*monitors, alarm, LengthBiasMonitor(), ESSLearningRate(base_ess_ratio=BASE_ESS), adaptive]
        callbacks += [FreshDataMonitor(), GradientClipping(max_norm=MAX_NORM)]
    elif name == "fresh":
        loss = reinforce_loss
        data |= dict(filters=[counts], reward_success=SUCCESS)
        data |= dict(val_prompts=SortDigits(6, size=6, split="held_out"), num_val_samples=3, success_reward=SUCCESS)
        data |= dict(val_sampling=SamplingParams(max_tokens=8, temperature=2.0))
        module |= dict(loss=Reinforce(), proximal=CurrentProximal(), correction=TokenTruncatedIS(cap=CAP))
        held_out = {"short": SortDigits(4, size=3, split="held_out"), "long": SortDigits(6, size=4, split="held_out")}
        evaluation = Evaluation(held_out, num_samples=3, max_block_s=60.0)
        check = EngineCheck(num_rollouts=100, bound=1.0)
        callbacks = [*monitors, check, FreshDataMonitor(), evaluation, AdaptiveStaleness(max_kl=1.0, smoothing=0.5)]
        callbacks += [LengthBiasMonitor()]
        trainer |= dict(val_check_interval=2 * 2, check_val_every_n_epoch=None, num_sanity_val_steps=0)
    elif name == "replay":
        loss = balance_loss
        buffer = ReplayBuffer(fresh_fraction=0.5, capacity=CAPACITY, max_staleness=MAX_AGE, seed=2)
        data |= dict(replay=buffer, advantage=GroupMean(), aggregation=FixedLength(1))
        module |= dict(loss=TrajectoryBalance(beta=BETA), learning_rate=1e-4)
        callbacks = [*monitors, ReplayMonitor()]
    else:
        align = GradientAlignmentControl(low=LOW, high=HIGH)
        callbacks = [*monitors, Poison(3), align, Poison(2), SkipNonFinite()]
    policy = make_module(**module)
    reference = copy.deepcopy(policy.policy.causal_lm).double()
    source = make_data(
        engine=engine,
        reward=reward,
        sampling=SamplingParams(max_tokens=8, temperature=TEMPERATURE),
        micro_batches_per_step=2,
        group_size=4,
        groups_per_step=4,
        **data,
    )
    with tempfile.TemporaryDirectory() as folder:
        csv_log = CSVLog(folder, name="run")
        settings = dict(logger=csv_log, log_every_n_steps=1) | trainer
        fit(policy, source, STEPS, [recorder, *callbacks, LastLook(recorder)], **settings)
        with open(f"{csv_log.log_dir}/metrics.csv", newline="") as file:
            rows = list(csv.DictReader(file))
    assert len(recorder.steps) == STEPS
    for row in rows:
        known = {key: float(value) for key, value in row.items() if value and key not in ("step", "epoch")}
        if "reward/mean" in known:
            recorder.steps[int(row["step"])].logged |= known
    return Run(recorder.steps, reference, engine, counts, loss, recorder.validations, rows)


# -- what metrics are -------------------------------------------------------------------------------------------------


def share(values: Any) -> float:
    values = list(values)
    return sum(map(bool, values)) / len(values)


def mean(values: Any) -> float:
    values = list(values)
    return math.fsum(map(float, values)) / len(values)


def ess(log_weights: Any) -> float:
    weights = [math.exp(one) for one in log_weights]
    return sum(weights) ** 2 / sum(one * one for one in weights) / len(weights)


def k3(log_ratios: Any) -> float:
    return mean(math.exp(one) - 1 - one for one in log_ratios)


def sequences(step: Step) -> list[float]:
    return [math.fsum(one) for one in step.log_ratios]


def cut(run: Run, k: int) -> float:
    """Tokens beyond the clip range in the direction of their advantage."""
    step = run.steps[k]
    tokens = [
        (math.exp(one), advantage)
        for row, advantage in zip(step.log_ratios, step.advantages(True), strict=True)
        for one in row
    ]
    return share((a > 0 and ratio > 1.2) or (a < 0 and ratio < 0.8) for ratio, a in tokens)


def reference_kl(run: Run, k: int) -> float:
    step = run.steps[k]
    with torch.no_grad():
        reference = torch.cat([log_p for log_p, _ in step.logprobs(run.reference)]).numpy()
    gap = np.concatenate([log_p.numpy() for log_p, _ in step.stats]) - reference
    return mean(np.exp(step.tokens) * (np.exp(-gap) - 1 + gap))


def rate_of(k: int) -> float:
    if k < 2:
        return PEAK * (k + 1) / 2
    return PEAK * (0.1 + 0.9 * (1 - (k - 2) / (STEPS - 2)))


def sampled(run: Run, k: int) -> tuple[float, float]:
    """Mean reward and dropped share of the groups scored since the last step, whose number lies between two counts."""
    logged = [step.logged for step in run.steps]
    before = {0}
    for number in range(k + 1):
        step = run.steps[number]
        ends = set()
        for begin, end in itertools.product(before, range(step.seen, step.seen_after + 1)):
            part = run.filter.seen[begin:end]
            found = (mean(r for r, _ in part), share(d for _, d in part)) if part else (math.nan, math.nan)
            told = logged[number]["reward/mean_sampled"], logged[number]["sample/dropped_share"]
            if found == pytest.approx(told, rel=1e-6, abs=1e-9):
                ends.add(end)
                result = found
        assert ends, f"no groups of step {number} have the mean and the share that were logged"
        before = ends
    return result


def first_micro_batch(step: Step) -> np.ndarray:
    """Log-ratios of the tokens in the first micro-batch."""
    left = list(step.first_rows)
    rows = []
    for (_, one), row in zip(step.rollouts, step.log_ratios, strict=True):
        if one.token_ids in left:
            left.remove(one.token_ids)
            rows.append(row)
    assert not left
    return np.concatenate(rows)


def so_far(run: Run, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Log-ratios and the middles of both log-probabilities of all tokens up to a step, all of which are fresh."""
    steps = run.steps[: k + 1]
    behavior = np.concatenate([one.logprobs for step in steps for _, one in step.rollouts])
    difference = np.concatenate([step.tokens for step in steps])
    return difference, behavior + difference / 2


def ratio_parts(run: Run, k: int) -> tuple[float, float]:
    """Root mean squares of fresh tokens, weighted by 0.9 for each step since, and of what stale ones have beyond."""
    squares = weight = 0.0
    for step in run.steps[: k + 1]:
        pairs = zip(step.log_ratios, step.ages, strict=True)
        tokens = [(one, max(ages[: i + 1]) == 0) for row, ages in pairs for i, one in enumerate(row)]
        fresh = [one**2 for one, is_fresh in tokens if is_fresh]
        stale = [one**2 for one, is_fresh in tokens if not is_fresh]
        squares, weight = (0.9 * squares, 0.9 * weight) if fresh else (squares, weight)
        squares += math.fsum(fresh)
        weight += len(fresh)
    beyond = (math.fsum(stale) - len(stale) * squares / weight) / len(tokens)
    return math.sqrt(squares / weight), math.sqrt(max(0.0, beyond))


def slope(run: Run, k: int) -> float:
    difference, middle = so_far(run, k)
    return float(np.polyfit(middle, difference, 1)[0])


def smoothed(values: list[float]) -> float:
    result = values[0]
    for value in values:
        result = 0.5 * result + 0.5 * value
    return result


def bounds(run: Run) -> list[int]:
    """Halved while the effective sample size is below 1, then as many steps of rest as older data may take."""
    found, bound, rest = [], 2, 0
    for _ in run.steps:
        if rest:
            rest -= 1
        elif bound:
            rest = max(bound, bound // 2) + 1
            bound //= 2
        found.append(bound)
    return found


def aligned(run: Run) -> list[dict[str, float]]:
    """Regimes of gradient alignment control, one step after the other."""
    found = []
    skips = 0
    reference: torch.Tensor | None = None
    for k in range(STEPS):
        gradient = run.loss_and_gradient(k)[1]
        if k == 3:  # poisoned
            found.append({"regime": 3.0, "kept": 0.0, "skips": float(skips)})
            continue
        row = {"norm": float(gradient.norm())}
        regime, kept = 0.0, 1.0
        if reference is not None:
            c = float(gradient @ reference / gradient.norm() / reference.norm())
            row["cosine"] = c
            if c > LOW and (c <= HIGH or skips):
                # what is left along the reference makes the cosine of the projected gradient the threshold
                across = math.sqrt(1 - c * c)
                regime, kept = 1.0, LOW / math.sqrt(1 - LOW**2) * across / c
            elif c > LOW:
                regime, kept = 2.0, 0.0
        skips = skips + 1 if regime == 2 else 0
        found.append(row | {"regime": regime, "kept": kept, "skips": float(skips)})
        reference = gradient
    return found


def gac(name: str) -> Callable[[Run, int], float | None]:
    return lambda run, k: aligned(run)[k].get(name)


def buffered(run: Run, k: int) -> dict[str, float]:
    """The replay buffer as a list, first in first out."""
    stored: list[tuple[Any, tuple[int, ...], int]] = []  # prompt, completion, version of its oldest token
    counts = dict(added=0, duplicates=0, evicted=0, expired=0)
    for step in run.steps[: k + 1]:
        kept = [one for one in stored if step.version - one[2] <= MAX_AGE]
        counts["expired"] += len(stored) - len(kept)
        stored = kept
        for group in step.groups[:FRESH_GROUPS]:
            for rollout in group.rollouts:
                same = [one for one in stored if one[:2] == (group.prompt_ids, rollout.token_ids)]
                counts["duplicates" if same else "added"] += 1
                stored = [one for one in stored if one not in same]
                stored.append((group.prompt_ids, rollout.token_ids, min(rollout.versions)))
                counts["evicted"] += max(0, len(stored) - CAPACITY)
                stored = stored[-CAPACITY:]
    step = run.steps[k]
    ages = [step.version - min(one.versions) for group in step.groups[FRESH_GROUPS:] for one in group.rollouts]
    return {
        "num_rollouts": len(stored),
        "num_prompts": len({prompt for prompt, _, _ in stored}),
        **{f"num_{name}": count for name, count in counts.items()},
        "num_replayed": len(ages),
        "replayed_staleness": mean(ages) if ages else 0.0,
        "replayed_staleness_max": max(ages, default=0),
    }


def replay(name: str) -> Callable[[Run, int], float]:
    return lambda run, k: buffered(run, k)[name]


def solved(rewards: list[float], k: int) -> float:
    """Pass@k by enumeration: the share of all subsets of k completions with a success."""
    return share(max(some) >= SUCCESS for some in itertools.combinations(rewards, k))


def validation(run: Run, of_prompt: Callable[[list[float]], float], number: int) -> float:
    """Mean over the held-out prompts of one validation, from the texts of its samples."""
    rewards: dict[str, list[float]] = {}
    for sample in run.validations[number][1]:
        answer = "".join(sorted(sample.prompt.text.removesuffix("=")))
        rewards.setdefault(sample.prompt.text, []).append(reward_of(answer, sample.completion))
    return mean(map(of_prompt, rewards.values()))


def cut_share(run: Run, from_number: int) -> float:
    """Share of an evaluation's completions that were cut; those of `long` begin with number 3."""
    return share(one.finish_reason == "length" for one in run.engine.evaluated if one.request_id >= 2**40 + from_number)


def evaluated(run: Run, dataset: str | None, of_prompt: Callable[[list[float]], float]) -> float:
    """Mean over the prompts of an evaluation, from the tokens that the engine returned."""
    sources = {"short": SortDigits(4, size=3, split="held_out"), "long": SortDigits(6, size=4, split="held_out")}
    prompts = [(name, source[n]) for name, source in sources.items() for n in range(len(source))]
    values = []
    for number, (name, prompt) in enumerate(prompts):
        texts = [
            tokenizer().decode(one.token_ids, skip_special_tokens=True)
            for one in run.engine.evaluated
            if one.request_id == 2**40 + number
        ]
        assert len(texts) == 3
        if dataset in (None, name):
            values.append(of_prompt([reward_of(prompt.answer, text) for text in texts]))
    return mean(values)


def trained_before(run: Run, k: int, of_group: Callable[[RolloutGroup], float]) -> float | None:
    """Mean over the groups that earlier steps trained on, which is when they count as trained."""
    groups = [group for step in run.steps[:k] for group in step.groups]
    return mean(map(of_group, groups)) if groups else None


def mean_length(group: RolloutGroup) -> float:
    return mean(len(one.token_ids) for one in group.rollouts)


def trained_share(run: Run, k: int) -> float | None:
    """Among them and the groups that were dropped by then, whose number lies between two counts."""
    num_trained = 4 * k
    step = run.steps[k]
    shares = []
    for seen in range(step.seen, step.seen_after + 1):
        num_dropped = sum(dropped for _, dropped in run.filter.seen[:seen])
        if num_trained + num_dropped:
            shares.append(num_trained / (num_trained + num_dropped))
    if not num_trained:
        return None
    told = step.logged["intake/trained_share"]
    return min(shares, key=lambda one: abs(one - told))


def known_pass_rate(run: Run, k: int) -> float | None:
    """Mean over trained groups of the rate that was known of their prompt: half of the newest, half of before."""
    known: dict[str, float] = {}
    found = []
    for step in run.steps[:k]:
        rewards = iter(step.rewards.tolist())
        for group in step.groups:
            text = group.prompt.text
            if text in known:
                found.append(known[text])
            rate = share(next(rewards) >= SUCCESS for _ in group.rollouts)
            known[text] = rate if text not in known else (known[text] + rate) / 2
    return mean(found) if found else None


def number_of_tokens(step: Step) -> int:
    return sum(len(one.token_ids) for _, one in step.rollouts)


Own = Callable[[Run, int], "float | None"]
OWN: dict[str, tuple[str, Own]] = {
    "reward/mean": ("stale", lambda run, k: mean(run.steps[k].rewards)),
    "reward/std": ("stale", lambda run, k: float(np.std(run.steps[k].rewards))),
    "reward/mean_sampled": ("fresh", lambda run, k: sampled(run, k)[0]),
    "sample/dropped_share": ("fresh", lambda run, k: sampled(run, k)[1]),
    "rollout/length_mean": ("stale", lambda run, k: mean(map(len, run.steps[k].log_ratios))),
    "rollout/cut_share": (
        "stale",
        lambda run, k: share(one.finish_reason == "length" for _, one in run.steps[k].rollouts),
    ),
    "rollout/no_signal_share": ("stale", lambda run, k: share(a == 0 for a in run.steps[k].advantages(True))),
    "policy/entropy": ("stale", lambda run, k: mean(run.steps[k].entropies)),
    "policy/loss": ("stale", lambda run, k: run.loss_and_gradient(k)[0]),
    "policy/reference_kl": ("stale", reference_kl),
    "sample/staleness_mean": ("stale", lambda run, k: mean(itertools.chain(*run.steps[k].ages))),
    "sample/staleness_p95": (
        "stale",
        lambda run, k: float(np.quantile(list(itertools.chain(*run.steps[k].ages)), 0.95, method="higher")),
    ),
    "sample/staleness_max": ("stale", lambda run, k: max(itertools.chain(*run.steps[k].ages))),
    "sample/inter_rollout_lag": ("stale", lambda run, k: mean(map(min, run.steps[k].ages))),
    "sample/intra_rollout_lag": ("stale", lambda run, k: mean(max(ages) - min(ages) for ages in run.steps[k].ages)),
    "sample/mixed_version_share": ("stale", lambda run, k: share(len(set(ages)) > 1 for ages in run.steps[k].ages)),
    "importance/ess_ratio": ("stale", lambda run, k: ess(sequences(run.steps[k]))),
    "importance/ess_ratio_token": ("stale", lambda run, k: ess(run.steps[k].tokens)),
    "importance/kl_k1": ("stale", lambda run, k: -mean(run.steps[k].tokens)),
    "importance/kl_k2": ("stale", lambda run, k: mean(run.steps[k].tokens ** 2 / 2)),
    "importance/kl_k3": ("stale", lambda run, k: k3(run.steps[k].tokens)),
    "importance/ratio_max": ("stale", lambda run, k: math.exp(max(run.steps[k].tokens))),
    "importance/clip_fraction": ("stale", cut),
    "engine/logprob_error": ("fresh", lambda run, k: mean(abs(first_micro_batch(run.steps[k])))),
    "engine/logprob_error_max": ("fresh", lambda run, k: max(abs(first_micro_batch(run.steps[k])))),
    "fresh/ratio_mean": ("fresh", lambda run, k: mean(np.exp(so_far(run, k)[0]))),
    "fresh/log_ratio_mean": ("fresh", lambda run, k: mean(so_far(run, k)[0])),
    "fresh/log_ratio_slope": ("fresh", slope),
    "ratio/discrepancy": ("stale", lambda run, k: ratio_parts(run, k)[0]),
    "ratio/staleness": ("stale", lambda run, k: ratio_parts(run, k)[1]),
    "perf/tokens_per_s": (
        "stale",
        lambda run, k: number_of_tokens(run.steps[k]) / run.steps[k].logged["perf/step_s"],
    ),
    "grad/norm": ("stale", lambda run, k: run.norm(k)),
    "grad/cosine": ("stale", lambda run, k: run.cosine(k)),
    "optim/lr": ("stale", lambda run, k: rate_of(k)),
    "val/pass@<k>": ("fresh", lambda run, k: validation(run, lambda rewards: solved(rewards, 1), k)),
    "val/reward": ("fresh", lambda run, k: validation(run, mean, k)),
    "grad/num_skipped": ("changed", lambda run, k: min(k - 1.0, 2.0) if k >= 2 else None),
    "eval/<data set>/pass@<k>": ("fresh", lambda run, k: evaluated(run, "long", lambda rewards: solved(rewards, 3))),
    "eval/<data set>/reward": ("fresh", lambda run, k: evaluated(run, "long", mean)),
    "eval/pass@<k>": ("fresh", lambda run, k: evaluated(run, None, lambda rewards: solved(rewards, 1))),
    "eval/reward": ("fresh", lambda run, k: evaluated(run, None, mean)),
    "eval/<data set>/cut_share": ("fresh", lambda run, k: cut_share(run, from_number=3)),
    "eval/cut_share": ("fresh", lambda run, k: cut_share(run, from_number=0)),
    "eval/version": ("fresh", lambda run, k: 0.0),
    "eval/oldest_version": ("fresh", lambda run, k: min(min(one.versions) for one in run.engine.evaluated)),
    "eval/newest_version": ("fresh", lambda run, k: max(max(one.versions) for one in run.engine.evaluated)),
    "eval/mean_version": (
        "fresh",
        lambda run, k: mean(itertools.chain(*(one.versions for one in run.engine.evaluated))),
    ),
    "eval/num_unscored": ("fresh", lambda run, k: 0.0),
    "intake/<fate>_share": ("fresh", trained_share),
    "intake/<fate>_length": ("stale", lambda run, k: trained_before(run, k, mean_length)),
    "intake/<fate>_s": ("stale", lambda run, k: trained_before(run, k, lambda group: group.generation_s)),
    "intake/<fate>_pass_rate": ("stale", known_pass_rate),
    "replay/num_rollouts": ("replay", replay("num_rollouts")),
    "replay/num_prompts": ("replay", replay("num_prompts")),
    "replay/num_added": ("replay", replay("num_added")),
    "replay/num_duplicates": ("replay", replay("num_duplicates")),
    "replay/num_evicted": ("replay", replay("num_evicted")),
    "replay/num_expired": ("replay", replay("num_expired")),
    "replay/num_replayed": ("replay", replay("num_replayed")),
    "replay/replayed_staleness": ("replay", replay("replayed_staleness")),
    "replay/replayed_staleness_max": ("replay", replay("replayed_staleness_max")),
    "sample/off_policy_share": ("replay", lambda run, k: share(itertools.chain(*run.steps[k].ages))),
    "ess/ratio": ("stale", lambda run, k: ess(sequences(run.steps[k]))),
    "ess/lr_scale": ("stale", lambda run, k: math.sqrt(min(1.0, ess(sequences(run.steps[k])) / BASE_ESS))),
    "ess/num_samples": ("stale", lambda run, k: len(run.steps[k].rollouts)),
    "ess/num_broken": ("stale", lambda run, k: 0.0),
    "gac/cosine": ("changed", gac("cosine")),
    "gac/regime": ("changed", gac("regime")),
    "gac/kept": ("changed", gac("kept")),
    "gac/consecutive_skips": ("changed", gac("skips")),
    "gac/norm": ("changed", gac("norm")),
    "gac/low": ("changed", lambda run, k: LOW),
    "gac/high": ("changed", lambda run, k: HIGH),
    "gac/num_dropped": ("changed", lambda run, k: float(k >= 3)),
    "grad/clip_scale": ("stale", lambda run, k: min(1.0, MAX_NORM / run.norm(k))),
    "grad/num_dropped": ("stale", lambda run, k: 0.0),
    "collapse/ess_ratio": ("stale", lambda run, k: ess(sequences(run.steps[k]))),
    "collapse/kl": ("stale", lambda run, k: k3(run.steps[k].tokens)),
    "collapse/grad_norm": ("stale", lambda run, k: run.norm(k)),
    "collapse/cosine": ("stale", lambda run, k: run.cosine(k)),
    "collapse/entropy": ("stale", lambda run, k: mean(run.steps[k].entropies)),
    "collapse/reward": ("stale", lambda run, k: mean(run.steps[k].rewards)),
    "collapse/num_alarms": ("stale", lambda run, k: 0.0),
    "staleness/bound": ("stale", lambda run, k: bounds(run)[k]),
    "staleness/smoothed_ess_ratio": (
        "stale",
        lambda run, k: smoothed([ess(sequences(step)) for step in run.steps[: k + 1]]),
    ),
    "staleness/smoothed_kl": ("fresh", lambda run, k: smoothed([k3(step.tokens) for step in run.steps[: k + 1]])),
}
NOT_HERE = {
    "lm_eval/<task>/<metric>": "lm-eval's own numbers; tests/lab/test_lm_eval_validation.py",
    "perf/replicas": "no replicas here; tests/with_ray",
    "sample/dropped_token_share": "tests/rollouts/test_dropped_tokens.py accounts for every token",
    "policy/teacher_divergence": "no teacher here; computed token by token in tests/training/test_distillation.py",
    "reward/part/<name>": "the rewards of these runs have no parts; tests/rewards/test_combined.py",
    "perf/step_s": "read from a clock; the shares and rates that are made of it are recomputed",
    "perf/rollout_wait_s": "read from a clock",
    "perf/trainer_wait_share": "read from a clock",
    "perf/computed_share": "without packing there is none; tests/data/test_tree_cuts.py",
    "perf/engine_idle_share": "read from a clock",
    "perf/weight_sync_s": "read from a clock",
    "perf/overlap_efficiency": "of clocks; tests/scheduling computes it from simulated times",
    "perf/trainer_share": "of clocks; tests/scheduling computes it from simulated times",
    "perf/weight_sync_share": "of clocks; tests/scheduling computes it from simulated times",
    "perf/scoring_share": "of clocks; tests/scheduling computes it from simulated times",
    "perf/share_to_win": "of clocks; tests/scheduling computes it from simulated times",
    "perf/steady_staleness": "of clocks; tests/scheduling compares it with simulated times",
    "eval/seconds": "read from a clock",
    "eval/blocked_s": "read from a clock",
    "sample/queue_size": "a count at one moment while the engine works; tests/rollouts has it in virtual time",
    "sample/unfinished": "a count at one moment while the engine works; tests/rollouts has it in virtual time",
    "sample/total_tokens": "a count at one moment while the engine works; tests/rollouts has it in virtual time",
    "sample/lost": "groups are lost by timing; tests/scheduling/test_expiry.py has it in virtual time",
}
NOT_HERE["val/cut_share"] = "samples do not say how they ended; tests/callbacks/test_cut_completions.py"
NOT_HERE |= {
    metric.name: "these runs are too short for a forecast; tests/callbacks/test_staleness_controller.py"
    for metric in METRICS["StalenessController"]
}
NOT_HERE |= {metric.name: "tests/callbacks/test_weight_drift.py" for metric in METRICS["WeightDriftMonitor"]}
NOT_HERE |= {metric.name: "tests/training/test_blended_estimators.py" for metric in METRICS["EstimatorBlend"]}
NOT_HERE |= {
    metric.name: "tests/rewards/test_judge.py and test_reward_model.py count what server and model do"
    for source in ("JudgeReward", "RewardModel")
    for metric in METRICS[source]
}
NOT_HERE |= {metric.name: "tests/agents/test_engine.py counts what agents do" for metric in METRICS["AgentEngine"]}
NOT_HERE |= {metric.name: "tests/sandbox/test_code.py counts what programs do" for metric in METRICS["CodeReward"]}
NOT_HERE |= {
    metric.name: "tests/callbacks/test_reward_hacking.py computes them from rollouts and windows"
    for metric in METRICS["RewardHackingMonitor"]
}
NOT_HERE |= {metric.name: "tests/supervised/test_training.py" for metric in METRICS["SFTModule"]}
LOGGED_AS = {  # where a part of the name differs
    "val/pass@<k>": "val/pass@1",
    "eval/<data set>/pass@<k>": "eval/long/pass@3",
    "eval/<data set>/reward": "eval/long/reward",
    "eval/<data set>/cut_share": "eval/long/cut_share",
    "eval/pass@<k>": "eval/pass@1",
    **{f"intake/<fate>_{name}": f"intake/trained_{name}" for name in ("share", "length", "s", "pass_rate")},
}


def told(run: Run, name: str) -> list[float | None]:
    """What was logged: by step, or for validations and evaluations one after the other."""
    key = LOGGED_AS.get(name, name)
    if name.startswith(("val/", "eval/")):
        return [float(row[key]) for row in run.rows if row.get(key)]
    return [step.logged.get(key) for step in run.steps]


# A gradient in float32 is right to about 300 roundings, 2e-5 of its length. By that a cosine is off absolutely, and
# what is divided by a cosine above LOW relatively.
COSINE_ERROR = 300 * torch.finfo(torch.float32).eps / 2
TOLERANCES = {
    "gac/cosine": dict(rel=2e-4, abs=COSINE_ERROR),
    "grad/cosine": dict(rel=2e-4, abs=COSINE_ERROR),
    "collapse/cosine": dict(rel=2e-4, abs=COSINE_ERROR),
    "gac/kept": dict(rel=2e-4 + COSINE_ERROR / LOW),
}


@pytest.mark.parametrize("name", OWN)
def test_a_metric_is_what_it_is_said_to_be(name: str) -> None:
    kind, own = OWN[name]
    run = record(kind)
    logged = told(run, name)
    assert logged
    expected = [own(run, k) for k in range(len(logged))]
    assert any(value is not None for value in expected)
    for value, right in zip(logged, expected, strict=True):
        if right is None:
            assert value is None, "a row has what was logged in its step"
        else:
            assert value == pytest.approx(right, **TOLERANCES.get(name, dict(rel=2e-4, abs=2e-6)))


def test_every_metric_is_recomputed_or_a_reason_is_given() -> None:
    names = {metric.name for metrics in METRICS.values() for metric in metrics}
    assert OWN.keys() | NOT_HERE.keys() == names
    assert not OWN.keys() & NOT_HERE.keys()


def test_the_runs_have_what_the_metrics_could_confuse() -> None:
    """Where all ages are 0 and all gradients small, much that is wrong looks right."""
    stale, changed = record("stale"), record("changed")
    assert max(itertools.chain(*stale.steps[-1].ages)) > 0
    assert {step.logged["gac/regime"] for step in changed.steps} >= {0.0, 3.0}
    assert any(step.logged["grad/clip_scale"] < 1 for step in stale.steps)
    assert any(step.logged["importance/clip_fraction"] > 0 for step in stale.steps)
    assert all(buffered(record("replay"), STEPS - 1).values())
