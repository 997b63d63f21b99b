"""Scatters the micro-batches of a step from rank 0: flat tensors with a JSON header (safetensors), no pickle.

Everything here runs in the main thread, over a gloo group, in the same order on all ranks, as collectives must. Rank 0
first broadcasts the kind of message (a step, a reload of weights, a probe, or the end of the run) and the size of each
rank's share, then scatters the shares.
"""

from __future__ import annotations

import itertools
import json
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException
from safetensors.torch import load, save
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

from lit_async_rl.distributed.liveness import Progress, RankWatch, watch_hooks
from lit_async_rl.distributed.ranks import cpu_group, data_parallel
from lit_async_rl.errors import InvariantError, RankError
from lit_async_rl.types import RolloutBatch
from lit_async_rl.utils.lightning_types import AnyTrainer

RELOAD: Final = "reload"  # instead of a step: a restarted engine needs the weights, which all ranks gather
PROBE: Final = "probe"  # instead of a step: the engine needs log-probabilities, which all ranks compute
Exchanged = list[RolloutBatch] | Literal["reload", "probe"] | None  # None ends the run
_STEP = 1
_WITHOUT_STEP: Final[dict[int, Literal["reload", "probe"] | None]] = {2: None, 3: RELOAD, 4: PROBE}
_NON_TENSORS = "others"  # key of the fields that are not tensors, as JSON


def pack(batches: Sequence[RolloutBatch]) -> bytes:
    """Serializes batches without pickle."""
    fields = {f"{n}.{name}": value for n, batch in enumerate(batches) for name, value in vars(batch).items()}
    tensors = {name: value.contiguous() for name, value in fields.items() if isinstance(value, Tensor)}
    others = json.dumps({name: value for name, value in fields.items() if name not in tensors})
    return save(tensors | {_NON_TENSORS: torch.frombuffer(bytearray(others.encode()), dtype=torch.uint8)})


def unpack(data: bytes) -> list[RolloutBatch]:
    """Inverse of `pack`: deserialized batches."""
    fields: dict[str, Any] = load(data)
    fields |= json.loads(bytes(fields.pop(_NON_TENSORS).tolist()))
    batches: dict[int, dict[str, Any]] = {}
    for key, value in fields.items():
        number, _, name = key.partition(".")
        batches.setdefault(int(number), {})[name] = value
    return [RolloutBatch(**batches[n]) for n in range(len(batches))]


