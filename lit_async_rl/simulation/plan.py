"""How many devices should train, and how many sample? Predicted in virtual time, before renting a cluster.

An optimizer step costs `train_s` on one trainer device, and its samples occupy slots of replicas for log-normal times.
`VirtualRun` plays steps with a run's admission rule, so the prediction knows the staleness bound, the tail of the
lengths and groups that wait for their last sample. Thousands of replicas take seconds.

Not modelled: communication between trainer devices beyond `efficiency`, prefixes that an engine shares, and rewards or
tools slower than sampling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lit_async_rl.scheduling.admission import Admission
from lit_async_rl.scheduling.bottleneck import Intervals
from lit_async_rl.simulation.latency import CutLogNormal
from lit_async_rl.simulation.virtual import VirtualRun
from lit_async_rl.utils.checks import check_range

BOUNDS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)  # values of max_staleness that are tried
TOLERANCE = 0.02  # of a step's time: what a lower bound may cost
NEIGHBOURS = (-3, -2, -1, 0, 1, 2, 3)  # trainer devices simulated, around the number at which both sides take as long
WARMUP_STEPS = 8
MEASURED_STEPS = 24


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Cost of an optimizer step, measured or from a formula.

    Attributes:
        train_s: seconds of training on one trainer device.
        sample_s: mean seconds that a sample occupies a slot of a full replica.
        num_slots: samples that a replica generates concurrently.
        groups_per_step: groups of an optimizer step.
        group_size: samples of a group.
        sync_s: seconds in which the trainer pauses to publish weights.
        spread: standard deviation of the logarithm of a sample's time, before the cut.
        longest: longest time of a sample, in means: `sampling.max_tokens` over the mean length. A step may wait for its
            longest sample, against which a high bound helps.
        efficiency: share of speed that trainer devices keep each time their number doubles.

    Raises:
        ValueError: a setting is out of range.
    """

    train_s: float
    sample_s: float
    num_slots: int
    groups_per_step: int
    group_size: int
    sync_s: float = 0.0
    spread: float = 1.0
    longest: float = 8.0
    efficiency: float = 0.9

    def __post_init__(self) -> None:
        check_range("", "positive", train_s=self.train_s, sample_s=self.sample_s)
        check_range("", "> 1", longest=self.longest)
        check_range("", ">= 0", sync_s=self.sync_s, spread=self.spread)
        check_range("", "in (0, 1]", efficiency=self.efficiency)
        check_range(
            "",
            "integer >= 1",
            num_slots=self.num_slots,
            groups_per_step=self.groups_per_step,
            group_size=self.group_size,
        )

    def training_s(self, trainer_devices: int) -> float:
        """Seconds of training and publication of a step on this many devices."""
        speed = trainer_devices * self.efficiency ** math.log2(trainer_devices)
        return self.train_s / speed + self.sync_s

    def sampling_s(self, replicas: int) -> float:
        """Seconds in which so many full replicas generate the samples of a step."""
        return self.groups_per_step * self.group_size * self.sample_s / (self.num_slots * replicas)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A split of devices and what a step takes with it.

    Attributes:
        trainer_devices: devices that train.
        replicas: engines.
        max_staleness: bound in versions.
        steps: totals of the measured steps, in virtual seconds; `engine_busy_s` is the mean over all slots.
        num_steps: number of measured steps.
        staleness: mean age of data in versions.
    """

    trainer_devices: int
    replicas: int
    max_staleness: int
    steps: Intervals
    num_steps: int
    staleness: float

    @property
    def step_s(self) -> float:
        """Seconds of an optimizer step."""
        return self.steps.wall_s / self.num_steps


def predict(
    cost: StepCost, *, trainer_devices: int, replicas: int, max_staleness: int, num_steps: int = MEASURED_STEPS
) -> Prediction:
    """Plays steps in virtual time, after `WARMUP_STEPS` uncounted ones."""
    run = VirtualRun(
        Admission(cost.groups_per_step, max_staleness),
        CutLogNormal(cost.sample_s, cost.spread, longest_s=cost.longest * cost.sample_s),
        num_slots=cost.num_slots * replicas,
        train_s=cost.training_s(trainer_devices),
        group_size=cost.group_size,
    )
    # data are as old as they get only after max_staleness steps
    before = run.totals(WARMUP_STEPS + max_staleness)
    num_trained = len(run.trace.trained)
    steps = run.totals(num_steps) - before
    ages = [now - admitted for _, admitted, now in run.trace.trained[num_trained:]]
    return Prediction(
        trainer_devices=trainer_devices,
        replicas=replicas,
        max_staleness=max_staleness,
        steps=steps,
        num_steps=num_steps,
        staleness=sum(ages) / len(ages),
    )


def splits(cost: StepCost, *, devices: int, replica_devices: int = 1, max_staleness: int) -> list[Prediction]:
    """Predictions for splits that could be fastest, by number of trainer devices.

    Args:
        cost: of a step.
        devices: to divide.
        replica_devices: devices of one replica, as with tensor parallelism.
        max_staleness: bound in versions.

    Raises:
        ValueError: there are too few devices for one of each.
    """
    check_range("", "integer >= 1", replica_devices=replica_devices)
    check_range("", f"integer >= {1 + replica_devices}", devices=devices)
    # data parallel ranks train on whole groups
    possible = range(1, min(devices - replica_devices, cost.groups_per_step) + 1)

    def longer_side_s(trainer_devices: int) -> float:
        return max(cost.training_s(trainer_devices), cost.sampling_s((devices - trainer_devices) // replica_devices))

    balanced = min(possible, key=longer_side_s)
    tried = sorted({balanced + n for n in NEIGHBOURS} & set(possible))
    return [
        predict(cost, trainer_devices=n, replicas=(devices - n) // replica_devices, max_staleness=max_staleness)
        for n in tried
    ]


def fastest(predictions: Sequence[Prediction]) -> Prediction:
    """The prediction with the shortest step."""
    return min(predictions, key=lambda prediction: prediction.step_s)


def lowest_bound(cost: StepCost, *, trainer_devices: int, replicas: int) -> Prediction:
    """The prediction with the lowest bound of `BOUNDS` that is at most `TOLERANCE` slower than the fastest."""
    found = [predict(cost, trainer_devices=trainer_devices, replicas=replicas, max_staleness=bound) for bound in BOUNDS]
    limit_s = (1 + TOLERANCE) * fastest(found).step_s
    return next(prediction for prediction in found if prediction.step_s <= limit_s)


# -- Costs by formula, for models and devices that nobody has measured yet ---------------------------------------------


@dataclass(frozen=True)
class Device:
    """Peak of dense bfloat16 products in FLOP/s, memory bandwidth in B/s and size in bytes, by data sheet."""

    flops: float
    bandwidth: float
    memory: float


DEVICES = {
    "a100": Device(312e12, 2.04e12, 80e9),
    "b200": Device(2.25e15, 8.0e12, 180e9),
    "h100": Device(989e12, 3.35e12, 80e9),
    "h200": Device(989e12, 4.8e12, 141e9),
    "l40s": Device(362e12, 0.864e12, 48e9),
    "rtx4090": Device(165e12, 1.008e12, 24e9),
}
TRAINING_SHARE = 0.4  # of the peak that training reaches
PREFILL_SHARE = 0.5  # that products of many rows reach in an engine
BANDWIDTH_SHARE = 0.7  # of the bandwidth that decoding reaches
PUBLICATION_BYTES_PER_S = 25e9  # between devices


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Model size for the cost formula.

    Attributes:
        parameters: number of parameters that a token uses.
        cache_bytes: bytes of keys and values of one token, all layers.
    """

    parameters: int
    cache_bytes: int


