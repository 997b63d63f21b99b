"""Loading: what can go wrong ends in one message that names the setting and its value."""

import json

import pytest
import torch
from flow import fit, make_data, make_module
from tiny_models import ALL, save, tiny_gemma4, tiny_gpt2, tiny_llama, tiny_qwen3, tiny_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel

from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.models.architecture import context_length, stored_buffers
from lit_async_rl.models.end_tokens import eos_token_ids, stored_eos_token_ids
from lit_async_rl.models.loading import WeightFiles, check_vocabulary, load_policy, load_tokenizer
from lit_async_rl.models.lora import LoRA, add_lora
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.models.weights import apply_weights, receive_weights, stream_weights


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_comes_back_with_the_same_weights_in_evaluation_mode(tmp_path, tied):
    lm = tiny_llama(tied=tied)
    loaded = load_policy(save(lm, tmp_path))
    assert not loaded.training
    for (name, saved), (loaded_name, parameter) in zip(lm.named_parameters(), loaded.named_parameters(), strict=True):
        assert name == loaded_name
        assert torch.equal(saved, parameter)


def test_the_dtype_is_the_one_asked_for(tmp_path):
    assert load_policy(save(tiny_llama(), tmp_path), dtype="bfloat16").dtype == torch.bfloat16


def test_random_init_takes_only_the_architecture(tmp_path):
    lm = tiny_llama()
    fresh = load_policy(save(lm, tmp_path), random_init=True)
    assert not torch.equal(fresh.model.layers[0].mlp.up_proj.weight, lm.model.layers[0].mlp.up_proj.weight)


def test_loading_draws_no_random_numbers(tmp_path):
    folder = save(tiny_llama(), tmp_path)
    before = torch.random.get_rng_state()
    load_policy(folder)
    assert torch.equal(before, torch.random.get_rng_state())


def test_there_is_no_dropout_even_in_training_mode(tmp_path):
    lm = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.5, attn_pdrop=0.5))
    loaded = load_policy(save(lm, tmp_path)).train()
    ids = torch.arange(10)[None]
    assert torch.equal(loaded(ids).logits, loaded(ids).logits)


def no_folder(tmp_path):
    return str(tmp_path / "nothing here")


def empty_folder(tmp_path):
    (tmp_path / "empty").mkdir()
    return str(tmp_path / "empty")


def no_weights(tmp_path):
    folder = tmp_path / "no_weights"
    tiny_llama().config.save_pretrained(folder)
    return str(folder)


def a_file(tmp_path):
    (tmp_path / "model.bin").write_text("x")
    return str(tmp_path / "model.bin")


def broken_config(tmp_path):
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "config.json").write_text("{not json")
    return str(folder)


def unknown_architecture(tmp_path):
    folder = tmp_path / "unknown"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "no_such_architecture"}))
    return str(folder)


def not_causal(tmp_path):
    folder = tmp_path / "vision"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))
    return str(folder)


@pytest.mark.parametrize(
    "make", [no_folder, empty_folder, no_weights, a_file, broken_config, unknown_architecture, not_causal]
)
def test_a_wrong_model_is_named(tmp_path, make):
    model = make(tmp_path)
    with pytest.raises((FileNotFoundError, ValueError)) as error:
        load_policy(model)
    assert f"model={model!r}" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_hub_name_without_network_is_one_message(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=r"model='nobody/no-such-model'.*hub"):
        load_policy("nobody/no-such-model")


@pytest.mark.parametrize("dtype", ["float31", "nn", ""])
def test_a_wrong_dtype_is_named(tmp_path, dtype):
    with pytest.raises(ValueError, match=f"dtype.*{dtype!r}"):
        load_policy(save(tiny_llama(), tmp_path), dtype=dtype)


def test_a_missing_tokenizer_is_named(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"model="):
        load_tokenizer(str(tmp_path))


def test_tokenizer_round_trip(tmp_path):
    tokenizer = load_tokenizer(save(tiny_llama(), tmp_path))
    assert tokenizer.encode("1+2=") == tiny_tokenizer().encode("1+2=")


