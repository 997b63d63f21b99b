"""Starts a run's trainer ranks on Ray, shows their output, passes signals on, and returns how they ended.

    command ──starts, signals──▶ actor of a rank ──▶ process of the rank (torchrun's variables)
       ▲                          │     ▲                  │
       └──── output, its end ─────┘     └──── output ──────┘

A placement group holds the actors, packed; after a failure the next start makes a new one. Everything else is as under
torchrun: Lightning connects the ranks, and a new start resumes from a checkpoint, queue included. An autoscaler sees
the group for which there is no room yet.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
import signal
import sys
import sysconfig
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_async_rl.api.cluster import Outcome, Place
from lit_async_rl.errors import RankError, SetupError, StalledError
from lit_async_rl.ray.actors import Resources, first_line, kill_actor, last_line
from lit_async_rl.ray.cluster_settings import ClusterSettings
from lit_async_rl.ray.coordinator import Coordinator
from lit_async_rl.ray.dry_run import connected_with_room
from lit_async_rl.ray.process import stop_actors
from lit_async_rl.ray.runtime import NAMESPACE
from lit_async_rl.ray.supervise import (
    ANSWER_S,
    FINAL_S,
    FINAL_STATUS,
    PAUSE_S,
    RESUME,
    RUN_ID,
    Ended,
    RankActor,
    Said,
    Spot,
    Stream,
    describe_end,
)
from lit_async_rl.runtime.waiting import Wait, announced, clock

HOLD_S = 1.0  # how long a line of another rank waits for the same one of rank 0
DRAIN_S = 120.0  # to save before a node is taken away, where Ray's notice names no time
DRAIN_INTERVAL_S = 2.0  # between two looks for such notices
SILENT_S = 600.0  # without an answer of an actor until it counts as lost; Ray notices a lost node or process earlier
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED = (
    "LIT_ASYNC_RL_",
    "NCCL_",
    "GLOO_",
    "OMP_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
    "HF_HUB_OFFLINE",
    "WANDB_MODE",
)
log = logging.getLogger(__name__)


def launch(cluster: ClusterSettings, job: Callable[[Place], None], *, uses_gpus: bool) -> Outcome:
    """Runs `job` in each of the cluster's trainer ranks, until all have ended.

    Args:
        cluster: where they run.
        job: called in the main thread of each rank; must be importable or picklable, with all that it refers to.
        uses_gpus: whether a rank gets a GPU by default, if the cluster has some.

    Raises:
        SetupError: Ray is not installed, not reachable, reachable by others without a token, or has no room.
        RankError: the ranks failed more often than `cluster.max_failures` (names node, process and last lines), or the
            cluster is gone.
    """
    with connected_with_room(cluster, uses_gpus=uses_gpus) as ray:
        has_gpus = uses_gpus and ray.cluster_resources().get("GPU", 0) > 0
        run = _Run(ray, cluster, cluster.needs_of_rank(has_gpus=has_gpus))
        try:
            with run.coordinated(job), _received_signals() as received:
                return run.until_the_end(received)
        except _EndedAtOnce as end:
            return Outcome(128 + end.number, None, None)
        except ray.exceptions.RayError as error:
            raise RankError(f"the Ray cluster does not answer ({first_line(error)})") from error


class _EndedAtOnce(Exception):
    """A signal came before anything could be saved, or Ctrl-C a second time."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def _received_signals() -> Iterator[list[int]]:
    """Signals that ask for the run's end, in order; they do not end the process. Only the main thread gets any."""
    received: list[int] = []
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                before[number] = signal.signal(number, lambda got, _: received.append(got))
    try:
        yield received
    finally:
        for stop, handler in before.items():
            signal.signal(stop, handler)


