"""An engine that samples from other weights, or reports other log-probabilities, than it says is noticed at once."""

import copy
import logging

import lightning.pytorch as pl
import pytest
import torch
from flow import barrier_engine, fit, make_data, make_module, parameters
from replays import groups_of, requests_of
from tiny_models import save, tiny_qwen3_moe
from wrong_weights import SCALED, Recording

from lit_async_rl import EngineCheck, LoRA, SharedPromptPacking
from lit_async_rl.advantages.group import GroupMean
from lit_async_rl.callbacks.monitors.engine_check import allowed_error
from lit_async_rl.data.collate import collate_step
from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.errors import EngineError
from lit_async_rl.losses.aggregation import TokenMean
from lit_async_rl.simulation.engine import SimulatedEngine
from lit_async_rl.simulation.latency import Constant
from lit_async_rl.training.token_stats import token_stats

COOL = SamplingParams(max_tokens=10, temperature=0.7)


class Wrong(EmbeddedEngine):
    """Scales one tensor of the weights of `first` and later versions by 1.01."""

    name, first = "model.norm", 0

    def load_weights(self, version, weights):
        wrong = version >= self.first
        super().load_weights(version, ((n, w * 1.01 if wrong and self.name in n else w) for n, w in weights))


SETTINGS = {
    "synchronous": (dict(), dict(max_staleness=0)),
    "free": (dict(), dict(max_staleness=3)),
    "fixed lag": (dict(), dict(max_staleness=2, schedule="fixed_lag")),
    "micro-batches": (dict(), dict(max_staleness=2, schedule="fixed_lag", micro_batches_per_step=2)),
    "every second step": (dict(), dict(max_staleness=1, schedule="fixed_lag", weight_sync_steps=2)),
    "packing": (dict(packing=SharedPromptPacking()), dict(max_staleness=2, schedule="fixed_lag")),
    "adapters": (dict(lora=LoRA(rank=4)), dict(max_staleness=2, schedule="fixed_lag")),
    "temperature": (dict(), dict(max_staleness=1, schedule="fixed_lag", sampling=COOL)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SETTINGS)
def test_with_the_right_weights_the_error_is_rounding_for_every_version(kind, caplog):
    module_settings, data_settings = SETTINGS[kind]
    data = make_data(**data_settings)
    check = Recording(every_n_updates=1, on_error="stop")
    fit(make_module(**module_settings), data, max_steps=8, callbacks=[check])
    assert check.checks
    assert all(error < 2e-5 for _, error in check.checks), check.checks
    if kind != "free":
        lag, every = data.max_staleness, data.weight_sync_steps
        expected = {0} | {step for step in range(lag * every + 1, 8) if step % every == 0}
        assert {step for step, _ in check.checks} == expected
    assert not [record for record in caplog.records if "disagree" in record.getMessage()]


@pytest.mark.parametrize("name", SCALED)
def test_one_tensor_scaled_by_a_hundredth_ends_the_run_before_its_first_step(name):
    engine = Wrong(in_flight_weight_updates=False)
    engine.name = name
    module = make_module()
    before = parameters(module)
    with pytest.raises(EngineError, match=r"Wrong and trainer disagree about version 0: .* differ by .* on average"):
        fit(module, make_data(engine=engine, max_staleness=1), 5, callbacks=[EngineCheck(on_error="stop")])
    assert torch.equal(parameters(module), before)


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 3])
def test_weights_that_go_wrong_during_the_run_are_noticed_when_their_first_tokens_come(lag, caplog):
    caplog.set_level(logging.WARNING)
    engine = Wrong(in_flight_weight_updates=False)
    engine.name, engine.first = "layers.1.mlp.down_proj", 4
    data = make_data(engine=engine, max_staleness=lag, schedule="fixed_lag")
    check = Recording()
    fit(make_module(), data, 10, callbacks=[check])
    errors = dict(check.checks)
    assert all(error < 2e-5 for step, error in errors.items() if step < 4 + lag)
    assert all(error > 1e-4 for step, error in errors.items() if step >= 4 + lag)
    assert 4 + lag in errors
    lines = [record.getMessage() for record in caplog.records if "disagree" in record.getMessage()]
    assert lines[0].startswith("Wrong and trainer disagree about version 4: ")


