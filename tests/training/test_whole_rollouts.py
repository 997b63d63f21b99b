"""Rollouts of several rows: every objective weighs whole rollouts, against loops over their tokens."""

import math
import random
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from agent_runs import MODEL, groups, lm
from flow import make_module
from slow_corrections import masked_is, of_mean, of_sequence, rejection, truncated_is
from slow_references import Batch, opsm, reinforce
from slow_sequence_references import gspo, gspo_token, topr, vespo
from slow_trajectory_references import oapl

from lit_async_rl.advantages.group import GroupMeanStd
from lit_async_rl.baselines.optimal import Norms, OptimalBaseline
from lit_async_rl.callbacks.monitors.step_monitor import ImportanceMonitor, StalenessMonitor
from lit_async_rl.corrections.weights import (
    BehaviorProximal,
    CurrentProximal,
    GeometricMaskedIS,
    SequenceRejection,
    SequenceTruncatedIS,
)
from lit_async_rl.data.collate import StreamedStep, collate_step
from lit_async_rl.importance import effective_sample_size
from lit_async_rl.losses import GSPO, OAPL, OPSM, TOPR, VESPO, GSPOToken, MinPRO, PPOClip, Reinforce, ScoreCentering
from lit_async_rl.losses.aggregation import TokenMean
from lit_async_rl.losses.reinforce import ImportanceWeight
from lit_async_rl.models import packing as packing_module
from lit_async_rl.models.lora import LoRA
from lit_async_rl.models.packing import PrefixTreePacking
from lit_async_rl.sampler_records import SamplerHead
from lit_async_rl.stabilizers.signals import SignalCollector


@pytest.fixture(autouse=True)
def _always_split(monkeypatch):
    """These trees are too small for attention that is split at branches."""
    monkeypatch.setattr(packing_module, "split_is_cheaper", lambda lm, spans, shape: True)


CASES = [
    (GSPO(0.01, 0.02), None, gspo, None),
    (GSPOToken(0.01, 0.02), None, gspo_token, None),
    (TOPR(), None, topr, None),
    (VESPO(), None, vespo, None),
    (OPSM(delta=0.01), None, opsm, None),
    (OAPL(), None, oapl, None),
    (Reinforce(), SequenceTruncatedIS(1.1), reinforce, truncated_is(of_sequence)),
    (Reinforce(), GeometricMaskedIS(0.98, 1.02), reinforce, masked_is(of_mean)),
    (Reinforce(), SequenceRejection(0.9, 1.1), reinforce, rejection(of_sequence)),
]


def row_logprobs(model, group, row):
    """Log-probabilities of a row's tokens by an ordinary forward pass."""
    prompt = group.prompt_ids if row.prompt_ids is None else row.prompt_ids
    ids = torch.tensor([[*prompt, *row.token_ids]])
    logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return logprobs[len(prompt) - 1 :]


@pytest.fixture(scope="module")
def found():
    """Groups of rollouts with branches, sampled by a policy that is close to the present one."""
    chance = random.Random(7)
    model = lm().double()

    def sampled(group, row):
        with torch.no_grad():
            values = row_logprobs(model, group, row).tolist()
        drifted = zip(values, row.loss_mask, strict=True)
        return replace(row, logprobs=tuple(value + chance.gauss(0, 0.1) if on else 0.0 for value, on in drifted))

    return [
        replace(
            group,
            rollouts=tuple(
                replace(sampled(group, one), branches=tuple(sampled(group, row) for row in one.branches))
                for one in group.rollouts
            ),
        )
        for group in groups(seed=5, num_groups=2)
    ]


def collated(found, module, num_micro_batches=2, **settings):
    batches = collate_step(
        found,
        advantage=GroupMeanStd(),
        num_micro_batches=num_micro_batches,
        pad_token_id=0,
        temperature=1.0,
        keep_groups_whole=module.wants_whole_groups,
        needs_single_rows=module.objective.needs_single_rows,
        **(dict(aggregation=TokenMean()) | settings),
    )
    for batch in batches:
        for name in ("behavior_logprobs", "advantages", "token_weights", "rewards"):
            setattr(batch, name, getattr(batch, name).double())
    return batches


def make(loss, correction=None, **settings):
    proximal = BehaviorProximal() if correction is None else CurrentProximal()
    module = make_module(model=MODEL, loss=loss, correction=correction, proximal=proximal, **settings)
    module.configure_model()
    return module.double()


def gradient(found, module, **settings):
    module.zero_grad()
    for batch in collated(found, module, **settings):
        module.objective(module.policy, None, batch, 0)[0].backward()
    return torch.cat([p.grad.flatten() for p in module.policy.causal_lm.parameters() if p.grad is not None])


def by_rollout(found, model):
    """Of each rollout its tokens that train: log-probability, that of the sampler, credit, in whichever row."""
    for group in found:
        for rollout in group.rollouts:
            tokens = []
            for row in rollout.rows:
                values = zip(row_logprobs(model, group, row), row.logprobs, row.loss_mask, strict=True)
                tokens += [(value, sampled, row.credit) for value, sampled, on in values if on]
            yield group, rollout, tokens


