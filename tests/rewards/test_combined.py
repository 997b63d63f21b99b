"""Several rewards by name: their combination, their parts on every way to a file, batches, and TRL's form."""

import asyncio
import csv
import json
import math
import pickle
import threading
from dataclasses import replace

import pytest
import torch
from flow import fit, make_data, make_module, parameters
from groups import group
from hypothesis import given
from hypothesis import strategies as st

import lit_async_rl as rl
from lit_async_rl.cli.config_checks import files_first, write_out_rewards
from lit_async_rl.errors import RewardError
from lit_async_rl.problem import Prompt, Score
from lit_async_rl.replay.tape import Tape
from lit_async_rl.report import write_report
from lit_async_rl.rewards.calls import reward_name, score
from lit_async_rl.rewards.combined import name_answers
from lit_async_rl.rewards.forms import as_reward_function
from lit_async_rl.rewards.scorer import Scorer, score_all
from lit_async_rl.rewards.success import Success
from lit_async_rl.rollouts.group_book import GroupEntry, GroupState, pack_groups, unpack_groups
from lit_async_rl.rollouts.intake import OverlongPenalty
from lit_async_rl.training.trackers import CSVLog
from lit_async_rl.utils.config_files import own_settings
from lit_async_rl.utils.identity import reward_identity

PROMPT = rl.Prompt(text="2 + 2 =", answer="4", metadata={"level": "easy"})


def digits(prompt, completion):
    return float(completion.strip().isdigit())


def short(prompt, completion):
    return -0.01 * len(completion)


def of_even_answers(prompt, completion):
    """Does not apply to answers that end with an odd digit."""
    return None if int(prompt.answer[-1]) % 2 else float(completion.strip()[-1:] in "02468")


async def later(prompt, completion):
    return 0.5


PARTS = {"answer": rl.share_correct, "digits": digits, "even": of_even_answers}
values = st.one_of(st.none(), st.floats(-2, 2))


# -- combination ------------------------------------------------------------------------------------------------------


@given(
    parts=st.dictionaries(st.sampled_from("abcd"), values, min_size=1), weight=st.floats(-3, 3), least=st.floats(-1, 1)
)
def test_sum_product_and_gates_are_what_the_docstring_says(parts, weight, least):
    rewards = {name: (lambda prompt, completion, value=value: value) for name, value in parts.items()}
    known = {name: value for name, value in parts.items() if value is not None}
    gate = sorted(parts)[0]
    weighted = rl.CombinedReward(rewards, weights={gate: weight}, gates={gate: least})
    product = rl.CombinedReward(rewards, combine="product")
    if not known:
        with pytest.raises(RewardError, match="no reward applies to the completion"):
            weighted(PROMPT, "4")
        return
    closed = gate in known and known[gate] < least
    total = sum(
        (weight if name == gate else 1.0) * (0.0 if closed and name != gate else v) for name, v in known.items()
    )
    assert weighted(PROMPT, "4") == pytest.approx(total, abs=1e-12)
    assert weighted(PROMPT, "4").parts == known  # as they are, ahead of weights and gates
    assert product(PROMPT, "4") == pytest.approx(math.prod(known.values()), abs=1e-12)


def test_plain_and_async_parts_are_combined_and_token_ids_go_to_those_that_want_them():
    def length(prompt, completion, token_ids):
        return float(len(token_ids))

    reward = rl.CombinedReward({"length": length, "later": later, "digits": digits})
    found = score(reward, PROMPT, "4", token_ids=(7, 8, 9))
    assert (found, found.parts) == (4.5, {"length": 3.0, "later": 0.5, "digits": 1.0})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(rewards={}), "at least one reward"),
        (dict(rewards={"a b": digits}), "names of rewards must consist of letters"),
        (
            dict(rewards={"a": digits}, weights={"b": 1.0}),
            r"data\.reward\.weights refers to b, but the rewards are named a",
        ),
        (dict(rewards={"a": digits}, gates={"b": 1.0}), r"data\.reward\.gates refers to b"),
        (dict(rewards={"a": digits}, success="b"), r"data\.reward\.success refers to b"),
        (dict(rewards={"a": digits}, weights={"a": math.nan}), r"data\.reward\.weights\.a must be finite"),
        (dict(rewards={"a": digits}, combine="product", weights={"a": 2.0}), "weights applies to combine=sum only"),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        rl.CombinedReward(**arguments)


