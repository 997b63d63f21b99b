"""Gradients as vectors: global inner products under any sharding.

Supports one device, DDP, FSDP1 (`use_orig_params` or not), FSDP2, hybrid sharding and tensor parallelism. Each rank
holds a piece of the vector; replicated pieces count once.
"""

from __future__ import annotations

import functools
import itertools
import logging
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from operator import is_not
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from jaxtyping import Float, Float64
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lit_async_rl.errors import InvariantError, NonFiniteError
from lit_async_rl.stabilizers.step_lr import (
    check_choice,
    chosen_index,
    is_left_out,
    metric_suffix,
    raw_optimizer,
    tolerate_dropped_gradients,
    unscale_gradients,
)
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer

# -- Random projection of gradients: estimates inner products of gradients without storing them -----------------------
# Count sketch (Charikar, Chen and Farach-Colton 2002) by rows: the vector is cut into rows of m entries; each row is
# multiplied by random signs, rotated by a random number of places, and added. The inner product of two sketches is an
# unbiased estimate of the inner product of the vectors. The estimated cosine has the standard error
# sqrt((1 + c^2) / m) over the random numbers, 0.004 to 0.0055 for m = 65,521, at any model size. m is prime, so that
# the dimensions of a layer do not all fall on the same places.


SKETCH_SIZE = 65_521  # m
NUM_SIGN_OFFSETS = 2**20  # possible first positions of a row's signs in the table of random signs
MAX_ROWS_PER_KERNEL = 8  # on an accelerator: a kernel launch costs more than the memory of 8 rows
SEED = 0  # fixed, so that every rank and every resumed run projects alike


class Sketch:
    """Projects vectors given in pieces; vectors cut into the same pieces get the same signs.

    Args:
        device: device of the vectors.
    """

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator().manual_seed(SEED)
        signs = torch.randint(0, 2, (NUM_SIGN_OFFSETS + SKETCH_SIZE,), generator=self._generator, dtype=torch.int8)
        self._signs = (2 * signs - 1).to(device, torch.float32)
        self._offsets: list[tuple[int, int]] = []  # of each block: first position in `_signs`, and rotation
        self._rows_per_kernel = 1 if device.type == "cpu" else MAX_ROWS_PER_KERNEL

    @torch.no_grad()
    def __call__(self, pieces: Sequence[Tensor]) -> Float[Tensor, " m"]:
        """The sketch of the concatenated pieces."""
        out = self._signs.new_zeros(SKETCH_SIZE)
        block = 0
        for piece in pieces:
            for part in piece.reshape(-1).split(self._rows_per_kernel * SKETCH_SIZE):
                self._add(out, part, *self._offset(block))
                block += 1
        return out

    def _add(self, out: Tensor, part: Tensor, offset: int, rotation: int) -> None:
        num_rows, rest = divmod(len(part), SKETCH_SIZE)
        if num_rows:
            rows = part[: num_rows * SKETCH_SIZE].view(num_rows, SKETCH_SIZE).to(out.dtype)
            signs = self._signs.as_strided((num_rows, SKETCH_SIZE), (1, 1), offset)  # each row one place further on
            signed = rows[0] * signs[0] if num_rows == 1 else (rows * signs).sum(0)
            _add_rotated(out, signed, rotation)
        if rest:
            begin = offset + num_rows
            _add_rotated(out, part[-rest:].to(out.dtype) * self._signs[begin : begin + rest], rotation)

    def _offset(self, block: int) -> tuple[int, int]:
        while block >= len(self._offsets):
            last_offset = NUM_SIGN_OFFSETS - MAX_ROWS_PER_KERNEL
            offsets = torch.randint(0, last_offset, (1024,), generator=self._generator).tolist()
            rotations = torch.randint(0, SKETCH_SIZE, (1024,), generator=self._generator).tolist()
            self._offsets += zip(offsets, rotations, strict=True)
        return self._offsets[block]


def _add_rotated(out: Tensor, values: Tensor, rotation: int) -> None:
    """Adds `values` to `out` from position `rotation` on, wrapping around at the end."""
    first = min(len(values), SKETCH_SIZE - rotation)
    out[rotation : rotation + first].add_(values[:first])
    out[: len(values) - first].add_(values[first:])


