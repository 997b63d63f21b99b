"""Shared by the checks: models with random weights, requests, timers, and exceptions that end a check."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from lit_async_rl.engines.base import GenerationRequest, SamplingParams

SMALL = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4, vocab_size=98)
LARGE = dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=16, num_attention_heads=16, vocab_size=32_000)
# shapes of Qwen2.5; weights are random, so that nothing is downloaded
REAL = {
    "0.5B": dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14),
    "1.5B": dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12),
}
TINY = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)


class Skip(Exception):
    """The check cannot run here; says why."""


def require(is_true: bool, message: str) -> None:
    """Fails the check."""
    if not is_true:
        raise RuntimeError(message)


def model(device: str, dtype: torch.dtype = torch.float32, small: bool = False, **changes: Any) -> LlamaForCausalLM:
    """Random weights that never sample an end of text; large on a GPU."""
    torch.manual_seed(0)
    sizes = SMALL if device == "cpu" or small else LARGE
    config = LlamaConfig(**sizes, max_position_embeddings=4096, eos_token_id=None, pad_token_id=0, **changes)
    lm = LlamaForCausalLM(config)
    lm.generation_config.eos_token_id = None
    return lm.to(device, dtype).eval()


def real_model(device: str, size: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Qwen2ForCausalLM:
    """A model of `REAL`'s shape with random weights that never samples an end of text; a tiny one on a CPU."""
    torch.manual_seed(0)
    shape = dict(**REAL[size], vocab_size=151_936) if device == "cuda" else dict(**TINY, vocab_size=512)
    config = Qwen2Config(
        **shape,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        initializer_range=0.04,  # distributions that are neither flat nor certain
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        **changes,
    )
    with torch.device(device):  # on the GPU at once: filling them takes a minute on a CPU
        lm = Qwen2ForCausalLM(config)
    lm.generation_config.eos_token_id = None
    return lm.to(dtype).eval()


def num_parameters(lm: PreTrainedModel) -> int:
    """Parameters in matrix products: tied embeddings count once, as the output head."""
    return sum(p.numel() for p in lm.parameters())


def timed(work: Callable[[], object], device: str, repeats: int = 3) -> float:
    """Seconds of the fastest of some repeats, after one for warming up."""
    times = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def requests(lm: PreTrainedModel, number: int, samples: int, prompt: int, new: int) -> list[GenerationRequest]:
    """Random prompts."""
    generator = torch.Generator().manual_seed(1)
    size = lm.config.vocab_size
    prompts = torch.randint(2, size, (number, prompt), generator=generator).tolist()
    sampling = SamplingParams(max_tokens=new)
    return [
        GenerationRequest(id=n, prompt_ids=tuple(ids), num_samples=samples, sampling=sampling)
        for n, ids in enumerate(prompts)
    ]


def mismatch(lm: PreTrainedModel, asked: list[GenerationRequest], results: list) -> float:
    """Largest difference between an engine's log-probabilities and those of a forward pass."""
    worst = 0.0
    for request, completions in zip(asked[:2], results, strict=False):
        for completion in completions[:2]:
            ids = torch.tensor([request.prompt_ids + completion.token_ids], device=lm.device)
            with torch.no_grad():
                log_p = lm(input_ids=ids).logits[0].float().log_softmax(-1)
            start = len(request.prompt_ids)
            expected = log_p[start - 1 : -1].gather(-1, ids[0, start:, None])[:, 0].cpu()
            worst = max(worst, (torch.tensor(completion.logprobs) - expected).abs().max().item())
    return worst