def cost_by_formula(
    size: ModelSize,
    device: Device,
    *,
    prompt_tokens: int,
    completion_tokens: int,
    max_tokens: int,
    num_slots: int,
    groups_per_step: int,
    group_size: int,
    replica_devices: int = 1,
    spread: float = 1.0,
    efficiency: float = 0.9,
) -> StepCost:
    """Cost of a step with bfloat16 weights.

    Training takes 6 FLOPs per parameter and token. A decode step reads weights and caches once, or computes 2 FLOPs per
    parameter and slot, whichever takes longer. Shares of the peak are constants of this module.

    Args:
        size: of the model.
        device: of trainer and engine.
        prompt_tokens: mean length of a prompt.
        completion_tokens: mean length of a completion.
        max_tokens: longest completion.
        num_slots: see `StepCost`.
        groups_per_step: see `StepCost`.
        group_size: see `StepCost`.
        replica_devices: devices of one replica.
        spread: see `StepCost`.
        efficiency: see `StepCost`.
    """
    num_samples = groups_per_step * group_size
    weight_bytes = 2 * size.parameters
    train_flops = 6 * size.parameters * num_samples * (prompt_tokens + completion_tokens)
    cached_tokens = num_slots * (prompt_tokens + completion_tokens / 2)
    read_s = (weight_bytes + size.cache_bytes * cached_tokens) / (BANDWIDTH_SHARE * device.bandwidth)
    compute_s = 2 * size.parameters * num_slots / (PREFILL_SHARE * device.flops)
    prefill_s = 2 * size.parameters * prompt_tokens / (PREFILL_SHARE * device.flops)
    return StepCost(
        train_s=train_flops / (TRAINING_SHARE * device.flops),
        sample_s=(completion_tokens * max(read_s, compute_s) + prefill_s) / replica_devices,
        num_slots=num_slots,
        groups_per_step=groups_per_step,
        group_size=group_size,
        sync_s=weight_bytes / PUBLICATION_BYTES_PER_S,
        spread=spread,
        longest=max_tokens / completion_tokens,
        efficiency=efficiency,
    )
