"""Shared by the checks: models with random weights, requests, timers, and exceptions that end a check."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.common.real_shapes import built, qwen25, tiny
from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.utils.device_memory import is_out_of_memory

SMALL = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4, vocab_size=98)
LARGE = dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=16, num_attention_heads=16, vocab_size=32_000)


class Skip(Exception):
    """The check cannot run here; says why."""


class Parts:
    """Results of a check's parts, written as they come: what an earlier, interrupted run has done is not done again.

    Args:
        file: one line of JSON for each part; None keeps none.
        check: name of the check.
    """

    def __init__(self, file: Path | None, check: str) -> None:
        self._file = file
        self._check = check
        lines = file.read_text().splitlines() if file is not None and file.exists() else []
        earlier = [json.loads(line) for line in lines]
        self.found: dict[str, dict[str, float]] = {
            part["part"]: part["numbers"] for part in earlier if part["check"] == check
        }

    def do(self, name: str, work: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Numbers of a part; none if it does not fit into the GPU's memory."""
        if name not in self.found:
            began = time.perf_counter()
            try:
                numbers = {key: float(value) for key, value in work().items()}
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                numbers = {"out_of_memory": 1.0}
            self.found[name] = numbers | {"seconds": time.perf_counter() - began}
            if self._file is not None:
                with self._file.open("a") as file:
                    file.write(json.dumps({"check": self._check, "part": name, "numbers": self.found[name]}) + "\n")
        return self.found[name]

    def keep(self, name: str, text: str) -> None:
        """Writes a text beside the file."""
        if self._file is not None:
            self._file.with_name(name).write_text(text)

    def numbers(self) -> dict[str, float]:
        """All of them, named with their part."""
        return {f"{part}: {key}": value for part, numbers in self.found.items() for key, value in numbers.items()}


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


def real_model(
    device: str, size: str, dtype: torch.dtype = torch.float32, attn_implementation: str = "sdpa"
) -> PreTrainedModel:
    """Qwen2.5 of this size with random weights that never samples an end of text; a tiny one on a CPU."""
    config = qwen25(size) if device == "cuda" else tiny(qwen25(size))
    config._attn_implementation = attn_implementation
    lm: PreTrainedModel = built(config, device, dtype).eval()
    return lm


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


def batch_of(vocab_size: int, rows: int, prompt: int, new: int) -> tuple[torch.Tensor, ...]:
    """Rows of groups of eight that share a prompt, the mask of their completions, and the group of each."""
    generator = torch.Generator().manual_seed(2)
    samples = min(8, rows)
    groups = rows // samples
    prompts = torch.randint(2, vocab_size, (groups, 1, prompt), generator=generator)
    completions = torch.randint(2, vocab_size, (groups, samples, new), generator=generator)
    ids = torch.cat([prompts.expand(-1, samples, -1), completions], -1).flatten(0, 1)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, prompt:] = True
    return ids, mask, torch.arange(groups).repeat_interleave(samples)


def step_of(policy: CausalPolicy, batch: tuple[torch.Tensor, ...], amp: torch.dtype | None = None) -> torch.Tensor:
    """Forward and backward pass; returns the log-probabilities."""
    ids, mask, group = batch
    policy.zero_grad(set_to_none=True)
    with torch.autocast(ids.device.type, dtype=amp, enabled=amp is not None):
        logprobs = policy(ids, mask, group_index=group).logprobs
        logprobs[mask].mean().backward()
    return logprobs.detach()
