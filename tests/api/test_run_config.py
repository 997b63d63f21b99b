"""A run of `fit` writes its settings: what YAML can hold is repeated by the command line, all else is named."""

from __future__ import annotations

import csv
import pkgutil
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jsonargparse
import pytest
import yaml
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import Logger

import lit_async_rl as rl
from lit_async_rl.api.run_config import SaveSettings, as_config, comparable
from lit_async_rl.cli.app import main

REWARD = "def judge(prompt, completion):\n    return float(len(completion) % 2)\n"
NOT_OF_THE_POLICY = ("perf/", "rollout/wait", "engine/idle", "intake/")


class Notes(Logger):
    """Keeps the hyperparameters that it gets."""

    name = version = "notes"

    def __init__(self) -> None:
        super().__init__()
        self.parameters: list = []

    def log_metrics(self, *args, **kwargs) -> None: ...

    def log_hyperparams(self, params, *args, **kwargs) -> None:
        self.parameters.append(params)


def settings(folder: Path, **changes):
    few = dict(groups_per_step=2, group_size=4, micro_batches_per_step=2, max_staleness=1, learning_rate=1e-3)
    engine = rl.EmbeddedEngine(num_slots=8, in_flight_weight_updates=False)
    few |= dict(engine=engine, admission=rl.FixedLag(), sampling=rl.SamplingParams(max_tokens=6, temperature=1.2))
    held_out = rl.Validation(prompts=rl.SortDigits(4, size=4, split="held_out"))
    few |= dict(validation=held_out, accelerator="cpu", devices=1, enable_progress_bar=False)
    return few | dict(logger=rl.CSVLog(folder, name="", version=0)) | changes


def table(path: Path) -> list[dict[str, str]]:
    """Rows without what depends on the clock."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if v and not k.startswith(NOT_OF_THE_POLICY)} for row in rows]


@pytest.mark.slow
def test_the_command_line_repeats_the_run(tmp_path, monkeypatch, capsys):
    (tmp_path / "judge_of_run_config.py").write_text(REWARD)
    monkeypatch.syspath_prepend(tmp_path)
    from judge_of_run_config import judge

    callbacks = [rl.LengthBiasMonitor(window=7), rl.SkipNonFinite(max_in_a_row=3)]
    changed = {"samples": rl.SampleLogger(every_n_steps=3), "timeline": None}
    given = settings(tmp_path, callbacks=callbacks, defaults=changed)
    rl.fit(rl.asset("small_sort_policy"), rl.SortDigits(4, size=100), judge, max_steps=3, **given)
    file = tmp_path / "version_0/config.yaml"
    written = yaml.safe_load(file.read_text())
    assert "must be given again" not in file.read_text()
    assert written["data"]["reward"] == "judge_of_run_config.judge"
    assert written["model"]["loss"] == {"class_path": "lit_async_rl.losses.reinforce.Reinforce"}, "the recipe's"
    assert written["trainer"]["callbacks"][1]["init_args"] == {"max_in_a_row": 3}
    assert written["defaults"]["timeline"] is None
    main(["--config", str(file), "--trainer.logger.init_args.save_dir", str(tmp_path / "again")])
    (again,) = tmp_path.rglob("again/**/metrics.csv")
    found = table(again)
    assert found == table(tmp_path / "version_0/metrics.csv")
    assert sum("grad/norm" in row for row in found) == 3
    assert sum("val/pass@1" in row for row in found) >= 2


def test_objects_of_python_are_named_in_the_file_and_in_trackers(tmp_path):
    notes = Notes()
    module = rl.PolicyModule(rl.asset("small_sort_policy"), rl.PPOClip(clip_high=0.28), learning_rate=2e-4)
    loggers = [rl.CSVLog(tmp_path, name="", version=0), notes]
    given = settings(tmp_path, logger=loggers, callbacks=EarlyStopping("reward/mean"))
    del given["learning_rate"]
    records = [{"prompt": f"{n}=", "answer": str(n)} for n in range(30)]
    rl.fit(module, records, lambda prompt, completion: 1.0, max_steps=1, **given)
    text = (tmp_path / "version_0/config.yaml").read_text()
    comments = [line for line in text.splitlines() if line.startswith("#   ")]
    assert "#   data.prompts: list of 30 items" in comments
    assert any(line.startswith("#   data.reward: function ") and f"{__file__}, line " in line for line in comments)
    assert any(
        line.startswith("#   trainer.callbacks[0]: lightning.pytorch.callbacks.early_stopping.E") for line in comments
    )
    written = yaml.safe_load(text)
    assert "reward" not in written["data"]
    assert written["model"]["learning_rate"] == 2e-4
    assert written["model"]["loss"]["init_args"] == {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None}
    (parameters,) = notes.parameters
    assert parameters["model"] == written["model"]
    assert parameters["data"]["group_size"] == 4
    assert parameters["data"]["prompts"] == "list of 30 items"


def test_keys_in_dictionaries_are_written_nowhere():
    given = {"data": {"sampling": {"headers": {"Authorization": "Bearer KEY"}, "max_tokens": 3}}}
    held = SaveSettings(given, ckpt_path=None)._settings
    assert held["data"]["sampling"] == {"headers": {"Authorization": "***"}, "max_tokens": 3}


def public_objects():
    for name in rl.NAMES:
        kind = getattr(rl, name)
        if not isinstance(kind, type) or issubclass(kind, BaseException) or kind is rl.Trainer:
            continue
        try:
            yield name, kind()
        except (TypeError, ValueError, ImportError, RuntimeError):  # needs arguments, or a package
            continue


def made_again(value):
    """As the command line makes it."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--made", type=pkgutil.resolve_name(value["class_path"]))
    return parser.instantiate_classes(parser.parse_object({"made": value})).made


