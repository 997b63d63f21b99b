"""Keys appear in no message and no file of a run, wherever they were pasted."""

from typing import NamedTuple

import pytest
import torch
from flow import MODEL
from jsonargparse import Namespace

import lit_async_rl as rl
from lit_async_rl.cli.app import main
from lit_async_rl.cli.one_line_errors import shorten
from lit_async_rl.models.loading import load_policy
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.utils.secrets import check_address, concealed, key_of_variable, without_secrets
from lit_async_rl.utils.user_code import write_traceback

KEYS = [
    "sk-proj-abcdefghijklmnop",
    "hf_abcdefghijklmnopqrst",
    "3f2a9c77b1d84e6fa0c1",
    "AKIAIOSFODNN7EXAMPLE",
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "gsk_abcdefghijklmnop",
]
SETTINGS = {
    "JudgeReward.api_key_env": lambda key: rl.JudgeReward(model="m", base_url="http://localhost/v1", api_key_env=key),
    "JudgeReward.base_url": lambda key: rl.JudgeReward(model="m", base_url=key),
    "JudgeReward.base_url must contain no user": lambda key: rl.JudgeReward(
        model="m", base_url=f"http://u:{key}@host/v1"
    ),
    "OpenEnvEnvironment.api_key_env": lambda key: rl.OpenEnvEnvironment("http://localhost", api_key_env=key),
    "OpenEnvEnvironment.url": lambda key: rl.OpenEnvEnvironment(f"http://localhost?key={key}"),
    "McpTools.environment": lambda key: rl.McpTools(["server"], environment=[key]),
    "ServerTeacher.api_key_env": lambda key: rl.ServerTeacher(
        base_url="http://localhost/v1", model="m", tokenizer=MODEL, api_key_env=key
    ).open(CausalPolicy(load_policy(MODEL)), torch.device("cpu")),
    "ServerTeacher.base_url": lambda key: rl.ServerTeacher(base_url=f"http://u:{key}@host/v1", model="m"),
}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_key_in_the_place_of_a_setting_is_not_shown(setting, key, tmp_path):
    with pytest.raises(ValueError, match=setting.replace(".", r"\.")) as refused:
        SETTINGS[setting](key)
    assert key not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_name_of_a_variable_is_shown(monkeypatch):
    with pytest.raises(ValueError, match=r"JudgeReward\.api_key_env='NO_SUCH_KEY' is not set in the environment"):
        key_of_variable("JudgeReward.api_key_env", "NO_SUCH_KEY")
    monkeypatch.setenv("SOME_KEY", "abc")
    assert key_of_variable("x", "SOME_KEY") == "abc"
    assert key_of_variable("x", None) == ""
    check_address("x", "http://localhost:8000/v1", "y")


@pytest.mark.parametrize("key", KEYS)
def test_messages_tracebacks_and_settings_conceal_keys(key, tmp_path):
    said = f"Got value: Namespace(class_path='lit_async_rl.JudgeReward', init_args=Namespace(api_key_env='{key}', n=1))"
    assert key not in shorten(said)
    assert "n=1" in shorten(said)
    assert key not in shorten(f"api_key: {key} at https://user:{key}@host/v1")
    write_traceback(ValueError(f"401: Authorization: Bearer {key}"), tmp_path)
    assert key not in (tmp_path / "traceback.txt").read_text()
    held = {"reward": {"init_args": {"api_key": key, "parts": [{"hf_token": key}], "num_tokens": 3, "kind": "token"}}}
    assert concealed(held)["reward"]["init_args"] == {
        "api_key": "***",
        "parts": [{"hf_token": "***"}],
        "num_tokens": 3,
        "kind": "token",
    }


def test_settings_conceal_keys_wherever_the_command_line_holds_them():
    """Items of lists and dictionaries are namespaces there; keys of callbacks were in `config.yaml` and trackers."""
    headers = {"Authorization": "Bearer KEY", "X-Api-Key": "KEY", "Accept": "json"}
    mine = Namespace(class_path="own.Mine", init_args=Namespace(api_key="KEY", auth_token="KEY", headers=headers))
    held = Namespace(
        trainer=Namespace(callbacks=[mine], plugins=(mine,)),
        data=Namespace(reward={"own": mine, "second": {"deep": [{"init_args": mine}]}}),
        password=["KEY", {"of": "KEY"}],
        api_keys=["KEY"],
        token="KEY",
        correction=Namespace(token=Namespace(class_path="own.Correction", init_args=Namespace(cap=2.0))),
        end_token="<|im_end|>",
        num_tokens=3,
        secret=None,
    )
    before = str(held)
    found = concealed(held)
    assert "KEY" not in str(found)
    assert str(held) == before
    shown = found.trainer.callbacks[0]
    assert shown.class_path == found.trainer.plugins[0].class_path == "own.Mine"
    assert shown.init_args.headers == {"Authorization": "***", "X-Api-Key": "***", "Accept": "json"}
    assert found.correction == held.correction
    assert (found.end_token, found.num_tokens, found.secret) == ("<|im_end|>", 3, None)


OWN = """
import lightning.pytorch as pl
import lit_async_rl as rl

class Notify(pl.Callback):
    def __init__(self, api_key: str, headers: dict) -> None:
        assert "KEY" in api_key and "KEY" in headers["Authorization"]

class Judge:
    def __init__(self, auth_token: str) -> None:
        assert "KEY" in auth_token

    def __call__(self, prompt: rl.Prompt, completion: str) -> float:
        return 0.0
"""
RUN = """
model: {model: MODEL}
data:
  prompts: {class_path: SortDigits, init_args: {size: 8}}
  reward: {own: {class_path: own_of_secrets.Judge, init_args: {auth_token: PLANTED-KEY}}}
  groups_per_step: 2
  group_size: 2
  sampling: {max_tokens: 4}
trainer:
  accelerator: cpu
  max_steps: 1
  logger: {class_path: lightning.pytorch.loggers.TensorBoardLogger, init_args: {save_dir: FOLDER}}
  callbacks+:
    - class_path: own_of_secrets.Notify
      init_args: {api_key: PLANTED-KEY, headers: {Authorization: Bearer PLANTED-KEY}}
"""


class Login(NamedTuple):
    user: str
    headers: dict[str, str]


def test_settings_conceal_keys_within_a_namedtuple():
    assert concealed(Login("me", {"api_key": "KEY"})) == Login("me", {"api_key": "***"})


def test_no_file_of_a_run_has_the_keys_of_its_callbacks_and_rewards(tmp_path, monkeypatch):
    (tmp_path / "own_of_secrets.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    config = tmp_path / "run.yaml"
    runs = tmp_path / "runs"
    config.write_text(RUN.replace("MODEL", str(rl.asset("small_sort_policy"))).replace("FOLDER", str(runs)))
    main(["--config", str(config)])
    files = [file for file in runs.rglob("*") if file.is_file()]
    assert {"config.yaml", "hparams.yaml"} <= {file.name for file in files}
    assert [file.name for file in files if b"PLANTED-KEY" in file.read_bytes()] == []


def test_other_texts_stay_as_they_are():
    for text in ("end_token: <|im_end|>", "api_key_env='OPENAI_API_KEY'", "api_key_env=None", "a//b@c", "a token: 3.5"):
        assert without_secrets(text) == text or "@" in text
