"""Weights on their way to another process: read in chunks, written to a folder of safetensors files and read there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lit_async_rl.engines.weight_folders import PREFIX


def chunks(
    weights: Iterable[tuple[str, Tensor]], max_bytes: int, device: str, dtype: torch.dtype | None
) -> Iterator[list[tuple[str, Tensor]]]:
    """Consecutive tensors of together at most `max_bytes`, or a single larger one.

    Each is copied, because a gathered shard is valid only until the next one is requested: to `device` and, if it is
    floating point, to `dtype`.
    """
    chunk: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if chunk and size + tensor.nbytes > max_bytes:
            yield chunk
            chunk, size = [], 0
        kept = dtype if tensor.is_floating_point() else None
        chunk.append((name, tensor.detach().to(device, kept, copy=True).contiguous()))
        size += tensor.nbytes
    if chunk:
        yield chunk


def write_folder(
    folder: Path, shards: Iterable[Iterable[tuple[str, Tensor]]], metadata: Mapping[str, str] | None = None
) -> int:
    """Writes a file for each shard, and one with the metadata alone if there are none; returns their bytes.

    Raises:
        OSError: a file cannot be written.
    """
    num_bytes = number = 0
    for shard in shards:
        num_bytes += _write(folder, number, dict(shard), metadata)
        number += 1
    if not number and metadata is not None:  # nothing has changed, which is to be said, too
        num_bytes = _write(folder, 0, {}, metadata)
    return num_bytes


def _write(folder: Path, number: int, tensors: dict[str, Tensor], metadata: Mapping[str, str] | None) -> int:
    file = folder / f"{number:05}.safetensors"
    save_file(tensors, file, None if metadata is None else dict(metadata))
    return file.stat().st_size


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


def read_metadata(folder: str) -> dict[str, str]:
    """Metadata of the first file; empty if there is none. Whether the files may be read is up to `read_folder`."""
    file = next(iter(sorted(Path(folder).glob("*.safetensors"))), None)
    if file is None or file.is_symlink() or not file.is_file() or not Path(folder).name.startswith(PREFIX):
        return {}
    with safe_open(file, framework="pt") as tensors:
        return tensors.metadata() or {}
