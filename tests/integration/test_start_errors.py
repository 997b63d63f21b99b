"""Mistakes that are found before training begins: one line that names the setting, the file, or what to do."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from flow import fit, make_data, make_module
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_async_rl.assets import asset
from lit_async_rl.cli.app import export, main

ROOT = Path(__file__).parents[2]
REWARD = """
class Judge:
    def __init__(self, size: int = 3) -> None:
        len(size)
    def __call__(self, prompt, completion):
        return 1.0
"""
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(tmp_path))


def message(tmp_path, *flags: str, command=main, lines: int = 1) -> str:
    where = ["--trainer.logger.init_args.save_dir", str(tmp_path / "runs"), "--data.validation.prompts", "null"]
    with pytest.raises(SystemExit) as error:
        command(["--config", "configs/quickstart.yaml", "--trainer.max_steps", "1", *flags, *where])
    said = str(error.value.code)
    if lines == 1:
        assert "\n" not in said
    assert len(said) < 400
    return said


def test_what_a_constructor_raises_names_the_setting(tmp_path):
    (tmp_path / "broken_judge.py").write_text(REWARD)
    first, *others = message(tmp_path, "--data.reward", "broken_judge.Judge", lines=4).splitlines()
    assert first == "error: data.reward: Judge cannot be made: TypeError: object of type 'int' has no len()"
    assert others[-1].strip() == "len(size)"  # the line of the user's file


def test_a_key_that_is_there_twice_is_refused(tmp_path):
    (tmp_path / "twice.yaml").write_text("data:\n  group_size: 2\n  max_staleness: 1\n  group_size: 4\n")
    said = message(tmp_path, "--config", str(tmp_path / "twice.yaml"))
    assert "twice.yaml' cannot be used: group_size appears twice, in lines 2 and 4" in said


def test_weights_that_are_not_finite_are_refused(tmp_path):
    model = str(tmp_path / "model")
    lm = AutoModelForCausalLM.from_pretrained(asset("small_sort_policy"))
    AutoTokenizer.from_pretrained(asset("small_sort_policy")).save_pretrained(model)
    name, weight = next(iter(lm.named_parameters()))
    with torch.no_grad():
        weight[0, 0] = torch.nan
    lm.save_pretrained(model)
    said = message(tmp_path, "--model.model", model)
    assert f"model.model={model!r} is broken: its weight {name} holds values that are NaN or infinite" in said


def test_wandb_without_a_key_says_what_to_do(process, tmp_path):
    flags = ["--config", "configs/quickstart.yaml", "--config", "configs/loggers/wandb.yaml"]
    flags += ["--trainer.logger.init_args.save_dir", str(tmp_path)]
    environment = {"WANDB_MODE": "online", "HOME": str(tmp_path), "WANDB_API_KEY": None}
    said = process.script("scripts/train.py", flags, tmp_path, environment=environment, limit_s=250).said
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert "trainer.logger (WandbLogger): " in line
    assert "WANDB_MODE=offline logs without an account" in line
    assert "Traceback" not in said


@pytest.mark.slow
def test_export_writes_into_no_file(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    module = make_module(model=asset("small_sort_policy"))
    flags = ["--model.model", "lit_async_rl/assets/small_sort_policy", "--model.scheduler", "null"]
    fit(module, make_data(model=module.model), 1).save_checkpoint(tmp_path / "a.ckpt")
    checkpoint = ("--ckpt_path", str(tmp_path / "a.ckpt"))
    said = message(tmp_path, *flags, *checkpoint, "--out", str(tmp_path / "README.md"), command=export)
    assert "README.md' is a file, but must be a folder: nothing was written" in said
    assert (tmp_path / "README.md").read_text() == "mine"


@pytest.mark.slow
def test_export_on_several_ranks_writes_once(tmp_path, monkeypatch):
    """The others were refused by a folder that is not empty, or wrote into the same files."""
    (tmp_path / "a.ckpt").write_text("not read on other ranks than the first")
    monkeypatch.setattr(pl.Trainer, "is_global_zero", property(lambda self: False))
    where = ["--ckpt_path", str(tmp_path / "a.ckpt"), "--out", str(tmp_path / "out")]
    monkeypatch.setattr("lit_async_rl.cli.app.check_checkpoint", lambda path: None)
    export(["--config", "configs/quickstart.yaml", *where])
    assert not (tmp_path / "out").exists()


def test_chat_goes_on_after_an_empty_line_and_a_bad_prompt(process, tmp_path):
    typed = "\n  \n" + "1" * 3000 + "\n31424210=\n"
    words = ["--model", asset("sort_policy")]
    done = process.script("scripts/chat.py", words, tmp_path, typed=typed, limit_s=250)
    assert done.status == 0, done.said
    assert "Traceback" not in done.said
    assert "01122344" in done.said
