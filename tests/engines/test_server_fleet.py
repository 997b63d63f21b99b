"""What a fleet does about servers that fail in every way HTTP knows. With real vLLM: test_vllm_servers.py."""

import logging
import random
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch
from aiohttp import web
from flow import MODEL
from http_servers import MisbehavingServer

from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.engines.completion_check import run_requests
from lit_async_rl.engines.vllm.servers.engine import VLLMServerEngine
from lit_async_rl.environments.base import Environment, Observation
from lit_async_rl.environments.episode_engine import EpisodeEngine
from lit_async_rl.errors import EngineError, StalledError
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.types import Prompt

pytestmark = pytest.mark.timeout(60)
EOS = 1  # of the policy

QUICK = dict(
    probe_interval_s=0.05, health_timeout_s=0.7, startup_timeout_s=2.0, update_timeout_s=5.0, recovery_timeout_s=5.0
)


@pytest.fixture
def fleet():
    """Starts servers and an engine that has given them version 0."""
    servers, engines = [], []

    def make(number=2, outcome=lambda number: "ok", num_bad_loads=0, **settings):
        servers.extend(MisbehavingServer(MODEL, outcome, num_bad_loads) for _ in range(number))
        engine = VLLMServerEngine([server.address for server in servers], **(QUICK | settings))
        engines.append(engine)
        engine.setup(MODEL)
        publish(engine, 0)
        return engine, servers

    yield make
    for part in [*engines, *servers]:
        part.close()


def publish(engine, version):
    engine.load_weights(version, [("weight", torch.zeros(2))])


def requests(number, num_samples=2, first=0):
    sampling = SamplingParams(max_tokens=3)
    return [
        GenerationRequest(id=n, prompt_ids=(n % 98,), num_samples=num_samples, sampling=sampling)
        for n in range(first, first + number)
    ]


