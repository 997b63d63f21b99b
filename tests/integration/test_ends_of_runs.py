"""A run that is ended early leaves the same files; settings that no run can have are refused by name."""

import json
import os
import re
import resource
import shutil
import signal

import lightning.pytorch as pl
import pytest
import torch
from disk import full_disk
from flow import fit, make_data, make_module
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback, LearningRateFinder
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException

import lit_async_rl as rl
from lit_async_rl.assets import asset
from lit_async_rl.callbacks import BottleneckVerdict, LinkedCheckpoint, Progress, RunSummary
from lit_async_rl.cli.app import evaluate, main
from lit_async_rl.data.settings import Validation
from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.environments.episode_engine import EpisodeEngine
from lit_async_rl.models.export import export_model
from lit_async_rl.models.loading import load_policy, load_tokenizer
from lit_async_rl.rewards.functions import exact_match
from lit_async_rl.tasks import Addition, Calculator, SortDigits
from lit_async_rl.training.trackers import CSVLog


def test_sigterm_does_not_take_the_verdict_on_the_run(tmp_path, capsys):
    end = LambdaCallback(on_train_batch_end=lambda trainer, *_: os.kill(os.getpid(), signal.SIGTERM))
    judge = BottleneckVerdict()
    with pytest.raises(SIGTERMException):
        fit(make_module(), make_data(), 3, [judge, end], logger=CSVLogger(tmp_path, name="", version=0))
    (row,) = map(json.loads, (tmp_path / "version_0" / "verdicts.jsonl").read_text().splitlines())
    assert (row["step"], row["whole_run"]) == (1, True)
    assert judge.is_early
    assert judge.words is not None
    assert capsys.readouterr().out.count("whole run: ") == 1


@pytest.mark.slow
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


@pytest.mark.slow
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
    with pytest.raises(ValueError, match=r"Tuner\.lr_find is not for this module"):
        fit(make_module(), make_data(), 2, [LearningRateFinder()])


