"""Servers, agents and trainers that die in the middle: no sample is lost or doubled, and nothing hangs."""

import asyncio
import contextlib
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable

import lightning.pytorch as pl
import openai
import pytest
import uvicorn
from agent_endpoints import MODEL, WAIT_S, Episodes, Held, held, make_engine, template, wait_for
from flow import fit, make_data, make_module

from lit_async_rl.agents import AgentEngine
from lit_async_rl.agents.endpoint.clients import EndpointClients
from lit_async_rl.agents.endpoint.server import Endpoint
from lit_async_rl.assets import asset
from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.errors import EngineError, ProducerError, describe
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.problem import Prompt
from lit_async_rl.tasks import Addition, CalculatorAgent, CalculatorParser

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


def endpoint_with(**settings) -> Endpoint:
    clients = EndpointClients(**settings)
    return Endpoint(clients.host, port=clients.port, limits=clients.limits, codec=TextCodec(MODEL))


def fail_server(endpoint: Endpoint) -> None:
    endpoint._thread.soon(endpoint._serving.cancel)


def breaks(monkeypatch, error: BaseException) -> Callable[[Endpoint], None]:
    """A fault of uvicorn's own loop."""

    async def tick(self, counter):
        raise error

    return lambda endpoint: monkeypatch.setattr(uvicorn.Server, "on_tick", tick)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("it has no luck"), SystemExit(3), asyncio.CancelledError()],
    ids=lambda one: type(one).__name__,
)
def test_a_server_that_ends_fails_the_engine_with_its_reason_and_cuts_its_clients_off(
    tmp_path, monkeypatch, caplog, error
):
    answers = queue.SimpleQueue()
    asked = threading.Semaphore(0)
    begun = queue.SimpleQueue()

    async def agent(prompt, client):
        begun.put(client)
        async with over_http(client) as own:
            await own.with_options(max_retries=0).chat.completions.create(**ASK)
        return 1.0

    def ask(given) -> None:
        asked.release()
        try:
            answers.put(client_of(given, max_retries=0, timeout=WAIT_S).chat.completions.create(**ASK, seed=1))
        except openai.OpenAIError as failure:
            answers.put(failure)

    engine = make_engine(agent, chat_template=template(tmp_path), forks=True, tries=1)
    episodes = Episodes(engine)
    try:
        episodes.pause()
        episodes.submit(Prompt(text="a"), num_samples=2)
        clients = [begun.get(timeout=WAIT_S) for _ in range(2)]
        threads = [threading.Thread(target=ask, args=(given,)) for given in clients]
        for thread in threads:
            thread.start()
        wait_for(lambda: [len(one._calls) for one in engine.running] == [2, 2])
        endpoint = episodes.endpoint
        address = endpoint._socket.getsockname()
        caplog.clear()
        breaks(monkeypatch, error)(endpoint)
        found = [answers.get(timeout=10.0) for _ in clients]
        assert all(isinstance(one, openai.APIConnectionError) for one in found), found
        wait_for(lambda: endpoint._has_ended.is_set())
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address).close()
        monkeypatch.undo()
        episodes.resume()
        wait_for(lambda: episodes.errors)
    finally:
        episodes.close()
    (failed,) = episodes.errors
    assert isinstance(failed, EngineError)
    assert str(failed) == f"the agents' endpoint has ended: {describe(error)}"
    assert engine.stats.num_lost == 0
    assert [one.getMessage() for one in caplog.records if one.levelname in ("WARNING", "ERROR")] == [str(failed)]
    assert not [thread for thread in threading.enumerate() if thread.name == "agent endpoint"]


def test_an_exit_in_the_thread_of_the_server_ends_nothing(tmp_path):
    with held(tmp_path) as (episodes, (given,)):
        episodes.endpoint._thread.soon(sys.exit)
        assert client_of(given, max_retries=0).chat.completions.create(**ASK).choices
        assert episodes.endpoint.failure is None


def test_an_engine_after_one_whose_server_has_ended_has_another(tmp_path):
    """As `data.limits.engine_restarts` has it."""
    agent = Held()
    engine = make_engine(agent, chat_template=template(tmp_path), forks=True)
    episodes = Episodes(engine)
    try:
        episodes.submit(Prompt(text="a"))
        first = agent.clients.get(timeout=WAIT_S)
        failed = episodes.endpoint
        fail_server(failed)
        wait_for(lambda: episodes.errors)
        engine.close()
        again = Episodes(engine.fresh())
        try:
            again.submit(Prompt(text="a"))
            second = agent.clients.get(timeout=WAIT_S)
            assert again.endpoint is not failed
            assert client_of(second).chat.completions.create(**ASK).choices
            with pytest.raises(openai.APIConnectionError):
                client_of(first, max_retries=0).chat.completions.create(**ASK)
            agent.is_over.set()
            (sample,) = again.results(1)
            assert len(sample.rows) == 1
        finally:
            again.close()
    finally:
        agent.is_over.set()
        episodes.close()


