"""Lossless encoding of weight changes: a copy of the last weights on both sides, and only the changes between them.

After an update with a small learning rate most weights round to the same bfloat16 numbers; only the others are sent (as
in PULSE, Miahi and Belilovsky 2026, arXiv:2602.03839). Each tensor has the smallest of these encodings:

| encoding | entries of the file | best if |
|---|---|---|
| none | | no element changed |
| index | `index:NAME` (int32, of the flat tensor), `value:NAME` | few elements changed |
| mask | `mask:NAME` (a bit for each element), `value:NAME` | more elements changed |
| full | `NAME` | most elements changed, or the tensor is new |

Low-rank adapters are separate tensors, `LAYER.lora_A` and `LAYER.lora_B`, beside frozen weights that never change;
`merged` adds their product when a layer is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lit_async_rl.engines.weight_files import read_folder, read_metadata
from lit_async_rl.models.weights import LORA_A, LORA_B

ADAPTER = (LORA_A, LORA_B)
INDEX = "index:"
MASK = "mask:"
VALUE = "value:"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightStore:
    """Copy of the last sent or received weights, by name."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def encode(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Entries of a file that turn the stored tensor into `tensor`, which replaces it."""
        stored = self.tensors.get(name)
        if stored is None or stored.shape != tensor.shape or stored.dtype != tensor.dtype:
            self.tensors[name] = tensor.clone()
            return {name: tensor}
        changed = _bits(stored) != _bits(tensor)
        num_changed = int(changed.sum())
        if not num_changed:
            return {}
        stored.copy_(tensor)
        value_bytes = num_changed * tensor.element_size()
        sizes = {
            INDEX: 4 * num_changed + value_bytes if tensor.numel() < 2**31 else float("inf"),
            MASK: -(-tensor.numel() // 8) + value_bytes,
            "": tensor.nbytes,
        }
        kind = min(sizes, key=sizes.__getitem__)
        if not kind:
            return {name: tensor}
        is_changed = changed.flatten()
        if kind == INDEX:
            index = is_changed.nonzero()[:, 0]
            return {INDEX + name: index.int(), VALUE + name: tensor.flatten()[index]}
        mask = torch.from_numpy(np.packbits(is_changed.numpy()))
        return {MASK + name: mask, VALUE + name: tensor.flatten()[is_changed]}

    def decode(self, entries: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Applies the entries of a file; returns the names of the tensors that changed.

        Raises:
            KeyError: an entry changes a tensor that was never received.
        """
        positions: dict[str, tuple[str, Tensor]] = {}  # by name; entries come before the values at them
        changed = set()
        for key, tensor in entries:
            kind, _, name = key.rpartition(":")
            changed.add(name)
            if kind == "":
                self.tensors[name] = tensor.clone()
            elif kind + ":" == VALUE:
                apply_change(self.tensors[name].view(-1), *positions.pop(name), values=tensor)
            else:
                positions[name] = (kind + ":", tensor)
        return changed

    def merged(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of these weights, with adapters merged."""
        for name in names:
            if name.endswith(ADAPTER):
                continue
            tensor = self.tensors[name]
            layer = name.removesuffix(".weight")
            down = self.tensors.get(layer + LORA_A)
            up = self.tensors.get(layer + LORA_B)
            # in float32: the product is small against the weight, and would lose digits in bfloat16
            if down is not None and up is not None and name.endswith(".weight"):
                tensor = (tensor.float() + up.float() @ down.float()).to(tensor.dtype)
            yield name, tensor

    def needed_for(self, changed: Iterable[str]) -> list[str]:
        """Names of all weights in the vLLM layers that contain one of these: vLLM fuses weights, such as q, k and v."""
        blocks = {_block(name) for name in changed}
        return [name for name in self.tensors if _block(name) in blocks]


def apply_change(flat: Tensor, kind: str, places: Tensor, values: Tensor) -> None:
    """Writes values into a flat tensor.

    Args:
        flat: to change.
        kind: of the places, `INDEX` or `MASK`.
        places: int32 or its bytes, or bits.
        values: at these places.
    """
    if kind == INDEX:
        flat[places.view(torch.int32).long()] = values
    else:
        flat[torch.from_numpy(np.unpackbits(places.numpy(), count=flat.numel())).bool()] = values


def _bits(tensor: Tensor) -> Tensor:
    """Integers with the same bits, so that equal NaNs compare equal."""
    return tensor.view(_BITS[tensor.element_size()]) if tensor.is_floating_point() else tensor


def _block(name: str) -> str:
    """Module that contains the layer of a weight; all experts of a layer belong to one module."""
    for suffix in ADAPTER:
        name = name.replace(suffix, ".weight")
    before, experts, _ = name.partition(".experts.")
    return before + experts if experts else name.rsplit(".", 2)[0]


# -- Weights that a worker receives in files: all weights, or the changes of an update --------------------------------
# The metadata of an update name the weights it applies to (`BASE`) and the result (`ID`), so that it is never applied
# to other weights. Folders without this metadata contain all weights.


BASE = "lit_async_rl.base"
ID = "lit_async_rl.id"


@dataclass(frozen=True)
class LoadedWeights:
    """Weights that a worker has loaded.

    Attributes:
        name: their `ID`; empty if no update can apply to them.
        store: copy of the weights.
    """

    name: str = ""
    store: WeightStore = field(default_factory=WeightStore)


class IncomingWeights:
    """Weights in a folder, for a model with `loaded` weights.

    Attributes:
        is_update: whether the folder contains only changes.

    Raises:
        RuntimeError: the folder is an update of other weights.
    """

    def __init__(self, folder: str, loaded: LoadedWeights) -> None:
        self.folder = folder
        metadata = read_metadata(folder)
        base = metadata.get(BASE, "")
        if base and base != loaded.name:
            raise RuntimeError(f"has weights {loaded.name!r}, and {folder} updates {base!r}")
        self.is_update = bool(base)
        self._name = metadata.get(ID, "")
        self._store = loaded.store if base else WeightStore()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of the weights to load."""
        if not self._name:
            return read_folder(self.folder)
        changed = self._store.decode(read_folder(self.folder))
        return self._store.merged(self._store.needed_for(changed))

    def loaded_weights(self) -> LoadedWeights:
        """Weights of the model once these are loaded."""
        return LoadedWeights(self._name, self._store) if self._name else LoadedWeights()
