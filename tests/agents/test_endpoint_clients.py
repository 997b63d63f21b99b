"""The official client and a real engine: what the client gets is what the trainer gets, once."""

import asyncio
import json
import threading

import httpx
import openai
import pytest
from agent_endpoints import TOOL, TOOLS, WAIT_S, held, template, wait_for
from chat_models import chat_model

from lit_async_rl.agents import ReplyMessage, ReplyParser, ToolCall
from lit_async_rl.problem import Prompt

MODEL = "gpt-4o-mini"  # as unmodified scripts have it
ASK = {"model": MODEL, "messages": [{"role": "user", "content": "8312="}]}
pytestmark = pytest.mark.timeout(240)


def client_of(given, **settings) -> openai.OpenAI:
    """Another official client, synchronous, for the same episode."""
    return openai.OpenAI(base_url=str(given.base_url), api_key=given.api_key, **settings)


def post(client, body, path="/chat/completions", **headers) -> httpx.Response:
    """A request without a client library."""
    url = str(client.base_url).rstrip("/") + path
    sent = {"Authorization": f"Bearer {client.api_key}"} | headers
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(url, content=content, headers=sent, timeout=WAIT_S)


def finish(episodes, number=1):
    """Ends the agents; their samples."""
    episodes.end_agents()
    return episodes.results(number)


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A model that writes arbitrary bytes."""
    return chat_model(tmp_path_factory.mktemp("chat"), TOOLS)


# -- what the client gets is what the trainer gets --------------------------------------------------------------------


def test_replies_have_the_tokens_that_train(tmp_path):
    with held(tmp_path) as (episodes, (given,)):
        client = client_of(given)
        first = client.chat.completions.create(**ASK, logprobs=True, extra_body={"return_token_ids": True})
        choice = first.choices[0]
        turns = [*ASK["messages"], choice.message, {"role": "user", "content": "52="}]
        second = client.chat.completions.create(model=MODEL, messages=turns, extra_body={"return_token_ids": True})
        (sample,) = finish(episodes)
    assert first.usage.total_tokens == first.usage.prompt_tokens + first.usage.completion_tokens
    assert first.usage.prompt_tokens == len("8312=")
    assert choice.finish_reason == "stop"
    assert first.model == MODEL
    tokens = [entry.token for entry in choice.logprobs.content]
    assert "".join(tokens) == choice.message.content + "<eos>"
    assert [bytes(entry.bytes).decode() for entry in choice.logprobs.content] == tokens
    trained = [t for t, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if mask]
    assert trained == choice.token_ids + second.choices[0].token_ids
    assert list(sample.logprobs[: len(tokens)]) == [entry.logprob for entry in choice.logprobs.content]
    assert choice.versions == [0] * len(tokens)
    assert not sample.branches
    assert sample.reward == 1.0


def test_the_client_of_the_agent_is_the_official_one(tmp_path):
    with held(tmp_path) as (episodes, (given,)):
        assert isinstance(given, openai.AsyncOpenAI)

        async def calls():
            async with openai.AsyncOpenAI(base_url=given.base_url, api_key=given.api_key) as client:
                return await asyncio.gather(*(client.chat.completions.create(**ASK) for _ in range(8)))

        answers = asyncio.run(calls())
        assert len({answer.id for answer in answers}) == 8
        assert given.api_key not in repr(given.api_key[:0]) + repr(episodes.engine.running)
        (sample,) = finish(episodes)
    assert len(sample.rows) == 8


def test_a_stream_of_a_text_says_what_the_whole_answer_says(chat, tmp_path):
    with held(tmp_path, model=chat, sampling={"max_tokens": 40}) as (_, (given,)):
        client = client_of(given)
        ask = {"model": MODEL, "prompt": ["größe 日本", "a b c"], "n": 2, "seed": 3, "logprobs": 0}
        whole = client.completions.create(**ask)
        parts = list(client.completions.create(**ask, stream=True))
        assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
        for choice in whole.choices:
            own = [c for part in parts for c in part.choices if c.index == choice.index]
            assert "".join(c.text for c in own) == choice.text
            for name in ("tokens", "text_offset"):
                found = [value for c in own if c.logprobs for value in getattr(c.logprobs, name)]
                assert found == getattr(choice.logprobs, name)


# -- tools ------------------------------------------------------------------------------------------------------------


class Calls(ReplyParser):
    """Takes every reply to a call with tools as a call of `add`."""

    def parse(self, text, tools, new_id):
        if not tools:
            return ReplyMessage(content=text)
        return ReplyMessage(
            content="", tool_calls=(ToolCall(id=new_id(), name="add", arguments=json.dumps({"a": text})),)
        )


def test_tool_calls_and_their_answers_are_one_conversation(tmp_path):
    text = (
        "{% for m in messages %}{{ m['content'] }}{% for c in m['tool_calls'] %}{{ c['function']['arguments']['a'] }}"
    )
    text += "{% endfor %}{% endfor %}"
    settings = {"parser": Calls(), "chat_template": template(tmp_path, text), "forks": True}
    with held(tmp_path, **settings) as (episodes, (given,)):
        client = client_of(given)
        first = client.chat.completions.create(**ASK, tools=[TOOL]).choices[0]
        (call,) = first.message.tool_calls
        assert first.finish_reason == "tool_calls"
        assert first.message.content is None
        assert call.function.name == "add"
        answer = {"role": "tool", "tool_call_id": call.id, "content": "+52="}
        turns = [*ASK["messages"], first.message, answer]
        with client.chat.completions.stream(model=MODEL, messages=turns, tools=[TOOL]) as stream:
            second = stream.get_final_completion().choices[0]
        assert json.loads(second.message.tool_calls[0].function.arguments)["a"]
        assert second.message.tool_calls[0].id != call.id
        assert second.finish_reason == "tool_calls"
        third = client.chat.completions.create(**ASK, tools=[TOOL], tool_choice="none").choices[0]
        assert third.message.tool_calls is None
        assert third.message.content
        (sample,) = finish(episodes)
    main = max(sample.rows, key=lambda row: len(row.token_ids))
    assert not all(main.loss_mask), "the tool's answer is no part of the conversation"
    assert episodes.engine.stats.drift.total == 0


# -- options ----------------------------------------------------------------------------------------------------------


def test_options_that_end_a_reply_are_followed(tmp_path):
    with held(tmp_path, sampling={"max_tokens": 12}) as (_, (given,)):
        client = client_of(given)
        short = client.chat.completions.create(**ASK, max_tokens=2)
        assert short.choices[0].finish_reason == "length"
        assert short.usage.completion_tokens == 2
        assert client.chat.completions.create(**ASK, max_completion_tokens=1).usage.completion_tokens == 1
        assert client.chat.completions.create(**ASK, max_tokens=5000).usage.completion_tokens <= 12
        ended = client.chat.completions.create(**ASK, stop=["8", "3", "2", "1"]).choices[0]
        assert not set(ended.message.content) & set("8321")
        same = [client.chat.completions.create(**ASK, seed=7).choices[0].message.content for _ in range(2)]
        assert same[0] == same[1]
        assert len(client.chat.completions.create(**ASK, n=3).choices) == 3


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", 0.7),
        ("top_p", 0.9),
        ("frequency_penalty", 0.5),
        ("presence_penalty", -0.5),
        ("logit_bias", {"5": 10}),
        ("reasoning", {"effort": "low"}),
    ],
)
def test_options_that_change_the_distribution_are_refused_unless_ignored(tmp_path, option, value):
    asked = {"extra_body": {option: value}}
    with held(tmp_path) as (_, (given,)), pytest.raises(openai.BadRequestError, match=option) as refusal:
        client_of(given).chat.completions.create(**ASK, **asked)
    assert refusal.value.param == option
    assert refusal.value.code == "unsupported_value"
    with held(tmp_path, ignored_options=[option]) as (_, (given,)):
        assert client_of(given).chat.completions.create(**ASK, **asked).choices[0].message.content


def test_options_with_the_values_of_the_run_are_no_change(tmp_path):
    with held(tmp_path, sampling={"temperature": 0.7, "top_p": 0.9, "head": 2}) as (_, (given,)):
        client = client_of(given)
        ask = ASK | {"temperature": 0.7, "top_p": 0.9, "frequency_penalty": 0, "logit_bias": {}, "user": "me"}
        found = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2, response_format={"type": "text"})
        for entry in found.choices[0].logprobs.content:
            assert len(entry.top_logprobs) == 2
            known = {top.token: top.logprob for top in entry.top_logprobs}
            assert known.get(entry.token, entry.logprob) == pytest.approx(entry.logprob, abs=1e-5)


def test_validation_decides_the_distribution_itself(tmp_path):
    with held(tmp_path, sampling={"temperature": 0.5}) as (episodes, (given,)):
        episode = episodes.engine.episode(given.api_key)
        with pytest.raises(openai.BadRequestError):
            client_of(given).chat.completions.create(**ASK, temperature=1.0)
        object.__setattr__(episode._rules, "trains", False)
        episodes.endpoint.service.open(episode)
        assert client_of(given).chat.completions.create(**ASK, temperature=1.0).choices


# -- retries and clients that go --------------------------------------------------------------------------------------


def calls_of(episodes) -> list:
    (episode,) = episodes.engine.running
    return episode._calls


def test_a_client_that_times_out_gets_one_sample_for_all_its_tries(tmp_path):
    with held(tmp_path) as (episodes, (given,)):
        episodes.pause()
        attempts = []
        client = client_of(given, timeout=0.5, max_retries=20)
        client._client.event_hooks["request"].append(lambda request: attempts.append(dict(request.headers)))
        found = []
        thread = threading.Thread(target=lambda: found.append(client.chat.completions.create(**ASK)))
        thread.start()
        wait_for(lambda: len(attempts) >= 3)
        episodes.resume()
        thread.join(WAIT_S)
        assert found[0].choices[0].message.content
        assert len(calls_of(episodes)) == 1
        (sample,) = finish(episodes)
    assert attempts[2]["x-stainless-retry-count"] == "2"
    assert len(sample.rows) == 1
    assert episodes.engine.stats.num_orphans == 0


def test_repetitions_are_told_from_second_questions(tmp_path):
    with held(tmp_path) as (episodes, (given,)):
        first = post(given, ASK)
        again = post(given, ASK, **{"x-stainless-retry-count": "1"})  # delivered, and lost on the way
        assert again.content == first.content
        second = post(given, ASK)
        assert second.json()["id"] != first.json()["id"]
        named = [post(given, ASK, **{"Idempotency-Key": "a"}) for _ in range(2)]
        assert named[0].content == named[1].content
        assert named[0].json()["id"] not in {first.json()["id"], second.json()["id"]}
        other = post(given, ASK | {"seed": 5}, **{"Idempotency-Key": "a"})
        assert other.status_code == 400
        assert other.json()["error"]["code"] == "idempotency_key_in_use"
        assert post(given, ASK, **{"Idempotency-Key": "k" * 300}).status_code == 400
        assert len(calls_of(episodes)) == 3


def test_two_equal_calls_at_once_are_two_samples(tmp_path):
    with held(tmp_path) as (episodes, (given,)):
        episodes.pause()
        answers = []
        threads = [threading.Thread(target=lambda: answers.append(post(given, ASK).json())) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(calls_of(episodes)) == 2)
        episodes.resume()
        for thread in threads:
            thread.join(WAIT_S)
        assert len({answer["id"] for answer in answers}) == 2


@pytest.mark.parametrize("comes_back", [False, True])
def test_what_a_client_that_went_has_asked_for_trains_if_it_comes_back(tmp_path, comes_back):
    """Also without a word that it asks again."""
    with held(tmp_path) as (episodes, (given,)):
        client_of(given).chat.completions.create(**ASK)
        episodes.pause()
        lost = {"model": MODEL, "messages": [{"role": "user", "content": "77="}]}
        with pytest.raises(openai.APITimeoutError):
            client_of(given, timeout=0.3, max_retries=0).chat.completions.create(**lost)
        call = calls_of(episodes)[-1]
        wait_for(lambda: not call.num_waiting)
        episodes.resume()
        if comes_back:
            assert client_of(given).chat.completions.create(**lost).choices
        wait_for(call.replies.done)
        assert len(calls_of(episodes)) == 2
        (sample,) = finish(episodes)
    assert len(sample.rows) == 1 + comes_back
    assert episodes.engine.stats.num_orphans == 1 - comes_back


# -- errors of the API ------------------------------------------------------------------------------------------------


def test_errors_are_those_of_the_official_client(tmp_path):
    with held(tmp_path) as (episodes, (given,)):
        client = client_of(given, max_retries=0)
        with pytest.raises(openai.AuthenticationError) as error:
            client.with_options(api_key="wrong").chat.completions.create(**ASK)
        assert error.value.code == "invalid_api_key"
        assert "wrong" not in str(error.value)
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model=MODEL, input="text")
        with pytest.raises(openai.NotFoundError) as error:
            client.models.retrieve("none")
        assert error.value.code == "model_not_found"
        (model,) = client.models.list()
        assert client.models.retrieve(model.id) == model
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "1" * 5000}])
        assert error.value.code == "context_length_exceeded"
        assert error.value.param == "messages"
        bare = httpx.get(str(given.base_url) + "models", timeout=WAIT_S)
        assert bare.status_code == 401
        assert httpx.get(str(given.base_url) + "chat/completions", timeout=WAIT_S).status_code == 405
        client.chat.completions.create(**ASK)
        finish(episodes)
        with pytest.raises(openai.AuthenticationError, match="has ended"):
            client.chat.completions.create(**ASK)


def test_prompts_are_text_tokens_or_lists_of_them(tmp_path):
    with held(tmp_path) as (_, (given,)):
        client = client_of(given)
        ids = [10, 5, 3]
        for prompt, number in (("83=", 1), (ids, 1), ([ids, ids], 2), (["83=", "52="], 2)):
            found = client.completions.create(model=MODEL, prompt=prompt)
            assert len(found.choices) == number
            assert found.usage.prompt_tokens == 3 * number
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=MODEL, prompt=[10**6])


def test_prompts_beside_one_that_is_refused_are_not_trained(tmp_path):
    with held(tmp_path) as (episodes, (given,)):
        client = client_of(given, max_retries=0)
        client.completions.create(model=MODEL, prompt="52=")
        with pytest.raises(openai.BadRequestError, match="context"):
            client.completions.create(model=MODEL, prompt=["83=", "1" * 600])
        (episode,) = episodes.engine.running
        wait_for(lambda: all(call.replies.done() for call in episode._calls))
        (sample,) = finish(episodes)
    assert len(sample.rows) == 1


def test_an_episode_has_its_own_key_and_its_own_samples(tmp_path):
    with held(tmp_path, num_samples=3) as (episodes, given):
        assert len({client.api_key for client in given}) == 3
        for number, client in enumerate(given):
            for _ in range(number + 1):
                client_of(client).chat.completions.create(**ASK)
        samples = finish(episodes, 3)
    assert sorted(len(sample.rows) for sample in samples) == [1, 2, 3]


def test_messages_of_a_prompt_arrive_as_they_are(tmp_path):
    prompt = Prompt(messages=[{"role": "user", "content": "83="}])
    with held(tmp_path) as (_, (given,)):
        parts = [{"type": "text", "text": "8"}, {"type": "text", "text": "3="}]
        turns = [{"role": "user", "content": parts}]
        found = client_of(given).chat.completions.create(model=MODEL, messages=turns)
        same = client_of(given).chat.completions.create(model=MODEL, messages=list(prompt.messages))
        assert found.usage.prompt_tokens == same.usage.prompt_tokens == 3
