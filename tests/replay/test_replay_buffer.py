"""The replay buffer: what it keeps, what it draws how often, how old that may be, and that a run learns from it."""

import datetime
import math
from collections import Counter
from dataclasses import replace
from decimal import Decimal

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from flow import fit, make_data, make_module
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_async_rl.advantages.group import GroupMean
from lit_async_rl.callbacks import ReplayMonitor
from lit_async_rl.engines.base import Completion
from lit_async_rl.losses import TrajectoryBalance
from lit_async_rl.losses.aggregation import FixedLength
from lit_async_rl.problem import Prompt
from lit_async_rl.replay.buffer import RecencyReplay, ReplayBuffer, RewardReplay, UniformReplay
from lit_async_rl.types import Rollout, RolloutGroup, Turn


def group(index, prompt, texts, version, rewards=None):
    """A group of prompt number `prompt`; a text is a number, which stands for the completion."""
    rewards = rewards or [0.0] * len(texts)
    rollouts = tuple(
        Rollout(
            token_ids=(text, 1),
            logprobs=(-1.0, -float(index)),
            versions=(version, version + 1),
            finish_reason="stop",
            text=str(text),
            reward=reward,
        )
        for text, reward in zip(texts, rewards, strict=True)
    )
    ids = (prompt,)
    return RolloutGroup(
        index=index, prompt=Prompt(text=str(prompt)), prompt_ids=ids, rollouts=rollouts, admitted_version=version
    )


histories = st.lists(
    st.tuples(st.integers(0, 5), st.lists(st.integers(0, 8), min_size=1, max_size=5), st.integers(0, 3)), max_size=30
)
SETTINGS = [
    dict(capacity=10, max_per_prompt=4, max_staleness=6, fresh_fraction=0.5),
    dict(capacity=1000, max_per_prompt=3, max_staleness=2, fresh_fraction=0.25, weighting=RewardReplay(2.0)),
    dict(capacity=7, max_per_prompt=100, max_staleness=100, fresh_fraction=0.25, weighting=RecencyReplay(1.0)),
]


@pytest.mark.parametrize("options", SETTINGS)
@given(history=histories)
@settings(max_examples=40, deadline=None)
def test_capacity_age_and_uniqueness_hold_whatever_comes(options, history):
    buffer, version, arrived = ReplayBuffer(**options), 0, {}
    for index, (prompt, texts, passed) in enumerate(history):
        version += passed
        fresh = group(index, prompt, texts, version - 1)
        step = buffer.mix([fresh], 4, version)
        assert step[0] is fresh
        assert len(step) <= 4
        assert len({g.prompt_ids for g in step}) == len(step), "a prompt is in a step once"
        assert len({g.index for g in step}) == len(step)
        ages = [version - min(r.versions) for g in step[1:] for r in g.rollouts]
        assert all(age <= buffer.max_staleness for age in ages)
        for replayed in step[1:]:
            assert 2 <= len(replayed.rollouts) <= len(texts) or len(texts) == 1
            assert len({r.token_ids for r in replayed.rollouts}) == len(replayed.rollouts)
            for rollout in replayed.rollouts:
                newest = arrived[replayed.prompt_ids, rollout.token_ids]
                assert rollout == newest, "of equal completions the newest"
        arrived |= {(fresh.prompt_ids, rollout.token_ids): rollout for rollout in fresh.rollouts}
        stats = buffer.stats()
        assert len(buffer) == stats.num_rollouts <= buffer.capacity
        assert stats.num_rollouts == stats.num_added - stats.num_evicted - stats.num_expired
        assert stats.num_added + stats.num_duplicates == sum(len(texts) for _, texts, _ in history[: index + 1])
        assert stats.num_replayed == len(ages)
        assert stats.replayed_staleness_max == max(ages, default=0)
        assert stats.replayed_staleness == (sum(ages) / len(ages) if ages else 0)


