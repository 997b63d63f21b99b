"""Engines before they sample: what they read, and the settings that they refuse."""

import pytest
from replays import assert_exact, requests_of
from tiny_models import save, tiny_gemma2, tiny_llama

import lit_async_rl as rl
from lit_async_rl.assets import asset
from lit_async_rl.engines.embedded import own_process
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.errors import SetupError, StalledError
from lit_async_rl.vllm.engine import VLLMEngine


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma2])
def test_no_weights_are_read_from_disk(make, tmp_path):
    lm, requests = make(), requests_of([4, 6])
    folder = save(lm, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    engine = EmbeddedEngine(device="cpu")
    engine.setup(folder)
    with pytest.raises(SetupError, match="before load_weights"):
        engine.submit(requests)
    engine.load_weights(0, lm.named_parameters())
    assert_exact(lm, requests, engine.run(requests))


@pytest.mark.slow
def test_a_process_that_does_not_start_in_time_is_an_error_that_names_the_setting(tmp_path, monkeypatch):
    monkeypatch.setattr(own_process, "PROGRAM", ["sh", "-c", "exec cat >/dev/null"])  # until it is told to end
    engine = EmbeddedEngine(device="cpu", own_process=True)
    engine.engine.startup_timeout_s = 0.01
    with pytest.raises(StalledError, match=r"setup: .*did not answer .*data\.engine\.startup_timeout_s=0\.01"):
        engine.setup(save(tiny_llama(), tmp_path))
    engine.close()


def test_validation_decodes_num_slots_rows_together(monkeypatch):
    asked, make = [], EmbeddedEngine.from_module
    monkeypatch.setattr(
        EmbeddedEngine,
        "from_module",
        lambda lm, num_slots=256, *args, **more: asked.append(num_slots) or make(lm, num_slots, *args, **more),
    )
    rl.fit(
        asset("small_sort_policy"),
        rl.SortDigits(4, size=64),
        rl.share_correct,
        **dict(engine=rl.EmbeddedEngine(num_slots=8), groups_per_step=2, group_size=2, max_steps=1),
        sampling=rl.SamplingParams(max_tokens=4),
        validation=rl.Validation(prompts=rl.SortDigits(4, size=16, split="held_out")),
        **dict(accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False),
    )
    assert set(asked) == {8}


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("speculative_config", {"method": "ngram"}, "wrong log-probabilities"),
        ("logprobs_mode", "raw_logprobs", "only processed_logprobs"),
        ("load_format", "auto", "the weights are the trainer's"),
        ("hf_overrides", {"rope_theta": 1.0}, "different models"),
        ("max_num_seqs", 4, r"see data\.engine\.max_num_seqs"),
        ("scheduler_cls", "x.Y", "the engine sets it itself"),
        ("kv_transfer_config", {}, "keys and values of older weights"),
    ],
)
def test_arguments_of_vllm_that_break_a_promise_are_refused_by_name(name, value, why):
    with pytest.raises(ValueError, match=rf"^data\.engine\.engine_args\.{name}=.* cannot be set: .*{why}"):
        VLLMEngine(engine_args={name: value})


def test_vllms_names_are_found_where_they_were():
    assert rl.engines.VLLMEngine is VLLMEngine
    assert rl.engines.SharedMemoryTransfer is rl.SharedMemoryTransfer
    with pytest.raises(AttributeError, match="NoSuchEngine"):
        rl.engines.NoSuchEngine  # noqa: B018
