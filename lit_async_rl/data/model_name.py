"""The model a data module samples from: its name, which may be set later, and its tokenizer."""

from __future__ import annotations

import lightning.pytorch as pl

from lit_async_rl.data.rollout_source import RolloutSource
from lit_async_rl.errors import SetupError
from lit_async_rl.models.tokenizer import SpecialTokens, TextCodec
from lit_async_rl.types import Prompt


class ModelName(pl.LightningDataModule):
    """Base class of `RolloutDataModule`: name and tokenizer of the model.

    Args:
        model: Hugging Face name or folder; None until `use_model`.
        special_tokens: in decoded text, see `data.scoring.special_tokens`.
    """

    _source: RolloutSource

    def __init__(self, model: str | None, special_tokens: SpecialTokens = "tags") -> None:
        super().__init__()
        self.model = model
        self.special_tokens: SpecialTokens = special_tokens
        self._codec = None if model is None else TextCodec(model, special_tokens)

    def use_model(self, model: str) -> None:
        """Sets the name of the model, unless one was given."""
        if self.model is None:
            self._codec = TextCodec(model, self.special_tokens)
            self.model = model
            self._source.use_model(model)

    @property
    def codec(self) -> TextCodec:
        """The model's tokenizer.

        Raises:
            SetupError: the model is not set yet.
        """
        if self._codec is None:
            raise SetupError("data.model is not set: give it, or add the WeightSync callback, which takes the module's")
        return self._codec

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt."""
        return self.codec.encode(prompt)
