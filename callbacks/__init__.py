"""Callbacks: weight synchronisation, stabilizers that change the step, monitors that change nothing."""

from lit_async_rl.callbacks.weight_sync import WeightSync

__all__ = ["WeightSync"]
