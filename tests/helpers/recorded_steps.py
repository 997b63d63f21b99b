"""CUDA graphs as they behave, without a GPU: a step is recorded as its operations on tensors, and replayed on them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_async_rl.engines.embedded.decode_graphs import Step

# Waiting for the device, and copies from the CPU of what Python has computed: neither can be recorded.
FORBIDDEN = ("_local_scalar_dense", "lift_fresh", "nonzero", "masked_select", "item")


class _Recording(TorchDispatchMode):
    """Notes every operation, and what puts back all that it has written."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self.undo: list[Callable[[], object]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in FORBIDDEN:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        for argument in func._schema.arguments:
            given = named.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write and given is not None:
                self.undo.append(partial(given.copy_, given.clone()))
            elif isinstance(given, torch.Generator):
                self.undo.append(partial(given.set_state, given.get_state()))
        results = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, _tensors(results)))
        return results


def _tensors(results: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]


class RecordedSteps:
    """In place of `cuda_graphs`: a recorded step has not run, and its replay repeats operations, not Python.

    Attributes:
        num_recorded: steps recorded so far.
        num_replayed: replays so far.
    """

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replayed = 0

    def __call__(self, step: Step) -> Step:
        recording = _Recording()
        with recording:
            result = step()
        for put_back in reversed(recording.undo):
            put_back()
        self.num_recorded += 1

        def replay() -> torch.Tensor:
            self.num_replayed += 1
            for func, args, kwargs, outputs in recording.calls:
                for old, new in zip(outputs, _tensors(func(*args, **kwargs)), strict=True):
                    if old.data_ptr() != new.data_ptr():  # otherwise a view of what was there, or written in place
                        old.copy_(new)
            return result

        return replay