@pytest.mark.slow
def test_an_object_that_is_written_is_made_again_the_same():
    found = {name: as_config({"x": {"y": one}})[0].get("x", {}).get("y") for name, one in public_objects()}
    written = {name: value for name, value in found.items() if value is not None}
    assert len(written) > 80
    has_names = {"ESSLearningRate", "EmbeddedEngine", "SkipNonFinite", "GradientClipping", "SampleLogger", "PPOClip"}
    assert has_names <= written.keys()
    for name, value in written.items():
        again = made_again(yaml.safe_load(yaml.safe_dump(value)))
        assert as_config({"x": {"y": again}})[0]["x"]["y"] == value, name
        assert value["class_path"].endswith(f".{name}")


def test_arguments_that_were_given_are_written():
    for one in (rl.SortDigits(5, size=7, tail=None), rl.EmbeddedEngine(num_slots=3, seed=9), rl.LoRA(rank=4)):
        value = as_config({"x": {"y": one}})[0]["x"]["y"]
        assert vars(made_again(value)).get("seed") == vars(one).get("seed")
        assert as_config({"x": {"y": made_again(value)}}) == as_config({"x": {"y": one}})


def test_a_secret_is_not_written():
    engine = partial(SimpleNamespace, url="here", api_key="sk-123")
    held, named = as_config({"data": {"engine": engine}})
    assert held == {}
    assert named == {"data.engine": "partial of class SimpleNamespace of types"}
    assert as_config({"data": {"engine": partial(SimpleNamespace, url="here")}})[1] == {}


def test_a_function_of_the_script_is_named_not_written(monkeypatch):
    def judge(prompt, completion): ...

    main_module = sys.modules["__main__"]
    judge.__module__, judge.__qualname__ = "__main__", "judge"
    monkeypatch.setattr(main_module, "judge", judge, raising=False)
    held, named = as_config({"data": {"reward": judge, "group_size": 3}})
    assert held == {"data": {"group_size": 3}}
    assert named["data.reward"].startswith("function judge of __main__ (")


@pytest.mark.parametrize(
    "change", [{"max_staleness": 2}, {"sampling": rl.SamplingParams(top_p=0.5)}, {"loss": rl.GSPO()}]
)
def test_what_ranks_must_agree_on_is_numbers_and_classes(change):
    base = {"model": "/here/model", "sampling": rl.SamplingParams(), "loss": rl.PPOClip(), "max_staleness": 1}
    assert comparable(base) == comparable({**base, "model": "/there/model", "prompts": [1, 2]})
    assert comparable(base) != comparable({**base, **change})