class _Run:
    """One run of ranks, as the command sees it; `resources` are those of one rank."""

    def __init__(self, ray: Any, cluster: ClusterSettings, resources: Resources) -> None:
        self._ray = ray
        self._cluster = cluster
        self._resources = resources
        self._name = f"run-{uuid.uuid4().hex[:12]}"
        self._screen = Screen()
        self._num_ranks = cluster.trainer_ranks
        self._received: Sequence[int] = ()

    @contextlib.contextmanager
    def coordinated(self, job: Callable[[Place], None]) -> Iterator[None]:
        """Context with the coordinator; the engines that it owns end with it.

        It is on the command's own node, because the loss of another node must not end the run.
        """
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ray = self._ray
        reference = ray.put(job)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor = ray.remote(num_cpus=0, scheduling_strategy=here)(Coordinator)
        self._coordinator = actor.options(name=self._name, namespace=NAMESPACE).remote([reference])
        try:
            yield
        finally:
            ray.kill(self._coordinator)

    def _ask(self, method: str) -> Any:
        return self._ray.get(getattr(self._coordinator, method).remote(), timeout=ANSWER_S)

    def until_the_end(self, received: Sequence[int]) -> Outcome:
        """Starts the ranks, and again after a failure, and returns when the run is over.

        Args:
            received: signals for the ranks; more are added meanwhile.

        Raises:
            RankError: they failed too often.
            SetupError: they could not be started.
            _EndedAtOnce: by a signal.
        """
        self._received = received
        cause: Ended | None = None  # of the last failure
        limit = f"cluster.max_failures={self._cluster.max_failures}"
        for attempt in itertools.count():
            with self._actors() as actors:
                try:
                    start = self._start(actors, attempt, cause)
                    start.follow()
                    cause = start.cause
                except self._ray.exceptions.RayActorError as error:
                    cause = Ended(None, None, where=last_line(error), last_lines="")
            self._screen.show([], is_last=True)
            if cause is None or 0 <= self._cluster.max_failures <= attempt:
                break
            log.warning(
                "a rank has ended: %s; all ranks start again, because %s allows another start",
                describe_end(cause, has_lines=False),
                limit,
            )
        stop_actors(self._ray, list(self._ask("replicas").values()))
        if cause is not None:
            raise RankError(f"{describe_end(cause)}\n(the last start that {limit} allows)")
        return Outcome(_exit_status(start.ended), self._ask("result"), self._ask("folder"))

    # -- one start of all ranks ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _actors(self) -> Iterator[list[Any]]:
        """Context with an actor for each rank, in a placement group; all end with it, and so do their processes."""
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        needs = self._resources.by_name
        bundle = needs or {"CPU": 0.001}  # Ray has no empty ones
        group = placement_group([bundle] * self._num_ranks, strategy="PACK")
        actors: list[Any] = []
        try:
            with announced("room for the trainer ranks on the Ray cluster"):
                each = ", ".join(f"{name} {amount:g}" for name, amount in needs.items())
                self._await(group.wait, f"with {each} each found no room: others use it, or a node is gone")
            kind = self._ray.remote(RankActor)
            for number in range(self._num_ranks):
                place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
                actors.append(kind.options(**self._resources.options | {"scheduling_strategy": place}).remote())
            yield actors
        finally:
            for actor in actors:
                kill_actor(self._ray, actor, is_for_good=True)
            remove_placement_group(group)

    def _start(self, actors: Sequence[Any], attempt: int, cause: Ended | None) -> Start:
        """Starts the process of each rank, on actors in any order; `cause` is the end that led to it, if any."""
        cwd = os.getcwd()
        folder = self._ask("folder")
        spots = self._answers([actor.spot.remote(cwd, folder) for actor in actors])
        ranks = ranked(spots)
        first = spots[ranks[0].actor]
        if cause is not None:
            missing = f"the beginning: node {first.ip} has no {folder}/last.ckpt" if folder else "the beginning"
            why = ", because a machine or a process of Ray was lost" if cause.status is None else ""
            text = f"the ranks start again, for the {attempt}. time, from {first.checkpoint or missing}{why}\n"
            self._screen.show([(0, "stderr", text)])
        shared = {
            **_variables(),
            "TORCHELASTIC_RUN_ID": self._name,
            RUN_ID: self._name,
            RESUME: first.checkpoint or "",
        }
        starts = [actors[rank.actor].start.remote({**shared, **rank.variables}, cwd, sys.argv) for rank in ranks]
        self._answers(starts)
        placed = [(actors[rank.actor], spots[rank.actor]) for rank in ranks]
        return Start(self._ray, placed, self._received, screen=self._screen)

    def _answers(self, references: Sequence[Any]) -> list[Any]:
        """Answers of actors that Ray may be starting still; errors as in `_await`."""

        def have_come(seconds: float) -> bool:
            ready, _ = self._ray.wait(list(references), num_returns=len(references), timeout=seconds)
            return len(ready) == len(references)

        self._await(have_come, "have not all started")
        return list(self._ray.get(list(references)))

    def _await(self, attempt: Callable[[float], bool], problem: str) -> None:
        """Waits until `attempt`, which waits so many seconds, is true; `problem` is the predicate of the error.

        Raises:
            SetupError: it was not true in time.
            _EndedAtOnce: a signal came meanwhile.
        """
        limit_s = self._cluster.start_timeout_s
        limit = f"cluster.start_timeout_s={limit_s:g}"
        message = f"cluster.trainer_ranks={self._num_ranks} {problem}, after {limit}"
        try:
            Wait(limit_s, message, check=self._end_if_asked).until(attempt)
        except StalledError as error:
            raise SetupError(str(error)) from None

    def _end_if_asked(self) -> None:
        """Raises `_EndedAtOnce` after a signal, while there is nothing to save yet."""
        if self._received:
            raise _EndedAtOnce(self._received[0])


