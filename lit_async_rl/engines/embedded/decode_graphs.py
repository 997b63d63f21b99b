"""Decode steps that are recorded once and replayed, so that a token costs one launch instead of some hundreds.

Launching its kernels takes a small model longer than their arithmetic: about 14 kernels for each layer and token. A
CUDA graph launches them all at once, but it repeats exactly what was recorded: the same kernels on the same memory. So
a step has a graph for each number of rows and of positions, both rounded up, and every value that changes from token to
token is read from a tensor that keeps its place.

| changes | how a graph sees it |
|---|---|
| tokens, positions, sampling parameters of the rows | tensors of `RowState`, written in place |
| keys and values | buffers of `SlotCache`, written in place |
| weights | parameters, written in place by `apply_weights` |
| version of the weights | a tensor, filled before each step |
| random numbers | a generator that is registered with the graph |
| one of these tensors moves to other memory, as when the cache grows | all graphs are dropped |
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

import torch
from torch import Tensor

Step = Callable[[], Tensor]
Record = Callable[[Step], Step]  # returns a function that repeats the step, which is not run by recording it

BLOCK_POSITIONS = 128  # positions of a graph: a multiple of it, so that a completion of 1,024 tokens needs eight
BLOCK_ROWS = 32  # rows of a graph: a multiple of it, or a smaller power of two


def num_rows(used: int, num_slots: int) -> int:
    """Rows of the graph that decodes `used` rows."""
    rounded = -(-used // BLOCK_ROWS) * BLOCK_ROWS if used > BLOCK_ROWS else 1 << (used - 1).bit_length()
    return min(rounded, num_slots)


def cuda_graphs(generator: torch.Generator) -> Record:
    """Records steps as CUDA graphs that share their memory, because no two of them run at once.

    Args:
        generator: source of the random numbers that the steps draw.

    Raises:
        ValueError: its device has no CUDA graphs.
    """
    if generator.device.type != "cuda":
        raise ValueError(f"data.engine.cuda_graphs must be False on the device {generator.device.type}, got True")
    pool = torch.cuda.graph_pool_handle()

    def record(step: Step) -> Step:
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(generator)
        # `thread_local`: the trainer's thread may allocate memory meanwhile, which would end a recording otherwise
        stream = torch.cuda.current_stream(generator.device)
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            result = step()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    return record


class DecodeGraphs:
    """Recorded steps by what they are recorded for.

    Args:
        record: see `cuda_graphs`.
        memory: lists the tensors that steps read and write and that may move to other memory between steps.
    """

    def __init__(self, record: Record, memory: Callable[[], Iterable[Tensor]]) -> None:
        self._record = record
        self._memory = memory
        self._steps: dict[Hashable, Step | None] = {}
        self._places: tuple[Hashable, ...] = ()

    def run(self, step: Step, key: Hashable) -> Tensor:
        """The result of a step, valid until the next one.

        Args:
            step: work on the device that waits for nothing and copies nothing from the CPU.
            key: what distinguishes the step from others, apart from the contents of tensors.
        """
        self._drop_moved()
        if key not in self._steps:
            result = step()  # libraries allocate their workspaces on first use, which cannot be recorded
            self._drop_moved()
            self._steps[key] = None
            return result
        replay = self._steps[key]
        if replay is None:
            replay = self._steps[key] = self._record(step)
        return replay()

    def _drop_moved(self) -> None:
        """Drops all graphs if a tensor has moved: they would read and write memory that may be another's now."""
        places = tuple((tensor.data_ptr(), tensor.shape) for tensor in self._memory())
        if places != self._places:
            self._steps.clear()
            self._places = places