def limit_files(most):
    """As `full_disk`, until the next call: a context that is left open would be closed at any time, in another test."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


class FullDisk(pl.Callback):
    """From the beginning of one step to that of another there is no room for a checkpoint."""

    def __init__(self, first, last=None):
        self.first, self.last = first, last

    def on_train_batch_start(self, trainer, *_):
        trainer.strategy.checkpoint_io.wait()
        if trainer.global_step + 1 == self.first:
            limit_files(50_000)
        if trainer.global_step + 1 == self.last:
            limit_files(resource.RLIM_INFINITY)


@pytest.fixture
def _disk_is_free_again():
    before, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    limit_files(before)


def fit_with_checkpoints(folder, *callbacks, steps=5, **more):
    """`rl.fit` of small steps that saves every second one."""
    keep = LinkedCheckpoint(every_n_train_steps=2, save_top_k=1, save_last="link")
    small = dict(groups_per_step=2, group_size=2, sampling=SamplingParams(max_tokens=4), accelerator="cpu", devices=1)
    held_out = SortDigits(8, size=4, split="held_out")
    settings = dict(enable_progress_bar=False, logger=CSVLog(folder, name="", version=0), callbacks=[keep, *callbacks])
    settings |= dict(validation=Validation(prompts=held_out), **small)
    return rl.fit(asset("small_sort_policy"), SortDigits(8, size=100), exact_match, max_steps=steps, **settings, **more)


def last_step(folder):
    return torch.load(folder / "version_0/checkpoints/last.ckpt", weights_only=True)["global_step"]


@pytest.mark.slow
@pytest.mark.usefixtures("_disk_is_free_again")
def test_a_last_checkpoint_that_is_lost_is_an_error_that_says_what_is_there(tmp_path, capsys):
    with pytest.raises(rl.LastCheckpointError) as raised:
        fit_with_checkpoints(tmp_path, FullDisk(4))
    saved = tmp_path / "version_0/checkpoints"
    assert re.search(rf"{saved}/\S+step=5.ckpt after step 5, was not written: the disk is full", str(raised.value))
    assert re.search(rf"3 steps are lost; the newest is of step 2: {saved}/\S+step=2.ckpt$", str(raised.value))
    said = re.sub(r"[│\s]+", " ", capsys.readouterr().out)
    assert "checkpoint NOT SAVED, the disk is full. 3 steps are lost; the newest is of step 2: " in said
    assert "held-out accuracy before, after" in said, "the run ended as others do"
    assert last_step(tmp_path) == 2
    limit_files(resource.RLIM_INFINITY)
    raised.value.trainer.save_checkpoint(tmp_path / "elsewhere.ckpt")
    raised.value.trainer.strategy.checkpoint_io.wait()
    assert torch.load(tmp_path / "elsewhere.ckpt", weights_only=True)["global_step"] == 5, "nothing is lost"


@pytest.mark.slow
@pytest.mark.usefixtures("_disk_is_free_again")
def test_a_checkpoint_that_is_lost_in_mid_run_is_a_line(tmp_path, caplog, capsys):
    assert fit_with_checkpoints(tmp_path, FullDisk(2, 3)).global_step == 5
    assert "step=2.ckpt was not written: the disk is full" in caplog.text
    assert "NOT SAVED" not in capsys.readouterr().out
    assert last_step(tmp_path) == 5


@pytest.mark.usefixtures("_disk_is_free_again")
def test_a_stop_that_could_not_be_saved_is_an_error_and_names_no_checkpoint_that_is_not_there(tmp_path, capsys):
    end = LambdaCallback(on_train_batch_end=lambda trainer, *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(rl.LastCheckpointError, match="This run has no checkpoint: its steps up to 1 are lost"):
        fit_with_checkpoints(tmp_path, FullDisk(1), end)
    said = capsys.readouterr().out
    assert "run summary" in said
    assert "resume with" not in said


@pytest.mark.slow
def test_the_command_ends_with_status_1_if_the_last_checkpoint_is_lost(tmp_path, capsys):
    where = ["--trainer.logger.init_args.save_dir", str(tmp_path), "--trainer.max_steps", "1", "--num_threads", "1"]
    sizes = ["--data.groups_per_step", "2", "--data.group_size", "2", "--data.validation.prompts", "null"]
    with full_disk(50_000), pytest.raises(SystemExit, match=r"error: the last checkpoint, \S+ after step 1, was not"):
        main(["--config", "configs/quickstart.yaml", *where, *sizes, "--trainer.enable_progress_bar", "false"])


def test_what_fails_after_the_last_step_does_not_take_it_along(tmp_path):
    def fail(*_):
        raise OSError("tape: the disk is full")

    with pytest.raises(OSError, match="tape"):
        fit_with_checkpoints(tmp_path, LambdaCallback(on_train_end=fail), steps=3)
    assert last_step(tmp_path) == 3


def test_what_fails_in_a_step_saves_no_half_of_it(tmp_path):
    def fail(trainer, *_):
        if trainer.global_step == 3:
            raise OSError("mine")

    with pytest.raises(OSError, match="mine"):
        fit_with_checkpoints(tmp_path, LambdaCallback(on_train_batch_end=fail))
    assert last_step(tmp_path) == 2


@pytest.mark.slow
def test_too_little_room_for_checkpoints_is_said_at_the_start(tmp_path, caplog):
    with full_disk(50_000), pytest.raises(rl.LastCheckpointError):
        fit_with_checkpoints(tmp_path, steps=1)
    (line,) = [text for text in caplog.messages if "GB of free space for each checkpoint" in text]
    assert "5e-05 GB" in line
    size = float(re.search(r"takes about (\S+) GB", line)[1]) * 1e9
    fit_with_checkpoints(tmp_path / "more", steps=1)
    (written,) = tmp_path.glob("more/version_0/checkpoints/*step=1.ckpt")
    assert size == pytest.approx(written.stat().st_size, rel=0.2)
    assert len([text for text in caplog.messages if "GB of free space for each checkpoint" in text]) == 1


# -- export -----------------------------------------------------------------------------------------------------------


def test_a_generation_config_that_transformers_does_not_save_is_exported_as_it_was(tmp_path):
    model, out = shutil.copytree(asset("small_sort_policy"), tmp_path / "model"), tmp_path / "out"
    invalid = {"do_sample": False, "temperature": 0.7, "top_p": 0.8, "eos_token_id": 1}
    (model / "generation_config.json").write_text(json.dumps(invalid))
    lm = load_policy(str(model))
    given = lm.generation_config
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        lm.save_pretrained(tmp_path / "by_transformers")
    export_model(lm, load_tokenizer(str(model)), out, dict(lm.state_dict()))
    assert lm.generation_config is given
    assert {**json.loads((out / "generation_config.json").read_text()), **invalid} == json.loads(
        (out / "generation_config.json").read_text()
    )
    again = load_policy(str(out))
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), lm.parameters(), strict=True))


def test_a_model_that_a_full_disk_does_not_take_is_named(tmp_path):
    lm = load_policy(asset("small_sort_policy"))
    tokenizer = load_tokenizer(asset("small_sort_policy"))
    with full_disk(50_000), pytest.raises(OSError, match=f"model {tmp_path} was not written: the disk is full"):
        export_model(lm, tokenizer, tmp_path, dict(lm.state_dict()))
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_tokenizer_or_configuration_that_cannot_be_saved_is_named_at_the_start(caplog):
    module, data = make_module(), make_data(groups_per_step=2)
    data.codec.tokenizer.init_kwargs["mine"] = object()  # JSON does not hold it
    fit(module, data, 1)
    (line,) = [text for text in caplog.messages if "could not be exported" in text]
    assert re.search(
        r"model\.model='\S+sort_policy' could not be exported after training: its tokenizer cannot be", line
    )


def test_evaluating_on_nothing_is_refused():
    with pytest.raises(SystemExit, match=r"trainer\.limit_val_batches=0"):
        evaluate(["--config", "configs/quickstart.yaml", "--trainer.limit_val_batches", "0"])
