"""Shipped configurations with small `max_steps`, and contradictions of settings that Lightning finds only in `fit`."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor

import lit_async_rl as rl
from lit_async_rl.api.trainer import defaults_file
from lit_async_rl.cli.app import AsyncRLCLI
from lit_async_rl.rules import of_loop, refuse
from lit_async_rl.utils.config_files import load_config

ROOT = Path(__file__).parents[2]
LOOP_SETTINGS = {"val_check_interval", "check_val_every_n_epoch", "limit_train_batches", "limit_val_batches"}
OFF = dict(
    accelerator="cpu",
    devices=1,
    logger=False,
    enable_progress_bar=False,
    enable_checkpointing=False,
    defaults=dict.fromkeys(defaults_file()["defaults"]),
)


class Counts(pl.LightningModule):
    """A module of one weight, and batches of the number that a run's loader has."""

    def __init__(self, num_batches):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.num_batches = num_batches
        self.validated_at = []

    def training_step(self, batch, batch_idx):
        return self.weight

    def validation_step(self, batch, batch_idx):
        self.validated_at.append(self.trainer.global_step)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(range(self.num_batches))

    def val_dataloader(self):
        return torch.utils.data.DataLoader(range(1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trains(max_steps, micro_batches=1, **settings):
    """The steps at which Lightning's own loop validates."""
    trainer = rl.Trainer(max_steps=max_steps, accumulate_grad_batches=micro_batches, **(OFF | settings))
    module = Counts(max_steps * micro_batches)
    refuse(of_loop(trainer, micro_batches))
    trainer.fit(module)
    assert trainer.global_step == max_steps
    return module.validated_at


def of_the_loop():
    for path in sorted((ROOT / "configs").rglob("*.yaml")):
        if path.parent.name in ("clusters", "sweeps"):  # settings of other programs
            continue
        settings = load_config(path)
        if LOOP_SETTINGS & set(settings.get("trainer") or {}):
            yield pytest.param(settings, id=str(path.relative_to(ROOT / "configs")))


@pytest.mark.parametrize("settings", of_the_loop())
def test_a_shipped_configuration_trains_for_a_few_steps(settings):
    """As the command line does it, which always gives Lightning's default of `check_val_every_n_epoch`."""
    of_loop = {name: value for name, value in settings["trainer"].items() if name in LOOP_SETTINGS}
    given = {"check_val_every_n_epoch": 1} | of_loop
    micro_batches = settings.get("data", {}).get("micro_batches_per_step", 1)
    for max_steps in (1, 2, 4):
        trains(max_steps, micro_batches, **given)


def test_the_chat_model_of_a_laptop_trains_for_four_steps_from_the_command_line(tmp_path, monkeypatch):
    """`--config configs/smollm2.yaml --trainer.max_steps 4`, with the settings of its trainer and a tiny model."""
    monkeypatch.chdir(ROOT)
    settings = load_config(ROOT / "configs/smollm2.yaml")["trainer"]
    assert settings["val_check_interval"] > 4
    flags = ["--trainer.val_check_interval", str(settings["val_check_interval"]), "--trainer.max_steps", "4"]
    every = ["--trainer.check_val_every_n_epoch", "1", "--trainer.logger.init_args.save_dir", str(tmp_path)]
    trainer = AsyncRLCLI(["--config", "configs/quickstart.yaml", *flags, *every]).trainer
    assert trainer.check_val_every_n_epoch is None
    refuse(of_loop(trainer, 1))


def test_an_interval_counts_the_steps_of_a_run():
    assert trains(4, val_check_interval=2) == [2, 4]
    assert trains(4, val_check_interval=2, check_val_every_n_epoch=1) == [2, 4]
    assert trains(4, val_check_interval=20, check_val_every_n_epoch=1) == []  # `run` validates at the end
    assert trains(2, micro_batches=2, val_check_interval=4, check_val_every_n_epoch=1) == [2]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            dict(val_check_interval=20, check_val_every_n_epoch=2),
            "val_check_interval=20 is more than the 4 batches of an epoch, and trainer.check_val_every_n_epoch=2",
        ),
        (
            dict(val_check_interval=3, check_val_every_n_epoch=2, limit_train_batches=2),
            "val_check_interval=3 is more than the 2 batches of an epoch",
        ),
        (dict(limit_train_batches=0.1), "trainer.limit_train_batches=0.1 of 4 batches is less than one"),
        (dict(callbacks=LearningRateMonitor()), "LearningRateMonitor, which needs trainer.logger"),
    ],
    ids=["epoch", "part of an epoch", "no batch", "no logger"],
)
def test_what_fit_would_refuse_is_refused_before_it(settings, said):
    trainer = rl.Trainer(max_steps=2, **(OFF | settings))
    with pytest.raises(ValueError, match=said):
        refuse(of_loop(trainer, micro_batches_per_step=2))
    trainer.accumulate_grad_batches = 2
    with pytest.raises(Exception, match=r"val_check_interval|limit_train_batches|LearningRateMonitor"):
        trainer.fit(Counts(4))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        dict(val_check_interval=4, check_val_every_n_epoch=2),
        dict(val_check_interval=20, check_val_every_n_epoch=2, limit_val_batches=0),
        dict(limit_train_batches=0.5, val_check_interval=0.5),
        dict(limit_train_batches=0),
        dict(limit_train_batches=1, max_epochs=2),
    ],
    ids=str,
)
def test_what_fit_takes_is_taken(settings):
    trainer = rl.Trainer(max_steps=4, **(OFF | settings))
    refuse(of_loop(trainer, micro_batches_per_step=1))
    trainer.fit(Counts(4))


def test_a_run_that_never_ends_is_refused_before_it_is_validated():
    with pytest.raises(ValueError, match=r"trainer.max_epochs=2 without trainer.max_steps"):
        refuse(of_loop(rl.Trainer(max_steps=-1, max_epochs=2, **OFF), micro_batches_per_step=1))
