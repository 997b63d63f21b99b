"""Default callbacks from the command line: each stands in the saved configuration, and has a key."""

import shutil
from pathlib import Path

import pytest
import yaml

import lit_async_rl as rl
from lit_async_rl.api.trainer import CONFIGS, defaults_file
from lit_async_rl.cli.app import AsyncRLCLI, main

ROOT = Path(__file__).parents[2]
BASE = ["--config", "configs/quickstart.yaml", "--data.validation.prompts", "null"]
ALL_KEYS = list(defaults_file()["defaults"])
KEYS = [
    key for key in ALL_KEYS if defaults_file()["defaults"][key]
]  # the others are off unless a configuration says so


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def kinds(*flags):
    return [type(c).__name__ for c in AsyncRLCLI([*BASE, *flags]).trainer.callbacks]


def class_name(key):
    return defaults_file()["defaults"][key]["class_path"].rpartition(".")[2]


def test_the_file_is_the_one_in_configs():
    assert (CONFIGS / "defaults.yaml").samefile(ROOT / "configs/defaults.yaml")


@pytest.mark.slow
def test_they_stand_in_the_saved_configuration_which_trains_again(tmp_path):
    tiny = ["--data.groups_per_step", "2", "--data.group_size", "2", "--trainer.max_steps", "1"]
    tiny += ["--trainer.logger.init_args.save_dir", str(tmp_path), "--trainer.enable_progress_bar", "false"]
    flags = ["--defaults.gradients", "null", "--defaults.samples.init_args.every_n_steps", "10"]
    main([*BASE, *tiny, "--trainer.val_check_interval", "null", *flags])
    saved = tmp_path / "quickstart/version_0/config.yaml"
    chosen = yaml.safe_load(saved.read_text())["defaults"]
    assert list(chosen) == ALL_KEYS
    assert chosen["gradients"] is None
    assert {"every_n_steps": 10, "num_groups": 2}.items() <= chosen["samples"]["init_args"].items()
    assert chosen["checkpoint"]["init_args"]["save_top_k"] == -1
    again = AsyncRLCLI(["--config", str(shutil.copy(saved, tmp_path / "again.yaml"))])
    assert "GradientMonitor" not in [type(c).__name__ for c in again.trainer.callbacks]


@pytest.mark.slow
def test_each_is_switched_off_by_its_key():
    assert {class_name(key) for key in KEYS} <= set(kinds())
    off = kinds(*(word for key in KEYS if key != "weight_sync" for word in (f"--defaults.{key}", "null")))
    assert "WeightSync" in off
    assert not {class_name(key) for key in KEYS if key != "weight_sync"} & (set(off) - {"ModelCheckpoint"})


@pytest.mark.slow
def test_what_is_off_by_default_is_switched_on_by_its_key_and_only_once():
    off = ["--defaults.ess_learning_rate", "null"]
    assert "ESSLearningRate" not in kinds(*off)
    assert kinds(*off, "--defaults.ess_learning_rate", "ESSLearningRate").count("ESSLearningRate") == 1
    assert kinds("--config", "configs/stabilizers/ess_learning_rate.yaml").count("ESSLearningRate") == 1


@pytest.mark.parametrize("flag", ["--trainer.callbacks", "--trainer.callbacks+"])
def test_own_callbacks_never_drop_them(flag):
    found = kinds(flag, "LengthBiasMonitor")
    assert {"LengthBiasMonitor", *map(class_name, KEYS)} <= set(found)


def test_an_own_callback_of_the_same_class_takes_the_place():
    found = kinds("--trainer.callbacks+=SampleLogger", "--trainer.callbacks.every_n_steps", "3")
    assert found.count("SampleLogger") == 1


def test_a_misspelt_key_is_refused(capsys):
    with pytest.raises(SystemExit):
        AsyncRLCLI([*BASE, "--defaults.gradient", "null"])
    assert "no setting defaults.gradient; did you mean defaults.gradients?" in capsys.readouterr().err


@pytest.mark.slow
def test_gradients_are_read_before_they_are_clipped():
    fsdp = [
        "--config",
        "configs/strategies/fsdp1.yaml",
        "--trainer.accelerator",
        "cpu",
        "--trainer.precision",
        "32-true",
    ]
    alarm = ["--config", "configs/stabilizers/gradient_alignment_control.yaml"]
    alarm += ["--config", "configs/stabilizers/collapse_alarm.yaml"]
    order = [name for name in kinds(*fsdp, *alarm) if "Grad" in name or name == "CollapseAlarm"]
    assert order == ["GradientAlignmentControl", "CollapseAlarm", "GradientMonitor", "GradientClipping"]


VCPO, ESS = "configs/stabilizers/vcpo.yaml", "configs/stabilizers/ess_learning_rate.yaml"


@pytest.mark.parametrize(
    "flags",
    [
        ["--config", VCPO, "--config", ESS],
        ["--config", ESS, "--trainer.callbacks+=ESSLearningRate"],
        ["--trainer.callbacks+=ESSLearningRate", "--trainer.callbacks+", "lit_async_rl.ESSLearningRate"],
    ],
)
def test_two_overlays_that_add_one_callback_are_refused(flags):
    with pytest.raises(ValueError, match=r"trainer\.callbacks has ESSLearningRate twice, but a checkpoint"):
        kinds(*flags)


def test_python_refuses_a_callback_with_state_that_is_there_twice():
    def make(*norms):
        clipping = [rl.GradientClipping(norm, optimizer=number) for number, norm in enumerate(norms)]
        return rl.Trainer(max_steps=1, accelerator="cpu", logger=False, callbacks=clipping)

    assert len([c for c in make(1.0, 2.0).callbacks if isinstance(c, rl.GradientClipping)]) == 2  # of two optimizers
    with pytest.raises(ValueError, match=r"trainer\.callbacks has SkipNonFinite twice"):
        rl.Trainer(accelerator="cpu", logger=False, callbacks=[rl.SkipNonFinite(), rl.SkipNonFinite()])
