"""Samples of one prompt, some of which start before an update and some after it; with vLLM: test_vllm_straddling.py."""

import pytest
from replays import assert_replayed, own_engine, requests_of
from tiny_models import tiny_gpt2, tiny_llama


@pytest.mark.slow
@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_a_sample_that_starts_after_an_update_reads_its_prompt_with_the_new_weights(make, tmp_path):
    lms = {version: make(seed=version) for version in range(4)}
    for lm in lms.values():
        lm.generation_config.eos_token_id = []
    engine = own_engine(lms[0], tmp_path, num_slots=3)
    requests = requests_of([20, 9], max_tokens=30, num_samples=8)  # of which three fit
    engine.submit(requests)
    completions = []
    for version in range(1, 4):
        seen = engine.num_tokens
        while engine.num_tokens < seen + 110:
            completions += engine.poll(0.0)
        engine.load_weights(version, lms[version].named_parameters())
    while len(completions) < 16:
        completions += engine.poll(1.0)
    assert len({c.versions[0] for c in completions if c.request_id == 0}) >= 2, "they all started under one version"
    assert any(len(set(c.versions)) > 1 for c in completions)
    assert_replayed(lms, requests, completions, num_tokens=30, cache_cleared=False)
    engine.close()
