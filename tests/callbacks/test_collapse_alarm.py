"""CollapseAlarm: raises when a limit stays broken, in words, and what it does then is done."""

import math

import lightning.pytorch as pl
import pytest
import torch
from foreign_modules import Regression, fit, weights
from lightning.pytorch.plugins import MixedPrecision

from lit_async_rl.callbacks import CollapseAlarm, GradientClipping, GradientMonitor, LinkedCheckpoint
from lit_async_rl.stabilizers.collapse import CollapseWatch, LowerStaleness, StepHealth, Stop
from lit_async_rl.stabilizers.rollback import RollBack, RollBackToCheckpoint
from lit_async_rl.training.checkpoint_io import AtomicCheckpointIO, BackgroundCheckpointIO

NOTHING = dict(min_ess_ratio=None, max_kl=None, max_grad_norm_factor=None)


def watch(patience=2, window=3, **limits):
    none = dict(NOTHING, max_cosine=None, min_entropy=None, max_reward_drop=None)
    return CollapseWatch(**(none | limits), patience=patience, window=window)


@pytest.mark.parametrize(
    ("limit", "good", "bad", "words"),
    [
        ({"min_ess_ratio": 0.1}, {"ess_ratio": 0.5}, {"ess_ratio": 0.01}, "effective sample size"),
        ({"max_kl": 1.0}, {"kl": 0.1}, {"kl": 2.0}, "KL"),
        ({"max_kl": 1.0}, {"kl": 0.1}, {"kl": math.nan}, "KL"),
        ({"max_cosine": 0.5}, {"cosine": 0.1}, {"cosine": 0.9}, "drifts"),
        ({"min_entropy": 0.5}, {"entropy": 1.0}, {"entropy": 0.1}, "entropy"),
        ({"max_grad_norm_factor": 10.0}, {"grad_norm": 1.0}, {"grad_norm": 11.0}, "11 times its median"),
        ({"max_grad_norm_factor": 10.0}, {"grad_norm": 1.0}, {"grad_norm": math.inf}, "NaN or infinity"),
    ],
)
def test_each_limit_says_so_after_patience_and_not_before(limit, good, bad, words):
    w = watch(**limit)
    for _ in range(4):
        assert w.observe(StepHealth(**good)) == []
    assert w.observe(StepHealth(**bad)) == []
    assert not w.is_healthy
    assert w.observe(StepHealth(**good)) == []
    assert w.is_healthy
    assert w.observe(StepHealth(**bad)) == []
    (sentence,) = w.observe(StepHealth(**bad))
    assert words in sentence


def test_reward_is_compared_with_its_best_mean():
    w = watch(patience=1, max_reward_drop=0.3)
    rewards = [0.1, 0.2, 0.3, 0.9, 0.9, 0.9, 0.9, 0.1]
    assert not any(w.observe(StepHealth(reward=r)) for r in rewards)
    (sentence,) = w.observe(StepHealth(reward=0.1))
    assert "fell to 0.367 from 0.9" in sentence


def test_nothing_measured_breaks_nothing():
    w = watch(patience=1, min_ess_ratio=0.5, max_kl=0.1, max_grad_norm_factor=1.0, max_cosine=0.0, min_entropy=9.0)
    assert w.observe(StepHealth()) == []


