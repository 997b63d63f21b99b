"""A chat template that renders the date renders that of the run's start: after midnight, and in a resume."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
import torch
from chat_models import CHATML, chat_model
from flow import fit, make_data, make_module
from lightning.pytorch.callbacks import LambdaCallback
from transformers.utils import chat_template_utils

import lit_async_rl as rl
from lit_async_rl.agents.rendering import ChatRenderer
from lit_async_rl.data import module as data_module
from lit_async_rl.models import run_clock

DATED = "{{ '<|im_start|>system\nToday: ' + strftime_now('%d %b %Y %H') + '<|im_end|>\n' }}" + CHATML
MESSAGES = [{"role": "user", "content": "What day is it?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("dated"), template=DATED)


@pytest.fixture
def later(monkeypatch):
    """Lets the clock of this package and of transformers go forward."""

    def move(**by):
        class Later(datetime):
            @classmethod
            def now(cls, tz=None):
                return datetime.now(tz) + timedelta(**by)

        for place in (data_module, run_clock, chat_template_utils):
            monkeypatch.setattr(place, "datetime", Later)

    return move


def reward(prompt, completion):
    return 0.01 * len(completion)


def data_of(model, **settings):
    prompts = [{"prompt": MESSAGES, "answer": str(n)} for n in range(8)]
    settings = dict(groups_per_step=1, group_size=2, max_staleness=2) | settings
    return make_data(model=model, prompts=prompts, reward=reward, sampling=rl.SamplingParams(max_tokens=3), **settings)


def trained(model, data, steps, ckpt=None, save_to=None):
    """The prompts of the groups that were trained on, each once."""
    found = set()

    def note(trainer, *_):
        found.update(group.prompt_ids for group in data.last_step_groups)

    def save(trainer, _):
        if save_to is not None:
            trainer.save_checkpoint(save_to)

    watch = LambdaCallback(on_train_batch_end=note, on_train_end=save)
    fit(make_module(model=model), data, steps, [watch], ckpt)
    return found


@pytest.mark.slow
def test_a_run_that_is_resumed_days_later_goes_on_with_its_prompts(model, later, tmp_path, caplog):
    path = str(tmp_path / "last.ckpt")
    before = trained(model, data_of(model), 2, save_to=path)
    assert len(before) == 1
    later(days=3)
    assert trained(model, data_of(model), 5, ckpt=path, save_to=path) == before
    assert "finished groups are kept" in caplog.text
    assert "of the checkpoint are sampled again" not in caplog.text
    later(days=5)
    assert trained(model, data_of(model), 6, ckpt=path) == before, "the clock is saved again"
    assert trained(model, data_of(model), 1) != before, "another run has another"


def test_prompts_do_not_change_at_midnight(model, later):
    data = data_of(model, max_staleness=0)
    early = data.codec.encode(data.prompts[0])
    later(days=1)
    assert data.codec.encode(data.prompts[0]) == early
    assert len(trained(model, data, 3) | {early}) == 1
    renderer = ChatRenderer(data.codec)
    (shown,) = renderer.segments(MESSAGES)
    assert renderer.encode(shown) == early, "agents are told the same date"
    assert data_of(model).codec.encode(data.prompts[0]) != early


def test_a_template_without_a_date_gets_no_clock():
    assert run_clock.clock_options(CHATML) == run_clock.clock_options(None) == {}
    assert set(run_clock.clock_options({"default": CHATML, "tools": DATED})) == {"strftime_now"}


def test_a_checkpoint_without_a_clock_loads(model, tmp_path):
    path = tmp_path / "last.ckpt"
    data = data_of(model)
    trained(model, data, 2, save_to=path)
    saved = torch.load(path, weights_only=True)
    del saved["RolloutDataModule"]["began"]
    torch.save(saved, path)
    assert len(trained(model, data_of(model), 3, ckpt=str(path))) == 1
