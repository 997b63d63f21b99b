"""Samples with several rows: their gradient is that of a slow oracle, and whatever keeps groups keeps their rows."""

import random
from dataclasses import replace

import pyarrow as pa
import pytest
import torch
from agent_runs import MODEL, branch, groups
from flow import make_module

from lit_async_rl.advantages.group import GiGPO, GroupMeanStd, LengthWeighted, TurnReturns
from lit_async_rl.baselines.optimal import OptimalBaseline
from lit_async_rl.corrections.weights import CurrentProximal, TokenTruncatedIS
from lit_async_rl.data.collate import collate_step
from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.engines.completion_check import find_fault
from lit_async_rl.errors import InvariantError, StalenessError
from lit_async_rl.losses import Reinforce
from lit_async_rl.losses.aggregation import FixedLength, PromptMean, SequenceMean, TokenBudget, TokenMean
from lit_async_rl.models.packing import PrefixTreePacking
from lit_async_rl.replay.buffer import ReplayBuffer
from lit_async_rl.replay.tape import SCHEMA, from_rows, to_row
from lit_async_rl.rollouts.group_book import GroupEntry, GroupState, pack_groups, unpack_groups
from lit_async_rl.rollouts.intake import OverlongFilter
from lit_async_rl.sampler_records import ExpertChoices, SamplerHead
from lit_async_rl.scheduling.admission import check_bound
from lit_async_rl.types import Rollout, RolloutGroup


def collated(found, **changes):
    settings = dict(advantage=GroupMeanStd(), aggregation=TokenMean(), num_micro_batches=2)
    return collate_step(found, pad_token_id=0, temperature=1.0, **(settings | changes))


