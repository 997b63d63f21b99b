"""BlendedIS and EstimatorBlend: the gradient against a slow oracle, the ends to the bit, and the share step by step."""

import math
import random

import lightning.pytorch as pl
import pytest
import torch
from blended_runs import LAG, blended
from flow import fit, make_data, make_module, parameters
from lightning.pytorch.callbacks import ModelCheckpoint

import lit_async_rl as rl
from lit_async_rl.baselines.optimal import Norms
from lit_async_rl.models.policy import CausalPolicy, TokenStats
from lit_async_rl.stabilizers.signals import StepSignals
from lit_async_rl.training.objective import Objective
from lit_async_rl.types import RolloutBatch

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]
VOCABULARY = 5
SCORE = rl.OptimalBaseline(norms=Norms.SCORE)


class Table(CausalPolicy):
    """A policy in float64 whose token distribution depends on the position alone."""

    def __init__(self, width):
        torch.nn.Module.__init__(self)
        self.table = torch.nn.Parameter(torch.randn(width, VOCABULARY, dtype=torch.float64))

    def forward(self, input_ids, *args, **kwargs):
        logprobs = self.table.log_softmax(-1).expand(len(input_ids), -1, -1).gather(-1, input_ids[..., None])[..., 0]
        return TokenStats(
            logprobs=logprobs, entropy=torch.zeros_like(logprobs), head=logprobs.new_zeros(*logprobs.shape, 0)
        )


def objective(correction, baseline=SCORE):
    return Objective(rl.Reinforce(), rl.CurrentProximal(), correction, baseline, 0.0, 0.0)


def blend(share):
    correction = rl.BlendedIS()
    correction.share = share
    return correction


def batch_of(seed, rows=8, width=6, spread=0.9):
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    lengths = torch.randint(1, width, (rows, 1), generator=generator)
    mask = (torch.arange(width) >= 1) & (torch.arange(width) <= lengths)
    policy = Table(width)
    input_ids = torch.randint(0, VOCABULARY, (rows, width), generator=generator)
    with torch.no_grad():
        behavior = policy(input_ids).logprobs + spread * normal(rows, width)
    return policy, RolloutBatch(
        input_ids=input_ids,
        attention_mask=torch.ones_like(mask),
        loss_mask=mask,
        behavior_logprobs=behavior.masked_fill(~mask, 0.0),
        versions=torch.zeros_like(input_ids),
        advantages=normal(rows, 1).expand(rows, width).masked_fill(~mask, 0.0),
        token_weights=torch.where(mask, normal(rows, 1).abs(), 0.0),
        rewards=normal(rows),
        group_index=torch.arange(rows) // 4,
    )


def gradient_of(objective, policy, batch):
    policy.zero_grad()
    loss, _ = objective(policy, None, batch, 0)
    loss.backward()
    return policy.table.grad.clone()


def slow_gradient(policy, batch, share):
    """The same token by token, in plain numbers."""
    table = policy.table.log_softmax(-1).tolist()
    ids, mask, behavior = batch.input_ids.tolist(), batch.loss_mask.tolist(), batch.behavior_logprobs.tolist()
    weights, rewards, groups = batch.token_weights.tolist(), batch.rewards.tolist(), batch.group_index.tolist()
    tokens = [[t for t in range(len(row)) if row[t]] for row in mask]
    logs = [{t: table[t][ids[i][t]] - behavior[i][t] for t in tokens[i]} for i in range(len(ids))]
    of_sequence = [min(math.exp(sum(log.values())), 8.0) for log in logs]
    gradient = [[0.0] * VOCABULARY for _ in table]
    for group in set(groups):
        rows = [i for i, index in enumerate(groups) if index == group]
        norms = {
            i: sum((weights[i][t] * of_sequence[i] * (1 - math.exp(table[t][ids[i][t]]))) ** 2 for t in tokens[i])
            for i in rows
        }
        best = sum(norms[i] * rewards[i] for i in rows) / sum(norms.values())
        mean = sum(rewards[i] for i in rows) / len(rows)
        deviation = math.sqrt(sum((rewards[i] - mean) ** 2 for i in rows) / len(rows))
        for i in rows:
            for t in tokens[i]:
                of_token = min(math.exp(logs[i][t]), 2.0)
                coefficient = share * of_sequence[i] * (rewards[i] - best) / (deviation + 1e-6)
                coefficient += (1 - share) * of_token * batch.advantages[i, t].item()
                for v in range(VOCABULARY):
                    score = (v == ids[i][t]) - math.exp(table[t][v])
                    gradient[t][v] -= weights[i][t] * coefficient * score
    return torch.tensor(gradient, dtype=torch.float64)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.85, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_is_that_of_a_slow_oracle(share, seed):
    policy, batch = batch_of(seed)
    expected = slow_gradient(policy, batch, share)
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(gradient_of(objective(blend(share)), policy, batch), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("share", "part"),
    [(1.0, (rl.SequenceTruncatedIS(cap=8.0), SCORE)), (0.0, (rl.TokenTruncatedIS(cap=2.0), None))],
)
def test_at_its_ends_it_is_one_of_its_parts_to_the_bit(share, part):
    policy, batch = batch_of(4)
    found, expected = objective(blend(share)), objective(*part)
    assert torch.equal(gradient_of(found, policy, batch), gradient_of(expected, policy, batch))
    _, signals = found(policy, None, batch, 0)
    for name, value in expected(policy, None, batch, 0)[1].items():
        assert torch.equal(signals[name], value) if isinstance(value, torch.Tensor) else signals[name] == value


