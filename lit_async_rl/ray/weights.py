"""Weights on their way to the replicas: put into Ray's object store once, read there by all replicas of a node.

The sender keeps a table of all weights, with the place of each in the object store and its checksum. An unchanged
weight keeps its place, so that only the others travel, and a restarted replica reads all of them from the same table. A
node's store receives one copy, however many replicas read it.

With `delta`, bitwise changes follow a weight until they would take more room than the weight itself; a replica that has
the weight reads only the last of them. Nothing is approximated.

After an update a replica reports the checksums of its weights; `find_difference` names the first that differs from what
was sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from lit_async_rl.engines import weight_deltas
from lit_async_rl.engines.base import Probe
from lit_async_rl.engines.weight_deltas import INDEX, MASK, VALUE
from lit_async_rl.errors import EngineError
from lit_async_rl.models.weights import LORA_A, LORA_B, UNCHANGED
from lit_async_rl.ray.entries import ReplicaEntry

BUCKET_BYTES = 2**28


class Place(NamedTuple):
    """Place of a weight, or of a change of it, as plain data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bucket: int
    position: int  # within the bucket; of a change that of its places, before that of its values
    kind: str = ""  # of a change: how its places are written, see `weight_deltas`


@dataclass
class Table:
    """All weights of one version.

    Attributes:
        version: of the policy.
        places: by name, in the policy's order.
        changes: of weights since they were put there, by name, the oldest first.
        sums: checksums of the tensors' bytes, by name.
        buckets: references into the object store, by number: those of places and changes.
    """

    version: int = -1
    places: dict[str, Place] = field(default_factory=dict)
    changes: dict[str, tuple[Place, ...]] = field(default_factory=dict)
    sums: dict[str, int] = field(default_factory=dict)
    buckets: dict[int, Any] = field(default_factory=dict)

    @property
    def contents(self) -> list[Place]:
        """All places: each weight, followed by its changes."""
        return [one for name, place in self.places.items() for one in (place, *self.changes.get(name, ()))]


def find_difference(sent: Mapping[str, int], found: Mapping[str, int]) -> str:
    """Describes the first weight of a replica that differs from what was sent, by checksums; empty if none does."""
    for name, expected in sent.items():
        if name not in found:
            return f"weight {name!r} was not loaded"
        if found[name] != expected:
            return f"weight {name!r} is not the one that was sent: their checksums differ"
    return ""


