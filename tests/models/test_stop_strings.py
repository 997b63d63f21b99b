"""A completion ends with the first token after which its text, decoded anew each time, contains a stop string."""

import random

import pytest
import torch
from chat_models import brute_force, byte_fallback, byte_level, chat_model
from flow import make_data
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_tokenizer

from lit_async_rl.assets import asset
from lit_async_rl.callbacks import Evaluation
from lit_async_rl.cli.chat import main as chat
from lit_async_rl.engines.base import Completion, GenerationRequest, SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.models.loading import load_policy, load_tokenizer
from lit_async_rl.models.tokenizer import MAX_TABLES, StopStrings, TextCodec, _may_end, cut_at_stop
from lit_async_rl.problem import Prompt
from lit_async_rl.prompts.sources import InMemoryPrompts
from lit_async_rl.rollouts.group_book import SampleRequests
from lit_async_rl.vllm.requests import end_at_stop

FINDERS = {
    "bytes": StopStrings(byte_level()),
    "byte fallback": StopStrings(byte_fallback()),
    "characters": StopStrings(load_tokenizer(asset("sort_policy"))),
    "words": StopStrings(tiny_tokenizer()),
}


@pytest.mark.parametrize("kind", FINDERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_end_is_where_decoding_every_prefix_finds_it(kind, data):
    """Stop strings are cut out of the text itself, so that they span tokens and characters of several bytes."""
    finder = FINDERS[kind]
    ids = data.draw(st.lists(st.integers(0, len(finder.tokenizer) - 1), min_size=1, max_size=60))
    text = finder.tokenizer.decode(ids, skip_special_tokens=True)
    begin = data.draw(st.integers(0, max(0, len(text) - 1)))
    found = text[begin : begin + data.draw(st.integers(1, 6))]
    others = data.draw(st.lists(st.sampled_from(["\n\n", "stop", "é東", "12", " a", "."]), max_size=2))
    stops = tuple(stop for stop in [found.replace("\ufffd", ""), *others] if stop) or ("x",)
    end = brute_force(finder.tokenizer, ids, stops)
    assert finder.first_end(ids, stops) == end
    if end is not None:
        after = data.draw(st.integers(0, end - 1))
        assert finder.first_end(ids, stops, after) == end


def test_a_token_beyond_the_tokenizer_ends_nothing():
    """Models have more rows than tokens, to fill a block, and an engine may sample any of them."""
    model = asset("sort_policy")
    finder = StopStrings.of_model(model, len(load_tokenizer(model)) + 8)
    text = finder.tokenizer("12", add_special_tokens=False)["input_ids"]
    ids = (len(finder.tokenizer) + 7, *text)
    assert finder.first_end(ids, ("12",)) == len(ids)
    assert finder.first_end(ids[:1], ("12",)) is None


class Counted(str):
    """A text that counts how often it is cut."""

    num_cuts = 0

    def __getitem__(self, place):
        self.num_cuts += 1
        return super().__getitem__(place)


@pytest.mark.parametrize("kind", FINDERS)
def test_the_cost_of_a_stop_string_does_not_grow_with_its_length(kind):
    """An agent orders it with a call, and the engine of all agents waits."""
    finder = FINDERS[kind]
    longest = max(len(finder.tokenizer.decode([token])) for token in range(len(finder.tokenizer)))
    for text in ("x" * 20_000 + "1", "größe 日本" * 2000 + " a", " " * 20_000):
        stop = Counted(text)
        table = finder.may_end((stop,))
        assert stop.num_cuts <= longest + 2
        # a token ends it as it ends the last characters of it, which no token is longer than
        assert torch.equal(table, finder.may_end((text[-longest - 2 :],)))


def test_tables_of_stop_strings_are_not_kept_for_ever():
    finder = FINDERS["words"]
    for number in range(2 * MAX_TABLES):
        finder.may_end((f"stop {number}",))
    assert _may_end.cache_info().currsize == MAX_TABLES


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [("abcabc", ["c", "b"], "a"), ("abc", ["x"], "abc"), ("abc", [], "abc"), ("\n\nabc", ["\n\n"], "")],
)
def test_text_is_cut_before_the_first_stop_string(text, stops, expected):
    assert cut_at_stop(text, stops) == expected


