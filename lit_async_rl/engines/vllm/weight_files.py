"""Folders of safetensors files with a policy's weights, whole or what an update changes.

An update names the weights that it changes and what they are then (`BASE`, `ID` in the metadata of its files), so that
it is never applied to others. Folders without these names hold all weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lit_async_rl.engines.vllm.weight_deltas import KeptWeights
from lit_async_rl.engines.weight_folders import PREFIX

BASE, ID = "lit_async_rl.base", "lit_async_rl.id"


def write_folder(folder: Path, shards: Iterable[Iterable[tuple[str, Tensor]]], base: str = "", own_id: str = "") -> int:
    """Writes a file for each shard, and one if there are none; returns their bytes.

    Raises:
        OSError: a file cannot be written.
    """
    metadata = {BASE: base, ID: own_id} if own_id else None
    num_bytes = number = 0
    for shard in shards:
        file = folder / f"{number:05}.safetensors"
        save_file(dict(shard), file, metadata)
        num_bytes, number = num_bytes + file.stat().st_size, number + 1
    if not number and own_id:  # nothing has changed, which is to be said, too
        save_file({}, folder / "00000.safetensors", metadata)
    return num_bytes


def read_folder(folder: str) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every tensor in the safetensors files of a folder; reads data only, no code.

    The client of a server chooses the folder. It must have been created by a trainer and hold regular files, no links
    or pipes, so that a client cannot have other models on the server's disk read.

    Raises:
        PermissionError: the folder was not created by a trainer.
        FileNotFoundError: it holds no safetensors files.
    """
    if not Path(folder).name.startswith(PREFIX) or Path(folder).is_symlink():
        raise PermissionError(f"{folder!r} was not created by a trainer: its name must begin with {PREFIX}")
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {folder!r}: can this machine see the trainer's folder?")
    for file in files:
        if file.is_symlink() or not file.is_file():
            raise PermissionError(f"{str(file)!r} is a link or a device, not a file of a trainer")
        with safe_open(file, framework="pt") as tensors:
            for name in sorted(tensors.keys()):  # an index comes before its values
                yield name, tensors.get_tensor(name)


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


def read_metadata(folder: str) -> dict[str, str]:
    """Metadata of the first file; empty if there is none. Whether the files may be read is up to `read_folder`."""
    file = next(iter(sorted(Path(folder).glob("*.safetensors"))), None)
    if file is None or file.is_symlink() or not file.is_file() or not Path(folder).name.startswith(PREFIX):
        return {}
    with safe_open(file, framework="pt") as tensors:
        return tensors.metadata() or {}
