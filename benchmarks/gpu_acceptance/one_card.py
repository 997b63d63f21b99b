"""One card and a whole run: the same twice, faster with stale data, exact at every length, and where its time goes.

Models have random weights of real shapes; rewards are made up.
"""

from __future__ import annotations

import asyncio
import csv
import shutil
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import Parts, batch_of, requests, require, step_of, timed
from shapes import freed, own_engine, shapes
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedConfig

import lit_async_rl as rl
from benchmarks.common.real_shapes import built, tiny
from lit_async_rl.models.packing import PrefixTreePacking
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.problem import Prompt

PROMPTS = [{"prompt": "".join(chr(48 + (n * k) % 10) for k in range(1, 20))} for n in range(64)]


def _folder(config: PreTrainedConfig, folder: str) -> Path:
    """A model without weights that `rl.fit` starts at random; the tokenizer is that of the quick start."""
    config.save_pretrained(folder)
    for file in Path(rl.asset("sort_policy")).glob("*token*"):
        shutil.copy(file, folder)
    return Path(folder)


def _run(model: Path, device: str, folder: str, max_steps: int, reward: Any, **settings: Any) -> rl.Trainer:
    return rl.fit(
        model,
        PROMPTS,
        reward,
        max_steps=max_steps,
        group_size=8,
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        logger=rl.CSVLog(save_dir=folder, name="run"),
        enable_checkpointing=False,
        enable_progress_bar=False,
        **settings,
    )


def _weights(trainer: rl.Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten().cpu() for p in trainer.lightning_module.policy.parameters()])


def digits(prompt: Prompt, completion: str) -> float:
    """Share of digits."""
    return sum(letter.isdigit() for letter in completion) / max(1, len(completion))


def reproducible(device: str) -> dict[str, float]:
    """Two runs whose data have a fixed age, and two without stale data, end with the same weights to the bit."""
    found = {}
    for name, settings in (
        ("fixed_lag", {"max_staleness": 2, "admission": rl.FixedLag()}),
        ("fresh", {"max_staleness": 0}),
    ):
        ends = []
        for _ in range(2):
            with tempfile.TemporaryDirectory() as folder:
                trainer = _run(
                    rl.asset("sort_policy"),
                    device,
                    folder,
                    max_steps=4,
                    reward=digits,
                    groups_per_step=4,
                    **settings,
                )
                ends.append(_weights(trainer))
        found[name] = (ends[0] - ends[1]).abs().max().item()
        require(found[name] == 0, f"{name}: weights differ by {found[name]:.2g}")
    return found


def asynchrony(device: str, parts: Parts) -> None:
    """Seconds of a step without stale data and with two bounds, with rewards that take no time and half a second."""
    for name in ("Qwen2.5-0.5B", "Qwen2.5-1.5B"):
        config = shapes()[name] if device == "cuda" else tiny(shapes()[name])
        for reward_s in (0.0, 0.5) if device == "cuda" else (0.0, 0.05):
            for bound, graphs in ((0, False), (1, False), (4, False), (4, True)):
                parts.do(
                    f"{name}, rewards of {reward_s} s, max_staleness {bound}{', CUDA graphs' if graphs else ''}",
                    partial(_steps, config, device, reward_s, bound=bound, graphs=graphs),
                )
                freed(device)


