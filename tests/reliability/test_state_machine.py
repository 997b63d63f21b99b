"""The state machine finds no broken promise in the code as it is, and finds each one that is broken on purpose."""

import gc
import logging
from unittest.mock import patch

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from lit_async_rl.data.rollout_source import RolloutSource
from lit_async_rl.rollouts.group_book import GroupBook
from lit_async_rl.scheduling.admission import Admission
from lit_async_rl.training import whole_steps
from lit_async_rl.training.whole_steps import StepGuard
from tests.reliability.state_machine.driver import KINDS, Driver
from tests.reliability.state_machine.machine import StateMachine, Violation
from tests.reliability.state_machine.modules import VirtualSettings


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    gc.freeze()
    yield
    gc.unfreeze()
    logging.disable(logging.NOTSET)


@pytest.mark.slow
def test_twenty_thousand_transitions_break_no_promise():
    driver = Driver(seed=1)
    driver.run(20_000)
    assert driver.num_steps > 200


def count_as_before(checkpoint, number, in_future=None):
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    done = progress["current"]["ready"] // number * number
    before = progress["total"]["ready"] - progress["current"]["ready"]
    for counts, whole in ((progress["current"], done), (progress["total"], before + done)):
        if counts["completed"] > whole:
            counts.update(dict.fromkeys(counts, whole))


def one_more(property_):
    return property(lambda admission: property_.fget(admission) + 1)


SAVES = RolloutSource.state_dict
BEGINS = GroupBook.begin_step
PLANTED = {
    "a file from within a step is resumed behind it": [(whole_steps, "count_whole_steps", count_as_before)],
    "and nothing checks the micro-batches": [
        (whole_steps, "count_whole_steps", count_as_before),
        (StepGuard, "admit", lambda *_: None),
        (StepGuard, "check_whole", lambda *_: None),
    ],
    "the bound is off by one": [(Admission, "num_admissible", one_more(Admission.num_admissible))],
    "a checkpoint forgets the groups of the step": [
        (RolloutSource, "state_dict", lambda source, step: SAVES(source, step + 1)),
    ],
    "slots come back with the group, not with the weights": [
        (Admission, "take", lambda admission, index: admission.drop(index)),
    ],
    "a group that was trained on is saved again": [
        (RolloutSource, "state_dict", lambda source, step: SAVES(source, step - 1)),
    ],
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_machine_finds_what_was_planted(name):
    patches = [patch.object(*change) for change in PLANTED[name]]
    for one in patches:
        one.start()
    try:
        with pytest.raises(Violation) as found:
            Driver(seed=1).run(20_000)
        assert "TypeCheckError" not in str(found.value)
    finally:
        for one in patches:
            one.stop()


class Attack(RuleBasedStateMachine):
    """The same moves, chosen and shrunk by hypothesis."""

    @initialize(
        kind=st.sampled_from(sorted(set(KINDS))),
        sizes=st.tuples(*[st.integers(1, 3)] * 4),
        max_staleness=st.integers(0, 3),
        flags=st.tuples(*[st.booleans()] * 2),
    )
    def begin(self, kind, sizes, max_staleness, flags):
        groups, size, micro_batches, sync_steps = sizes
        in_flight, skips = flags
        self.machine = StateMachine(
            VirtualSettings(
                kind=kind,
                max_staleness=max_staleness,
                groups_per_step=groups,
                group_size=size,
                micro_batches=micro_batches,
                sync_steps=sync_steps,
                in_flight=in_flight and kind != "fixed_lag",
                skips=skips,
            )
        )

    @precondition(lambda self: not self.machine.is_over)
    @rule(times=st.integers(1, 12))
    def train(self, times):
        for _ in range(times):
            if not self.machine.is_over:
                self.machine.advance()

    @rule(chosen=st.integers(0, 2**30))
    def sample_or_score(self, chosen):
        self.machine.move_background(chosen)

    @rule()
    def save(self):
        self.machine.save()

    @rule(chosen=st.integers(0, 7))
    def kill_and_resume(self, chosen):
        self.machine.resume(chosen)

    @rule(bound=st.integers(0, 4))
    def change_bound(self, bound):
        self.machine.change_bound(bound)

    @rule()
    def break_engine(self):
        self.machine.break_engine()

    @rule()
    def stop(self):
        self.machine.stop()


TestAttack = Attack.TestCase
TestAttack.settings = settings(
    max_examples=20, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
