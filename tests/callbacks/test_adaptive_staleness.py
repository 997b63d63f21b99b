"""AdaptiveStaleness: keeps the effective sample size near its target, never leaves its range, never hurries."""

import flow
import lightning.pytorch as pl
import pytest
import torch
from flow import barrier_engine, make_data, make_module
from foreign_modules import Regression, fit
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint
from test_collapse_alarm import Bounded

from lit_async_rl.callbacks import AdaptiveStaleness, CollapseAlarm
from lit_async_rl.stabilizers.collapse import LowerStaleness


class Aging(Regression):
    """Its log-weights spread in proportion to the bound, as if all data were as old as that allows."""

    spread = 0.3

    def signals(self, batch):
        scale = self.spread * self.trainer.datamodule.max_staleness
        return {"log_ratio": scale * torch.linspace(-1, 1, len(batch["x"]))}


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20), st.floats(0, 1), st.floats(0, 1))
def test_never_leaves_its_range(bound, highest, minimum, smoothed, target):
    loop = AdaptiveStaleness(target_ess_ratio=target, min_staleness=minimum)
    loop._smoothed = smoothed
    following = loop.next_bound(min(bound, highest), highest)
    assert min(minimum, highest) <= following <= highest


@pytest.mark.slow
def test_finds_the_bound_that_the_target_allows_stays_there_and_follows_when_the_data_bears_more():
    data = Bounded(16)
    ages = {}

    class Settling(Aging):
        def on_train_batch_end(self, *args):
            ages[self.global_step] = data.max_staleness
            self.spread = 0.3 if self.global_step < 100 else 0.2

    fit(Settling(), AdaptiveStaleness(target_ess_ratio=0.6, smoothing=0.0), data=data, max_steps=200, max_epochs=9)
    assert data.history[:2] == [8, 4]
    assert {ages[step] for step in range(40, 100)} == {4}
    assert data.history[2:] == [5, 6]  # 6 versions of 0.2 spread as much as 4 of 0.3


@pytest.mark.parametrize(("sync_steps", "expected"), [(1, [2] * 6 + [1] * 3), (2, [2] * 11 + [1])])
def test_waits_until_data_of_the_old_bound_is_gone(sync_steps, expected):
    data = Bounded(4)
    data.weight_sync_steps = sync_steps
    changes = []

    class Watch(Aging):
        spread = 10.0

        def on_train_batch_end(self, *args):
            changes.append(data.max_staleness)

    fit(Watch(), AdaptiveStaleness(target_ess_ratio=0.9, smoothing=0.0), data=data, max_steps=len(expected))
    assert changes == expected


def test_follows_the_kl_where_told_to():
    data = Bounded(16)
    fit(Aging(), AdaptiveStaleness(max_kl=0.5, smoothing=0.0), data=data, max_steps=60, max_epochs=9)
    assert 0 < data.max_staleness < 16


def test_target_zero_never_changes_anything():
    data = Bounded(3)
    fit(Aging(), AdaptiveStaleness(target_ess_ratio=0.0), data=data, max_steps=20, max_epochs=9)
    assert data.history == []


def test_a_resumed_run_gets_its_bound_back():
    first = AdaptiveStaleness(target_ess_ratio=0.9, smoothing=0.0)
    fit(Aging(), first, data=Bounded(8), max_steps=2)
    second = AdaptiveStaleness(target_ess_ratio=0.9, smoothing=0.0)
    second.load_state_dict(first.state_dict())
    data = Bounded(8)
    fit(Aging(), second, data=data, max_steps=1)
    assert data.history == [first.state_dict()["bound"]]
    assert data.max_staleness < 8


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loop", "alarm"])
def test_a_resumed_run_admits_under_its_bound_from_the_first_prompt_on(tmp_path, kind):
    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            admission = trainer.datamodule._slots
            under_way.append(len(admission.deadlines) + admission.num_taken)

    def run(max_steps, **settings):
        lowers = AdaptiveStaleness(target_ess_ratio=1.0, band=0.0, smoothing=0.0)
        if kind == "alarm":
            lowers = CollapseAlarm(LowerStaleness(by=2), min_ess_ratio=1.0, patience=1)
        saved = ModelCheckpoint(tmp_path, every_n_train_steps=3, filename="{step}")
        callbacks, data = [lowers, Watch(), saved], make_data(groups_per_step=2)
        flow.fit(make_module(), data, max_steps, callbacks, enable_checkpointing=True, **settings)
        assert data.max_staleness == 2

    under_way = []
    run(4)
    assert under_way == [10, 10, 8, 6]  # what was admitted under 4 versions, and at last the three steps of 2
    under_way.clear()
    run(4, ckpt_path=str(tmp_path / "step=3.ckpt"))
    assert under_way == [6]


def test_a_data_module_without_a_bound_is_refused_by_name():
    with pytest.raises(ValueError, match="AdaptiveStaleness needs a data module"):
        fit(Regression(), AdaptiveStaleness())


def test_a_fixed_lag_is_refused_at_the_start():
    data = make_data(max_staleness=1, schedule="fixed_lag", engine=barrier_engine())
    with pytest.raises(ValueError, match=r"data\.admission=FixedLag has no bound to change"):
        flow.fit(make_module(), data, 1, [AdaptiveStaleness(target_ess_ratio=0.0)])


@pytest.mark.parametrize("setting", [{"target_ess_ratio": 2.0}, {"smoothing": -1.0}, {"max_kl": 0.0}])
def test_senseless_settings_are_refused(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        AdaptiveStaleness(**setting)
