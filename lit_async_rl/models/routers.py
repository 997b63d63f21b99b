"""Router replay of mixture-of-experts models: records the chosen experts, and replays recorded choices.

N tokens in one forward pass, n routers (one per sparse layer), k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from lit_async_rl.sampler_records import OWN_CHOICE

# routers of transformers that return (logits [N, E], weights [N, k], experts [N, k]), with weights by softmax over all
# logits
_SUPPORTED = frozenset({"MixtralTopKRouter", "OlmoeTopKRouter", "Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter"})
_replayed: ContextVar[Tensor | None] = ContextVar("replayed experts", default=None)


def routers_of(lm: nn.Module) -> list[nn.Module]:
    """Routers whose choices can be recorded and replayed, in the order of the layers."""
    return [module for module in lm.modules() if type(module).__name__ in _SUPPORTED]


def check_routers(lm: nn.Module) -> None:
    """Checks that a model has routers that can be replayed (`data.sampling.experts`).

    Raises:
        ValueError: it is dense, or of another family.
    """
    if not routers_of(lm):
        families = ", ".join(sorted(name.removesuffix("TopKRouter") for name in _SUPPORTED))
        raise ValueError(
            f"data.sampling.experts=true: the routers of {type(lm).__name__} cannot be recorded and replayed; "
            f"only the routers of {families} can. Leave data.sampling.experts out."
        )


class Replaying(AbstractContextManager[None]):
    """Context in which forward passes of models prepared by `replay_in` use the given experts.

    Router replay (R3, arXiv:2510.11370): the engine's choice of experts with the gate weights of the present router, so
    that the gradient reaches it. Can be entered again once it has ended.

    Args:
        experts: experts of each token of the forward pass, `OWN_CHOICE` where the router chooses; None changes nothing.
    """

    def __init__(self, experts: Int[Tensor, "N n k"] | None) -> None:
        self.experts = experts
        self._tokens: list[Token[Tensor | None]] = []

    def __enter__(self) -> None:
        self._tokens.append(_replayed.set(self.experts))

    def __exit__(self, *exception: object) -> None:
        _replayed.reset(self._tokens.pop())


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """`context_fn` of gradient checkpointing: recomputation replays the same experts."""
    return nullcontext(), Replaying(_replayed.get())


def replay_in(lm: nn.Module) -> None:
    """Makes the routers of a model follow `Replaying`; idempotent."""
    for number, router in enumerate(routers_of(lm)):
        # validation calls this each time, and a second hook would replay twice
        if not any(getattr(hook, "func", None) is _replay for hook in router._forward_hooks.values()):
            router.register_forward_hook(partial(_replay, number))


def record_in(lm: nn.Module, note: Callable[[int, Tensor], None]) -> None:
    """Calls `note(number of the router, experts [N, k])` after every forward pass of a router."""
    for number, router in enumerate(routers_of(lm)):
        router.register_forward_hook(partial(_note, note, number))


def _note(note: Callable[[int, Tensor], None], number: int, router: nn.Module, args: Any, output: Any) -> None:
    note(number, output[2])


def _replay(number: int, router: Any, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
    replayed = _replayed.get()
    if replayed is None:
        return None
    logits, weights, own = output
    experts = replayed[:, number].to(own.dtype)
    experts = torch.where(experts == OWN_CHOICE, own, experts)
    precise = torch.promote_types(logits.dtype, torch.float32)  # as in the routers of transformers
    chosen = torch.softmax(logits, dim=-1, dtype=precise).gather(-1, experts)
    if getattr(router, "norm_topk_prob", True):  # Mixtral has no such setting, and always normalises
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return logits, chosen.to(weights.dtype), experts
