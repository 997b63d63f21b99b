"""An export is the model, under the names that transformers reads: for every family, with adapters merged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from every_family import UNBUILDABLE, load, model_types, params, tiny_config
from tiny_models import tiny_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from lit_async_rl.models.export import export_model, export_problems
from lit_async_rl.models.lora import LoRA, add_lora
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.models.weights import stream_weights

USUAL = {"qwen2", "gpt2", "gpt_neox", "llama", "gemma4_text", "qwen3_moe", "mamba2"}
FAMILIES = {name: kind for name, kind in model_types().items() if name not in UNBUILDABLE}
# the configuration of the text part alone, which is what these models have, is known to their own class only
OWN_CLASS = {"emu3", "mllama"}
# transformers 5.19 sets the padding token's embedding to 0 after it has read it (`_init_weights` writes to `.data`)
PADDING_LOST = {"youtu": "model.embed_tokens.weight"}


def exported(family: str, lm: PreTrainedModel, policy: CausalPolicy, folder: Path) -> dict[str, torch.Tensor]:
    """Writes the policy, reads it again, and compares; returns what was written, by name."""
    weights = {name: tensor.detach().clone().contiguous() for name, tensor in stream_weights(policy)}
    export_model(lm, tiny_tokenizer(64), folder, weights)
    problems = export_problems(lm, tiny_tokenizer(64))
    if family in OWN_CLASS:
        assert len(problems) == 1
        assert f"only {type(lm).__name__} reads" in problems[0]
    else:
        assert not problems
    reader = type(lm) if family in OWN_CLASS else AutoModelForCausalLM
    read, about = reader.from_pretrained(folder, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not about[kind], kind
    own = dict(read.named_parameters()) | dict(read.named_buffers())
    assert dict(read.named_parameters()).keys() <= weights.keys()
    for name, tensor in weights.items():
        if name in own:
            if PADDING_LOST.get(family) == name:
                tensor[read.config.pad_token_id] = 0.0
            torch.testing.assert_close(own[name], tensor, rtol=0, atol=1e-6, msg=name)
        else:  # the second name of a tied weight
            assert any(torch.equal(tensor, parameter) for parameter in read.parameters()), name
    return weights


@pytest.mark.parametrize("name", params(FAMILIES, usual=USUAL, sampled=pytest.mark.slow, rest=pytest.mark.sweep))
def test_an_export_is_read_again_with_every_weight_in_its_place(name: str, tmp_path: Path) -> None:
    try:
        lm = load(tiny_config(FAMILIES[name]), tmp_path / "config")
        policy = CausalPolicy(lm)
    except ValueError as refused:
        pytest.skip(f"refused by name: {refused}")
    plain = exported(name, lm, policy, tmp_path / "plain")
    try:
        policy = CausalPolicy(add_lora(lm, LoRA(rank=2, target_modules="all-linear")))
    except ValueError as refused:
        if "model.lora.target_modules" not in str(refused):
            raise
        return
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    merged = exported(name, policy.causal_lm, policy, tmp_path / "merged")
    assert merged.keys() == plain.keys()
    changed = {key for key, tensor in merged.items() if not torch.equal(tensor, plain[key])}
    assert changed
    assert all(key.endswith(".weight") for key in changed)