@dataclass(frozen=True)
class Rank:
    """Place of a rank among the others.

    Args:
        actor: number of its actor.
        variables: of torchrun, by which Lightning finds the others, and the visible GPUs.
    """

    actor: int
    variables: dict[str, str]


def ranked(spots: Sequence[Spot]) -> list[Rank]:
    """Numbers the ranks node by node, and within a node by their GPUs.

    Each sees all GPUs of the ranks on its node, of which Lightning chooses one by the local rank, as under torchrun.

    Raises:
        SetupError: no rank can run on a node, or nodes have unequal numbers of them.
    """
    for spot in spots:
        if spot.problem:
            raise SetupError(spot.problem)
    nodes: dict[str, list[int]] = {}
    for number, spot in enumerate(spots):
        nodes.setdefault(spot.node, []).append(number)
    if len({len(numbers) for numbers in nodes.values()}) > 1:
        where = ", ".join(f"{len(numbers)} on the node {spots[numbers[0]].ip}" for numbers in nodes.values())
        raise SetupError(
            f"cluster.trainer_ranks={len(spots)}: Ray has placed the ranks as {where}, but every node must have the "
            "same number of ranks (trainer.devices): set cluster.trainer_resources accordingly"
        )
    ranks: list[Rank] = []
    for node_rank, numbers in enumerate(nodes.values()):
        gpus = sorted({gpu for number in numbers for gpu in spots[number].gpus}, key=_gpu_order)
        numbers.sort(key=lambda number: [_gpu_order(gpu) for gpu in sorted(spots[number].gpus, key=_gpu_order)])
        for local_rank, number in enumerate(numbers):
            variables = {
                "RANK": str(len(ranks)),
                "WORLD_SIZE": str(len(spots)),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(len(numbers)),
                "NODE_RANK": str(node_rank),
                "GROUP_RANK": str(node_rank),  # torchrun's name of the same, which Lightning reads
                "MASTER_ADDR": spots[0].ip,  # the node of rank 0
                "MASTER_PORT": str(spots[0].port),
            }
            ranks.append(Rank(number, variables | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})))
    return ranks


def _gpu_order(gpu: str) -> tuple[int, str]:
    return len(gpu), gpu  # by number; others by name


class Start:
    """One start of all ranks, from their first output to their end.

    Args:
        ray: the module, connected.
        placed: actor and spot of each rank.
        received: see `_Run.until_the_end`.
        screen: for their output.

    Attributes:
        ended: how processes ended, by rank.
    """

    def __init__(
        self, ray: Any, placed: Sequence[tuple[Any, Spot]], received: Sequence[int], *, screen: Screen
    ) -> None:
        self.ended: dict[int, Ended] = {}
        self._ray = ray
        self._placed = placed
        self._received = received
        self._screen = screen
        self._num_passed = 0
        self._failed_at = 0.0
        self._looks_at = 0.0
        self._saves_until: float | None = None  # Unix time: a node is taken away then

    def follow(self) -> None:
        """Returns when all have ended, or all should start again.

        Raises:
            _EndedAtOnce: by a second Ctrl-C.
        """
        calls = dict(self._call(rank) for rank in range(len(self._placed)))
        while calls and not self._is_hopeless():
            self._pass_signals()
            self._look_for_drained_nodes()
            ready, _ = self._ray.wait(list(calls), num_returns=len(calls), timeout=PAUSE_S)
            said: list[Said] = []
            for reference, (rank, asked_at) in list(calls.items()):
                if reference not in ready and clock.now() - asked_at < SILENT_S:
                    continue
                del calls[reference]
                words, ended = self._answer(reference, rank)
                said += words
                if ended is None:
                    calls.update([self._call(rank)])
                else:
                    self.ended[rank] = ended
                    if not self._failed_at and not self._is_final(ended):
                        self._failed_at = clock.now()
            self._screen.show(said)

    @property
    def cause(self) -> Ended | None:
        """The end for which all ranks should start again; None if there is none, or a new start would not help."""
        if any(one.status != 0 and self._is_final(one) for one in self.ended.values()):
            return None
        failed = [one for one in self.ended.values() if not self._is_final(one)]
        # a loss and a signal before what follows from it
        return min(failed, key=lambda one: (one.status is not None, one.status), default=None)

    def _is_final(self, ended: Ended) -> bool:
        """Whether a rank is done, made a mistake of its own, or was asked to stop."""
        is_done = ended.status == 0 and self._saves_until is None
        return is_done or ended.status == FINAL_STATUS or self._num_passed > 0

    def _is_hopeless(self) -> bool:
        """Whether the ranks that have not ended need not be waited for."""
        cause = self.cause
        if cause is None or cause.status is None:
            return cause is not None
        if self._saves_until is not None:
            return time.time() >= self._saves_until
        return cause.status < 0 or clock.now() - self._failed_at >= FINAL_S  # until then a mistake may explain it

    def _call(self, rank: int) -> tuple[Any, tuple[int, float]]:
        actor, _ = self._placed[rank]
        return actor.follow.remote(), (rank, clock.now())

    def _answer(self, reference: Any, rank: int) -> tuple[list[Said], Ended | None]:
        try:
            answer: tuple[list[Said], Ended | None] = self._ray.get(reference, timeout=PAUSE_S)
            return answer
        except self._ray.exceptions.RayError:  # of the actor, of an answer that went with its node, or of the limit
            _, spot = self._placed[rank]
            return [], Ended(rank, None, where=f"node {spot.ip}", last_lines="")

    def _pass_signals(self) -> None:
        if list(self._received).count(signal.SIGINT) > 1:
            raise _EndedAtOnce(signal.SIGINT)
        for number in self._received[self._num_passed :]:
            self._signal(number)
            self._num_passed += 1

    def _look_for_drained_nodes(self) -> None:
        """Has all ranks save, once, when Ray announces that one of their nodes will be taken away."""
        if self._saves_until is not None or clock.now() < self._looks_at:
            return
        self._looks_at = clock.now() + DRAIN_INTERVAL_S
        try:
            drained = self._ray._private.state.state.get_draining_nodes()  # no public name has it
        except Exception as error:  # the head is busy, or a Ray without
            log.debug("asking Ray for nodes that will be taken away: %s", error)
            return
        nodes = {spot.node for _, spot in self._placed}
        if taken := [deadline_ms / 1000 for node, deadline_ms in drained.items() if node in nodes]:
            self._saves_until = min(filter(None, taken), default=time.time() + DRAIN_S)
            self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        for actor, _ in self._placed:
            actor.send_signal.remote(number)  # of a rank that has ended: no answer is waited for


