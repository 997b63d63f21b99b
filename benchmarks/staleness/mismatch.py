"""An engine whose policy is not exactly the trainer's: weights, or keys and values, in 8 bits, or noisy weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.engines.embedded.kv_cache import SlotCache
from lit_async_rl.utils.checks import check_range

LEVELS = 127  # of the magnitude of 8 bits with a sign


class RoundedCache(SlotCache):
    """KV cache of 8 bits, with a scale for each token and head, as engines keep it to fit more completions.

    Prompts attend to their own keys and values before these are rounded; sampled tokens read rounded ones.
    """

    def write(self, new: Float[Tensor, "n both D"], layer: int) -> tuple[Tensor, Tensor]:
        return super().write(rounded(new), layer)

    def end_prefill(self, source: Tensor, slots: Tensor) -> None:
        if self._prefill is not None:
            self._prefill = [(rounded(key), rounded(value)) for key, value in self._prefill]
        super().end_prefill(source, slots)


class MismatchedEngine(EmbeddedEngine):
    """The embedded engine with changed matrices (embeddings are matrices, too, norms stay as they are) or cache.

    Args:
        int8: round each row (output channel) to 255 equidistant values, as weight-only INT8 inference does.
        int8_cache: round keys and values in the same way, by token and head. Without self-check, which would refuse it.
        sigma: standard deviation of Gaussian noise, as a share of that of the matrix; drawn anew with every update.
        **settings: of `EmbeddedEngine`.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(self, int8: bool = False, int8_cache: bool = False, sigma: float = 0.0, **settings: Any) -> None:
        check_range("data.engine", ">= 0", sigma=sigma)
        if int8_cache:
            settings["self_check"] = False
            self.cache_class = RoundedCache
        super().__init__(**settings)
        self.takes_changes = False  # what is changed are all weights, merged
        self.takes_adapters = False
        self.int8 = int8
        self.sigma = sigma
        self._noise = torch.Generator().manual_seed(self.seed)

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights(version, self._changed(weights))

    def _changed(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, value in weights:
            changed = value.detach()
            if changed.dim() > 1 and self.sigma:
                noise = torch.randn(changed.shape, generator=self._noise).to(changed)
                changed = changed + self.sigma * changed.std() * noise
            yield name, rounded(changed) if changed.dim() > 1 and self.int8 else changed


def rounded(values: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows n"]:
    """The nearest of 255 equidistant values, symmetric about 0 and up to the largest magnitude of each row."""
    scale = values.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(values.dtype).tiny) / LEVELS
    return (values / scale).round() * scale