class Another(EmbeddedEngine):
    """Takes each token for another one."""

    def load_weights(self, version, weights):
        super().load_weights(version, ((n, w.flip(0) if "embed_tokens" in n else w) for n, w in weights))


def test_an_engine_with_another_policy_ends_the_run_before_its_first_step_in_any_case():
    module = make_module()
    before = parameters(module)
    data = make_data(engine=Another(in_flight_weight_updates=False), max_staleness=1)
    with pytest.raises(EngineError, match="Another and trainer disagree about version 0"):
        fit(module, data, 3, callbacks=[EngineCheck()])
    assert torch.equal(parameters(module), before)


def test_the_mean_of_few_tokens_may_be_larger():
    """0.12 nats of 4 tokens were a warning in a run of SmolLM2 in bfloat16, where nothing was wrong."""
    assert allowed_error(0.1, 4.0) == pytest.approx(0.3)
    assert allowed_error(0.1, 800.0) == pytest.approx(0.101)


def test_wrong_weights_show_in_one_token_of_each_completion():
    data = make_data(engine=Wrong(in_flight_weight_updates=False), sampling=SamplingParams(max_tokens=1))
    with pytest.raises(EngineError, match="the log-probabilities of 4 sampled tokens differ"):
        fit(make_module(), data, 2, callbacks=[EngineCheck(on_error="stop")])


@pytest.mark.slow
def test_it_changes_no_bit():
    found = []
    for callbacks in ([], [EngineCheck(every_n_updates=1)]):
        module = make_module()
        fit(module, make_data(engine=barrier_engine(), max_staleness=2, schedule="fixed_lag"), 6, callbacks=callbacks)
        found.append(parameters(module))
    assert torch.equal(*found)


def test_engines_without_a_model_are_left_alone():
    check = Recording(every_n_updates=1, on_error="stop")
    fit(make_module(), make_data(engine=SimulatedEngine(Constant(0.001))), 2, callbacks=[check])
    assert not check.checks


@pytest.mark.parametrize("settings", [{"every_n_updates": 0}, {"num_rollouts": 0}, {"bound": 0.0}])
def test_settings_out_of_range_are_named(settings):
    with pytest.raises(ValueError, match=rf"EngineCheck\.{next(iter(settings))} must be"):
        EngineCheck(**settings)


def test_experts_are_replayed_as_in_training(tmp_path):
    """An engine in bfloat16 chooses other experts than the trainer, which computes with those that were chosen."""
    lm = tiny_qwen3_moe()
    requests = requests_of([5, 2, 9], num_samples=4, max_tokens=10, experts=True)
    engine = EmbeddedEngine.from_module(copy.deepcopy(lm).to(torch.bfloat16), num_slots=16, self_check=False)
    groups = groups_of(requests, engine.run(requests))
    settings = dict(advantage=GroupMean(), aggregation=TokenMean(), temperature=1.0, pad_token_id=0)
    (batch,) = collate_step(groups, num_micro_batches=1, **settings)
    module = make_module(model=save(lm, tmp_path))
    policy = module.policy
    with torch.no_grad():
        stats = token_stats(policy, batch, experts=batch.experts)
    expected = (stats.logprobs - batch.behavior_logprobs)[batch.loss_mask]
    check = EngineCheck(num_rollouts=10**6)
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    copies = {name: weight.detach().clone() for name, weight in policy.named_parameters()}
    check._compare(trainer, module, batch, mask=batch.loss_mask, copies=copies)
    ((replayed, _),) = check.replayed
    torch.testing.assert_close(replayed, expected)