def _exit_status(ended: Mapping[int, Ended]) -> int:
    """Exit status of the run, as a shell counts it: that of rank 0, or of another one that failed."""
    statuses = [ended[rank].status for rank in sorted(ended)]
    status = next((one for one in statuses if one != 0), 0)
    if status is None or status == FINAL_STATUS:
        return 1
    return status if status >= 0 else 128 - status


def _variables() -> dict[str, str]:
    """Variables that ranks get from the command: path of its modules, width of the terminal, and `PASSED`.

    No others are sent, above all no keys: those are of the node's `ray start`.
    """
    own = {Path(path).resolve() for path in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")) if path}
    found = [path for path in sys.path if path and os.path.isdir(path)]
    paths = [path for path in found if not any(Path(path).resolve().is_relative_to(one) for one in own)]
    passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED)}
    columns = str(shutil.get_terminal_size().columns)
    return passed | {"PYTHONPATH": os.pathsep.join(paths), "COLUMNS": columns, "PYTHONUNBUFFERED": "1"}


class Screen:
    """Shows the ranks' output: that of rank 0 as it is, and other ranks' lines, unless seen before, with their rank."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._held: list[tuple[float, int, Stream, str]] = []  # when, rank, stream, line
        self._rests: dict[tuple[int, Stream], str] = {}

    def show(self, said: list[Said], is_last: bool = False) -> None:
        """Prints new output in its order; if it `is_last` of a start, waiting and unfinished lines, too."""
        now = time.monotonic()
        for rank, stream, text in said:
            if rank == 0:
                _print(stream, text)
            lines = (self._rests.pop((rank, stream), "") + text).split("\n")
            self._rests[rank, stream] = lines.pop()
            for line in lines:
                if rank == 0:
                    self._seen.add(line)
                else:
                    self._held.append((now, rank, stream, line))
        if is_last:
            self._held += [(now, rank, stream, rest) for (rank, stream), rest in self._rests.items() if rank and rest]
            self._rests.clear()  # what the next start says is no part of these lines
        due = [one for one in self._held if is_last or now - one[0] >= HOLD_S]
        self._held = self._held[len(due) :]
        for _, rank, stream, line in due:
            if line.strip() and line not in self._seen:
                self._seen.add(line)
                _print(stream, f"rank {rank}: {line}\n")


def _print(stream: Stream, text: str) -> None:
    out = sys.stdout if stream == "stdout" else sys.stderr
    with contextlib.suppress(OSError, ValueError):  # the terminal is closed: the run goes on, or is being saved
        out.write(text)
        out.flush()
