"""`lit-async-rl convert`: settings of TRL's GRPO trainers become a configuration that trains, or are named."""

import csv

import datasets
import pytest
import yaml

from lit_async_rl.assets import asset
from lit_async_rl.cli.app import main as train
from lit_async_rl.cli.console import main as console
from lit_async_rl.cli.convert import IGNORED, LEFT_OUT, Conversion, convert

# Fields of TRL 1.16: GRPOConfig, AsyncGRPOConfig, ModelConfig, ScriptArguments, what is common of TrainingArguments.
FIELDS = """
adam_beta1 adam_beta2 attn_implementation beta bf16 cache_implementation cast_lm_head_to_fp32 chat_template_kwargs
dataset_config dataset_name dataset_test_split dataset_train_split delta disable_dropout ds3_gather_for_generation dtype
fp16 entropy_coef epsilon epsilon_high eval_steps eval_strategy fork_threshold_tokens generation_batch_size
generation_kwargs
gradient_accumulation_steps gradient_checkpointing importance_sampling_level learning_rate load_in_4bit load_in_8bit
log_completions log_unique_prompts logging_steps lora_alpha lora_dropout lora_modules_to_save lora_r lora_target_modules
loss_type lr_scheduler_kwargs lr_scheduler_type mask_truncated_completions max_completion_length max_grad_norm
max_inflight_tasks max_staleness max_steps max_tool_calling_iterations min_p model_init_kwargs model_name_or_path
multi_objective_aggregation num_completions_to_print num_generations num_iterations num_train_epochs
off_policy_mask_threshold output_dir pad_to_multiple_of per_device_train_batch_size push_to_hub queue_maxsize
remove_unused_columns repetition_penalty report_to reward_funcs reward_model_name_or_path reward_weights
router_aux_loss_coef run_name save_steps scale_rewards seed shuffle_dataset steps_per_generation sync_ref_model
temperature token_budget top_entropy_quantile top_k top_p torch_empty_cache_steps trust_remote_code use_adaptive_entropy
use_bias_correction_kl use_dora use_liger_kernel use_peft use_rslora use_vllm vllm_enable_sleep_mode
vllm_gpu_memory_utilization vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_max_model_length vllm_mode vllm_server_base_url
vllm_server_host vllm_server_port vllm_server_timeout vllm_tensor_parallel_size warmup_ratio warmup_steps
weight_decay weight_sync_steps
""".split()  # noqa: SIM905


def notes(text):
    return [line for line in text.splitlines() if line.startswith("#")]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_field_of_trl_is_carried_over_ignored_for_a_reason_or_named(asynchronous):
    """Read with another value each, so that branches of their own (LoRA, validation, vLLM) are taken."""
    switches = {"use_peft": True, "use_vllm": True, "eval_strategy": "steps", "beta": 0.1, "vllm_mode": "server"}
    settings = switches | ({"max_staleness": 4} if asynchronous else {})
    conversion = Conversion(settings, devices=1)
    conversion.config()
    known = conversion._read | IGNORED | set(LEFT_OUT)
    by_loss = {"sapo_temperature_neg", "sapo_temperature_pos"}
    assert [
        name
        for name in FIELDS
        if name not in known | by_loss | {"num_iterations", "steps_per_generation", "max_staleness"}
    ] == []


def test_a_field_that_is_not_known_is_named_with_the_one_that_was_meant():
    text = convert({"model_name_or_path": "m", "learning_rat": 1e-5, "top_entropy_quantile": 0.2})
    assert any("learning_rat: 1e-05 (not known; did you mean learning_rate" in line for line in notes(text))
    assert any("top_entropy_quantile: 0.2 (there is no mask by entropy)" in line for line in notes(text))


