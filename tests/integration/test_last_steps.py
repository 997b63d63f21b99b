"""The weights at the end of a run are saved, whatever the interval of its checkpoints."""

import contextlib
import os
import signal
import time
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from flow import fit, make_data, make_module
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_async_rl.callbacks import LinkedCheckpoint, SaveOnSigterm, WeightSync
from lit_async_rl.cli.app import export, main
from lit_async_rl.training.checkpoint_io import AtomicCheckpointIO

ROOT = Path(__file__).parents[2]
EVERY = "--defaults.checkpoint.init_args.every_n_train_steps"
TOP_K = "--defaults.checkpoint.init_args.save_top_k"
MONITOR = ["--defaults.checkpoint.init_args.monitor", "val/pass@1", "--defaults.checkpoint.init_args.mode", "max"]
SETTINGS = {
    "as_shipped": [],
    "one_kept_two_micro_batches": [TOP_K, "1", "--data.micro_batches_per_step", "2"],
    "the_best_kept": [*MONITOR, TOP_K, "1"],
    "a_copy_of_its_own": [*MONITOR, "--defaults.checkpoint.init_args.save_last", "true"],
    "none_but_the_last": [TOP_K, "0"],
}
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def flags(folder, *more):
    sizes = ["--data.groups_per_step", "2", "--data.group_size", "4", "--data.validation.prompts.init_args.size", "4"]
    where = ["--trainer.logger.init_args.save_dir", str(folder), "--num_threads", "1"]
    every = ["--trainer.val_check_interval", "2", EVERY, "2", "--trainer.enable_progress_bar", "false"]
    return ["--config", "configs/quickstart.yaml", *sizes, *where, *every, "--trainer.max_steps", "3", *more]


def some(name):
    """Each is three commands; `make test` has two of them."""
    return pytest.param(name, marks=[] if name in ("as_shipped", "the_best_kept") else pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize("name", map(some, SETTINGS))
def test_the_last_step_is_saved_exported_and_resumed(name, tmp_path, capsys):
    settings = SETTINGS[name]
    main(flags(tmp_path, *settings))
    (last,) = tmp_path.rglob("last*.ckpt")
    saved = torch.load(last, weights_only=True)
    assert saved["global_step"] == 3
    export(["--config", "configs/quickstart.yaml", "--ckpt_path", str(last), "--out", str(tmp_path / "exported")])
    assert "version 3" in capsys.readouterr().out
    main(flags(tmp_path, *settings, "--ckpt_path", str(last), "--trainer.max_steps", "4"))
    (last,) = tmp_path.rglob("last*.ckpt")
    assert torch.load(last, weights_only=True)["global_step"] == 4
    kept = {path.name for path in last.parent.iterdir()} - {"last.ckpt"}
    if MONITOR[0] in settings:  # the best of those at which it was measured
        assert len(kept) == 1 or "1" not in settings
        assert all("step=3" not in name for name in kept)
    assert not last.is_symlink() or last.resolve().name in kept


class Named(AtomicCheckpointIO):
    """Lists the names of what is written."""

    def __init__(self):
        super().__init__()
        self.names = []

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.names.append((Path(path).name, checkpoint["global_step"]))
        super().save_checkpoint(checkpoint, path, storage_options)


def end_process():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("where", ["after a step", "while it waits"])
def test_after_sigterm_it_is_saved_once(where, tmp_path):
    asked = []

    def reward(prompt, completion):
        if where == "while it waits" and trainer.global_step == 3:
            asked or asked.append(end_process())
            time.sleep(0.3)
        return float(len(completion))

    io, saver = Named(), LinkedCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1, save_last="link")
    after = LambdaCallback(
        on_train_batch_end=lambda *_: end_process() if where == "after a step" and trainer.global_step == 3 else None
    )
    callbacks = [WeightSync(), after, saver, SaveOnSigterm()]
    settings = dict(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = pl.Trainer(max_steps=9, plugins=[io], callbacks=callbacks, **settings)
    with contextlib.suppress(SIGTERMException):
        trainer.fit(make_module(), datamodule=make_data(reward=reward, max_staleness=0))
    assert io.names == [("epoch=0-step=2.ckpt", 2), ("last.ckpt", 3)]


@pytest.mark.slow
def test_an_end_before_the_last_step_removes_no_other_checkpoint(tmp_path):
    """A run that collapsed goes on from the one before."""
    stop = LambdaCallback(
        on_train_batch_end=lambda trainer, *_: setattr(trainer, "should_stop", trainer.global_step == 3)
    )
    saver = LinkedCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=1, save_last="link")
    fit(make_module(), make_data(), 9, [stop, saver], enable_checkpointing=True)
    steps = {path.name: torch.load(path, weights_only=True)["global_step"] for path in tmp_path.iterdir()}
    assert steps == {"epoch=0-step=2.ckpt": 2, "last.ckpt": 3}
    saver = LinkedCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=1, save_last="link")
    fit(make_module(), make_data(), 4, [saver], str(tmp_path / "last.ckpt"), enable_checkpointing=True)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 4
    assert (tmp_path / "last.ckpt").is_symlink()


@pytest.mark.slow
def test_nothing_is_saved_without_a_step_or_twice(tmp_path):
    settings = dict(enable_checkpointing=True)
    for every, steps in ((3, [3]), (2, [2, 3])):
        io, saver = Named(), LinkedCheckpoint(tmp_path / str(every), every_n_train_steps=every, save_last="link")
        fit(make_module(), make_data(), 3, [saver], plugins=[io], **settings)
        assert [step for _, step in io.names] == steps
    io = Named()
    fit(make_module(), make_data(), 3, [LinkedCheckpoint(tmp_path / "none")], plugins=[io], fast_dev_run=1, **settings)
    assert not io.names