def test_no_gradient_flows_through_weights_and_baseline_and_nothing_broken_passes():
    policy, batch = batch_of(5)
    batch.behavior_logprobs[0, 1] = -math.inf  # its completion is rejected as a whole
    assert gradient_of(objective(blend(0.5)), policy, batch).isfinite().all()


def observed(sizes, num_samples=64, **settings):
    """Shares before each step of a callback that measures these effective sample sizes."""
    callback = rl.EstimatorBlend(**settings)
    module = pl.LightningModule()
    module.log = lambda name, value: None
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    shares = []
    for size in sizes:
        shares.append(callback.share)
        ratio = None if size is None else size / num_samples
        others = dict.fromkeys(("kl", "entropy", "reward", "staleness"))
        signals = StepSignals(num_samples=num_samples, num_broken=0, ess_ratio=ratio, **others)
        callback.reduce_signals = lambda optimizer, signals=signals: signals
        callback.on_signals_complete(trainer, module, optimizer)
    return [*shares, callback.share], callback


def test_the_share_follows_the_geometric_mean_of_the_eight_steps_before():
    drawn = random.Random(1)
    sizes = [drawn.uniform(20, 64) for _ in range(30)]
    shares, _ = observed(sizes, min_samples=32.0)
    assert shares[0] == 0
    for step in range(1, 31):
        before = sizes[max(0, step - 8) : step]
        mean = math.prod(before) ** (1 / len(before))
        assert shares[step] == pytest.approx(min(1, max(0, (mean / 32 - 1) / 0.5)), abs=1e-12)
    assert any(0 < share < 1 for share in shares)


def test_a_step_without_signals_changes_nothing_and_the_limits_are_those_of_the_setting():
    assert observed([60, None], min_samples=32.0)[0] == [0.0, 1.0, 1.0]
    assert observed([31.9], min_samples=32.0)[0][-1] == 0
    assert observed([48.1], min_samples=32.0)[0][-1] == 1
    assert observed([10], min_samples=8.0)[0][-1] == pytest.approx(0.5)
    assert observed([64, 64, 1], num_steps=1)[0] == [0, 1, 1, 0]


def test_without_a_setting_a_quarter_of_the_completions_must_be_effective():
    assert observed([15.9, 20.0, 24.1], num_steps=1)[0] == pytest.approx([0, 0, 0.5, 1])  # of 64
    assert observed([10.0], num_samples=32)[0] == pytest.approx([0, 0.5])


def test_its_state_is_what_the_share_needs():
    for settings in ({}, {"min_samples": 32.0}):
        _, callback = observed([20.0, 19.0] if not settings else [40.0, 41.0], **settings)
        other = rl.EstimatorBlend(**settings)
        other.load_state_dict(callback.state_dict())
        assert 1 > other.share == callback.share > 0


@pytest.mark.parametrize("setting", [dict(min_samples=0.0), dict(min_samples=math.nan), dict(num_steps=0)])
def test_settings_out_of_range_are_refused_by_name(setting):
    with pytest.raises(ValueError, match=rf"EstimatorBlend.{next(iter(setting))}"):
        rl.EstimatorBlend(**setting)


def test_a_blend_without_its_baseline_or_callback_is_refused():
    with pytest.raises(ValueError, match=r"BlendedIS needs model\.baseline=OptimalBaseline"):
        objective(rl.BlendedIS(), None)
    module = make_module(loss=rl.Reinforce(), proximal=rl.CurrentProximal(), correction=rl.BlendedIS(), baseline=SCORE)
    with pytest.raises(ValueError, match="BlendedIS needs EstimatorBlend"):
        fit(module, make_data(), 1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    return folder, *blended(others=[saver])


@pytest.mark.slow
def test_a_run_uses_both_and_goes_on_bit_for_bit_from_its_middle(whole):
    folder, callback, shares, module = whole
    assert shares[0] == 0
    assert sum(0 < share < 1 for share in shares[1 + LAG :]) >= 2, shares
    resumed, later, again = blended(ckpt_path=folder / "step=3.ckpt")
    assert later == shares[3:]
    assert resumed.state_dict() == callback.state_dict()
    assert torch.equal(parameters(again), parameters(module))


@pytest.mark.slow
def test_two_micro_batches_are_one(whole):
    _, _, shares, module = whole
    _, found, again = blended(micro_batches_per_step=2)
    assert found == pytest.approx(shares, abs=1e-4)
    torch.testing.assert_close(parameters(again), parameters(module), rtol=0, atol=1e-5)