def test_an_error_names_the_part():
    def broken(prompt, completion):
        raise KeyError("level")

    reward = rl.CombinedReward({"digits": digits, "broken": broken})
    with pytest.raises(RewardError, match=r"CombinedReward on prompt '2 \+ 2 =', .*its part 'broken' raised KeyError"):
        score(reward, PROMPT, "4")
    with pytest.raises(RewardError, match=r"its part 'text' returned 'yes', which is not a number"):
        score(rl.CombinedReward({"text": lambda prompt, completion: "yes"}), PROMPT, "4")


def test_the_identity_of_a_combination_has_its_parts_weights_and_gates():
    identities = {
        reward_identity(rl.CombinedReward(PARTS)),
        reward_identity(rl.CombinedReward(PARTS, weights={"digits": 2.0})),
        reward_identity(rl.CombinedReward(PARTS, gates={"digits": 1.0})),
        reward_identity(rl.CombinedReward({**PARTS, "short": short})),
        reward_identity(rl.CombinedReward({**PARTS, "digits": short})),
        reward_identity(rl.CombinedReward(PARTS, combine="product")),
    }
    assert len(identities) == 6


def test_the_limit_of_processes_is_the_sum_of_those_of_the_parts():
    isolated = {name: rl.IsolatedReward("lit_async_rl.exact_match", timeout_s=20.0) for name in "abc"}
    with pytest.raises(ValueError, match=r"timeout_s=60 must be less than data\.scoring\.timeout_s=60"):
        make_data(reward=isolated)


# -- what is right ----------------------------------------------------------------------------------------------------


def test_the_only_grader_decides_what_is_right_or_the_part_that_is_named():
    one = rl.CombinedReward({"answer": rl.exact_match, "short": short})
    two = rl.CombinedReward({"a": rl.exact_match, "b": rl.share_correct})
    named = rl.CombinedReward({"a": rl.exact_match, "b": rl.share_correct}, success="b")
    assert Success.by(None, one) == Success(1.0, "answer")
    assert Success.by(0.3, one) == Success(0.3, "answer")
    assert Success.by(None, two) == Success(0.5, None)
    assert Success.by(None, named) == Success(1.0, "b")
    assert (
        Success(1.0, "answer").number([Score(0.2, {"answer": 1.0}), Score(9.0, {"answer": 0.0}), Score(9.0, {})]) == 1
    )


@pytest.mark.slow
def test_held_out_accuracy_is_that_of_the_grader():
    def accuracy(reward):
        data = make_data(reward=reward, val_prompts=rl.SortDigits(8, size=60, split="held_out"))
        trainer = rl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
        (result,) = trainer.validate(make_module(), datamodule=data, verbose=False)
        return result["val/pass@1"]

    assert accuracy({"answer": rl.exact_match, "short": short, "digits": digits}) == accuracy(rl.exact_match)


def test_each_part_that_is_a_grader_is_checked_on_its_own_references(caplog):
    def wrong(prompt, completion):
        return 0.0

    rl.grades(lambda prompt: prompt.answer)(wrong)
    data = make_data(reward={"answer": rl.exact_match, "wrong": wrong})
    fit(make_module(), data, 1)
    data._reference_check.join(30.0)
    lines = [record.message for record in caplog.records if "reference answers sampled from" in record.message]
    assert len(lines) == 1
    assert "(part wrong) gives wrong grades to 64 of 64" in lines[0]


# -- the way of the parts ---------------------------------------------------------------------------------------------


def scored(*parts):
    made = group([sum(part.values()) for part in parts])
    rollouts = [
        replace(rollout, sample_index=n).scored(Score(rollout.reward, part))
        for n, (rollout, part) in enumerate(zip(made.rollouts, parts, strict=True))
    ]
    return replace(made, rollouts=tuple(rollouts))


def test_parts_pass_through_checkpoints():
    rows = [{"a": 1.0, "b": 0.25}, {"a": 0.0}, {"b": -1.0}]
    entry = GroupEntry(index=0, position=0, prompt=PROMPT, prompt_ids=(1,), version=0, state=GroupState.FINISHED)
    entry.rollouts = dict(enumerate(scored(*rows).rollouts))
    (read,) = unpack_groups(pack_groups([entry]), lambda position: PROMPT)
    assert [rollout.reward_parts for rollout in read.rollouts.values()] == rows


