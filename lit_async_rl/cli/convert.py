"""Turns a configuration of TRL's GRPO trainers into one of this trainer.

    lit-async-rl convert trl_config.yaml --out run.yaml [--devices 8]

Reads what `trl grpo --config` reads, and `AsyncGRPOConfig`. Settings that the file leaves out have TRL's defaults (of
version 1.16), not ours. Comments at the head of the result name what could not be carried over, and why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lit_async_rl.cli.error_report import one_line_errors
from lit_async_rl.utils.checks import OneLineParser, check_range, meant

# Without influence on what is trained, or given here by other means: where logs go, how TRL's own loops are run.
IGNORED = {
    "cache_implementation", "dataloader_drop_last", "dataloader_num_workers", "ddp_find_unused_parameters",
    "ds3_gather_for_generation", "gradient_checkpointing_kwargs", "hub_model_id",
    "ignore_data_skip", "log_completions", "log_level", "log_unique_prompts", "logging_dir", "logging_first_step",
    "logging_steps", "logging_strategy", "num_completions_to_print", "overwrite_output_dir", "pad_to_multiple_of",
    "per_device_eval_batch_size", "push_to_hub", "queue_maxsize", "remove_unused_columns", "report_to", "run_name",
    "save_only_model", "save_strategy", "save_total_limit", "tf32", "torch_empty_cache_steps",
    "use_liger_kernel", "vllm_server_timeout",
}  # fmt: skip

# Settings that change what is trained and have no counterpart, with the nearest there is.
LEFT_OUT = {
    "cast_lm_head_to_fp32": "log-probabilities are computed in float32 anyway",
    "chat_template_kwargs": "set it in the tokenizer's chat template",
    "disable_dropout": "dropout stays as the model's configuration has it",
    "fork_threshold_tokens": "conversations are recorded token by token",
    "generation_kwargs": "data.sampling has max_tokens, temperature, top_p, top_k, min_p and stop",
    "load_in_4bit": "quantized weights do not train here",
    "load_in_8bit": "quantized weights do not train here",
    "lora_dropout": "adapters have no dropout: sampler and trainer would differ",
    "max_inflight_tasks": "data.admission decides how many groups are under way",
    "max_tool_calling_iterations": "tools are an environment, see docs/environments.md",
    "off_policy_mask_threshold": "see the corrections in docs/usage.md, for example SecondMomentMask",
    "repetition_penalty": "the trainer would have to know it, too: sampling must be from the policy's own distribution",
    "reward_model_name_or_path": "load the reward model in a class with reward(prompt, completion)",
    "router_aux_loss_coef": "there is no auxiliary loss of routers",
    "sync_ref_model": "the reference policy is frozen",
    "token_budget": "data.micro_batches_per_step splits a step",
    "top_entropy_quantile": "there is no mask by entropy",
    "trust_remote_code": "code of a model's repository is never executed",
    "use_adaptive_entropy": "model.entropy_coefficient is constant",
    "use_dora": "adapters that begin anew are plain LoRA",
    "use_rslora": "set model.lora.alpha to alpha * sqrt(rank)",
}

REWARDS = {
    "accuracy_reward": "lit_async_rl.rewards.MathVerify",
    "reasoning_accuracy_reward": "lit_async_rl.rewards.MathVerify",
}
SCHEDULERS = {
    "constant": "ConstantRate",
    "constant_with_warmup": "ConstantRate",
    "linear": "Linear",
    "cosine": "Cosine",
}
AGGREGATIONS = {"grpo": "SequenceMean", "sapo": "SequenceMean", "bnpo": "TokenMean"}  # others: TokenMean
ADVANTAGES: dict[str, dict[str, Any]] = {
    "group": {"class_path": "GroupMeanStd"},
    "batch": {"class_path": "GlobalMeanStd", "init_args": {"group_baseline": True}},
    "none": {"class_path": "GroupMean"},
}


def _part(name: str) -> str:
    """Name of a part of the reward: the last word of a dotted path."""
    return name.rpartition(".")[2]


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of `lit-async-rl convert`."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="YAML file of TRL")
    parser.add_argument("--out", type=Path, help="file to write; the screen without it")
    parser.add_argument("--devices", type=int, default=1, help="training processes that TRL was started with")
    given = parser.parse_args(args)
    with one_line_errors():
        check_range("", ">= 1", devices=given.devices)
        text = convert(read_settings(given.config), given.devices, given.config.name)
        if given.out is None:
            sys.stdout.write(text)
        else:
            given.out.write_text(text)


def read_settings(path: Path) -> dict[str, Any]:
    """The settings of TRL in a YAML file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no mapping.
    """
    settings = yaml.safe_load(path.read_text())
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must hold settings of TRL (`name: value`), got {type(settings).__name__}")
    return settings


def convert(settings: Mapping[str, Any], devices: int = 1, origin: str = "TRL") -> str:
    """A configuration of this trainer, as YAML with comments.

    Args:
        settings: of TRL, by name.
        devices: training processes.
        origin: named in the first line.

    Raises:
        ValueError: numbers of TRL contradict each other.
    """
    conversion = Conversion(settings, devices)
    config = conversion.config()
    lines = [f"# From {origin}, a configuration of TRL, by `lit-async-rl convert`."]
    lines += [f"# {note}" for note in conversion.notes()]
    return "\n".join(lines) + "\n" + yaml.safe_dump(config, sort_keys=False, width=120)


class Conversion:
    """Reads settings by name and remembers which were read.

    Args:
        settings: of TRL.
        devices: training processes.
    """

    def __init__(self, settings: Mapping[str, Any], devices: int) -> None:
        self._settings = settings
        self._devices = devices
        self._read: set[str] = set()
        self._notes: list[str] = []
        self._is_asynchronous = "max_staleness" in settings or "weight_sync_steps" in settings
        self._kind = self.get("loss_type", "grpo" if self._is_asynchronous else "dapo")

    def get(self, name: str, default: Any) -> Any:
        """A setting; `default` is TRL's."""
        self._read.add(name)
        value = self._settings.get(name)
        return default if value is None else value

    def note(self, text: str) -> None:
        """Adds a line to the head of the result."""
        self._notes.append(text)

    def notes(self) -> list[str]:
        """Lines on settings that were not carried over, in the order of the file, and on those to look at."""
        lines = list(self._notes)
        known = {*self._read, *IGNORED, *LEFT_OUT}
        for name, value in self._settings.items():
            if name in self._read or name in IGNORED or value in (None, False):
                continue
            reason = LEFT_OUT.get(name) or f"not known{meant(name, known)}"
            lines.append(f"left out: {name}: {value!r} ({reason})")
        return lines

    def config(self) -> dict[str, Any]:
        """The whole configuration."""
        config = {
            "seed_everything": self.get("seed", 42),
            "model": self._model(),
            "data": self._data(),
            "trainer": self._trainer(),
        }
        if steps := self.get("save_steps", None):
            config["defaults"] = {"checkpoint": {"init_args": {"every_n_train_steps": int(steps)}}}
        return config

    # -- model -------------------------------------------------------------------------------------------------------

    def _model(self) -> dict[str, Any]:
        model: dict[str, Any] = {"model": self.get("model_name_or_path", None) or "MODEL"}
        if model["model"] == "MODEL":
            self.note("look at: model.model (the file names no model)")
        model["loss"] = self._loss()
        model["learning_rate"] = float(self.get("learning_rate", 1e-6))
        model["weight_decay"] = float(self.get("weight_decay", 0.0))
        model["betas"] = [float(self.get("adam_beta1", 0.9)), float(self.get("adam_beta2", 0.999))]
        model["scheduler"] = self._scheduler()
        if beta := float(self.get("beta", 0.0)):
            model["kl_coefficient"] = beta
            model["kl_estimator"] = "token" if self.get("use_bias_correction_kl", True) else "k3"
        if entropy := float(self.get("entropy_coef", 0.0)):
            model["entropy_coefficient"] = entropy
        if self.get("use_peft", False):
            model["lora"] = self._lora()
        model["gradient_checkpointing"] = bool(self.get("gradient_checkpointing", True))
        options = self.get("model_init_kwargs", {})
        dtype = self.get("dtype", options.get("dtype", "float32"))
        model["dtype"] = "float32" if dtype == "auto" else dtype
        if dtype in ("float16", "bfloat16"):
            self.note(
                f"look at: model.dtype={dtype} (small updates are lost in it; float32 with bf16-mixed keeps them)"
            )
        if attention := self.get("attn_implementation", options.get("attn_implementation")):
            model["attn_implementation"] = attention
        return model

    def _loss(self) -> dict[str, Any]:
        kind = self._kind
        low = float(self.get("epsilon", 0.2))
        high = float(self.get("epsilon_high", low))
        level = self.get("importance_sampling_level", "token")
        if kind == "cispo":  # TRL's bound is the weight itself, ours its distance from 1
            if high > 1:
                return {"class_path": "CISPO", "init_args": {"clip_high": high - 1.0}}
            self.note(
                f"look at: model.loss (epsilon_high={high:g} would bound every weight below 1; this is CISPO's 5)"
            )
            return {"class_path": "CISPO"}
        if kind == "sapo":
            negative = float(self.get("sapo_temperature_neg", 1.05))
            positive = float(self.get("sapo_temperature_pos", 1.0))
            return {"class_path": "SAPO", "init_args": {"tau_positive": positive, "tau_negative": negative}}
        if kind == "vespo":
            names = {
                "c1_positive": "k_pos",
                "c2_positive": "lambda_pos",
                "c1_negative": "k_neg",
                "c2_negative": "lambda_neg",
            }
            defaults = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}
            constants = {ours: float(self.get(f"vespo_{name}", defaults[name])) for ours, name in names.items()}
            return {"class_path": "VESPO", "init_args": constants}
        if kind not in ("grpo", "dr_grpo", "dapo", "bnpo"):
            self.note(f"look at: model.loss (loss_type={kind} has no counterpart; this is the clipped loss of GRPO)")
        if level == "sequence":
            if kind != "grpo":
                self.note("look at: data.aggregation (importance_sampling_level=sequence is GSPO with SequenceMean)")
            return {"class_path": "GSPO", "init_args": {"clip_low": low, "clip_high": high}}
        loss: dict[str, Any] = {"class_path": "PPOClip", "init_args": {"clip_low": low, "clip_high": high}}
        if (
            ceiling := self.get("delta", None)
        ) is not None:  # bounds the ratio of tokens with A < 0, as a dual clip does
            loss["init_args"]["dual_clip"] = float(ceiling)
        return loss

    def _scheduler(self) -> dict[str, Any]:
        kind = self.get("lr_scheduler_type", "constant" if self._is_asynchronous else "linear")
        warmup = self.get("warmup_steps", 0) or self.get("warmup_ratio", 0.0)
        if kind not in SCHEDULERS:
            self.note(f"look at: model.scheduler (lr_scheduler_type={kind} has no counterpart; the rate is constant)")
        if self.get("lr_scheduler_kwargs", None):
            self.note("look at: model.scheduler (lr_scheduler_kwargs was not read)")
        return {"class_path": SCHEDULERS.get(kind, "ConstantRate"), "init_args": {"warmup": warmup}}

    def _lora(self) -> dict[str, Any]:
        lora = {"rank": int(self.get("lora_r", 16)), "alpha": int(self.get("lora_alpha", 32))}
        for ours, name in (("target_modules", "lora_target_modules"), ("modules_to_save", "lora_modules_to_save")):
            if (value := self.get(name, None)) is not None:
                lora[ours] = value
        return lora

    # -- data --------------------------------------------------------------------------------------------------------

    def _data(self) -> dict[str, Any]:
        size = int(self.get("num_generations", 8))
        accumulation = int(self.get("gradient_accumulation_steps", 1))
        completions = int(self.get("per_device_train_batch_size", 8)) * accumulation * self._devices
        if completions % size:
            raise ValueError(
                f"per_device_train_batch_size * gradient_accumulation_steps * devices must be divisible by "
                f"num_generations={size}, got {completions}"
            )
        data: dict[str, Any] = {
            "prompts": self._prompts(self.get("dataset_train_split", "train")),
            "reward": self._reward(),
        }
        sampled = int(self.get("generation_batch_size", completions))
        data["max_staleness"] = self._max_staleness(accumulation, sampled * accumulation // completions)
        data["groups_per_step"] = completions // size
        data["group_size"] = size
        data["micro_batches_per_step"] = accumulation
        if (steps := int(self.get("weight_sync_steps", 1))) > 1:
            data["weight_sync_steps"] = steps
        data["sampling"] = self._sampling()
        data["advantage"] = self._advantage()
        if self._kind == "dr_grpo":
            data["aggregation"] = {
                "class_path": "FixedLength",
                "init_args": {"max_tokens": data["sampling"]["max_tokens"]},
            }
        else:
            data["aggregation"] = {"class_path": AGGREGATIONS.get(self._kind, "TokenMean")}
        if self.get("mask_truncated_completions", False):
            data["filters"] = [{"class_path": "OverlongFilter"}]
        if not self.get("shuffle_dataset", True):
            self.note("left out: shuffle_dataset: False (the order of prompts is drawn with data.seed)")
        if self.get("eval_strategy", "no") != "no":
            data["validation"] = {"prompts": self._prompts(self.get("dataset_test_split", "test"))}
        if engine := self._engine():
            data["engine"] = engine
        return data

    def _max_staleness(self, accumulation: int, batches_sampled: int) -> int:
        """Updates after the first that TRL makes on what it has sampled; `batches_sampled` are micro-batches."""
        if self._is_asynchronous:
            return int(self.get("max_staleness", 4))
        iterations = int(self.get("num_iterations", 1))
        generations = int(self.get("steps_per_generation", batches_sampled))
        updates = iterations * max(1, generations // accumulation)
        if updates > 1:
            self.note(
                f"look at: data.max_staleness={updates - 1} (TRL made {updates} updates on each batch; here a step has "
                "rollouts of its own, of that age at most, and data.replay trains on a rollout again)"
            )
        else:
            self.note("look at: data.max_staleness=0 is TRL's synchronous training; 1 to 4 overlaps sampling with it")
        return updates - 1

    def _prompts(self, split: str) -> dict[str, Any]:
        path = self.get("dataset_name", None) or "DATASET"
        if path == "DATASET":
            self.note("look at: data.prompts (the file names no dataset)")
        prompts: dict[str, Any] = {"path": path, "split": split, "prompt_field": "prompt", "answer_field": None}
        if name := self.get("dataset_config", None):
            prompts["name"] = name
        if "look at: answer_field" not in "".join(self._notes):
            self.note("look at: answer_field (the column that the reward needs; prompt_field is prompt, as in TRL)")
        return {"class_path": "HuggingFacePrompts", "init_args": prompts}

    def _weights(self) -> dict[str, float]:
        """Weight of each reward function by the name that its part has here."""
        names = self.get("reward_funcs", [])
        names = [names] if isinstance(names, str) else list(names)
        weights = self.get("reward_weights", None) or [1.0] * len(names)
        if len(weights) != len(names):
            raise ValueError(f"reward_weights has {len(weights)} entries for {len(names)} reward_funcs")
        return {name: float(weight) for name, weight in zip(names, weights, strict=True)}

    def _advantage(self) -> dict[str, Any]:
        scale = self.get("scale_rewards", "group")
        weights = self._weights()
        if self.get("multi_objective_aggregation", "sum_then_normalize") == "normalize_then_sum" and len(weights) > 1:
            return {"class_path": "GDPO", "init_args": {"weights": {_part(name): w for name, w in weights.items()}}}
        return ADVANTAGES.get({True: "group", False: "none"}.get(scale, scale), ADVANTAGES["group"])

    def _reward(self) -> str | dict[str, Any]:
        weights = self._weights()
        if not weights:
            self.note("look at: data.reward (the file names none)")
            return "REWARD"
        paths = {_part(name): REWARDS.get(name, name) for name in weights}
        if len(paths) < len(weights):
            raise ValueError(
                f"reward_funcs: the names {', '.join(weights)} end in the same word; give one another name"
            )
        if len(paths) == 1 and set(weights.values()) == {1.0}:
            return next(iter(paths.values()))
        arguments = {"rewards": paths, "weights": {_part(name): weight for name, weight in weights.items()}}
        return {"class_path": "lit_async_rl.CombinedReward", "init_args": arguments}

    def _sampling(self) -> dict[str, Any]:
        sampling: dict[str, Any] = {
            "max_tokens": int(self.get("max_completion_length", 2048 if self._is_asynchronous else 512)),
            "temperature": float(self.get("temperature", 1.0)),
        }
        readers: dict[str, Callable[[Any], float]] = {"top_p": float, "top_k": int, "min_p": float}
        neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        for name, read in readers.items():
            value = read(self.get(name, neutral[name]))
            if value != neutral[name]:
                sampling[name] = value
        return sampling

    def _engine(self) -> dict[str, Any] | None:
        uses_vllm = self.get("use_vllm", False) or self._is_asynchronous
        share = self.get("vllm_gpu_memory_utilization", 0.3)
        length = self.get("vllm_max_model_length", None)
        parallel = int(self.get("vllm_tensor_parallel_size", 1))
        sleeps = bool(self.get("vllm_enable_sleep_mode", False))
        mode = self.get("vllm_mode", "colocate")
        for name in ("correction", "mode", "clip_max", "clip_min", "cap"):
            self.get(f"vllm_importance_sampling_{name}", None)
        if not uses_vllm:
            return None
        self.note(
            "look at: model.correction (ratios are against the engine's own log-probabilities, so none is needed)"
        )
        if mode == "server" or self._is_asynchronous:
            self.note("look at: data.engine (TRL's vLLM server becomes an engine in this process, see docs/vllm.md)")
            for name in ("base_url", "host", "port"):
                self.get(f"vllm_server_{name}", None)
            self.get("vllm_group_port", None)
        arguments: dict[str, Any] = {"gpu_memory_utilization": float(share)}
        if length is not None:
            arguments["max_model_len"] = int(length)
        if parallel > 1:
            arguments["tensor_parallel_size"] = parallel
        if sleeps:
            arguments["sleep_level"] = 1
        return {"class_path": "VLLMEngine", "init_args": arguments}

    # -- trainer -----------------------------------------------------------------------------------------------------

    def _trainer(self) -> dict[str, Any]:
        steps = int(self.get("max_steps", -1))
        epochs = self.get("num_train_epochs", 3.0)
        if steps <= 0:
            steps = 500
            self.note(f"look at: trainer.max_steps={steps} (TRL made {epochs} epochs of the dataset)")
        trainer: dict[str, Any] = {"devices": self._devices, "max_steps": steps}
        if self.get("fp16", False):
            self.note("look at: trainer.precision (fp16 was not carried over; bf16-mixed needs no scaling of the loss)")
        elif self.get("bf16", True):
            trainer["precision"] = "bf16-mixed"
        if clip := float(self.get("max_grad_norm", 1.0)):
            trainer["gradient_clip_val"] = clip
        if (every := self.get("eval_steps", None)) is not None and self.get("eval_strategy", "no") == "steps":
            trainer["val_check_interval"] = int(every) * int(self.get("gradient_accumulation_steps", 1))
            trainer["check_val_every_n_epoch"] = None
        folder = self.get("output_dir", None)
        if folder is not None:
            trainer["default_root_dir"] = folder
        return trainer