def _steps(config: PreTrainedConfig, device: str, reward_s: float, bound: int, graphs: bool) -> dict[str, float]:
    async def slow(prompt: Prompt, completion: str) -> float:
        await asyncio.sleep(reward_s)
        return digits(prompt, completion)

    big = device == "cuda"
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as model:
        _run(
            _folder(config, model),
            device,
            folder,
            max_steps=10 if big else 4,
            reward=slow,
            random_init=True,
            gradient_checkpointing=True,
            max_staleness=bound,
            groups_per_step=8 if big else 2,
            micro_batches_per_step=4 if big else 1,
            sampling={"max_tokens": 256 if big else 8},
            engine=rl.EmbeddedEngine(
                num_slots=64, dtype="bfloat16", self_check=False, own_process=graphs, cuda_graphs=graphs and big
            ),
            scoring={"workers": 64},
            log_every_n_steps=1,
        )
        (file,) = Path(folder).rglob("metrics.csv")
        with file.open(newline="") as rows:
            times = [float(row["perf/step_s"]) for row in csv.DictReader(rows) if row.get("perf/step_s")]
    return {"step_s": statistics.median(times[len(times) // 2 :])}


def generate(device: str, parts: Parts) -> None:
    """Tokens a second of 0.5 billion parameters in bfloat16: two caches of transformers, and the embedded engine."""
    config = shapes()["Qwen2.5-0.5B"] if device == "cuda" else tiny(shapes()["Qwen2.5-0.5B"])
    rows, prompt, new = (128, 128, 256) if device == "cuda" else (4, 8, 8)
    lm = built(config, device, torch.bfloat16).eval()
    ids = torch.randint(2, config.vocab_size, (rows, prompt), device=device)

    def by_transformers(cache: str) -> dict[str, float]:
        settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": True, "cache_implementation": cache}
        with torch.no_grad():
            seconds = timed(lambda: lm.generate(ids, **settings), device, repeats=1)
        return {"tokens_per_s": rows * new / seconds}

    def by_engine(graphs: bool) -> dict[str, float]:
        engine = own_engine(lm, device, num_slots=rows, graphs=graphs)
        asked = requests(lm, rows, 1, prompt=prompt, new=new)
        engine.run(asked)
        seconds = timed(lambda: engine.run(asked), device, repeats=1)
        engine.close()
        return {"tokens_per_s": rows * new / seconds}

    for kind, graphs in (("embedded engine", False), ("embedded engine, CUDA graphs", True)):
        parts.do(kind, lambda graphs=graphs: by_engine(graphs))
    for cache in ("dynamic", "static"):  # the static one is compiled, which may take as long as the check may
        parts.do(f"generate, {cache} cache", lambda cache=cache: by_transformers(cache))


def lengths(device: str) -> dict[str, float]:
    """How far the engine in bfloat16 is from the trainer in mixed precision, by length of the completion.

    KL divergence a token, by the samples' own mean of -log r + r - 1, and the share of effective samples that products
    of ratios over whole completions leave.
    """
    config = shapes()["Qwen2.5-0.5B"] if device == "cuda" else tiny(shapes()["Qwen2.5-0.5B"])
    rows, new = (64, 1024) if device == "cuda" else (8, 32)
    master = built(config, device, torch.float32).eval()
    engine = own_engine(master, device, num_slots=rows, graphs=False)
    asked = requests(master, rows, 1, prompt=32, new=new)
    completions = [completion for results in engine.run(asked) for completion in results]
    engine.close()
    policy = CausalPolicy(master, chunk_tokens=1024)
    log_ratios = []
    for request, completion in zip(asked, completions, strict=True):
        ids = torch.tensor([request.prompt_ids + completion.token_ids], device=device)
        mask = torch.zeros_like(ids, dtype=torch.bool)
        mask[:, len(request.prompt_ids) :] = True
        with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16):
            logprobs = policy(ids, mask).logprobs[mask].float().cpu()
        log_ratios.append(logprobs - torch.tensor(completion.logprobs))
    log_ratio = torch.stack(log_ratios).double()
    found = {"kl_per_token": (log_ratio.exp() - 1 - log_ratio).mean().item()}
    for length in (max(1, new // 64), new // 16, new // 4, new):
        weights = log_ratio[:, :length].sum(1).exp()
        found[f"effective_share_{length}"] = (weights.sum() ** 2 / (weights**2).sum() / rows).item()
    return found


def long_trees(device: str, parts: Parts) -> None:
    """A step on prefix trees of long prompts, by FlexAttention on a GPU, beside the same step on rows."""
    config = shapes()["Qwen2.5-0.5B"] if device == "cuda" else tiny(shapes()["Qwen2.5-0.5B"])

    def compared(prompt: int, new: int) -> dict[str, float]:
        seconds = []
        results = []
        batch = tuple(values.to(device) for values in batch_of(config.vocab_size, 8, prompt, new))
        for packing in (None, PrefixTreePacking()):
            kind = "flex_attention" if packing is not None and device == "cuda" else "sdpa"
            config._attn_implementation = kind
            lm = built(config, device, torch.float32).train()
            lm.gradient_checkpointing_enable({"use_reentrant": False})
            policy = CausalPolicy(lm, chunk_tokens=1024, packing=packing)
            results.append(step_of(policy, batch, torch.bfloat16)[batch[1]])
            seconds.append(timed(lambda policy=policy: step_of(policy, batch, torch.bfloat16), device, repeats=2))
            del lm, policy
            freed(device)
        error = (results[0] - results[1]).abs().mean().item()
        require(error < 0.05, f"log-probabilities differ by {error:.2g} on average")
        return {"rows_s": seconds[0], "trees_s": seconds[1], "speedup": seconds[0] / seconds[1], "mean_error": error}

    for tokens in (4096, 16_384) if device == "cuda" else (64,):  # of a tree of eight completions
        prompt = tokens // 2
        parts.do(f"{tokens} tokens", lambda prompt=prompt: compared(prompt, prompt // 8))


def profiles(device: str, parts: Parts) -> None:
    """Where the time of a training step and of sampling goes: the longest kernels, as tables beside the parts."""
    config = shapes()["Qwen2.5-0.5B"] if device == "cuda" else tiny(shapes()["Qwen2.5-0.5B"])
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    order = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
    lm = built(config, device, torch.float32).train()
    policy = CausalPolicy(lm)
    batch = tuple(values.to(device) for values in batch_of(config.vocab_size, 16, prompt=32, new=96))
    engine = own_engine(lm, device, num_slots=32, graphs=False)
    asked = requests(lm, 8, 4, prompt=16, new=32 if device == "cuda" else 4)
    works = {"training": lambda: step_of(policy, batch, torch.bfloat16), "sampling": lambda: engine.run(asked)}
    for name, work in works.items():
        parts.do(name, lambda name=name, work=work: _profiled(name, work, activities, order=order, parts=parts))
    engine.close()


def _profiled(name: str, work: Any, activities: list[Any], order: str, parts: Parts) -> dict[str, float]:
    work()
    with profile(activities=activities) as profiled:
        work()
        if ProfilerActivity.CUDA in activities:
            torch.cuda.synchronize()
    events = profiled.key_averages()
    parts.keep(f"profile_{name}.txt", events.table(sort_by=order, row_limit=15, max_name_column_width=60))
    return {"launches": sum(event.count for event in events if "LaunchKernel" in event.key)}
