"""Damaged, foreign and malicious files: refused in one line that names the file, and nothing in them is executed."""

import json
import logging
import os
import time
from pathlib import Path

import pytest
import torch
from flow import fit, make_data, make_module
from test_resume import saving

from lit_async_rl.cli.app import main
from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.errors import ProducerError
from lit_async_rl.models.sharded_checkpoint import check_folder
from lit_async_rl.prompts.sources import JsonlPrompts
from lit_async_rl.training.checkpoint_io import AtomicCheckpointIO, check_checkpoint

ROOT = Path(__file__).parents[2]
BASE = [*("--config", "configs/quickstart.yaml", "--data.validation.prompts", "null", "--model.scheduler", "null")]


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    data = make_data(groups_per_step=2, max_staleness=0)
    plugins = dict(enable_checkpointing=True, plugins=[AtomicCheckpointIO()])
    fit(make_module(), data, 1, [saving(folder)], **plugins)
    return folder / "step=1.ckpt"


def said_by_main(capsys, monkeypatch, *flags):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as error:
        main([*BASE, *flags])
    said = error.value.code if isinstance(error.value.code, str) else capsys.readouterr().err
    said = said[said.index("error: ") :]
    assert len(said.splitlines()) <= 3, said
    return said


@pytest.mark.slow
def test_a_flipped_byte_anywhere_in_a_checkpoint_is_noticed(checkpoint, tmp_path):
    content = checkpoint.read_bytes()
    path = tmp_path / "flipped.ckpt"
    check_checkpoint(checkpoint)
    for place in [*range(0, len(content), len(content) // 60), *range(len(content) - 80, len(content), 3)]:
        damaged = bytearray(content)
        damaged[place] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"flipped.ckpt' is (damaged|not a complete checkpoint)"):
            AtomicCheckpointIO().load_checkpoint(path)
        path.write_bytes(content[:place])
        with pytest.raises(ValueError, match=r"not a complete checkpoint|is damaged"):
            check_checkpoint(path)


def test_a_checkpoint_without_a_digest_loads_with_a_warning(checkpoint, tmp_path, caplog):
    torch.save(torch.load(checkpoint, weights_only=True), tmp_path / "old.ckpt")
    with caplog.at_level(logging.WARNING):
        assert AtomicCheckpointIO().load_checkpoint(tmp_path / "old.ckpt")["version"] == 1
    assert "has no digest" in caplog.text


def test_malicious_checkpoints_are_refused_by_the_command_line_and_nothing_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "")
    path = tmp_path / "evil.ckpt"
    ran = tmp_path / "ran"
    AtomicCheckpointIO().save_checkpoint({"state_dict": {}, "callbacks": Evil(ran)}, path)
    assert "contains code (which was not executed): posix.system" in said_by_main(
        capsys, monkeypatch, "--ckpt_path", str(path)
    )
    with pytest.raises(ValueError, match="contains code"):
        AtomicCheckpointIO().load_checkpoint(path, weights_only=False)
    torch.save({"weight": torch.zeros(3)}, path)
    assert "not a checkpoint of a PolicyModule" in said_by_main(capsys, monkeypatch, "--ckpt_path", str(path))
    assert not ran.exists()


def test_a_malicious_sharded_checkpoint_is_refused_and_nothing_runs(tmp_path):
    import pickle

    torch.save({"version": 0}, tmp_path / "meta.pt")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    with pytest.raises(
        ValueError, match=r"\.metadata cannot be read: the file is not loaded, because it contains code"
    ):
        check_folder(tmp_path, "ckpt_path")
    assert not (tmp_path / "ran").exists()


def test_the_index_that_torch_writes_is_no_code(tmp_path):
    torch.distributed.checkpoint.save({"model": {"weight": torch.zeros(3)}}, checkpoint_id=tmp_path, no_dist=True)
    torch.save({"version": 0, "updated": 0, "random_state": 0}, tmp_path / "meta.pt")
    check_folder(tmp_path, "ckpt_path")
    with pytest.raises(ValueError, match=r"is a folder of shards.*consolidate_checkpoint"):
        AtomicCheckpointIO().load_checkpoint(tmp_path)


@pytest.mark.parametrize("setting", ["model.scheduler", "model.optimizer", "data.reward"])
@pytest.mark.parametrize("path", ["os.system", "shutil.copy"])
def test_a_function_is_no_class_and_is_not_called(setting, path, tmp_path, capsys, monkeypatch):
    ran = tmp_path / "ran"
    arguments = {"command": f"touch {ran}"} if path == "os.system" else {"src": str(ROOT / "Makefile"), "dst": str(ran)}
    spec = json.dumps({"class_path": path, "init_args": arguments})
    said = said_by_main(capsys, monkeypatch, f"--{setting}", spec)
    assert setting in said
    assert path in said
    assert not ran.exists()