def test_what_is_left_out_of_the_file_has_the_defaults_of_trl():
    config = yaml.safe_load(convert({"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2}, devices=2))
    assert config["model"]["learning_rate"] == 1e-6
    assert config["model"]["loss"] == {"class_path": "PPOClip", "init_args": {"clip_low": 0.2, "clip_high": 0.2}}
    assert config["model"]["scheduler"]["class_path"] == "Linear"
    assert config["model"]["gradient_checkpointing"] is True
    assert config["data"]["groups_per_step"] == 16 * 2 * 2 // 8
    assert config["data"]["micro_batches_per_step"] == 2
    assert config["data"]["max_staleness"] == 0
    assert config["data"]["aggregation"] == {"class_path": "TokenMean"}  # loss_type dapo
    assert config["trainer"]["gradient_clip_val"] == 1.0


@pytest.mark.parametrize(
    ("settings", "path", "expected"),
    [
        ({"loss_type": "dr_grpo", "max_completion_length": 64}, "data.aggregation.init_args.max_tokens", 64),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4},
            "model.loss.class_path",
            "GSPO",
        ),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "model.loss.init_args.clip_high", 4.0),
        ({"loss_type": "sapo"}, "model.loss.init_args.tau_negative", 1.05),
        ({"loss_type": "vespo", "vespo_k_neg": 4}, "model.loss.init_args.c1_negative", 4.0),
        ({"delta": 2.5}, "model.loss.init_args.dual_clip", 2.5),
        ({"beta": 0.04}, "model.kl_estimator", "token"),
        ({"beta": 0.04, "use_bias_correction_kl": False}, "model.kl_estimator", "k3"),
        ({"scale_rewards": False}, "data.advantage.class_path", "GroupMean"),
        ({"scale_rewards": "batch"}, "data.advantage.init_args.group_baseline", True),
        ({"num_iterations": 3}, "data.max_staleness", 2),
        ({"generation_batch_size": 32}, "data.max_staleness", 3),
        ({}, "trainer.precision", "bf16-mixed"),
        ({"max_staleness": 7, "weight_sync_steps": 2}, "data.weight_sync_steps", 2),
        ({"use_vllm": True}, "data.engine.init_args.gpu_memory_utilization", 0.3),
        ({"use_peft": True, "lora_r": 8}, "model.lora.rank", 8),
        ({"mask_truncated_completions": True}, "data.filters", [{"class_path": "OverlongFilter"}]),
        ({"reward_funcs": ["accuracy_reward"]}, "data.reward", "lit_async_rl.rewards.MathVerify"),
        ({"reward_funcs": ["a.b", "a.c"], "reward_weights": [1, 0.5]}, "data.reward.init_args.weights.c", 0.5),
        ({"reward_funcs": ["a.b", "a.c"]}, "data.reward.init_args.rewards", {"b": "a.b", "c": "a.c"}),
        (
            {"reward_funcs": ["a.b", "a.c"], "multi_objective_aggregation": "normalize_then_sum"},
            "data.advantage",
            {"class_path": "GDPO", "init_args": {"weights": {"b": 1.0, "c": 1.0}}},
        ),
    ],
)
def test_settings_become_ours(settings, path, expected):
    found = yaml.safe_load(convert(settings))
    for name in path.split("."):
        found = found[name]
    assert found == expected


def test_a_batch_that_does_not_hold_whole_groups_is_refused():
    with pytest.raises(ValueError, match="must be divisible by num_generations=8, got 12"):
        convert({"per_device_train_batch_size": 12})


@pytest.mark.slow
def test_a_converted_file_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n:08d}"[::-1] + "=", "answer": "".join(sorted(f"{n:08d}"))} for n in range(64)]
    datasets.Dataset.from_list(rows).save_to_disk("digits")
    trl = dict(model_name_or_path=str(asset("sort_policy")), dataset_name="digits", max_completion_length=12)
    trl |= dict(reward_funcs=["lit_async_rl.rewards.exact_match"], max_steps=2, loss_type="dr_grpo", learning_rate=1e-4)
    trl |= dict(per_device_train_batch_size=16, max_staleness=2, gradient_checkpointing=False, output_dir="runs")
    (tmp_path / "trl.yaml").write_text(yaml.safe_dump(trl))
    console(["convert", "trl.yaml", "--out", "run.yaml"])
    flags = ["--data.prompts.init_args.answer_field", "answer", "--data.engine", "EmbeddedEngine"]
    train(["--config", "run.yaml", *flags, "--trainer.accelerator", "cpu"])
    (log,) = tmp_path.rglob("metrics.csv")
    staleness = [row["sample/staleness_max"] for row in csv.DictReader(log.open()) if row.get("sample/staleness_max")]
    assert len(staleness) == 2
    assert max(map(float, staleness)) <= 2
