"""Rollbacks, projections and bounds at their edges: added parameters, dead optimizers, the other Lightning."""

import gc
import weakref

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from foreign_modules import Regression, fit, weights
from test_all_callbacks import BoundedRows
from torch import nn

from lit_async_rl.callbacks import CollapseAlarm
from lit_async_rl.distributed.ranks import data_parallel, num_copies
from lit_async_rl.stabilizers.collapse import LowerStaleness
from lit_async_rl.stabilizers.gradients import GradSpaces
from lit_async_rl.stabilizers.rollback import RollBack, RollBackToCheckpoint

pytestmark = pytest.mark.filterwarnings("ignore")
ALWAYS = dict(min_ess_ratio=None, max_kl=None, max_grad_norm_factor=None, patience=1)  # `max_reward_drop` is broken


def optimizer_of(*params):
    return torch.optim.SGD([{"params": [p]} for p in params], lr=0.1)


def gradient(params, value):
    for p in params:
        p.grad = torch.full_like(p, value)


def test_a_dead_optimizers_space_is_not_anothers():
    spaces, root = GradSpaces(), nn.Module()
    for _ in range(9):  # addresses are used again
        param = nn.Parameter(torch.ones(2))
        optimizer = optimizer_of(param)
        assert spaces.of(root, optimizer).params[0] is param
        gone = weakref.ref(param)
        del optimizer, param
    gc.collect()
    assert gone() is None, "the model is kept alive"


def test_parameters_that_took_the_place_of_others_make_another_space():
    spaces, old, new = GradSpaces(), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = optimizer_of(old)
    spaces.of(nn.Module(), optimizer)
    optimizer.param_groups[0]["params"][0] = new
    assert spaces.of(nn.Module(), optimizer).params[0] is new


class Unfreezing(Regression):
    """Trains its first layer from step 3 on."""

    def __init__(self):
        super().__init__(lambda params: torch.optim.AdamW(list(params)[2:], lr=0.01))
        self.net[0].requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 3:
            self.net[0].requires_grad_(True)
            self.unfreeze(self.trainer.optimizers[0], list(self.net[0].parameters()))

    @staticmethod
    def unfreeze(optimizer, parameters):
        optimizer.add_param_group({"params": parameters})


class Disturbed(Unfreezing):
    """Its data are hopeless in and after some step."""

    bad_from = 5

    def signals(self, batch):
        signals = super().signals(batch)
        return signals | {"log_ratio": signals["log_ratio"] * (200 if self.global_step >= self.bad_from else 0)}


class DisturbedInGroup(Disturbed):
    """The layer's parameters come before those that are in the group already."""

    @staticmethod
    def unfreeze(optimizer, parameters):
        optimizer.param_groups[0]["params"][:0] = parameters


class BadAtOnce(Disturbed):
    """They are hopeless as soon as the layer is unfrozen, so that no copy has it."""

    bad_from = 3


class BadAtOnceInGroup(DisturbedInGroup, BadAtOnce):
    pass


@pytest.mark.parametrize("module_class", [Disturbed, DisturbedInGroup, BadAtOnce, BadAtOnceInGroup])
def test_a_rollback_goes_with_parameters_that_were_unfrozen_since(module_class):
    class Before(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == module_class.bad_from - 1:
                self.good = weights(pl_module.net[2])

    alarm = CollapseAlarm(RollBack(every_n_steps=1), **ALWAYS | dict(min_ess_ratio=0.3), cooldown_steps=99)
    module, before = module_class(), Before()
    fit(module, alarm, before, data=BoundedRows(), max_steps=module_class.bad_from + 1)
    assert len(alarm.reports) == 1
    assert f"rolled back to those after step {module_class.bad_from - 1}" in alarm.reports[0]
    assert torch.equal(weights(module.net[2]), before.good)


def checkpoints(package, folder):
    return package.callbacks.ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, save_last=True)


@pytest.mark.parametrize("package", [pl, pytorch_lightning], ids=lambda package: package.__name__)
def test_rolling_back_to_a_checkpoint_works_in_both_lightnings(package, tmp_path):
    class Module(package.LightningModule):
        training_step, configure_optimizers = Regression.training_step, Regression.configure_optimizers
        loss = Regression.loss

        def __init__(self):
            super().__init__()
            original = Regression()
            self.net, self.make_optimizer, self.make_scheduler = original.net, original.make_optimizer, None

        def signals(self, batch):
            return Regression.signals(self, batch) | {"log_ratio": batch["log_ratio"] * 200 * (self.global_step >= 4)}

    class Data(package.LightningDataModule):
        train_dataloader = BoundedRows.train_dataloader

        def __init__(self):
            super().__init__()
            self.rows = BoundedRows().rows

    alarm = CollapseAlarm(RollBackToCheckpoint(), **ALWAYS | dict(min_ess_ratio=0.3), cooldown_steps=99)
    module = Module()
    settings = dict(data=Data(), trainer_class=package.Trainer, enable_checkpointing=True, max_steps=5)
    fit(module, alarm, checkpoints(package, tmp_path), **settings)
    assert "rolled back to the checkpoint" in alarm.reports[0]
    saved = torch.load(tmp_path / "epoch=0-step=3.ckpt", weights_only=True)["state_dict"]  # the weights of 4 are bad
    assert torch.equal(weights(module), torch.cat([value.flatten() for value in saved.values()]))


