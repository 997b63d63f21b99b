"""Every public callback on modules that know nothing of us: it works, or says at the start what it needs."""

import math

import lightning.pytorch as pl
import pytest
import pytorch_lightning
import torch
from battery import ONCE, NaNs, discovered, make
from foreign_modules import ROWS, Regression, Rows, fit, weights
from test_all_callbacks import BoundedRows
from test_foreign import Manual, Two, Untouched
from torch.utils.data import DataLoader

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]

ANYWHERE = {
    *("AdaptiveStaleness", "CollapseAlarm", "ESSLearningRate", "GradientAlignmentControl", "GradientClipping"),
    "EstimatorBlend",
    "StalenessController",
    "WeightDriftMonitor",
    *(
        "GradientMonitor",
        "LinkedCheckpoint",
        "LiveView",
        "Progress",
        "RunSummary",
        "SaveOnFailure",
        "SaveOnSigterm",
        "SkipNonFinite",
    ),
}
EXTRACTING = {
    *("AdaptiveStaleness", "CollapseAlarm", "ESSLearningRate", "EstimatorBlend", "StalenessController"),
    "WeightDriftMonitor",
}
CHOOSING = {*EXTRACTING, "GradientAlignmentControl", "GradientClipping"}


class Watch:
    """What was trained and logged; a mixin for the callbacks of either Lightning."""

    def __init__(self):
        super().__init__()
        self.num_steps, self.metrics = 0, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.num_steps = trainer.global_step
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


class Ours(Watch, pl.Callback):
    """Of lightning.pytorch."""


def train(module, name, folder, data=None, others=(), extras=None, trainer_class=pl.Trainer, **trainer):
    """Six micro-batches with this callback; every metric is finite."""
    watch = Ours()
    settings = dict(enable_checkpointing=True, default_root_dir=folder, enable_progress_bar=name in ONCE)
    callback = make(name, folder, **(extras or {}))
    settings |= dict(max_steps=-1, limit_train_batches=6, max_epochs=1)
    fit(module, *others, callback, watch, data=data or BoundedRows(), trainer_class=trainer_class, **settings | trainer)
    assert len(watch.metrics) == 6
    broken = [(n, v) for metrics in watch.metrics for n, v in metrics.items() if not math.isfinite(v)]
    assert not broken, broken
    return watch, callback


def masked(count: int = 0) -> BoundedRows:
    """Rows without a token that counts, but for the first `count` rows of each batch with one."""
    rows = Rows(200)
    rows.mask[:] = False
    for n in range(count):
        rows.mask[n::ROWS, 0] = True
    return BoundedRows(rows)


class OneRow(BoundedRows):
    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=1)


class Silent(Regression):
    """The attribute is there and stays empty."""

    def signals(self, batch):
        return {}


def extract(trainer, pl_module, batch, output):
    return pl_module.signals(batch)


def second_optimizer(name):
    return dict(optimizer=0) if name in CHOOSING else {}


TRIALS = {
    "automatic": lambda name, folder: train(Regression(), name, folder),
    "accumulating": lambda name, folder: train(Regression(), name, folder, accumulate_grad_batches=4),
    "manual": lambda name, folder: train(Manual(), name, folder),
    "two optimizers": lambda name, folder: train(Two(), name, folder, extras=second_optimizer(name)),
    "no signals": lambda name, folder: train(Silent(), name, folder),
    "nothing counts": lambda name, folder: train(Regression(), name, folder, data=masked()),
    "one token": lambda name, folder: train(Regression(), name, folder, data=masked(1)),
    "one row": lambda name, folder: train(Regression(), name, folder, data=OneRow()),
    "NaN in a gradient": lambda name, folder: train(Regression(), name, folder, others=[NaNs("gradient")]),
    "NaN, clipped by norm": lambda name, folder: train(
        Regression(), name, folder, others=[NaNs("gradient")], gradient_clip_val=0.1
    ),
    "NaN, clipped by value": lambda name, folder: train(
        *(Regression(), name, folder),
        others=[NaNs("gradient")],
        gradient_clip_val=0.1,
        gradient_clip_algorithm="value",
    ),
}


@pytest.mark.parametrize("trial", TRIALS)
def test_those_that_work_anywhere_do(trial, tmp_path):
    for name in sorted(ANYWHERE):
        TRIALS[trial](name, tmp_path)


@pytest.mark.parametrize("name", sorted(ANYWHERE))
def test_those_that_work_anywhere_work_in_the_other_lightning(name, tmp_path):
    class Module(pytorch_lightning.LightningModule):
        training_step, configure_optimizers = Regression.training_step, Regression.configure_optimizers
        loss, signals = Regression.loss, Regression.signals

        def __init__(self):
            super().__init__()
            original = Regression()
            self.net, self.make_optimizer, self.make_scheduler = original.net, original.make_optimizer, None

    class Data(pytorch_lightning.LightningDataModule):
        set_max_staleness, train_dataloader = BoundedRows.set_max_staleness, BoundedRows.train_dataloader

        def __init__(self):
            super().__init__()
            self.rows, self.max_staleness = Rows(200), 8

    module, same = Module(), Regression()
    settings = dict(enable_checkpointing=True, default_root_dir=tmp_path, enable_progress_bar=name in ONCE)
    fit(module, make(name, tmp_path), data=Data(), trainer_class=pytorch_lightning.Trainer, **settings)
    data = BoundedRows(Rows(200))
    fit(same, make(name, tmp_path), data=data, **settings)
    assert torch.equal(weights(module), weights(same))


@pytest.mark.parametrize("name", sorted(set(discovered()) - ANYWHERE - {"LMEvalValidation"}))
@pytest.mark.parametrize("lightning", [pl, pytorch_lightning], ids=lambda package: package.__name__)
def test_the_others_say_at_the_start_what_they_need(name, lightning, tmp_path):
    class Module(lightning.LightningModule):
        configure_optimizers, loss = Regression.configure_optimizers, Regression.loss

        def __init__(self):
            super().__init__()
            original = Regression()
            self.net, self.make_optimizer, self.make_scheduler = original.net, original.make_optimizer, None

        def training_step(self, batch, batch_idx):
            raise AssertionError("it began to train")

    settings = dict(enable_checkpointing=True, default_root_dir=tmp_path, trainer_class=lightning.Trainer)
    settings |= dict(enable_progress_bar=name in ONCE)
    with pytest.raises(ValueError, match=rf"^{name} needs a (PolicyModule|RolloutDataModule).*, got (Module|no data)"):
        fit(Module(), make(name, tmp_path), data=DataLoader(Rows(), batch_size=ROWS), **settings)


@pytest.mark.parametrize("name", sorted(ANYWHERE))
def test_in_a_second_run_it_acts_on_the_second_module_as_a_new_one_would(name, tmp_path):
    broken = NaNs("gradient")
    first, second, again = Regression(), Regression(), Regression()
    _, callback = train(first, name, tmp_path, others=[broken])
    first.load_state_dict(Regression().state_dict())  # NaNs would hide what happens to it from here on
    before = weights(first)
    assert before.isfinite().all()
    settings = dict(data=BoundedRows(), max_steps=6, enable_checkpointing=True, default_root_dir=tmp_path)
    fit(second, callback, enable_progress_bar=name in ONCE, **settings)
    assert torch.equal(weights(first), before)
    fit(again, make(name, tmp_path), enable_progress_bar=name in ONCE, **settings)
    assert torch.equal(weights(second), weights(again))


def test_extract_alone_is_enough(tmp_path):
    for name in sorted(EXTRACTING):
        train(Untouched(), name, tmp_path, extras=dict(extract=extract))
