"""Servers, agents and trainers that die in the middle: no sample is lost or doubled, and nothing hangs."""

import asyncio
import contextlib
import queue
import socket
import sys
import threading
import time

import lightning.pytorch as pl
import openai
import pytest
from agent_endpoints import MODEL, WAIT_S, Episodes, held, make_engine, template, wait_for
from flow import fit, make_data, make_module

from lit_async_rl.agents import AgentEngine
from lit_async_rl.agents.endpoint import server as server_module
from lit_async_rl.agents.endpoint.clients import EndpointClients
from lit_async_rl.agents.endpoint.server import Endpoint, EndpointSettings
from lit_async_rl.assets import asset
from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.errors import EngineError
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.tasks import Addition, CalculatorAgent, CalculatorParser
from lit_async_rl.types import Prompt

ASK = {"model": "m", "messages": [{"role": "user", "content": "8312="}]}
pytestmark = pytest.mark.timeout(240)


def client_of(given, **settings) -> openai.OpenAI:
    return openai.OpenAI(base_url=str(given.base_url), api_key=given.api_key, **settings)


def over_http(given) -> openai.AsyncOpenAI:
    """A client of the agent's own: the calls of that which it is given need no server."""
    return openai.AsyncOpenAI(base_url=str(given.base_url), api_key=given.api_key)


class CalculatorOverHttp(CalculatorAgent):
    async def __call__(self, prompt, client) -> float:
        async with over_http(client) as own:
            return await super().__call__(prompt, own)


def cancel_server(endpoint: Endpoint) -> None:
    loop, task = endpoint._serving
    loop.call_soon_threadsafe(task.cancel)


def exit_thread(endpoint: Endpoint) -> None:
    loop, _ = endpoint._serving
    loop.call_soon_threadsafe(sys.exit)


def next_server(endpoint: Endpoint, ended: tuple | None) -> tuple:
    """The server that runs after one that ended: a loop that has ended takes no calls."""
    wait_for(lambda: endpoint._serving not in (None, ended))
    return endpoint._serving


@pytest.mark.parametrize("end", [cancel_server, exit_thread])
def test_a_server_that_ends_starts_again_and_gives_the_same_answers(tmp_path, end):
    with held(tmp_path, num_samples=2) as (episodes, clients):
        before = client_of(clients[0]).chat.completions.create(**ASK)
        episodes.pause()
        answers = queue.SimpleQueue()

        def ask(given) -> None:
            answers.put(client_of(given, max_retries=10).chat.completions.create(**ASK, seed=1))

        threads = [threading.Thread(target=ask, args=(given,)) for given in clients]
        for thread in threads:
            thread.start()
        running = [episodes.engine.episode(given.api_key) for given in clients]
        wait_for(lambda: [len(one._calls) for one in running] == [2, 1])
        first = episodes.endpoint._serving
        end(episodes.endpoint)
        wait_for(lambda: episodes.endpoint._serving not in (None, first))
        episodes.resume()
        found = [answers.get(timeout=WAIT_S) for _ in clients]
        assert all(answer.choices[0].message.content for answer in found)
        assert before.id not in {answer.id for answer in found}
        assert [len(one._calls) for one in running] == [2, 1], "a call was sampled twice"
        episodes.end_agents()
        samples = episodes.results(2)
    assert sorted(len(sample.rows) for sample in samples) == [1, 2]
    assert episodes.engine.stats.num_orphans == 0


def test_a_server_that_ends_again_and_again_ends_the_agents_and_not_the_trainer(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "MAX_RESTARTS", 2)
    monkeypatch.setattr(server_module, "RESTART_PAUSE_S", 0.01)
    begun = queue.SimpleQueue()

    async def agent(prompt, client):
        begun.put(client)
        async with over_http(client) as own:
            await own.chat.completions.create(**ASK)
        return 1.0

    engine = make_engine(agent, chat_template=template(tmp_path), forks=True, tries=1)
    episodes = Episodes(engine)
    try:
        episodes.pause()
        episodes.submit(Prompt(text="a"), num_samples=2)
        for _ in range(2):
            begun.get(timeout=WAIT_S)
        endpoint = episodes.endpoint
        ended = None
        for _ in range(3):
            ended = next_server(endpoint, ended)
            exit_thread(endpoint)
        wait_for(lambda: endpoint._failure is not None)
        with pytest.raises(EngineError, match="endpoint has ended"):
            endpoint.check()
        episodes.resume()
        wait_for(lambda: engine.stats.num_lost == 2 or episodes.given_up or episodes.errors)
        assert episodes.finished.empty()
    finally:
        episodes.close()


def is_served_or_closed(connection: socket.socket) -> bool:
    try:
        connection.settimeout(WAIT_S)
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: here\r\n\r\n")
        connection.recv(1)
    except TimeoutError:
        return False
    except OSError:
        return True
    finally:
        connection.close()
    return True