def test_rolling_back_to_files_that_nobody_can_wait_for_is_refused(tmp_path):
    alarm = CollapseAlarm(RollBackToCheckpoint(), **ALWAYS)
    settings = dict(plugins=[pl.plugins.io.AsyncCheckpointIO()], enable_checkpointing=True)
    with pytest.raises(ValueError, match=r"Lightning's AsyncCheckpointIO does not report .* BackgroundCheckpointIO"):
        fit(Disturbed(), alarm, checkpoints(pl, tmp_path), data=BoundedRows(), **settings)


@pytest.mark.parametrize("module_class", [Disturbed, DisturbedInGroup])
def test_a_checkpoint_with_fewer_parameters_in_its_groups_is_left_alone(module_class, tmp_path):
    class Keep(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 2:
                trainer.save_checkpoint(tmp_path / "two.ckpt")

    action = RollBackToCheckpoint()
    action.healthy = lambda trainer, pl_module: setattr(action, "path", str(tmp_path / "two.ckpt"))
    alarm = CollapseAlarm(action, **ALWAYS | dict(min_ess_ratio=0.3), cooldown_steps=99)
    fit(module_class(), Keep(), alarm, data=BoundedRows(), max_steps=6)
    assert "two.ckpt has other parameter groups than the optimizer: training continues" in alarm.reports[0]


@pytest.mark.filterwarnings("ignore:CollapseAlarm")
def test_a_checkpoint_gives_weights_and_moments_and_no_settings(tmp_path):
    """Those of a run that resumes with others than the checkpoint's, or that a schedule changes."""

    class Late(Regression):
        def signals(self, batch):
            return super().signals(batch) | {"log_ratio": batch["log_ratio"] * 200 * (self.global_step >= 4)}

    class Change(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            trainer.optimizers[0].param_groups[0]["weight_decay"] = 1.0 + trainer.global_step

    checkpoints = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
    alarm = CollapseAlarm(RollBackToCheckpoint(), **ALWAYS | dict(min_ess_ratio=0.3), cooldown_steps=99)
    settings = dict(data=BoundedRows(), max_steps=5, enable_checkpointing=True)
    trainer = fit(Late(), Change(), alarm, checkpoints, **settings)
    assert "rolled back to the checkpoint" in alarm.reports[0]
    assert trainer.optimizers[0].param_groups[0]["weight_decay"] == 6.0


def test_a_copy_of_another_run_is_not_rolled_back_to():
    alarm = CollapseAlarm(RollBack(every_n_steps=1), **ALWAYS | dict(min_ess_ratio=0.3), cooldown_steps=0)

    class Good(Regression):
        factor = 0.0

        def signals(self, batch):
            return super().signals(batch) | {"log_ratio": batch["log_ratio"] * self.factor}

    class Hopeless(Good):
        factor = 200.0

    fit(Good(), alarm, data=BoundedRows(), max_steps=3)
    module = Hopeless()
    fit(module, alarm, data=BoundedRows(), max_steps=1)
    assert "No healthy state was saved yet" in alarm.reports[-1]


def test_lower_staleness_needs_a_bound_from_the_start():
    module = Regression()
    before = weights(module)
    with pytest.raises(ValueError, match=r"^LowerStaleness needs a data module with `max_staleness`"):
        fit(module, CollapseAlarm(LowerStaleness()))
    assert torch.equal(weights(module), before)


@pytest.mark.parametrize("package", [pl, pytorch_lightning], ids=lambda package: package.__name__)
def test_ranks_of_ddp_are_no_copies_of_each_other(package):
    quiet = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer = package.Trainer(devices=2, strategy="ddp", **quiet)
    assert (data_parallel(trainer), num_copies(trainer)) == ((2, 0), 1)
    trainer = package.Trainer(devices=1, **quiet)
    assert (data_parallel(trainer), num_copies(trainer)) == ((1, 0), 1)
