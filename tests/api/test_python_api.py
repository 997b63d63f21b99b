"""`rl.Trainer` and `rl.fit`: own prompts, rewards, loggers and callbacks; what is stated once is linked."""

import asyncio
import csv
import random
from pathlib import Path

import datasets
import lightning.pytorch as pl
import pytest
import torch
import wandb
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger

import lit_async_rl as rl
from lit_async_rl.errors import ProducerError
from lit_async_rl.report.html import write_report
from lit_async_rl.training.trackers import keeps_files

MODEL = rl.asset("sort_policy")
DIGITS = ["".join(random.Random(n).choices("0123456789", k=4)) for n in range(40)]
ROWS = [{"prompt": f"{d}=", "answer": "".join(sorted(d)), "level": "easy"} for d in DIGITS]
SMALL = dict(groups_per_step=2, group_size=2, sampling=rl.SamplingParams(max_tokens=6))
CPU = dict(accelerator="cpu", devices=1, enable_progress_bar=False)
CLASSES = "WeightSync RolloutMonitor StalenessMonitor ImportanceMonitor ThroughputMonitor GradientMonitor SampleLogger"
CLASSES += " EngineCheck LiveView BottleneckVerdict RunSummary SkipNonFinite LinkedCheckpoint SaveOnFailure"
CLASSES += " SaveOnSigterm RewardHackingMonitor"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def reward(prompt, completion):
    assert prompt.metadata == {"level": "easy"}
    return float(completion == prompt.answer)


async def async_reward(prompt, completion):
    return reward(prompt, completion)


class Own(pl.Callback):
    def __init__(self):
        self.steps, self.accumulate = [], None

    def on_train_batch_end(self, trainer, *_):
        self.steps.append(trainer.global_step)
        self.accumulate = trainer.accumulate_grad_batches


def kinds(trainer):
    return {type(callback).__name__ for callback in trainer.callbacks}


@pytest.mark.slow
def test_every_option_at_once_with_one_statement_of_each(tmp_path, capsys):
    own, chat = Own(), rl.Validation(prompts=ROWS[:4], batch_size=4)
    trainer = rl.fit(
        *(MODEL, ROWS, async_reward),
        max_steps=6,
        learning_rate=1e-3,
        packing=rl.SharedPromptPacking(),
        micro_batches_per_step=2,
        weight_sync_steps=3,
        validation=chat,
        logger=TensorBoardLogger(tmp_path / "tb", name="mine"),
        callbacks=own,
        **SMALL,
        **CPU,
    )
    module, data = trainer.lightning_module, trainer.datamodule
    assert (trainer.global_step, module.version, data.model) == (6, 2, MODEL)
    assert own.steps == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6]
    assert own.accumulate == 2
    assert data.shares_prefixes
    folder = tmp_path / "tb" / "mine" / "version_0"
    assert list(folder.rglob("last.ckpt"))
    assert list(folder.glob("events.out*"))
    assert list(folder.rglob("metrics.csv"))
    assert "held-out accuracy" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [list, datasets.Dataset.from_list], ids=["list", "Dataset"])
def test_a_trainer_takes_module_and_data_by_position(kind):
    trainer = rl.Trainer(max_steps=2, **CPU)
    module = rl.PolicyModule(MODEL, learning_rate=1e-3)
    trainer.fit(module, rl.RolloutDataModule(prompts=kind(ROWS), reward=reward, **SMALL))
    assert module.version == 2
    with open("runs/version_0/metrics.csv") as file:
        assert {"reward/mean", "sample/staleness_mean", "importance/ess_ratio"} <= set(csv.DictReader(file).fieldnames)


def test_texts_train_with_a_plain_trainer_of_lightning():
    data = rl.RolloutDataModule(
        prompts=[row["prompt"] for row in ROWS], reward=lambda _, text: len(text), micro_batches_per_step=2, **SMALL
    )
    trainer = pl.Trainer(max_steps=2, callbacks=[rl.WeightSync()], logger=False, enable_checkpointing=False, **CPU)
    module = rl.PolicyModule(MODEL, learning_rate=1e-3)
    trainer.fit(module, data)
    assert (module.version, trainer.accumulate_grad_batches) == (2, 2)


def test_an_async_reward_that_hangs_ends_the_run_by_name():
    async def hanging(prompt, completion):
        await asyncio.Event().wait()

    with pytest.raises(ProducerError, match=r"did not return within data.scoring.timeout_s=0.5"):
        rl.fit(MODEL, ROWS, hanging, max_steps=1, scoring=rl.Scoring(timeout_s=0.5), logger=False, **SMALL, **CPU)


# -- default callbacks ------------------------------------------------------------------------------------------------


def test_the_defaults_are_there():
    trainer = rl.Trainer(max_steps=1, accelerator="cpu")
    assert set(CLASSES.split()) <= kinds(trainer)
    assert isinstance(trainer.logger, rl.CSVLog)
    assert isinstance(trainer.strategy.checkpoint_io, rl.AtomicCheckpointIO)
    assert (trainer.log_every_n_steps, trainer.num_sanity_val_steps) == (1, 0)