def test_a_server_that_ends_leaves_no_connection_that_nobody_serves(tmp_path, monkeypatch):
    """Those that it has accepted and not begun to serve, too: its error's traceback kept them open."""
    monkeypatch.setattr(server_module, "MAX_RESTARTS", 2)
    monkeypatch.setattr(server_module, "RESTART_PAUSE_S", 0.01)
    with held(tmp_path, num_samples=1) as (episodes, _):
        endpoint = episodes.endpoint
        address = endpoint._socket.getsockname()
        ended = None
        for _ in range(3):
            ended = next_server(endpoint, ended)
            connections = [socket.create_connection(address) for _ in range(20)]
            exit_thread(endpoint)
            while endpoint._serving is ended:  # as it winds up, too
                with contextlib.suppress(OSError):
                    connections.append(socket.create_connection(address))
                time.sleep(0.001)  # else a loaded machine could run out of descriptors
            assert all(is_served_or_closed(connection) for connection in connections)
        wait_for(lambda: endpoint._failure is not None)
        with pytest.raises(ConnectionRefusedError):
            wait_for(lambda: socket.create_connection(address).close())
        episodes.end_agents()


class EndsServers(pl.Callback):
    """Ends the server after each step, in the middle of the calls of other episodes."""

    def __init__(self, engine) -> None:
        self.engine = engine
        self.num_ended = 0
        self._ended = None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        endpoint = self.engine.clients._endpoint
        if endpoint is None or self.num_ended == server_module.MAX_RESTARTS:
            return
        self._ended = next_server(endpoint, self._ended)
        exit_thread(endpoint)
        self.num_ended += 1


def test_a_run_goes_on_when_its_server_dies_again_and_again():
    """The calculator's agent with an official client of its own: nothing is lost, and nothing is sampled twice."""
    engine = AgentEngine(
        EmbeddedEngine(),
        CalculatorOverHttp(),
        clients=EndpointClients(),
        parser=CalculatorParser(),
        chat_template="calculator_chat.jinja",
    )
    model = asset("calculator_policy")
    data = make_data(
        model=model,
        prompts=Addition(3, size=1000),
        engine=engine,
        reward=None,
        sampling=SamplingParams(max_tokens=12),
        max_staleness=2,
    )
    ends = EndsServers(engine)
    trainer = fit(make_module(model=model), data, 4, callbacks=[ends])
    assert trainer.global_step == 4
    assert ends.num_ended >= 3
    assert engine.stats.num_lost == 0
    assert engine.stats.num_episodes >= 4 * 4 * 4
    assert engine.stats.num_orphans == 0
    assert engine.stats.drift.total == 0


def test_an_engine_that_closes_lets_no_client_wait(tmp_path):
    failed = queue.SimpleQueue()
    with held(tmp_path) as (episodes, (given,)):
        episodes.pause()

        def ask() -> None:
            try:
                client_of(given, max_retries=0, timeout=WAIT_S).chat.completions.create(**ASK)
            except openai.OpenAIError as error:
                failed.put(error)

        threading.Thread(target=ask).start()
        wait_for(lambda: episodes.engine.episode(given.api_key)._calls)
    assert isinstance(failed.get(timeout=WAIT_S), openai.AuthenticationError | openai.APIConnectionError)
    assert not [thread for thread in threading.enumerate() if thread.name == "agent endpoint"]


@pytest.mark.parametrize("client_of_agent", [lambda given: given, over_http], ids=["given", "over_http"])
def test_an_agent_that_leaves_calls_behind_is_finished_without_them(tmp_path, client_of_agent):
    async def agent(prompt, client):
        client = client_of_agent(client)
        await client.chat.completions.create(**ASK)
        asyncio.get_running_loop().create_task(client.chat.completions.create(**ASK, n=3))
        await asyncio.sleep(0.05)
        return 1.0

    episodes = Episodes(make_engine(agent, chat_template=template(tmp_path), forks=True))
    try:
        episodes.submit(Prompt(text="a"), num_samples=4)
        samples = episodes.results(4)
    finally:
        episodes.close()
    assert {sample.reward for sample in samples} == {1.0}


def test_the_endpoint_serves_one_run_after_another(tmp_path):
    clients = EndpointClients()

    async def agent(prompt, client):
        return float(bool((await client.chat.completions.create(**ASK)).choices))

    for _ in range(2):
        engine = make_engine(agent, chat_template=template(tmp_path), forks=True)
        engine.clients = clients
        episodes = Episodes(engine)
        try:
            episodes.submit(Prompt(text="a"), num_samples=2)
            assert len(episodes.results(2)) == 2
        finally:
            episodes.close()
        assert clients._endpoint is None


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        endpoint = Endpoint(EndpointSettings(port=port), TextCodec(MODEL))
        with pytest.raises(OSError, match=rf"endpoint\.host='127\.0\.0\.1', endpoint\.port={port}"):
            endpoint.start()
        endpoint.close()


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lit_async_rl.agents.endpoint.app", None)
    with pytest.raises(ImportError, match=r"pip install \"lit-async-rl\[agents\]\""):
        Endpoint(EndpointSettings(), TextCodec(MODEL)).start()


def test_the_endpoint_listens_on_loopback_only():
    endpoint = Endpoint(EndpointSettings(), TextCodec(MODEL))
    endpoint.start()
    try:
        assert endpoint._socket.getsockname()[0] == "127.0.0.1"
        assert endpoint.base_url.startswith("http://127.0.0.1:")
    finally:
        endpoint.close()
        endpoint.close()
