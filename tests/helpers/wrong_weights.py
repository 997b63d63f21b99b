"""Weights that are a little wrong, and a check that keeps what it found."""

from __future__ import annotations

from typing import Any

from lit_async_rl import EngineCheck

SCALED = [
    "embed_tokens",
    "layers.0.self_attn.q_proj",
    "layers.1.mlp.down_proj",
    "layers.2.input_layernorm",
    "model.norm",
]


class Recording(EngineCheck):
    """Keeps what was logged: (step, error) of each check."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.checks: list[tuple[int, float]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._pending_metrics:
            self.checks.append((batch.step, self._pending_metrics["engine/logprob_error"]))
        super().on_train_batch_end(trainer, pl_module, outputs, batch=batch, batch_idx=batch_idx)
