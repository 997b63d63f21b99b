"""Messages of jsonargparse in this package's words: each is provoked, so that another wording of the library shows."""

import re
import typing
from pathlib import Path
from typing import Union

import pytest

from lit_async_rl.cli.app import AsyncRLCLI
from lit_async_rl.cli.error_report import Parser, explain

ROOT = Path(__file__).parents[2]
BASE = ["--config", "configs/quickstart.yaml"]


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(AsyncRLCLI, "instantiate_classes", lambda self: pytest.fail("accepted"))


def said(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        AsyncRLCLI(words)
    assert end.value.code == 2
    return capsys.readouterr().err.strip()


REWARD = '{"class_path":"lit_async_rl.rewards.MathVerify","init_args":{"timeout_s":"soon"}}'
JUDGE = (
    '{"class_path":"lit_async_rl.JudgeReward","init_args":{"model":"m","base_url":"http://127.0.0.1:1/v1",'
    '"api_key_env":"sk-proj-abcdefghijklmnop","limits":{"tries":"lots"}}}'
)
PARTS = (
    '{"class_path":"lit_async_rl.CombinedReward","init_args":{"rewards":{"a":"lit_async_rl.rewards.exact_match"},'
    '"weights":{"a":"heavy"}}}'
)
AGENT = (
    '{"class_path":"lit_async_rl.ProcessAgent","init_args":{"agent":"lit_async_rl.tasks.CalculatorAgent",'
    '"processes":"many"}}'
)
FLAGS = {
    "--data.group_sise 3": "there is no setting data.group_sise; did you mean data.group_size?",
    "--data.group_size x": "data.group_size must be of type int, got x",
    "--data.model x": "data.model cannot be given here: it follows model.model",
    "--model.kl_estimator k9": "model.kl_estimator must be one of 'token', 'sequence', 'k3', got k9",
    "--data.engine Embedded": "data.engine must be a RolloutEngine, got Embedded; did you mean EmbeddedEngine?",
    "--data.engine no_such.Engine": "data.engine=no_such.Engine: there is no module no_such",
    "--data.engine.num_slots 3": (
        "data.engine.num_slots is a setting of no class yet: choose one first, --data.engine NAME "
        "--data.engine.num_slots ..."
    ),
    "--data.engine EpisodeEngine --data.engine.environment calculator": (
        "data.engine.environment must be an Environment, got calculator; did you mean Calculator?"
    ),
    "--data.engine RayEngine --data.engine.replicas a": "data.engine.replicas must be of type int, got a",
    "--data.prompts.num_digit 3": "there is no setting data.prompts.num_digit of SortDigits; did you mean num_digits?",
    "--data.prompts JsonlPrompts": "data.prompts: JsonlPrompts needs data.prompts.path",
    "--data.reward my_rewards.py:judge": (
        "data.reward must be the dotted path of a function or a class, got my_rewards.py:judge; did you mean "
        "my_rewards.judge?"
    ),
    "--data.reward lit_async_rl.rewards.exact_matsh": (
        "data.reward: there is no exact_matsh in lit_async_rl.rewards; did you mean exact_match?"
    ),
    "--data.reward.timeout 3": "there is no setting data.reward.timeout: data.reward is a function",
    f"--data.reward {REWARD}": "data.reward.timeout_s must be of type float, got soon",
    f"--data.reward {JUDGE}": "data.reward.limits.tries must be of type int, got lots",
    f"--data.reward {PARTS}": "data.reward.weights must be of type float, got heavy",
    f"--data.engine AgentEngine --data.engine.engine EmbeddedEngine --data.engine.agent {AGENT}": (
        "data.engine.agent.processes must be of type int, got many"
    ),
    "--model.loss torch.nn.MSELoss": "model.loss must be a PolicyLoss, got torch.nn.MSELoss",
    "--model.optimizer torch.optim.Adamm": "model.optimizer: there is no Adamm in torch.optim; did you mean Adam?",
    "--model.scheduler OneCycleLR": "model.scheduler: OneCycleLR needs model.scheduler.max_lr",
    "--trainer.callbacks+=CollapseAlarm --trainer.callbacks.action stopp": (
        "trainer.callbacks.action must be an AlarmAction, got stopp; did you mean Stop?"
    ),
}


@pytest.mark.parametrize("flags", FLAGS)
def test_a_wrong_flag(flags, capsys, tmp_path, monkeypatch):
    for link in ("configs", "lit_async_rl"):
        (tmp_path / link).symlink_to(ROOT / link)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text("def judge(prompt, completion):\n    return 1.0\n")
    assert said(capsys, *BASE, *flags.split()) == f"error: {FLAGS[flags]}"


FILES = {
    "trainer: {group_size: 3}": "there is no setting trainer.group_size; did you mean data.group_size?",
    "traner: {max_steps: 3}": "there is no setting traner.max_steps; did you mean trainer.max_steps?",
    "trainer:": "trainer is empty in a configuration file: give it a value, or leave it out",
    "model: {model: null}": (
        "model.model is not set: name a model, or a file that does (--config configs/quickstart.yaml)"
    ),
    "model: {loss: {class_path: PPOClip, clip_low: 0.1}}": (
        "model.loss: clip_low must be in init_args, beside class_path: {class_path: ..., init_args: {...}}"
    ),
    "trainer: {callbacks: [SampleLogger, {class_path: CollapseAlrm}]}": (
        "trainer.callbacks must be a Callback, got CollapseAlrm; did you mean CollapseAlarm?"
    ),
}


@pytest.mark.parametrize("text", FILES)
def test_a_wrong_file(text, capsys, tmp_path):
    (tmp_path / "mine.yaml").write_text(f"{text}\n")
    assert said(capsys, *BASE, "--config", str(tmp_path / "mine.yaml")) == f"error: {FILES[text]}"


def test_other_words_of_the_library_are_repeated_with_the_setting():
    nested = """Parser key "data.engine":
  Does not validate against any of the Union subtypes
  Subtypes: [<class 'lit_async_rl.engines.base.RolloutEngine'>, <class 'NoneType'>]
  Errors:
    - Problem with given class_path 'lit_async_rl.EmbeddedEngine':
        Parser key "num_slots":
          The number is not among friends. Got value: 3
    - Expected a <class 'NoneType'>
  Given value type: <class 'jsonargparse._util.NestedArg'>
  Given value: NestedArg(key='num_slots', val='3')"""
    expected = "data.engine.num_slots: The number is not among friends. Got value: 3"
    assert explain(nested, {}) == expected
    assert explain(nested.replace("lit_async_rl.EmbeddedEngine", "no_such.Engine"), {}) == expected
    assert explain("Nothing of this is known", {}) == "Nothing of this is known"


FLOAT_FIRST = Union[float, int]  # noqa: UP007 its order is that of the first such union, in whichever module


@pytest.mark.parametrize("hint", [FLOAT_FIRST, float | int | None, list[float | int], int | float | str | None])
def test_an_integer_stays_one_however_its_union_was_first_written(hint):
    """Lightning reads `limit_val_batches=1` as one batch and 1.0 as all of them."""

    def train(limit: hint = 1): ...

    parser = Parser()
    parser.add_function_arguments(train)
    given = "[1]" if typing.get_origin(hint) is list else "1"
    (found,) = flatten(parser.parse_args(["--limit", given]).limit)
    assert type(found) is int
    (found,) = flatten(parser.parse_args(["--limit", given.replace("1", "0.5")]).limit)
    assert type(found) is float


def flatten(value):
    return value if isinstance(value, list) else [value]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("data:\n- groups_per_step: 2\n", 'data must hold settings (`name: value`), got [{"groups_per_step": 2}]'),
        ("trainer: []\n", "trainer must hold settings (`name: value`), got []"),
        ("defaults: []\n", "defaults must hold settings (`name: value`), got []"),
        ("model: 3\n", "model must hold settings (`name: value`), got 3"),
        ("data: {sampling: [1]}\n", "data.sampling must hold settings (`name: value`), got [1]"),
        ("data: {scoring: x}\n", 'data.scoring must hold settings (`name: value`), got "x"'),
        (
            "data: {engine: {class_path: EmbeddedEngine, init_args: [3]}}\n",
            "data.engine.init_args must hold settings (`name: value`), got [3]",
        ),
    ],
)
def test_what_stands_where_settings_are_meant_is_named_with_its_file(content, message, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(content)
    with pytest.raises(ValueError, match=f"^in the file .*run.yaml, the section {re.escape(message)}$"):
        AsyncRLCLI([*BASE, "--config", str(file)])
