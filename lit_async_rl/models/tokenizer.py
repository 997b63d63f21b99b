"""Encoding of prompts, and decoding of completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from lit_async_rl.models.architecture import configured_length
from lit_async_rl.models.loading import load_config, load_tokenizer
from lit_async_rl.models.stop_strings import cut_at_stop
from lit_async_rl.types import Prompt


class TextCodec:
    """Encodes prompts and decodes completions with a model's tokenizer.

    The chat template is applied to prompts that are messages. If the last message is from the assistant, the completion
    continues it; otherwise it is the assistant's next turn.

    Args:
        model: Hugging Face name or folder.

    Raises:
        FileNotFoundError: there is no tokenizer.
    """

    def __init__(self, model: str) -> None:
        self.tokenizer = load_tokenizer(model)
        config: Any = load_config(model).get_text_config()
        self.context_length = configured_length(config)
        self.vocab_size = int(config.vocab_size)  # the model's, which may have more ids than the tokenizer
        self.model = model
        self._texts: dict[int, str] = {}

    @property
    def pad_token_id(self) -> int:
        """Padding token id; 0 if the tokenizer has none, because padding is masked."""
        return self.tokenizer.pad_token_id or 0

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt.

        Raises:
            ValueError: the prompt has no tokens, or the chat template is missing or refuses the messages.
        """
        if prompt.messages is not None:
            ids = self._encode_messages(prompt.messages)
        else:
            ids = tuple(self.tokenizer(prompt.text)["input_ids"])
        if not ids:
            raise ValueError(f"a prompt has no tokens: {prompt.text!r}")
        return ids

    def _encode_messages(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        if not self.tokenizer.chat_template:
            raise ValueError(f"a prompt is messages, but the tokenizer of {self.model!r} has no chat template")
        continues = messages[-1]["role"] == "assistant"
        try:
            ids: Any = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=not continues,
                continue_final_message=continues,
                return_dict=False,
            )
        except (TemplateError, ValueError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(
                f"the chat template of {self.model!r} refuses a prompt with the roles {roles}: {error}"
            ) from error
        return tuple(ids)

    def encode_continuation(self, text: str) -> tuple[int, ...]:
        """Token ids of text within a conversation, without special tokens."""
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int], stop: Sequence[str] = ()) -> str:
        """Text of a completion, without special tokens, up to the first stop string."""
        return cut_at_stop(str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True)), stop)

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Text of each token, special ones included; of tokens that share a character the last has it."""
        texts = [self._token_text(token) for token in token_ids]
        begin = 0
        while begin < len(texts):
            end = begin + 1
            if "\ufffd" in texts[begin]:  # a character of several tokens has at most four bytes
                for end in range(begin + 2, min(begin + 4, len(texts)) + 1):
                    whole = str(self.tokenizer.decode(list(token_ids[begin:end])))
                    if "\ufffd" not in whole:
                        texts[begin:end] = [*[""] * (end - begin - 1), whole]
                        break
                else:
                    end = begin + 1
            begin = end
        return texts

    def _token_text(self, token: int) -> str:
        if token not in self._texts:
            text = str(self.tokenizer.decode([token]))
            piece = self.tokenizer.convert_ids_to_tokens(token)
            leads = isinstance(piece, str) and piece.startswith("\u2581")  # SentencePiece drops the first space
            self._texts[token] = f" {text}" if leads and not text.startswith(" ") else text
        return self._texts[token]

    def check_stop(self, stop: Sequence[str], token_ids: Sequence[int] = ()) -> None:
        """Checks stop strings and stop tokens.

        Raises:
            ValueError: a string is a special token, which decoded text does not contain; the model has no such token.
        """
        if unknown := [token for token in token_ids if token >= self.vocab_size]:
            raise ValueError(
                f"sampling.stop_token_ids: {self.model!r} has the tokens 0 to {self.vocab_size - 1}, and not {unknown}"
            )
        for text in stop:
            if text in self.tokenizer.all_special_tokens:
                token = self.tokenizer.convert_tokens_to_ids(text)
                raise ValueError(
                    f"sampling.stop: {text!r} is a special token of {self.model!r}, which texts do not contain: "
                    f"use sampling.stop_token_ids: [{token}]"
                )
