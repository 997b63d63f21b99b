"""What each scheduling rule promises, under random latencies in virtual time and around the real producer."""

import math
import random
import threading
import time

import lightning.pytorch as pl
import pytest
from flow import barrier_engine, fit, make_data, make_module
from hypothesis import given
from hypothesis import strategies as st

from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.scheduling.admission import Admission, FixedLag, Ring, RingAdmission
from lit_async_rl.simulation.engine import SimulatedEngine
from lit_async_rl.simulation.latency import Constant, LogNormal, Pareto, Stragglers
from lit_async_rl.simulation.virtual import VirtualRun

LATENCIES = st.sampled_from([Constant(1.0), LogNormal(1.0, 1.5), Pareto(1.0, 1.2), Stragglers(1.0, 0.05, 30.0)])
TIMES = dict(latency=LATENCIES, num_slots=st.integers(1, 20), train_s=st.sampled_from([0.0, 0.5, 4.0]))
RUNS = st.builds(dict, **TIMES, group_size=st.integers(1, 4), streams=st.booleans(), seed=st.integers(0, 10**6))


@given(RUNS, st.integers(1, 8), st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 2.75]))
def test_roll_flash_no_sample_is_older_than_alpha_and_no_more_than_1_plus_alpha_rounds_are_under_way(run, p, alpha):
    trace = VirtualRun(Admission(p, 3, async_ratio=alpha), **run).run(10)
    assert trace.max_staleness <= math.ceil(alpha)
    assert trace.max_groups == math.floor((1 + alpha) * p + 1e-9)
    assert len({index for index, _, _ in trace.trained}) == 10 * p
    assert trace.num_lost == 0


@given(RUNS, st.integers(1, 8), st.integers(0, 6))
def test_areal_no_more_than_v_plus_eta_plus_1_rounds_are_ever_admitted(run, p, eta):
    trace = VirtualRun(Admission(p, eta), **run).run(10)
    assert trace.num_admitted == [(version + eta + 1) * p for version in range(10)], "the capacity, all of it"
    assert trace.max_staleness <= eta


@given(RUNS, st.integers(1, 8), st.integers(0, 4), st.integers(1, 30), st.integers(1, 30))
def test_pipeline_rl_the_ring_keeps_sampling_drops_the_oldest_and_bounds_the_lag(run, p, lag, num_sampling, capacity):
    admission = RingAdmission(p, lag, num_sampling, capacity)
    trace = VirtualRun(admission, **run).run(10)
    assert trace.max_staleness <= lag
    assert trace.max_groups <= num_sampling + capacity + p
    indices = [index for index, _, _ in trace.trained]
    assert len(set(indices)) == len(indices) == 10 * p
    assert admission.next_index == len(indices) + trace.num_lost + len(admission.deadlines), "each is accounted for"
    assert admission.num_admissible == 0, "as many are being sampled as should be"


def test_what_falls_out_of_a_full_ring_has_waited_longest():
    admission = RingAdmission(1, 5, num_sampling=4, capacity=2)
    indices = [admission.admit() for _ in range(4)]
    for index in (indices[2], indices[0], indices[3]):
        admission.finish(index)
    assert admission.lose() == [indices[2]]
    assert admission.lose() == []
    assert admission.choose() == indices[0]


@given(RUNS, st.integers(1, 6), st.integers(0, 3), st.integers(0, 6))
def test_redundant_groups_at_most_so_many_of_a_round_are_lost_and_the_bound_holds(run, p, bound, redundant):
    admission = Admission(p, bound, redundant_groups=redundant)
    trace = VirtualRun(admission, **run).run(10)
    assert trace.max_staleness <= bound
    assert trace.num_lost <= 10 * redundant
    assert trace.max_groups == (bound + 1) * p + redundant
    if bound == 0:
        assert trace.num_lost == 10 * redundant


def test_redundant_groups_hide_a_tail_without_staleness():
    def wall_s(redundant: int) -> float:
        admission = Admission(64, 0, redundant_groups=redundant)
        return VirtualRun(admission, Stragglers(1.0, 0.02, 10.0), num_slots=80, train_s=0.0).run(20).wall_s

    assert wall_s(16) < 0.5 * wall_s(0)


def test_ten_thousand_rollouts_at_once_in_seconds():
    began = time.process_time()
    admission = Admission(200, 4, async_ratio=3.5, redundant_groups=380)
    trace = VirtualRun(admission, LogNormal(1.0, 1.0), num_slots=4096, train_s=1.0, group_size=8).run(4)
    assert trace.max_rollouts > 10_000
    assert trace.max_staleness <= 4
    assert time.process_time() - began < 10.0  # 0.1 s without the type checks of the test suite