class WeightStore:
    """The sender: puts weights into the object store, one version after the other.

    Args:
        ray: the module, connected.
        dtype: floating-point weights are sent in it; None sends them as they are.
        bucket_bytes: of one object, at least one weight.
        delta: send changes of weights; keeps a copy of all of them.

    Attributes:
        table: of the newest version.
        num_bytes: put into the object store so far.
    """

    def __init__(
        self, ray: Any, dtype: torch.dtype | None, bucket_bytes: int = BUCKET_BYTES, delta: bool = False
    ) -> None:
        self._ray = ray
        self._dtype = dtype
        self._bucket_bytes = bucket_bytes
        self._num_buckets = 0
        self._kept = weight_deltas.WeightStore() if delta else None
        self._change_bytes: dict[str, int] = {}  # of all changes in the table, by weight
        self.table = Table()
        self.num_bytes = 0

    def publish(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> Table:
        """Puts what has changed into the object store; the table of all weights of this version.

        Raises:
            EngineError: the object store is full; or a weight that was never sent is reported as unchanged.
        """
        old = self.table
        new = Table(version)
        bucket: list[np.ndarray] = []
        size = 0
        for name, tensor in weights:
            if tensor is UNCHANGED:
                if name not in old.places:
                    raise EngineError(f"weight {name!r} is reported as unchanged, but was never sent before")
                self._keep(name, old, new=new)
                continue
            given = tensor
            tensor = _on_cpu(given, self._dtype)
            found = checksum(tensor)
            dtype = str(tensor.dtype).removeprefix("torch.")
            place = Place(name, dtype, tuple(tensor.shape), bucket=0, position=0)
            if old.sums.get(name) == found and old.places[name][1:3] == place[1:3]:
                self._keep(name, old, new=new)
                continue
            kind, parts = self._parts_of(place, tensor)
            num_bytes = sum(part.nbytes for part in parts)
            if bucket and size + num_bytes > self._bucket_bytes:
                self._put(bucket, new)
                bucket = []
                size = 0
            here = place._replace(bucket=self._num_buckets, position=len(bucket), kind=kind)
            if kind:
                self._keep(name, old, new=new)
                new.changes[name] = (*new.changes.get(name, ()), here)
            else:
                new.places[name] = here
            new.sums[name] = found
            # a gathered shard is valid only until the next one is asked for; a live weight until this returns
            lasts = kind or tensor is not given or isinstance(given, nn.Parameter)
            bucket += [as_bytes(part) if lasts else as_bytes(part).copy() for part in parts]
            size += num_bytes
        if bucket:
            self._put(bucket, new)
        self.table = new
        return new

    def _parts_of(self, place: Place, tensor: Tensor) -> tuple[str, list[Tensor]]:
        """Encoding of a changed weight: its kind, and the weight, or positions and values of the changes."""
        name = place.name
        if self._kept is None:
            return "", [tensor]
        entries = self._kept.encode(name, tensor)
        kind = next((kind for kind in (INDEX, MASK) if kind + name in entries), "")
        parts = [entries[kind + name], entries[VALUE + name]] if kind else [tensor]
        num_bytes = self._change_bytes.get(name, 0) + sum(part.nbytes for part in parts)
        if kind and num_bytes <= tensor.nbytes:
            self._change_bytes[name] = num_bytes
            return kind, parts
        self._change_bytes[name] = 0
        return "", [tensor]

    def _keep(self, name: str, old: Table, new: Table) -> None:
        place = old.places[name]
        new.places[name] = place
        new.sums[name] = old.sums[name]
        if changes := old.changes.get(name):
            new.changes[name] = changes
        for one in (place, *old.changes.get(name, ())):
            new.buckets[one.bucket] = old.buckets[one.bucket]

    def _put(self, bucket: list[np.ndarray], table: Table) -> None:
        try:
            table.buckets[self._num_buckets] = self._ray.put(bucket)
        except self._ray.exceptions.RayError as error:
            raise EngineError(
                f"Ray's object store has no room for {sum(part.nbytes for part in bucket) / 2**20:.0f} MiB of weights "
                f"({type(error).__name__}): start Ray with a larger --object-store-memory"
            ) from error
        self.num_bytes += sum(part.nbytes for part in bucket)
        self._num_buckets += 1


def _on_cpu(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    kept = dtype if tensor.is_floating_point() else None
    if tensor.device.type == "cpu" and (kept is None or tensor.dtype == kept) and tensor.is_contiguous():
        return tensor
    return tensor.detach().to("cpu", kept).contiguous()


def as_bytes(tensor: Tensor) -> np.ndarray:
    """Bytes of a contiguous tensor on the CPU, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def checksum(tensor: Tensor) -> int:
    """XXH3 of a tensor's bytes, 64 bits."""
    tensor = tensor.detach().to("cpu").contiguous()
    return xxhash.xxh3_64_intdigest(as_bytes(tensor).data)


# -- The replica's side -----------------------------------------------------------------------------------------------


class GivenWeights:
    """The weights that replicas are given, and a check of those that a replica reports.

    Attributes:
        table: of the newest ones; None before the first.
        ref: of its contents in the object store.
        probe: of these weights, if the trainer has computed one.
        can_probe: whether it ever has.
        version_before: of the previous weights.
    """

    def __init__(self) -> None:
        self.table: Table | None = None
        self.ref: Any = None
        self.probe: Probe | None = None
        self.can_probe = False
        self.version_before = -1
        self._sums: dict[int, dict[str, int]] = {}  # checksums of the versions that replicas may still report

    @property
    def version(self) -> int:
        """Of the newest; -1 before the first."""
        return -1 if self.table is None else self.table.version

    def replace(self, table: Table, ref: Any, probe: Probe | None, *, entries: Iterable[ReplicaEntry]) -> None:
        """Takes newer weights; forgets checksums of versions that no replica among `entries` can report."""
        if table.version != self.version:
            self.version_before = self.version
        self.table = table
        self.ref = ref
        self.probe = probe
        self.can_probe = self.can_probe or probe is not None
        known = [entry.verified if entry.has_proved else entry.sent for entry in entries if entry.sent >= 0]
        oldest = min(known, default=table.version)
        self._sums = {v: sums for v, sums in self._sums.items() if v >= oldest} | {table.version: table.sums}

    def verify(self, entry: ReplicaEntry, version: int, sums: Mapping[str, int]) -> str:
        """Takes the checksums that a replica reports of a version; returns their fault, empty if none is found.

        A version whose sums newer weights have replaced is neither compared nor counted as verified.
        """
        if version > self.version:
            return f"reports weights of version {version}, which were never sent"
        entry.sums |= sums
        sent = self._sums.get(version)
        if sent is None:  # newer ones went out while it loaded these, and are compared as a whole
            return ""
        if problem := find_difference(sent, entry.sums):
            return f"{problem} (version {version})"
        entry.verified = max(entry.verified, version)
        return ""


class WeightReader:
    """Reads the weights of a table, and remembers those that its engine has.

    Args:
        get: reads a bucket by its reference.
        takes_changes: whether the engine accepts `UNCHANGED` for weights that it has.
    """

    def __init__(self, get: Any, takes_changes: bool) -> None:
        self._get = get
        self._takes_changes = takes_changes
        self._has: dict[str, list[Place]] = {}
        self._changed: dict[str, Tensor] = {}  # weights that came with changes, which the next ones apply to

    def stream(
        self, places: Iterable[Place], buckets: Mapping[int, Any], received: dict[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor) of all weights, `UNCHANGED` for those that the engine has already.

        Tensors share the memory of the object store, and must not be written. A layer with adapters comes whole, for
        the engine to add them to.

        Args:
            places: of all weights, in order, each followed by its changes.
            buckets: references by number.
            received: filled with the yielded tensors, by name.
        """
        has = _chains(places)
        opened: dict[int, list[np.ndarray]] = {}

        def read(place: Place, offset: int = 0) -> Tensor:
            if place.bucket not in opened:
                opened[place.bucket] = self._get(buckets[place.bucket])
            return torch.from_numpy(opened[place.bucket][place.position + offset])

        adapted = {name.removesuffix(LORA_A) for name in has if name.endswith(LORA_A)}
        for name, chain in has.items():
            is_adapted = name.removesuffix(".weight") in adapted
            if self._takes_changes and not is_adapted and self._has.get(name) == chain and not is_factor(name):
                yield name, UNCHANGED
                continue
            whole = chain[0]
            if len(chain) == 1:
                self._changed.pop(name, None)
                tensor = read(whole).view(getattr(torch, whole.dtype)).view(whole.shape)
            else:
                known = self._has.get(name, [])
                is_known = name in self._changed and known == chain[: len(known)]
                begin = self._changed[name] if is_known else read(whole).view(getattr(torch, whole.dtype))
                tensor = begin.reshape(-1).clone()  # the checksum of the one before may not be taken yet
                for change in chain[len(known) if is_known else 1 :]:
                    weight_deltas.apply_change(
                        tensor, change.kind, read(change), values=read(change, 1).view(tensor.dtype)
                    )
                tensor = self._changed[name] = tensor.view(whole.shape)
            received[name] = tensor
            yield name, tensor
        self._has = has

    def keep(self, places: Iterable[Place]) -> None:
        """Notes that the engine has a table's weights, which were not read from it."""
        self._has = _chains(places)
        self._changed = {}


def _chains(places: Iterable[Place]) -> dict[str, list[Place]]:
    """Each weight with its changes, by name."""
    chains: dict[str, list[Place]] = {}
    for place in places:
        chains.setdefault(place.name, []).append(place)
    return chains


def is_factor(name: str) -> bool:
    """Whether a weight is a factor of an adapter."""
    return name.endswith((LORA_A, LORA_B))
