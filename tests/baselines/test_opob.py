"""The off-policy optimal baseline: its formula, its invariances, and the update it leads to."""

import lightning.pytorch as pl
import pytest
import torch
from flow import fit, make_data, make_module, parameters
from groups import collate
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.plugins import MixedPrecision

from lit_async_rl.baselines.optimal import Flavour, Norms, OptimalBaseline, optimal_advantages, optimal_baseline
from lit_async_rl.corrections import SequenceTruncatedIS
from lit_async_rl.corrections.weights import CurrentProximal
from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.losses import PPOClip, Reinforce
from lit_async_rl.losses.aggregation import SequenceMean, TokenMean
from lit_async_rl.rules import of_norms, refuse

floats = st.floats(-3, 3, width=32)
samples = st.lists(st.tuples(st.floats(-5, 5, width=32), floats), min_size=2, max_size=8)


@given(samples)
def test_no_other_constant_has_a_smaller_second_moment(pairs):
    log_weights, rewards = torch.tensor(pairs).double().unbind(1)
    best = optimal_baseline(log_weights, rewards)

    def moment(b):
        return (log_weights.exp() * (rewards - b) ** 2).sum()

    for other in (best + 0.1, best - 0.1, rewards.mean()):
        assert moment(best) <= moment(other) + 1e-9


@given(samples, st.floats(-10, 10, width=32))
def test_a_shift_of_all_rewards_changes_nothing(pairs, shift):
    log_weights, rewards = torch.tensor(pairs).double().unbind(1)
    index = torch.zeros(len(rewards), dtype=torch.long)
    plain = optimal_advantages(log_weights, rewards, index, divide_by_std=False)
    torch.testing.assert_close(optimal_advantages(log_weights, rewards + shift, index, False), plain, atol=1e-6, rtol=0)


def test_equal_rewards_and_single_rollouts_and_padding_give_exactly_zero():
    rewards, index = torch.tensor([0.3, 0.3, 0.7, 5.0]), torch.tensor([0, 0, 1, -1])
    assert not optimal_advantages(torch.randn(4), rewards, index).any()


def test_rewards_one_rounding_apart_are_no_signal():
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.1])
    rewards[3] = torch.nextafter(rewards[0], torch.tensor(1.0))
    index = torch.zeros(4, dtype=torch.long)
    assert optimal_advantages(torch.zeros(4), rewards, index).abs().max() < 0.05


@pytest.mark.parametrize("broken", [float("nan"), -torch.inf, 80.0, -80.0])
def test_broken_and_heavy_weights_leave_no_nan(broken):
    rewards, index = torch.tensor([0.0, 1.0, 1.0]), torch.zeros(3, dtype=torch.long)
    for log_weights in ([broken, 0.0, 1.0], [broken] * 3):
        assert optimal_advantages(torch.tensor(log_weights), rewards, index).isfinite().all()


def settings(**baseline):
    loss = dict(loss=Reinforce(), proximal=CurrentProximal(), correction=SequenceTruncatedIS(cap=8.0))
    return make_module(**loss, baseline=OptimalBaseline(**baseline), learning_rate=3e-4)


def reward(prompt, completion):
    """Differs within nearly every group."""
    return sum(a == b for a, b in zip(completion, prompt.answer, strict=False)) / 8


def run(module, micro_batches=1, **changes):
    data = make_data(
        reward=reward,
        max_staleness=0,
        micro_batches_per_step=micro_batches,
        aggregation=SequenceMean(),
        **changes,
    )
    fit(module, data, 3)
    return parameters(module)


@pytest.mark.slow
@pytest.mark.parametrize("flavour", Flavour)
def test_ghost_and_per_trajectory_norms_make_the_same_update(flavour):
    start = parameters(make_module()).clone()
    ghost = run(settings(norms=Norms.GHOST, flavour=flavour))
    exact = run(settings(norms=Norms.PER_TRAJECTORY, flavour=flavour))
    assert (ghost - exact).norm() <= 1e-3 * (exact - start).norm()


@pytest.mark.slow
def test_the_split_into_micro_batches_does_not_matter():
    start = parameters(make_module()).clone()
    whole, split = run(settings()), run(settings(), micro_batches=3)
    assert (whole - split).norm() <= 1e-3 * (whole - start).norm()


def step_of(data):
    """The first micro-batch of a run."""
    groups = []

    class Keep(pl.Callback):
        def on_train_batch_end(self, *_):
            groups.extend(data.last_step_groups)

    fit(make_module(), data, 1, [Keep()])
    (batch,) = collate(groups, 1)
    return batch


