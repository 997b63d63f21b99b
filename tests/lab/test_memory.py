"""Memory of a training step, counted without values, against what torch's allocator hands out in a real one."""

import re
from dataclasses import replace

import pytest
import torch
from torch.optim import AdamW
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, Qwen2Config

import lit_async_rl as rl
from lit_async_rl.lab import plan
from lit_async_rl.lab.memory import StepShape, training_memory, ways_to_fit
from lit_async_rl.models.policy import CausalPolicy

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=3000,
)
SHAPE = StepShape(rows=6, prompt_tokens=10, completion_tokens=40, logprob_chunk_tokens=100)


def allocated_at_most(shape):
    """Bytes that a real step allocates beside weights and moments, by torch's profiler."""
    lm = LlamaForCausalLM(CONFIG).train()
    if shape.gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    policy = CausalPolicy(lm, shape.logprob_chunk_tokens)
    optimizer = AdamW(lm.parameters(), lr=1e-3, fused=True)
    ids = torch.randint(3000, (shape.rows, shape.prompt_tokens + shape.completion_tokens))
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, shape.prompt_tokens :] = True

    def step():
        for _ in range(min(shape.micro_batches, 2)):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = policy(ids, mask).logprobs.sum()
            loss.backward()
            del loss
        optimizer.step()
        optimizer.zero_grad()

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    changes = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_what_is_counted_is_what_a_step_allocates(micro_batches, gradient_checkpointing):
    shape = replace(SHAPE, micro_batches=micro_batches, gradient_checkpointing=gradient_checkpointing)
    found = training_memory(CONFIG, shape)
    assert found.peak - found.weights - found.moments == pytest.approx(allocated_at_most(shape), rel=0.03)


def test_states_are_weights_gradients_and_two_moments():
    found = training_memory(CONFIG, SHAPE)
    parameters = LlamaForCausalLM(CONFIG).num_parameters()
    assert found.gradients == 4 * parameters
    assert found.weights == pytest.approx(4 * parameters, rel=1e-3)  # buffers
    assert found.moments == pytest.approx(8 * parameters, rel=1e-3)  # the number of steps


def test_adapters_have_gradients_and_moments_and_the_rest_has_none():
    whole = training_memory(CONFIG, SHAPE)
    adapted = training_memory(CONFIG, replace(SHAPE, lora=rl.LoRA(rank=4)))
    assert adapted.gradients < whole.gradients / 10
    assert adapted.moments < whole.moments / 10
    assert adapted.weights > whole.weights


@pytest.mark.slow
def test_settings_are_added_until_training_fits():
    needed = training_memory(CONFIG, SHAPE).peak
    (alone,) = ways_to_fit(CONFIG, SHAPE, capacity=2 * needed, trainer_devices=2, is_sharded=False)
    assert alone.settings == ()
    assert alone.num_bytes == needed
    fits = ways_to_fit(CONFIG, SHAPE, capacity=needed // 5, trainer_devices=4, is_sharded=False)
    assert [fit.settings[-1].split()[0] for fit in fits[1:3]] == [
        "--model.gradient_checkpointing",
        "--data.micro_batches_per_step",
    ]
    assert fits[-1].num_bytes < 0.94 * needed // 5 or "lora" in fits[-1].settings[-1]
    assert fits == sorted(fits, key=lambda fit: -fit.num_bytes)


@pytest.mark.slow
def test_sharding_divides_what_stays_between_micro_batches():
    whole, sharded = (
        ways_to_fit(CONFIG, SHAPE, capacity=10**12, trainer_devices=4, is_sharded=is_sharded)[0].num_bytes
        for is_sharded in (False, True)
    )
    states = training_memory(CONFIG, SHAPE).states
    assert whole - states < sharded < whole - states / 2


@pytest.fixture
def configuration(tmp_path):
    """A configuration of a model of 1.2 billion parameters, of which there is no more than a config.json."""
    Qwen2Config(
        hidden_size=6144, intermediate_size=14336, num_hidden_layers=2, vocab_size=65_000, tie_word_embeddings=True
    ).save_pretrained(tmp_path / "model")
    text = f"""
model: {{model: {tmp_path / "model"}}}
data:
  groups_per_step: 4
  group_size: 8
  micro_batches_per_step: 4
  sampling: {{max_tokens: 512}}
  engine: {{class_path: EmbeddedEngine, init_args: {{num_slots: 32, dtype: bfloat16}}}}
"""
    (tmp_path / "run.yaml").write_text(text)
    return tmp_path / "run.yaml"


@pytest.mark.slow
def test_a_plan_for_one_device_says_what_to_change(configuration, capsys):
    plan.main([str(configuration), "--devices", "1", "--device", "rtx4090"])
    lines = capsys.readouterr().out.splitlines()
    assert "memory of one rtx4090 (24 GB), counted without the device:" in lines
    assert any("an engine" in line and line.endswith("on the same device") for line in lines)
    changed = [line.split()[0] for line in lines if line.startswith("    --")]
    assert changed[0] == "--model.gradient_checkpointing"
    assert lines[-1].strip() == "it fits with all of these"
    plan.main([str(configuration), "--devices", "1", "--device", "b200"])
    assert capsys.readouterr().out.rstrip().endswith("GB: it fits")


@pytest.mark.slow
def test_devices_that_are_divided_share_no_memory_with_an_engine(configuration, capsys):
    plan.main([str(configuration), "--devices", "4", "--device", "h100"])
    lines = capsys.readouterr().out.splitlines()
    assert any("an engine" in line and line.endswith("on devices of its own") for line in lines)
    assert "<- fastest" in "".join(lines)


def test_one_device_without_its_kind_cannot_be_divided(configuration, capsys):
    with pytest.raises(SystemExit, match="add --device"):
        plan.main([str(configuration), "--devices", "1"])


def test_of_a_model_whose_shapes_depend_on_values_only_the_states_are_known(configuration, capsys):
    folder = configuration.parent / "model"
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=4, vocab_size=1000).save_pretrained(folder)
    plan.main([str(configuration), "--devices", "1", "--device", "rtx4090"])
    text = capsys.readouterr().out
    assert "GB of weights, gradients and moments; activations of the model type 'mixtral' cannot be counted" in text
    assert "an engine" in text


