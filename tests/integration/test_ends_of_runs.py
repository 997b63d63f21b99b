"""A run that is ended early leaves the same files; settings that no run can have are refused by name."""

import json
import os
import signal

import pytest
from flow import fit, make_data, make_module
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback, LearningRateFinder
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lit_async_rl.assets import asset
from lit_async_rl.callbacks import BottleneckVerdict, Progress, RunSummary
from lit_async_rl.cli.commands import evaluate
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.environments.episode_engine import EpisodeEngine
from lit_async_rl.tasks import Addition, Calculator, SortDigits


def test_sigterm_does_not_take_the_verdict_on_the_run(tmp_path, capsys):
    end = LambdaCallback(on_train_batch_end=lambda trainer, *_: os.kill(os.getpid(), signal.SIGTERM))
    judge = BottleneckVerdict()
    with pytest.raises(SIGTERMException):
        fit(make_module(), make_data(), 3, [judge, end], logger=CSVLogger(tmp_path, name="", version=0))
    (row,) = map(json.loads, (tmp_path / "version_0" / "verdicts.jsonl").read_text().splitlines())
    assert (row["step"], row["whole_run"]) == (1, True)
    assert judge.verdict is not None
    assert capsys.readouterr().out.count("whole run: ") == 1


def test_the_summary_says_when_accuracy_is_not_that_of_the_end():
    def end(trainer, *_):
        if trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    summary, trainers = RunSummary(), []
    hooks = LambdaCallback(on_train_start=lambda trainer, _: trainers.append(trainer), on_train_batch_end=end)
    data = make_data(val_prompts=SortDigits(8, size=4, split="held_out"))
    often = dict(val_check_interval=2, check_val_every_n_epoch=None, num_sanity_val_steps=0)
    with pytest.raises(SIGTERMException):
        fit(make_module(), data, 9, [summary, hooks], **often)
    assert "held-out accuracy before, at step 4" in summary.table(trainers[0]).columns[0].cells


def test_the_last_step_of_a_run_that_stops_early_has_its_line(capsys):
    def stop(trainer, *_):
        trainer.should_stop = trainer.global_step == 2

    callbacks = [Progress(every_s=1e6), BottleneckVerdict(), LambdaCallback(on_train_batch_end=stop)]
    fit(make_module(), make_data(), 9, callbacks, enable_progress_bar=True)
    starts = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert [one for one in starts if one.startswith("step")] == ["step 1/9", "step 2/9"]
    assert starts.index("step 2/9") < next(n for n, one in enumerate(starts) if one.startswith("whole run"))


@pytest.mark.parametrize("is_inner", [False, True])
def test_an_engine_that_served_another_run_is_made_anew(is_inner, caplog):
    engine = EmbeddedEngine(seed=7)
    model = asset("calculator_policy" if is_inner else "sort_policy")
    sums: dict = dict(prompts=Addition(num_digits=3, size=100), reward=None, model=model) if is_inner else {}
    for _ in range(2):  # the first closes it at its end, and the second would wait until it counts as hung
        outer = EpisodeEngine(engine, environment=Calculator()) if is_inner else engine
        data = make_data(engine=outer, **sums)
        fit(make_module(model=model), data, 1)
        assert (data.engine.engine if is_inner else data.engine).seed == 7
    assert "the engine was restarted" not in caplog.text


def test_steps_of_changing_length_are_refused():
    with pytest.raises(ValueError, match=r"GradientAccumulationScheduler.*data\.micro_batches_per_step=1"):
        fit(make_module(), make_data(), 2, [GradientAccumulationScheduler({0: 2})])


def test_epochs_that_never_end_are_refused_and_those_of_some_batches_are_not():
    with pytest.raises(ValueError, match=r"trainer\.max_epochs=1 without trainer\.max_steps"):
        fit(make_module(), make_data(), -1, max_epochs=1, max_time={"seconds": 20})
    assert fit(make_module(), make_data(), -1, max_epochs=2, limit_train_batches=1).global_step == 2


def test_batches_that_cannot_be_repeated_are_refused():
    with pytest.raises(ValueError, match=r"trainer\.overfit_batches=2 would repeat batches"):
        fit(make_module(), make_data(), 2, overfit_batches=2)


def test_a_search_for_a_rate_without_the_callbacks_of_the_run_is_refused():
    with pytest.raises(ValueError, match="LearningRateFinder"):
        fit(make_module(), make_data(), 2, [LearningRateFinder()])


def test_evaluating_on_nothing_is_refused():
    with pytest.raises(SystemExit, match=r"trainer\.limit_val_batches=0"):
        evaluate(["--config", "configs/quickstart.yaml", "--trainer.limit_val_batches", "0"])
