"""The two parts of log-ratios: by hand, and token by token beside whole runs of one and two ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from launch import launch
from ratio_watch import watched

from lit_async_rl.callbacks.monitors.ratio_parts import RatioSplit, stale_sums

SCRIPT = Path(__file__).parents[1] / "helpers" / "ratio_watch.py"


def test_a_step_by_hand():
    """Two fresh tokens of 3 and 1 (mean square 5), two stale ones of 4 and 2 (20 in all, 10 beyond), two masked."""
    log_ratio = torch.tensor([[3.0, -1.0, 4.0], [2.0, torch.nan, 0.0]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    fresh = torch.tensor([[True, True, False], [False, False, False]])
    sums = stale_sums(log_ratio, mask, fresh)
    assert sums.tolist() == [4.0, 2.0, 20.0]
    halves = [stale_sums(log_ratio[n : n + 1], mask[n : n + 1], fresh[n : n + 1]) for n in (0, 1)]
    assert sum(halves).tolist() == sums.tolist(), "additive over micro-batches and ranks"
    parts = RatioSplit().update(2.0, 10.0, sums)
    assert parts == pytest.approx((math.sqrt(5), math.sqrt(10 / 4)))
    assert sum(part**2 for part in parts) == pytest.approx((9 + 1 + 16 + 4) / 4), "the squares add to that of all"


def test_stale_tokens_that_differ_less_than_fresh_ones_have_no_staleness():
    assert RatioSplit().update(1.0, 4.0, torch.tensor([2.0, 2.0, 2.0]).double()) == (2.0, 0.0)


@pytest.mark.parametrize("broken", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_neither_logged_nor_kept(broken):
    split = RatioSplit()
    broken_sums = stale_sums(torch.tensor([1.0, broken]), torch.ones(2).bool(), torch.zeros(2).bool())
    assert split.update(0.0, 0.0, broken_sums) is None, "nothing was fresh yet"
    assert split.update(1.0, 4.0, torch.zeros(3).double()) is None, "there is no token to split"
    assert split.update(0.0, 0.0, broken_sums) is None
    assert split.update(1.0, broken**2, torch.tensor([1.0, 1.0, 9.0]).double()) == (2.0, math.sqrt(5))


@pytest.mark.slow
def test_stale_data_of_many_versions_in_micro_batches():
    seen = watched(in_flight=True).seen
    assert min(seen["fresh"], seen["stale"]) > 0


@pytest.mark.slow
def test_at_a_fixed_lag_the_engine_check_tells_the_discrepancy():
    run = watched(in_flight=False, schedule="fixed_lag")
    assert run.seen["replayed"] > 0
    assert run.found[-1][0] > 0.03, "the engine's"
    assert run.found[-1][1] > 0, "and beyond it"


def test_without_stale_data_all_is_discrepancy():
    run = watched(in_flight=True, max_staleness=0, max_steps=3)
    assert run.seen["stale"] == 0
    assert [staleness for _, staleness in run.found] == [0.0, 0.0, 0.0]


def test_weights_that_changed_since_their_publication_sample_nothing_fresh():
    """Two steps for each version: tokens of the second have its version, and the weights of the first."""
    run = watched(in_flight=True, max_staleness=0, weight_sync_steps=2, max_steps=4)
    assert run.seen["fresh"] == pytest.approx(run.seen["stale"], rel=0.5)
    assert [staleness > 0 for _, staleness in run.found] == [False, True, False, True]


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_two_ranks_have_the_parts_of_their_tokens_together():
    launch(SCRIPT, [], 2, timeout_s=150)
