"""Methods of Lightning beside `fit`: `load_from_checkpoint`, `test`, `predict`, and the `Tuner`, which is refused."""

from __future__ import annotations

import functools
import os
import pickle
import shutil
import tempfile
from pathlib import Path

import foreign_modules
import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.tuner import Tuner

import lit_async_rl as rl
from lit_async_rl.cli.app import main
from lit_async_rl.utils.object_config import as_config, as_objects

MODEL = rl.asset("small_sort_policy")
ROWS = [{"prompt": f"{n}=", "answer": str(n)} for n in range(10, 30)]
SMALL = dict(groups_per_step=2, group_size=2, sampling=rl.SamplingParams(max_tokens=4))
CPU = dict(accelerator="cpu", devices=1, enable_progress_bar=False)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def equal(one, two):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


def test_a_checkpoint_makes_its_module_again(tmp_path):
    settings = dict(
        loss=rl.PPOClip(clip_high=0.3),
        proximal=rl.CurrentProximal(),
        correction=rl.SequenceTruncatedIS(cap=4.0),
        scheduler=rl.Cosine(warmup=1),
        optimizer=functools.partial(torch.optim.Adam, betas=(0.5, 0.9)),
        learning_rate=1e-3,
        lora=rl.LoRA(rank=2, modules_to_save=["embed_tokens"]),
        plugins=[rl.AtomicCheckpointIO()],
    )
    trainer = rl.fit(MODEL, ROWS, rl.share_correct, max_steps=2, logger=False, **settings, **SMALL, **CPU)
    trainer.save_checkpoint("a.ckpt")
    trained = trainer.lightning_module
    made = rl.PolicyModule.load_from_checkpoint("a.ckpt")
    assert equal(made, trained)
    assert made.version == trained.version == 2
    assert made.objective.loss == rl.PPOClip(clip_high=0.3)
    assert made.objective.correction.cap == 4.0
    assert made.scheduler == rl.Cosine(warmup=1)
    assert made.make_optimizer.keywords == {"betas": [0.5, 0.9]}
    assert made.learning_rate == 1e-3
    other = rl.PolicyModule.load_from_checkpoint("a.ckpt", map_location="cpu", learning_rate=5e-4)
    assert other.learning_rate == 5e-4


def test_atomic_checkpoints_of_another_module_are_written_gone_on_from_and_loaded_again(tmp_path):
    """As docs/checkpoints.md says of a Trainer of one's own."""
    saves = pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    settings = dict(enable_checkpointing=True, plugins=[rl.AtomicCheckpointIO()])
    one, other = foreign_modules.Regression(), foreign_modules.Regression()
    foreign_modules.fit(one, saves, max_steps=2, **settings)
    path = str(tmp_path / "step=2.ckpt")
    foreign_modules.fit(other, ckpt_path=path, max_steps=2, plugins=[rl.AtomicCheckpointIO()])
    assert equal(one, other)
    again = foreign_modules.fit(other, ckpt_path=path, max_steps=4, plugins=[rl.AtomicCheckpointIO()])
    assert again.global_step == 4
    assert not equal(one, other)
    with pytest.raises(ValueError, match=r"ckpt_path='.*step=2.ckpt' is not a checkpoint of a PolicyModule"):
        rl.fit(MODEL, ROWS, rl.share_correct, max_steps=3, ckpt_path=path, logger=False, **SMALL, **CPU)
    data = rl.RolloutDataModule(prompts=ROWS, reward=rl.share_correct, **SMALL)
    trainer = pl.Trainer(max_steps=3, logger=False, callbacks=[rl.WeightSync()], **CPU)
    with pytest.raises(ValueError, match=r"ckpt_path='.*step=2.ckpt' is not a checkpoint of a PolicyModule"):
        trainer.fit(rl.PolicyModule(MODEL), data, ckpt_path=path)


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_spawn_find_unused_parameters_true"])
def test_processes_that_are_started_with_pickles_are_refused(strategy):
    two = dict(accelerator="cpu", devices=2, max_steps=1, strategy=strategy, logger=False)
    with pytest.raises(ValueError, match=r"trainer\.strategy=ddp_spawn .* which hold locks: use ddp, or ddp_notebook"):
        rl.Trainer(**two)
    with pytest.raises(TypeError, match=r"RolloutDataModule cannot be pickled.* trainer\.strategy=ddp_spawn"):
        pickle.dumps(rl.RolloutDataModule(prompts=ROWS, reward=rl.share_correct, **SMALL))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [rl.Trainer, pl.Trainer])