def gigabytes(configuration, capsys, *more):
    """What the plan counts, by its name: training, an engine, a reference."""
    text = configuration.read_text()
    configuration.write_text(text.replace("model: {", "".join(["model: {", *more]), 1))
    plan.main([str(configuration), "--devices", "1", "--device", "b200"])
    configuration.write_text(text)
    found = re.findall(
        r"^  (training|an engine|a reference|a teacher|together) +([\d.]+) GB", capsys.readouterr().out, re.M
    )
    return {name: float(value) for name, value in found}


@pytest.mark.slow
def test_the_frozen_copy_of_a_penalty_counts(configuration, capsys):
    penalty = "kl_coefficient: 0.01, "
    plain = gigabytes(configuration, capsys)
    copied = gigabytes(configuration, capsys, penalty)
    parameters = 2 * (4 * 6144**2 + 3 * 6144 * 14336) + 65_000 * 6144  # blocks, and the tied embedding
    assert copied["a reference"] == pytest.approx(4 * parameters / 1e9, abs=0.06)
    assert copied["together"] == pytest.approx(plain["together"] + copied["a reference"], abs=0.2)
    adapters = gigabytes(configuration, capsys, penalty, "lora: {rank: 4}, ")
    assert "a reference" not in adapters, "without its adapters the policy is the reference"


@pytest.mark.slow
def test_teachers_in_the_trainers_process_count(configuration, capsys):
    folder = configuration.parent / "teacher"
    sizes = {"hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 16}
    LlamaConfig(**sizes, vocab_size=65_000, tie_word_embeddings=True).save_pretrained(folder)
    parameters = 2 * (4 * 2048**2 + 3 * 2048**2) + 65_000 * 2048
    small = f"{{class_path: LocalTeacher, init_args: {{model: {folder}, dtype: bfloat16}}}}"
    both = f"{{class_path: SourceTeachers, init_args: {{teachers: {{a: {folder}, b: {small}}}}}}}"
    remote = "{class_path: ServerTeacher, init_args: {url: 'http://localhost:1'}}"
    plain = gigabytes(configuration, capsys)
    for teacher, num_bytes in ((folder, 4), (small, 2), (both, 6), (remote, 0)):
        counted = gigabytes(configuration, capsys, f"distillation: {{teacher: {teacher}}}, ")
        assert counted.get("a teacher", 0.0) == pytest.approx(num_bytes * parameters / 1e9, abs=0.06)
        assert counted["together"] == pytest.approx(plain["together"] + num_bytes * parameters / 1e9, abs=0.2)


@pytest.mark.slow
def test_an_engine_within_another_is_counted_with_its_own_settings(configuration, capsys):
    text = configuration.read_text()
    inner = "{class_path: VLLMEngine, init_args: {gpu_memory_utilization: 0.25}}"
    shares = {}
    for name, engine in {
        "given": f"{{class_path: EpisodeEngine, init_args: {{engine: {inner}}}}}",
        "default": "{class_path: VLLMEngine}",
        "sleeping": "{class_path: VLLMEngine, init_args: {sleep_level: 1}}",
        "auto": "{class_path: EmbeddedEngine, init_args: {dtype: auto}}",
    }.items():
        configuration.write_text(re.sub(r"  engine: .*", f"  engine: {engine}", text))
        shares[name] = gigabytes(configuration, capsys)["an engine"] / 180
    shares.pop("auto")  # counted as float32
    assert shares == pytest.approx({"given": 0.25, "default": 0.4, "sleeping": 0.6}, abs=0.01)