def test_a_penalty_is_a_part_of_a_reward_that_has_parts():
    penalty = OverlongPenalty(max_tokens=3, buffer_tokens=2, factor=1.0)
    plain = group([1.0], lengths=[2])
    (with_parts,) = penalty(scored({"a": 1.0})).rollouts
    assert penalty(plain).rollouts[0].reward_parts is None
    assert with_parts.reward_parts == {"a": 1.0, "overlong": -1.0}
    assert with_parts.reward == 0.0


@pytest.mark.slow
def test_a_run_with_three_rewards_shows_their_parts_and_goes_on_with_them_to_the_bit(tmp_path):
    """From a checkpoint with groups that were scored and not yet trained on, as a killed run leaves one."""

    def data():
        engine = rl.EmbeddedEngine(in_flight_weight_updates=False)
        return make_data(reward=PARTS, schedule="fixed_lag", max_staleness=2, engine=engine, advantage=rl.GDPO())

    def callbacks(folder):
        return [rl.RolloutMonitor(), rl.SampleLogger(every_n_steps=1), rl.RolloutTape(str(tmp_path / folder))]

    def parts_of(folder):
        steps = Tape(str(tmp_path / folder)).steps()
        return {step.step: [one.reward_parts for group in step.groups for one in group.rollouts] for step in steps}

    whole, resumed = make_module(), make_module()
    keep = rl.LinkedCheckpoint(tmp_path / "kept", every_n_train_steps=2, save_top_k=-1, filename="{step}")
    settings = dict(log_every_n_steps=1, logger=CSVLog(str(tmp_path), name="whole"), enable_checkpointing=True)
    fit(whole, data(), 5, [*callbacks("whole"), keep], **settings)
    fit(resumed, data(), 5, callbacks("resumed"), str(tmp_path / "kept" / "step=2.ckpt"))
    assert torch.equal(parameters(whole), parameters(resumed))
    parts = parts_of("whole")
    assert parts_of("resumed") == {step: parts[step] for step in (2, 3, 4)}
    assert all({"answer", "digits"} <= one.keys() <= PARTS.keys() for rows in parts.values() for one in rows)

    (file,) = (tmp_path / "whole").rglob("metrics.csv")
    row = next(csv.DictReader(file.open()))
    for name in PARTS:
        applies = [one[name] for one in parts[0] if name in one]
        assert float(row[f"reward/part/{name}"]) == pytest.approx(sum(applies) / len(applies), abs=1e-5)
    (samples,) = (tmp_path / "whole").rglob("samples.jsonl")
    assert json.loads(samples.read_text().splitlines()[0])["reward_parts"].keys() <= PARTS.keys()
    report = write_report(file.parent, out=tmp_path / "report.html").read_text()
    assert all(f"reward/part/{name}" in report for name in PARTS)


# -- in a file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--data.reward", "{a: x.y, b: x.z}"], ["--data.reward={a: x.y, b: x.z}"]])
def test_rewards_by_name_on_the_command_line_are_written_out_too(words):
    text = " ".join(files_first(["--trainer.max_steps", "3", *words]))
    assert text.startswith("--trainer.max_steps 3 --data.reward")
    assert text.endswith(
        '{"class_path": "lit_async_rl.CombinedReward", "init_args": {"rewards": {"a": "x.y", "b": "x.z"}}}'
    )
    assert files_first(["--data.reward", "x.y"]) == ["--data.reward", "x.y"]


def test_rewards_by_name_in_a_file_are_written_out_as_a_combination_and_others_stay():
    import yaml

    short_form = "data:\n  reward:\n    answer: a.b\n    has: {class_path: c.D, init_args: {word: x}}\nseed: 1\n"
    assert yaml.safe_load(own_settings(short_form, write_out_rewards)) == {
        "data": {
            "reward": {
                "class_path": "lit_async_rl.CombinedReward",
                "init_args": {"rewards": {"answer": "a.b", "has": {"class_path": "c.D", "init_args": {"word": "x"}}}},
            }
        },
        "seed": 1,
    }
    for text in (
        "data: {reward: a.b}\n",
        "data: {reward: {class_path: c.D}}\n",
        "seed: 1\n",
        "data: {reward: {init_args: {x: 1}}}",
    ):
        assert own_settings(text, write_out_rewards) == own_settings(text)


# -- GDPO -------------------------------------------------------------------------------------------------------------


