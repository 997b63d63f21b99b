"""Files that are not the whole model, or another one than their configuration: refused, and never filled by chance."""

import json
import logging
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save, tiny_llama

from lit_async_rl.models.loading import WeightFiles, load_policy
from lit_async_rl.models.lora import LoRA, add_lora
from lit_async_rl.models.weights import receive_weights

HEAD = "lm_head.weight"
WORDS = "model.embed_tokens.weight"
CPU = torch.device("cpu")


def folder_of(path: Path, change=lambda weights: weights, **config) -> str:
    """A model with these weights in its one file and these values in its configuration."""
    folder = Path(save(tiny_llama(vocab=30, hidden=16, layers=2), path))
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stored | config))
    return str(folder)


def read_on_meta(model: str) -> torch.nn.Module:
    lm = load_policy(model, device="meta")
    WeightFiles(model).read(lm, lm, CPU)
    return lm


@pytest.mark.parametrize("load", [load_policy, read_on_meta])
def test_two_matrices_that_the_configuration_ties_are_refused(tmp_path, load):
    model = folder_of(tmp_path / "two", tie_word_embeddings=True)
    with pytest.raises(ValueError, match=rf"ties {WORDS} and {HEAD}.*set tie_word_embeddings to false"):
        load(model)
    untied = folder_of(tmp_path / "untied", tie_word_embeddings=False)
    assert not torch.equal(load(untied).get_parameter(WORDS), load(untied).get_parameter(HEAD))
    twice = folder_of(tmp_path / "twice", lambda w: w | {HEAD: w[WORDS].clone()}, tie_word_embeddings=True)
    lm = load(twice)
    assert lm.get_parameter(WORDS) is lm.get_parameter(HEAD)


def test_an_engine_that_ties_what_the_policy_does_not_refuses_its_weights():
    tied = tiny_llama(vocab=30, hidden=16, layers=2, tied=True)
    weights = dict(tied.named_parameters())
    assert receive_weights(tied, weights.items()).keys() == weights.keys()
    with pytest.raises(ValueError, match=f"ties '{HEAD}' to '.*', and the policy does not"):
        receive_weights(tied, (weights | {HEAD: torch.zeros(30, 16)}).items())


def test_weights_that_are_missing_are_named(tmp_path):
    model = folder_of(tmp_path, lambda w: {name: value for name, value in w.items() if "layers.1.mlp" not in name})
    with pytest.raises(
        ValueError,
        match=r"the model's files lack these weights, which would be random: model\.layers\.1\.mlp\.down_proj",
    ):
        load_policy(model)


def test_a_shard_without_its_weights_is_named(tmp_path):
    lm = tiny_llama(vocab=30, hidden=16, layers=2)
    lm.save_pretrained(tmp_path, max_shard_size="4KB")
    index = tmp_path / "model.safetensors.index.json"
    files = json.loads(index.read_text())
    name = "model.layers.1.mlp.down_proj.weight"
    file = tmp_path / files["weight_map"].pop(name)
    save_file({one: value for one, value in load_file(file).items() if one != name}, file, metadata={"format": "pt"})
    index.write_text(json.dumps(files))
    with pytest.raises(ValueError, match=rf"the model's files lack these weights, which would be random: {name}"):
        load_policy(str(tmp_path))


def test_a_weight_of_another_shape_is_named(tmp_path):
    name = "model.layers.0.mlp.down_proj.weight"
    model = folder_of(tmp_path, lambda w: w | {name: torch.zeros(16, 5)})
    with pytest.raises(
        ValueError, match=rf"'{name}' has shape \(16, 5\) in its files, but shape \(16, 32\) according to config"
    ):
        load_policy(model)


def test_weights_that_the_model_has_not_are_said(tmp_path, caplog):
    model = folder_of(tmp_path, num_hidden_layers=1)
    with caplog.at_level(logging.WARNING, logger="lit_async_rl"):
        assert len(load_policy(model).model.layers) == 1
    assert "its files have 9 weights that the model lacks; these weights are ignored: model.layers.1" in caplog.text


@pytest.mark.parametrize("continues", [False, True])
def test_an_adapter_without_some_of_its_weights_is_refused(tmp_path, continues):
    base = load_policy(save(tiny_llama(vocab=30, hidden=16, layers=2), tmp_path / "base"))
    folder = tmp_path / "adapter"
    peft.get_peft_model(base, peft.LoraConfig(r=2, task_type="CAUSAL_LM")).save_pretrained(folder)
    file = folder / "adapter_model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if "layers.1" not in name}, file)
    plain = load_policy(str(tmp_path / "base"))
    lora = LoRA(continue_adapter=True)
    load = (lambda: add_lora(plain, lora, str(folder))) if continues else (lambda: load_policy(str(folder)))
    with pytest.raises(ValueError, match="some weights are missing from its adapter and would be random"):
        load()