class OneProcess:
    """Replaces `StepScatter` in a run of a single process."""

    num_places = 1
    leads = True
    is_stop_requested = False  # `is_asked_to_stop` is polled instead

    def __init__(self) -> None:
        self.progress = Progress(math.inf)  # never read

    def making_step(self) -> AbstractContextManager[None]:
        """Does nothing: no other rank waits for the step."""
        return nullcontext()

    def exchange(self, made: Exchanged) -> Exchanged:
        return made

    def is_asked_to_stop(self, trainer: AnyTrainer) -> bool:
        """Whether Lightning has received SIGTERM."""
        return bool(trainer.received_sigterm)

    def take_over_sigterm(self) -> None:
        """Does nothing: Lightning's handler suffices."""

    def any(self, value: bool) -> bool:
        return value

    def share(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def fail(self, error: BaseException) -> None:
        """Does nothing: there are no other ranks."""

    def close(self) -> None:
        """Does nothing."""


class StepScatter:
    """Hands each rank its micro-batches. Constructed by all ranks together.

    Args:
        place: data-parallel position of this rank; tensor-parallel ranks share one.
        num_places: number of these positions.
        watch: detects failed and hanging ranks, which bounds all waits here.
    """

    def __init__(self, place: int, num_places: int, watch: RankWatch) -> None:
        group = cpu_group()
        if group is None:
            raise InvariantError("ranks without a process group")
        self._group = group
        self.watch = watch
        self.progress = watch.progress
        self._rank = dist.get_rank()
        self._num_ranks = dist.get_world_size()
        self.num_places = num_places
        places = [torch.zeros(1, dtype=torch.long) for _ in range(self._num_ranks)]
        dist.all_gather(places, torch.tensor([place]), group=group)
        self._places = [int(p) for p in places]

    @property
    def leads(self) -> bool:
        """Whether this rank owns engine and producer, and sends the others their data."""
        return self._rank == 0

    @property
    def is_stop_requested(self) -> bool:
        """Whether a rank has requested the end of the run."""
        return self.watch.is_stop_requested

    @contextmanager
    def making_step(self) -> Iterator[None]:
        """Context in which rank 0 collects a step while others wait; an error in it ends all ranks."""
        self.progress.align("waiting for rollouts", math.inf)  # the producer has its own timeout
        try:
            yield
        except BaseException as error:
            self.watch.fail(error)  # before callbacks handle the exception, which may use collectives
            raise

    def exchange(self, made: Exchanged) -> Exchanged:
        """This rank's micro-batches, or what all ranks do before them; None ends the run on all ranks. A collective.

        Args:
            made: the step's micro-batches on rank 0, concurrent ones next to each other; ignored on other ranks.

        Raises:
            RankError: another rank failed.
            StalledError: another rank did not arrive.
        """
        if not self.leads:
            self.progress.reach("receiving the step")
            return self._receive()
        self.progress.reach("handing out the step")
        self._send(made)
        return made[self._places[0] :: self.num_places] if isinstance(made, list) else made

    def is_asked_to_stop(self, trainer: AnyTrainer) -> bool:
        """Whether any rank requested the end of the run; polled by rank 0 while it waits for rollouts.

        Raises:
            RankError: another rank failed.
        """
        self.watch.check()
        return self.watch.is_stop_requested

    def take_over_sigterm(self) -> None:
        """See `RankWatch`."""
        self.watch.take_over_sigterm()

    def fail(self, error: BaseException) -> None:
        """Reports an error of this rank to the others, except a stop requested on all of them."""
        if not isinstance(error, SIGTERMException):
            self.watch.fail(error)

    def close(self) -> None:
        """Marks this rank as finished. Safe to call twice."""
        self.watch.close()

    def any(self, value: bool) -> bool:
        """Whether `value` is true on any rank. A collective."""
        flag = torch.tensor([value], dtype=torch.uint8)
        self._wait(dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True))
        return bool(flag)

    def share(self, values: Sequence[float]) -> list[float]:
        """The values of the rank that leads, on all ranks. A collective."""
        length = int(self._broadcast(torch.tensor([len(values)])))
        if not length:
            return []
        given = values if self.leads else [0.0] * length
        return [float(value) for value in self._broadcast(torch.tensor(given, dtype=torch.float64))]

    def _send(self, batches: Exchanged) -> None:
        if not isinstance(batches, list):
            kind = next(number for number, one in _WITHOUT_STEP.items() if one == batches)
            self._broadcast(torch.tensor([kind, *[0] * self._num_ranks]))
            return
        if len(batches) % self.num_places:
            raise InvariantError(f"{len(batches)} micro-batches for {self.num_places} ranks")
        shares = [pack(batches[place :: self.num_places]) for place in range(self.num_places)]
        lengths = [len(shares[place]) for place in self._places]
        self._broadcast(torch.tensor([_STEP, *lengths]))
        padded = [torch.frombuffer(bytearray(share.ljust(max(lengths))), dtype=torch.uint8) for share in shares]
        self._scatter(max(lengths), [padded[place] for place in self._places])

    def _receive(self) -> Exchanged:
        header = self._broadcast(torch.zeros(1 + self._num_ranks, dtype=torch.long)).tolist()
        if header[0] != _STEP:
            return _WITHOUT_STEP[header[0]]
        data = self._scatter(max(header[1:]), None)
        return unpack(data[: header[1 + self._rank]].numpy().tobytes())

    def _broadcast(self, header: Tensor) -> Tensor:
        self._wait(dist.broadcast(header, 0, group=self._group, async_op=True))
        return header

    def _scatter(self, length: int, shares: list[Tensor] | None) -> Tensor:
        mine = torch.empty(length, dtype=torch.uint8)
        self._wait(dist.scatter(mine, shares, src=0, group=self._group, async_op=True))
        return mine

    def _wait(self, work: Any) -> None:
        """Waits for a collective by polling, because a wait inside torch cannot be interrupted. Bounded by `watch`."""
        began = time.monotonic()
        while not work.is_completed():
            self.watch.check()
            time.sleep(0.001 if time.monotonic() - began < 0.1 else 0.02)
        try:
            work.wait()
        except RuntimeError as error:  # a broken connection: the watch thread may have received the reason
            self.watch.explain(error)


