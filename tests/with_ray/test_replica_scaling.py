"""The number of replicas follows what limits the run, reaches the best one, and stays there."""

import itertools
import random
import time

import lightning.pytorch as pl
import pytest
from flow import fit, make_data, make_module
from quick_engines import Quick

from lit_async_rl.callbacks import ReplicaScaling
from lit_async_rl.ray.engine import RayEngine
from lit_async_rl.ray.replica_scaling import wanted_replicas
from lit_async_rl.scheduling.bottleneck import Intervals


def window(train_s, work_s, replicas, noise=0.0, rng=None):
    """A step with perfect overlap, of the trainer and of replicas that share the work."""
    noisy = 1.0 if rng is None else rng.uniform(1 - noise, 1 + noise)
    engine_s = work_s / replicas * noisy
    wall_s = max(train_s, engine_s)
    return Intervals(wall_s=wall_s, wait_s=wall_s - train_s, sync_s=0.0, engine_busy_s=engine_s)


def numbers(loads, first=1, low=1, high=16, noise=0.0):
    rng = random.Random(0)
    found = [first]
    for train_s, work_s in loads:
        seen = window(train_s, work_s, found[-1], noise=noise, rng=rng)
        found.append(wanted_replicas(seen, found[-1], low, high=high))
    return found


@pytest.mark.parametrize(("work_s", "best"), [(0.5, 1), (2.9, 3), (3.0, 3), (7.7, 8), (100.0, 16)])
def test_it_reaches_the_fewest_replicas_with_which_generation_keeps_up(work_s, best):
    assert numbers([(1.0, work_s)] * 8)[-1] == best


def test_it_follows_a_load_that_grows_and_shrinks():
    grown = numbers([(1.0, 6.0)] * 6)
    assert grown == [1, 2, 4, 6, 6, 6, 6]  # at most doubled
    assert numbers([(1.0, 1.4)] * 3, first=6)[1:] == [2, 2, 2]
    assert numbers([(1.0, 0.1)] * 3, first=6, low=2)[-1] == 2


@pytest.mark.parametrize("work_s", [2.5, 2.9, 3.3, 5.95])
def test_a_steady_load_with_noise_moves_it_at_most_once_in_ten_windows(work_s):
    found = numbers([(1.0, work_s)] * 106, noise=0.06)[6:]
    changes = sum(a != b for a, b in itertools.pairwise(found))
    assert changes <= 10
    assert max(found) - min(found) <= 1


def test_waiting_for_rewards_or_for_the_bound_starts_no_replica():
    for seen in (
        Intervals(wall_s=2.0, wait_s=1.0, sync_s=0.0, engine_busy_s=0.5, scoring_s=1.9),
        Intervals(wall_s=2.0, wait_s=1.0, sync_s=0.0, engine_busy_s=1.0),
    ):
        assert wanted_replicas(seen, 2, 1, high=8) == 2


class Laborious(Quick):
    """Takes a while for each request, and says so."""

    def poll(self, timeout_s):
        found = super().poll(timeout_s)
        if found:
            time.sleep(0.1)
            self.busy += 0.1
        return found


class EndWith(pl.Callback):
    """Ends a run when it has so many replicas."""

    def __init__(self, replicas):
        self.replicas = replicas

    def on_train_batch_end(self, trainer, *args):
        trainer.should_stop = trainer.datamodule.engine.num_ready == self.replicas


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_a_run_that_waits_for_its_only_replica_gets_more(stand_in):
    Quick.reset()
    engine = RayEngine(Laborious(), replicas=1, num_cpus=0.1)
    data = make_data(engine=engine, max_staleness=2)
    run = fit(make_module(), data, 50, [ReplicaScaling(max_replicas=3, every_n_steps=1), EndWith(3)])
    assert run.global_step < 50
    assert run.callback_metrics["perf/replicas"] in (2, 3)  # as it was before the last change


def test_settings_and_engines_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"ReplicaScaling\.max_replicas must be >= 3, got 2"):
        ReplicaScaling(min_replicas=3, max_replicas=2)
    with pytest.raises(ValueError, match=r"needs data\.engine=RayEngine, got EmbeddedEngine"):
        fit(make_module(), make_data(), 1, [ReplicaScaling()])
