"""`rl.fit` corrects stale data by the parts of the shipped overlay unless told otherwise."""

from pathlib import Path

import pytest

import lit_async_rl as rl
from lit_async_rl.api.run import RECIPE_SETTINGS
from lit_async_rl.api.trainer import build
from lit_async_rl.baselines.optimal import Norms
from lit_async_rl.utils.config_files import load_config

ROOT = Path(__file__).parents[2]
ROWS = [{"prompt": f"{n}=", "answer": str(n)} for n in range(10, 30)]
SMALL = dict(groups_per_step=2, group_size=2, sampling=rl.SamplingParams(max_tokens=4), logger=False)
CPU = dict(accelerator="cpu", devices=1, enable_progress_bar=False, enable_checkpointing=False)


def reward(prompt, completion):
    return float(len(completion) % 2)


def parts(**settings):
    """What `fit` chose: the six parts by name, and the callbacks' classes."""
    trainer = rl.fit(rl.asset("small_sort_policy"), ROWS, reward, max_steps=2, **{**SMALL, **CPU, **settings})
    objective, data = trainer.lightning_module.objective, trainer.datamodule
    owners = [objective, objective, objective, objective, data, data]
    found = {part: getattr(owner, part) for part, owner in zip(RECIPE_SETTINGS, owners, strict=True)}
    return found, {type(callback).__name__: callback for callback in trainer.callbacks}


@pytest.mark.parametrize("settings", [{}, {"max_staleness": 2, "micro_batches_per_step": 2}], ids=["default", "micro"])
def test_the_recipe_is_the_shipped_overlay(settings):
    overlay = load_config(ROOT / "configs/stabilizers/vcpo_score.yaml")
    found, callbacks = parts(**settings)
    specs = {**overlay["model"], **overlay["data"]}
    assert specs.pop("baseline")["init_args"] == {"norms": "SCORE"}
    assert found["baseline"] == rl.OptimalBaseline(norms=Norms.SCORE)
    assert set(specs) == {"loss", "proximal", "correction", "aggregation"}
    for name, spec in specs.items():
        expected = build(spec)
        assert type(found[name]) is type(expected)
        assert vars(found[name]) == vars(expected)
    power = overlay["defaults"]["ess_learning_rate"]["init_args"]["power"]
    assert vars(callbacks["ESSLearningRate"])["power"] == power == 0.5


@pytest.mark.parametrize(
    "settings",
    [{"recipe": None}, {"max_staleness": 0}, {"loss": rl.PPOClip()}, {"aggregation": rl.TokenMean()}],
    ids=["None", "synchronous", "own loss", "own aggregation"],
)
def test_plain_grpo_where_it_is_asked_for_or_data_is_fresh(settings):
    found, callbacks = parts(**settings)
    kinds = [type(found[name]).__name__ for name in RECIPE_SETTINGS]
    assert kinds == ["PPOClip", "BehaviorProximal", "NoneType", "NoneType", "GroupMeanStd", "TokenMean"]
    assert "ESSLearningRate" not in callbacks


def test_an_own_callback_or_default_stays():
    own = rl.ESSLearningRate(power=1.0)
    assert parts(callbacks=own)[1]["ESSLearningRate"] is own
    assert "ESSLearningRate" not in parts(defaults={"ess_learning_rate": None})[1]


def test_an_unknown_recipe_is_refused_by_name():
    with pytest.raises(ValueError, match=r"recipe must be 'vcpo' or None .*got 'grpo'"):
        rl.fit(rl.asset("small_sort_policy"), ROWS, reward, max_steps=1, recipe="grpo", **SMALL, **CPU)