def test_a_notebook_gets_the_weights_that_its_processes_have_trained(kind, process, tmp_path):
    """In a process that has started no thread, as those of other tests do not survive a fork."""
    program = f"""
import lightning.pytorch as pl, torch, lit_async_rl as rl
own = {kind is rl.Trainer}
rows = [{{"prompt": str(n) + "=", "answer": str(n)}} for n in range(10, 30)]
small = dict(groups_per_step=2, group_size=4, sampling=rl.SamplingParams(max_tokens=4))
data = rl.RolloutDataModule(prompts=rows, reward=lambda prompt, text: float(len(text) % 2), **small)
module = rl.PolicyModule(rl.asset("small_sort_policy"), learning_rate=1e-2, weight_decay=0.5)
before = [one.detach().clone() for one in module.parameters()]
rest = {{}} if own else dict(callbacks=[rl.WeightSync()], plugins=[rl.AtomicCheckpointIO()])
two = dict(accelerator="cpu", devices=2, max_steps=2, strategy="ddp_notebook", logger=False)
(rl.Trainer if own else pl.Trainer)(**two, **rest).fit(module, data)
print("changed", any(not torch.equal(a, b) for a, b in zip(before, module.parameters())))
"""
    ended = process.run([], tmp_path, code=program, limit_s=150.0)
    assert "changed True" in ended.said, ended.said[-2000:]


class Changing(pl.Callback):
    """Changes the weights after the last validation of a fit, or does not."""

    def __init__(self, changes):
        self.changes = changes
        self.num_validations = 0

    def on_validation_end(self, *_):
        self.num_validations += 1

    def on_train_end(self, trainer, module):
        if self.changes:
            with torch.no_grad():
                next(module.parameters()).add_(1e-3)


@pytest.mark.parametrize(("interval", "changes", "number"), [(2, False, 3), (3, False, 3), (2, True, 4)])
def test_the_end_of_a_run_is_validated_once(interval, changes, number):
    """Before training, at each interval, and at the end unless that was the last interval."""
    seen = Changing(changes)
    held_out = dict(validation=rl.Validation(prompts=ROWS[:2]), val_check_interval=interval, callbacks=[seen])
    trainer = rl.fit(MODEL, ROWS, rl.share_correct, max_steps=4, logger=False, **held_out, **SMALL, **CPU)
    assert seen.num_validations == number
    summary = next(one for one in trainer.callbacks if isinstance(one, rl.RunSummary))
    assert "held-out accuracy before, after" in summary.table(trainer).columns[0].cells
    assert "val/pass@1" in trainer.callback_metrics


def test_a_reward_that_changes_the_working_folder_moves_no_file_of_the_run(tmp_path, monkeypatch, caplog):
    other = tmp_path / "other"
    other.mkdir()
    model = shutil.copytree(MODEL, tmp_path / "model")
    here = os.getcwd()

    def reward(prompt, completion):
        os.chdir(tempfile.mkdtemp(dir=other))
        return float(len(completion) % 2)

    settings = dict(
        callbacks=[rl.RolloutTape("tape"), rl.LinkedCheckpoint(every_n_train_steps=1, save_last="link")],
        defaults={"samples": rl.SampleLogger(every_n_steps=1)},
        validation=rl.Validation(prompts=ROWS[:2]),
        val_check_interval=2,
        lora=rl.LoRA(rank=2),  # whose validation loads the model anew
    )
    rl.fit(os.path.relpath(model), ROWS, reward, max_steps=3, **settings, **SMALL, **CPU)
    assert os.getcwd() == here
    assert "a reward, environment or callback changed the working directory" in caplog.text
    assert not [path for path in other.rglob("*") if path.is_file()]
    run = Path("runs/version_0")
    for name in ("metrics.csv", "samples.jsonl", "held_out.jsonl", "config.yaml", "checkpoints/last.ckpt"):
        assert (run / name).is_file(), name
    assert len(list(Path("tape").glob("steps-*.arrow"))) == 3
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["epoch=0-step=3.ckpt", "last.ckpt"]


