"""Counts operations that would wait for a GPU: those whose result, size or source is in the CPU's memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "nonzero", "unique")
SIZED = {
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten._local_scalar_dense.default,
}


class DeviceWaits(TorchFunctionMode):
    """Context that counts them by name in `found`.

    Reads are seen as calls (`Tensor.tolist` reaches no operator on a CPU), and operators beneath others by a
    `TorchDispatchMode`: masks as indices, and scalars read in a model's forward pass. `torch.tensor(..., device=...)`
    counts, because it copies from pageable memory; `to_device`, which replaces it, does not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self._operators = _Operators(self.found)

    def __enter__(self) -> DeviceWaits:
        self._operators.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._operators.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in READS or (func is torch.tensor and kwargs.get("device") is not None):
            self.found[name] += 1
            with _silent(self._operators):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


class _Operators(TorchDispatchMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found
        self.is_silent = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_masked = func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default) and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
        )
        if (func in SIZED or is_masked) and not self.is_silent:
            self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


class _silent:
    """Operators beneath a call that was counted already."""

    def __init__(self, operators: _Operators) -> None:
        self._operators = operators

    def __enter__(self) -> None:
        self._operators.is_silent = True

    def __exit__(self, *error: Any) -> None:
        self._operators.is_silent = False
