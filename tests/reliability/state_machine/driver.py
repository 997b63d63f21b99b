"""Random settings, and random transitions of state machines under them; a seed determines both."""

from __future__ import annotations

import random

from tests.reliability.state_machine.machine import StateMachine, Violation
from tests.reliability.state_machine.modules import VirtualSettings

KINDS = ("fixed_lag", "fixed_lag", "free", "free", "ratio", "redundant", "ring", "drop", "retry")


def random_settings(rng: random.Random) -> VirtualSettings:
    """Random valid settings."""
    kind = rng.choice(KINDS)
    groups = rng.randint(1, 3)
    streams = rng.random() < 0.3
    return VirtualSettings(
        kind=kind,
        max_staleness=rng.randint(0, 3),
        groups_per_step=groups,
        group_size=rng.randint(1, 3),
        micro_batches=rng.randint(1, groups if streams else 4),
        sync_steps=rng.choice((1, 1, 2, 3)),
        streams=streams,
        in_flight=kind != "fixed_lag" and rng.random() < 0.5,
        replicates=rng.random() < 0.3,
        max_steps=rng.randint(4, 14),
        skips=rng.random() < 0.3,
        reward_tries=rng.choice((2, 3, 4)),
    )


class Driver:
    """Runs machines under random transitions, one after the other.

    Args:
        seed: of the random transitions.
        most_transitions: of one machine.
    """

    def __init__(self, seed: int, most_transitions: int = 600) -> None:
        self.rng = random.Random(seed)
        self.most_transitions = most_transitions
        self.num_transitions = self.num_steps = self.num_machines = 0

    def run(self, num_transitions: int) -> None:
        """Runs at least this many transitions.

        Raises:
            Violation: see `run_one`.
        """
        while self.num_transitions < num_transitions:
            seed = self.rng.randrange(2**60)
            machine = run_one(seed, self.most_transitions)
            self.num_transitions += machine.num_transitions
            self.num_steps += machine.num_steps
            self.num_machines += 1


def run_one(seed: int, most_transitions: int) -> StateMachine:
    """Runs one machine from its seed.

    Raises:
        Violation: an invariant was violated, or an error occurred; names the settings.
    """
    rng = random.Random(seed)
    settings = random_settings(rng)
    try:
        machine = StateMachine(settings, rng.randrange(2**30))
        machine._can_die = True
        while machine.num_transitions < most_transitions:
            _move(machine, rng)
            if machine.is_over and (machine.trainer.global_step >= settings.max_steps or not machine.files):
                break
    except Exception as error:
        raise Violation(f"{type(error).__name__}: {error}; seed {seed}, {settings}") from error
    return machine


def _move(machine: StateMachine, rng: random.Random) -> None:
    dice = rng.random()
    if machine.is_over or dice < 0.012:
        machine.resume(rng.randrange(8))
    elif dice < 0.6:
        machine.advance()
    elif dice < 0.94:
        machine.move_background(rng.randrange(2**30))
    elif dice < 0.975:
        machine.save()
    elif dice < 0.99:
        machine.change_bound(rng.randint(0, 4))
    elif dice < 0.995:
        machine.stop()
    else:
        machine.break_engine()
