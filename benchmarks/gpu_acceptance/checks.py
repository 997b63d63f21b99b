"""The checks. Each takes a device, asserts what must hold, and returns numbers; `Skip` says why it cannot run there.

    python benchmarks/gpu_acceptance/checks.py NAME DEVICE

prints one line of JSON.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lit_async_rl.assets import asset
from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.engines.blocking import run_requests
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.models.packing import SharedPromptPacking
from lit_async_rl.models.policy import CausalPolicy

ROOT = Path(__file__).parents[2]
SMALL = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4, vocab_size=98)
LARGE = dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=16, num_attention_heads=16, vocab_size=32_000)


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


def requests(lm: LlamaForCausalLM, number: int, samples: int, prompt: int, new: int) -> list[GenerationRequest]:
    """Random prompts."""
    generator = torch.Generator().manual_seed(1)
    size = lm.config.vocab_size
    prompts = torch.randint(2, size, (number, prompt), generator=generator).tolist()
    sampling = SamplingParams(max_tokens=new)
    return [
        GenerationRequest(id=n, prompt_ids=tuple(ids), num_samples=samples, sampling=sampling)
        for n, ids in enumerate(prompts)
    ]


def mismatch(lm: LlamaForCausalLM, asked: list[GenerationRequest], results: list) -> float:
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


def machine(device: str) -> dict[str, float]:
    """Peak of matrix products and of copying, which later checks are compared with."""
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (1024, torch.float32)
    a = torch.randn(size, size, device=device, dtype=dtype)
    b, c = torch.randn_like(a), torch.empty_like(a)
    product = timed(lambda: torch.mm(a, b, out=c), device)
    copy = timed(lambda: c.copy_(a), device)
    found = {"matmul_tflops": 2 * size**3 / product / 1e12, "copy_gb_s": 2 * a.nbytes / copy / 1e9}
    if device == "cuda":
        found["memory_gb"] = torch.cuda.get_device_properties(0).total_memory / 1e9
    return found


def embedded(device: str) -> dict[str, float]:
    """The embedded engine samples what a forward pass says."""
    lm = model(device)
    asked = requests(lm, 8, 8, 24, 64)
    engine = EmbeddedEngine.from_module(lm, num_slots=64)
    error = mismatch(lm, asked, engine.run(asked))
    require(error < 1e-3, f"log-probabilities differ by {error:.2g}")
    seconds = timed(lambda: engine.run(asked), device, repeats=1)
    tokens = 64 * 64
    flops = 2 * sum(p.numel() for p in lm.parameters()) * tokens
    return {"tokens_per_s": tokens / seconds, "error": error, "tflops": flops / seconds / 1e12}


def _rows(lm: LlamaForCausalLM, groups: int, samples: int, prompt: int, new: int) -> tuple[torch.Tensor, ...]:
    """Rows of groups that share a prompt, the mask of their completions, and the group of each."""
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(2, lm.config.vocab_size, (groups, 1, prompt), generator=generator)
    new_ids = torch.randint(2, lm.config.vocab_size, (groups, samples, new), generator=generator)
    ids = torch.cat([prompts.expand(-1, samples, -1), new_ids], -1).flatten(0, 1).to(lm.device)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, prompt:] = True
    group = torch.arange(groups, device=lm.device).repeat_interleave(samples)
    return ids, mask, group


def _step(policy: CausalPolicy, batch: tuple[torch.Tensor, ...], amp: torch.dtype | None = None) -> torch.Tensor:
    ids, mask, group = batch
    policy.zero_grad(set_to_none=True)
    with torch.autocast(ids.device.type, dtype=amp, enabled=amp is not None):
        logprobs = policy(ids, mask, group_index=group).logprobs
        logprobs[mask].mean().backward()
    return logprobs.detach()


def packing(device: str) -> dict[str, float]:
    """Shared-prompt packing, with FlexAttention on a GPU, gives the log-probabilities of plain rows, and is faster."""
    kind = "flex_attention" if device == "cuda" else "sdpa"
    plain, packed = model(device), model(device, attn_implementation=kind)
    batch = _rows(plain, 4, 8, 256 if device == "cuda" else 64, 64)
    rows, shared = CausalPolicy(plain), CausalPolicy(packed, packing=SharedPromptPacking())
    error = (_step(rows, batch) - _step(shared, batch))[batch[1]].abs().max().item()
    require(error < 1e-3, f"log-probabilities differ by {error:.2g}")
    slow, fast = timed(lambda: _step(rows, batch), device), timed(lambda: _step(shared, batch), device)
    flops = 6 * sum(p.numel() for p in plain.parameters()) * batch[0].numel()
    return {"speedup": slow / fast, "error": error, "tflops": flops / slow / 1e12}


def bfloat16(device: str) -> dict[str, float]:
    """A step with weights in float32 and products in bfloat16 stays close to one in float32."""
    lm = model(device)
    policy, batch = CausalPolicy(lm), _rows(lm, 4, 8, 64, 64)
    exact, rounded = _step(policy, batch), _step(policy, batch, torch.bfloat16)
    error = (exact - rounded)[batch[1]].abs().mean().item()
    require(error < 0.05, f"log-probabilities differ by {error:.2g} on average")
    require(all(p.grad is not None and p.grad.isfinite().all().item() for p in lm.parameters()), "a bad gradient")
    seconds = timed(lambda: _step(policy, batch, torch.bfloat16), device)
    flops = 6 * sum(p.numel() for p in lm.parameters()) * batch[0].numel()
    return {"tokens_per_s": batch[0].numel() / seconds, "mean_error": error, "tflops": flops / seconds / 1e12}


def compiled(device: str) -> dict[str, float]:
    """`torch.compile` of the model gives the same log-probabilities."""
    if device == "cpu" and shutil.which("g++") is None:
        raise Skip("torch.compile needs g++ on a CPU")
    lm = model(device)
    policy, batch = CausalPolicy(lm), _rows(lm, 2, 4, 32, 32)
    plain = _step(policy, batch)
    began = time.perf_counter()
    lm.base_model.compile()  # which the policy calls
    error = (_step(policy, batch) - plain)[batch[1]].abs().max().item()
    compile_s = time.perf_counter() - began
    require(torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled")
    require(error < 1e-3, f"log-probabilities differ by {error:.2g}")
    return {"compile_s": compile_s, "error": error, "step_s": timed(lambda: _step(policy, batch), device)}


def _train(*arguments: str) -> None:
    """The command line, for three steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "scripts/train.py", "--config", "configs/quickstart.yaml", *arguments]
        command += ["--trainer.max_steps", "3", "--trainer.logger.init_args.save_dir", folder]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
    require(done.returncode == 0, f"{' '.join(arguments)}: {last[:200]}")


