"""Per-token policy losses: each a small class whose call is a pure function. They never reduce."""

from lit_async_rl.losses.base import LossInputs, LossOutput, PolicyLoss
from lit_async_rl.losses.clipped import PPOClip, Reinforce

__all__ = ["LossInputs", "LossOutput", "PPOClip", "PolicyLoss", "Reinforce"]
