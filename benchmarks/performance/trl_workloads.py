"""Models, prompts and sizes of the comparison with TRL (`trl.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

from lit_async_rl.assets import asset
from lit_async_rl.tasks import MentalArithmetic, SortDigits

WORKLOADS: dict[str, dict[str, Any]] = {
    "equal": {"groups": 32, "max_tokens": 12, "steps": 3, "ours": []},
    "mixed": {
        "groups": 16,
        "max_tokens": 128,
        "steps": 2,
        "ours": ["--model.packing", "null", "--data.micro_batches_per_step", "6"],
    },
    "smollm2": {
        "groups": 2,
        "max_tokens": 64,
        "steps": 1,
        "warmup": 1,
        "ours": ["--model.packing", "PrefixTreePacking"],
    },
}


def make_model(workload: str, folder: Path, smollm2: str) -> str:
    """The shipped policy, an untrained one of its shape that ends each token with probability 3 / 98, or SmolLM2."""
    if workload == "smollm2":
        return str(Path(smollm2).resolve())
    shipped = asset("sort_policy")
    if workload == "equal":
        return shipped
    config = AutoConfig.from_pretrained(shipped)
    config.eos_token_id = [1, 2, 3]
    torch.manual_seed(0)
    lm = LlamaForCausalLM(config)
    lm.generation_config.eos_token_id = [1, 2, 3]
    lm.generation_config.pad_token_id = 0
    lm.save_pretrained(folder)
    AutoTokenizer.from_pretrained(shipped).save_pretrained(folder)
    return str(folder)


def make_prompts(workload: str, model: str, number: int) -> list[str]:
    """Texts: digits to be sorted, or one to four questions in the format of a chat."""
    if workload != "smollm2":
        digits = SortDigits(8, size=number)
        return [digits[n].text for n in range(number)]
    tokenizer = AutoTokenizer.from_pretrained(model)
    task = MentalArithmetic()
    questions = [str(task[n].messages[0]["content"]) for n in range(len(task))]  # type: ignore[index]
    texts = []
    for n in range(number):
        asked = " ".join(questions[(n + k) % len(questions)] for k in range(1 + n % 4))
        chat = [{"role": "user", "content": asked}]
        texts.append(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    return texts
