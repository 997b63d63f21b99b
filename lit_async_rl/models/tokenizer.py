"""Between text and token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lit_async_rl.models.loading import load_config, load_tokenizer
from lit_async_rl.types import Prompt


class TextCodec:
    """A model's tokenizer, as prompts and completions use it.

    Args:
        model: Hugging Face name or folder.
        use_chat_template: wrap each prompt as a user's turn.

    Raises:
        FileNotFoundError: there is no tokenizer.
        ValueError: the chat template is asked for and there is none.
    """

    def __init__(self, model: str, use_chat_template: bool = False) -> None:
        self.tokenizer = load_tokenizer(model)
        config: Any = load_config(model).get_text_config()
        self.vocab_size = int(config.vocab_size)  # the model's, which may have more ids than the tokenizer
        self.use_chat_template = use_chat_template
        if use_chat_template and not self.tokenizer.chat_template:
            raise ValueError(f"data.use_chat_template=true, but the tokenizer of {model!r} has no chat template")

    @property
    def pad_token_id(self) -> int:
        """Any id will do where there is none: padding is never looked at."""
        return self.tokenizer.pad_token_id or 0

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt.

        Raises:
            ValueError: it is empty.
        """
        if self.use_chat_template:
            messages = [{"role": "user", "content": prompt.text}]
            ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        else:
            ids = self.tokenizer(prompt.text)["input_ids"]
        if not ids:
            raise ValueError(f"a prompt has no tokens: {prompt.text!r}")
        return tuple(ids)

    def encode_continuation(self, text: str) -> tuple[int, ...]:
        """Token ids of text in the middle of a conversation: nothing is put before or behind it."""
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a completion, without special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))