Pieces = Sequence[Tensor | None]

# longest dot product in float32: longer ones lose digits, so that their partial sums are added in float64
DOT_CHUNK = 2**18


class GradSpace:
    """Vector space of the gradients of some parameters.

    Built from parameters, not from `.grad`: a rank with an empty shard has no gradient, but takes part in every
    collective. A vector is a list with this rank's piece of each parameter; None is zero.

    Args:
        root: outermost module (`trainer.strategy.model`), which holds the process groups of FSDP1.
        parameters: the parameters, in the optimizer's order.
    """

    def __init__(self, root: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        self.params = list(parameters)
        if not self.params:
            raise ValueError("GradSpace needs at least one parameter")
        fsdp1 = _fsdp1_process_groups(root)
        # parameters that sum over the same process groups share a collective; buckets are in the order of first
        # appearance, which is the same on all ranks, because collectives must be issued in one order
        self._buckets: dict[tuple[dist.ProcessGroup, ...], list[int]] = {}
        for index, param in enumerate(self.params):
            self._buckets.setdefault(_process_groups(param, fsdp1), []).append(index)

    def gradients(self) -> list[Tensor | None]:
        """This rank's pieces of the gradients; writing to them changes the gradients."""
        return [None if p.grad is None else _local(_checked(p.grad, p)) for p in self.params]

    def weights(self) -> list[Tensor]:
        """This rank's pieces of the parameters themselves, detached."""
        return [_local(p.detach()) for p in self.params]

    def joined(self, vector: Pieces) -> list[Tensor | None]:
        """The vector for inner products, with one piece for all that share collectives."""
        found: list[Tensor | None] = [None] * len(self.params)
        for members in self._buckets.values():
            pieces = [piece.reshape(-1) for i in members if (piece := vector[i]) is not None]
            if pieces:
                found[members[0]] = torch.cat(pieces)
        return found

    @torch.no_grad()
    def dots(self, *pairs: tuple[Pieces, Pieces], dtype: torch.dtype = torch.float32) -> Float64[Tensor, " P"]:
        """Global inner products <a, b> of P pairs, on the CPU. A collective: all ranks call.

        Up to `DOT_CHUNK` products are summed in `dtype`; in float32 the fifth digit depends on the processor's order of
        summation.
        """
        sums = self._dots(pairs, dtype)
        if not sums.isfinite().all():  # squares of 1e20 overflow float32 though the vector itself does not
            sums = self._dots(pairs, torch.float64)
        return sums

    def norm(self, vector: Pieces) -> float:
        """Global Euclidean norm. A collective: all ranks call."""
        return self.dots((vector, vector))[0].sqrt().item()

    def sketches(self, vector: Pieces) -> list[Tensor]:
        """Random projections of the vector (see `Sketch`), one for each set of process groups."""
        return [
            projection([piece for i in members if (piece := vector[i]) is not None])
            for projection, members in zip(self._projections, self._buckets.values(), strict=True)
        ]

    @functools.cached_property
    def _projections(self) -> list[Sketch]:
        return [Sketch(_local(self.params[0]).device) for _ in self._buckets]

    def sketch_dot(self, a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
        """Estimate of the global inner product of two vectors from their sketches. A collective: all ranks call."""
        total = 0.0
        for process_groups, x, y in zip(self._buckets, a, b, strict=True):
            part = torch.dot(x, y)
            for process_group in process_groups:
                dist.all_reduce(part, group=process_group)
            total += float(part)
        return total

    @torch.no_grad()
    def scale_(self, vector: Pieces, factor: float) -> None:
        """Multiplies in place; a factor of 1 touches nothing."""
        if factor == 1:
            return
        for mine in vector:
            if mine is not None:
                mine.mul_(factor)

    def drop(self) -> None:
        """Sets the gradients to None, so that no optimizer touches weights, moments or decay."""
        for param in self.params:
            param.grad = None

    def _dots(self, pairs: Sequence[tuple[Pieces, Pieces]], dtype: torch.dtype) -> Tensor:
        device = _local(self.params[0]).device
        wide = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        total = torch.zeros(len(pairs), dtype=wide, device=device)
        for process_groups, members in self._buckets.items():
            part = torch.zeros_like(total)
            for row, (a, b) in enumerate(pairs):
                terms: list[Tensor] = []
                for index in members:
                    x = a[index]
                    y = b[index]
                    if x is not None and y is not None and x.numel():
                        terms += _partial_dots(x, y, min(dtype, wide, key=lambda d: d.itemsize))
                if terms:
                    part[row] = torch.stack(terms).to(wide).sum()
            # every rank takes part, also one without a gradient here, or the others would wait for it for ever;
            # replicas are not in these groups, so that each entry counts once
            for process_group in process_groups:
                dist.all_reduce(part, group=process_group)
            total += part
        return total.cpu().double()


class GradSpaces:
    """Cache of one `GradSpace` per optimizer, rebuilt when its parameters change (by unfreezing, for example)."""

    def __init__(self) -> None:
        # weak keys, not ids: Python reuses the id of an optimizer that is gone
        self._known: WeakKeyDictionary[Optimizer, GradSpace] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type[GradSpaces], tuple[()]]:
        return GradSpaces, ()  # process groups cannot be pickled: a copy starts empty

    def of(self, root: nn.Module, optimizer: Optimizer) -> GradSpace:
        """Gradient space of the optimizer's parameters."""
        known = self._known.get(optimizer)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if known is None or len(known.params) != len(params) or any(map(is_not, known.params, params)):
            known = self._known[optimizer] = GradSpace(root, params)
        return known


def _partial_dots(x: Tensor, y: Tensor, dtype: torch.dtype) -> list[Tensor]:
    chunks = zip(x.reshape(-1).split(DOT_CHUNK), y.reshape(-1).split(DOT_CHUNK), strict=True)
    return [torch.dot(p.to(dtype), q.to(dtype)) for p, q in chunks]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _checked(grad: Tensor, param: nn.Parameter) -> Tensor:
    """The gradient of a parameter, as its optimizer sees it."""
    if grad.is_sparse:
        raise ValueError(
            f"the gradient of a parameter of shape {tuple(param.shape)} is sparse: create its layer with sparse=False"
        )
    if isinstance(grad, DTensor) and isinstance(param, DTensor) and grad.placements != param.placements:
        # such as a pending sum over ranks: the optimizer would reduce it anyway, and a norm taken before is wrong
        param.grad = grad = grad.redistribute(placements=param.placements)
    return grad


def _process_groups(
    param: nn.Parameter, fsdp1: dict[int, tuple[dist.ProcessGroup, ...]]
) -> tuple[dist.ProcessGroup, ...]:
    if isinstance(param, DTensor):
        mesh = param.device_mesh
        placements = param.placements
        return tuple(mesh.get_group(n) for n, p in enumerate(placements) if not p.is_replicate() and mesh.size(n) > 1)
    return fsdp1.get(id(param), ())


def _fsdp1_process_groups(root: nn.Module) -> dict[int, tuple[dist.ProcessGroup, ...]]:
    """Process groups of the shards of FSDP1's parameters, by id: they look like plain tensors."""
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    found: dict[int, tuple[dist.ProcessGroup, ...]] = {}
    for module in root.modules():
        if not isinstance(module, FullyShardedDataParallel) or module._handle is None:
            continue
        if module.process_group is None:
            raise InvariantError("an FSDP module has no process group")
        groups = () if module.sharding_strategy == ShardingStrategy.NO_SHARD else (module.process_group,)
        flat = module._handle.flat_param
        for param in [flat, *(flat._params or [])]:
            found[id(param)] = groups
    return found


# -- Counter of updates dropped for a non-finite gradient, with a limit of consecutive drops --------------------------


log = logging.getLogger(__name__)


class DroppedUpdates:
    """Counts dropped updates, and logs a warning for each.

    Args:
        owner: name of the callback, for messages.
        max_in_a_row: consecutive drops above which `check` raises; None never raises.

    Attributes:
        total: drops so far, including those before a resume.

    Raises:
        ValueError: the limit is negative.
    """

    def __init__(self, owner: str, max_in_a_row: int | None) -> None:
        check_range(owner, "integer >= 0", max_in_a_row=max_in_a_row)
        self.owner = owner
        self.max_in_a_row = max_in_a_row
        self.total = 0
        self._in_a_row: dict[int, int] = {}

    @property
    def num_in_a_row(self) -> int:
        """Consecutive drops, the maximum over optimizers."""
        return max(self._in_a_row.values(), default=0)

    def is_in_a_row(self, index: int) -> bool:
        """Whether the last update of the optimizer at position `index` was dropped."""
        return self._in_a_row.get(index, 0) > 0

    def begin(self) -> None:
        """Resets the consecutive drops, at the start of a run."""
        self._in_a_row = {}

    def note(self, is_dropped: bool, index: int = 0) -> None:
        """Records one update of the optimizer at position `index`; called alike on all ranks."""
        self._in_a_row[index] = self._in_a_row.get(index, 0) + 1 if is_dropped else 0
        if is_dropped:
            self.total += 1
            rank_zero_only(log.warning)(
                f"{self.owner}: the gradient contains NaN or infinity, so this update is dropped (number {self.total}, "
                f"{self.num_in_a_row} in a row, max_in_a_row={self.max_in_a_row}): weights and moments are unchanged"
            )

    def check(self) -> None:
        """Checks the number of consecutive drops, between two steps.

        Raises:
            NonFiniteError: it exceeds `max_in_a_row`.
        """
        if self.max_in_a_row is not None and self.num_in_a_row > self.max_in_a_row:
            raise NonFiniteError(
                f"{self.num_in_a_row} updates in a row had a gradient with NaN or infinity (limit: {self.owner}."
                f"max_in_a_row={self.max_in_a_row}). None of these updates changed the weights. Check "
                "model.learning_rate, the loss and the precision."
            )


def is_dropped_before(trainer: AnyTrainer, callback: pl.Callback, index: int, *, is_counted: bool = False) -> bool:
    """Whether a callback that runs before this one has dropped the present update of the optimizer at `index`.

    Later callbacks see no gradient then, which is as finite as 0.

    Args:
        trainer: with the callbacks, in order.
        callback: the later one.
        index: position of the optimizer.
        is_counted: only by callbacks with a limit of their own on drops, which then holds.
    """
    earlier = itertools.takewhile(lambda one: one is not callback, trainer.callbacks)  # type: ignore[attr-defined]
    droppers = [one for one in earlier if hasattr(one, "has_dropped") and (hasattr(one, "dropped") or not is_counted)]
    return any(one.has_dropped(index) for one in droppers)


# -- Base of callbacks that change the gradients of one optimizer's steps, or of each optimizer's ---------------------


class GradientTreatment(pl.Callback):
    """Changes gradients before the step of the chosen optimizer, or of each one by itself, and logs metrics.

    Attributes:
        optimizer: position, or name of the submodule it trains; None for all.

    Raises:
        ValueError: when training starts, the choice matches no optimizer.
    """

    optimizer: int | str | None

    @abstractmethod
    def apply(self, root: nn.Module, optimizer: Optimizer, index: int = 0) -> dict[str, float]:
        """Changes the gradients between backward and step, in any loop; returns the metrics.

        Args:
            root: outermost module (the FSDP or DDP wrapper, if there is one).
            optimizer: optimizer of the gradients.
            index: position of the optimizer, if there are several.
        """

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        check_choice(trainer, pl_module, self.optimizer, owner=type(self).__name__)
        tolerate_dropped_gradients(trainer)

    def on_before_optimizer_step(self, trainer: AnyTrainer, pl_module: AnyModule, optimizer: Optimizer) -> None:
        index = chosen_index(trainer, pl_module, optimizer, choice=self.optimizer)
        if index is None or is_left_out(trainer, raw_optimizer(optimizer)):
            return
        unscale_gradients(trainer, optimizer)
        suffix = metric_suffix(trainer, self.optimizer, index)
        for name, value in self.apply(trainer.strategy.model or pl_module, optimizer, index).items():
            pl_module.log(name + suffix, value)

    @property
    def state_key(self) -> str:
        """Key of the checkpointed state; distinguishes instances for different optimizers."""
        return self._generate_state_key(optimizer=self.optimizer)