class Collapsing(Regression):
    """From step 4 on its weights are disturbed and the log-ratios are hopeless."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.global_step >= 4:
            signals = self.stabilizer_signals
            self.stabilizer_signals = signals | {"log_ratio": signals["log_ratio"] * 100}
            return loss * 1e3
        return loss


class Bounded(pl.LightningDataModule):
    """Rows with a bound on staleness that does nothing."""

    def __init__(self, max_staleness=4):
        super().__init__()
        self.max_staleness = max_staleness
        self.history = []

    def set_max_staleness(self, max_staleness):
        if max_staleness != self.max_staleness:
            self.history.append(max_staleness)
        self.max_staleness = max_staleness

    def train_dataloader(self):
        from foreign_modules import ROWS, Rows
        from torch.utils.data import DataLoader

        return DataLoader(Rows(200), batch_size=ROWS)


def alarm(action, **changes):
    return CollapseAlarm(action, **(NOTHING | dict(min_ess_ratio=0.18, patience=2, cooldown_steps=3) | changes))


class Weights(pl.Callback):
    def __init__(self):
        self.after = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.after[trainer.global_step] = weights(pl_module)


def test_stops_with_a_report_in_words():
    callback = alarm(Stop())
    with pytest.warns(UserWarning, match="effective sample size was 0.1"):
        trainer = fit(Collapsing(), callback, max_steps=20)
    assert trainer.global_step == 6
    (report,) = callback.reports
    assert report.startswith("CollapseAlarm at step 6: ")
    assert report.endswith("Training stops.")


@pytest.mark.filterwarnings("ignore:CollapseAlarm")
def test_rolls_back_weights_and_moments_to_the_last_healthy_copy():
    seen, module = Weights(), Collapsing(lambda p: torch.optim.AdamW(p, lr=0.01))
    callback = alarm(RollBack(every_n_steps=2))
    trainer = fit(module, callback, seen, max_steps=6)
    assert "after step 2" in callback.reports[0]
    assert torch.equal(seen.after[6], seen.after[2])
    assert not torch.equal(seen.after[5], seen.after[2])
    assert {int(state["step"]) for state in trainer.optimizers[0].state.values()} == {2}


@pytest.mark.filterwarnings("ignore:CollapseAlarm")
def test_the_update_that_did_the_damage_is_undone_too():
    """Data of step 5 condemns the weights that step 4 made, so those of step 3 are the last good ones."""
    seen = Weights()
    callback = alarm(RollBack(every_n_steps=1))
    fit(Collapsing(), callback, seen, max_steps=6)
    assert torch.equal(seen.after[6], seen.after[3])


@pytest.mark.filterwarnings("ignore:CollapseAlarm")
def test_stops_after_too_many_rollbacks():
    callback = alarm(RollBack(every_n_steps=1, max_rollbacks=2))
    trainer = fit(Collapsing(), callback, max_steps=40)
    assert len(callback.reports) == 3
    assert "training stops" in callback.reports[-1]
    assert trainer.global_step < 40


@pytest.mark.filterwarnings("ignore:CollapseAlarm")
def test_rolls_back_to_the_last_checkpoint_written_while_healthy_and_keeps_the_schedule(tmp_path):
    seen = Weights()
    checkpoints = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    callback = alarm(RollBackToCheckpoint())
    module = Collapsing(make_scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5))
    trainer = fit(module, callback, seen, checkpoints, max_steps=6, enable_checkpointing=True)
    assert "step=3" in callback.reports[0]
    assert torch.equal(seen.after[6], seen.after[3])
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.5**6)


class Saved(Collapsing):
    """Its steps number `bad` are disturbed; its checkpoints have what those of the package have."""

    def __init__(self, bad=range(4, 99)):
        super().__init__()
        self.bad = bad

    def training_step(self, batch, batch_idx):
        loss, is_bad = Regression.training_step(self, batch, batch_idx), self.global_step in self.bad
        self.stabilizer_signals = self.stabilizer_signals | {"log_ratio": batch["log_ratio"] * 1000 * is_bad}
        return loss * (1000 if is_bad else 1)

    def on_save_checkpoint(self, checkpoint):
        checkpoint |= {"version": 1, "updated": False, "random_state": torch.get_rng_state()}


def fit_saving(folder, module, *callbacks, every=1, save_last="link", io=None, **settings):
    saving = LinkedCheckpoint(folder, every_n_train_steps=every, save_top_k=1, save_last=save_last)
    settings |= dict(enable_checkpointing=True, plugins=[io] if io else None)
    return fit(module, *callbacks, saving, **settings)


@pytest.mark.filterwarnings("ignore:CollapseAlarm")
@pytest.mark.parametrize("save_last", ["link", True, None])
@pytest.mark.parametrize("io", [BackgroundCheckpointIO, AtomicCheckpointIO, None])
def test_a_healthy_checkpoint_outlives_what_the_callback_removes_and_links(tmp_path, save_last, io):
    """With one checkpoint and a link to the newest, as shipped, the one of a bad step was restored in its place."""
    seen, callback = Weights(), alarm(RollBackToCheckpoint())
    fit_saving(tmp_path, Saved(), callback, seen, save_last=save_last, io=io and io())
    assert "healthy.ckpt" in callback.reports[0]
    assert torch.equal(seen.after[6], seen.after[3])
    names = {"healthy.ckpt", "epoch=0-step=6.ckpt"} | ({"last.ckpt"} if save_last else set())
    assert {path.name for path in tmp_path.iterdir()} == names


@pytest.mark.filterwarnings("ignore:CollapseAlarm")
@pytest.mark.parametrize("io", [BackgroundCheckpointIO, None])
@pytest.mark.parametrize(("bad", "cooldown"), [((4, 5, 9, 11, 12), 3), ((4, 5, 11, 12), 4)])
def test_a_checkpoint_of_a_bad_step_or_a_cooldown_is_not_healthy_because_a_later_step_is(tmp_path, bad, cooldown, io):
    """The checkpoint of step 9 is followed by a bad step, or one of the cooldown, and that by a good one."""
    callback = alarm(RollBackToCheckpoint(), min_ess_ratio=0.3, cooldown_steps=cooldown)
    seen, module = Weights(), Saved(bad)
    fit_saving(tmp_path, module, callback, seen, every=3, io=io and io(), max_steps=13)
    assert len(callback.reports) == 2
    assert torch.equal(seen.after[13], seen.after[3])


@pytest.mark.filterwarnings("ignore:CollapseAlarm")
@pytest.mark.parametrize(("first_bad", "restored"), [(4, None), (5, 4)])
def test_a_run_uses_the_checkpoint_that_it_resumed_from_and_no_other_of_an_earlier_run(tmp_path, first_bad, restored):
    fit_saving(tmp_path, Saved(), alarm(RollBackToCheckpoint()), max_steps=4)
    assert torch.load(tmp_path / "healthy.ckpt", weights_only=False)["global_step"] == 3
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]
    module, callback = Saved(range(first_bad, 99)), alarm(RollBackToCheckpoint(), min_ess_ratio=0.3)
    fit_saving(tmp_path, module, callback, ckpt_path=tmp_path / "last.ckpt", max_steps=first_bad + 2)
    is_back = torch.equal(weights(module), torch.cat([value.flatten() for value in saved.values()]))
    assert is_back == (restored is not None)
    assert ("No healthy state was saved yet" in callback.reports[0]) != is_back


@pytest.mark.filterwarnings("ignore:CollapseAlarm")
def test_lowers_the_staleness_bound_down_to_its_minimum():
    data, callback = Bounded(2), alarm(LowerStaleness(minimum=1), cooldown_steps=0)
    fit(Collapsing(), callback, data=data, max_steps=12)
    assert data.history == [1]
    assert "from 2 to 1" in callback.reports[0]
    assert "stays at 1" in callback.reports[1]


def test_a_data_module_without_a_bound_is_refused_by_name():
    with pytest.raises(ValueError, match="LowerStaleness needs a data module"):
        fit(Collapsing(), alarm(LowerStaleness()), max_steps=8)


def test_watches_the_cosine_of_consecutive_gradients():
    class Drifting(Regression):
        def loss(self, batch):
            return self.net[2].bias.sum()

    callback = CollapseAlarm(**NOTHING, max_cosine=0.9, patience=2, cooldown_steps=50)
    with pytest.warns(UserWarning, match="cosine of 1"):
        fit(Drifting(), callback)
    assert "step 3" in callback.reports[0]


@pytest.mark.parametrize("setting", [{"patience": 0}, {"window": 0}, {"cooldown_steps": -1}])
def test_senseless_settings_are_refused(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        CollapseAlarm(**setting)


class LeavingOut(Regression):
    """Its last micro-batch of every fourth step has no loss: Lightning skips the step."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 8 == 7 else loss


class Norms(pl.Callback):
    """Those that callbacks before it have logged."""

    def __init__(self):
        self.found = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.found += [float(trainer.callback_metrics[n]) for n in ("grad/norm",) if n in trainer.callback_metrics]


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_is_left_out_has_no_scaled_gradients_to_alarm_of(fused):
    """With a loss scaler they are multiplied by the scale, unless the optimizer is fused."""
    norms = Norms()
    alarm = CollapseAlarm(max_grad_norm_factor=100.0, patience=1)
    clipping = GradientClipping(1e6)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    settings = dict(accumulate_grad_batches=2, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    module = LeavingOut(lambda params: torch.optim.AdamW(params, lr=1e-3, fused=fused))
    fit(module, alarm, clipping, GradientMonitor(), norms, max_steps=20, **settings)
    assert alarm.reports == []
    assert norms.found
    assert max(norms.found) < 100.0
