"""Tasks: answers are right, held-out problems are never trained on, and the shipped policy can begin with one."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_async_rl.assets import asset
from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.errors import RewardError
from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.calls import score
from lit_async_rl.rewards.functions import exact_match
from lit_async_rl.tasks import Addition, ReasoningGym, ReasoningGymReward, SortDigits

SOURCES = {
    "sort": SortDigits,
    "sort two": lambda **settings: SortDigits(2, **settings),
    "add": Addition,
    "add one": lambda **settings: Addition(1, **settings),
    "chain_sum": lambda **settings: ReasoningGym("chain_sum", **settings, config={"max_terms": 3, "max_digits": 1}),
}


def text_of(prompt):
    return prompt.text


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize(("train_seed", "held_out_seed"), [(0, 0), (0, 1), (7, 0)])
def test_no_held_out_problem_is_ever_trained_on(name, train_seed, held_out_seed):
    train = set(map(text_of, SOURCES[name](size=1500, seed=train_seed)))
    held_out = set(map(text_of, SOURCES[name](size=300, split="held_out", seed=held_out_seed)))
    assert train
    assert held_out
    assert not train & held_out


def test_sums_are_held_out_in_both_orders():
    train, held_out = (
        {tuple(sorted(re.findall(r"\d+", p.text))) for p in Addition(size=n, split=s)}
        for n, s in ((4000, "train"), (1000, "held_out"))
    )
    assert not train & held_out


@pytest.mark.parametrize("name", SOURCES)
def test_a_problem_depends_on_seed_and_index_alone(name):
    source, again = SOURCES[name](size=50, seed=3), SOURCES[name](size=50, seed=3)
    backwards = [again[n].text for n in reversed(range(50))]
    assert [p.text for p in source] == backwards[::-1]
    assert [p.text for p in source] != [p.text for p in SOURCES[name](size=50, seed=4)]
    for outside in (-1, 50):
        with pytest.raises(IndexError):
            source[outside]


@given(st.integers(2, 12), st.integers(0, 10**6), st.sampled_from(["train", "held_out"]))
def test_digits_are_sorted(num_digits, index, split):
    prompt = SortDigits(num_digits, size=10**6 + 1, split=split)[index]
    digits = [int(c) for c in prompt.text.removesuffix("=")]
    answer = [int(c) for c in prompt.answer]
    assert len(digits) == num_digits
    assert all(a <= b for a, b in pairwise(answer))
    assert all(digits.count(d) == answer.count(d) for d in range(10))


@given(st.integers(1, 6), st.integers(0, 1000))
def test_sums_are_right(num_digits, index):
    prompt = Addition(num_digits, size=1001)[index]
    a, b = prompt.text.removesuffix("=").split("+")
    assert len(a) <= num_digits
    assert int(a) + int(b) == int(prompt.answer)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SortDigits(1), "num_digits must be >= 2, got 1"),
        (lambda: SortDigits(size=0), "size must be >= 1, got 0"),
        (lambda: SortDigits(tail=0.0), "SortDigits.tail must be positive, got 0.0"),
        (lambda: Addition(0), "num_digits must be >= 1, got 0"),
        (lambda: ReasoningGym("no_such_task"), "no_such_task"),
        (lambda: ReasoningGym("chain_sum", config={"no_such_setting": 1}), "no_such_setting"),
        (lambda: ReasoningGym("chain_sum", config={"min_terms": 9, "max_terms": 2}), "max_terms"),
        (lambda: ReasoningGym("chain_sum", template="x"), "template"),
    ],
)
def test_a_wrong_setting_is_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()


# -- reasoning-gym ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reasoning_reward():
    return ReasoningGymReward()


@pytest.mark.parametrize("task", ["chain_sum", "number_sorting", "word_ladder", "letter_counting", "gsm_symbolic"])
def test_reasoning_gym_scores_its_own_answers(task, reasoning_reward):
    source = ReasoningGym(task, size=4, seed=3, template="{prompt} Answer:")
    for prompt in source:
        assert prompt.text.endswith(" Answer:")
        assert reasoning_reward(prompt, f" {prompt.answer}\n") == 1.0
        assert reasoning_reward(prompt, "no idea") < 1.0


@pytest.mark.parametrize(("task", "text"), [("prime_factorization", "I think 2 x 3"), ("game_of_life", "{}")])
def test_a_text_that_the_library_cannot_read_is_wrong_and_no_error(task, text, reasoning_reward):
    prompt = ReasoningGym(task, size=1)[0]
    assert score(reasoning_reward, prompt, text) == 0.0
    assert score(reasoning_reward, prompt, prompt.answer) == 1.0


def test_a_problem_that_the_library_cannot_read_is_an_error(reasoning_reward):
    prompt = ReasoningGym("prime_factorization", size=1)[0]
    broken = replace(prompt, metadata={**prompt.metadata, "entry": {"answer": "no number"}})
    with pytest.raises(RewardError, match=r"invalid literal for int.*no number"):
        score(reasoning_reward, broken, "2 x 3")


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_reasoning_gym_problems_of_one_set_differ(split):
    texts = [p.text for p in ReasoningGym("chain_sum", size=200, split=split, config={"min_digits": 3})]
    assert len(set(texts)) == 200


def test_the_task_is_asked_not_the_text(reasoning_reward):
    prompt = ReasoningGym("countdown", size=1)[0]
    numbers = prompt.metadata["entry"]["metadata"]["numbers"]
    assert reasoning_reward(prompt, f"0 + {prompt.answer}") < 1.0  # a number that was not given
    assert reasoning_reward(prompt, f"({prompt.answer})") == 1.0
    assert reasoning_reward(prompt, "+".join(map(str, numbers))) < 1.0


@pytest.mark.slow
def test_a_task_that_calculates_for_ever_is_ended():
    reward, prompt = ReasoningGymReward(timeout_s=0.5), ReasoningGym("countdown", size=1)[0]
    assert reward(prompt, "9**9**9**9") == 0.0
    assert reward(prompt, prompt.answer) == 1.0


def test_only_the_tagged_answer_counts_if_asked():
    prompt, reward = ReasoningGym("chain_sum", size=1)[0], ReasoningGymReward(answer_tag="answer")
    assert reward(prompt, prompt.answer) == 0.0
    assert reward(prompt, f"<answer>1</answer>, no: <answer>\n{prompt.answer} </answer>!") == 1.0
    assert reward(prompt, f"<answer>{prompt.answer}</answer> <answer>x</answer>") < 1.0


def test_other_prompts_are_refused(reasoning_reward):
    with pytest.raises(RewardError, match="only prompts of ReasoningGym"):
        score(reasoning_reward, Prompt(text="q", answer="a"), "a")


# -- the shipped policy -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy():
    folder = asset("sort_policy")
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.slow
def test_the_tokenizer_gives_every_printable_character_back(policy):
    tokenizer = policy[1]
    text = "".join(map(chr, range(32, 127))) + "\n"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text) == len(set(ids))
    assert not set(ids) & set(tokenizer.all_special_ids)
    assert tokenizer.decode(ids) == text
    for prompt in (*SortDigits(size=20), *Addition(size=20)):
        assert tokenizer.decode(tokenizer(prompt.text + prompt.answer)["input_ids"]) == prompt.text + prompt.answer


def test_model_and_tokenizer_fit(policy):
    lm, tokenizer = policy
    assert lm.config.vocab_size == len(tokenizer)
    assert lm.config.eos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id == lm.config.pad_token_id
    assert lm.dtype == torch.float32


def test_it_begins_with_something_to_reinforce_and_much_to_learn(policy):
    lm, tokenizer = policy
    prompts = list(SortDigits(size=512, split="held_out"))
    sampling = SamplingParams(max_tokens=12)
    requests = [
        GenerationRequest(id=n, prompt_ids=tuple(tokenizer(p.text)["input_ids"]), num_samples=1, sampling=sampling)
        for n, p in enumerate(prompts)
    ]
    completions = EmbeddedEngine.from_module(lm, seed=0).run(requests)
    texts = [tokenizer.decode(c[0].token_ids, skip_special_tokens=True) for c in completions]
    accuracy = sum(map(exact_match, prompts, texts)) / len(prompts)
    assert 0.22 <= accuracy <= 0.42


def test_an_unknown_asset_is_named_with_those_there_are():
    with pytest.raises(FileNotFoundError, match=r"no asset 'x'; there are .*sort_policy"):
        asset("x")


def test_lengths_can_be_mixed_and_problems_of_one_length_stay_what_they_were():
    mixed = SortDigits(7, size=300, min_digits=3)
    lengths = [len(mixed[n].answer or "") for n in range(300)]
    assert set(lengths) == {3, 4, 5, 6, 7}
    assert min(lengths.count(n) for n in range(3, 8)) > 30
    assert [SortDigits(7, size=9)[n] for n in range(9)] == [SortDigits(7, size=9, min_digits=7)[n] for n in range(9)]
    with pytest.raises(ValueError, match=r"SortDigits\.min_digits must be in \[2, 7\], got 8"):
        SortDigits(7, min_digits=8)


def test_lengths_with_a_tail_are_mostly_short_and_sometimes_ten_times_as_long():
    lengths = sorted(len(SortDigits(30, size=1000, min_digits=3, tail=1.2)[n].answer) for n in range(1000))
    assert lengths[0] == 3
    assert 4 <= lengths[500] <= 6
    assert lengths[-30] == lengths[-1] == 30


@pytest.mark.parametrize("num_digits", [1, 3])
def test_summands_have_at_most_so_many_digits_and_some_have_them(num_digits):
    texts = "".join(Addition(num_digits, size=40)[n].text for n in range(40))
    assert max(len(number) for number in re.findall(r"\d+", texts)) == num_digits


@pytest.mark.parametrize("changes", [{"num_digits": 1}, {"min_digits": 9}, {"tail": 0.0}], ids=str)
def test_settings_of_digits_out_of_range_are_refused(changes):
    (name,) = changes
    with pytest.raises(ValueError, match=f"SortDigits.*{name}"):
        SortDigits(**changes)
