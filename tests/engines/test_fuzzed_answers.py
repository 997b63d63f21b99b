"""Fuzzed answers of vLLM servers: right, or a failure of that server. No vLLM, no network."""

import asyncio
import copy
import json
import random
from types import SimpleNamespace

import transformers
from flow import MODEL
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_server_fleet import requests

from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.engines.vllm.engine_arguments import describe_config
from lit_async_rl.engines.vllm.requests import RequestBook
from lit_async_rl.engines.vllm.servers.client import ServerClient
from lit_async_rl.engines.vllm.servers.connection import ServerFailure, ServerRefusal
from lit_async_rl.engines.vllm.servers.fleet import ServerFleet
from lit_async_rl.engines.vllm.servers.handshake import Expected
from lit_async_rl.models.loading import load_config

ODD = [None, True, -1, 0, 1, 2, 97, 98, 10**30, -0.5, 0.5, 1e308, float("nan"), float("-inf"), "", "8", "stop", "abort"]
ODD += ["\ud800", "a1b2c3d4-1", "-", [], [[]], {}, {"index": 0}, [None] * 3, [8, 9, 10], {"content": []}]
SEEDS = st.integers(0, 2**63)  # a seed is drawn much faster than an answer


def places(value, path=()):
    """Paths of all parts of a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def fuzzed(right: dict, seed: int) -> bytes:
    """Arbitrary bytes, or a right answer in which parts were replaced, changed a little, removed or repeated."""
    rng = random.Random(seed)
    if rng.random() < 0.05:
        return rng.randbytes(rng.randrange(60))
    answer = json.loads(json.dumps(right))
    for _ in range(rng.randint(1, 3)):
        chosen = [path for path in places(answer) if path]
        if not chosen:
            break
        *way, last = rng.choice(chosen)
        holder = answer
        for key in way:
            holder = holder[key]
        action = rng.choice(["replace", "remove", "repeat", "near"])
        if action == "remove":
            del holder[last]
        elif action == "repeat" and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[last]))
        elif action == "near" and isinstance(holder[last], int | float):
            holder[last] += rng.choice([-1, 1, 0.5, 10**6, 10**30])
        else:
            holder[last] = copy.deepcopy(rng.choice(ODD))  # a part in two places could come into itself
    text = json.dumps(answer, ensure_ascii=rng.random() < 0.9).encode("utf-8", "surrogatepass")
    return text[: rng.randrange(len(text) + 1)] if rng.random() < 0.1 else text


RUN = "a1b2c3d4"
ASKED = GenerationRequest(id=7, prompt_ids=(4, 5), num_samples=2, sampling=SamplingParams(max_tokens=3))
ONE = {
    "finish_reason": "length",
    "token_ids": [8, 9, 10],
    "logprobs": {"content": [{"token_id": t, "logprob": -float(t)} for t in (8, 9, 10)]},
    "weight_versions": [{"version": f"{RUN}-2", "start": 0, "end": 3}],
}
RIGHT = {"choices": [ONE | {"index": 0}, ONE | {"index": 1}]}


def served(answer: bytes, status: int):
    """Client of a server that always answers this."""

    class Canned(ServerClient):
        async def ask(self, method, path, timeout_s, body=None, max_bytes=0):
            return status, answer

    return Canned("http://127.0.0.1:1", None, 1.0, 1.0, 1.0)


def result_of(coroutine):
    """Of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it waits for something")


@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=SEEDS, status=st.sampled_from([200] * 9 + [500, 404, 302]))
def test_2000_fuzzed_answers_are_right_or_that_servers_failure(seed, status):
    completions, failure = [], ""
    try:
        completions = result_of(served(fuzzed(RIGHT, seed), status).generate(ASKED, (1,), "salt", RUN))
    except (ServerFailure, ServerRefusal) as error:
        failure = str(error)
    if failure:
        assert "\n" not in failure
        assert len(failure) < 400
        return
    assert status == 200
    assert [(c.request_id, c.sample_index) for c in completions] == [(7, 0), (7, 1)]
    for c in completions:
        assert len(c.token_ids) == len(c.logprobs) == len(c.versions) == 3
        assert all(type(token) is int and token >= 0 for token in c.token_ids)
        assert all(type(p) is float and -750 <= p <= 1e-4 for p in c.logprobs)