@given(history=histories)
@settings(max_examples=20, deadline=None)
def test_a_restored_buffer_goes_on_as_the_original(history):
    buffer = ReplayBuffer(capacity=20, max_staleness=5)
    for index, (prompt, texts, _) in enumerate(history):
        buffer.add(group(index, prompt, texts, index // 4))
    buffer.sample(1, 2, 8)
    copy = ReplayBuffer(capacity=20, max_staleness=5, seed=1)
    copy.load_state_dict(buffer.state_dict())
    for index in range(100, 104):
        fresh = [group(index, index % 3, [1, 2, index], 8)]
        assert copy.mix(fresh, 4, 9) == buffer.mix(fresh, 4, 9)
        assert copy.stats() == buffer.stats()


@pytest.mark.slow
@given(history=histories)
@settings(max_examples=20, deadline=None)
def test_a_restored_buffer_keeps_lower_limits_from_the_first_step(history):
    buffer = ReplayBuffer()
    for index, (prompt, texts, _) in enumerate(history):
        buffer.add(group(index, prompt, texts, 0))
    lower = ReplayBuffer(capacity=5, max_per_prompt=2)
    lower.load_state_dict(buffer.state_dict())
    stats = lower.stats()
    assert len(lower) == stats.num_rollouts <= 5
    assert stats.num_rollouts == stats.num_added - stats.num_evicted
    groups = lower.sample(10, 10, 1)
    assert all(len(g.rollouts) <= 2 for g in groups)
    kept = [entry["index"] for entry in lower.state_dict()["stored"]]
    assert kept == sorted(kept)
    assert not history or kept[-1] == max(entry["index"] for entry in buffer.state_dict()["stored"])


def frequencies(weighting, rewards, versions, version):
    buffer = ReplayBuffer(weighting=weighting, seed=3)
    for n, (reward, made) in enumerate(zip(rewards, versions, strict=True)):
        buffer.add(group(n, 0, [n], made, [reward]))
    drawn = Counter(buffer.sample(1, 1, version)[0].rollouts[0].text for _ in range(4000))
    return torch.tensor([drawn[str(n)] / 4000 for n in range(len(rewards))])


def test_completions_are_drawn_in_proportion_to_the_weights():
    rewards, versions = [0.0, 1.0, 2.0], [4, 2, 0]
    expected = {
        UniformReplay(): torch.ones(3) / 3,
        RewardReplay(1.0): torch.tensor(rewards).softmax(0),
        RecencyReplay(2.0): torch.tensor([4.0, 2.0, 1.0]) / 7,
    }
    for weighting, probabilities in expected.items():
        found = frequencies(weighting, rewards, versions, 4)
        torch.testing.assert_close(found, probabilities, atol=0.035, rtol=0)


def test_recent_prompts_are_drawn_more_often_and_rewarded_ones_are_not():
    def share_of_the_newer(weighting):
        buffer = ReplayBuffer(weighting=weighting)
        buffer.add(group(0, 0, [1, 2], 0, [1.0, 1.0]))
        buffer.add(group(1, 1, [1, 2], 4))
        return sum(buffer.sample(1, 2, 4)[0].prompt_ids == (1,) for _ in range(3000)) / 3000

    assert share_of_the_newer(RecencyReplay(2.0)) == pytest.approx(0.8, abs=0.03)
    assert share_of_the_newer(RewardReplay(3.0)) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(("fraction", "fresh"), [(0.5, 4), (0.25, 2), (1.0, 8), (0.01, 1)])
def test_the_fresh_share_is_that_of_the_engine(fraction, fresh):
    data = make_data(groups_per_step=8, replay=ReplayBuffer(fraction))
    assert data.fresh_per_step == data.groups_per_round == fresh


@pytest.mark.slow
def test_a_run_trains_mostly_on_old_data_within_both_bounds(tmp_path):
    seen = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            staleness = pl_module.stabilizer_signals["staleness"]
            rows = torch.where(batch.loss_mask, staleness, 0).amax(-1)
            fresh = {g.index for g in trainer.datamodule.last_step_groups[: trainer.datamodule.fresh_per_step]}
            is_fresh = torch.tensor([int(n) in fresh for n in batch.group_index])
            seen.append((trainer.datamodule.replay.stats(), rows[is_fresh].max().item(), rows.max().item(), len(batch)))

    def make():
        return make_data(
            advantage=GroupMean(),
            aggregation=FixedLength(1),
            max_staleness=1,
            groups_per_step=4,
            replay=ReplayBuffer(0.25, max_staleness=6, min_prompts=3),
        )

    data, module = make(), make_module(loss=TrajectoryBalance(0.1))
    trainer = fit(module, data, 10, [ReplayMonitor(), Watch()])
    assert all(fresh <= 1 and oldest <= 6 for _, fresh, oldest, _ in seen)
    assert max(oldest for _, _, oldest, _ in seen) > 3
    assert [stats.num_replayed > 0 for stats, *_ in seen] == [False] * 3 + [True] * 7
    assert trainer.callback_metrics["sample/off_policy_share"] >= 0.5
    assert trainer.callback_metrics["replay/num_replayed"] > 0
    trainer.save_checkpoint(tmp_path / "replay.ckpt")
    again = make()
    fit(make_module(loss=TrajectoryBalance(0.1)), again, 11, ckpt_path=str(tmp_path / "replay.ckpt"))
    assert again.replay.stats().num_added > seen[-1][0].num_added, "the buffer went on"


def test_turns_come_back_as_turns():
    first, turns = ReplayBuffer(), (Turn(2, 0.25, 0), Turn(4, 0.5, 1))
    plain = group(0, 0, [1, 2], 0, rewards=[0.75, 0.75])
    first.add(replace(plain, rollouts=tuple(replace(rollout, turns=turns) for rollout in plain.rollouts)))
    again = ReplayBuffer()
    again.load_state_dict(first.state_dict())
    (drawn,) = again.sample(1, 2, 0)
    assert {rollout.turns for rollout in drawn.rollouts} == {turns}
    assert drawn.rollouts[0].add_reward(-0.5, part="overlong").turns[-1].reward == 0.0


def test_a_monitor_without_a_buffer_is_refused():
    with pytest.raises(ValueError, match=r"data\.replay is not set"):
        fit(make_module(), make_data(), 1, [ReplayMonitor()])


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: ReplayBuffer(0.0), "fresh_fraction"),
        (lambda: ReplayBuffer(capacity=0), "capacity"),
        (lambda: ReplayBuffer(max_per_prompt=0), "max_per_prompt"),
        (lambda: ReplayBuffer(min_prompts=0), "min_prompts"),
        (lambda: ReplayBuffer(max_staleness=-1), "max_staleness"),
        (lambda: RecencyReplay(math.nan), "half_life"),
    ],
)
def test_bad_settings_are_named(make, setting):
    with pytest.raises(ValueError, match=setting):
        make()


