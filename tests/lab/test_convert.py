"""`lit-async-rl convert`: settings of TRL's GRPO trainers become a configuration that trains, or are named."""

import ast
import csv
import dataclasses
import inspect
import json
import math
import re
from pathlib import Path

import datasets
import pytest
import torch
import transformers
import yaml
from groups import group

import lit_async_rl as rl
from lit_async_rl.assets import asset
from lit_async_rl.cli.app import main as train
from lit_async_rl.cli.console import main as console
from lit_async_rl.lab import convert as convert_module
from lit_async_rl.lab.convert import convert
from lit_async_rl.losses import LossInputs
from lit_async_rl.losses.reference_kl import reference_kl

ROOT = Path(__file__).parents[2]

# Fields and defaults of TRL at the commit f2cd57710ae345ea6428ae95363267fcf38a3dc8 (2026-07-24).
GRPO = dict(
    learning_rate=1e-6, model_init_kwargs=None, trust_remote_code=False, router_aux_loss_coef=0.001,
    disable_dropout=False, cast_lm_head_to_fp32=False, remove_unused_columns=False, num_generations=8,
    num_generations_eval=None, max_completion_length=512, ds3_gather_for_generation=True, shuffle_dataset=True,
    pad_to_multiple_of=None, generation_batch_size=None, steps_per_generation=None, temperature=1.0, top_p=1.0, top_k=0,
    min_p=None, generation_kwargs=None, chat_template_kwargs=None, repetition_penalty=1.0, cache_implementation=None,
    use_vllm=False, vllm_mode="colocate", vllm_model_impl="vllm", vllm_enable_sleep_mode=False,
    vllm_structured_outputs_regex=None, vllm_server_base_url=None, vllm_server_host="0.0.0.0", vllm_server_port=8000,
    vllm_server_timeout=240.0, vllm_group_port=51216, vllm_gpu_memory_utilization=0.3, vllm_max_model_length=None,
    vllm_tensor_parallel_size=1, beta=0.0, num_iterations=1, epsilon=0.2, delta=None, epsilon_high=None,
    sapo_temperature_neg=1.05, sapo_temperature_pos=1.0, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0,
    vespo_lambda_neg=2.0, importance_sampling_level="token", reward_weights=None,
    multi_objective_aggregation="sum_then_normalize", scale_rewards="group", loss_type="dapo",
    mask_truncated_completions=False, sync_ref_model=False, ref_model_mixup_alpha=0.6, ref_model_sync_steps=512,
    top_entropy_quantile=1.0, entropy_coef=0.0, use_adaptive_entropy=False, entropy_coef_min=0.0, entropy_coef_max=1.0,
    entropy_coef_delta=0.005, entropy_target=0.2, max_tool_calling_iterations=None,
    vllm_importance_sampling_correction=True, vllm_importance_sampling_mode="sequence_mask",
    vllm_importance_sampling_clip_max=3.0, vllm_importance_sampling_clip_min=None, off_policy_mask_threshold=None,
    use_bias_correction_kl=False, log_completions=False, log_multimodal=True, num_completions_to_print=None,
    log_unique_prompts=False, log_completions_hub_repo=None, use_transformers_continuous_batching=False,
    transformers_continuous_batching_config=None, use_transformers_paged=False, vllm_importance_sampling_cap=None,
)  # fmt: skip
ASYNC_GRPO = dict(
    model_init_kwargs=None, trust_remote_code=False, router_aux_loss_coef=0.001, learning_rate=1e-6, logging_steps=1,
    lr_scheduler_type="constant", num_generations=8, max_completion_length=2048, temperature=1.0,
    chat_template_kwargs=None, max_tool_calling_iterations=None, fork_threshold_tokens=1024,
    vllm_server_base_url="http://localhost:8000", vllm_server_timeout=240.0, request_timeout=600, epsilon=0.2,
    epsilon_high=None, token_budget=None, max_inflight_tasks=-1, max_staleness=4, queue_maxsize=1024,
    weight_sync_steps=1, heartbeat_stale_after_s=300.0, log_completions=False, num_completions_to_print=None,
)  # fmt: skip
SHARED = dict(  # of ModelConfig, and of the arguments of its script
    model_name_or_path=None, model_revision="main", dtype="float32", attn_implementation=None, use_peft=False,
    lora_r=16, lora_alpha=32, lora_dropout=0.05, lora_target_modules=None, lora_target_parameters=None,
    lora_modules_to_save=None, lora_task_type="CAUSAL_LM", use_rslora=False, use_dora=False, load_in_8bit=False,
    load_in_4bit=False, bnb_4bit_quant_type="nf4", use_bnb_nested_quant=False, bnb_4bit_quant_storage=None,
    datasets=None, streaming=False, test_split_size=None, dataset_name=None, dataset_config=None,
    dataset_train_split="train", dataset_test_split="test", dataset_streaming=False, reward_model_name_or_path=None,
    reward_funcs=None, logging_steps=10, gradient_checkpointing=True, bf16=None, lr_scheduler_kwargs=None,
    use_liger_kernel=False, torch_empty_cache_steps=None,
)  # fmt: skip