@given(
    rows=st.lists(
        st.lists(st.dictionaries(st.sampled_from("abc"), st.floats(-2, 2), min_size=1), min_size=1, max_size=5),
        min_size=1,
        max_size=4,
    ),
    weight=st.floats(-2, 2),
)
def test_gdpo_is_the_formula_of_the_paper(rows, weight):
    import numpy as np

    eps = 1e-3  # amplifies rounding less than the default
    groups = [scored(*parts) for parts in rows]
    weights = {"a": weight} if any("a" in row for parts in rows for row in parts) else {}
    found = rl.GDPO(weights=weights, eps=eps).per_token(groups)
    totals = []
    for parts in rows:
        total = np.zeros(len(parts))
        for name in "abc":
            at = [n for n, row in enumerate(parts) if name in row]
            if at:
                r = np.array([parts[n][name] for n in at])
                total[at] += weights.get(name, 1.0) * (r - r.mean()) / (r.std() + eps)
        totals.append(total)
    flat = np.concatenate(totals)
    expected = [(total - flat.mean()) / (flat.std() + eps) for total in totals]
    for tokens, values in zip(found, expected, strict=True):
        assert [row[0] for row in tokens] == pytest.approx(list(values), abs=1e-9)
        assert all(len(set(row)) == 1 and len(row) == 3 for row in tokens)


def test_gdpo_tells_apart_what_a_sum_confuses():
    groups = [scored({"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}, {"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 1.0})]
    (by_part,) = rl.GDPO().per_token(groups)
    (by_sum,) = rl.GroupMeanStd().per_token(groups)
    assert by_sum[0] == by_sum[1]
    assert by_part[0][0] > by_part[1][0]  # one of four has `a`, two have `b`


def test_gdpo_without_parts_is_refused_and_so_are_weights_of_parts_that_are_not_there():
    with pytest.raises(ValueError, match=r"data\.advantage=GDPO .*data\.reward has no parts"):
        make_data(advantage=rl.GDPO())
    with pytest.raises(ValueError, match=r"data\.advantage\.weights names form, but data\.reward has answer"):
        make_data(advantage=rl.GDPO(weights={"form": 1.0}), reward={"answer": rl.exact_match})


# -- batches, and TRL's form ------------------------------------------------------------------------------------------


def test_a_batched_reward_gets_all_completions_that_wait_and_each_its_own_value():
    sizes = []
    first = threading.Event()

    def lengths(prompts, completions):
        sizes.append(len(completions))
        first.wait(10)  # the others come to wait meanwhile
        return [float(len(text)) for text in completions]

    reward = as_reward_function(lengths)
    scorer = Scorer(reward, num_workers=16)
    threading.Timer(0.5, first.set).start()
    asked = [(PROMPT, "x" * n) for n in range(64)]
    try:
        assert score_all(scorer, asked, on_progress=lambda: None) == [float(n) for n in range(64)]
    finally:
        scorer.close()
    assert sum(sizes) == 64
    assert max(sizes) > 1
    assert reward_name(reward).endswith("lengths")


def test_an_error_of_a_batch_reaches_each_of_its_completions():
    reward = as_reward_function(lambda prompts, completions: [1.0])
    with pytest.raises(RewardError, match="returned 2 rewards for 1"):
        score(as_reward_function(lambda prompts, completions: [1.0, 2.0]), PROMPT, "4")
    with pytest.raises(RewardError, match="which is not a list of rewards"):
        score(as_reward_function(lambda prompts, completions: 1.0), PROMPT, "4")
    assert score(reward, PROMPT, "4") == 1.0


def test_rewards_in_the_form_of_trl_get_texts_messages_and_columns():
    def accuracy_reward(completions, solution, **kwargs):
        return [1.0 if text == wanted else None for text, wanted in zip(completions, solution, strict=True)]

    def of_chats(prompts, completions, level, **kwargs):
        assert prompts[0][-1]["role"] == "user"
        return [float(reply[0]["content"] == "4" and level[n] == "easy") for n, reply in enumerate(completions)]

    def without_extras(completions, answer):
        return [float(text == one) for text, one in zip(completions, answer, strict=True)]

    chat = rl.Prompt(messages=[{"role": "user", "content": "2 + 2?"}], answer="4", metadata={"level": "easy"})
    assert score(rl.TRLReward(accuracy_reward, answer_field="solution"), PROMPT, "4") == 1.0
    assert score(as_reward_function(of_chats), chat, "4") == 1.0
    assert score(as_reward_function(without_extras), PROMPT, "5") == 0.0
    with pytest.raises(RewardError, match="needs solution, but the prompts have answer, completions, level, prompts"):
        score(as_reward_function(accuracy_reward), PROMPT, "4")
    both = rl.CombinedReward({"right": rl.TRLReward(accuracy_reward, answer_field="solution"), "digits": digits})
    assert both(PROMPT, "5").parts == {"digits": 1.0}


