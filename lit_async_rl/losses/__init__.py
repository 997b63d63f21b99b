"""Per-token policy losses: each a small class whose call is a pure function. They never reduce."""

from lit_async_rl.losses.base import LossInputs, LossOutput, PolicyLoss
from lit_async_rl.losses.clipped import ASPO, GSPO, OPSM, GSPOToken, MiniRL, PPOClip
from lit_async_rl.losses.reinforce import CISPO, SAPO, Reinforce

__all__ = [
    "ASPO",
    "CISPO",
    "GSPO",
    "OPSM",
    "SAPO",
    "GSPOToken",
    "LossInputs",
    "LossOutput",
    "MiniRL",
    "PPOClip",
    "PolicyLoss",
    "Reinforce",
]
