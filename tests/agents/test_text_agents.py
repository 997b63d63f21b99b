"""Agents that send texts, and stop at a string of theirs: the policy reads what they have sent, once."""

import pytest
from agent_runs import CODEC, playing, request

from lit_async_rl.engines.completion_check import run_requests

STOPS = ["+", "]", "0", "1", "2", "3"]  # some of these end almost every reply
ASKED = "371+205="
pytestmark = pytest.mark.timeout(240)


def texts_of(completion) -> set[str]:
    """What the policy has read and written in each row, as text."""
    first = CODEC.encode(request(text=ASKED).prompt)
    return {CODEC.decode((*(row.prompt_ids or first), *row.token_ids)) for row in completion.rows}


def play(agent, num_samples=8):
    """Samples of one group, and the drift of them."""
    engine = playing(agent)
    try:
        (found,) = run_requests(engine, [request(num_samples=num_samples, text=ASKED)], timeout_s=60.0)
    finally:
        engine.close()
        engine.end()
    return found, engine.stats.drift


async def complete(client, **arguments):
    """The one reply to a text, with its token ids."""
    answer = await client.completions.create(model="policy", extra_body={"return_token_ids": True}, **arguments)
    return answer.choices[0]


def hidden_of(reply) -> str:
    """The end of a reply that a client is not shown."""
    return CODEC.decode(reply.token_ids).removeprefix(reply.text)


@pytest.mark.parametrize("stops", [STOPS[:4], STOPS[2:], ["20", "05"]])
def test_a_text_that_goes_on_with_its_stop_string_continues_behind_it(stops):
    sent = {}

    async def agent(prompt, client):
        text = prompt.text
        for number in range(4):
            reply = await complete(client, prompt=text, stop=stops)
            sent[client.episode.sample_index] = (text, reply)
            text += reply.text + hidden_of(reply) + f"{number}:"
        return 1.0

    found, drift = play(agent)
    assert drift.total == 0
    for completion in found:
        text, last = sent[completion.sample_index]
        assert texts_of(completion) == {text + CODEC.decode(last.token_ids)}, "read twice, or not at all"


def test_a_text_that_leaves_its_stop_string_out_is_read_as_it_was_sent_and_counted():
    calls = {}

    async def agent(prompt, client):
        first = await complete(client, prompt=prompt.text, stop=STOPS[:4])
        text = f"{prompt.text}{first.text}:"
        second = await complete(client, prompt=text, stop=STOPS[:4])
        calls[client.episode.sample_index] = (text, first, second)
        return 1.0

    found, drift = play(agent)
    num_left_out = 0
    for completion in found:
        text, first, second = calls[completion.sample_index]
        last = text + CODEC.decode(second.token_ids)
        if hidden_of(first):
            num_left_out += 1
            assert texts_of(completion) == {ASKED + CODEC.decode(first.token_ids), last}
        else:
            assert texts_of(completion) == {last}
    assert num_left_out
    assert (drift.other, drift.tokens, drift.template) == (num_left_out, 0, 0)
