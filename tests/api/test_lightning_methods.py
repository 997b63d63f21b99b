"""Methods of Lightning beside `fit`: `load_from_checkpoint`, `test`, `predict`, and the `Tuner`, which is refused."""

from __future__ import annotations

import functools
from pathlib import Path

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


def test_a_checkpoint_that_cannot_be_loaded_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"ckpt_path='no.ckpt': there is no such checkpoint"):
        rl.PolicyModule.load_from_checkpoint("no.ckpt")
    for path in ("os.system", "torch.load", "lit_async_rl.no.Such", "torch.optim.nothing"):
        with pytest.raises(
            ValueError, match=r"loss='.*' is no class of this package or of torch.optim: give loss itself"
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
    assert set(tested) == {"test/reward", "test/pass@1", "test/pass@2"}
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
