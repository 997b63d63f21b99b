r"""Divergences of a student from its teacher at the states that the student visits. V vocabulary.

With p the student, q the teacher, both at the sampling temperature:

| divergence | | it |
|---|---|---|
| `reverse_kl` | sum of p (log p - log q) | seeks modes: leaves out what the student cannot imitate |
| `forward_kl` | sum of q (log q - log p) | covers all that the teacher would say |
| `jsd` | beta KL(q \\|\\| m) + (1 - beta) KL(p \\|\\| m), m = beta q + (1 - beta) p | is between both, and bounded |

The last is that of GKD (arXiv:2306.13649). The states are the prefixes of the student's own completions; their age is
the only staleness of these gradients.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Divergence = Literal["reverse_kl", "forward_kl", "jsd"]


def divergence(
    kind: Divergence, student: Float[Tensor, "*N V"], teacher: Float[Tensor, "*N V"], beta: float = 0.5
) -> Float[Tensor, "*N"]:
    """Divergence at each state, in nats.

    Args:
        kind: see above.
        student: log-probabilities, with gradient.
        teacher: log-probabilities, without gradient.
        beta: the teacher's share in the mixture of `jsd`.
    """
    if kind == "reverse_kl":
        return _kl(student, teacher)
    if kind == "forward_kl":
        return _kl(teacher, student)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(first: Float[Tensor, "*N V"], second: Float[Tensor, "*N V"]) -> Float[Tensor, "*N"]:
    """KL(first || second); tokens of probability 0 under the first add nothing."""
    never = first == -torch.inf
    difference = (first - second).masked_fill(never, 0.0)
    return (first.exp() * difference).sum(-1)


def with_tail(head: Float[Tensor, "*N k"]) -> Float[Tensor, "*N k1"]:
    """Log-probabilities of k tokens, followed by that of all others together.

    The divergence of two distributions merged in this way is at most that of the whole ones, which also differ among
    the other tokens, and 0 where they are equal.
    """
    others = 1 - head.exp().sum(-1, keepdim=True)
    return torch.cat([head, others.clamp(min=torch.finfo(head.dtype).tiny).log()], dim=-1)
