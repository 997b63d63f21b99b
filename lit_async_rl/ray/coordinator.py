"""The actor through which the command and the ranks that Ray has placed talk: the job, signals, output, and the end.

It owns the replicas of the ranks' engines, see `ownership.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Stream = Literal["stdout", "stderr"]
Said = tuple[int, Stream, str]  # rank, stream, text
MAX_WAITING = 1 << 20  # characters that wait for the command; what is older is left out


@dataclass(frozen=True)
class Ended:
    """How the process of a rank ended.

    Args:
        rank: of the run.
        attempt: of the ranks' starts, from 0.
        status: exit status; negative is the signal that killed it.
        is_final: whether starting again would not help: it is done, was asked to stop, or made a mistake of its own.
        where: node and process, for messages.
        last_lines: of what it wrote to stderr.
    """

    rank: int
    attempt: int
    status: int
    is_final: bool
    where: str
    last_lines: str


class Coordinator:
    """State of one run, in an actor that the command owns: it outlives the ranks, and ends with the command.

    Args:
        job: list with the reference of what a rank calls; not opened here.
    """

    def __init__(self, job: list[Any]) -> None:
        self._job = job
        self._attempt = -1
        self._orders: list[int] = []
        self._said: list[Said] = []
        self._num_waiting = 0
        self._folder: str | None = None
        self._ended: list[Ended] = []
        self._pids: dict[int, int] = {}
        self._result: Any = None
        self._replicas: dict[str, Any] = {}

    def job(self) -> list[Any]:
        """The reference of what each rank calls."""
        return self._job

    # -- the ranks' engines -------------------------------------------------------------------------------------------

    def replica(self, name: str, made: bytes, options: Mapping[str, Any]) -> Any:
        """The actor of a replica, which is made unless there is one of this name; Ray ends it with this one."""
        if name not in self._replicas:
            import ray

            from lit_async_rl.ray.process import make_actor

            self._replicas[name] = make_actor(ray, made, options)
        return self._replicas[name]

    def replicas(self, prefix: str = "") -> dict[str, Any]:
        """Actors of the replicas whose names begin so."""
        return {name: actor for name, actor in self._replicas.items() if name.startswith(prefix)}

    def end_replicas(self, names: Sequence[str]) -> None:
        """Kills replicas for good."""
        import ray

        for name in names:
            if name in self._replicas:
                ray.kill(self._replicas.pop(name), no_restart=True)

    # -- from the command ---------------------------------------------------------------------------------------------

    def order(self, signal_number: int) -> None:
        """Has every rank receive a signal."""
        self._orders.append(signal_number)

    def take(self) -> tuple[list[Said], list[Ended]]:
        """New output lines and exit records."""
        said = self._said
        self._said = []
        self._num_waiting = 0
        return said, self._ended

    def result(self) -> Any:
        """Return value of rank 0; None before it has returned."""
        return self._result

    def folder(self) -> str | None:
        """Folder of the run's checkpoints; None before training began."""
        return self._folder

    def pids(self) -> dict[int, int]:
        """Processes of the ranks, by rank."""
        return self._pids

    # -- from the ranks -----------------------------------------------------------------------------------------------

    def begin(self) -> tuple[int, str | None, bool]:
        """Called by rank 0 of a new group.

        Returns:
            Number of the attempt, folder of the run's checkpoints, and whether a rank of the attempt before has told
            how it ended.
        """
        self._attempt += 1
        return self._attempt, self._folder, any(ended.attempt == self._attempt - 1 for ended in self._ended)

    def started(self, rank: int, pid: int) -> None:
        """Notes the process of a rank."""
        self._pids[rank] = pid

    def orders(self, num_known: int) -> list[int]:
        """Signals after the first `num_known`."""
        return self._orders[num_known:]

    def say(self, said: list[Said]) -> None:
        """Passes output on."""
        self._said += said
        self._num_waiting += sum(len(text) for _, _, text in said)
        while self._num_waiting > MAX_WAITING and len(self._said) > 1:
            self._num_waiting -= len(self._said.pop(0)[2])

    def end(self, ended: Ended) -> None:
        """Notes the end of a rank's process."""
        self._ended.append(ended)

    def has_final_end(self, attempt: int) -> bool:
        """Whether a rank of this attempt ended for a reason that would come again, so that nothing starts again."""
        return any(ended.is_final and ended.status != 0 for ended in self._ended if ended.attempt == attempt)

    def tell_folder(self, folder: str) -> None:
        """Notes the folder of the run's checkpoints."""
        self._folder = folder

    def give(self, result: Any) -> None:
        """Takes what rank 0 returns: plain data."""
        self._result = result
