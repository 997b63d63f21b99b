"""Tiny random models of all causal-LM types of the installed transformers, from their configuration classes."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterable, Sequence, Set
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from lit_async_rl.engines.base import GenerationRequest, SamplingParams, default_bound
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.models import packing as packing_module
from lit_async_rl.models.architecture import context_length, other_layers
from lit_async_rl.models.loading import load_policy
from lit_async_rl.models.packing import PrefixTreePacking, why_unpackable
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.models.self_check import check_policy, plain_pass, random_tokens
from lit_async_rl.models.weights import stream_weights

VOCAB = 64
HIDDEN = 32
HEADS = 4
LAYERS = 4
WINDOW = 8
POSITIONS = 64
HEAD_SIZE = HIDDEN // HEADS
TABLE = Path(__file__).parents[2] / "docs/model_types.json"

_SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size"), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_size", "embedding_dim"), HIDDEN),
    **dict.fromkeys(("input_embedding_size", "output_embedding_size", "word_embed_proj_dim", "lru_width"), HIDDEN),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), HEADS),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("num_decoder_layers", "num_blocks"), LAYERS),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers"), 1),
    **dict.fromkeys(("intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_dim", "n_inner", "dim_ff"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 16),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "dense_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("intermediate_size_mlp", "ffn_hidden_size", "dff", "d_inner", "feed_forward_size"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "context_length"), POSITIONS),
    **dict.fromkeys(("max_target_positions", "original_max_position_embeddings"), POSITIONS),
    **dict.fromkeys(("sliding_window", "window_size", "attention_window_size", "sliding_window_size"), WINDOW),
    **dict.fromkeys(("local_attention", "attention_chunk_size"), WINDOW),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "topk_group", "top_k_experts"), 2),
    **dict.fromkeys(
        ("head_dim", "kv_channels", "attention_head_size", "dim_head", "d_kv", "global_head_dim"), HEAD_SIZE
    ),
    **dict.fromkeys(("v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "linear_head_dim"), HEAD_SIZE),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "index_head_dim", "swa_head_dim"), HEAD_SIZE),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank", "laurel_rank", "gated_norm_rank"), 16),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("linear_num_value_heads", "swa_num_attention_heads", "linear_num_heads", "index_n_heads"), HEADS),
    **dict.fromkeys(("hidden_size_per_layer_input", "router_hidden_size", "hc_lowrank"), 16),
    **dict.fromkeys(("logits_scaling", "logits_mup_width_multiplier"), 4.0),  # 1 would hide a wrong head
    "lm_head_multiplier": 0.5,
    "index_topk": WINDOW,
    "n_group": 2,
    "rotary_dim": HEAD_SIZE,
    "type_vocab_size": 2,
}


_MAMBA = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=8)
_MIXED = ["sliding_attention", "full_attention"] * (LAYERS // 2)
_QWEN2 = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "intermediate_size",
    "num_key_value_heads",
)
_ROPE = dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2])
_INDEXER = dict(indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=8, indexer_compress_ratio=2)
_LINEAR = ["linear_attention", "full_attention"] * (LAYERS // 2)
_CHANGES: dict[str, dict[str, Any]] = {
    "falcon_h1": dict(mamba_d_ssm=64, **_MAMBA),
    "reformer": dict(axial_pos_embds=False, attn_layers=["local", "lsh"], num_buckets=2),
    "bamba": dict(attn_layer_indices=[1, 3], **_MAMBA),
    "granitemoehybrid": dict(layer_types=["mamba", "attention"] * (LAYERS // 2), **_MAMBA),
    "got_ocr2": dict(text_config=dict(model_type="qwen2", **{name: _SMALL[name] for name in _QWEN2})),
    "zamba": dict(layers_block_type=["mamba", "hybrid"] * (LAYERS // 2)),
    "zamba2": dict(layers_block_type=["mamba", "hybrid"] * (LAYERS // 2)),
    "zaya": dict(num_experts_per_tok=1),
    "qwen4_exp_text": dict(ngram_vocab_size_base=100, ple_embed_dim=16, **_INDEXER),
    "prophetnet": dict(num_encoder_layers=LAYERS),
    "mamba2": dict(num_heads=8, head_dim=8, n_groups=2, state_size=8, chunk_size=8),
    "dots1": dict(n_shared_experts=1),
    "gpt_neo": dict(attention_types=[[["global", "local"], LAYERS // 2]]),
    "gemma3n_text": dict(layer_types=_MIXED, num_kv_shared_layers=2),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, mamba_dt_rank=4),
    "kimi_linear": dict(layer_types=_LINEAR),
    "lfm2": dict(layer_types=["conv", "full_attention"] * (LAYERS // 2)),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"] * (LAYERS // 2)),
    "dbrx": dict(
        attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0),
        ffn_config=dict(ffn_hidden_size=16, moe_num_experts=4),
    ),
    "cohere_compass_text": dict(rope_parameters=dict.fromkeys(_MIXED, _ROPE)),
    "blt": dict(encoder_hash_byte_group_vocab=50),
}


def full_logprobs(lm: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """Log-probabilities of all tokens but the first, by one forward pass of the sequence alone."""
    return plain_pass(lm, [ids])[0][0]


def tiny_config(kind: type[PreTrainedConfig], is_part: bool = False, **changes: Any) -> PreTrainedConfig:
    """A configuration of this class with sizes of a few dozen."""
    known = inspect.signature(kind.__init__).parameters
    chosen = {name: value for name, value in _SMALL.items() if name in known}
    if not is_part or "pad_token_id" in known:
        chosen |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    if "is_decoder" in known:  # a masked language model otherwise
        chosen["is_decoder"] = True
    if "kv_lora_rank" in known:  # latent attention has as many keys as queries
        chosen["num_key_value_heads"] = HEADS
    if "encoder_layers" in known:
        chosen["encoder_layers"] = LAYERS
    for name, part in kind.sub_configs.items():
        if isinstance(part, type) and issubclass(part, PreTrainedConfig):
            chosen[name] = tiny_config(part, is_part=True)
    return kind(**(chosen | _CHANGES.get(kind.model_type, {}) | changes))


def model_types() -> dict[str, type[PreTrainedConfig]]:
    """All causal-LM configuration classes by model type."""
    return {kind.model_type: kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING}


UNBUILDABLE = {  # not from a configuration alone, or not without another package
    "gemma3n": "needs timm",
    "gemma4_assistant": "drafts for another model",
    "gemma4_unified_assistant": "drafts for another model",
    "musicgen": "its configuration needs those of two other models",
    "musicgen_melody": "its configuration needs those of two other models",
}
PARTS = ("trainer", "packing", "engine")

# One type or two of each mechanism: what `.ci/run` looks at. `make test-sweep` looks at all, when transformers changes.
SAMPLED = {
    *("qwen2", "qwen3", "phi3", "olmo2", "smollm3", "starcoder2", "opt", "gptj", "gpt_neox", "xglm", "stablelm"),
    *("gemma3_text", "gemma4_text", "cohere2", "gpt_oss", "granite", "vaultgemma", "mllama"),  # windows, caps, sinks
    *("mixtral", "qwen3_moe", "deepseek_v3", "glm4_moe", "hunyuan_v1_moe", "phimoe"),  # experts, latent attention
    *("qwen3_next", "jamba", "lfm2", "kimi_linear", "falcon_h1", "zamba2", "minimax", "recurrent_gemma"),  # refused
    *("llama4_text", "deepseek_v4", "whisper", "xlnet", "bert", "rwkv", "bloom"),  # refused in part, or altogether
    *("youtu", "emu3", "hyperclovax", "falcon"),  # exported otherwise
}


def params(names: Iterable[str], usual: Set[str], sampled: Any, rest: Any) -> list[Any]:
    """The types as parameters: unmarked if usual, with the mark `sampled` if in `SAMPLED`, else with `rest`."""
    marks = {name: () if name in usual else sampled if name in SAMPLED else rest for name in names}
    return [pytest.param(name, marks=marks[name]) for name in sorted(names)]


def load(config: PreTrainedConfig, folder: Path, seed: int = 0) -> PreTrainedModel:
    """A model as `load_policy` gives it, with weights large enough that its distributions are far from uniform."""
    config.save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm = load_policy(str(folder), random_init=True)
        with torch.no_grad():
            for parameter in lm.parameters():
                parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 0.1))
    return lm


def examine(kind: type[PreTrainedConfig], folder: Path) -> dict[str, str]:
    """Result of a model type in each of `PARTS`: empty if correct, else the message that refuses it.

    Raises:
        AssertionError: a part accepts the model and computes it wrongly.
    """
    try:
        lm = load(tiny_config(kind), folder)
    except ValueError as error:
        return dict.fromkeys(PARTS, _named(error, kind.model_type, kind.__name__))
    found = {}
    checks = dict(zip(PARTS, (_assert_policy, _assert_packed, partial(_decode, folder=folder)), strict=True))
    for part in PARTS:
        try:
            checks[part](lm)
            found[part] = ""
        except ValueError as error:
            found[part] = _named(error, kind.model_type, type(lm).__name__)
    return found


def _named(error: Exception, *names: str) -> str:
    """Its message, if that is one line with one of the names."""
    message = str(error)
    assert "\n" not in message
    assert any(name in message for name in names)
    return message


def _batch(lm: PreTrainedModel) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, mask and groups of rows as long as the context allows, with a prompt of one token."""
    longest = min(context_length(lm) - 1, 20)
    many = [(4, longest - 4, 0)] * 5  # together longer than any window
    shapes = [*many, (4, 2, 0), (1, longest - 1, 1), (1, 3, 1), (longest - 1, 1, 2)]
    prompts = [random_tokens(lm, longest, seed=group) for group in range(3)]
    rows = [prompts[group][:begin] + random_tokens(lm, n, seed=9 + row) for row, (begin, n, group) in enumerate(shapes)]
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    places = torch.arange(longest)
    mask = torch.stack([(places >= begin) & (places < begin + n) for begin, n, _ in shapes])
    return ids, mask, torch.tensor([group for *_, group in shapes])


