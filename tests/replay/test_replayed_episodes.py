"""A tape is replayed with the settings it was recorded with: with held-out episodes, and with filters."""

import lightning.pytorch as pl
import pytest
import torch
from flow import fit, make_data, make_module, parameters

from lit_async_rl.assets import asset
from lit_async_rl.callbacks import RolloutTape
from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.environments.episode_engine import EpisodeEngine
from lit_async_rl.rollouts.intake import DynamicSampling
from lit_async_rl.tasks import Addition
from lit_async_rl.tasks.calculator import Calculator

MODEL = asset("calculator_policy")
pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]


class HeldOut(pl.Callback):
    """Held-out rewards and texts of each validation."""

    def __init__(self) -> None:
        self.seen: list = []

    def on_validation_end(self, trainer, pl_module):
        samples = [(sample.completion, sample.reward) for sample in pl_module.validator.samples]
        self.seen.append((float(trainer.callback_metrics["val/reward"]), samples))


def trained(*callbacks, **changes):
    engine = EpisodeEngine(EmbeddedEngine(num_slots=3), environment=Calculator())
    sums = dict(prompts=Addition(num_digits=3, size=100), val_prompts=Addition(num_digits=3, size=6, split="held_out"))
    settings = dict(sampling=SamplingParams(max_tokens=12), groups_per_step=2, max_staleness=1, reward=None)
    data, held_out = make_data(model=MODEL, engine=engine, **sums, **settings, **changes), HeldOut()
    trainer = dict(val_check_interval=1, check_val_every_n_epoch=None, num_sanity_val_steps=0)
    fit(make_module(model=MODEL), data, 2, [held_out, *callbacks], **trainer)
    return held_out.seen


@pytest.mark.slow
def test_validation_of_a_replay_is_that_of_the_recorded_run(tmp_path):
    recorded = trained(RolloutTape(str(tmp_path)))
    assert len(recorded) == 2
    assert any("[" in text for text, _ in recorded[0][1]), "nobody calls the calculator"
    assert trained(tape=str(tmp_path)) == recorded


@pytest.mark.slow
def test_filters_that_drop_groups_may_stay_in_the_settings_of_a_replay(tmp_path):
    """They have dropped what they drop, and are not applied again; their refusal named the admission of another run."""
    recorded, replayed = make_module(), make_module()
    settings = dict(max_staleness=1, groups_per_step=2)
    data = make_data(**settings, filters=[DynamicSampling()])
    fit(recorded, data, 2, [RolloutTape(str(tmp_path))])
    fit(replayed, make_data(**settings, filters=[DynamicSampling()], tape=str(tmp_path)), 2)
    assert torch.equal(parameters(replayed), parameters(recorded))