def test_a_checkpoint_with_it_can_be_loaded_whatever_prompts_and_engines_bring(tmp_path):
    odd = {
        "day": datetime.date(2026, 1, 2),
        "price": Decimal("1.5"),
        "size": np.int64(3),
        "parts": np.array([1.5, 2.0]),
    }
    completion = Completion(
        request_id=0,
        sample_index=0,
        token_ids=(5, 1),
        logprobs=(-1.0, -1.0),
        versions=(0, 0),
        finish_reason="stop",
        turns=(Turn(end=2, reward=np.float64(0.5), state=0),),
    )
    rollouts = tuple(replace(completion, token_ids=(n, 1)).scored(np.float64(0.5)) for n in (5, 6))
    found = replace(group(0, 3, [5], 0), rollouts=rollouts, prompt=Prompt(text="3", metadata=odd))
    first = ReplayBuffer()
    first.add(found)
    torch.save(first.state_dict(), tmp_path / "buffer.pt")
    again = ReplayBuffer()
    again.load_state_dict(torch.load(tmp_path / "buffer.pt", weights_only=True))
    (drawn,) = again.sample(1, 2, 0)
    assert drawn.prompt.metadata == {"day": "2026-01-02", "price": "1.5", "size": 3, "parts": [1.5, 2.0]}
    assert set(drawn.rollouts) == set(found.rollouts)


def test_a_state_with_the_earlier_names_of_two_fields_is_read():
    first = ReplayBuffer()
    first.add(group(0, 3, [5, 6], 0))
    state = first.state_dict()
    for entry in state["stored"]:
        rollout = entry["rollout"]
        rollout["completion_ids"], rollout["behavior_logprobs"] = rollout.pop("token_ids"), rollout.pop("logprobs")
        del rollout["request_id"], rollout["sample_index"]
    again = ReplayBuffer()
    again.load_state_dict(state)
    assert again.state_dict()["stored"] == first.state_dict()["stored"]
