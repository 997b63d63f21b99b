"""A run that is ended early leaves the same files; settings that no run can have are refused by name."""

import json
import os
import signal

import pytest
from flow import fit, make_data, make_module
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback, LearningRateFinder
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_async_rl.callbacks import BottleneckVerdict
from lit_async_rl.cli.commands import evaluate


def test_sigterm_does_not_take_the_verdict_on_the_run(tmp_path, capsys):
    end = LambdaCallback(on_train_batch_end=lambda trainer, *_: os.kill(os.getpid(), signal.SIGTERM))
    judge = BottleneckVerdict()
    with pytest.raises(SIGTERMException):
        fit(make_module(), make_data(), 3, [judge, end], logger=CSVLogger(tmp_path, name="", version=0))
    (row,) = map(json.loads, (tmp_path / "version_0" / "verdicts.jsonl").read_text().splitlines())
    assert (row["step"], row["whole_run"]) == (1, True)
    assert judge.verdict is not None
    assert capsys.readouterr().out.count("whole run: ") == 1


def test_steps_of_changing_length_are_refused():
    with pytest.raises(ValueError, match=r"GradientAccumulationScheduler.*data\.micro_batches_per_step=1"):
        fit(make_module(), make_data(), 2, [GradientAccumulationScheduler({0: 2})])


def test_a_search_for_a_rate_without_the_callbacks_of_the_run_is_refused():
    with pytest.raises(ValueError, match="LearningRateFinder"):
        fit(make_module(), make_data(), 2, [LearningRateFinder()])


def test_evaluating_on_nothing_is_refused():
    with pytest.raises(SystemExit, match=r"trainer\.limit_val_batches=0"):
        evaluate(["--config", "configs/quickstart.yaml", "--trainer.limit_val_batches", "0"])
