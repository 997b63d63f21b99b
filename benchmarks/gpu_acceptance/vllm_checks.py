"""Checks of vLLM: updates of its weights by each transfer, and sleep."""

from __future__ import annotations

import importlib.util
import tempfile
from typing import Any

import torch
from measuring import Skip, mismatch, model, num_parameters, real_model, requests, require, timed
from transformers import LlamaForCausalLM, PreTrainedModel

import lit_async_rl
from lit_async_rl.engines.completion_check import run_requests


def _started(lm: PreTrainedModel, **settings: Any) -> lit_async_rl.VLLMEngine:
    if importlib.util.find_spec("vllm") is None:
        raise Skip("vLLM is not installed")
    engine = lit_async_rl.VLLMEngine(**{"max_num_seqs": 64, "max_model_len": 512, **settings})
    with tempfile.TemporaryDirectory() as folder:
        lm.save_pretrained(folder)
        engine.setup(folder)
    return engine


def _vllm(device: str, **settings: Any) -> dict[str, float]:
    lm = model(device, small=True)
    other = LlamaForCausalLM(lm.config).to(device).eval()
    engine = _started(lm, kv_cache_memory_gb=0.25, **settings)
    try:
        worst = 0.0
        for version, policy in enumerate([lm, other, lm]):
            engine.load_weights(version, policy.named_parameters())
            asked = requests(lm, 4, 8, 24, 64)
            worst = max(worst, mismatch(policy, asked, run_requests(engine, asked)))
        require(worst < 1e-3, f"log-probabilities differ by {worst:.2g}")
        seconds = timed(lambda: run_requests(engine, asked), device, repeats=1)
        return {"tokens_per_s": 4 * 8 * 64 / seconds, "error": worst, "pause_ms": 1e3 * engine.update_pauses_s[-1]}
    finally:
        engine.close()


def vllm(device: str) -> dict[str, float]:
    """VLLMEngine samples from the weights of each update."""
    return _vllm(device)


def vllm_delta(device: str) -> dict[str, float]:
    """The same when updates hold only what has changed."""
    return _vllm(device, transfer=lit_async_rl.SharedMemoryTransfer(delta=True))


def sleep(device: str) -> dict[str, float]:
    """VLLM frees most of its memory at both levels of sleep, and then samples from the new weights."""
    if device == "cpu":
        raise Skip("vLLM's CPU build has no sleep mode")
    lm = model(device, small=True)
    numbers = {}
    for level in (1, 2):
        engine = _started(lm, kv_cache_memory_gb=2.0, sleep_level=level)
        try:
            for version in range(2):
                engine.load_weights(version, lm.named_parameters())
                asked = requests(lm, 4, 8, 24, 64)
                error = mismatch(lm, asked, run_requests(engine, asked))
                require(error < 1e-3, f"log-probabilities differ by {error:.2g} after level {level}")
                awake = torch.cuda.mem_get_info()[0]
                engine.sleep()
                freed = (torch.cuda.mem_get_info()[0] - awake) / 2**30
                require(freed > 1.8, f"level {level} frees {freed:.2f} GiB of a cache of 2")
            numbers |= {f"freed_{level}_gib": freed}
        finally:
            engine.close()
    return numbers


def _sample_real(device: str, size: str) -> dict[str, float]:
    """VLLM in bfloat16 at a real size: the same work as the embedded engine's check."""
    if device == "cpu":
        raise Skip("a real size takes too long on a CPU; the other checks run vLLM there")
    lm = real_model(device, size, torch.bfloat16)
    engine = _started(lm, max_num_seqs=256, dtype="bfloat16", gpu_memory_utilization=0.5)
    try:
        for version in range(3):
            engine.load_weights(version, lm.named_parameters())
        asked = requests(lm, 32, 8, 128, 256)
        error = mismatch(lm, asked, run_requests(engine, asked))
        require(error < 0.5, f"log-probabilities differ by {error:.2g}")
        seconds = timed(lambda: run_requests(engine, asked), device, repeats=1)
        tokens = 32 * 8 * 256
        return {
            "tokens_per_s": tokens / seconds,
            "max_error": error,
            "pause_ms": 1e3 * engine.update_pauses_s[-1],
            "tflops_bfloat16": 2 * num_parameters(lm) * tokens / seconds / 1e12,
        }
    finally:
        engine.close()


def vllm_0_5b(device: str) -> dict[str, float]:
    """VLLM with 0.5 billion parameters."""
    return _sample_real(device, "0.5B")


def vllm_1_5b(device: str) -> dict[str, float]:
    """VLLM with 1.5 billion parameters."""
    return _sample_real(device, "1.5B")


def _gpu_transfer(device: str, kind: str) -> dict[str, float]:
    if device == "cpu":
        raise Skip("moves weights from GPU to GPU")
    if kind == "NcclTransfer" and torch.cuda.device_count() < 2:
        raise Skip("trainer and vLLM need a GPU each: there is one")
    gpus = {"device_ids": [1]} if kind == "NcclTransfer" else {}
    return _vllm(device, transfer=getattr(lit_async_rl, kind)(), gpu_memory_utilization=0.4, **gpus)


def ipc(device: str) -> dict[str, float]:
    """The same with weights that stay on the GPU."""
    return _gpu_transfer(device, "IpcTransfer")


def nccl(device: str) -> dict[str, float]:
    """The same with weights that go to another GPU."""
    return _gpu_transfer(device, "NcclTransfer")