def slow_gradient(lm, found, weight_of):
    """Row by row, unpadded: the sum of weight x credit x advantage x log-probability of each token that trains."""
    total = 0.0
    num_rollouts = sum(len(group.rollouts) for group in found)
    for group in found:
        rewards = torch.tensor([rollout.reward for rollout in group.rollouts], dtype=torch.float64)
        advantages = (rewards - rewards.mean()) / (rewards.std(unbiased=False) + 1e-6)
        for rollout, advantage in zip(group.rollouts, advantages.tolist(), strict=True):
            length = sum(sum(row.loss_mask) for row in rollout.rows)
            for row in rollout.rows:
                prompt = group.prompt_ids if row.prompt_ids is None else row.prompt_ids
                ids = torch.tensor([[*prompt, *row.token_ids]])
                logprobs = lm(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
                own = logprobs[len(prompt) - 1 :][torch.tensor(row.loss_mask)]
                total = total - weight_of(found, group, length, num_rollouts) * row.credit * advantage * own.sum()
    total.backward()
    return torch.cat([parameter.grad.flatten() for parameter in lm.parameters()])


def all_tokens(found):
    return sum(sum(row.loss_mask) for group in found for rollout in group.rollouts for row in rollout.rows)


WEIGHTS = {
    TokenMean(): lambda found, group, length, number: 1 / all_tokens(found),
    SequenceMean(): lambda found, group, length, number: 1 / (number * length),
    PromptMean(): lambda found, group, length, number: 1 / (len(found) * all_tokens([group])),
    FixedLength(max_tokens=7): lambda found, group, length, number: 1 / (number * 7),
}


@pytest.mark.parametrize("aggregation", WEIGHTS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("whole", [False, True])
def test_the_gradient_of_branches_is_that_of_a_slow_oracle(aggregation, whole):
    found = groups()
    assert sum(len(rollout.branches) for group in found for rollout in group.rollouts) > 5
    module = make_module(model=MODEL, loss=Reinforce())
    module.configure_model()
    policy = module.policy.double()
    for batch in collated(found, aggregation=aggregation, num_micro_batches=3, keep_groups_whole=whole):
        batch.behavior_logprobs = batch.behavior_logprobs.double()
        loss, _ = module.objective(policy, None, batch, 0)
        loss.backward()
    fast = torch.cat([parameter.grad.flatten() for parameter in policy.causal_lm.parameters()])
    policy.zero_grad()
    slow = slow_gradient(policy.causal_lm, found, WEIGHTS[aggregation])
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-7)
    assert slow.abs().max() > 1e-3


def test_a_rollout_with_branches_counts_once_in_rewards_and_lengths():
    found = groups()
    batches = collated(found)
    rewards = torch.cat([batch.rewards for batch in batches])
    assert sorted(rewards[~rewards.isnan()].tolist()) == sorted(r.reward for g in found for r in g.rollouts)
    assert len(rewards) == sum(len(r.rows) for g in found for r in g.rollouts)
    lengths = torch.cat([batch.lengths for batch in batches])[~rewards.isnan()]
    assert sorted(lengths.tolist()) == sorted(r.num_policy_tokens for g in found for r in g.rollouts)


def test_the_length_of_a_rollout_is_that_of_all_rows():
    (group,) = groups(num_groups=1)
    lengths = [sum(sum(row.loss_mask) for row in rollout.rows) for rollout in group.rollouts]
    values = LengthWeighted().per_token([group])
    expected = LengthWeighted()([[r.reward for r in group.rollouts]], [lengths])[0]
    assert [row[0] for row in values[0]] == expected


def test_an_objective_that_needs_single_rows_refuses_branches_by_its_name():
    parts = dict(loss=Reinforce(), proximal=CurrentProximal(), correction=TokenTruncatedIS())
    needs = make_module(model=MODEL, baseline=OptimalBaseline(), **parts).objective.needs_single_rows
    with pytest.raises(ValueError, match=r"a conversation of this agent has branches.*norms=GHOST: use SCORE"):
        collated(groups(), needs_single_rows=needs)
    without = [replace(g, rollouts=tuple(replace(r, branches=()) for r in g.rollouts)) for g in groups()]
    assert collated(without, needs_single_rows=needs)


def slow_turn_advantages(group, gamma, omega):
    """By the number of each row's rollout, of the row and of its token; `omega` of GiGPO, None for returns of turns.

    Turns are compared by their calls, whichever row they train in.
    """
    turns = []  # rollout, row, begin, end, call, state, reward
    for n, rollout in enumerate(group.rollouts):
        for k, row in enumerate(rollout.rows):
            begin = 0
            for turn in row.turns:
                turns.append((n, k, begin, turn.end, turn.call, turn.state, turn.reward))
                begin = turn.end
    calls = {n: sorted({turn[4] for turn in turns if turn[0] == n}) for n in range(len(group.rollouts))}
    step = [calls[turn[0]].index(turn[4]) for turn in turns]
    led_to = [
        sum(
            gamma ** (step[j] - step[i]) * other[6]
            for j, other in enumerate(turns)
            if other[0] == turn[0] and step[j] >= step[i]
        )
        for i, turn in enumerate(turns)
    ]
    values = {}
    rewards = torch.tensor([rollout.reward for rollout in group.rollouts], dtype=torch.float64)
    for i, (n, k, begin, end, _, state, _) in enumerate(turns):
        same = [
            led_to[j] for j, other in enumerate(turns) if (step[j] == step[i] if omega is None else other[5] == state)
        ]
        value = led_to[i] - sum(same) / len(same)
        if omega is not None:
            value = float(rewards[n] - rewards.mean()) + omega * value
        values |= {(n, k, place): value for place in range(begin, end)}
    return values


@pytest.mark.parametrize(
    ("advantage", "gamma", "omega"),
    [(TurnReturns(gamma=0.5), 0.5, None), (GiGPO(omega=0.7, gamma=0.9, standardize=False), 0.9, 0.7)],
    ids=["TurnReturns", "GiGPO"],
)
@pytest.mark.parametrize("packing", [None, PrefixTreePacking()], ids=["rows", "tree"])
def test_advantages_of_turns_reach_each_turn_in_whichever_row(advantage, gamma, omega, packing):
    found = groups()
    expected = {
        (group.index, place): value
        for group in found
        for place, value in slow_turn_advantages(group, gamma, omega).items()
    }
    assert len(set(expected.values())) > 8
    module = make_module(model=MODEL, loss=Reinforce(), packing=packing)
    module.configure_model()
    policy = module.policy.double()
    for batch in collated(found, advantage=advantage, shares_prefixes=packing is not None):
        batch.behavior_logprobs = batch.behavior_logprobs.double()
        module.objective(policy, None, batch, 0)[0].backward()
    fast = torch.cat([parameter.grad.flatten() for parameter in policy.causal_lm.parameters()])
    policy.zero_grad()
    loss = 0.0
    for group in found:
        for n, rollout in enumerate(group.rollouts):
            for k, row in enumerate(rollout.rows):
                prompt = group.prompt_ids if row.prompt_ids is None else row.prompt_ids
                ids = torch.tensor([[*prompt, *row.token_ids]])
                logprobs = policy.causal_lm(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
                for place, on in enumerate(row.loss_mask):
                    if on:
                        value = row.credit * expected[group.index, (n, k, place)]
                        loss = loss - value * logprobs[len(prompt) - 1 + place] / all_tokens(found)
    loss.backward()
    slow = torch.cat([parameter.grad.flatten() for parameter in policy.causal_lm.parameters()])
    assert slow.norm() > 1e-3
    assert (fast - slow).norm() <= 1e-5 * slow.norm()


def test_a_reward_is_that_of_the_turn_that_was_sampled_last():
    (group,) = groups(num_groups=1)
    for rollout in group.rollouts:
        turns = [turn for row in rollout.rows for turn in row.turns]
        assert sum(turn.reward for turn in turns) == rollout.reward
        last = max(turns, key=lambda turn: turn.call)
        more = rollout.add_reward(0.5, part="extra")
        assert max((t for row in more.rows for t in row.turns), key=lambda t: t.call).reward == last.reward + 0.5
        assert more.reward == rollout.reward + 0.5


def test_advantages_of_turns_need_the_turns_of_branches():
    (group,) = groups(num_groups=1)
    without = [replace(r, branches=tuple(replace(b, turns=None) for b in r.branches)) for r in group.rollouts]
    with pytest.raises(ValueError, match=r"TurnReturns needs the turns of each branch.*GroupMeanStd"):
        collated([replace(group, rollouts=tuple(without))], advantage=TurnReturns())
    alone = replace(group, rollouts=tuple(replace(r, turns=None) for r in without))
    batches = collated([alone], advantage=TurnReturns(standardize=True))
    for batch, expected in zip(batches, collated([alone], advantage=GroupMeanStd()), strict=True):
        assert torch.equal(batch.advantages, expected.advantages)  # without any, a rollout is one turn


def test_an_advantage_per_token_covers_the_tokens_of_branches():
    class OfMainRow(GroupMeanStd):
        def per_token(self, groups):
            return [[[0.0] * len(rollout.token_ids) for rollout in group.rollouts] for group in groups]

    with pytest.raises(
        ValueError, match=r"OfMainRow: per_token must return one advantage for each token of a rollout and its branches"
    ):
        collated(groups(), advantage=OfMainRow())


def test_a_budget_of_tokens_and_a_mask_of_cut_rollouts_reach_the_branches():
    found = groups()
    total = all_tokens(found)
    for budget in (1, total // 3, total - 1):
        chosen = TokenBudget(num_tokens=budget, fill=True).select(found)
        assert all_tokens(chosen) == budget
    (group,) = groups(num_groups=1)
    cut = replace(group, rollouts=tuple(replace(r, finish_reason="length") for r in group.rollouts))
    masked = OverlongFilter()(cut)
    assert all_tokens([masked]) == 0
    assert masked.rollouts[0].num_policy_tokens == sum(len(row.token_ids) for row in masked.rollouts[0].rows)


def test_the_bound_holds_for_the_tokens_of_branches():
    (group,) = groups(num_groups=1)
    old = replace(group.rollouts[0], branches=(branch(random.Random(0), versions=(3,)),))
    fresh = [replace(r, versions=(5,) * len(r.versions), branches=()) for r in group.rollouts[1:]]
    first = replace(old, versions=(5,) * len(old.versions))
    check_bound([replace(group, rollouts=(first, *fresh), max_staleness=2)], 5)
    with pytest.raises(StalenessError, match="version 3"):
        check_bound([replace(group, rollouts=(first, *fresh), max_staleness=1)], 5)


def recorded(found):
    """The same groups with heads and experts in each row."""
    generator = torch.Generator().manual_seed(0)

    def with_records(row, prompt_ids):
        length = len(row.token_ids)
        head = SamplerHead(
            torch.rand(length, generator=generator),
            torch.randint(0, 90, (length, 3), generator=generator, dtype=torch.int32),
            -torch.rand(length, 3, generator=generator),
        )
        read = len(prompt_ids) + length - 1
        experts = ExpertChoices(torch.randint(0, 4, (read, 2, 2), generator=generator, dtype=torch.int16))
        return replace(row, head=head, experts=experts)

    def of_rollout(group, rollout):
        own = with_records(rollout, group.prompt_ids if rollout.prompt_ids is None else rollout.prompt_ids)
        return replace(own, branches=tuple(with_records(row, row.prompt_ids) for row in rollout.branches))

    return [replace(g, rollouts=tuple(of_rollout(g, r) for r in g.rollouts)) for g in found]


@pytest.mark.parametrize("with_records", [False, True])
def test_a_checkpoint_keeps_the_rows_to_the_bit(tmp_path, with_records):
    found = recorded(groups()) if with_records else groups()
    entries = [
        GroupEntry(
            index=group.index,
            position=group.index,
            prompt=group.prompt,
            prompt_ids=group.prompt_ids,
            version=0,
            state=GroupState.FINISHED,
            rollouts=dict(enumerate(group.rollouts)),
        )
        for group in found
    ]
    torch.save(pack_groups(entries), tmp_path / "saved.pt")
    packed = torch.load(tmp_path / "saved.pt", weights_only=True)
    again = unpack_groups(packed, lambda position: found[position].prompt)
    assert [tuple(entry.rollouts.values()) for entry in again] == [group.rollouts for group in found]
    plain = [
        replace(e, rollouts={0: replace(found[0].rollouts[0], branches=(), prompt_ids=None, credit=1.0)})
        for e in entries
    ]
    assert not any(name.startswith("branch_") for name in pack_groups(plain))  # as before there were branches


@pytest.mark.parametrize("with_records", [False, True])
def test_a_tape_keeps_the_rows(with_records):
    found = recorded(groups()) if with_records else groups()
    for group in found:
        as_float32 = replace(group, rollouts=tuple(map(_in_float32, group.rollouts)))
        rows = [to_row(as_float32, n) | {"step": 0, "policy_version": 0} for n in range(len(group.rollouts))]
        table = pa.Table.from_pylist(rows, schema=SCHEMA)
        assert from_rows(table.to_pylist()).rollouts == as_float32.rollouts


def _in_float32(rollout):
    def short(row):
        return replace(row, logprobs=tuple(torch.tensor(row.logprobs, dtype=torch.float32).tolist()))

    return replace(short(rollout), branches=tuple(map(short, rollout.branches)))


def test_a_replay_buffer_keeps_the_rows_and_tells_them_apart():
    found = recorded(groups(num_groups=2))
    twins = tuple(replace(found[0].rollouts[0], branches=(branch(random.Random(n)),), request_id=0) for n in range(3))
    buffer = ReplayBuffer()
    buffer.add(replace(found[0], rollouts=twins))
    assert len(buffer) == 3  # they differ in their branches alone
    buffer.add(found[1])
    other = ReplayBuffer()
    other.load_state_dict(buffer.state_dict())
    drawn, again = (one.sample(2, 4, version=0) for one in (buffer, other))
    assert [g.rollouts for g in drawn] == [g.rollouts for g in again]
    assert any(r.branches for g in drawn for r in g.rollouts)


def faulty(change):
    row = branch(random.Random(3))
    rollout = groups(num_groups=1)[0].rollouts[0]
    completion = replace(rollout, branches=(replace(row, **change),), turns=None)
    asked = GenerationRequest(id=0, prompt_ids=(3, 4, 5), num_samples=4, sampling=SamplingParams(max_tokens=20))
    return find_fault(
        completion, asked, versions=(0, 1), vocab_size=98, max_model_len=64, scores=True, is_partial=False
    )


def test_wrong_branches_of_an_engine_are_found():
    assert faulty({}) == ""
    row = branch(random.Random(3))
    length = len(row.token_ids)
    for change, problem in (
        ({"token_ids": (99,) * length}, "branches[0] has token_ids[0]=99"),
        ({"logprobs": (0.5,) * length}, "branches[0] has logprobs[0]=0.5"),
        ({"versions": (2,) * length}, "branches[0] has versions"),
        ({"loss_mask": (False,) * length}, "without a token of the policy"),
        ({"prompt_ids": ()}, "branches[0] has prompt_ids=()"),
        ({"prompt_ids": (3,) * 64}, "more than max_model_len=64"),
        ({"credit": float("nan")}, "branches[0] has credit=nan"),
        ({"turns": (*row.turns[:-1], replace(row.turns[-1], end=99))}, "branches[0] has turns["),
        ({"turns": (replace(row.turns[-1], call=-1),)}, "branches[0] has turns[0].call=-1"),
    ):
        assert problem in faulty(change)


def test_rows_of_different_lengths_are_no_rollout():
    row = branch(random.Random(3))
    good = groups(num_groups=1)[0].rollouts[0]
    with pytest.raises(InvariantError, match="differ in length"):
        replace(good, branches=(replace(row, versions=row.versions[:-1]),))
    assert isinstance(good, Rollout)
    assert isinstance(groups()[0], RolloutGroup)
