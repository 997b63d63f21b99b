"""Chat prompts and stop strings through the command line: training, resuming, validation and the tape."""

import json
import runpy
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import yaml
from chat_models import chat_model
from flow import fit, make_data, make_module, parameters

from lit_async_rl.callbacks import RolloutTape
from lit_async_rl.cli.app import main
from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.environments.base import Environment, Episode, Observation
from lit_async_rl.environments.episode_engine import EpisodeEngine
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.problem import Prompt
from lit_async_rl.prompts.sources import PromptSource, RecordPrompts
from lit_async_rl.replay.tape import Tape

ROOT = Path(__file__).parents[2]
STOP = ["e", "an", "\n\n"]
ROWS = [
    {
        "prompt": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": f"next {n}?"},
            {"role": "assistant", "content": "the answer is 12"},
            {"role": "user", "content": "stop."},
        ],
        "answer": str(n),
    }
    for n in range(8)
]
SEEN: list[tuple[Prompt, str]] = []


def reward(prompt: Prompt, completion: str) -> float:
    """Fails on text behind a stop string; the messages are there."""
    assert prompt.messages is not None
    assert prompt.messages[-1]["content"] == "stop."
    assert not any(stop in completion for stop in STOP), completion
    SEEN.append((prompt, completion))
    return float(len(completion) % 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def arguments(model, tmp_path, monkeypatch):
    """Two micro-batches a step, stop strings from a YAML, everything in `tmp_path`."""
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    rows = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "chat.jsonl").write_text(rows)
    source = {"class_path": "JsonlPrompts", "init_args": {"path": str(tmp_path / "chat.jsonl")}}
    data = dict(prompts=source, sampling=dict(max_tokens=24, stop=STOP), reward="test_chat.reward")
    data |= dict(validation=dict(prompts=source))
    data |= dict(groups_per_step=4, group_size=2, micro_batches_per_step=2)
    data |= dict(admission="FixedLag", max_staleness=1)
    trainer = dict(max_steps=2, val_check_interval=2, enable_progress_bar=False)
    settings = dict(model=dict(model=model, scheduler=None), data=data, trainer=trainer)
    (tmp_path / "chat.yaml").write_text(yaml.safe_dump(settings))
    configs = ["--config", "configs/quickstart.yaml", "--config", str(tmp_path / "chat.yaml")]
    return [*configs, "--trainer.logger.init_args.save_dir", str(tmp_path / "runs")]


def saving(folder):
    init_args = dict(dirpath=str(folder), every_n_train_steps=1, save_top_k=-1, filename="{step}")
    return ["--trainer.callbacks", json.dumps([_callback("lightning.pytorch.callbacks.ModelCheckpoint", init_args)])]


def taping(folder):
    return [
        "--trainer.callbacks+",
        json.dumps(_callback("lit_async_rl.callbacks.RolloutTape", {"folder": str(folder)})),
    ]


def _callback(path, init_args):
    return dict(class_path=path, init_args=init_args)


def weights(checkpoint):
    return torch.load(checkpoint, weights_only=True)["state_dict"]


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_chat_prompts_train_and_resume_bit_for_bit(arguments, tmp_path, model):
    SEEN.clear()
    main([*arguments, *saving(tmp_path / "whole"), *taping(tmp_path / "tape")])
    assert len(SEEN) >= 2 * 4 * 2
    whole = weights(tmp_path / "whole" / "step=2.ckpt")
    assert not same(whole, weights(tmp_path / "whole" / "step=1.ckpt"))

    SEEN.clear()  # a reward is another one where what it refers to differs when a run begins
    checkpoint = str(tmp_path / "whole" / "step=1.ckpt")
    main([*arguments, *saving(tmp_path / "resumed"), "--ckpt_path", checkpoint])
    assert same(weights(tmp_path / "resumed" / "step=2.ckpt"), whole)

    codec, groups = TextCodec(model), [group for step in Tape(tmp_path / "tape").steps() for group in step.groups]
    assert len(groups) == 8
    ended = 0
    for group in groups:
        assert codec.encode(group.prompt) == group.prompt_ids
        text = codec.tokenizer.decode(group.prompt_ids)
        assert text.endswith("<|im_start|>user\nstop.<|im_end|>\n<|im_start|>assistant\n")
        for rollout in group.rollouts:
            everything = codec.decode(rollout.token_ids)
            assert rollout.text == codec.decode(rollout.token_ids, STOP)
            ended += everything != rollout.text
            assert rollout.finish_reason == "stop" or everything == rollout.text
            assert not any(stop in codec.decode(rollout.token_ids[:-1]) for stop in STOP)
    assert ended >= 4, "no stop string was ever sampled: the test says nothing"