# -- the embedded engine ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("chat"))


def sample(model, sampling, num_samples=24, prompts=((5, 6, 7), (9, 9)), num_slots=16):
    engine = EmbeddedEngine.from_module(load_policy(model), num_slots=num_slots, seed=3)
    requests = [
        GenerationRequest(id=n, prompt_ids=ids, num_samples=num_samples, sampling=sampling)
        for n, ids in enumerate(prompts)
    ]
    return [completion for group in engine.run(requests) for completion in group]


@pytest.mark.parametrize("stops", [("e",), ("\n\n", "an"), ("é", "t "), ("東", "th")])
def test_the_engine_ends_where_brute_force_would_and_keeps_all_it_sampled(model, stops):
    tokenizer = load_tokenizer(model)
    completions = sample(model, SamplingParams(max_tokens=40, stop=stops))
    found = 0
    for completion in completions:
        end = brute_force(tokenizer, completion.token_ids, stops)
        if end is not None:
            found += 1
            assert (end, completion.finish_reason) == (len(completion.token_ids), "stop")
        elif completion.finish_reason == "length":
            assert len(completion.token_ids) == 40
        assert len(completion.token_ids) == len(completion.logprobs) == len(completion.versions)
        text = TextCodec(model).decode(completion.token_ids, stops)
        assert not any(stop in text for stop in stops)
    assert found >= (1 if "東" in stops else 3), "no stop string was ever sampled: the test says nothing"


def test_requests_with_and_without_stop_strings_share_slots(model):
    engine = EmbeddedEngine.from_module(load_policy(model), num_slots=4, seed=0)
    plain, stopping = SamplingParams(max_tokens=30), SamplingParams(max_tokens=30, stop=("e", "a", "o"))
    requests = [
        GenerationRequest(id=n, prompt_ids=(5, n + 5), num_samples=6, sampling=stopping if n % 2 else plain)
        for n in range(4)
    ]
    tokenizer = load_tokenizer(model)
    groups = engine.run(requests)
    for request, completions in zip(requests, groups, strict=True):
        for completion in completions:
            end = brute_force(tokenizer, completion.token_ids, request.sampling.stop or ("e", "a", "o"))
            assert not request.sampling.stop or end in (None, len(completion.token_ids))
    assert any(brute_force(tokenizer, c.token_ids[:-1], ("e", "a", "o")) for group in groups[::2] for c in group), (
        "without stop strings nothing ends there"
    )


def test_without_stop_strings_no_tokenizer_is_needed_and_with_them_a_nameless_model_is_refused(model):
    lm = load_policy(model)
    lm.name_or_path = ""
    engine = EmbeddedEngine.from_module(lm)
    request = GenerationRequest(id=0, prompt_ids=(5,), num_samples=1, sampling=SamplingParams(max_tokens=3))
    assert engine.run([request])
    request = GenerationRequest(
        id=1, prompt_ids=(5,), num_samples=1, sampling=SamplingParams(max_tokens=3, stop=("a",))
    )
    with pytest.raises(ValueError, match=r"sampling\.stop needs a tokenizer"):
        engine.run([request])


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_stop_string_that_begins_before_an_interruption_ends_the_completion_after_it(model, cut):
    """Both engines: the embedded one looks at the tokens before, vLLM's completions are cut."""
    tokenizer = load_tokenizer(model)
    stop = "3141592"  # digits are tokens of their own here
    ids = tuple(tokenizer("x" + stop + "yz")["input_ids"])
    end = brute_force(tokenizer, ids, (stop,))
    assert end is not None
    finder, sampling = StopStrings(tokenizer), SamplingParams(max_tokens=len(ids), stop=(stop,))

    def completion(tokens, reason):
        rows = dict(logprobs=tuple(-float(n) for n in range(len(tokens))), versions=tuple(range(len(tokens))))
        return Completion(request_id=-1, sample_index=0, token_ids=tokens, finish_reason=reason, **rows)

    partial = completion(ids[: end - cut], "abort")
    requests = SampleRequests(1, sampling, replicate_prompts=False)
    (request,) = requests.make(0, Prompt(text="p"), (5, 6), [0], [partial])
    assert request.resumed_ids == partial.token_ids
    assert finder.is_at_end(request.resumed_ids + ids[end - cut : end], (stop,))
    rest = end_at_stop(completion(ids[end - cut :], "length"), request, finder)
    assert (rest.token_ids, rest.finish_reason) == (ids[end - cut : end], "stop")
    assert len(rest.logprobs) == len(rest.versions) == cut


