"""TRL's GRPOTrainer as the benchmarks run it, with its phases timed.

Imported in TRL's own environment, where this trainer and its packages are not installed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer


class TimedTrainer(GRPOTrainer):
    """Records the start and end of phases."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.generation_s = self.generation_cpu_s = self.reward_s = 0.0
        self.num_tokens = 0

    def totals(self) -> dict[str, float]:
        """Totals so far."""
        return {
            "generation_s": self.generation_s,
            "generation_cpu_s": self.generation_cpu_s,
            "reward_s": self.reward_s,
            "tokens": float(self.num_tokens),
        }

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        cpu_began = time.thread_time()
        output = super()._generate(*args, **kwargs)
        self.generation_s += time.perf_counter() - began
        self.generation_cpu_s += time.thread_time() - cpu_began
        return output

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        output = super()._calculate_rewards(*args, **kwargs)
        self.reward_s += time.perf_counter() - began
        return output

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        self.num_tokens += int(output["completion_mask"].sum())
        return output


def make_trainer(
    s: Mapping[str, Any], columns: Mapping[str, Sequence[str]], reward: Callable[..., Any]
) -> TimedTrainer:
    """A trainer of GRPO on fresh data, with PPO-clip and the mean over all tokens.

    Args:
        s: settings; `clip`, `max_grad_norm`, `seed`, `betas`, `lora` (of peft's `LoraConfig`), `bf16`, `use_cpu` and
            `rates` (of every step; otherwise constant) may be missing.
        columns: `prompt`, and what `reward` takes.
        reward: of a batch of completions.
    """
    torch.set_num_threads(s["num_threads"])
    lm = AutoModelForCausalLM.from_pretrained(s["model"], dtype=torch.float32)
    if s.get("lora"):
        from peft import LoraConfig, get_peft_model  # most comparisons train all weights, in an environment without it

        lm = get_peft_model(lm, LoraConfig(**s["lora"], task_type="CAUSAL_LM"))
    tokenizer = AutoTokenizer.from_pretrained(s["model"], padding_side="left")
    low, high = s.get("clip", (0.2, 0.28))
    config = GRPOConfig(
        output_dir=s["folder"],
        use_cpu=s.get("use_cpu", True),
        bf16=s.get("bf16", False),
        gradient_checkpointing=False,
        max_steps=s["max_steps"],
        per_device_train_batch_size=s["groups_per_step"] * s["group_size"],
        gradient_accumulation_steps=1,
        num_generations=s["group_size"],
        max_completion_length=s["max_tokens"],
        temperature=1.0,
        top_k=0,
        learning_rate=s["learning_rate"],
        max_grad_norm=s.get("max_grad_norm", 0.5),
        beta=0.0,
        epsilon=low,
        epsilon_high=high,
        loss_type="dapo",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=s.get("seed", 0),
    )
    optimizer = torch.optim.AdamW(
        (parameter for parameter in lm.parameters() if parameter.requires_grad),
        s["learning_rate"],
        tuple(s.get("betas", (0.9, 0.999))),
        weight_decay=0,
    )
    rates = s.get("rates") or [s["learning_rate"]]
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: rates[min(step, len(rates) - 1)] / s["learning_rate"]
    )
    return TimedTrainer(
        model=lm,
        args=config,
        reward_funcs=reward,
        train_dataset=Dataset.from_dict(dict(columns)),
        processing_class=tokenizer,
        optimizers=(optimizer, scheduler),
    )