def training(device: str) -> dict[str, float]:
    """The quick start, on this device."""
    began = time.perf_counter()
    _train("--trainer.accelerator", "gpu" if device == "cuda" else "cpu", "--trainer.devices", "1")
    return {"seconds": time.perf_counter() - began}


def fsdp2(device: str) -> dict[str, float]:
    """The same under FSDP2, with one process."""
    began = time.perf_counter()
    overlay = ["--config", "configs/strategies/fsdp2.yaml", "--model.gradient_checkpointing", "false"]
    overlay += ["--trainer.strategy.init_args.data_parallel_size", "1", "--trainer.devices", "1"]
    _train(*overlay, "--trainer.accelerator", "gpu" if device == "cuda" else "cpu")
    return {"seconds": time.perf_counter() - began}


def _vllm(device: str, **settings: Any) -> dict[str, float]:
    if importlib.util.find_spec("vllm") is None:
        raise Skip("vLLM is not installed")
    from lit_async_rl.engines.vllm.engine import VLLMEngine

    lm = model(device, small=True)
    other = LlamaForCausalLM(lm.config).to(device).eval()
    engine = VLLMEngine(max_num_seqs=64, kv_cache_memory_gb=0.25, max_model_len=512, **settings)
    with tempfile.TemporaryDirectory() as folder:
        lm.save_pretrained(folder)
        engine.setup(folder)
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
    if importlib.util.find_spec("vllm") is None:
        raise Skip("vLLM is not installed")
    from lit_async_rl.engines.vllm.file_transfer import SharedMemoryTransfer

    return _vllm(device, transfer=SharedMemoryTransfer(delta=True))


def sleep(device: str) -> dict[str, float]:
    """VLLM frees most of its memory at both levels of sleep, and then samples from the new weights."""
    if importlib.util.find_spec("vllm") is None:
        raise Skip("vLLM is not installed")
    from lit_async_rl.engines.vllm.engine import VLLMEngine

    if device == "cpu":
        raise Skip("vLLM's CPU build has no sleep mode")
    lm, numbers = model(device, small=True), {}
    for level in (1, 2):
        engine = VLLMEngine(max_num_seqs=64, kv_cache_memory_gb=2.0, max_model_len=512, sleep_level=level)
        with tempfile.TemporaryDirectory() as folder:
            lm.save_pretrained(folder)
            engine.setup(folder)
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


def _gpu_transfer(device: str, kind: str) -> dict[str, float]:
    if device == "cpu":
        raise Skip("moves weights from GPU to GPU")
    import lit_async_rl

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


def overlap(device: str) -> dict[str, float]:
    """Sampling and training at once take less than one after the other: on a GPU, streams of their own."""
    sampler, trained = model(device), model(device)
    engine, asked = EmbeddedEngine.from_module(sampler, num_slots=32), requests(sampler, 4, 8, 24, 48)
    policy, batch = CausalPolicy(trained), _rows(trained, 2, 4, 64, 64)

    def train() -> None:
        for _ in range(4):
            _step(policy, batch)

    def both() -> None:
        other = threading.Thread(target=lambda: engine.run(asked))
        other.start()
        train()
        other.join(200)

    apart = timed(lambda: engine.run(asked), device) + timed(train, device)
    together = timed(both, device)
    return {"apart_s": apart, "together_s": together, "saved": 1 - together / apart}


CHECKS: dict[str, Callable[[str], dict[str, float]]] = {
    **{check.__name__: check for check in (machine, embedded, packing, bfloat16, compiled, overlap)},
    **{check.__name__: check for check in (training, fsdp2, vllm, vllm_delta, sleep, ipc, nccl)},
}


def main() -> None:
    """Runs one check and prints its result as JSON."""
    name, device = sys.argv[1:]
    result: dict[str, Any] = {"ok": False, "skipped": False, "numbers": {}, "note": ""}
    try:
        if device == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("torch sees no GPU: use --device cpu for a rehearsal")
        if device == "cpu":
            torch.set_num_threads(1)
        asset("sort_policy")
        result |= {"ok": True, "numbers": {key: float(value) for key, value in CHECKS[name](device).items()}}
    except Skip as reason:
        result |= {"skipped": True, "note": str(reason)}
    except Exception as error:
        result["note"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
