"""The policy in training as a judge: it answers on the engine of its rollouts, and leaves the run as it is."""

import json
import threading
from pathlib import Path

import pytest
from chat_models import chat_model
from flow import fit, make_data, make_module
from judging_engines import JudgingEngine

import lit_async_rl as rl
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.errors import RewardError, RewardSetupError
from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.scorer import Scorer, score_all
from lit_async_rl.utils.identity import reward_identity

PROMPTS = [{"prompt": f"{n} + 1 = ?", "answer": str(n + 1)} for n in range(40)]
PROMPT = Prompt(text="2 + 2 = ?", answer="4")


@pytest.fixture
def model(tmp_path):
    """A chat model whose context holds a question."""
    folder = chat_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    JudgingEngine.reset()
    return folder


def policy_judge(**settings):
    given = {"max_tokens": 60, "criteria": "Good?", "limits": rl.JudgeLimits(timeout_s=40.0)} | settings
    return rl.JudgeReward(engine="policy", **given)


def run(model, reward, max_steps=3, callbacks=(), **changes):
    data = make_data(
        model=model,
        prompts=PROMPTS,
        reward=reward,
        groups_per_step=2,
        group_size=2,
        sampling=rl.SamplingParams(max_tokens=6),
        **({"engine": JudgingEngine(num_slots=4)} | changes),
    )
    fit(make_module(model=model), data, max_steps, callbacks=list(callbacks))
    return data


class Versions(rl.RolloutMonitor):
    """Keeps what was trained on."""

    def __init__(self):
        super().__init__()
        self.groups = []

    def on_train_batch_end(self, trainer, *args, **kwargs):
        self.groups.append((trainer.global_step, list(trainer.datamodule.last_step_groups)))


@pytest.mark.slow
def test_the_policy_judges_its_own_rollouts_with_its_newest_weights_and_is_not_trained_on_answers(model):
    JudgingEngine.judge = staticmethod(lambda mark, responses: f"VERDICT {mark}: {len(responses[0]) % 10}")
    seen = Versions()
    reward = policy_judge()
    data = run(model, reward, max_steps=4, callbacks=[seen], max_staleness=1)
    trained = [(step, group) for step, groups in seen.groups for group in groups]
    assert len(trained) == 8
    texts = {response for _, responses in JudgingEngine.asked for response in responses}
    for step, group in trained:
        for rollout in group.rollouts:
            assert rollout.text in texts or "<|" in rollout.text
            assert 0.0 <= rollout.reward <= 0.9
            assert len(rollout.token_ids) <= 6, "no answer of the judge was trained on"
            assert min(rollout.versions) >= step - 2, "the bound holds as without a judge"
    assert max(JudgingEngine.versions) >= 2, "a later version judges later rollouts"
    metrics = reward.metrics()
    assert metrics["judge/num_calls"] >= 16
    assert metrics["judge/num_output_tokens"] > 0
    assert metrics["judge/num_failed"] == metrics["judge/num_unreadable"] == 0
    assert not reward._cache._known, "the next version may judge otherwise"
    assert data.engine is not None
    assert not [thread for thread in threading.enumerate() if thread.name in ("judge", "producer")]


@pytest.mark.slow
def test_answers_leave_the_counts_of_the_rollouts_as_they_are(model):
    """Slots and tokens of groups are what they are with any other reward."""
    found = []

    class Counts(rl.RolloutMonitor):
        def on_train_batch_end(self, trainer, *args, **kwargs):
            producer = trainer.datamodule._source._producer
            with producer.changed:
                groups = len(producer.book.groups)
                slots = producer.admission.num_admissible
                found.append((groups, slots, len(producer.admission.bounds)))
                assert not any(number >= 2**40 for group in producer.book.groups.values() for number in group.requests)

    run(model, policy_judge(), callbacks=[Counts()], max_staleness=1)
    JudgingEngine.reset()
    judged = list(found)
    found.clear()
    run(model, lambda prompt, completion: 0.7, callbacks=[Counts()], max_staleness=1)
    assert [sum(row[1:]) for row in judged] == [sum(row[1:]) for row in found]


@pytest.mark.slow
def test_an_engine_that_fails_while_it_judges_is_replaced_and_asked_again(model):
    JudgingEngine.num_failures = 1
    reward = policy_judge()
    run(model, reward, engine_restarts=2)
    assert JudgingEngine.num_failures == 0
    assert reward.metrics()["judge/num_failed"] == 0
    assert reward.metrics()["judge/num_retries"] == 0, "the question is the same, and was asked once"


@pytest.mark.slow
def test_pairs_of_a_group_and_a_part_of_several_rewards_ask_the_policy(model):
    JudgingEngine.judge = staticmethod(
        lambda mark, responses: f"VERDICT {mark}: {'A' if responses[0] >= responses[1] else 'B'}"
    )
    run(model, policy_judge(mode="pairwise"), max_steps=2)
    assert all(len(responses) == 2 for _, responses in JudgingEngine.asked)
    JudgingEngine.reset()
    seen = Versions()
    run(model, {"answer": rl.exact_match, "style": policy_judge()}, max_steps=2, callbacks=[seen])
    assert all(one.reward_parts["style"] == 0.7 for _, groups in seen.groups for g in groups for one in g.rollouts)


@pytest.mark.slow
def test_an_evaluation_asks_the_policy_too(model):
    """It shares engine and reward workers with the rollouts."""
    evaluation = rl.Evaluation(
        datasets={"sums": PROMPTS[:4]}, every_n_steps=1, sampling=rl.SamplingParams(max_tokens=6)
    )
    run(model, policy_judge(), callbacks=[evaluation])
    assert evaluation.results
    assert all(result.metrics["reward"] == pytest.approx(0.7) for result in evaluation.results)


