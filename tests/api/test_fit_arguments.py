"""What `rl.fit` accepts in place of names and objects, what it refuses at once, and errors of user code."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import time
import traceback
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lit_async_rl as rl
from lit_async_rl.api.arguments import as_groups, as_typed
from lit_async_rl.api.run import SETTINGS
from lit_async_rl.rewards.calls import check_reward

MODEL = rl.asset("small_sort_policy")
ROWS = [{"prompt": f"{n}=", "answer": str(n)} for n in range(10, 30)]
SMALL = dict(groups_per_step=2, group_size=2, sampling={"max_tokens": 4})
CPU = dict(accelerator="cpu", devices=1, enable_progress_bar=False)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def fit(model=MODEL, prompts=ROWS, reward=rl.share_correct, **changes):
    return rl.fit(model, prompts, reward, **(dict(max_steps=1) | SMALL | CPU | changes))


# -- objects in memory ------------------------------------------------------------------------------------------------


def test_a_model_and_a_tokenizer_in_memory_train_from_the_runs_folder(tmp_path):
    lm = AutoModelForCausalLM.from_pretrained(MODEL)
    with torch.no_grad():
        lm.get_input_embeddings().weight.mul_(0.5)
    trainer = fit(lm, validation=ROWS[:4], learning_rate=1e-30)
    folder = Path(trainer.log_dir) / "model"
    assert (folder / "tokenizer_config.json").is_file()
    trained = trainer.lightning_module.policy.causal_lm.get_input_embeddings().weight
    assert torch.equal(trained, lm.get_input_embeddings().weight.float())
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = "{{ messages[0].content }}"
    chat = rl.InMemoryPrompts(["1=", "2="], as_chat=True)
    trainer = fit(MODEL, chat, lambda prompt, completion: 1.0, tokenizer=tokenizer, logger=False)
    assert trainer.datamodule.codec.tokenizer.chat_template == tokenizer.chat_template


def test_a_model_in_memory_that_is_refused_leaves_nothing(tmp_path):
    lm = AutoModelForCausalLM.from_pretrained(MODEL)
    lm.name_or_path = lm.config._name_or_path = ""
    with pytest.raises(ValueError, match="tokenizer must be given: the in-memory model was loaded from ''"):
        fit(lm)
    with pytest.raises(ValueError, match=r"^group_size=1 with advantage=GroupMeanStd"):
        fit(lm, tokenizer=AutoTokenizer.from_pretrained(MODEL), group_size=1)
    with pytest.raises(ValueError, match=r"an in-memory model or tokenizer needs a single-process run, but .* 2 proc"):
        fit(MODEL, tokenizer=AutoTokenizer.from_pretrained(MODEL), devices=2, strategy="ddp")
    assert os.listdir(tmp_path) in ([], ["runs"])


def test_groups_of_settings_may_be_dictionaries_and_held_out_prompts_a_list():
    given = {
        "sampling": {"max_tokens": 6, "stop": ("x",)},
        "validation": {"prompts": ROWS, "num_samples": 2, "sampling": {"max_tokens": 3}},
        "limits": {"engine_restarts": 0},
        "learning_rate": 1e-4,
    }
    made = as_groups(given)
    assert made["sampling"] == rl.SamplingParams(max_tokens=6, stop=("x",))
    assert made["validation"].sampling.max_tokens == 3
    assert made["limits"] == rl.Limits(engine_restarts=0)
    assert made["learning_rate"] == 1e-4
    assert len(as_groups({"validation": ROWS})["validation"].source) == len(ROWS)
    with pytest.raises(TypeError, match=r"sampling has no setting 'max_token'; did you mean max_tokens\?"):
        as_groups({"sampling": {"max_token": 6}})


def test_lora_of_peft_is_taken_over_or_refused_by_name():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["v_proj", "q_proj"], task_type="CAUSAL_LM")
    assert as_groups({"lora": config})["lora"] == rl.LoRA(rank=4, alpha=8, target_modules=["q_proj", "v_proj"])
    with pytest.raises(ValueError, match=r"lora: lora_dropout=0.05, use_dora=True of peft.LoraConfig cannot be used"):
        as_groups({"lora": peft.LoraConfig(lora_dropout=0.05, use_dora=True)})


# -- refused before a model loads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [dict(max_staleness=-1), dict(prompts="nowhere.jsonl")])
def test_a_wrong_setting_is_refused_before_a_model_loads(changes, monkeypatch, tmp_path):
    monkeypatch.setattr("lit_async_rl.training.module.load_policies", lambda *_, **__: pytest.fail("a model loads"))
    with pytest.raises((FileNotFoundError, ValueError), match=rf"^{next(iter(changes))}"):
        fit(**changes)
    assert not os.listdir(tmp_path)


REWARDS = {
    "a parameter is missing": lambda completion: 1.0,
    "nothing gives it weight": lambda prompt, completion, weight: 1.0,
    "nothing gives it scale": lambda prompt, completion, *, scale: 1.0,
    "swap the two parameters": lambda response, prompt: 1.0,
    "but MathVerify is a class: write MathVerify": rl.MathVerify,
    "got 'exact_match'": "exact_match",
}


@pytest.mark.parametrize("message", REWARDS)
def test_a_reward_that_cannot_be_called_is_refused_before_anything_is_sampled(message):
    with pytest.raises(ValueError, match=message):
        check_reward(REWARDS[message])


def test_rewards_of_every_kind_pass():
    class Judge:
        def __call__(self, prompt, completion, token_ids=()):
            return 1.0

    async def slow(prompt, completion):
        return 1.0

    def scaled(scale, prompt, completion):
        return scale

    passing = [rl.exact_match, rl.share_correct, Judge(), slow, functools.partial(scaled, 2.0), lambda *_: 1.0, max]
    for reward in (*passing, lambda prompt, completion, token_ids: 1.0, lambda prompts, completions, **_: 1.0):
        check_reward(reward)


def test_settings_in_messages_are_named_as_arguments():
    said = as_typed(
        "data.group_size=1 with data.advantage=X (model.lora.rank), see a/data.reward and model.pt", SETTINGS
    )
    assert said == "group_size=1 with advantage=X (lora.rank), see a/data.reward and model.pt"


def test_every_setting_is_in_the_signature():
    parameters = inspect.signature(rl.fit).parameters
    assert set(SETTINGS) < parameters.keys()
    assert parameters["max_staleness"].default == 4
    assert all(one.kind is not one.VAR_KEYWORD for one in parameters.values())


# -- errors of user code ----------------------------------------------------------------------------------------------


def broken_reward(prompt, completion):
    return {}["x"]


class BrokenCallback(pl.Callback):
    def on_train_batch_end(self, *_):
        raise KeyError("y")


class BrokenPrompts(rl.PromptSource):
    def __len__(self):
        return 20_000  # more than are read before training

    def __getitem__(self, index):
        return rl.Prompt(text=f"{10 + index % 9}=") if index == 0 else [][index]


@pytest.mark.parametrize(
    ("changes", "function", "line"),
    [
        (dict(reward=broken_reward), "broken_reward", 'return {}["x"]'),
        (dict(callbacks=[BrokenCallback()]), "on_train_batch_end", 'raise KeyError("y")'),
        (dict(prompts=BrokenPrompts(), reward=lambda *_: 1.0), "__getitem__", "[][index]"),
    ],
)
def test_the_users_line_is_the_last_of_the_traceback(changes, function, line, monkeypatch, caplog):
    monkeypatch.delenv("LIT_ASYNC_RL_TRACEBACK", raising=False)
    with pytest.raises(Exception) as raised:  # noqa: PT011  of whatever type the user's code raises
        fit(**changes)
    error = raised.value
    frames = traceback.extract_tb(error.__traceback__)
    assert frames[-1].name == function
    assert line in frames[-1].line
    shown = traceback.format_exception(error)
    assert sum(text.count("\n") for text in shown) < 25
    assert not any("direct cause" in text or "During handling" in text for text in shown)
    kept = list(Path().rglob("traceback.txt"))
    for path in kept:
        assert "fit_loop.py" in path.read_text()
        assert line in path.read_text()
    assert f"{kept[0] if kept else 'LIT_ASYNC_RL_TRACEBACK=1'} shows the whole traceback" in caplog.text


async def awaited_nothing(prompt, completion):
    return None


class NothingForGroups:
    def __call__(self, prompt, completion):
        return 1.0

    def score_group(self, prompt, completions):
        return [None] * len(completions)


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (lambda prompt, completion: None, "returned None, which is not a number"),
        (lambda prompt, completion: "good", "returned 'good', which is not a number"),
        (lambda prompt, completion: float("nan"), "returned nan; a reward must be finite"),
        (lambda prompt, completion: [1.0], r"returned \[1.0\], which is not a number"),
        (awaited_nothing, "returned None, which is not a number"),
        (NothingForGroups(), "returned None, which is not a number"),
        (
            rl.CombinedReward({"a": lambda prompt, completion: None}),
            "no reward applies to the completion: a returned None",
        ),
        (lambda prompt, completion: time.sleep(3), "did not return within data.scoring.timeout_s=0.2"),
    ],
    ids=["None", "text", "NaN", "list", "async", "group", "combined", "hangs"],
)
def test_a_reward_that_is_no_number_has_a_short_traceback(reward, said, monkeypatch, caplog):
    """No frame of the user's code stands in it, and those of this package say nothing."""
    monkeypatch.delenv("LIT_ASYNC_RL_TRACEBACK", raising=False)
    with pytest.raises(RuntimeError, match=said) as raised:
        fit(reward=reward, scoring=rl.Scoring(timeout_s=0.2 if "timeout" in said else 30.0))
    shown = "".join(traceback.format_exception(raised.value)).splitlines()
    assert len(shown) < 25
    assert not any("direct cause" in line or "During handling" in line for line in shown)
    assert "shows the whole traceback of the error below" in caplog.text
    for path in Path().rglob("traceback.txt"):
        assert "fit_loop.py" in path.read_text()


def test_the_whole_traceback_is_kept_on_demand(monkeypatch):
    monkeypatch.setenv("LIT_ASYNC_RL_TRACEBACK", "1")
    with pytest.raises(RuntimeError, match="broken_reward") as raised:
        fit(reward=broken_reward)
    assert raised.value.__cause__ is not None
    assert not list(Path().rglob("traceback.txt"))


# -- what editors complete --------------------------------------------------------------------------------------------


def test_the_types_of_the_arguments_are_those_of_the_classes(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    sys.modules.pop("write_fit_settings", None)
    import write_fit_settings

    assert write_fit_settings.TARGET.read_text() == write_fit_settings.text(), "run scripts/write_fit_settings.py"


def test_ranks_of_a_cluster_take_no_tokenizer_of_this_process():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    with pytest.raises(
        ValueError, match="an in-memory model or tokenizer cannot be used if `cluster` starts the ranks"
    ):
        fit(MODEL, tokenizer=tokenizer, cluster=rl.RayCluster(trainer_ranks=2))
