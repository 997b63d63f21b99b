"""A row of the log has what was logged since the row before, nothing older, and the number of its step."""

import csv
import math
import signal

import lightning.pytorch as pl
import pytest
from flow import fit, make_data, make_module
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_async_rl import CSVLog
from lit_async_rl.callbacks import GradientMonitor, SaveOnSigterm, SkipNonFinite
from lit_async_rl.tasks import SortDigits


class Logs(pl.Callback):
    """Logs in some steps only, from all hooks of a step; the gradient of the third step is NaN."""

    def __init__(self):
        self.seen = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.log("begins", float(trainer.global_step))

    def on_after_backward(self, trainer, pl_module):
        if trainer.global_step == 2:
            next(pl_module.parameters()).grad.fill_(math.nan)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step in (1, 4) and (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            pl_module.log("sometimes", float(trainer.global_step))
        self.seen[trainer.global_step] = float(trainer.callback_metrics.get("sometimes", -1))


def rows_of(tmp_path, every, micro_batches=1):
    logs = Logs()
    trainer = fit(
        make_module(),
        make_data(micro_batches_per_step=micro_batches),
        6,
        [logs, GradientMonitor(), SkipNonFinite()],
        logger=CSVLog(tmp_path, name="", version=0),
        log_every_n_steps=every,
    )
    with (tmp_path / "version_0/metrics.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["begins"]], logs, trainer


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_rows_have_the_values_of_their_steps(tmp_path, micro_batches):
    rows, logs, trainer = rows_of(tmp_path, 1, micro_batches)
    assert [row["step"] for row in rows] == list("012345")
    assert [float(row["begins"]) for row in rows] == [0, 1, 2, 3, 4, 5]
    assert [row["sometimes"] for row in rows] == ["1.0", "", "", "4.0", "", ""]
    norms = [row["grad/norm"] for row in rows]
    assert norms[1]
    assert norms[2] != norms[1], "the norm of the step before stands for a gradient that was NaN"
    assert logs.seen[3] == 1.0  # callbacks see the last value, as always
    assert float(trainer.callback_metrics["sometimes"]) == 4.0


def test_a_row_of_several_steps_has_what_was_logged_in_any_of_them(tmp_path):
    rows, _, _ = rows_of(tmp_path, 3)
    assert [row["step"] for row in rows] == ["2", "5"]
    assert [row["sometimes"] for row in rows] == ["1.0", "4.0"]


class Ended(pl.Callback):
    """SIGTERM at one moment of the third step."""

    def __init__(self, moment):
        self.moment = moment

    def on_after_backward(self, trainer, pl_module):
        self._end(trainer, "within the step", 2)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._end(trainer, "at its end", 3)

    def on_validation_start(self, trainer, pl_module):
        self._end(trainer, "before the validation", 3)

    def on_validation_end(self, trainer, pl_module):
        self._end(trainer, "behind the validation", 3)

    def _end(self, trainer, moment, step):
        if moment == self.moment and trainer.global_step == step and not trainer.received_sigterm:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("moment", "micro_batches"),
    [
        ("before the validation", 1),
        *(
            pytest.param(m, 2, marks=pytest.mark.slow)
            for m in ("within the step", "at its end", "behind the validation")
        ),
    ],
)
def test_rows_behind_a_resume_have_the_numbers_of_their_steps(tmp_path, moment, micro_batches):
    def run(name, callbacks, ckpt_path=None):
        fit(
            make_module(),
            make_data(micro_batches_per_step=micro_batches, val_prompts=SortDigits(8, size=2)),
            5,
            [Logs(), SkipNonFinite(), *callbacks],
            ckpt_path,
            logger=CSVLog(tmp_path, name="", version=name),
            log_every_n_steps=1,
            enable_checkpointing=True,
            default_root_dir=str(tmp_path),
            val_check_interval=3 * micro_batches,
            check_val_every_n_epoch=None,
        )

    saver = SaveOnSigterm()
    with pytest.raises(SIGTERMException):
        run("ended", [Ended(moment), saver])
    run("resumed", [], saver.path)
    with (tmp_path / "resumed/metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["begins"]]
    assert [row["step"] for row in rows] == [str(int(float(row["begins"]))) for row in rows]
    assert rows[-1]["step"] == "4"