def test_own_callbacks_of_the_same_class_take_the_place_of_defaults():
    own = [rl.SampleLogger(every_n_steps=3), ModelCheckpoint(dirpath="here"), RichProgressBar()]
    trainer = rl.Trainer(accelerator="cpu", callbacks=own, max_steps=1)
    for callback in own[:2]:
        assert [c for c in trainer.callbacks if type(c) is type(callback)] == [callback]
    assert "LiveView" not in kinds(trainer)


def test_a_default_is_switched_off_or_changed_by_name():
    samples = rl.SampleLogger(every_n_steps=7)
    trainer = rl.Trainer(accelerator="cpu", max_steps=1, defaults={"gradients": None, "samples": samples})
    assert "GradientMonitor" not in kinds(trainer)
    assert [c for c in trainer.callbacks if isinstance(c, rl.SampleLogger)] == [samples]


def test_switches_of_lightning_take_their_defaults_along():
    trainer = rl.Trainer(accelerator="cpu", max_steps=1, enable_progress_bar=False, enable_checkpointing=False)
    assert not {"Progress", "LinkedCheckpoint", "SaveOnFailure", "SaveOnSigterm"} & kinds(trainer)


def test_a_validation_interval_in_steps_goes_on_over_epochs():
    assert rl.Trainer(accelerator="cpu", max_steps=1, val_check_interval=25).check_val_every_n_epoch is None


def test_a_csv_log_is_written_beside_another_logger(tmp_path):
    loggers = rl.Trainer(accelerator="cpu", max_steps=1, logger=TensorBoardLogger(tmp_path)).loggers
    assert [type(one) for one in loggers] == [TensorBoardLogger, rl.CSVLog]
    assert len(rl.Trainer(accelerator="cpu", max_steps=1, logger=CSVLogger(tmp_path)).loggers) == 1
    assert rl.Trainer(accelerator="cpu", max_steps=1, logger=False).loggers == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "folder"),
    [
        (lambda: WandbLogger(project="mine", save_dir=Path.cwd()), "runs/version_0"),
        (lambda: TensorBoardLogger("tb", name="mine", sub_dir="board"), "tb/mine/version_0/board"),
        (lambda: [TensorBoardLogger("tb"), rl.CSVLog("mine")], "mine/lightning_logs/version_0"),
    ],
    ids=["wandb", "tensorboard", "own csv log"],
)
def test_with_any_logger_metrics_and_samples_lie_in_one_folder_and_the_report_has_curves(make, folder, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    trainer = rl.fit(MODEL, ROWS, reward, max_steps=2, logger=make(), **SMALL, **CPU)
    wandb.finish()
    assert list(Path().rglob("metrics.csv")) == [Path(folder, "metrics.csv")]
    assert list(Path().rglob("samples.jsonl")) == [Path(folder, "samples.jsonl")]
    report = Path(folder, "report.html")
    assert report.exists() == any(keeps_files(logger) for logger in trainer.loggers), "uploaded with its run"
    page = write_report(Path(folder), out=report).read_text()
    assert '"series":{}' not in page
    assert '"reward/mean":' in page


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "folder"),
    [
        (lambda: None, "runs/version_0"),
        (lambda: WandbLogger(project="mine", save_dir=Path.cwd()), "runs/version_0"),
        (lambda: TensorBoardLogger("tb"), "tb/lightning_logs/version_0"),
    ],
    ids=["csv", "wandb", "tensorboard"],
)
def test_a_resumed_fit_goes_on_in_its_folder(make, folder, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    last = Path(folder, "checkpoints", "last.ckpt")
    for steps, checkpoint in ((2, None), (4, str(last))):
        trainer = rl.fit(MODEL, ROWS, reward, max_steps=steps, ckpt_path=checkpoint, logger=make(), **SMALL, **CPU)
        wandb.finish()
    assert list(Path().rglob("version_*")) == [Path(folder)]
    with Path(folder, "metrics.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file) if row["reward/mean"]] == ["0", "1", "2", "3"]
    assert torch.load(last, weights_only=True)["global_step"] == 4, "and not last-v1.ckpt"
    # W&B adds `-1` to the second folder of a run within the same second
    ids = {path.name.split("-")[3] for path in Path("wandb").glob("offline-run-*")}
    assert len(ids) == any(keeps_files(logger) for logger in trainer.loggers), "one run of W&B"


# -- mistakes ---------------------------------------------------------------------------------------------------------


def data(**changes):
    return rl.RolloutDataModule(**(dict(prompts=ROWS, reward=reward, **SMALL) | changes))


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        (
            dict(model=rl.asset("small_sort_policy")),
            {},
            r"data.model=.*small_sort.* but model.model=.*sort_policy",
        ),
        (dict(micro_batches_per_step=2), dict(accumulate_grad_batches=3), "accumulate_grad_batches=3, but .*step=2"),
    ],
)
def test_a_mismatch_is_refused_by_name(changes, settings, message):
    with pytest.raises(ValueError, match=message):
        rl.Trainer(max_steps=1, logger=False, **settings, **CPU).fit(rl.PolicyModule(MODEL), data(**changes))


def test_without_weight_sync_the_model_is_missing_by_name():
    trainer = pl.Trainer(max_steps=1, logger=False, enable_checkpointing=False, **CPU)
    with pytest.raises(Exception, match="WeightSync"):
        trainer.fit(rl.PolicyModule(MODEL), data())