def slow_advantages(group):
    rewards = torch.tensor([rollout.reward for rollout in group.rollouts], dtype=torch.float64)
    return dict(zip(group.rollouts, (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6), strict=True))


@pytest.mark.parametrize(("loss", "correction", "reference", "weigh"), CASES, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("packing", [None, PrefixTreePacking()], ids=["rows", "tree"])
def test_a_rollout_of_several_rows_is_weighed_as_one(loss, correction, reference, weigh, packing, found):
    module = make(loss, correction, packing=packing)
    fast = gradient(found, module, shares_prefixes=packing is not None)
    module.zero_grad()
    rollouts = list(by_rollout(found, module.policy.causal_lm))
    logprobs = [[value for value, _, _ in tokens] for *_, tokens in rollouts]
    behavior = [[sampled for _, sampled, _ in tokens] for *_, tokens in rollouts]
    values = [[value.item() for value in row] for row in logprobs]
    mask = [[True] * len(row) for row in values]
    log_ratio = [[v - b for v, b in zip(*pair, strict=True)] for pair in zip(values, behavior, strict=True)]
    weights = [[1.0] * len(row) for row in values] if weigh is None else weigh(correction, log_ratio, mask)[0]
    assert weigh is None or 0 < len({weight for row in weights for weight in row}) < sum(map(len, weights))
    total = sum(map(len, values))
    batch = Batch(
        logprobs=values,
        proximal=behavior if correction is None else values,
        behavior=behavior,
        advantages=[
            [float(slow_advantages(group)[one]) * credit for _, _, credit in row] for group, one, row in rollouts
        ],
        cotangents=[[weight / total for weight in row] for row in weights],
        mask=mask,
        group_index=[group.index for group, *_ in rollouts],
        entropy=[],
        head=[],
    )
    _, slopes = reference(batch, loss)
    pairs = zip(slopes, logprobs, strict=True)
    sum(slope * value for row in pairs for slope, value in zip(*row, strict=True)).backward()
    slow = torch.cat([p.grad.flatten() for p in module.policy.causal_lm.parameters()])
    assert slow.norm() > 1e-3
    assert (fast - slow).norm() <= 1e-5 * slow.norm()


@pytest.mark.parametrize("norms", [Norms.SCORE, Norms.PER_TRAJECTORY])
@pytest.mark.parametrize("packing", [None, PrefixTreePacking()], ids=["rows", "tree"])
def test_the_optimal_baseline_is_of_whole_rollouts(norms, packing, found):
    correction = SequenceTruncatedIS(1.1)
    module = make(Reinforce(), correction, baseline=OptimalBaseline(norms), packing=packing)
    fast = gradient(found, module, shares_prefixes=packing is not None)
    module.zero_grad()
    model = module.policy.causal_lm
    parameters = list(model.parameters())
    rollouts = list(by_rollout(found, model))
    total = sum(len(tokens) for *_, tokens in rollouts)
    loss = 0.0
    for group in found:
        of_group = [(rollout, tokens) for owner, rollout, tokens in rollouts if owner is group]
        squares = []
        estimates = []
        for _, tokens in of_group:
            ratio = math.exp(sum(value.item() - sampled for value, sampled, _ in tokens))
            weight = min(ratio, correction.cap) / total
            estimate = sum(weight * credit * value for value, _, credit in tokens)
            estimates.append(estimate)
            if norms is Norms.SCORE:
                squares.append(sum((weight * credit * (1 - math.exp(v.item()))) ** 2 for v, _, credit in tokens))
            else:
                grads = torch.autograd.grad(estimate, parameters, retain_graph=True, allow_unused=True)
                squares.append(float(sum(grad.square().sum() for grad in grads if grad is not None)))
        rewards = [rollout.reward for rollout, _ in of_group]
        baseline = sum(w * r for w, r in zip(squares, rewards, strict=True)) / sum(squares)
        std = torch.tensor(rewards).std(correction=0).item() + 1e-6
        loss = loss - sum((r - baseline) / std * e for r, e in zip(rewards, estimates, strict=True))
    loss.backward()
    slow = torch.cat([p.grad.flatten() for p in parameters])
    assert slow.norm() > 1e-3
    assert (fast - slow).norm() <= 1e-4 * slow.norm()


def test_the_number_of_micro_batches_changes_no_gradient(found):
    baseline = OptimalBaseline(Norms.SCORE)
    module = make(Reinforce(), SequenceTruncatedIS(1.1), baseline=baseline, packing=PrefixTreePacking())
    one, *others = (gradient(found, module, shares_prefixes=True, num_micro_batches=n) for n in (1, 2, 3))
    for other in others:
        assert (other - one).norm() <= 1e-6 * one.norm()


def with_heads(found):
    """The same groups with recorded distributions in each row."""
    generator = torch.Generator().manual_seed(0)

    def with_head(row):
        shape = len(row.token_ids), 3
        ids = torch.randint(0, 90, shape, generator=generator, dtype=torch.int32)
        return replace(row, head=SamplerHead(torch.ones(shape[0]), ids, -2 - torch.rand(shape, generator=generator)))

    return [
        replace(
            group,
            rollouts=tuple(
                replace(with_head(one), branches=tuple(map(with_head, one.branches))) for one in group.rollouts
            ),
        )
        for group in found
    ]


@pytest.mark.parametrize(
    "loss", [PPOClip(), ScoreCentering(ImportanceWeight.TRUNCATED)], ids=lambda one: type(one).__name__
)
def test_losses_of_tokens_do_not_depend_on_rollouts(loss, found):
    module = make(loss)
    (batch,) = collated(with_heads(found), module, num_micro_batches=1)
    assert batch.rollout is not None
    grads = []
    for one in (batch, batch.replace(rollout=None)):
        module.zero_grad()
        value, signals = module.objective(module.policy, None, one, 0)
        value.backward()
        grads.append(torch.cat([p.grad.flatten() for p in module.policy.causal_lm.parameters()]))
        assert signals["log_ratio"].shape == batch.loss_mask.shape
    assert grads[1].norm() > 1e-3
    assert (grads[0] - grads[1]).norm() <= 1e-6 * grads[1].norm()


@pytest.mark.parametrize(
    "settings",
    [
        dict(loss=ScoreCentering(ImportanceWeight.TRUNCATED)),
        dict(loss=GSPO(), lora=LoRA(rank=2)),
        dict(loss=GSPO(), gradient_checkpointing=True),
        dict(loss=PPOClip(), entropy_coefficient=0.1),
    ],
    ids=["score centering", "LoRA", "checkpointing", "entropy"],
)
def test_branches_on_trees_have_the_gradient_of_rows(settings, found):
    recorded = with_heads(found)
    grads = []
    for packing in (None, PrefixTreePacking()):
        torch.manual_seed(0)
        module = make(packing=packing, **settings)
        module.train()  # transformers checkpoints in this mode only
        grads.append(gradient(recorded, module, shares_prefixes=packing is not None))
    assert grads[0].norm() > 1e-3
    assert (grads[1] - grads[0]).norm() <= 1e-6 * grads[0].norm()


def test_a_streamed_step_of_trees_has_the_gradient_of_the_whole_step(found):
    module = make(GSPO(), packing=PrefixTreePacking())
    expected = gradient(found, make(GSPO()))
    module.zero_grad()
    step = StreamedStep(TokenMean(), num_groups=2, num_parts=2)
    for group in reversed(found):
        for batch in collated(
            [group], module, num_micro_batches=1, shares_prefixes=True, aggregation=step.add([group])
        ):
            module.objective(module.policy, None, batch, 0)[0].backward()
    streamed = torch.cat([p.grad.flatten() for p in module.policy.causal_lm.parameters()]) * step.gradient_scale
    assert step.is_done
    assert (streamed - expected).norm() <= 1e-6 * expected.norm()


def test_effective_samples_and_versions_are_of_rollouts(found):

    def aged(rollout, version):
        return replace(rollout, versions=(version,) * len(rollout.versions))

    old = [replace(group, rollouts=tuple(aged(r, n % 2) for n, r in enumerate(group.rollouts))) for group in found]
    module = make(GSPO())
    (batch,) = collated(old, module, num_micro_batches=1)
    assert batch.rollout is not None
    _, module.stabilizer_signals = module.objective(module.policy, None, batch, 3)
    collector = SignalCollector()
    collector.add(module.stabilizer_signals)
    step = collector.reduce("cpu")
    rollouts = list(by_rollout(old, module.policy.causal_lm))
    weights = torch.tensor([sum(value.item() - sampled for value, sampled, _ in tokens) for *_, tokens in rollouts])
    expected = float(effective_sample_size(weights)) / len(rollouts)
    assert step.num_samples == len(rollouts)
    assert step.ess_ratio == pytest.approx(expected, rel=1e-5)
    trainer = pl.Trainer(accelerator="cpu", logger=False)
    importance = ImportanceMonitor()
    importance.update(trainer, module, batch)
    assert float(importance.compute(trainer, module)["importance/ess_ratio"]) == pytest.approx(expected, rel=1e-5)
    staleness = StalenessMonitor()
    staleness.update(trainer, module, batch)
    logged = staleness.compute(trainer, module)
    trained = [
        [v for row in rollout.rows for v, on in zip(row.versions, row.loss_mask, strict=True) if on]
        for _, rollout, _ in rollouts
    ]
    mixed = sum(max(versions) > min(versions) for versions in trained) / len(trained)
    assert 0 < mixed < 1
    assert float(logged["sample/mixed_version_share"]) == pytest.approx(mixed)
    lag = sum(3 - max(versions) for versions in trained) / len(trained)
    assert float(logged["sample/inter_rollout_lag"]) == pytest.approx(lag)


def test_a_loss_of_what_comes_before_a_token_refuses_branches(found):
    module = make(MinPRO())
    with pytest.raises(ValueError, match=r"a conversation of this agent has branches.*model\.loss=MinPRO"):
        collated(found, module)
