"""Changes of a policy's weights as tensors for a file, and the weights kept on both sides to compare with.

After an update with a small learning rate most weights round to the bfloat16 numbers that they were: only the others
need to travel (as in PULSE, Miahi and Belilovsky 2026, arXiv:2602.03839). Each tensor is encoded in the smallest of
these ways:

| encoding | entries of the file | when |
|---|---|---|
| none | | nothing has changed |
| index | `index:NAME` (int32, of the flat tensor), `value:NAME` | few elements have |
| mask | `mask:NAME` (a bit for each element), `value:NAME` | more have |
| whole | `NAME` | most have, or the tensor is new |

Low-rank adapters travel as tensors of their own, `LAYER.lora_A` and `LAYER.lora_B`, while the frozen weights never
change: `merged` adds their product when a layer is loaded.
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


class KeptWeights:
    """A copy of the weights last sent or received, by name."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def encode(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Entries of a file that turn the kept tensor into this one, which is kept from now on."""
        kept = self.tensors.get(name)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            self.tensors[name] = tensor.clone()
            return {name: tensor}
        changed = _bits(kept) != _bits(tensor)
        num_changed = int(changed.sum())
        if not num_changed:
            return {}
        kept.copy_(tensor)
        value_bytes = num_changed * tensor.element_size()
        sizes = {
            INDEX: 4 * num_changed + value_bytes if tensor.numel() < 2**31 else float("inf"),
            MASK: -(-tensor.numel() // 8) + value_bytes,
            "": tensor.nbytes,
        }
        kind = min(sizes, key=sizes.__getitem__)
        if not kind:
            return {name: tensor}
        where = changed.flatten()
        if kind == INDEX:
            index = where.nonzero()[:, 0]
            return {INDEX + name: index.int(), VALUE + name: tensor.flatten()[index]}
        mask = torch.from_numpy(np.packbits(where.numpy()))
        return {MASK + name: mask, VALUE + name: tensor.flatten()[where]}

    def decode(self, entries: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Applies the entries of a file; returns the names of the tensors that changed.

        Raises:
            KeyError: a tensor has changed that was never received.
        """
        places: dict[str, Tensor] = {}
        changed = set()
        for key, tensor in entries:
            kind, _, name = key.rpartition(":")
            changed.add(name)
            if kind == "":
                self.tensors[name] = tensor.clone()
            elif kind + ":" == VALUE:
                kept = self.tensors[name].view(-1)
                kept[places.pop(name)] = tensor
            elif kind + ":" == INDEX:
                places[name] = tensor.long()
            else:
                size = self.tensors[name].numel()
                places[name] = torch.from_numpy(np.unpackbits(tensor.numpy(), count=size)).bool()
        return changed

    def merged(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of these weights, with adapters added to the layers that have some."""
        for name in names:
            if name.endswith(ADAPTER):
                continue
            tensor = self.tensors[name]
            layer = name.removesuffix(".weight")
            down, up = (self.tensors.get(layer + suffix) for suffix in ADAPTER)
            if down is not None and up is not None and name.endswith(".weight"):
                tensor = (tensor.float() + up.float() @ down.float()).to(tensor.dtype)
            yield name, tensor

    def needed_for(self, changed: Iterable[str]) -> list[str]:
        """Names of all weights that vLLM's layers with one of these hold: it fuses neighbours, such as q, k and v."""
        blocks = {_block(name) for name in changed}
        return [name for name in self.tensors if _block(name) in blocks]


def _bits(tensor: Tensor) -> Tensor:
    """Integers of the same bits: equal where the numbers are, NaN included."""
    return tensor.view(_BITS[tensor.element_size()]) if tensor.is_floating_point() else tensor


def _block(name: str) -> str:
    """Module that holds the layer of a weight; all experts of a mixture are one."""
    for suffix in ADAPTER:
        name = name.replace(suffix, ".weight")
    before, experts, _ = name.partition(".experts.")
    return before + experts if experts else name.rsplit(".", 2)[0]


# -- Weights that reach a worker in files: whole, or what an update changes in those that it has ----------------------
# An update names the weights that it changes and what they are then (`BASE`, `ID` in the metadata of its files), so
# that it is never applied to others. Folders without these names hold all weights.


BASE = "lit_async_rl.base"
ID = "lit_async_rl.id"


@dataclass(frozen=True)
class Held:
    """Weights that a worker has loaded, and their name, if updates can build on them."""

    name: str = ""
    kept: KeptWeights = field(default_factory=KeptWeights)


class Incoming:
    """Weights in a folder, for a model that was loaded with `held`.

    Raises:
        RuntimeError: the folder updates other weights.
    """

    def __init__(self, folder: str, held: Held) -> None:
        self.folder = folder
        metadata = read_metadata(folder)
        self._base = metadata.get(BASE, "")
        self._name = metadata.get(ID, "")
        if self._base and self._base != held.name:
            raise RuntimeError(f"has weights {held.name!r}, and {folder} updates {self._base!r}")
        self._kept = held.kept if self._base else KeptWeights()

    @property
    def is_update(self) -> bool:
        """Whether the folder holds only what has changed."""
        return bool(self._base)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of what is to be loaded."""
        if not self._name:
            return read_folder(self.folder)
        changed = self._kept.decode(read_folder(self.folder))
        return self._kept.merged(self._kept.needed_for(changed))

    def held(self) -> Held:
        """Contents of the model once the update is loaded."""
        return Held(self._name, self._kept) if self._name else Held()
