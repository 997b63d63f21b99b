"""Turns: each has its reward and its advantage, on its own tokens, through checkpoints and tapes."""

import math
import random
import statistics
from dataclasses import replace

import lightning.pytorch as pl
import pytest
from flow import fit, make_data, make_module
from hypothesis import given
from hypothesis import strategies as st

from lit_async_rl.advantages.group import GiGPO, GroupMean, GroupMeanStd, TurnReturns
from lit_async_rl.assets import asset
from lit_async_rl.data.collate import collate_step
from lit_async_rl.engines.base import Completion, GenerationRequest, SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.environments.base import Observation
from lit_async_rl.environments.episode_engine import Conversation, EpisodeEngine
from lit_async_rl.environments.gymnasium import GymnasiumEnvironment, GymnasiumPrompts
from lit_async_rl.errors import InvariantError
from lit_async_rl.losses.aggregation import TokenMean
from lit_async_rl.problem import Prompt
from lit_async_rl.replay.tape import Tape, TapeWriter
from lit_async_rl.rollouts.group_book import GroupEntry, pack_groups, unpack_groups
from lit_async_rl.types import Rollout, RolloutGroup, Turn

TURNS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([-1.0, 0.0, 0.5, 2.0])), min_size=1, max_size=4)
GROUPS = st.lists(TURNS, min_size=1, max_size=5)


def as_turns(rows) -> list[list[Turn]]:
    return [
        [Turn(end=2 * (k + 1), reward=reward, state=state) for k, (state, reward) in enumerate(row)] for row in rows
    ]


def rollout(rows: list[Turn]) -> Rollout:
    n = rows[-1].end
    return Rollout(
        token_ids=tuple(range(1, n + 1)),
        logprobs=(-1.0,) * n,
        versions=(0,) * n,
        finish_reason="stop",
        text="",
        reward=sum(turn.reward for turn in rows),
        turns=tuple(rows),
    )


def group(rows) -> RolloutGroup:
    rollouts = tuple(rollout(own) for own in as_turns(rows))
    return RolloutGroup(index=0, prompt=Prompt(text="p"), prompt_ids=(9,), rollouts=rollouts, admitted_version=0)


def slow_gigpo(rows, omega, gamma, standardize):
    """Equations 3, 6 and 7 of arXiv:2505.10978 written out turn by turn, with sums over all pairs."""
    totals = [sum(reward for _, reward in row) for row in rows]

    def relative(value, among):
        difference = value - sum(among) / len(among)
        if max(among) == min(among):
            return 0.0
        return difference / (statistics.pstdev(among) + 1e-6) if standardize else difference

    def led_to(row, k):
        return sum(gamma ** (j - k) * row[j][1] for j in range(k, len(row)))

    result = []
    for i, row in enumerate(rows):
        result.append([])
        for k, (state, _) in enumerate(row):
            same_state = [led_to(other, j) for other in rows for j in range(len(other)) if other[j][0] == state]
            result[i].append(relative(totals[i], totals) + omega * relative(led_to(row, k), same_state))
    return result


@given(GROUPS, st.sampled_from([0.0, 1.0, 0.3]), st.sampled_from([1.0, 0.95, 0.0]), st.booleans())
def test_gigpo_is_the_papers_formula(rows, omega, gamma, standardize):
    found = GiGPO(omega=omega, gamma=gamma, standardize=standardize).of_group(as_turns(rows))
    for mine, slow in zip(found, slow_gigpo(rows, omega, gamma, standardize), strict=True):
        assert mine == pytest.approx(slow, abs=1e-8)


@given(GROUPS, st.sampled_from([1.0, 0.5]))
def test_turn_returns_compare_the_same_turn_of_the_rollouts_that_came_so_far(rows, gamma):
    found = TurnReturns(gamma=gamma).of_group(as_turns(rows))
    for k in range(max(map(len, rows))):
        going = [i for i, row in enumerate(rows) if len(row) > k]
        led_to = [sum(gamma ** (j - k) * rows[i][j][1] for j in range(k, len(rows[i]))) for i in going]
        for i, value in zip(going, led_to, strict=True):
            assert found[i][k] == pytest.approx(value - math.fsum(led_to) / len(led_to), abs=1e-9)


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=6))
def test_of_one_turn_they_are_the_groups_advantage(rewards):
    assert TurnReturns()([rewards]) == GroupMean()([rewards])
    assert TurnReturns(standardize=True)([rewards]) == GroupMeanStd()([rewards])
    assert GiGPO(omega=0.0)([rewards]) == GroupMeanStd()([rewards])


def test_each_turns_tokens_have_its_advantage_in_the_batch():
    one = group([[(0, 0.0), (1, 1.0)], [(0, 0.0), (2, 0.0)]])
    (batch,) = collate_step(
        [one],
        advantage=TurnReturns(gamma=0.0),
        aggregation=TokenMean(),
        num_micro_batches=1,
        pad_token_id=0,
        temperature=1.0,
    )
    assert batch.advantages.tolist() == [[0.0, 0.0, 0.0, 0.5, 0.5], [0.0, 0.0, 0.0, -0.5, -0.5]]


def test_a_rollout_without_turns_is_one_turn_with_its_reward():
    turns = group([[(0, 3.0)], [(0, 1.0)]])
    plain = replace(turns, rollouts=tuple(replace(one, turns=None) for one in turns.rollouts))
    assert TurnReturns().per_token([plain]) == TurnReturns().per_token([turns]) == [[[1.0, 1.0], [-1.0, -1.0]]]


