"""Policy losses: callables from `LossInputs` to one unreduced value per token.

Some published methods are combinations: GRPO, Dr. GRPO, DAPO, decoupled PPO and A-3PO are `PPOClip` (see there), IcePop
and TIS corrections, AsymRE and OPO advantages for `Reinforce`, VCPO's base objective `Reinforce` with a correction.
"""

from lit_async_rl.losses.base import LossInputs, LossOutput, PolicyLoss
from lit_async_rl.losses.clipped import ASPO, BAPO, ESTR, OPSM, PNPO, SAT, BAPOReleased, MiniRL, MinPRO, PPOClip
from lit_async_rl.losses.regression import OAPL, OPMD, KimiRegression, TrajectoryBalance, TrajectoryBalancePrime
from lit_async_rl.losses.reinforce import CISPO, SAPO, ImportanceWeight, Reinforce, ScoreCentering
from lit_async_rl.losses.sequence import GSPO, TOPR, VESPO, GSPOToken
from lit_async_rl.losses.trust_region import DPPO, IPO, M2PO, DPPOBinaryKL, M2POAdaptiveClip

__all__ = [
    "ASPO",
    "BAPO",
    "CISPO",
    "DPPO",
    "ESTR",
    "GSPO",
    "IPO",
    "M2PO",
    "OAPL",
    "OPMD",
    "OPSM",
    "PNPO",
    "SAPO",
    "SAT",
    "TOPR",
    "VESPO",
    "BAPOReleased",
    "DPPOBinaryKL",
    "GSPOToken",
    "ImportanceWeight",
    "KimiRegression",
    "LossInputs",
    "LossOutput",
    "M2POAdaptiveClip",
    "MinPRO",
    "MiniRL",
    "PPOClip",
    "PolicyLoss",
    "Reinforce",
    "ScoreCentering",
    "TrajectoryBalance",
    "TrajectoryBalancePrime",
]
