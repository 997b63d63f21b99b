"""Decode steps recorded once and replayed, so that a token costs one launch instead of some hundreds.

Launching its kernels takes a small model longer than their arithmetic: about 14 kernels for each layer and token. A
CUDA graph launches them all at once, but repeats the same kernels on the same memory. So a step has a graph for each
number of rows and of positions, both rounded up, and reads every value that changes from token to token from a tensor
that keeps its place.

| changes | how a graph sees it |
|---|---|
| tokens, positions, sampling parameters of the rows | tensors of `RowState`, written in place |
| keys and values | buffers of `SlotCache`, written in place |
| weights | parameters, written in place by `apply_weights` |
| version of the weights | a tensor, filled before each step |
| random numbers | a generator that is registered with the graph |
| one of these tensors moves to other memory, as when the cache grows | all graphs are dropped |

While a graph is recorded, nothing else in the process may wait for the whole device or draw random numbers on it, which
a trainer does at any time. So only an engine in a process of its own records.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

Step = Callable[[], Tensor]
Record = Callable[[Step], Step]  # returns a function that repeats the step, which is not run by recording it

BLOCK_POSITIONS = 128  # positions of a graph: a multiple of it, so that a completion of 1,024 tokens needs eight
BLOCK_ROWS = 32  # rows of a graph: a multiple of it, or a smaller power of two
# Steps before Python sees what has finished: it waits for the device once for all of them. A finished row keeps its
# slot for up to three steps more, of some hundreds.
STEPS_AHEAD = 4
MIN_USES = 4  # a step is recorded when it is used that often: recording takes as long as some dozens of steps


def num_rows(used: int, num_slots: int) -> int:
    """Rows of the graph that decodes `used` rows."""
    rounded = -(-used // BLOCK_ROWS) * BLOCK_ROWS if used > BLOCK_ROWS else 1 << (used - 1).bit_length()
    return min(rounded, num_slots)


def cuda_graphs(generator: torch.Generator) -> Callable[[], Record]:
    """Factory of recorders of CUDA graphs, which share their memory, because no two of them run at once.

    Args:
        generator: source of the random numbers that the steps draw.

    Raises:
        ValueError: its device has no CUDA graphs.
    """
    if generator.device.type != "cuda":
        raise ValueError(f"data.engine.cuda_graphs must be False on the device {generator.device.type}, got True")

    def recorder() -> Record:
        return partial(_recorded, generator=generator, pool=torch.cuda.graph_pool_handle())

    return recorder


def _recorded(step: Step, generator: torch.Generator, pool: Any) -> Step:
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    stream = torch.cuda.current_stream(generator.device)
    try:
        # `thread_local`: the thread that receives weights may allocate memory meanwhile
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            result = step()
    except Exception as error:  # the process cannot record again: the engine fails, and another process begins
        raise RuntimeError(
            "a decode step could not be recorded as a CUDA graph: set data.engine.cuda_graphs to false"
        ) from error

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


class DecodeGraphs:
    """Recorded steps by numbers of rows and keys.

    Args:
        recorder: makes a recorder of steps, a new one whenever all graphs are dropped: their memory goes with it.
        memory: lists the tensors of steps that may move to other memory between them.
    """

    def __init__(self, recorder: Callable[[], Record], memory: Callable[[], Iterable[Tensor]]) -> None:
        self._recorder = recorder
        self._memory = memory
        self._record: Record | None = None
        self._steps: dict[Hashable, Step] = {}
        self._num_uses: Counter[Hashable] = Counter()
        self._most_rows = 0
        self._places: tuple[Hashable, ...] = ()

    def run(self, step: Step, rows: int, key: Hashable) -> Tensor:
        """The result of a step, valid until the next one.

        Args:
            step: work on the device that waits for nothing and copies nothing from the CPU.
            rows: number of rows.
            key: what else distinguishes the step, apart from the contents of tensors.
        """
        if rows > self._most_rows:  # memory of smaller graphs would not serve it: the largest comes first
            self._drop()
            self._most_rows = rows
        self._drop_if_moved()
        key = (rows, key)
        self._num_uses[key] += 1
        if self._num_uses[key] < MIN_USES:
            result = step()  # libraries allocate their workspaces on first use, which cannot be recorded
            self._drop_if_moved()
            return result
        if key not in self._steps:
            self._record = self._record or self._recorder()
            self._steps[key] = self._record(step)
        return self._steps[key]()

    def _drop(self) -> None:
        self._steps.clear()
        self._num_uses.clear()
        self._record = None

    def _drop_if_moved(self) -> None:
        """Drops all graphs if a tensor has moved: its old memory may be another's now.

        Another thread has other library handles, so it begins anew, too.
        """
        places = (threading.get_ident(), *((tensor.data_ptr(), tensor.shape) for tensor in self._memory()))
        if places != self._places:
            self._drop()
            self._places = places
