"""One run of TRL's GRPOTrainer, timed; started by `benchmarks/performance/trl.py` in TRL's own environment.

Totals are written by `segments.Segments`: seconds of generation and scoring, and tokens trained on.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from datasets import Dataset
from segments import Segments
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
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
        began, cpu_began = time.perf_counter(), time.thread_time()
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


class StepClock(TrainerCallback):
    """Ends a segment after each step."""

    def __init__(self, segments: Segments) -> None:
        self.segments = segments

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.segments.end_of_step()


def odd_length(completions: list[str], **_: Any) -> list[float]:
    """Same as `our_run.odd_length`."""
    return [float(len(completion) % 2) for completion in completions]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", type=json.loads, required=True)
    s = parser.parse_args().settings
    torch.set_num_threads(s["num_threads"])
    lm = AutoModelForCausalLM.from_pretrained(s["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(s["model"], padding_side="left")
    rows = s["groups_per_step"] * s["group_size"]
    config = GRPOConfig(
        output_dir=s["folder"],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=s["max_steps"],
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=1,
        num_generations=s["group_size"],
        max_completion_length=s["max_tokens"],
        temperature=1.0,
        top_k=0,
        learning_rate=s["learning_rate"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=0.5,
        optim="adamw_torch",
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    trainer = TimedTrainer(
        model=lm,
        args=config,
        reward_funcs=odd_length,
        train_dataset=Dataset.from_dict({"prompt": s["prompts"]}),
        processing_class=tokenizer,
    )
    trainer.add_callback(StepClock(Segments(**s["segments"], read=trainer.totals)))
    trainer.train()


if __name__ == "__main__":
    main()