def wait_for(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_each_sample_comes_exactly_once_whatever_servers_do(fleet):
    rng, unlucky = random.Random(0), Counter()

    def outcome(number):
        chosen = rng.choice(["ok", "ok", "ok", "error", "abort", "drop", "hang"]) if unlucky[number] < 2 else "ok"
        unlucky[number] += chosen != "ok"
        return chosen

    engine, servers = fleet(3, outcome, request_timeout_s=1.0)
    results = []
    for version in range(1, 4):
        results += run_requests(engine, requests(30, first=100 * version))
        publish(engine, version)
    assert [len(completions) for completions in results] == [2] * 90
    assert {c.sample_index for completions in results for c in completions} == {0, 1}
    assert engine.poll(0.2) == []
    assert sum(unlucky.values()) > 20
    assert any(server.num_loads > 4 for server in servers), "nobody came back"
    assert engine.num_tokens == 90 * 2 * 3


def test_a_connection_that_brought_an_error_is_not_used_again(fleet):
    engine, servers = fleet(num_bad_loads=1)  # as by a model that another trainer has left half loaded
    assert [server.num_loads for server in servers] == [1, 1]
    run_requests(engine, requests(4))


def test_a_hung_server_loses_its_requests_and_comes_back_with_the_newest_weights(fleet, caplog):
    caplog.set_level(logging.WARNING)
    engine, (first, second) = fleet()
    first.hangs = True
    run_requests(engine, requests(8))
    publish(engine, 1)
    assert second.tag.endswith("-1")
    assert first.tag.endswith("-0")
    first.hangs = False
    wait_for(lambda: f"{first.address} is in, with version 1" in caplog.text)
    assert first.tag == second.tag
    before = first.num_loads
    results = run_requests(engine, requests(8, first=20))
    assert {v for completions in results for c in completions for v in c.versions} == {1}
    assert first.num_loads == before
    assert f"{first.address} is out: no answer to" in caplog.text


def test_a_server_that_hangs_in_the_middle_of_an_update_does_not_hold_the_trainer_up(fleet):
    engine, (first, second) = fleet(update_timeout_s=55.0)
    threading.Timer(0.05, lambda: setattr(first, "hangs", True)).start()
    began = time.monotonic()
    for version in range(1, 30):
        publish(engine, version)
    assert time.monotonic() - began < 40.0
    assert second.tag.endswith("-29")
    results = run_requests(engine, requests(4))
    assert {v for completions in results for c in completions for v in c.versions} == {29}


def test_a_server_that_somebody_else_gives_weights_to_is_not_believed(fleet, caplog):
    engine, (first, _) = fleet(probe_interval_s=0.3)
    loads = first.num_loads
    first.tag = "other-7"
    results = run_requests(engine, requests(8))
    assert {v for completions in results for c in completions for v in c.versions} == {0}
    wait_for(lambda: first.num_loads > loads)
    assert "'other-7'" in caplog.text
    assert "another trainer" in caplog.text


def test_a_request_that_no_server_can_do_ends_the_run(fleet):
    engine, _ = fleet(2, lambda number: "error" if number == 3 else "ok")
    with pytest.raises(EngineError, match=r"request 3 failed 5 times, at last on http://127.*out of luck"):
        run_requests(engine, requests(6))


def test_without_any_server_the_run_ends_and_says_why(fleet):
    engine, servers = fleet(recovery_timeout_s=0.5)
    for server in servers:
        server.close()
    with pytest.raises(EngineError, match=r"no server for data.engine.recovery_timeout_s=0.5: http.*reached.*; http"):
        run_requests(engine, requests(1))


def test_the_one_server_that_is_left_gets_all_and_shares_again_when_others_come_back(fleet):
    engine, (first, second) = fleet()
    first.hangs = True
    wait_for(lambda: engine._fleet.pool.servers_in == {f"http://{second.address}"})
    run_requests(engine, requests(4, first=10))
    assert len(second.served) == 5  # and the proof
    first.hangs = False
    wait_for(lambda: len(engine._fleet.pool.servers_in) == 2)
    run_requests(engine, requests(20, first=30))
    assert len(first.served) == len(second.served) - 4 == 11


class Counting(Environment):
    """Says the number of the turn, three times."""

    async def start(self, prompt):
        episode = Counting()
        episode.turns = 0
        return episode

    async def step(self, completion):
        self.turns += 1
        return Observation(text=str(self.turns), reward=1.0, done=self.turns == 3)


def test_turns_of_an_episode_go_to_the_server_that_has_its_beginning(fleet, monkeypatch):
    monkeypatch.setattr("lit_async_rl.engines.vllm.servers.pool.MAX_RATIO", 1e9)  # however much it has to do
    engine, servers = fleet(3)
    seen = {server.address: [] for server in servers}

    def answering(server):
        def answer(body, right):
            seen[server.address].append(tuple(body["token_ids"]))
            for choice in right["choices"]:  # ends the turn
                ids = [*choice["token_ids"][:-1], EOS]
                content = [{"token_id": token, "logprob": -1.0} for token in ids]
                choice |= {"finish_reason": "stop", "token_ids": ids, "logprobs": {"content": content}}
            return web.json_response(right)

        return answer

    for server in servers:
        server.answer, server.delay_s = answering(server), 0.0
    asked = [replace(request, prompt=Prompt(text="x"), session=request.id) for request in requests(12, first=2)]
    episodes = EpisodeEngine(engine, Counting()).around(engine, TextCodec(MODEL))
    for completions in run_requests(episodes, asked):
        assert [len(c.turns) for c in completions] == [3, 3]
    assert sum(len(prompts) for prompts in seen.values()) == 12 * (1 + 2 * 2)
    for prompts in seen.values():
        assert any(len(prompt) == 1 for prompt in prompts), "a server began no episode"
        assert {prompt[0] for prompt in prompts} == {prompt[0] for prompt in prompts if len(prompt) == 1}


def test_without_in_flight_updates_new_weights_wait_for_requests(fleet):
    engine, servers = fleet(in_flight_weight_updates=False)
    for server in servers:
        server.delay_s = 0.3
    engine.submit(requests(6))
    publish(engine, 1)
    engine.submit(requests(6, first=10))
    found = []
    while len(found) < 24:
        found += engine.poll(5.0)
    assert all(set(c.versions) == {c.request_id // 10} for c in found)


def test_requests_that_new_weights_wait_for_too_long_are_an_error_that_names_the_setting(fleet):
    engine, _ = fleet(1, lambda number: "hang", in_flight_weight_updates=False, update_timeout_s=0.6)
    engine.submit(requests(1))
    with pytest.raises(StalledError, match=r"old weights did not end .*set by data\.engine\.update_timeout_s=0\.6"):
        publish(engine, 1)


def test_aborted_requests_never_come(fleet):
    engine, servers = fleet()
    for server in servers:
        server.delay_s = 0.2
    engine.submit(requests(6))
    engine.abort([0, 1, 5])
    found = []
    while len(found) < 6:
        found += engine.poll(5.0)
    assert {c.request_id for c in found} == {2, 3, 4}
    assert engine.poll(0.3) == []


def test_close_lets_a_waiting_thread_go(fleet):
    engine, _ = fleet(2, lambda number: "hang")
    engine.submit(requests(1))
    threading.Timer(0.2, engine.close).start()
    assert engine.poll(30.0) == []
    with pytest.raises(EngineError, match="was closed"):
        engine.submit(requests(1))