def test_a_conversation_keeps_rewards_and_states_of_its_turns():
    request = GenerationRequest(id=0, prompt_ids=(1,), num_samples=1, sampling=SamplingParams())
    talk = Conversation(request, 0)

    def says(*ids):
        fields = dict(token_ids=ids, logprobs=(-1.0,) * len(ids), versions=(0,) * len(ids))
        talk.add_sampled(Completion(request_id=0, sample_index=0, finish_reason="stop", **fields), talk.state)

    says(5, 6)
    talk.set_result(Observation(text="seen", reward=0.25))
    talk.add_given((7, 7, 7))
    says(8)
    talk.set_result(Observation(text="other", reward=1.0, state="seen"))
    says(9)
    completion = talk.completion("length")
    assert [(turn.end, turn.reward) for turn in completion.turns] == [(2, 0.25), (6, 1.0), (7, 0.0)]
    first, second, third = [turn.state for turn in completion.turns]
    assert first == 0
    assert second == third != 0
    assert completion.reward == 1.25


class Corridor:
    """A small text environment of Gymnasium's interface: find the door by digits; every step costs a little."""

    def reset(self, *, seed=None, options=None):
        self.place, self.length = 0, random.Random(seed).randint(2, 3)
        return f"{self.length}+{self.place}=", {}

    def step(self, action):
        self.place += sum(c.isdigit() for c in action) > 0
        arrived = self.place >= self.length
        return f"{self.place}:", 1.0 if arrived else -0.125, arrived, False, {}


def make_corridor(prompt: Prompt) -> Corridor:
    return Corridor()


class Worths(pl.Callback):
    """How many different advantages a rollout had, at most, in any step."""

    most = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        values = pl_module.stabilizer_signals["advantages"], pl_module.stabilizer_signals["mask"]
        self.most = max(self.most, *(len(set(row[mask].tolist())) for row, mask in zip(*values, strict=True)))


@pytest.mark.slow
@pytest.mark.parametrize("advantage", [GiGPO(), TurnReturns(standardize=True)])
def test_a_gymnasium_style_environment_trains_with_advantages_turn_by_turn(advantage, tmp_path):
    model = asset("calculator_policy")
    engine = EpisodeEngine(EmbeddedEngine(), GymnasiumEnvironment(make_corridor), max_turns=4)
    sampling = SamplingParams(max_tokens=12)
    prompts = GymnasiumPrompts(make_corridor, size=50)
    data = make_data(model=model, prompts=prompts, engine=engine, reward=None, sampling=sampling, advantage=advantage)
    module = make_module(model=model)
    worths = Worths()
    fit(module, data, 8, callbacks=[worths])
    rollouts = [one for found in data.last_step_groups for one in found.rollouts]
    assert {found.prompt.text for found in data.last_step_groups} <= {"2+0=", "3+0="}
    for one in rollouts:
        assert one.reward == pytest.approx(sum(turn.reward for turn in one.turns))
        assert one.turns[-1].end == len(one.token_ids)
        assert [turn.end for turn in one.turns] == sorted({turn.end for turn in one.turns})
    assert worths.most > 1, "no rollout had turns of different worth"
    writer = TapeWriter(tmp_path)
    writer.append(0, 7, data.last_step_groups)
    writer.flush()
    (step,) = Tape(tmp_path).steps()
    for told, known in zip(step.groups, data.last_step_groups, strict=True):
        assert [one.turns for one in told.rollouts] == [one.turns for one in known.rollouts]


@given(st.lists(st.one_of(st.none(), TURNS), min_size=1, max_size=4))
def test_turns_come_back_from_a_checkpoint(rows):
    completions = {}
    for n, row in enumerate(rows):
        turns = None if row is None else tuple(as_turns([row])[0])
        length = 3 if turns is None else turns[-1].end
        fields = dict(token_ids=(1,) * length, logprobs=(-1.0,) * length, versions=(0,) * length)
        known = Completion(request_id=4, sample_index=n, finish_reason="stop", turns=turns, **fields)
        completions[n] = known.scored(1.0)
    prompt = Prompt(text="p")
    saved = GroupEntry(index=4, position=2, prompt=prompt, prompt_ids=(1, 2), version=0, rollouts=completions)
    assert unpack_groups(pack_groups([saved, saved]), lambda _: prompt) == [saved, saved]


def test_settings_are_named():
    with pytest.raises(ValueError, match=r"GiGPO.omega must be >= 0, got -1"):
        GiGPO(omega=-1.0)
    with pytest.raises(ValueError, match=r"TurnReturns.gamma must be in \[0, 1\], got 2"):
        TurnReturns(gamma=2.0)


@pytest.mark.parametrize("end", [1, 3])
def test_turns_that_do_not_end_with_the_rollout_are_refused_and_not_spread_over_other_tokens(end):
    whole = group([[(0, 3.0)], [(0, 1.0)]])
    cut = replace(whole.rollouts[0], turns=(Turn(end=end, reward=3.0, state=0),))
    with pytest.raises(InvariantError, match="last turn must end at the last token of the rollout"):
        TurnReturns().per_token([replace(whole, rollouts=(cut, whole.rollouts[1]))])