class InMemory(ServerClient):
    """A server without a network; `mangle` makes what it answers to requests of the right answer, `break_` to all."""

    def __init__(self, url, mangle=lambda right: json.dumps(right).encode(), break_=lambda right: (200, right)):
        super().__init__(url, None, 5.0, 5.0, 5.0)
        self.mangle, self.break_, self.tag = mangle, break_, "default"

    async def ask(self, method, path, timeout_s, body=None, max_bytes=0):
        await asyncio.sleep(0)
        return self.break_(self.answer(path, body))

    def answer(self, path, body):
        if path == "/update_weight_version":
            self.tag = body["new_version"]
        answers = {
            "/v1/models": {"data": [{"max_model_len": 256}]},
            "/is_sleeping": {"is_sleeping": False},
            "/weight_info": {"weight_version": self.tag},
            "/collective_rpc": {"results": [REPORT]},
        }
        if path != "/inference/v1/generate" or not body:
            return json.dumps(answers.get(path, {})).encode()
        span = {"version": self.tag, "start": 0, "end": body["sampling_params"]["max_tokens"]}
        token = {"token_id": 8, "logprob": -1.0}
        one = {"finish_reason": "length", "token_ids": [8] * span["end"], "weight_versions": [span]}
        one["logprobs"] = {"content": [token] * span["end"]}
        right = {"choices": [one | {"index": n} for n in range(body["sampling_params"]["n"])]}
        is_proof = body["cache_salt"].endswith("proof")
        return json.dumps(right).encode() if is_proof else self.mangle(right)


CONFIG = describe_config(load_config(MODEL).get_text_config())
REPORT = {"model": CONFIG, "transformers": transformers.__version__, "dtype": "float32"}
REPORT |= {"can_sleep": False, "problems": [], "loaded": True}


async def sampled_by(hostile, num_rounds, before):
    """Samples of two requests a round, by a hostile and a good server, over as many updates."""
    book, good = RequestBook("the fleet"), InMemory("http://b:1")
    fleet = ServerFleet([hostile, good], book, RUN, False, probe_interval_s=1e-4, recovery_timeout_s=60.0)
    await fleet.start(Expected(CONFIG), 98, (1,), 5.0)
    found = []
    for number in range(num_rounds):
        await fleet.begin_update()
        await fleet.update(number, SimpleNamespace(staged="folder", whole=lambda: "folder", preload=number % 2 > 0))
        fleet.end_update()
        await before(fleet, number)
        book.begin([2 * number, 2 * number + 1])
        fleet.requests.submit(requests(2, first=2 * number))  # one for each
        while book.num_running:
            await asyncio.sleep(1e-4)
            book.check()
        found += book.take(0.0)
    for watcher in fleet._watchers.values():
        watcher.cancel()
    return sorted((c.request_id, c.sample_index) for c in found)


def each_once(num_rounds):
    return [(n, i) for n in range(2 * num_rounds) for i in range(2)]


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=SEEDS)
def test_of_2000_groups_sent_to_a_server_that_answers_nonsense_none_is_lost_or_comes_twice(seed):
    rng = random.Random(seed)
    hostile = InMemory("http://a:1", mangle=lambda right: fuzzed(right, rng.getrandbits(63)))

    async def both_are_in(fleet, number):
        while len(fleet.pool.servers_in) < 2:
            await asyncio.sleep(1e-4)

    found = asyncio.run(asyncio.wait_for(sampled_by(hostile, 40, both_are_in), 60.0))
    assert found == each_once(40)


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=SEEDS)
def test_nonsense_in_answer_to_anything_else_is_that_servers_failure_too(seed):
    """Health checks, handshakes, loading, swapping, tagging, proofs: each may be answered with nonsense."""
    rng = random.Random(seed)
    hostile, ins = InMemory("http://a:1"), []

    def nonsense(body):
        if rng.random() > 0.1:
            return 200, body
        return rng.choice([200, 200, 200, 500, 404, 302]), fuzzed(json.loads(body), rng.getrandbits(63))

    async def begin(fleet, number):
        hostile.break_ = nonsense  # not while it starts
        ins.append(len(fleet.pool.servers_in))
        while len(fleet.pool.servers_in) < 2 and rng.random() < 0.9:  # that it is out is no reason to wait for it
            await asyncio.sleep(1e-4)

    found = asyncio.run(asyncio.wait_for(sampled_by(hostile, 40, begin), 60.0))
    assert found == each_once(40)
    assert set(ins) == {1, 2}, "it never failed, or never came back"