def test_what_a_group_costs_does_not_grow_with_their_number():
    def cost(num_groups: int) -> float:
        admission = Admission(num_groups, 0)
        indices = [admission.admit() for _ in range(num_groups)]
        random.Random(0).shuffle(indices)
        for index in indices:
            admission.finish(index)
        seconds = []
        for _ in range(6):
            began = time.process_time()
            for _ in range(50):
                admission.take(admission.choose())
            seconds.append(time.process_time() - began)
        return min(seconds) / 50  # caches of the processor cost a factor of three; the number of groups is 75 times

    few, many = cost(400), cost(30_000)
    assert many < 10 * few, f"{many * 1e6:.1f} us instead of {few * 1e6:.1f}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(redundant_groups=-1), r"data\.admission\.redundant_groups must be >= 0, got -1"),
        (dict(async_ratio=5.0), r"data\.admission\.async_ratio must be <= data\.max_staleness=4, got 5.0"),
        (dict(max_staleness=-1), r"data\.max_staleness must be >= 0, got -1"),
        (dict(admission=FixedLag(), engine=EmbeddedEngine()), r"data\.admission=FixedLag needs .*in_flight"),
    ],
)
def test_rules_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        make_data(**settings)


# -- around the real producer -----------------------------------------------------------------------------------------


class Watch(pl.Callback):
    def __init__(self) -> None:
        self.trained: list[int] = []
        self.staleness: list[int] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.trained += [group.index for group in trainer.datamodule.last_step_groups]
        self.staleness.append(int(pl_module.stabilizer_signals["staleness"].max()))
        self.stats = trainer.datamodule.stats()


class AbortCounter(EmbeddedEngine):
    """Counts what is aborted."""

    aborted = 0

    def abort(self, request_ids):
        self.aborted += len(request_ids)
        super().abort(request_ids)


@pytest.mark.slow
@pytest.mark.parametrize("bound", [0, 2])
def test_the_first_finished_are_trained_on_and_the_rest_are_aborted(bound):
    watch, engine = Watch(), AbortCounter(num_slots=5)
    data = make_data(max_staleness=bound, redundant_groups=2, groups_per_step=2, engine=engine)
    fit(make_module(), data, 8, [watch])
    assert len(set(watch.trained)) == len(watch.trained) == 16
    assert max(watch.staleness) <= bound
    assert 0 < engine.aborted <= watch.stats.num_lost <= 16
    if bound == 0:
        assert watch.stats.num_lost == 16


@pytest.mark.slow
def test_a_run_with_a_ring_trains_within_the_bound():
    watch = Watch()
    data = make_data(max_staleness=1, groups_per_step=2, admission=Ring(num_sampling=8, capacity=3))
    fit(make_module(), data, 10, [watch])
    assert len(set(watch.trained)) == 20
    assert max(watch.staleness) <= 1
    assert watch.stats.num_lost > 0


def test_each_completion_is_scored_as_soon_as_it_is_there():
    scored = threading.Event()

    class Holding(SimulatedEngine):
        """Keeps the last completion of the first group back until another of it has been scored."""

        held = ()

        def poll(self, timeout_s):
            found = super().poll(0.01)
            self.held += tuple(c for c in found if (c.request_id, c.sample_index) == (0, 3))
            found = [c for c in found if (c.request_id, c.sample_index) != (0, 3)]
            if self.held and scored.is_set():
                found, self.held = [*found, *self.held], ()
            return found

    def reward(prompt, completion):
        scored.set()
        return 1.0

    data = make_data(max_staleness=0, reward=reward, engine=Holding(Constant(0.001)), rollout_timeout_s=5.0)
    fit(make_module(), data, 1)


@pytest.mark.slow
def test_replicated_prompts_give_each_completion_a_request_of_its_own():
    requests, watch = [], Watch()

    class Listening(EmbeddedEngine):
        def submit(self, new):
            requests.extend(new)
            super().submit(new)

    data = make_data(max_staleness=1, replicate_prompts=True, engine=Listening(num_slots=6))
    fit(make_module(), data, 4, [watch])
    assert len(set(watch.trained)) == 16
    assert {request.num_samples for request in requests} == {1}
    assert len({request.id for request in requests}) == len(requests) == 4 * data._slots.next_index
    left = data._source._producer.book.requests._parts.keys()
    assert left <= {request.id for request in requests[-32:]}, "none is left behind"


@pytest.mark.slow
def test_a_group_that_was_lost_while_it_was_scored_is_not_missed():
    def reward(prompt, completion):
        time.sleep(0.002)
        return random.random()

    watch = Watch()
    settings = dict(max_staleness=0, redundant_groups=3, groups_per_step=2, reward=reward, reward_workers=3)
    fit(make_module(), make_data(**settings, engine=barrier_engine()), 6, [watch])
    assert len(set(watch.trained)) == 12
