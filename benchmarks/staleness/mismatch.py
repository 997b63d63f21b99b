"""An engine whose weights are not exactly the trainer's: rounded to 8 bits, or with noise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.utils.checks import check_range

LEVELS = 127  # of the magnitude of 8 bits with a sign


class MismatchedEngine(EmbeddedEngine):
    """The embedded engine with changed matrices; embeddings are matrices, too, norms stay as they are.

    Args:
        int8: round each row (output channel) to 255 equidistant values, as weight-only INT8 inference does.
        sigma: standard deviation of Gaussian noise, as a share of that of the matrix; drawn anew with every update.
        **settings: of `EmbeddedEngine`.

    Raises:
        ValueError: a setting is out of range.
    """

    takes_changes = False  # noise is drawn anew for all weights

    def __init__(self, int8: bool = False, sigma: float = 0.0, **settings: Any) -> None:
        check_range("data.engine", ">= 0", sigma=sigma)
        super().__init__(**settings)
        self.int8, self.sigma = int8, sigma
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


def rounded(matrix: Tensor) -> Tensor:
    """The nearest of 255 equidistant values, symmetric about 0 and up to the largest magnitude of each row."""
    scale = matrix.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(matrix.dtype).tiny) / LEVELS
    return (matrix / scale).round() * scale