def test_a_reward_in_the_form_of_trl_gets_an_answer_as_the_record_has_it(tmp_path):
    def right(completions, answer, **kwargs):
        return [1.0 if int(text) == one else 0.0 for text, one in zip(completions, answer, strict=True)]

    records = [{"prompt": "2+2=", "answer": 4, "n": 1}, {"prompt": "1+1=", "answer": 2, "n": 2}]
    lines = "".join(json.dumps({"question": one["prompt"], "solution": one["answer"]}) + "\n" for one in records)
    (tmp_path / "sums.jsonl").write_text(lines)
    in_file = rl.JsonlPrompts(str(tmp_path / "sums.jsonl"), prompt_field="question", answer_field="solution")
    for source, field in ((rl.InMemoryPrompts(records), None), (in_file, "solution")):
        reward = rl.TRLReward(right, answer_field=field)
        assert [score(reward, source[n], text) for n, text in ((0, "4"), (1, "2"), (0, "5"))] == [1.0, 1.0, 0.0]
        assert [source[n].answer for n in range(2)] == ["4", "2"]  # of graders and other forms: text
    several = rl.InMemoryPrompts([{"prompt": "half", "answer": ["1/2", 0.5]}])[0]
    assert score(as_reward_function(lambda completions, answer: [float(answer[0][1] == 0.5)]), several, "x") == 1.0


def single_turned(completion, prompt):
    return float(completion.startswith("yes") and prompt.text.endswith("?"))


async def awaited_turned(completion, prompt, token_ids):
    return float(completion.startswith("yes") and prompt.text.endswith("?") and token_ids == (7,))


def batch_turned(completions, prompts):
    return [
        float(text.startswith("yes") and one.text.endswith("?")) for text, one in zip(completions, prompts, strict=True)
    ]


class Turned:
    def __call__(self, completion, prompt):
        return 1.0


@pytest.mark.parametrize("function", [single_turned, awaited_turned, batch_turned])
def test_parameters_that_are_recognized_by_name_may_stand_in_any_order(function):
    prompt = rl.Prompt(text="no or yes?")
    reward = as_reward_function(function)
    assert score(reward, prompt, "yes", token_ids=(7,)) == 1.0
    assert score(reward, prompt, "no", token_ids=(7,)) == 0.0
    assert score(rl.CombinedReward({"it": function}), prompt, "yes", token_ids=(7,)).parts == {"it": 1.0}
    assert reward_name(reward).endswith(function.__name__)
    assert make_data(reward=function).reward is not None  # not refused
    with pytest.raises(ValueError, match=r"Turned has the parameters \(completion, prompt\).*swap the two parameters"):
        as_reward_function(Turned())


def test_a_batch_that_wants_completions_only_is_of_trls_form():
    assert (
        score(as_reward_function(lambda completions: [float(text == "4") for text in completions]), PROMPT, "4") == 1.0
    )


def test_the_answer_field_of_the_prompts_names_the_column_of_a_trl_reward(tmp_path):
    def right(completions, solution, **kwargs):
        return [float(text.strip() == one) for text, one in zip(completions, solution, strict=True)]

    file = tmp_path / "sort.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}=", "solution": str(n)}) + "\n" for n in range(12, 90)))
    prompts = rl.JsonlPrompts(str(file), answer_field="solution")
    data = make_data(prompts=prompts, reward={"right": right, "digits": digits})
    fit(make_module(), data, 1)
    assert all(r.reward_parts.keys() == {"right", "digits"} for g in data.last_step_groups for r in g.rollouts)


def in_trls_form(completions, solution, **kwargs):
    return [float(text.strip() == one) for text, one in zip(completions, solution, strict=True)]


