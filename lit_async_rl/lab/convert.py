"""Turns a configuration of TRL's GRPO trainers into one of this trainer.

    lit-async-rl convert trl_config.yaml --out run.yaml [--devices 8]

Reads what `trl grpo --config` reads, and `AsyncGRPOConfig`. Settings that the file leaves out have TRL's defaults, not
ours: those of its commit f2cd577 (1.16 has the same but for what a comment names). Comments at the head of the result
name what could not be carried over, and why.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lit_async_rl.cli.one_line_errors import one_line_errors
from lit_async_rl.utils.checks import OneLineParser, check_range, meant
from lit_async_rl.utils.secrets import without_secrets

# Without influence on training, or set here by other means: where logs go, how TRL runs its loops.
IGNORED = {
    "average_tokens_across_devices", "cache_implementation", "disable_tqdm", "do_eval", "do_train",
    "ds3_gather_for_generation", "gradient_checkpointing_kwargs", "heartbeat_stale_after_s", "ignore_data_skip",
    "local_rank", "num_completions_to_print", "overwrite_output_dir", "pad_to_multiple_of",
    "per_device_eval_batch_size", "project", "push_to_hub", "queue_maxsize", "remove_unused_columns", "report_to",
    "request_timeout", "run_name", "save_on_each_node", "save_only_model", "save_strategy", "save_total_limit",
    "skip_memory_metrics", "tf32", "torch_empty_cache_steps", "transformers_continuous_batching_config", "use_cache",
    "use_liger_kernel", "use_transformers_continuous_batching", "use_transformers_paged", "weight_sync_timeout",
}  # fmt: skip
IGNORED_KINDS = ("dataloader_", "ddp_", "hub_", "log_", "logging_", "torch_compile", "trackio_")  # beginnings of names

# Of `AsyncGRPOConfig` only, and of `GRPOConfig` only.
ASYNCHRONOUS = {
    "fork_threshold_tokens", "heartbeat_stale_after_s", "max_inflight_tasks", "max_staleness", "queue_maxsize",
    "request_timeout", "token_budget", "weight_sync_steps", "weight_sync_timeout",
}  # fmt: skip
SYNCHRONOUS = re.compile(
    "loss_type|beta|use_bias_correction_kl|delta|importance_sampling_level|num_iterations|steps_per_generation"
    "|generation_batch_size|scale_rewards|reward_weights|multi_objective_aggregation|mask_truncated_completions"
    "|shuffle_dataset|num_generations_eval|sync_ref_model|top_entropy_quantile|off_policy_mask_threshold|use_vllm"
    "|use_adaptive_entropy|(sapo|vespo|entropy|ref_model)_.*|vllm_(?!server_(base_url|timeout)$).*"
)
VERL = ("actor_rollout_ref", "algorithm", "critic", "reward_model", "custom_reward_function")  # sections of its files

# Settings that change training and have no counterpart, with the nearest one.
WITHOUT_COUNTERPART = {
    "accelerator_config parallelism_config": "processes are trainer.strategy, see docs/hardware.md",
    "adam_epsilon": "that of AdamW is 1e-8; model.optimizer sets another",
    "bnb_4bit_quant_storage bnb_4bit_quant_type load_in_4bit load_in_8bit use_bnb_nested_quant": (
        "quantized weights do not train here"
    ),
    "cast_lm_head_to_fp32": "log-probabilities are computed in float32 anyway",
    "chat_template_kwargs": "set data.prompts.init_args.chat_template_kwargs",
    "data_seed": "the order of prompts is drawn with data.seed",
    "dataset_streaming streaming": "all prompts are read at the start",
    "datasets": "a mixture of datasets is written into one file first",
    "deepspeed fsdp fsdp_config": "sharding is trainer.strategy, see docs/hardware.md",
    "disable_dropout": "the policy has no dropout",
    "entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target use_adaptive_entropy": (
        "model.entropy_coefficient is constant"
    ),
    "eval_delay": "trainer.val_check_interval has no delay",
    "eval_on_start": "held-out prompts are measured before training anyway",
    "fork_threshold_tokens": "conversations are recorded token by token",
    "full_determinism": "data.admission=FixedLag repeats a run bit for bit",
    "generation_kwargs": "data.sampling has max_tokens, temperature, top_p, top_k, min_p and stop",
    "label_smoothing_factor": "TRL's loss does not read it, either",
    "load_best_model_at_end": "defaults.checkpoint.init_args.monitor keeps the best one; none is loaded at the end",
    "lora_dropout": "adapters have no dropout: sampler and trainer would differ",
    "lora_target_parameters": "adapters are of modules",
    "lora_task_type": "adapters are those of causal language models",
    "max_inflight_tasks": "data.admission decides how many groups are under way",
    "max_tool_calling_iterations": "tools are an environment, see docs/environments.md",
    "model_revision": "model.model names a folder, or a model in the hub's cache",
    "neftune_noise_alpha": "there is no noise in embeddings",
    "off_policy_mask_threshold": "see the corrections in docs/stabilizers.md, for example SecondMomentMask",
    "optim": "AdamW, unless model.optimizer names another",
    "optim_args": "set the arguments of an optimizer other than AdamW in model.optimizer",
    "ref_model_mixup_alpha ref_model_sync_steps sync_ref_model": (
        "the callback ReferenceReset copies the policy to the reference policy, without a mixture of both"
    ),
    "repetition_penalty": "the trainer would have to know it, too: sampling must be from the policy's own distribution",
    "resume_from_checkpoint": "ckpt_path resumes from a checkpoint of this trainer",
    "reward_model_name_or_path": "data.reward=RewardModel, see docs/rewards.md",
    "router_aux_loss_coef": "there is no auxiliary loss of routers",
    "test_split_size": "data.validation.prompts names held-out prompts",
    "token_budget": "data.micro_batches_per_step splits a step",
    "top_entropy_quantile": "there is no mask by entropy",
    "trust_remote_code": "code of a model's repository is never executed",
    "use_cpu": "trainer.accelerator: cpu",
    "use_dora": "new adapters are plain LoRA",
    "use_rslora": "set model.lora.alpha to alpha * sqrt(rank)",
    "vllm_model_impl": "see docs/engines.md",
    "vllm_structured_outputs_regex": "completions are not restricted",
}
LEFT_OUT = {name: reason for names, reason in WITHOUT_COUNTERPART.items() for name in names.split()}

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
AGGREGATIONS = {"grpo": "SequenceMean", "sapo": "SequenceMean"}  # others: TokenMean
# TRL's standard deviation divides by N - 1 and has 1e-4 added; that of its asynchronous trainer by N, and 1e-8.
ADVANTAGES: dict[str, dict[str, Any]] = {
    "group": {"class_path": "GroupMeanStd", "init_args": {"eps": 1e-4, "ddof": 1}},
    "batch": {"class_path": "GroupMeanStd", "init_args": {"eps": 1e-4, "ddof": 1, "std_of_step": True}},
    "none": {"class_path": "GroupMean"},
}
ASYNCHRONOUS_ADVANTAGE = {"class_path": "GroupMeanStd", "init_args": {"eps": 1e-8}}


def _part(name: str) -> str:
    """Name of a part of the reward: the last word of a dotted path."""
    return name.rpartition(".")[2]


def main(args: Sequence[str] | None = None) -> None:
    """Entry point of `lit-async-rl convert`."""
    parser = OneLineParser("convert", __doc__)
    parser.add_argument("config", type=Path, help="YAML file of TRL")
    parser.add_argument("--out", type=Path, help="file to write; the screen without it")
    parser.add_argument("--devices", type=int, default=1, help="training processes that TRL was started with")
    given = parser.parse_args(args)
    with one_line_errors():
        check_range("", ">= 1", devices=given.devices)
        if given.out is not None and given.out.exists():
            raise ValueError(f"--out {given.out} exists: nothing was written")
        text = convert(read_settings(given.config), given.devices, given.config.name)
        if given.out is None:
            sys.stdout.write(text)
        else:
            given.out.write_text(text)


def read_settings(path: Path) -> dict[str, Any]:
    """The settings of TRL in a YAML file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds something else, such as settings of verl.
    """
    if path.suffix == ".py":
        raise ValueError(f"the file {path} is a Python script: write the arguments of its GRPOConfig into a YAML file")
    try:
        settings = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"the file {path} is not valid YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"the file {path} must hold settings of TRL (`name: value`), got {type(settings).__name__}")
    if sections := [name for name in VERL if isinstance(settings.get(name), dict)]:
        raise ValueError(
            f"the file {path} must hold settings of TRL, but its section {sections[0]} belongs to verl: "
            "docs/comparison.md lists settings of verl and lit-async-rl side by side"
        )
    if isinstance(settings.get("model"), dict) or isinstance(settings.get("trainer"), dict):
        raise ValueError(
            f"the file {path} must hold settings of TRL, but has sections such as `model` or `trainer`: is it already "
            "a configuration of lit-async-rl?"
        )
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
        self._settings = dict(settings)
        self._devices = devices
        self._read: set[str] = set()
        self._notes: list[str] = []
        self._is_asynchronous = not ASYNCHRONOUS.isdisjoint(settings)
        if self._is_asynchronous:
            self.note(f"AsyncGRPOConfig, for it has {', '.join(sorted(ASYNCHRONOUS & settings.keys()))}")
            for name in filter(SYNCHRONOUS.fullmatch, map(str, settings)):
                self._leave_out(name, "AsyncGRPOConfig has no such setting")
        self._kind = self.get("loss_type", "dapo")

    def get(self, name: str, default: Any) -> Any:
        """A setting; `default` is TRL's."""
        self._read.add(name)
        value = self._settings.get(name)
        return default if value is None else value

    def number(self, name: str, default: Any, kind: Callable[[Any], Any] = float) -> Any:
        """A setting that is a number.

        Raises:
            ValueError: it is none, or no integer where that is wanted.
        """
        value = self.get(name, default)
        try:
            read = kind(value)
            is_right = float(value) == read
        except (TypeError, ValueError):
            is_right = False
        if not is_right:
            raise ValueError(f"{name} must be {'an integer' if kind is int else 'a number'}, got {value!r}")
        return read

    def note(self, text: str) -> None:
        """Adds a line to the head of the result."""
        self._notes.append(text)

    def notes(self) -> list[str]:
        """Lines on settings not carried over, in the order of the file, and on those to look at."""
        known = {*self._read, *IGNORED, *LEFT_OUT, *ASYNCHRONOUS}
        unimportant = []
        for name, value in list(self._settings.items()):
            if name in self._read:
                continue
            if name in IGNORED or str(name).startswith(IGNORED_KINDS):
                unimportant.append(str(name))
            elif name not in LEFT_OUT:
                self._leave_out(name, f"not known{meant(str(name), known)}")
            elif value is not None and value is not False:
                self._leave_out(name, LEFT_OUT[name])
        if unimportant:
            return [*self._notes, f"left out, no influence on what is learned: {', '.join(unimportant)}"]
        return self._notes

    def _leave_out(self, name: str, reason: str) -> None:
        """Adds the line of a setting that is not carried over, and forgets it; shows its value if it is no key."""
        self.note(f"left out: {without_secrets(f'{name}: {self._settings.pop(name)!r}')} ({reason})")

    def _leave_out_unless(self, condition: bool, kind: str, reason: str) -> None:
        """Leaves settings out that TRL does not read without another one.

        Args:
            condition: whether it reads them.
            kind: pattern of their names.
            reason: named in each line.
        """
        for name in [name for name in self._settings if re.fullmatch(kind, str(name))]:
            if not condition:
                self._leave_out(name, reason)

    def config(self) -> dict[str, Any]:
        """The whole configuration."""
        config = {
            "seed_everything": self.get("seed", 42),
            "model": self._model(),
            "data": self._data(),
            "trainer": self._trainer(),
        }
        if steps := self._every("save_steps", config["trainer"]["max_steps"]):
            config["defaults"] = {"checkpoint": {"init_args": {"every_n_train_steps": steps}}}
        return config

    def _every(self, name: str, max_steps: int, default: Any = None) -> int | None:
        """Steps between two saves or validations; below 1, a share of the run. None if not set.

        Raises:
            ValueError: it is not above 0.
        """
        if self.get(name, default) is None:
            return None
        steps = self.number(name, default)
        check_range("", "positive", **{name: steps})
        return math.ceil(steps * max_steps) if steps < 1 else int(steps)

    # -- model -------------------------------------------------------------------------------------------------------

    def _model(self) -> dict[str, Any]:
        model: dict[str, Any] = {"model": self.get("model_name_or_path", None) or "MODEL"}
        if model["model"] == "MODEL":
            self.note("look at: model.model (the file names no model)")
        model["loss"] = self._loss()
        model["learning_rate"] = self.number("learning_rate", 1e-6)
        model["weight_decay"] = self.number("weight_decay", 0.0)
        model["betas"] = [self.number("adam_beta1", 0.9), self.number("adam_beta2", 0.999)]
        model["scheduler"] = self._scheduler()
        model |= self._penalties()
        uses_peft = self.get("use_peft", False)
        self._leave_out_unless(uses_peft, "lora_.*|use_rslora|use_dora", "use_peft is not set")
        if uses_peft:
            model["lora"] = self._lora()
        model["gradient_checkpointing"] = bool(self.get("gradient_checkpointing", True))
        options = self._options()
        dtype = self.get("dtype", options.pop("dtype", "float32"))
        model["dtype"] = "float32" if dtype == "auto" else dtype
        if dtype in ("float16", "bfloat16"):
            self.note(
                f"look at: model.dtype={dtype} (small updates are lost in it; float32 with bf16-mixed keeps them)"
            )
        if attention := self.get("attn_implementation", options.pop("attn_implementation", None)):
            model["attn_implementation"] = attention
        for name, value in options.items():
            self.note(f"left out: model_init_kwargs.{without_secrets(f'{name}: {value!r}')}")
        return model

    def _options(self) -> dict[str, Any]:
        """`model_init_kwargs`, in a file a mapping or a text with one."""
        options = self.get("model_init_kwargs", {})
        options = yaml.safe_load(options) if isinstance(options, str) else options
        if not isinstance(options, dict):
            raise ValueError(f"model_init_kwargs must be a mapping, got {without_secrets(repr(options))}")
        return dict(options)

    def _penalties(self) -> dict[str, Any]:
        """KL to the reference, and entropy."""
        found: dict[str, Any] = {}
        beta = self.number("beta", 0.0)
        self._leave_out_unless(beta != 0, "use_bias_correction_kl", "without effect: beta is 0")
        if beta:
            found["kl_coefficient"] = beta
            if "use_bias_correction_kl" not in self._settings:
                self.note("look at: model.kl_estimator=k3 (use_bias_correction_kl is off; from TRL 1.16 on: token)")
            is_weighted = self.get("use_bias_correction_kl", False)
            found["kl_estimator"] = "token" if is_weighted else "k3"
            if is_weighted and self.get("importance_sampling_level", "token") == "sequence":
                self.note("look at: model.kl_estimator=token (weights of tokens, where TRL has one of the completion)")
        if entropy := self.number("entropy_coef", 0.0):
            found["entropy_coefficient"] = entropy
            if self._kind in (*AGGREGATIONS, "dr_grpo", "luspo"):
                self.note(
                    "look at: model.entropy_coefficient (TRL averages entropy over tokens, and here it has the average "
                    "of data.aggregation)"
                )
        return found

    def _loss(self) -> dict[str, Any]:
        kind = self._kind
        level = self.get("importance_sampling_level", "token")
        is_clipped = kind in ("grpo", "dr_grpo", "dapo", "bnpo", "luspo")
        self._leave_out_unless(kind == "sapo", "sapo_.*", f"without effect: loss_type is {kind}")
        self._leave_out_unless(kind == "vespo", "vespo_.*", f"without effect: loss_type is {kind}")
        self._leave_out_unless(is_clipped or kind == "cispo", "epsilon(_high)?", f"without effect: loss_type is {kind}")
        self._leave_out_unless(is_clipped, "delta", f"without effect: loss_type is {kind}")
        low = self.number("epsilon", 0.2)
        high = self.number("epsilon_high", low)
        if level not in ("token", "sequence"):
            self._leave_out("importance_sampling_level", "TRL has token and sequence; this is token")
        if level == "sequence" and kind in ("cispo", "sapo"):
            self._leave_out("importance_sampling_level", f"loss_type={kind} has ratios of tokens here")
        if kind == "cispo":  # TRL's bound is the weight itself, ours its distance from 1
            if high >= 1:
                return {"class_path": "CISPO", "init_args": {"clip_high": high - 1.0}}
            self.note(
                f"look at: model.loss (epsilon_high={high:g} would bound every weight below 1; this is CISPO's 5)"
            )
            return {"class_path": "CISPO"}
        if kind == "sapo":
            negative = self.number("sapo_temperature_neg", 1.05)
            positive = self.number("sapo_temperature_pos", 1.0)
            return {"class_path": "SAPO", "init_args": {"tau_positive": positive, "tau_negative": negative}}
        if kind == "vespo":
            constants = {
                "c1_positive": self.number("vespo_k_pos", 2.0),
                "c2_positive": self.number("vespo_lambda_pos", 3.0),
                "c1_negative": self.number("vespo_k_neg", 3.0),
                "c2_negative": self.number("vespo_lambda_neg", 2.0),
            }
            return {"class_path": "VESPO", "init_args": constants}
        if not is_clipped or (kind == "luspo" and level != "sequence"):
            self.note(f"look at: model.loss (loss_type={kind} has no counterpart; this is the clipped loss of GRPO)")
        if level == "sequence":
            self._leave_out_unless(False, "delta", "GSPO has no second bound")
            if kind != "grpo":
                self.note("look at: data.aggregation (importance_sampling_level=sequence is GSPO with SequenceMean)")
            return {"class_path": "GSPO", "init_args": {"clip_low": low, "clip_high": high}}
        loss: dict[str, Any] = {"class_path": "PPOClip", "init_args": {"clip_low": low, "clip_high": high}}
        if self.get("delta", None) is not None:  # bounds the ratio of tokens with A < 0, as a dual clip does
            if (ceiling := self.number("delta", None)) > 1 + high:
                loss["init_args"]["dual_clip"] = ceiling
            else:
                self._leave_out("delta", f"a bound of the ratio below 1 + epsilon_high = {1 + high:g}")
        return loss

    def _scheduler(self) -> dict[str, Any]:
        kind = self.get("lr_scheduler_type", "constant" if self._is_asynchronous else "linear")
        warmup = self.number("warmup_steps", 0) or self.number("warmup_ratio", 0.0)
        if kind not in SCHEDULERS:
            self.note(f"look at: model.scheduler (lr_scheduler_type={kind} has no counterpart; the rate is constant)")
        if kind == "constant" and warmup:
            self.note("left out: warmup (without effect: lr_scheduler_type is constant)")
            warmup = 0
        if self.get("lr_scheduler_kwargs", None):
            self.note("look at: model.scheduler (lr_scheduler_kwargs was not read)")
        return {"class_path": SCHEDULERS.get(kind, "ConstantRate"), "init_args": {"warmup": warmup}}

    def _lora(self) -> dict[str, Any]:
        if "lora_dropout" not in self._settings:
            self.note("left out: lora_dropout: 0.05, TRL's default (" + LEFT_OUT["lora_dropout"] + ")")
        lora = {"rank": self.number("lora_r", 16, int), "alpha": self.number("lora_alpha", 32, int)}
        for ours, name in (("target_modules", "lora_target_modules"), ("modules_to_save", "lora_modules_to_save")):
            if (value := self.get(name, None)) is not None:
                lora[ours] = value
        return lora

    # -- data --------------------------------------------------------------------------------------------------------

    def _data(self) -> dict[str, Any]:
        size = self.number("num_generations", 8, int)
        accumulation = self.number("gradient_accumulation_steps", 1, int)
        batch = self.number("per_device_train_batch_size", 8, int)
        check_range("", ">= 1", num_generations=size, gradient_accumulation_steps=accumulation)
        check_range("", ">= 1", per_device_train_batch_size=batch)
        completions = batch * accumulation * self._devices
        if completions % size:
            raise ValueError(
                f"per_device_train_batch_size * gradient_accumulation_steps * devices must be divisible by "
                f"num_generations={size}, got {completions}"
            )
        data: dict[str, Any] = {
            "prompts": self._prompts(self.get("dataset_train_split", "train")),
            "reward": self._reward(),
        }
        sampled = self.number("generation_batch_size", completions, int)
        check_range("", ">= 1", generation_batch_size=sampled)
        data["max_staleness"] = self._max_staleness(accumulation, sampled * accumulation // completions)
        data["groups_per_step"] = completions // size
        data["group_size"] = size
        data["micro_batches_per_step"] = accumulation
        if (steps := self.number("weight_sync_steps", 1, int)) > 1:
            data["weight_sync_steps"] = steps
        data["sampling"] = self._sampling()
        data["advantage"] = self._advantage()
        data["aggregation"] = self._aggregation(accumulation, data["sampling"]["max_tokens"])
        if self.get("mask_truncated_completions", False):
            data["filters"] = [{"class_path": "OverlongFilter"}]
            if data["aggregation"]["class_path"] == "SequenceMean":
                self.note("look at: data.aggregation (SequenceMean leaves cut completions out; TRL counts them as 0)")
        if not self.get("shuffle_dataset", True):
            data["shuffle"] = False
        is_validated = self.get("eval_strategy", "no") != "no"
        self._leave_out_unless(is_validated, "eval_steps|num_generations_eval", "without effect: no eval_strategy")
        if is_validated:
            num_samples = self.number("num_generations_eval", size, int)
            prompts = self._prompts(self.get("dataset_test_split", "test"))
            data["validation"] = {"prompts": prompts, "num_samples": num_samples}
        if engine := self._engine():
            data["engine"] = engine
        return data

    def _aggregation(self, accumulation: int, max_tokens: int) -> dict[str, Any]:
        if self._kind == "dr_grpo":
            return {"class_path": "FixedLength", "init_args": {"max_tokens": max_tokens}}
        if self._kind == "luspo":  # the sum over a completion's tokens
            return {"class_path": "FixedLength", "init_args": {"max_tokens": 1}}
        of_micro_batch = self._is_asynchronous or self._kind == "bnpo"
        if of_micro_batch and (accumulation > 1 or (self._devices > 1 and not self._is_asynchronous)):
            self.note(
                "look at: data.aggregation=TokenMean (every token of the step counts the same; TRL averages over the "
                "tokens of each micro-batch, and then over micro-batches)"
            )
        return {"class_path": "TokenMean" if of_micro_batch else AGGREGATIONS.get(self._kind, "TokenMean")}

    def _max_staleness(self, accumulation: int, batches_sampled: int) -> int:
        """TRL's updates on the same samples after the first; `batches_sampled` are micro-batches."""
        if self._is_asynchronous:
            return int(self.number("max_staleness", 4, int))
        iterations = self.number("num_iterations", 1, int)
        generations = self.number("steps_per_generation", batches_sampled, int)
        check_range("", ">= 1", num_iterations=iterations)
        if "steps_per_generation" in self._settings:
            check_range("", ">= 1", steps_per_generation=generations)
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
        if self._is_asynchronous:
            return ASYNCHRONOUS_ADVANTAGE
        if self._is_normalized_by_part:
            weights = {_part(name): weight for name, weight in self._weights().items()}
            self._leave_out_unless(False, "scale_rewards", "without effect: each part is normalized by itself")
            return {"class_path": "GDPO", "init_args": {"weights": weights, "eps": 1e-4, "ddof": 1}}
        scale = self.get("scale_rewards", "group")
        scale = {True: "group", False: "none"}.get(scale, scale)
        if scale not in ADVANTAGES:
            self._leave_out("scale_rewards", "TRL has group, batch and none; this is group")
        return ADVANTAGES.get(scale, ADVANTAGES["group"])

    @property
    def _is_normalized_by_part(self) -> bool:
        kind = self.get("multi_objective_aggregation", "sum_then_normalize")
        if kind not in ("sum_then_normalize", "normalize_then_sum"):
            self._leave_out("multi_objective_aggregation", "TRL has sum_then_normalize and normalize_then_sum")
        return kind == "normalize_then_sum"

    def _reward(self) -> str | dict[str, Any]:
        weights = self._weights()
        if not weights:
            self.note("look at: data.reward (the file names none)")
            return "REWARD"
        paths = {_part(name): REWARDS.get(name, name) for name in weights}
        if len(paths) < len(weights):
            raise ValueError(
                f"reward_funcs: some of the rewards {', '.join(weights)} would get the same name, because they end in "
                "the same word: rename one of them"
            )
        for name in weights:
            if "." not in REWARDS.get(name, name):
                self.note(f"look at: data.reward ({name} is of TRL's own, and has no counterpart of this name)")
        if len(paths) == 1 and set(weights.values()) == {1.0} and not self._is_normalized_by_part:
            return next(iter(paths.values()))
        arguments = {"rewards": paths, "weights": {_part(name): weight for name, weight in weights.items()}}
        return {"class_path": "lit_async_rl.CombinedReward", "init_args": arguments}

    def _sampling(self) -> dict[str, Any]:
        sampling: dict[str, Any] = {
            "max_tokens": self.number("max_completion_length", 2048 if self._is_asynchronous else 512, int),
            "temperature": self.number("temperature", 1.0),
        }
        neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        for name, default in neutral.items():
            value = self.number(name, default, int if name == "top_k" else float)
            if value != default:
                sampling[name] = value
        return sampling

    def _engine(self) -> dict[str, Any] | None:
        uses_vllm = self.get("use_vllm", False) or self._is_asynchronous
        self._leave_out_unless(uses_vllm, "vllm_.*", "without effect: use_vllm is not set")
        if not uses_vllm:
            return None
        mode = self.get("vllm_mode", "colocate")
        if mode not in ("colocate", "server"):
            self._leave_out("vllm_mode", "TRL has colocate and server; this is colocate")
        reason = "ratios are against the engine's own log-probabilities, so none is needed"
        self.note(f"look at: model.correction ({reason})")
        self._leave_out_unless(False, "vllm_importance_sampling_.*", reason)
        if mode == "server" or self._is_asynchronous:
            self.note("look at: data.engine (TRL's vLLM server becomes an engine in this process, see docs/engines.md)")
        self._leave_out_unless(False, "vllm_(server_.*|group_port)", "there is no server")
        arguments: dict[str, Any] = {"gpu_memory_utilization": self.number("vllm_gpu_memory_utilization", 0.3)}
        if self.get("vllm_max_model_length", None) is not None:
            arguments["max_model_len"] = self.number("vllm_max_model_length", None, int)
        parallel = self.number("vllm_tensor_parallel_size", 1, int)
        check_range("", ">= 1", vllm_tensor_parallel_size=parallel)
        if parallel > 1:
            arguments["tensor_parallel_size"] = parallel
        if self.get("vllm_enable_sleep_mode", False):
            arguments["sleep_level"] = 1
        return {"class_path": "VLLMEngine", "init_args": arguments}

    # -- trainer -----------------------------------------------------------------------------------------------------

    def _trainer(self) -> dict[str, Any]:
        steps = self.number("max_steps", -1, int)
        epochs = self.number("num_train_epochs", 3.0)
        self._leave_out_unless(steps <= 0, "num_train_epochs", "without effect: max_steps is given")
        if steps <= 0:
            steps = 500
            self.note(f"look at: trainer.max_steps={steps} (TRL made {epochs} epochs of the dataset)")
        trainer: dict[str, Any] = {"devices": self._devices, "max_steps": steps}
        if self.get("fp16", False):
            self.note("look at: trainer.precision (fp16 was not carried over; bf16-mixed needs no scaling of the loss)")
        elif self.get("bf16", True):
            trainer["precision"] = "bf16-mixed"
        if clip := self.number("max_grad_norm", 1.0):
            trainer["gradient_clip_val"] = clip
        if self.get("eval_strategy", "no") == "steps":
            name = "eval_steps" if self.get("eval_steps", None) else "logging_steps"
            every = self._every(name, steps, 1 if self._is_asynchronous else 10) or 1
            trainer["val_check_interval"] = every * self.number("gradient_accumulation_steps", 1, int)
            trainer["check_val_every_n_epoch"] = None
        elif self.get("eval_strategy", "no") == "epoch":
            self.note("look at: trainer.val_check_interval (TRL measured after each epoch; this is the default)")
        folder = self.get("output_dir", None)
        if folder is not None:
            trainer["logger"] = {"class_path": "CSVLog", "init_args": {"save_dir": folder, "name": ""}}
        return trainer
