"""Random causal LMs of several families, at most 40 tokens of vocabulary and 32 positions."""

from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZE = dict(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=32,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZE)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=2, n_positions=32)),
    "gemma2 (soft-capped logits)": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZE, final_logit_softcapping=3.0)),
    "granite (divided logits)": lambda: GraniteForCausalLM(GraniteConfig(**SIZE, logits_scaling=4.0)),
    "cohere (scaled logits)": lambda: CohereForCausalLM(
        CohereConfig(**{k: v for k, v in SIZE.items() if k != "head_dim"}, logit_scale=0.3)
    ),
}