def test_the_answer_field_reaches_a_trl_reward_wherever_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trl_rewards.py").write_text(
        "def right(completions, solution, **kwargs):\n"
        "    return [float(text == one) for text, one in zip(completions, solution)]\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1 + 1 =", "solution": "2"}\n')
    prompts = rl.JsonlPrompts("sums.jsonl", answer_field="solution")
    isolated = rl.IsolatedReward("trl_rewards.right", timeout_s=50.0)
    identity = reward_identity(isolated)
    rewards = [make_data(prompts=prompts, reward={"it": isolated}).reward, isolated]
    held_out = rl.Validation(prompts=prompts)
    records = [{"prompt": "1 =", "completion": "1"}]
    rewards += [rl.SFTDataModule(records=records, reward=in_trls_form, validation=held_out).reward]
    judge = rl.JudgeReward("a-judge", "http://127.0.0.1:9/v1", on_failure="fallback", fallback=in_trls_form, cache=None)
    make_data(prompts=prompts, reward={"judge": judge, "digits": digits})
    tool = rl.PythonTool(in_trls_form, allow_unsandboxed=True)
    make_data(prompts=prompts, reward=None, engine=rl.EpisodeEngine(rl.EmbeddedEngine(), tool))
    for reward in (*rewards, judge.fallback, tool.reward):
        assert [score(reward, prompts[0], text) for text in ("2", "3")] == [1.0, 0.0]
    assert reward_identity(isolated) == identity, "a run of an earlier version goes on"


# -- `async` parts need no threads -------------------------------------------------------------------------------------


class Waits:
    """An `async` part that counts its calls under way."""

    max_concurrent = 500

    def __init__(self):
        self.under_way = self.most = 0
        self.is_open = asyncio.Event()

    async def __call__(self, prompt, completion):
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        if self.most >= 300:
            self.is_open.set()
        await self.is_open.wait()
        self.under_way -= 1
        return 1.0


@pytest.mark.slow
def test_hundreds_of_async_parts_are_under_way_with_two_workers():
    waits, limited = Waits(), Limited()
    reward = rl.CombinedReward({"waits": waits, "limited": limited, "plain": lambda prompt, completion: 0.5})
    scorer = Scorer(reward, num_workers=2)
    before = threading.active_count()
    try:
        found = score_all(scorer, [(Prompt(text=""), str(n)) for n in range(400)], lambda: None)
        assert threading.active_count() <= before + 3
    finally:
        scorer.close()
    assert [(score, score.parts) for score in found] == [(2.5, {"waits": 1.0, "limited": 1.0, "plain": 0.5})] * 400
    assert waits.most >= 300
    assert limited.most <= 3


class Limited:
    """An `async` part with a limit of its own."""

    max_concurrent = 3

    def __init__(self):
        self.under_way = self.most = 0

    async def __call__(self, prompt, completion):
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        return 1.0


def test_an_async_part_that_hangs_or_fails_is_given_up_and_named(caplog):
    async def part(prompt, completion):
        if completion == "fails":
            raise RuntimeError("no")
        await asyncio.sleep(60 if completion == "hangs" else 0)
        return 1.0

    reward = rl.CombinedReward({"slow": part, "plain": lambda prompt, completion: 0.0})
    scorer = Scorer(reward, num_workers=2, timeout_s=0.5, max_tries=1)
    try:
        texts = ["a", "hangs", "b", "fails", "c"]
        assert score_all(scorer, [(Prompt(text=""), text) for text in texts], lambda: None) == [1, None, 1, None, 1]
    finally:
        scorer.close()
    assert "its part 'slow' raised RuntimeError: no" in caplog.text
    assert "did not return within" in caplog.text


def against_solutions(completions, solution):
    return [float(one == right) for one, right in zip(completions, solution, strict=True)]


def test_rewards_that_an_environment_or_judge_calls_know_the_answers_column_in_another_process_too():
    """Pools send both as the arguments of their constructors."""
    prompt = Prompt(text="?", answer="5", metadata={})
    endpoint = dict(model="m", base_url="http://localhost:1/v1", on_failure="fallback")
    judge = rl.JudgeReward(**endpoint, fallback=against_solutions)
    tool = rl.PythonTool(reward=against_solutions, allow_unsandboxed=True)
    judged = rl.PythonTool(reward=judge, allow_unsandboxed=True)
    name_answers(tool, "solution")
    name_answers(judged, "solution")
    sent = [pickle.loads(pickle.dumps(one)) for one in (tool, judged, judge)]
    here = [tool.reward, judge.fallback]
    for reward in (*here, sent[0].reward, sent[1].reward.fallback, sent[2].fallback):
        assert [reward(prompt, text) for text in "56"] == [1.0, 0.0]
