"""The table at the end of a run, of a callback that sees several."""

import io
import os
import signal
import time

import lightning.pytorch as pl
import pytest
from flow import fit, make_data, make_module
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from rich.console import Console
from rich.table import Table

from lit_async_rl.callbacks import RunSummary, SaveOnSigterm, SkipNonFinite
from lit_async_rl.callbacks.monitors.run_summary import fitted
from lit_async_rl.tasks import SortDigits


def rows(summary, trainer):
    table = summary.table(trainer)
    return dict(zip(*(column.cells for column in table.columns), strict=True))


class Terminate(pl.Callback):
    """Ends the run half a second after its first step began."""

    def on_train_batch_end(self, trainer, *_):
        self.trainer = trainer
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_a_second_run_that_is_ended_has_its_own_time_steps_and_checkpoint(tmp_path):
    summary = RunSummary()
    trainer = fit(make_module(), make_data(), 3, [summary])
    first = summary.wall_s
    assert rows(summary, trainer)["optimizer steps"] == "3"
    summary.wall_s = 1e9  # of a long run
    ending = Terminate()
    callbacks = [summary, ending, ModelCheckpoint(every_n_train_steps=9), SaveOnSigterm()]
    with pytest.raises(SIGTERMException):
        fit(make_module(), make_data(), 3, callbacks, default_root_dir=tmp_path, enable_checkpointing=True)
    found = rows(summary, ending.trainer)
    assert found["optimizer steps"] == "1"
    assert found["checkpoint"] == str(tmp_path / "checkpoints" / "last.ckpt")
    assert 0.5 <= summary.wall_s < 100 + first
    assert summary.stats.num_tokens > 0


@pytest.mark.slow
def test_accuracy_before_is_that_of_the_same_fit():
    """Each fit is between two validations; the last one before it is where it begins."""
    summary = RunSummary()
    prompts = SortDigits(8, size=4, split="held_out")
    for learning_rate in (1e-3, 1e-5):
        data, module = make_data(val_prompts=prompts), make_module(learning_rate=learning_rate)
        trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[summary])
        trainer.validate(module, data, verbose=False)
        before = summary.accuracy[-1]
        fit(module, data, 2, [summary], limit_val_batches=0)
        trainer.validate(module, data, verbose=False)
        assert rows(summary, trainer)["held-out accuracy before, after"] == f"{before:.3f}, {summary.accuracy[-1]:.3f}"
        assert len(summary.accuracy) == 2


def test_shares_of_the_time_are_those_of_the_producer():
    summary = RunSummary()
    trainer = fit(make_module(), make_data(), 2, [summary])
    stats = summary.stats
    found = rows(summary, trainer)
    assert 0 < stats.wait_s < stats.run_s
    assert found["trainer waited"] == f"{stats.wait_s / stats.run_s:.0%} of the time"
    assert found["engine idle"] == f"{max(0.0, 1 - stats.engine_busy_s / stats.run_s):.0%} of the time"
    assert found["tokens generated"] == f"{stats.num_tokens:,}"


def test_a_run_with_nothing_left_to_train_says_so(tmp_path):
    trainer = fit(make_module(), make_data(), 2)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    summary = RunSummary()
    trainer = fit(make_module(), make_data(), 2, [summary], ckpt_path=str(tmp_path / "last.ckpt"))
    assert rows(summary, trainer)["optimizer steps"] == "0: step 2 of trainer.max_steps=2 was reached before"


def test_a_run_that_may_not_train_says_why():
    summary = RunSummary()
    trainer = fit(make_module(), make_data(), 2, [summary], limit_train_batches=0)
    assert rows(summary, trainer)["optimizer steps"] == "0: trainer.limit_train_batches=0"


def test_the_checkpoint_of_an_earlier_run_in_a_folder_that_was_moved_is_not_missed(tmp_path):
    saver = ModelCheckpoint(tmp_path / "run", every_n_train_steps=2)
    fit(make_module(), make_data(), 2, [saver], enable_checkpointing=True)
    (tmp_path / "run").rename(tmp_path / "moved")
    (saved,) = (tmp_path / "moved").iterdir()
    summary = RunSummary()
    savers = [summary, ModelCheckpoint(tmp_path / "run", every_n_train_steps=2)]
    trainer = fit(make_module(), make_data(), 2, savers, ckpt_path=str(saved), enable_checkpointing=True)
    assert rows(summary, trainer)["checkpoint"] == "none was saved"


class NoGradient(pl.Callback):
    """Each gradient is NaN."""

    def on_after_backward(self, trainer, pl_module):
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad.fill_(float("nan"))


def test_a_run_whose_updates_were_all_dropped_says_so():
    summary = RunSummary()
    trainer = fit(make_module(), make_data(), 3, [summary, NoGradient(), SkipNonFinite()])
    assert rows(summary, trainer)["updates dropped"] == "all of 3, by SkipNonFinite"


@pytest.mark.slow
def test_a_resumed_run_and_a_checkpoint_that_is_gone_have_rows(tmp_path):
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_last=True)
    settings = dict(enable_checkpointing=True, default_root_dir=str(tmp_path))
    fit(make_module(), make_data(), 2, [saver], **settings)
    summary = RunSummary()
    again = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_last=True)
    path = str(tmp_path / "last.ckpt")
    trainer = fit(make_module(), make_data(), 4, [summary, again], ckpt_path=path, **settings)
    assert rows(summary, trainer)["resumed"] == f"step 2 of {path}"
    saved = again.last_model_path
    assert rows(summary, trainer)["checkpoint"] == saved
    os.remove(saved)
    assert rows(summary, trainer)["checkpoint"] == f"MISSING: {saved} was saved, and is not there any more"


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_table_fits(width):
    table = Table(show_header=False)
    table.add_row("held-out accuracy before, after", "0.350, 0.939")
    table.add_row("checkpoint", "runs/quickstart/version_0/checkpoints/last.ckpt")
    console = Console(width=width, file=io.StringIO())
    console.print(fitted(table, width))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert len({len(line) for line in lines}) == 1
    assert width < 80 or "runs/quickstart/version_0/checkpoints/last.ckpt" in console.file.getvalue()
