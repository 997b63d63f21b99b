"""Hyperparameter search: the examples for Optuna and for sweeps of Weights & Biases work as they are documented."""

import runpy
from pathlib import Path

import pytest
import yaml

from lit_async_rl.cli.app import main as train

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_search_with_optuna_tries_rates_and_keeps_the_best(monkeypatch, tmp_path):
    optuna = pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    study = runpy.run_path(str(ROOT / "examples" / "optuna_search.py"))["search"](trials=3, steps=6)
    states = [trial.state for trial in study.trials]
    assert len({trial.params["learning_rate"] for trial in study.trials}) == 3
    assert states.count(optuna.trial.TrialState.COMPLETE) >= 2
    assert set(states) <= {optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED}
    assert study.best_value == max(trial.value for trial in study.trials if trial.value is not None)
    for trial in study.trials:
        assert sorted(trial.intermediate_values) == [2, 4, 6][: len(trial.intermediate_values)]


@pytest.mark.slow
def test_the_command_that_a_sweep_of_wandb_makes_is_a_run_with_its_values(monkeypatch, capsys):
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    monkeypatch.chdir(ROOT)
    sweep = yaml.safe_load((ROOT / "configs/sweeps/wandb.yaml").read_text())
    values = {"model.learning_rate": {"value": 2.5e-4}, "data.max_staleness": {"value": 16}}
    assert values.keys() == sweep["parameters"].keys()
    made = utils.create_sweep_command_args({"args": values})["args"]
    words = [word for part in sweep["command"] for word in (made if part == "${args}" else [part])]
    assert words[:3] == ["${env}", "${interpreter}", "${program}"]
    with pytest.raises(SystemExit) as end:
        train([*words[3:], "--print_config"])
    assert not end.value.code
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["model"]["learning_rate"] == 2.5e-4
    assert config["data"]["max_staleness"] == 16
    assert config["trainer"]["max_steps"] == 100