def connect(
    trainer: AnyTrainer, stall_s: float, silence_s: float, on_abandon: Callable[[], None]
) -> StepScatter | OneProcess:
    """Connects the ranks of a run, perhaps a single one; afterwards the failure of one ends all. A collective.

    `silence_s` is `timeout_s` of `RankWatch`; for the other arguments see there.
    """
    if trainer.world_size == 1:
        return OneProcess()
    watch = RankWatch(silence_s, stall_s, on_abandon)
    num_places, place = data_parallel(trainer)
    ranks = StepScatter(place, num_places, watch)
    watch_hooks(trainer, watch.progress, ranks.fail)
    watch.start()
    return ranks


# -- Rendezvous of the ranks at the start, before `lit_async_rl.distributed.liveness` can watch them ------------------


MAX_NAMED_SETTINGS = 3  # in a message about settings that differ
START_TIMEOUT_SETTING = "data.limits.start_timeout_s"
_num_rendezvous = itertools.count()  # of this process


def limit_rendezvous(trainer: AnyTrainer, limit_s: float, settings: Mapping[str, str] | None = None) -> None:
    """Limits the wait for ranks that do not start (killed, or machine lost), and compares settings.

    torch would wait for the strategy's `timeout`, 30 minutes by default, which stays that of collectives. An existing
    process group is checked at once, and used.

    Args:
        trainer: that has not run yet.
        limit_s: longest time from the first rank's arrival to the last one's, in seconds.
        settings: values by name that must be the same on all ranks.

    Raises:
        ValueError: an existing process group has other ranks than the Trainer, cannot move its tensors, or its ranks
            have different settings.
        RankError: a rank of an existing process group does not arrive.
    """
    strategy: Any = trainer.strategy
    if trainer.world_size == 1 or not hasattr(strategy, "_timeout"):
        return
    if dist.is_initialized():
        _check_group(trainer)
        _wait_for_all_ranks(limit_s, {"of the run": "begins", **(settings or {})})
    set_up = strategy.setup_environment

    def set_up_in_time() -> None:
        if not dist.is_initialized():
            _connect_in_time(trainer, set_up, limit_s)
        else:
            set_up()
        _wait_for_all_ranks(limit_s, {"of the Trainer, what it does": str(trainer.state.fn), **(settings or {})})

    strategy.setup_environment = set_up_in_time


def _connect_in_time(trainer: AnyTrainer, set_up: Any, limit_s: float) -> None:
    strategy: Any = trainer.strategy
    timeout = strategy._timeout
    strategy._timeout = timedelta(seconds=limit_s)
    try:
        set_up()
    except RuntimeError as error:
        if strategy.launcher is not None:  # the ranks it started would otherwise wait for this one
            strategy.launcher.kill(signal.SIGTERM)
        problem = str(error).partition("\n")[0]
        raise RankError(
            f"the {trainer.world_size} ranks did not all connect within {START_TIMEOUT_SETTING}={limit_s:g}. Was a "
            f"rank killed? Is MASTER_ADDR:MASTER_PORT unreachable, or used by another program? ({problem})"
        ) from error
    finally:
        strategy._timeout = timeout
    _set_pg_timeout(timeout or dist.default_pg_timeout)