def _assert_packed(lm: PreTrainedModel) -> None:
    """With a mask, and with attention split at branches, which these trees are too small for.

    Raises:
        ValueError: the model's rows are computed separately.
    """
    if why := why_unpackable(lm):
        raise ValueError(f"model.packing: {type(lm).__name__} {why}; leave packing out")
    for splits in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packing_module, "split_is_cheaper", lambda lm, spans, shape, splits=splits: splits)
            _assert_policy(lm, PrefixTreePacking(row_tokens=40))


def _assert_policy(lm: PreTrainedModel, packing: PrefixTreePacking | None = None) -> None:
    policy = CausalPolicy(lm, chunk_tokens=5, packing=packing)
    check_policy(policy, default_bound("float32"))
    ids, mask, groups = _batch(lm)
    with torch.no_grad():
        found = policy(ids, mask, group_index=groups).logprobs
    for row, part, values in zip(ids, mask, found, strict=True):
        length = int(part.nonzero().max()) + 1
        expected = full_logprobs(lm, row[:length].tolist())[part[1:length]]
        torch.testing.assert_close(values[part], expected, atol=1e-5, rtol=1e-5)


def _decode(lm: PreTrainedModel, folder: Path) -> None:
    """By an engine with a model of its own, to which weights are published, and by one around the policy's."""
    engine = EmbeddedEngine(num_slots=4)
    engine.setup(str(folder))
    engine.load_weights(1, stream_weights(CausalPolicy(lm)))
    longest = min(engine.max_model_len, 40)
    params = SamplingParams(max_tokens=longest - 4)
    prompts = [tuple(random_tokens(lm, length, seed=length)) for length in (1, 4, 3, 2, 1)]
    requests = [GenerationRequest(id=n, prompt_ids=p, num_samples=2, sampling=params) for n, p in enumerate(prompts)]
    # recurrent layers are computed in another form for single tokens than for a sequence: those of Qwen3.5 differed by
    # 1.9e-4 on an AMD processor, before and after all changes to attention, and Qwen3-Next's by 1.1e-4 on another
    atol = 3e-4 if lm.config.model_type.startswith(("qwen3_5", "qwen3_next")) else 1e-4
    bounds = dict(atol=atol, rtol=0) if other_layers(lm) else dict(atol=1e-5, rtol=1e-5)
    for one in (engine, EmbeddedEngine.from_module(lm, num_slots=4)):
        for request, completions in zip(requests, one.run(requests), strict=True):
            for c in completions:
                expected = full_logprobs(lm, request.prompt_ids + c.token_ids)[len(request.prompt_ids) - 1 :]
                torch.testing.assert_close(torch.tensor(c.logprobs), expected, **bounds)


def reason(message: str) -> str:
    """The part of a refusal that does not depend on the machine, for the documentation."""
    kept = re.search(r"(?:\): |: \w+ )(.*?)(?: by [\d.e+inf-]+ nats.*| \(\w+[:)].*|; .*)?$", message)
    return kept[1] if kept else message


def main(names: Sequence[str]) -> None:
    """Writes `docs/model_types.json`, anew or the given types only."""
    found = json.loads(TABLE.read_text())["types"] if names else {}
    for name in names or model_types().keys() - UNBUILDABLE:
        with TemporaryDirectory() as folder:
            parts = examine(model_types()[name], Path(folder))
        found[name] = {part: reason(message) for part, message in parts.items()}
    content = {"transformers": transformers.__version__, "types": found}
    TABLE.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
