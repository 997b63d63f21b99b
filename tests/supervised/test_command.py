"""The command and the function: one run, its configuration, its resume; and every callback beside fine-tuning."""

from __future__ import annotations

import csv
import logging
import warnings
from pathlib import Path

import pytest
import yaml
from battery import discovered, make
from flow import MODEL, parameters
from safetensors import safe_open
from tuning import fit, make_data, make_module

import lit_async_rl as rl
from lit_async_rl.cli import console
from lit_async_rl.supervised.command import SFTCLI
from lit_async_rl.supervised.module import SFTModule
from lit_async_rl.tasks import SortDigits

ROOT = Path(__file__).parents[2]
IDLE = {"CollapseAlarm", "ESSLearningRate", "EstimatorBlend", "WeightDriftMonitor"}  # say that they get no signals
GOES = {  # callbacks that need gradients, weights or checkpoints only; all others say that they need rollouts
    *("GradientAlignmentControl", "GradientClipping", "GradientMonitor", "LinkedCheckpoint", "LiveView", "Progress"),
    *("RunSummary", "SaveOnFailure", "SaveOnSigterm", "SkipNonFinite"),
}


@pytest.mark.parametrize("name", sorted(discovered()))
def test_a_callback_works_beside_fine_tuning_or_says_what_it_needs(name, tmp_path, caplog):
    if name in ("LMEvalValidation", "ReplicaScaling"):
        pytest.skip("needs a library, or Ray")
    settings = dict(callbacks=[make(name, tmp_path)], default_root_dir=tmp_path, enable_checkpointing=True)
    settings["enable_progress_bar"] = name in ("Progress", "LiveView")
    if name in GOES | IDLE:
        with caplog.at_level(logging.WARNING), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            assert fit(make_module(), make_data(), 2, **settings).global_step == 2
        said = caplog.text + "".join(str(one.message) for one in warned)
        assert ("stabilizer_signals" in said) == (name in IDLE)
        return
    with pytest.raises(ValueError, match=name) as error:
        fit(make_module(), make_data(), 2, **settings)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_the_command_trains_says_its_configuration_and_resumes(tmp_path, monkeypatch, capsys):
    """Two epochs of five rows, in steps of two; the same as from Python, and as a run that was resumed."""
    monkeypatch.chdir(tmp_path)
    settings = {
        "seed_everything": 0,
        "model": {"model": MODEL, "learning_rate": 1e-3},
        "data": {
            "records": {"class_path": "SortDigits", "init_args": {"num_digits": 4, "size": 5}},
            "validation_records": {"class_path": "SortDigits", "init_args": {"num_digits": 4, "size": 5, "seed": 1}},
            "epochs": 2,
            "samples_per_step": 2,
        },
        "trainer": {"accelerator": "cpu", "devices": 1},
        "defaults": {"checkpoint": {"init_args": {"every_n_train_steps": 2, "save_top_k": -1}}},
    }
    Path("sft.yaml").write_text(yaml.safe_dump(settings))
    console.main(["sft", "--config", "sft.yaml"])
    said = capsys.readouterr().out
    assert "held-out loss before, after" in said
    assert "train on with: --model.model runs/version_0/model" in said
    with Path("runs/version_0/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows if row["train/loss"]] == ["0", "1", "2", "3", "4"]
    assert rows[0]["val/loss"]
    assert rows[-1]["val/token_accuracy"]
    first = SFTModule.load_from_checkpoint("runs/version_0/checkpoints/last.ckpt")
    saved = next(Path("runs/version_0/checkpoints").glob("*step=2.ckpt"))
    console.main(["sft", "--config", "runs/version_0/config.yaml", "--ckpt_path", str(saved)])
    assert "resumed" in capsys.readouterr().out
    again = SFTModule.load_from_checkpoint("runs/version_0/checkpoints/last.ckpt")
    assert parameters(again).equal(parameters(first))
    of_run = ["--config", "runs/version_0/config.yaml", "--ckpt_path", "runs/version_0/checkpoints/last.ckpt"]
    console.main(["evaluate", *of_run])
    said = capsys.readouterr().out
    assert f"val/loss           {float(rows[-1]['val/loss']):.4f}" in said
    assert "samples" not in said, "no held-out prompts are set"
    console.main(["export", *of_run, "--out", "exported"])
    with safe_open("exported/model.safetensors", "pt") as file:
        weight = file.get_tensor("model.norm.weight")
    assert weight.equal(first.policy.causal_lm.model.norm.weight)
    card = Path("exported/README.md").read_text()
    assert "| version (number of weight updates) | 5 |" in card
    assert f"| held-out loss, first and last | {float(rows[0]['val/loss']):.3f}, " in card
    assert "reinforcement" not in card
    python = rl.sft(
        MODEL,
        SortDigits(4, size=5),
        learning_rate=1e-3,
        epochs=2,
        samples_per_step=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    assert parameters(python.lightning_module).equal(parameters(first))


@pytest.mark.slow
def test_the_shipped_configurations_are_of_this_command(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    flags = ["--data.records.init_args.prompts.init_args.size", "4", "--data.samples_per_step", "2"]
    flags += ["--data.validation.prompts.init_args.size", "4", "--data.validation_records.init_args.size", "4"]
    console.main(
        ["sft", "--config", "configs/warm_start.yaml", *flags, "--trainer.logger.init_args.save_dir", str(tmp_path)]
    )
    assert (tmp_path / "warm_start" / "version_0" / "model" / "config.json").is_file()
    monkeypatch.setattr(SFTCLI, "instantiate_classes", lambda self: None)  # SmolLM2 is not at hand
    assert SFTCLI(["--config", "configs/smollm2_sft.yaml"]).config.data.epochs == 2


def test_wrong_arguments_of_the_function_are_named():
    records = [{"prompt": "21=", "completion": "12"}]
    with pytest.raises(TypeError, match="sft has no setting 'epoch'; did you mean epochs"):
        rl.sft(MODEL, records, epoch=2)
    with pytest.raises(TypeError, match="sft has no setting 'group_size'"):
        rl.sft(MODEL, records, group_size=2)
    with pytest.raises(ValueError, match=r"records\[0\]: a record must have messages"):
        rl.sft(MODEL, [{"prompt": "21="}])
    with pytest.raises(ValueError, match=r"records\[0\]: a record must have .*, got the keys none$"):
        rl.sft(MODEL, [{"messages": None}])
    with pytest.raises(ValueError, match=r"^weights\[1\] must be positive, got nan"):
        rl.sft(MODEL, [SortDigits(2), SortDigits(3)], weights=[1, float("nan")])
    with pytest.raises(ValueError, match=r"^samples_per_step must be positive, got 0"):
        rl.sft(MODEL, records, samples_per_step=0)
    with pytest.raises(FileNotFoundError, match=r"records: path='no\.jsonl' is not a file"):
        rl.sft(MODEL, "no.jsonl")


def test_a_name_that_is_no_file_and_no_dataset_says_what_it_may_be():
    with pytest.raises(ValueError, match=r"'answers.txt' must be the name of a file \(.jsonl"):
        make_data(records="answers.txt")