def _check_group(trainer: AnyTrainer) -> None:
    """Checks that an existing process group fits the trainer.

    Raises:
        ValueError: it does not; names the difference.
    """
    remedy = "call torch.distributed.destroy_process_group() first, and the run makes its own process group"
    there = (dist.get_rank(), dist.get_world_size())
    here = (trainer.global_rank, trainer.world_size)
    if there != here:
        raise ValueError(
            f"this process is rank {there[0]} of {there[1]} in the existing process group, but "
            f"trainer.devices and trainer.num_nodes make it rank {here[0]} of {here[1]}: change these two settings, or "
            f"{remedy}"
        )
    kind = trainer.strategy.root_device.type  # type: ignore[union-attr]
    kinds = {device.type for device in dist.group.WORLD._device_types}  # type: ignore[union-attr]
    if kind not in kinds:
        raise ValueError(
            f"trainer.accelerator: the existing process group ({dist.get_backend_config()}) handles only "
            f"tensors on {sorted(kinds)}, but the Trainer computes on {kind!r}; {remedy}"
        )


def _wait_for_all_ranks(limit_s: float, settings: Mapping[str, str]) -> None:
    """Waits for all ranks and compares their settings, in the store of the process group.

    The store works with any backend, and a rank that does not arrive leaves no collective pending.

    Raises:
        RankError: a rank does not arrive.
        ValueError: a rank has other settings.
    """
    default: Any = dist.distributed_c10d._get_default_store()
    store: Any = dist.PrefixStore(f"lit_async_rl/meeting/{next(_num_rendezvous)}", default.clone())
    rank = dist.get_rank()
    num_ranks = dist.get_world_size()
    store.set(str(rank), json.dumps(settings))
    ends_at = time.monotonic() + limit_s
    _wait_for(store, "", ends_at, limit_s=limit_s)
    settings_of = [json.loads(store.get(str(other))) for other in range(num_ranks)]
    store.set(f"{rank} has read", "")
    # before any rank raises: rank 0 may hold the store, and the others must have read it
    _wait_for(store, " has read", ends_at, limit_s=limit_s)
    for other in range(num_ranks):
        _check_same(rank, settings, other, theirs=settings_of[other])


def _wait_for(store: Any, suffix: str, ends_at: float, limit_s: float) -> None:
    # Not a `Wait`: torch's store waits by itself, and its error says which key is missing.
    for other in range(dist.get_world_size()):
        try:
            store.wait([f"{other}{suffix}"], timedelta(seconds=max(0.1, ends_at - time.monotonic())))
        except RuntimeError as error:
            problem = str(error).partition("\n")[0]
            raise RankError(
                f"rank {other} did not join the other ranks within {START_TIMEOUT_SETTING}={limit_s:g}: was it killed, "
                f"did it fail, or is it running something different from rank {dist.get_rank()}? ({problem})"
            ) from error


def _check_same(rank: int, own: Mapping[str, str], other: int, theirs: Mapping[str, str]) -> None:
    """Checks that settings are equal. Raises on both ranks alike, so that neither waits for the other."""
    names = [name for name in dict.fromkeys([*own, *theirs]) if own.get(name) != theirs.get(name)]
    if not names:
        return
    lower, upper = sorted(((rank, own), (other, theirs)), key=lambda one: one[0])
    shown = "; ".join(
        f"{name} is {lower[1].get(name)} on rank {lower[0]} and {upper[1].get(name)} on rank {upper[0]}"
        for name in names[:MAX_NAMED_SETTINGS]
    )
    more = f", and {len(names) - MAX_NAMED_SETTINGS} more" if len(names) > MAX_NAMED_SETTINGS else ""
    raise ValueError(f"all ranks must have the same settings: {shown}{more}")