MISSPELT = {
    "--data.max_stalenes": "did you mean data.max_staleness?",
    "--trainer.max_step": "did you mean trainer.max_steps?",
    "--data.group_size": "data.group_size must be of type int, got 3x",
    "--trainer.accelerator": "accelerator='3x'",
}


@pytest.mark.parametrize("flag", MISSPELT)
def test_a_wrong_flag_is_one_line_with_what_was_meant(flag, capsys, monkeypatch):
    assert MISSPELT[flag] in said_by_main(capsys, monkeypatch, flag, "3x")


CONFIGS = {
    "no UTF-8": (b"data: {seed: \xff}", "is not UTF-8"),
    "no YAML": (b"data: [1", "line 1 is not YAML"),
    "a list": (b"- 1", "holds no settings"),
    "a bomb": (b"a: &a [x,x,x,x,x,x,x,x,x,x]\n" + b"".join(
        b"%c: &%c [%s]\n" % (98 + n, 98 + n, b",".join([b"*%c" % (97 + n)] * 10)) for n in range(9)
    ), "aliases are expanded"),
    "deep": (b"a: " + b"[" * 300 + b"]" * 300, "levels"),
    "misspelt argument": (
        b"model: {loss: {class_path: lit_async_rl.losses.PPOClip, init_args: {clip_lo: 1}}}", "did you mean clip_low?"
    ),
    "code": (b"data: {seed: !!python/object/apply:os.system [ls]}", "python/object/apply"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_a_bad_configuration_is_one_line(case, tmp_path, capsys, monkeypatch):
    content, named = CONFIGS[case]
    (tmp_path / "bad.yaml").write_bytes(content)
    assert named in said_by_main(capsys, monkeypatch, "--config", str(tmp_path / "bad.yaml"))


class Renamed(RolloutDataModule):
    """The same under another name."""


def test_a_renamed_data_module_finds_its_rollouts_and_a_checkpoint_without_any_is_refused(checkpoint, tmp_path):
    renamed = make_data(groups_per_step=2, max_staleness=0)
    renamed.__class__ = Renamed
    fit(make_module(), renamed, 2, ckpt_path=str(checkpoint))
    assert renamed.stream.position >= 4, "it went on where the other stopped"
    content = torch.load(checkpoint, weights_only=True)
    del content["RolloutDataModule"]
    torch.save(content, tmp_path / "without.ckpt")
    with pytest.raises(ValueError, match="holds 0 states of a RolloutDataModule"):
        fit(make_module(), make_data(groups_per_step=2), 2, ckpt_path=str(tmp_path / "without.ckpt"))


PROMPTS = {
    "surrogate": (r'{"prompt": "\ud800"}', "line 2 holds half of a character"),
    "surrogate in a key": (r'{"prompt": "1", "\udfff": 1}', "line 2 holds half of a character"),
    "deep": ('{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}", "line 2 is nested too deeply"),
    "a number of 5000 digits": ('{"prompt": ' + "1" * 5000 + "}", "line 2 is not valid JSON"),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_hostile_prompts_name_file_and_line(case, tmp_path):
    line, named = PROMPTS[case]
    (tmp_path / "p.jsonl").write_text('{"prompt": "1="}\n' + line + "\n")
    with pytest.raises(ValueError, match=f"p.jsonl, {named}"):
        JsonlPrompts(str(tmp_path / "p.jsonl"), answer_field=None)


def test_an_error_that_says_nothing_is_named_by_its_type():
    def reward(prompt, completion):
        return 0.0

    class Broken(type(make_data().engine)):
        def poll(self, timeout_s):
            time.sleep(0.01)
            raise KeyError(0)

    data = make_data(engine=Broken(), engine_restarts=0, reward=reward)
    with pytest.raises(ProducerError, match="rollout generation failed: KeyError: 0"):
        fit(make_module(), data, 1)


@pytest.mark.slow
def test_a_sample_of_the_battery(process, tmp_path):
    words = ["--files", "60", "--configs", "30", "--seed", "7"]
    done = process.script("tests/reliability/hostile_files.py", words, tmp_path, limit_s=170)
    assert done.status == 0, done.said[-4000:]
    assert "90 in all, 0 wrong" in done.said