def test_validations_outside_of_training_are_refused_with_what_works(model):
    with pytest.raises(ValueError, match=r"JudgeReward\.engine=policy with data\.validation\.prompts.*Evaluation"):
        make_data(model=model, prompts=PROMPTS, reward=policy_judge(), val_prompts=PROMPTS[:4])


@pytest.mark.parametrize("own_process", [False, True], ids=["thread", "process"])
@pytest.mark.slow
def test_a_policy_that_states_no_verdict_gives_what_was_chosen(model, own_process):
    engine = EmbeddedEngine(num_slots=4, own_process=own_process)
    reward = policy_judge(on_unreadable=0.25, temperature=1.0, max_tokens=8)
    seen = Versions()
    run(model, reward, engine=engine, callbacks=[seen])
    assert {one.reward for _, groups in seen.groups for group in groups for one in group.rollouts} == {0.25}
    assert reward.metrics()["judge/num_unreadable"] >= 12


def test_a_question_that_is_given_up_is_taken_out_of_the_engine(model):
    """A limit that no answer can keep: the run goes on with what was chosen, and the engine holds no question."""
    reward = policy_judge(limits=rl.JudgeLimits(timeout_s=0.001), on_failure=0.5, max_tokens=2000)
    seen = Versions()
    run(model, reward, max_steps=2, callbacks=[seen])
    assert {one.reward for _, groups in seen.groups for group in groups for one in group.rollouts} == {0.5}
    assert reward.metrics()["judge/num_failed"] >= 8


def test_a_question_that_is_too_long_is_named(tmp_path):
    model = chat_model(tmp_path)  # a context of 256 tokens
    with pytest.raises(Exception, match=r"has \d+ tokens, which is more than the engine's max_model_len=256") as found:
        run(model, policy_judge(), engine=EmbeddedEngine(num_slots=4))
    assert isinstance(found.value, RewardError) or isinstance(found.value.__cause__, RewardError)


def test_outside_of_a_fit_there_is_no_policy_to_ask(model):
    reward = policy_judge()
    scorer = Scorer(reward)
    with pytest.raises(RewardSetupError, match=r"JudgeReward\.engine=policy asks the policy in training"):
        score_all(scorer, [(PROMPT, "1")], lambda: None)
    scorer.close()
    run(model, reward, max_steps=1)
    with pytest.raises(RewardSetupError, match=r"JudgeReward\.engine=policy asks the policy in training"):
        score_all(Scorer(reward), [(PROMPT, "1")], lambda: None)
    reward.close()


@pytest.mark.slow
def test_a_second_fit_asks_the_policy_of_that_fit(model):
    reward = policy_judge()
    run(model, reward, max_steps=1)
    first = len(JudgingEngine.asked)
    run(model, reward, max_steps=1)
    assert len(JudgingEngine.asked) > first > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "m"}, r"JudgeReward\.model='m' with engine='policy'"),
        ({"cache": "verdicts.jsonl"}, r"JudgeReward\.cache='verdicts.jsonl' with engine=policy"),
        ({"engine": None, "base_url": "http://localhost:1/v1"}, r"JudgeReward\.model=None with engine=None"),
        ({"base_url": "http://localhost:1/v1"}, r"either base_url or engine, got both"),
    ],
)
def test_settings_of_the_policy_as_a_judge_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        rl.JudgeReward(**({"engine": "policy"} | settings))
    with pytest.raises(ValueError, match=r"JudgeReward\.engine must be an engine or policy, got 'polcy'"):
        policy_judge()._check(None, "polcy", None, cache=None)


def test_an_engine_whose_batches_have_one_version_each_is_refused():
    with pytest.raises(ValueError, match=r"JudgeReward\.engine=policy needs data\.engine\.in_flight_weight"):
        make_data(reward={"a": policy_judge(), "b": rl.exact_match}, schedule="fixed_lag")


def test_its_identity_is_another_one_than_that_of_a_model():
    assert reward_identity(policy_judge()) == reward_identity(policy_judge())
    other = rl.JudgeReward("m", engine=EmbeddedEngine(), max_tokens=60, criteria="Good?")
    assert reward_identity(policy_judge()) != reward_identity(other)


def test_a_model_on_an_engine_of_its_own_gives_the_verdict_that_it_ends_with(model):
    """The token that ends its turn is no part of the verdict's line."""
    reward = rl.JudgeReward(model, engine=JudgingEngine(num_slots=4), max_tokens=60, criteria="Good?", cache=None)
    scorer = Scorer(reward)
    assert score_all(scorer, [(PROMPT, str(n)) for n in range(3)], lambda: None) == [0.7] * 3
    scorer.close()
    reward.close()


@pytest.mark.slow
def test_reasoning_that_the_chat_template_opens_must_end_before_a_verdict(model):
    template = Path(model) / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant\n", "assistant\n<think>\n"))
    unended = "VERDICT {mark}: 1\nBut"
    ended = "VERDICT {mark}: 1\nNo.</think>\nVERDICT {mark}: 9"
    JudgingEngine.judge = staticmethod(lambda mark, seen: (ended if seen == ["1"] else unended).format(mark=mark))
    own = rl.JudgeReward(
        model, engine=JudgingEngine(num_slots=4), max_tokens=60, criteria="Good?", cache=None, on_unreadable=0.25
    )
    scorer = Scorer(own)
    assert score_all(scorer, [(PROMPT, str(n)) for n in range(2)], lambda: None) == [0.25, 0.9]
    scorer.close()
    own.close()
    JudgingEngine.judge = staticmethod(lambda mark, seen: unended.format(mark=mark))
    policy = policy_judge(on_unreadable=0.25)
    run(model, policy, max_steps=1)
    assert policy.metrics()["judge/num_unreadable"] >= 4
