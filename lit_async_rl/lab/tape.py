"""Lists, filters, samples and plots rollout tapes.

lit-async-rl tape list runs/x/tape
lit-async-rl tape filter runs/x/tape --out runs/x/good --min_reward 1 [--max_staleness 2] [--first_step 100]
lit-async-rl tape sample runs/x/tape --num 5
lit-async-rl tape plot runs/x/tape --out tape.png
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lit_async_rl.replay.tape import Tape, TapeWriter
from lit_async_rl.types import RolloutGroup
from lit_async_rl.utils.checks import OneLineParser, check_range
from lit_async_rl.utils.visible import visible

CLOSE_S = 30.0  # for a full disk to get room


def mean_reward(group: RolloutGroup) -> float:
    """Mean reward of the group's completions."""
    return sum(rollout.reward for rollout in group.rollouts) / len(group.rollouts)


def show(arguments: argparse.Namespace) -> None:
    """Prints a summary of the tape, and a line for each of at most twenty steps."""
    tape = Tape(arguments.tape)
    steps = list(tape.steps())
    groups = [group for step in steps for group in step.groups]
    num_rollouts = sum(len(g.rollouts) for g in groups)
    num_tokens = sum(g.num_tokens for g in groups)
    print(f"{len(steps)} steps, {len(groups)} groups, {num_rollouts} rollouts, {num_tokens:,} tokens")
    print(f"in {tape.num_files} files with valid checksums")
    print(f"{'step':>8} {'version':>8} {'groups':>7} {'reward':>8} {'staleness max':>14} {'sampling s':>11}")
    for step in steps[:: max(1, -(-len(steps) // 20))]:
        rewards = np.mean([mean_reward(group) for group in step.groups])
        slowest = max(group.generation_s for group in step.groups)
        print(f"{step.step:8} {step.version:8} {len(step.groups):7} {rewards:8.3f} {step.staleness:14} {slowest:11.2f}")


def select(arguments: argparse.Namespace) -> None:
    """Writes the groups that meet all conditions to another tape."""
    if any(Path(arguments.out).glob("*")):
        raise ValueError(f"--out {arguments.out} is not empty, so nothing was written: choose another folder")
    writer = None
    num_steps = 0
    num_groups = 0
    for step in Tape(arguments.tape).steps(arguments.first_step):
        if step.step > arguments.last_step:
            break
        groups = [
            group
            for group in step.groups
            if step.staleness_of(group) <= arguments.max_staleness
            and arguments.min_reward <= mean_reward(group) <= arguments.max_reward
        ]
        if groups:
            writer = writer or TapeWriter(arguments.out)
            writer.append(step.step, step.version, groups, step.sampling)
            writer.flush()
            num_steps += 1
            num_groups += len(groups)
    if writer is None:
        raise ValueError(f"no group of {arguments.tape} meets the conditions: nothing was written")
    writer.close(CLOSE_S)
    print(f"{num_steps} steps, {num_groups} groups written to {arguments.out}")


def sample(arguments: argparse.Namespace) -> None:
    """Prints completions drawn from the whole tape."""
    check_range("", ">= 1", num=arguments.num)
    found = [
        (step, group, rollout)
        for step in Tape(arguments.tape).steps()
        for group in step.groups
        for rollout in group.rollouts
    ]
    for step, group, rollout in random.Random(arguments.seed).sample(found, min(arguments.num, len(found))):
        print(
            f"-- step {step.step}, group {group.index}, reward {rollout.reward:g}, "
            f"staleness {step.staleness_of(group)}, {rollout.finish_reason}"
        )
        print(visible(f"{group.prompt.text}{rollout.text}"))


def plot(arguments: argparse.Namespace) -> None:
    """Plots reward and staleness over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = list(Tape(arguments.tape).steps())
    number = [step.step for step in steps]
    rewards = [[mean_reward(group) for group in step.groups] for step in steps]
    ages = [
        [step.version - v for group in step.groups for rollout in group.rollouts for v in rollout.all_versions]
        for step in steps
    ]
    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 6))
    above.plot(number, [np.mean(values) for values in rewards], label="mean")
    low, high = np.transpose([np.percentile(values, (25, 75)) for values in rewards])
    above.fill_between(number, low, high, alpha=0.2, label="middle half of the groups")
    above.set_ylabel("reward")
    below.plot(number, [np.mean(values) for values in ages], label="mean over tokens")
    below.plot(number, [np.max(values) for values in ages], linestyle="--", label="oldest token")
    below.set_ylabel("staleness (versions)")
    below.set_xlabel("optimizer step")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(str(arguments.tape))
    figure.tight_layout()
    figure.savefig(arguments.out, dpi=120)
    print(f"written to {arguments.out}")


def main(args: Sequence[str] | None = None) -> None:
    """Command line of the tape command."""
    parser = OneLineParser("tape", __doc__)
    commands = parser.add_subparsers(required=True)
    parsers = {}
    for name, function in dict(list=show, filter=select, sample=sample, plot=plot).items():
        parsers[name] = commands.add_parser(name, help=(function.__doc__ or "").strip())
        parsers[name].add_argument("tape", help="folder of the tape")
        parsers[name].set_defaults(function=function)
    parsers["filter"].add_argument("--out", required=True, help="folder of the new tape")
    parsers["filter"].add_argument("--first_step", type=int, default=0)
    parsers["filter"].add_argument("--last_step", type=int, default=2**62)
    parsers["filter"].add_argument("--max_staleness", type=int, default=2**62, help="of a group's oldest token")
    parsers["filter"].add_argument("--min_reward", type=float, default=-float("inf"), help="mean over a group")
    parsers["filter"].add_argument("--max_reward", type=float, default=float("inf"), help="mean over a group")
    parsers["sample"].add_argument("--num", type=int, default=5)
    parsers["sample"].add_argument("--seed", type=int, default=0)
    parsers["plot"].add_argument("--out", default="tape.png")
    arguments = parser.parse_args(args)
    try:
        arguments.function(arguments)
    except OSError as error:
        sys.exit(f"error: {error.filename}: {error.strerror}" if error.filename else f"error: {error}")
    except ValueError as error:
        sys.exit(f"error: {error}")
