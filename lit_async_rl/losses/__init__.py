"""Policy losses: callables from `LossInputs` to one unreduced value per token.

Some published methods are combinations: GRPO, Dr. GRPO, DAPO, decoupled PPO and A-3PO are `PPOClip` (see there), IcePop
and TIS are corrections, AsymRE and OPO are advantages for `Reinforce`, VCPO's base objective is `Reinforce` with a
correction.
"""

from lit_async_rl.losses.balanced import BAPO, BAPOReleased
from lit_async_rl.losses.base import LossInputs, LossOutput, PolicyLoss
from lit_async_rl.losses.centered import ImportanceWeight, ScoreCentering
from lit_async_rl.losses.clipped import ASPO, OPSM, MiniRL, PPOClip
from lit_async_rl.losses.entropy_region import ESTR
from lit_async_rl.losses.prefix import PNPO, MinPRO
from lit_async_rl.losses.regression import OPMD, KimiRegression
from lit_async_rl.losses.reinforce import CISPO, SAPO, Reinforce
from lit_async_rl.losses.sequence import GSPO, TOPR, VESPO, GSPOToken
from lit_async_rl.losses.staleness_adaptive import SAT
from lit_async_rl.losses.trajectory import OAPL, TrajectoryBalance, TrajectoryBalancePrime
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