def test_a_checkpoint_that_cannot_be_loaded_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"ckpt_path='no.ckpt': there is no such checkpoint"):
        rl.PolicyModule.load_from_checkpoint("no.ckpt")
    for path in ("os.system", "torch.load", "lit_async_rl.no.Such", "torch.optim.nothing"):
        with pytest.raises(
            ValueError, match=r"loss='.*' is not a class of this package or of torch.optim: give loss itself"
        ):
            as_objects({"loss": {"class_path": path, "init_args": {"command": "true"}}})
    held, named = as_config({"x": {"loss": rl.PPOClip(), "model": MODEL}})
    assert as_objects(held["x"]) == {"loss": rl.PPOClip(), "model": MODEL}
    assert named == {}


def test_test_and_predict(tmp_path):
    module = rl.PolicyModule(MODEL)
    held_out = rl.Validation(prompts=ROWS[:6], batch_size=4, num_samples=2)
    data = rl.RolloutDataModule(prompts=ROWS, reward=rl.share_correct, validation=held_out, **SMALL)
    trainer = rl.Trainer(max_steps=1, logger=False, enable_checkpointing=False, **CPU)
    (tested,) = trainer.test(module, data, verbose=False)
    (validated,) = trainer.validate(module, data, verbose=False)
    assert tested == {name.replace("val/", "test/"): value for name, value in validated.items()}
    assert set(tested) == {"test/reward", "test/pass@1", "test/pass@2", "test/cut_share"}
    samples = iter(module.validator.samples)
    predicted = [one for batch in trainer.predict(module, data) for one in batch]
    assert [one.prompt.text for one in predicted] == [row["prompt"] for row in ROWS[:6]]
    for one in predicted:
        assert one.completions == (next(samples).completion, next(samples).completion)
    alone = rl.RolloutDataModule(prompts=["12=", "21="], reward=rl.exact_match, **SMALL)
    (batch,) = trainer.predict(module, alone)
    assert [(one.prompt.text, len(one.completions)) for one in batch] == [("12=", 1), ("21=", 1)]
    with pytest.raises(ValueError, match=r"data.validation.prompts is not set: there is nothing to test on"):
        trainer.test(module, alone, verbose=False)


@pytest.mark.parametrize("method", ["lr_find", "scale_batch_size"])
def test_the_tuner_is_refused_by_name(method):
    module = rl.PolicyModule(MODEL)
    module.batch_size = 2
    data = rl.RolloutDataModule(prompts=ROWS, reward=rl.share_correct, **SMALL)
    trainer = rl.Trainer(max_steps=1, logger=False, enable_checkpointing=False, **CPU)
    with pytest.raises(ValueError, match=rf"Tuner.{method} is not for this module: .* (Set|raise) (model|data)\."):
        getattr(Tuner(trainer), method)(module, datamodule=data)


@pytest.mark.slow
def test_the_configuration_of_a_python_run_gives_the_same_weights_from_the_command_line(tmp_path):
    (tmp_path / "sums.jsonl").write_text("".join(f'{{"prompt": "{n}=", "answer": "{n}"}}\n' for n in range(10, 30)))
    torch.manual_seed(0)
    trainer = rl.fit(
        *(MODEL, "sums.jsonl", rl.share_correct),
        max_steps=3,
        max_staleness=0,
        learning_rate=1e-3,
        sampling={"max_tokens": 4},
        validation={"num_samples": 1},
        **dict(groups_per_step=2, group_size=2),
        **CPU,
    )
    config = trainer.log_dir + "/config.yaml"
    assert yaml.safe_load(Path(config).read_text())["data"]["prompts"] == "sums.jsonl"
    main(["--config", config, "--trainer.logger.save_dir", str(tmp_path / "again")])
    (again,) = (tmp_path / "again").rglob("last.ckpt")
    (first,) = (path for path in tmp_path.rglob("last.ckpt") if "again" not in str(path))
    states = [torch.load(path, weights_only=True)["state_dict"] for path in (first, again)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    start = rl.PolicyModule(MODEL).state_dict()
    assert not all(torch.equal(states[0][name], start[name]) for name in states[0]), "the run has changed nothing"