def test_the_gradient_is_the_explicit_sum_over_trajectories():
    """sum_i (R_i - b) g_i / std from single gradients, b from their own norms, with accumulators as in the paper."""
    data = make_data(reward=reward, max_staleness=0, groups_per_step=2)
    batch = step_of(data)
    assert isinstance(data.aggregation, TokenMean)
    module = settings()
    module.trainer = pl.Trainer(accelerator="cpu", logger=False)
    module.training_step(batch, 0).backward()
    actual = torch.cat([p.grad.flatten() for p in module.policy.parameters()])
    logprobs = module.policy(batch.input_ids, batch.loss_mask).logprobs
    log_ratio = (logprobs.detach() - batch.behavior_logprobs).where(batch.loss_mask, torch.zeros(())).sum(1)
    weight = log_ratio.exp().clamp(max=8.0)
    expected = torch.zeros_like(actual)
    for index in batch.group_index.unique():
        rows = (batch.group_index == index).nonzero()[:, 0]
        rewards = batch.rewards[rows]
        if rewards.max() == rewards.min():
            continue
        with_reward, alone, norms = torch.zeros_like(actual), torch.zeros_like(actual), []
        for row, r in zip(rows, rewards, strict=True):
            total = -(logprobs[row] * batch.token_weights[row] * weight[row]).sum()
            g = torch.cat(
                [x.flatten() for x in torch.autograd.grad(total, module.policy.parameters(), retain_graph=True)]
            )
            norms.append(g.square().sum())
            with_reward += r * g
            alone += g
        norms = torch.stack(norms)
        expected += (with_reward - (norms * rewards).sum() / norms.sum() * alone) / rewards.std(correction=0)
    assert (actual - expected).norm() <= 1e-4 * expected.norm()


def gradient(batch, **changes):
    """Advantages and the gradient of the loss of one micro-batch."""
    loss = dict(loss=Reinforce(), proximal=CurrentProximal(), correction=SequenceTruncatedIS(cap=8.0))
    module = make_module(**loss, **changes)
    module.trainer = pl.Trainer(accelerator="cpu", logger=False)
    module.training_step(batch, 0).backward()
    return module.stabilizer_signals["advantages"], torch.cat([p.grad.flatten() for p in module.policy.parameters()])


@pytest.fixture(scope="module")
def truncated():
    """Four tokens to choose from, and heads of eight, at a temperature where others have much probability."""
    sampling = SamplingParams(max_tokens=10, temperature=3.0, top_k=4, head=8)
    batch = step_of(make_data(reward=reward, max_staleness=0, groups_per_step=2, sampling=sampling))
    batch.temperature = 3.0
    return batch


@pytest.mark.parametrize("flavour", Flavour)
@pytest.mark.parametrize("chunk_tokens", [4096, 20])
def test_a_truncated_support_is_part_of_the_gradient_and_its_norms(truncated, chunk_tokens, flavour):
    """The ghost's gradient was that of the whole softmax, without the term -grad log sum_S pi, in a single chunk."""
    possible = truncated.head_logprobs[truncated.loss_mask] > -torch.inf
    assert possible.sum(-1).eq(4).all()
    found, expected = (
        gradient(truncated, baseline=OptimalBaseline(norms, flavour), logprob_chunk_tokens=chunk_tokens)
        for norms in (Norms.GHOST, Norms.PER_TRAJECTORY)
    )
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


@pytest.mark.parametrize("flavour", Flavour)
def test_the_credit_of_a_row_counts_once_whatever_the_norms(truncated, flavour):
    """The ghost's gradient had its square: a credit of 0.5 made it a quarter."""
    of_rows = torch.linspace(-0.5, 2.0, len(truncated))
    of_rows[1] = 0.0
    batch = truncated.replace(credits=of_rows[:, None].expand_as(truncated.advantages).clone())
    found, expected = (
        gradient(batch, baseline=OptimalBaseline(norms, flavour)) for norms in (Norms.GHOST, Norms.PER_TRAJECTORY)
    )
    for one, other in zip(found, expected, strict=True):
        assert other.any()
        assert (one - other).norm() <= 1e-5 * other.norm()


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ValueError, match=r"OptimalBaseline.*PPOClip.*linear"):
        make_module(loss=PPOClip(), baseline=OptimalBaseline())


@pytest.mark.parametrize("norms", [Norms.GHOST, Norms.PER_TRAJECTORY])
def test_norms_of_gradients_that_vanish_in_float16_are_refused(norms):
    """The scaler has no part in them: ghost updates had a cosine of 0.13 with those of float32."""
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    said = rf"model\.baseline\.norms={norms.name} with trainer\.precision=16-mixed.*norms=SCORE"
    with pytest.raises(ValueError, match=said):
        fit(settings(norms=norms), make_data(), 1, plugins=[precision])
    refuse(of_norms(OptimalBaseline(Norms.SCORE), "16-mixed"))
    refuse(of_norms(OptimalBaseline(norms), "bf16-mixed"))
    refuse(of_norms(None, "16-mixed"))


def test_weights_in_bfloat16_get_the_update_of_float32():
    """The ghost's products took activations and weights of rows, which are float32, to be of one dtype."""
    batch = step_of(make_data(reward=reward, max_staleness=0, groups_per_step=2))
    found = []
    for dtype in ("float32", "bfloat16"):
        loss = dict(loss=Reinforce(), baseline=OptimalBaseline(Norms.GHOST))
        module = make_module(dtype=dtype, **loss)
        module.trainer = pl.Trainer(accelerator="cpu", logger=False)
        module.training_step(batch, 0).backward()
        found.append(torch.cat([p.grad.flatten().float() for p in module.policy.parameters()]))
    assert torch.cosine_similarity(*found, dim=0) > 0.98