def is_open(connection: socket.socket) -> bool:
    """Whether it waits for an answer that nobody gives."""
    try:
        connection.settimeout(WAIT_S)
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: here\r\n\r\n")
        connection.recv(1)
    except TimeoutError:
        return True
    except OSError:
        return False
    finally:
        connection.close()
    return False


def test_a_server_that_ends_leaves_no_connection_that_nobody_serves(tmp_path):
    """Those that it has accepted and not begun to serve, too."""
    for _ in range(3):
        with held(tmp_path) as (episodes, _):
            endpoint = episodes.endpoint
            address = endpoint._socket.getsockname()
            connections = [socket.create_connection(address) for _ in range(20)]
            fail_server(endpoint)
            while not endpoint._has_ended.is_set():  # as it winds up, too
                with contextlib.suppress(OSError):
                    connections.append(socket.create_connection(address))
                time.sleep(0.001)  # else a loaded machine could run out of descriptors
            assert not any(is_open(connection) for connection in connections)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(address).close()
            wait_for(lambda episodes=episodes: episodes.errors)
            episodes.errors.clear()


class FailsServers(pl.Callback):
    """Ends the server after each step, in the middle of the calls of other episodes."""

    def __init__(self, engine) -> None:
        self.engine = engine
        self.failed = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        endpoint = self.engine.clients._endpoint
        if endpoint is None or endpoint in self.failed:
            return  # some steps have all of their data before the next server is there
        if len(self.failed) < 3:
            fail_server(endpoint)
            self.failed.append(endpoint)
        else:
            trainer.should_stop = True  # a server has come in place of the last one, too


def calculator_data(**changes):
    """The calculator's agent with an official client of its own."""
    engine = AgentEngine(
        EmbeddedEngine(),
        CalculatorOverHttp(),
        clients=EndpointClients(),
        parser=CalculatorParser(),
        chat_template="calculator_chat.jinja",
    )
    settings = dict(
        model=asset("calculator_policy"),
        prompts=Addition(3, size=1000),
        engine=engine,
        reward=None,
        sampling=SamplingParams(max_tokens=12),
        max_staleness=2,
    )
    return engine, make_data(**(settings | changes))


@pytest.mark.slow
def test_a_run_goes_on_when_its_server_dies_again_and_again(caplog):
    """Nothing is lost, and nothing is sampled twice."""
    engine, data = calculator_data(groups_per_step=2, group_size=2)
    ends = FailsServers(engine)
    trainer = fit(make_module(model=data.model), data, 200, callbacks=[ends])
    assert len(ends.failed) == 3
    assert trainer.global_step < 200
    assert "(restarts in a row: 1; limit: data.limits.engine_restarts=" in caplog.text
    stats = engine.stats
    assert stats.num_lost == 0
    assert stats.num_episodes >= 2 * 2 * trainer.global_step
    assert stats.num_orphans == 0
    assert stats.drift.total == 0


def test_a_server_that_always_ends_ends_the_run_with_its_reason(monkeypatch):
    _, data = calculator_data(engine_restarts=1)
    breaks(monkeypatch, RuntimeError("it has no luck"))(None)
    with pytest.raises(ProducerError, match="the agents' endpoint has ended: it has no luck"):
        fit(make_module(model=data.model), data, 2)


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
        endpoint = endpoint_with(port=port)
        with pytest.raises(OSError, match=rf"EndpointClients\.host='127\.0\.0\.1', EndpointClients\.port={port}"):
            endpoint.start()
        endpoint.close()


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lit_async_rl.agents.endpoint.app", None)
    with pytest.raises(ImportError, match=r"pip install \"lit-async-rl\[agents\]\""):
        endpoint_with().start()


def test_the_endpoint_listens_on_loopback_only():
    endpoint = endpoint_with()
    endpoint.start()
    try:
        assert endpoint._socket.getsockname()[0] == "127.0.0.1"
        assert endpoint.base_url.startswith("http://127.0.0.1:")
    finally:
        endpoint.close()
        endpoint.close()