@pytest.mark.slow
def test_the_tape_of_a_chat_run_replays_it_bit_for_bit(model, tmp_path):
    sampling = SamplingParams(max_tokens=24, stop=tuple(STOP))
    settings = dict(model=model, prompts=Questions(), sampling=sampling, micro_batches_per_step=2)
    recorded = make_module(model=model)
    fit(recorded, make_data(**settings, reward=length), 3, [RolloutTape(str(tmp_path))])
    replayed, data = make_module(model=model), make_data(**settings, tape=str(tmp_path))
    fit(replayed, data, 3)
    assert torch.equal(parameters(replayed), parameters(recorded))
    assert not torch.equal(parameters(replayed), parameters(make_module(model=model)))
    assert data.last_step_groups[0].prompt in list(Questions())


def length(prompt: Prompt, completion: str) -> float:
    """Anything that differs."""
    return float(len(completion) % 3)


MISTAKES = {
    "too long": (
        ["--data.prompts.init_args.max_prompt_tokens", "20"],
        "line 1: the prompt has",
        "max_prompt_tokens=20",
    ),
    "no stop string": (["--data.sampling.stop", "['']"], "sampling.stop", "non-empty"),
    "a special token": (["--data.sampling.stop", "['<|im_end|>']"], "sampling.stop: '<|im_end|>'", "stop_token_ids"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("flags", "first", "second"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_end_in_one_line_with_the_setting(flags, first, second, arguments, capsys):
    with pytest.raises(SystemExit) as error:
        main([*arguments, "--data.validation.prompts", "null", "--trainer.limit_val_batches", "0", *flags])
    said = str(error.value.code) if isinstance(error.value.code, str) else capsys.readouterr().err
    assert first in said
    assert second in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_model_without_a_chat_template_is_named_with_file_and_line(arguments, tmp_path, capsys):
    plain = chat_model(tmp_path / "plain", template=None)
    with pytest.raises(SystemExit) as error:
        main([*arguments, "--model.model", plain])
    said = str(error.value.code) if isinstance(error.value.code, str) else capsys.readouterr().err
    assert f"a prompt is a list of messages, but the tokenizer of {plain!r} has no chat template" in said
    assert "chat.jsonl, line 1" in said


def test_what_the_chat_template_refuses_is_named(model):
    codec = TextCodec(model)
    with pytest.raises(ValueError, match="refuses a prompt with the roles user, tool: no tools here"):
        codec.encode(Prompt(messages=[{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]))


def test_text_in_a_chat_template_and_an_assistants_turn_that_is_gone_on_with(model):
    codec, user = TextCodec(model), {"role": "user", "content": "hi"}
    wrapped = RecordPrompts([{"prompt": "hi"}], "prompt", None, "{prompt}", "here", as_chat=True)
    assert codec.encode(wrapped[0]) == codec.encode(Prompt(messages=[user]))
    begun = codec.encode(Prompt(messages=[user, {"role": "assistant", "content": "the answer"}]))
    assert codec.tokenizer.decode(begun).endswith("<|im_start|>assistant\nthe answer")


# -- environments -----------------------------------------------------------------------------------------------------


class Questions(PromptSource):
    def __len__(self):
        return 50

    def __getitem__(self, index):
        if index >= 50:
            raise IndexError(index)
        return Prompt(messages=[{"role": "user", "content": f"say {index}"}])


class Twice(Environment):
    """Two turns; each text that it gets is without stop strings."""

    async def start(self, prompt):
        class Talk(Episode):
            turn = 0

            async def step(self, completion):
                assert "e" not in completion
                self.turn += 1
                return Observation(text="<|im_end|>\n", reward=1.0, done=self.turn == 2)

        return Talk()


def test_in_an_environment_every_turn_ends_at_a_stop_string_and_the_rollout_keeps_all_turns(model):
    engine = EpisodeEngine(EmbeddedEngine(), Twice())
    sampling = SamplingParams(max_tokens=60, stop=("e",))
    data = make_data(model=model, prompts=Questions(), reward=None, engine=engine, sampling=sampling)
    groups = []

    class Keep(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            groups.extend(trainer.datamodule.last_step_groups)

    fit(make_module(model=model), data, 2, [Keep()])
    several = [r for group in groups for r in group.rollouts if r.turns is not None and len(r.turns) == 2]
    assert several
    assert any(rollout.text.count("e") == 2 for rollout in several), "the text is not cut in the first turn"


def test_the_chat_script_takes_stop_strings(model, capsys, monkeypatch):
    arguments = ["chat.py", "--model", model, "--chat_template", "--prompt", "hi", "--temperature", "1"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--stop", "e", "a", "--num_samples", "4"])
    runpy.run_path(str(ROOT / "scripts/chat.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert said
    assert not any(stop in said for stop in "ea")
