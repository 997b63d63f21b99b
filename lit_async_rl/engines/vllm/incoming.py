"""Weights that reach a worker in files: whole, or what an update changes in those that it has.

An update names the weights that it changes and what they are then (`BASE`, `ID` in the metadata of its files), so that
it is never applied to others. Folders without these names hold all weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from lit_async_rl.engines.vllm.weight_deltas import KeptWeights
from lit_async_rl.engines.weight_files import read_folder, read_metadata

BASE, ID = "lit_async_rl.base", "lit_async_rl.id"


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
        self._base, self._name = metadata.get(BASE, ""), metadata.get(ID, "")
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