def notes(text):
    return [line for line in text.splitlines() if line.startswith("#")]


TEXTS = ("model_name_or_path", "dataset_name", "dataset_config", "attn_implementation", "lora_target_modules")
SAME = {"max_steps": 0, "min_p": 0, "eval_steps": 0, "max_grad_norm": 0}  # in TRL, too, as if it were left out


def other_values(name, default):
    """Values that a file may hold in place of a default: 0, too, which must not be taken for a setting left out."""
    if name in ("lr_scheduler_kwargs", "model_init_kwargs", "datasets"):
        return [{"other": 0}]
    if name in ("reward_funcs", "reward_weights"):
        return [["lit_async_rl.rewards.exact_match"]] if name == "reward_funcs" else [[0.0]]
    if isinstance(default, bool) or name == "bf16":
        return [not default] if isinstance(default, bool) else [False]
    values = [] if isinstance(default, str) or name in (*TEXTS, "lora_modules_to_save", "output_dir") else [0, 0.0]
    values += [default + 1] if isinstance(default, int | float) else []
    return [value for value in [*values, "other"] if value not in (default, SAME.get(name, default))]


def result(settings):
    """The conversion; what refuses settings refuses them with one more, too."""
    try:
        return convert(settings)
    except ValueError:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_no_value_of_any_field_vanishes(asynchronous):
    """Each changes the result, has a line, or is refused by its name."""
    training = {field.name: field.default for field in dataclasses.fields(transformers.TrainingArguments)}
    training = {name: None if value is dataclasses.MISSING else value for name, value in training.items()}
    fields = training | SHARED | (ASYNC_GRPO if asynchronous else GRPO)
    contexts = [
        {"loss_type": "grpo"},
        {"use_peft": True, "use_vllm": True, "eval_strategy": "steps", "beta": 0.1, "vllm_mode": "server"},
        {"loss_type": "sapo", "max_steps": 100},
        {"loss_type": "vespo", "importance_sampling_level": "sequence"},
    ]
    if asynchronous:
        contexts = [{"max_inflight_tasks": -1}, {"max_staleness": 4, "use_peft": True, "eval_strategy": "steps"}]
    lost = []
    for context in contexts:
        whole = {"reward_funcs": ["a.b"], **context}
        for name, default in fields.items():
            others = {key: one for key, one in whole.items() if key != name}
            without = result(others)
            for value in other_values(name, default):
                try:
                    is_lost = convert(whole | {name: value}) == without
                except ValueError as error:
                    is_lost = name not in str(error)
                is_same = value == context.get(name) and type(value) is type(context.get(name))
                if is_lost and not is_same:
                    lost.append(f"{name}: {value!r} beside {context}")
    assert lost == [], "\n".join(lost)