@pytest.mark.slow
def test_a_resumed_completion_goes_on_to_the_same_end_in_the_embedded_engine(model):
    """Greedy, so that it must be the same: interrupted anywhere, also in the middle of the stop string."""
    greedy = SamplingParams(max_tokens=40, temperature=0.0)
    (whole,) = sample(model, greedy, num_samples=1, prompts=((5, 6, 7),))
    tokenizer = load_tokenizer(model)
    text = tokenizer.decode(list(whole.token_ids), skip_special_tokens=True)
    rng, checked = random.Random(0), 0
    for _ in range(30):
        begin = rng.randrange(len(text) - 4)
        stop = text[begin : begin + rng.randrange(2, 5)]
        end = brute_force(tokenizer, whole.token_ids, (stop,))
        if "\ufffd" in stop or end is None or end < 3:
            continue
        checked += 1
        cut = rng.randrange(1, end)
        sampling = SamplingParams(max_tokens=40 - cut, temperature=0.0, stop=(stop,))
        engine = EmbeddedEngine.from_module(load_policy(model))
        known = whole.token_ids[:cut]
        request = GenerationRequest(
            id=0, prompt_ids=(5, 6, 7, *known), num_samples=1, sampling=sampling, num_resumed=cut
        )
        ((rest,),) = engine.run([request])
        assert known + rest.token_ids == whole.token_ids[:end]
        assert rest.finish_reason == "stop"
        torch.testing.assert_close(
            torch.tensor(rest.logprobs), torch.tensor(whole.logprobs[cut:end]), atol=1e-4, rtol=0
        )
    assert checked >= 5


def test_stop_strings_are_texts_that_are_not_empty():
    with pytest.raises(ValueError, match=r"sampling\.stop must be a list of non-empty strings, got \('a', ''\)"):
        SamplingParams(stop=("a", ""))
    with pytest.raises((ValueError, TypeError)):
        SamplingParams(stop="\n")  # would be one stop string for each character


def test_a_special_token_as_a_stop_string_is_refused_with_its_id(model):
    codec = TextCodec(model)
    with pytest.raises(ValueError, match=r"'<\|im_end\|>' is a special token .* use sampling.stop_token_ids: \[2\]"):
        codec.check_stop(["\n", "<|im_end|>"])


def test_a_special_token_is_refused_where_held_out_prompts_are_sampled_too(model):
    """Nothing ended at it: each completion had `max_tokens`, and was scored as a whole."""
    sampling, refused = SamplingParams(stop=("<|im_end|>",)), r"'<\|im_end\|>' is a special token"
    data = make_data(model=model, prompts=["say 1"], val_prompts=["say 2"], val_sampling=sampling)
    with pytest.raises(ValueError, match=refused):
        data.held_out.batches(data.codec, 0, 1)
    with pytest.raises(ValueError, match=refused):
        Evaluation({"held out": InMemoryPrompts(["say 2"])}, sampling=sampling)._read(data)
    with pytest.raises(SystemExit, match=refused):
        chat(["--model", model, "--prompt", "say 3", "--stop", "<|im_end|>"])
