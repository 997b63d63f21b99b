"""Servers that join and leave a fleet while it works, as a file says."""

import logging
import threading
import time
from collections import Counter

import pytest
import torch
from flow import MODEL
from http_servers import MisbehavingServer

from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.engines.vllm.servers.engine import VLLMServerEngine
from lit_async_rl.engines.vllm.servers.membership import read_servers
from lit_async_rl.engines.vllm.servers.pool import ServerPool
from lit_async_rl.errors import EngineError

pytestmark = pytest.mark.timeout(120)

QUICK = dict(
    probe_interval_s=0.05, health_timeout_s=20.0, startup_timeout_s=20.0, update_timeout_s=30.0, recovery_timeout_s=60.0
)


@pytest.fixture
def servers():
    found = [MisbehavingServer(MODEL) for _ in range(3)]
    yield found
    for server in found:
        server.close()


@pytest.fixture
def engine(servers, tmp_path):
    """Uses the first two."""
    file = tmp_path / "servers"
    file.write_text("".join(f"{server.address}\n" for server in servers[:2]))
    found = VLLMServerEngine(servers_file=str(file), **QUICK)
    found.file = file
    found.setup(MODEL)
    publish(found, 0)
    yield found
    found.close()


def publish(engine, version):
    engine.load_weights(version, [("weight", torch.zeros(2))])


def requests(number, first=0):
    sampling = SamplingParams(max_tokens=3)
    return [
        GenerationRequest(id=n, prompt_ids=(n % 98,), num_samples=2, sampling=sampling)
        for n in range(first, first + number)
    ]


def wait_for(condition, what):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def urls(*servers):
    return {f"http://{server.address}" for server in servers}


def test_every_sample_comes_once_while_servers_join_and_leave(engine, servers, caplog):
    caplog.set_level(logging.WARNING)
    first, second, third = servers
    received: Counter[tuple[int, int]] = Counter()
    stopped, number = threading.Event(), 0

    def receive():
        while not stopped.is_set():
            received.update((c.request_id, c.sample_index) for c in engine.poll(0.05))

    listening = threading.Thread(target=receive)
    listening.start()
    memberships = [servers, [first, third], [third], servers, [second]]
    for version, wanted in enumerate(memberships, start=1):
        engine.submit(requests(60, first=number))
        number += 60
        engine.file.write_text("# by hand\n\n" + "".join(f"http://{server.address}\n" for server in wanted))
        publish(engine, version)
        wait_for(lambda wanted=wanted: engine._fleet.pool.servers_in == urls(*wanted), f"membership {version}")
        assert engine._fleet.urls == urls(*wanted)
        assert {server.tag[-2:] for server in wanted} == {f"-{version}"}
    wait_for(lambda: len(received) == 2 * number, "samples are lost")
    stopped.set()
    listening.join(10)
    assert set(received.values()) == {1}
    proofs = 2 + caplog.text.count("is in, with version")  # each samples a token, as did the first two
    assert sum(server.served.total() for server in servers) == number + proofs, "a request was sampled twice"
    assert f"{third.address} joins" in caplog.text
    assert f"{first.address} has left" in caplog.text


@pytest.mark.parametrize("text", ["", "# nobody\n", "127.0.0.1\n", "http://a:1/path\n", None])
def test_a_file_that_names_no_server_changes_nothing(engine, servers, caplog, text):
    if text is None:
        engine.file.unlink()
    else:
        engine.file.write_text(text)
    wait_for(lambda: "is ignored, servers stay as they are" in caplog.text, "nothing was said")
    assert engine._fleet.pool.servers_in == urls(*servers[:2])
    engine.submit(requests(4))
    wait_for(lambda: len(engine.poll(1.0)) > 0, "it samples nothing")
    assert caplog.text.count("is ignored") == 1
    with pytest.raises((OSError, ValueError)):
        read_servers(str(engine.file))


def test_setup_waits_for_the_file(servers, tmp_path):
    file = tmp_path / "later"
    engine = VLLMServerEngine(servers_file=str(file), **QUICK | {"startup_timeout_s": 20.0})
    writing = threading.Timer(0.5, lambda: file.write_text(servers[0].address))
    writing.start()
    engine.setup(MODEL)
    assert set(engine.urls) == urls(servers[0])
    engine.close()
    missing = VLLMServerEngine(servers_file=str(tmp_path / "never"), **QUICK | {"startup_timeout_s": 0.2})
    with pytest.raises(EngineError, match=r"servers_file='.*never': .*No such file.*startup_timeout_s=0\.2"):
        missing.setup(MODEL)
    missing.close()


def test_one_of_both_names_the_servers():
    with pytest.raises(ValueError, match=r"servers must name at least one server"):
        VLLMServerEngine()
    with pytest.raises(ValueError, match=r"servers_file='x' takes the place of data\.engine\.servers"):
        VLLMServerEngine(["a:1"], servers_file="x")


def test_a_server_that_leaves_finishes_what_it_has_and_gets_nothing_new():
    pool = ServerPool(["a", "b"])
    pool.bring_in("a")
    pool.submit(requests(1))
    (sent,) = pool.dispatch()
    pool.leave("a")
    pool.submit(requests(1, first=1))
    assert pool.dispatch() == []
    pool.bring_in("b")
    assert [assignment.server for assignment in pool.dispatch()] == ["b"]
    assert pool.accept(sent)
    pool.take_out("a")
    pool.remove("a")
    assert pool.servers_in == {"b"}