def test_a_tokenizer_larger_than_the_vocabulary_is_refused():
    check_vocabulary(tiny_tokenizer(64), 64, "folder")
    check_vocabulary(tiny_tokenizer(50), 64, "folder")
    with pytest.raises(ValueError, match=r"model='folder'.*65.*64"):
        check_vocabulary(tiny_tokenizer(65), 64, "folder")


def test_a_run_with_such_a_tokenizer_is_refused(tmp_path):
    model = save(tiny_llama(), tmp_path, tokenizer=tiny_tokenizer(65))
    with pytest.raises(ValueError, match="the tokenizer has 65 tokens, but the model's vocabulary has only 64"):
        fit(make_module(model=model), make_data(model=model), 1)


def test_context_is_what_all_layers_can_attend_to():
    assert context_length(tiny_llama()) == 256
    assert context_length(tiny_gpt2()) == 256
    assert context_length(ALL["mistral"]()) == 200  # its sliding window
    assert context_length(ALL["gemma2"]()) == 200
    qwen = tiny_qwen3()
    assert context_length(qwen) == 256  # has a window in its config, but does not use it


def test_every_end_token_is_known():
    lm = tiny_llama()
    assert eos_token_ids(lm) == (1,)
    lm.generation_config.eos_token_id = [1, 7]
    assert eos_token_ids(lm) == (1, 7)
    lm.generation_config.eos_token_id = []  # nothing does
    assert eos_token_ids(lm) == ()


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        ({"eos_token_id": [3, 1]}, 5, "<eos>", (3, 1)),
        ({"temperature": 0.7}, 5, "<eos>", (5, 1)),  # as many models on the hub
        (None, [5, 6], "<eos>", (5, 6, 1)),
        ({}, None, "<eos>", (1,)),
        (None, None, "<eos>", (1,)),
        ({}, None, None, ()),
        ({"eos_token_id": []}, 5, "<eos>", ()),
    ],
)
def test_what_no_generation_config_says_ends_a_text_the_config_does_and_then_the_tokenizer(
    generation, config, tokenizer, expected, tmp_path, caplog
):
    folder = save(tiny_llama(), tmp_path)
    for name, values in {
        "config.json": {"eos_token_id": config},
        "generation_config.json": generation,
        "tokenizer_config.json": {"eos_token": tokenizer},
    }.items():
        file = tmp_path / name
        stored = json.loads(file.read_text()) if name != "generation_config.json" else {}
        file.unlink()
        if values is not None:
            file.write_text(json.dumps(stored | values))
    (tmp_path / "special_tokens_map.json").unlink(missing_ok=True)
    assert stored_eos_token_ids(folder) == eos_token_ids(load_policy(folder)) == expected
    warned = "neither generation_config.json nor config.json nor the tokenizer names an end token" in caplog.text
    assert warned == (expected == () and not generation)


@pytest.mark.parametrize("lora", [None, LoRA(rank=2, target_modules=["q_proj"])])
def test_buffers_that_files_hold_go_with_the_weights_to_engine_validation_and_export(tmp_path, lora):
    """Gemma 4 scales its layers by them: an engine or an export with the initial ones is another model."""
    trained = tiny_gemma4()
    folder = save(trained, tmp_path / "model")
    lm = load_policy(folder)
    assert dict(stored_buffers(lm)).keys() == {f"model.layers.{n}.layer_scalar" for n in range(2)}
    policy = CausalPolicy(lm if lora is None else add_lora(lm, lora))
    engine = EmbeddedEngine(num_slots=4, device="cpu")
    engine.setup(folder)
    engine.load_weights(1, stream_weights(policy))
    whole = load_policy(folder, random_init=True)
    apply_weights(whole, receive_weights(whole, stream_weights(policy)))
    lm.save_pretrained(tmp_path / "export", state_dict=dict(stream_weights(policy)))
    sharded = load_policy(folder, device="meta")
    WeightFiles(folder).read(sharded, sharded, torch.device("cpu"))
    ids = torch.arange(2, 22)[None]
    with torch.no_grad():
        for other in (engine.engine.slots.lm, whole, load_policy(str(tmp_path / "export")), sharded):
            torch.testing.assert_close(other(ids).logits, trained(ids).logits)