def test_a_field_that_is_not_known_is_named_with_the_one_that_was_meant():
    text = convert({"model_name_or_path": "m", "learning_rat": 1e-5, "top_entropy_quantile": 0.2})
    assert any("learning_rat: 1e-05 (not known; did you mean learning_rate" in line for line in notes(text))
    assert any("top_entropy_quantile: 0.2 (there is no mask by entropy)" in line for line in notes(text))


@pytest.mark.slow
def test_the_pages_settings_and_classes_that_a_line_names_exist():
    """A line named recipes of docs/checkpoints.md that the page had lost."""
    texts = [
        node.value
        for node in ast.walk(ast.parse(Path(convert_module.__file__).read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    pages = {page for text in texts for page in re.findall(r"docs/\w+\.md", text)}
    assert {page for page in pages if not (ROOT / page).is_file()} == set()
    known = json.loads((ROOT / "lit_async_rl/cli/settings.json").read_text())
    keys = {key for text in texts for key in re.findall(r"\b(?:data|defaults|model|trainer)\.[a-z][\w.]*\w", text)}
    arguments = {
        "defaults.checkpoint.init_args.monitor": rl.LinkedCheckpoint,
        "data.prompts.init_args.chat_template_kwargs": rl.HuggingFacePrompts,
        "model.lora.alpha": rl.LoRA,
    }
    assert {key for key in keys if not any(f"{name}.".startswith(f"{key}.") for name in known)} == {*arguments}
    for key, owner in arguments.items():
        assert key.rpartition(".")[2] in inspect.signature(owner).parameters
    names = {name for text in texts for name in re.findall(r"\b[A-Z][a-z]+[A-Z][A-Za-z]+\b", text)}
    others = {"AsyncGRPOConfig", "FileNotFoundError", "ValueError"}
    assert {name for name in names if not hasattr(rl, name)} <= others
    assert len(pages) > 3 < len(keys)


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
        ({"beta": 0.04}, "model.kl_estimator", "k3"),
        ({"beta": 0.04, "use_bias_correction_kl": True}, "model.kl_estimator", "token"),
        ({"scale_rewards": False}, "data.advantage.class_path", "GroupMean"),
        ({"shuffle_dataset": False}, "data.shuffle", False),
        ({"save_steps": 0.25, "max_steps": 100}, "defaults.checkpoint.init_args.every_n_train_steps", 25),
        ({"eval_strategy": "steps", "gradient_accumulation_steps": 2}, "trainer.val_check_interval", 20),
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
            {"class_path": "GDPO", "init_args": {"weights": {"b": 1.0, "c": 1.0}, "eps": 1e-4, "ddof": 1}},
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


def test_what_loads_the_model_is_a_mapping_or_a_text_with_one():
    for given in ({"dtype": "bfloat16"}, "{dtype: bfloat16}"):
        assert yaml.safe_load(convert({"model_init_kwargs": given}))["model"]["dtype"] == "bfloat16"
    with pytest.raises(ValueError, match=r"model_init_kwargs must be a mapping, got \[1, 2\]"):
        convert({"model_init_kwargs": "[1, 2]"})


# -- Numbers, by the formulas of trl/trainer/grpo_trainer.py and trl/experimental/async_grpo of the commit above -------


def make(config):
    return getattr(rl, config["class_path"])(**config.get("init_args", {}))


def trl_advantages(rewards, scale_rewards):
    """`_generate_and_score_completions`, of one process. `torch.std` divides by N - 1, as `nanstd` does."""
    centered = rewards - rewards.mean(1, keepdim=True)
    if scale_rewards == "none":
        return centered
    std = rewards.std(1, keepdim=True) if scale_rewards == "group" else rewards.std()
    return centered / (std + 1e-4)


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_advantages_are_those_of_trl(scale_rewards):
    rewards = [[0.0, 0.0, 0.0, 1.0], [1.0] * 4, [0.0] * 4, [5.0, 5.0, 5.0, 6.0]]
    advantage = make(yaml.safe_load(convert({"scale_rewards": scale_rewards}))["data"]["advantage"])
    expected = trl_advantages(torch.tensor(rewards, dtype=torch.float64), scale_rewards)
    torch.testing.assert_close(torch.tensor(advantage(rewards), dtype=torch.float64), expected, rtol=1e-12, atol=1e-12)


def test_advantages_of_the_asynchronous_trainer_are_those_of_trl():
    """`AsyncRolloutWorker._score_group`, with the standard deviation of numpy."""
    rewards = [[0.0, 0.5, 0.0, 1.0], [5.0, 5.0, 5.0, 6.0]]
    expected = [
        (torch.tensor(r) - torch.tensor(r).mean()) / (torch.tensor(r).std(correction=0) + 1e-8) for r in rewards
    ]
    found = make(yaml.safe_load(convert({"max_staleness": 2}))["data"]["advantage"])(rewards)
    torch.testing.assert_close(torch.tensor(found), torch.stack(expected))


def test_advantages_of_several_rewards_normalized_by_part_are_those_of_trl():
    parts = torch.tensor([[[0.0, 3.0], [1.0, 1.0], [0.0, 2.0]], [[1.0, 1.0], [0.0, 1.0], [1.0, 4.0]]])
    weights = torch.tensor([1.0, 0.5])
    scaled = (parts - parts.mean(1, keepdim=True)) / (parts.std(1, keepdim=True) + 1e-4)
    total = (scaled * weights).sum(-1)
    expected = (total - total.mean()) / (total.std() + 1e-4)
    settings = {"reward_funcs": ["a.b", "a.c"], "reward_weights": [1.0, 0.5]}
    config = yaml.safe_load(convert(settings | {"multi_objective_aggregation": "normalize_then_sum"}))
    advantage = make(config["data"]["advantage"])
    groups = [group_of_parts([dict(zip("bc", row, strict=True)) for row in group]) for group in parts.tolist()]
    found = torch.tensor([[row[0] for row in group] for group in advantage.per_token(groups)])
    torch.testing.assert_close(found, expected)


def group_of_parts(rows):
    made = group([sum(row.values()) for row in rows])
    rollouts = tuple(dataclasses.replace(one, reward_parts=row) for one, row in zip(made.rollouts, rows, strict=True))
    return dataclasses.replace(made, rollouts=rollouts)


def trl_loss(settings, x):
    """`_compute_loss` of one micro-batch, or that of `AsyncGRPOTrainer`, which has no `loss_type`."""
    a = {**GRPO, **settings}
    kind = "async" if "max_staleness" in settings else a["loss_type"]
    low = a["epsilon"]
    high = low if a["epsilon_high"] is None else a["epsilon_high"]
    mask = x["mask"].double()
    log_ratio = x["logprobs"] - x["old"]
    advantages = x["advantages"][:, None]
    if a["importance_sampling_level"] == "sequence":
        coef_1 = ((log_ratio * mask).sum(-1) / mask.sum(-1))[:, None].exp()
    else:
        coef_1 = log_ratio.exp()
    kl = (x["ref"] - x["logprobs"]).exp() - (x["ref"] - x["logprobs"]) - 1
    kl = kl * coef_1 if a["use_bias_correction_kl"] else kl
    if kind == "cispo":
        loss = -coef_1.clamp(max=high).detach() * advantages * x["logprobs"]
    elif kind == "sapo":
        tau = torch.full_like(advantages, a["sapo_temperature_neg"])
        tau[advantages > 0] = a["sapo_temperature_pos"]
        loss = -torch.sigmoid(tau * (coef_1 - 1)) * 4 / tau * advantages
    elif kind == "vespo":
        log_w = (log_ratio * mask).sum(-1, keepdim=True).clamp(math.log(1e-8), 20.0)
        k = torch.where(advantages >= 0, a["vespo_k_pos"], a["vespo_k_neg"])
        rate = torch.where(advantages >= 0, a["vespo_lambda_pos"], a["vespo_lambda_neg"])
        loss = -(rate + k * log_w - rate * log_w.exp()).exp().detach() * advantages * x["logprobs"]
    else:
        coef_2 = coef_1.clamp(1 - low, 1 + high)
        bounded = coef_1 if a["delta"] is None else coef_1.clamp(max=a["delta"])
        loss = -torch.min(bounded * advantages, coef_2 * advantages)
    loss = loss + a["beta"] * kl if a["beta"] else loss
    if kind in ("grpo", "sapo"):
        return ((loss * mask).sum(-1) / mask.sum(-1)).mean()
    if kind == "dr_grpo":
        return (loss * mask).sum() / (len(mask) * a["max_completion_length"])
    if kind == "luspo":
        return (loss * mask.sum(1, keepdim=True)).mean()
    return (loss * mask).sum() / mask.sum()  # dapo, cispo, vespo, bnpo of one micro-batch, async


def our_loss(config, x):
    """Policy loss and KL penalty with the token weights of the step, as `Objective` adds them."""
    lengths = x["mask"].sum(1).tolist()
    rows = make(config["data"]["aggregation"])(lengths, [len(lengths)])
    weights = torch.tensor(rows, dtype=torch.float64)[:, None].expand_as(x["mask"])
    inputs = LossInputs(
        logprobs=x["logprobs"],
        proximal_logprobs=x["old"],
        behavior_logprobs=x["old"],
        advantages=x["advantages"][:, None].expand_as(x["old"]).contiguous(),
        loss_mask=x["mask"],
        staleness=torch.zeros_like(x["mask"], dtype=torch.int64),
        token_weights=weights,
        group_index=torch.zeros(len(lengths), dtype=torch.int64),
    )
    loss = (weights * make(config["model"]["loss"])(inputs).per_token).sum()
    if beta := config["model"].get("kl_coefficient"):
        estimator = config["model"]["kl_estimator"]
        old = inputs.behavior_logprobs
        kl = reference_kl(estimator, x["logprobs"], x["ref"], old, x["mask"], inputs.group_index)
        loss = loss + beta * (weights * kl).sum()
    return loss


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_staleness": 2},
        {"max_staleness": 2, "epsilon": 0.1},
        {"beta": 0.3},
        {"beta": 0.3, "use_bias_correction_kl": True},
        {"loss_type": "grpo", "beta": 0.3},
        {"loss_type": "bnpo", "epsilon_high": 0.28},
        {"loss_type": "dr_grpo", "max_completion_length": 9},
        {"loss_type": "dapo", "delta": 1.5},
        {"loss_type": "cispo", "epsilon_high": 1.0},
        {"loss_type": "sapo"},
        {"loss_type": "vespo"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05},
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.05},
    ],
    ids=str,
)
def test_loss_and_gradient_are_those_of_trl(settings):
    draw = torch.Generator().manual_seed(0)
    old = -torch.rand(6, 9, generator=draw, dtype=torch.float64) * 3
    x = {
        "old": old,
        "logprobs": (old + 0.3 * torch.randn(6, 9, generator=draw, dtype=torch.float64)).requires_grad_(),
        "ref": old + 0.2 * torch.randn(6, 9, generator=draw, dtype=torch.float64),
        "advantages": torch.tensor([1.0, -1.0, 0.5, -2.0, 0.0, 1.5], dtype=torch.float64),
        "mask": torch.arange(9) < torch.tensor([9, 4, 7, 1, 3, 6])[:, None],
    }
    expected = trl_loss(settings, x)
    (gradient,) = torch.autograd.grad(expected, x["logprobs"])
    found = our_loss(yaml.safe_load(convert(settings)), x)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(found, x["logprobs"])[0], gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"scale_rewards": "False"}, "left out: scale_rewards: 'False' (TRL has group, batch and none; this is group)"),
        ({"importance_sampling_level": "sequence_token"}, "left out: importance_sampling_level: 'sequence_token' (TRL"),
        ({"off_policy_mask_threshold": 0.0}, "left out: off_policy_mask_threshold: 0.0 (see the corrections"),
        ({"max_staleness": 2, "beta": 0.04}, "left out: beta: 0.04 (AsyncGRPOConfig has no such setting)"),
        ({"max_staleness": 2, "gradient_accumulation_steps": 4}, "look at: data.aggregation=TokenMean"),
        ({"beta": 0.04}, "look at: model.kl_estimator=k3 (use_bias_correction_kl is off; from TRL 1.16 on: token)"),
        (
            {"loss_type": "grpo", "mask_truncated_completions": True},
            "look at: data.aggregation (SequenceMean leaves cut completions out; TRL counts them as 0)",
        ),
        ({"not_a_field": None}, "left out: not_a_field: None (not known)"),
        ({"report_to": "wandb", "logging_steps": 5}, "no influence on what is learned: report_to, logging_steps"),
        ({"hub_token": "hf_abcdefghijklmnop", "api_key": "secret"}, "left out: api_key: '***'"),
    ],
)
def test_what_is_not_carried_over_is_said(settings, said):
    text = convert(settings)
    assert any(said in line for line in notes(text))
    assert "hf_abc" not in text


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "verl.yaml",
            "actor_rollout_ref: {model: {path: m}}\ntrainer: {n_gpus_per_node: 8}\n",
            "belongs to verl",
        ),
        ("ours.yaml", "model: {model: m}\ndata: {reward: r}\n", "is it already a configuration of lit-async-rl?"),
        ("grpo.py", "from trl import GRPOConfig\nGRPOConfig(beta=0.1)\n", "is a Python script"),
        ("grpo.txt", "from trl import GRPOConfig\nx = {'a': [}\n", "is not valid YAML"),
    ],
)
def test_files_of_other_programs_are_refused_by_what_they_look_like(name, content, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(SystemExit) as ended:
        console(["convert", name, "--out", "run.yaml"])
    assert said in str(ended.value)
    assert len(str(ended.value).splitlines()) == 1
    assert not (tmp_path / "run.yaml").exists()


def test_a_file_is_not_written_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trl.yaml").write_text("beta: 0.1\n")
    with pytest.raises(SystemExit, match=r"error: --out trl\.yaml exists: nothing was written"):
        console(["convert", "trl.yaml", "--out", "trl.yaml"])
    assert (tmp_path / "trl.yaml").read_text() == "beta: 0.1\n"


@pytest.mark.slow
def test_a_converted_file_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n:08d}"[::-1] + "=", "answer": "".join(sorted(f"{n:08d}"))} for n in range(64)]
    datasets.Dataset.from_list(rows).save_to_disk("digits")
    trl = dict(model_name_or_path=str(asset("sort_policy")), dataset_name="digits", max_completion_length=12)
    trl |= dict(reward_funcs=["lit_async_rl.rewards.exact_match"], max_steps=2, loss_type="dr_grpo", learning_rate=1e-4)
    trl |= dict(per_device_train_batch_size=16, max_staleness=2, gradient_checkpointing=False, output_dir="mine")
    (tmp_path / "trl.yaml").write_text(yaml.safe_dump(trl))
    console(["convert", "trl.yaml", "--out", "run.yaml"])
    flags = ["--data.prompts.init_args.answer_field", "answer", "--data.engine", "EmbeddedEngine"]
    train(["--config", "run.yaml", *flags, "--trainer.accelerator", "cpu"])
    (log,) = (tmp_path / "mine").rglob("metrics.csv")
    staleness = [row["sample/staleness_max"] for row in csv.DictReader(log.open()) if row.get("sample/staleness_max")]
    assert len(staleness) == 2
    assert max(map(float, staleness)) <= 2
