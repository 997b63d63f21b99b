"""Tiny chat models: tokenizers of the kinds that people use, with a ChatML template, and a random Llama."""

from __future__ import annotations

from pathlib import Path

from tiny_models import save, tiny_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXTS = ["the answer is 12\n\nnext: größe 東京 </answer> stop. 日本語", "a b c ab abc\n\n\n", "Ünïcödé 🎉🎊 and 🎉"]


def byte_level(vocab: int = 330, template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """As of SmolLM2, Llama 3 and Qwen: a token is any string of bytes, also part of a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 20, trainer)
    return _wrapped(tokenizer, template)


def byte_fallback(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """As of Llama 2 and Gemma: pieces with spaces in front, the first of a text without, and bytes for the rest."""
    pieces = [
        "▁",
        "a",
        "b",
        "▁a",
        "▁ab",
        "abc",
        "\n",
        "\n\n",
        "▁stop",
        "st",
        "op",
        ".",
        "1",
        "12",
        "▁</",
        "answer",
        ">",
    ]
    vocab = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    tokenizer = Tokenizer(models.BPE({piece: n for n, piece in enumerate(vocab)}, [], byte_fallback=True))
    strip = decoders.Strip(content=" ", left=1, right=0)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return _wrapped(tokenizer, template)


def _wrapped(tokenizer: Tokenizer, template: str | None) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens(SPECIAL)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.chat_template = template
    return made


def chat_model(folder: Path, template: str | None = CHATML, **config: int) -> str:
    """A folder with both; `<|im_end|>` ends a completion."""
    tokenizer = byte_level(template=template)
    lm = tiny_llama(vocab=len(tokenizer), **config)
    lm.config.eos_token_id = lm.generation_config.eos_token_id = tokenizer.eos_token_id
    return save(lm, folder, tokenizer)


def brute_force(tokenizer, ids, stops, after=0):
    """Least number of tokens, more than `after`, whose text contains a stop string: every prefix is decoded."""
    for end in range(after + 1, len(ids) + 1):
        text = tokenizer.decode(list(ids[:end]), skip_special_tokens=True)
        if any(stop in text for stop in stops):
            return end
    return None
