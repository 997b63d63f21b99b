"""Worker of Ray Train: starts one rank of the run as a process, as torchrun does, and watches it.

The process is one of its own so that training runs in a main thread, where signals arrive and save `last.ckpt`. It gets
torchrun's variables, by which Lightning finds the other ranks; Ray Train makes no process group.

| thread | does | waits for |
|---|---|---|
| of Ray Train | passes signals and output on, every `PAUSE_S` | the end of the process |
| two readers | what the process writes, so that it never waits for a reader | its next words |
| preemption | asks Ray Train whether a node will be taken away | the other workers |
"""

from __future__ import annotations

import codecs
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from lit_async_rl.ray.coordinator import Ended, Said, Stream
from lit_async_rl.ray.security import CLUSTERS, auth_mode, is_loopback, refusal

PAUSE_S = 0.2
ANSWER_S = 60.0  # the coordinator's time for an answer; without it the rank ends
PREEMPTION_S = 2.0
FINAL_S = 5.0  # how long the end of a rank waits for another's that explains it
NUM_LAST_LINES = 20
MAX_UNSENT = 1 << 20  # characters of output
FINAL_STATUS = 79  # of `rank.py`: starting again would not help; no status of shells or sysexits.h
# without the working folder in front of the path, where a file of any name would hide a module
PROGRAM = "import sys; sys.path[:] = filter(None, sys.path); from lit_async_rl.ray.rank import main; main()"
RUN_ID = "LIT_ASYNC_RL_RAY_RUN"
ADDRESS = "LIT_ASYNC_RL_RAY_ADDRESS"
NAMESPACE_NAME = "LIT_ASYNC_RL_RAY_NAMESPACE"
RESUME = "LIT_ASYNC_RL_RAY_RESUME"


class RankDied(RuntimeError):
    """The process of a rank was killed or failed; names the node, the process, and its last lines."""


def supervise(settings: Mapping[str, Any]) -> None:
    """One rank, from its start to its end; called by Ray Train in each worker.

    Args:
        settings: `run` (name of the coordinator), `namespace`, `cwd`, `argv`, `variables` (of the environment).

    Raises:
        RankDied: the process ended so that the ranks should start again.
    """
    import ray

    try:
        _supervise(settings)
    except ray.exceptions.RayActorError:  # the command has ended: it owns the coordinator, and nobody starts again
        return


def _supervise(settings: Mapping[str, Any]) -> None:
    import ray
    import ray.train
    from ray.train.collective import broadcast_from_rank_zero

    context = ray.train.get_context()
    rank = context.get_world_rank()
    world_size = context.get_world_size()
    local_size = context.get_local_world_size()
    try:
        coordinator = ray.get_actor(settings["run"], namespace=settings["namespace"])
    except ValueError:  # the command has ended meanwhile
        return
    ip = ray.util.get_node_ip_address()
    begun: Any = None
    was_told = True
    if rank == 0:
        answer: Any = ray.get(coordinator.begin.remote(), timeout=ANSWER_S)
        attempt, folder, was_told = answer
        begun = (attempt, folder, newest_checkpoint(folder), ip, _free_port())
    attempt, folder, checkpoint, main_ip, port = broadcast_from_rank_zero(begun)
    runtime = ray.get_runtime_context()
    process = RankProcess(
        rank=rank,
        attempt=attempt,
        coordinator=coordinator,
        node=f"node {ip}",
        variables=dict(settings["variables"])
        | ({CLUSTERS: "0"} if is_loopback(ip) else {})  # or the rank would look for its node at another address
        | {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(context.get_local_rank()),
            "LOCAL_WORLD_SIZE": str(local_size),
            "NODE_RANK": str(context.get_node_rank()),
            "GROUP_RANK": str(context.get_node_rank()),  # torchrun's name of the same, which Lightning reads
            "MASTER_ADDR": main_ip,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": settings["run"],
            RUN_ID: settings["run"],
            NAMESPACE_NAME: settings["namespace"],
            ADDRESS: runtime.gcs_address,
            "RAY_ADDRESS": runtime.gcs_address,
            RESUME: checkpoint or "",
        },
    )
    if problem := misplaced(ip, world_size, local_size=local_size, cwd=settings["cwd"]):
        process.refuse(problem)
        return
    if rank == 0 and attempt > 0:
        missing = f"the beginning: node {ip} has no {folder}/last.ckpt" if folder else "the beginning"
        why = "" if was_told else ", because a machine or a process of Ray was lost"
        process.say(f"the ranks start again, for the {attempt}. time, from {checkpoint or missing}{why}\n")
    process.run(settings["cwd"], settings["argv"])


def misplaced(ip: str, world_size: int, *, local_size: int, cwd: str) -> str:
    """Why a rank cannot run where it is; empty if it can.

    Args:
        ip: of the node.
        world_size: ranks of the run.
        local_size: of these on the node.
        cwd: folder of the command.
    """
    if not os.path.isdir(cwd):
        return f"the command's folder {cwd} is not on the node {ip}: all nodes must share it, docs/ray.md"
    if not is_loopback(ip) and auth_mode() != "token":  # a node that came later
        return refusal(ip, auth_mode())
    if world_size % local_size:
        return (
            f"cluster.trainer_ranks={world_size}: Ray has placed {local_size} of them on the node {ip}, and each node "
            "must have equally many (trainer.devices of each); set cluster.trainer_resources so that they fit"
        )
    return ""


def newest_checkpoint(folder: str | None) -> str | None:
    """`last.ckpt` of the run, file or folder; None if there is none yet."""
    path = None if folder is None else Path(folder) / "last.ckpt"
    return str(path) if path is not None and path.exists() else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class RankProcess:
    """The process of a rank, seen from the worker that starts it.

    Args:
        rank: of the run.
        attempt: of the ranks' starts, from 0.
        coordinator: actor handle.
        node: for messages.
        variables: of the environment, beside those of the worker.
    """

    def __init__(self, rank: int, attempt: int, *, coordinator: Any, node: str, variables: Mapping[str, str]) -> None:
        self._rank = rank
        self._attempt = attempt
        self._coordinator = coordinator
        self._node = node
        self._variables = variables
        self._output = _Output(rank)
        self._last_said: Any = None  # reference of the last output: one is under way at a time, in order
        self._num_orders = 0
        self._is_preempted = threading.Event()
        self._is_saving = False  # because of that

    def say(self, text: str) -> None:
        """Shows a text beside what the process says."""
        self._output.add("stderr", text, is_own=True)

    def refuse(self, problem: str) -> None:
        """Ends the run with an error, without a process."""
        self.say(f"error: {problem}\n")
        self._finish(status=FINAL_STATUS, where=self._node)

    def run(self, cwd: str, argv: list[str]) -> None:
        """Starts the process and stays until it has ended.

        Raises:
            RankDied: the ranks should start again.
        """
        import ray

        environment = {**os.environ, **self._variables}
        environment.pop("RAY_JOB_ID", None)  # the rank's is a job of its own
        program = [sys.executable, "-c", PROGRAM, *argv]
        process = subprocess.Popen(
            program,
            cwd=cwd,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        where = f"{self._node}, pid {process.pid}"
        readers = [self._output.read(process.stdout, "stdout"), self._output.read(process.stderr, "stderr")]
        threading.Thread(target=self._watch_for_preemption, name="preemption", daemon=True).start()
        try:
            ray.get(self._coordinator.started.remote(self._rank, process.pid), timeout=ANSWER_S)
            while process.poll() is None:
                self._pass_signals(process)
                self._send_output()
                time.sleep(PAUSE_S)
        except BaseException:  # the coordinator is gone, and with it the command that owns the run
            process.kill()
            raise
        finally:
            if process.stdin is not None:
                process.stdin.close()  # which also ends a process that is still there
            process.wait()
            for reader in readers:
                reader.join(FINAL_S)  # a child of the process may hold its pipe open
        self._finish(status=process.returncode, where=where)

    def _pass_signals(self, process: subprocess.Popen[bytes]) -> None:
        import ray

        orders = ray.get(self._coordinator.orders.remote(self._num_orders), timeout=ANSWER_S)
        for number in orders:
            process.send_signal(number)
        self._num_orders += len(orders)
        if self._is_preempted.is_set() and not self._is_saving:
            self._is_saving = True
            process.send_signal(signal.SIGTERM)

    def _send_output(self) -> None:
        import ray

        if self._last_said is not None:
            ray.get(self._last_said, timeout=ANSWER_S)
            self._last_said = None
        if said := self._output.take():
            self._last_said = self._coordinator.say.remote(said)

    def _finish(self, status: int, where: str) -> None:
        """Tells how it ended.

        Raises:
            RankDied: the ranks should start again.
        """
        import ray

        self._send_output()
        self._send_output()  # until the first has arrived
        was_asked = self._num_orders > 0
        is_done = status == 0 and not self._is_preempted.is_set()
        is_final = is_done or status == FINAL_STATUS or was_asked
        ended = Ended(
            rank=self._rank,
            attempt=self._attempt,
            status=1 if status == FINAL_STATUS else status,
            is_final=is_final,
            where=where,
            last_lines="\n".join(self._output.last_lines),
        )
        ray.get(self._coordinator.end.remote(ended), timeout=ANSWER_S)
        if is_final:
            return
        ends_at = time.monotonic() + FINAL_S
        may_follow = status > 0 and not self._is_preempted.is_set()
        while may_follow and time.monotonic() < ends_at:  # from another rank's mistake, which may be told later
            if ray.get(self._coordinator.has_final_end.remote(self._attempt), timeout=ANSWER_S):
                return
            time.sleep(PAUSE_S)
        raise RankDied(describe_end(ended))

    def _watch_for_preemption(self) -> None:
        """Waits for Ray's notice that a node will be taken away, which all workers get; an older Ray has none."""
        import ray.train

        ask = getattr(ray.train, "get_preemption_info", None)
        while ask is not None:
            try:
                if ask() is not None:
                    self._is_preempted.set()
                    return
            except Exception:  # the group ends
                return
            time.sleep(PREEMPTION_S)


def describe_end(ended: Ended, has_lines: bool = True) -> str:
    """One message of how a rank ended, with the last lines that it wrote unless they are not wanted."""
    if ended.status < 0:
        how = f"was killed by {signal.Signals(-ended.status).name}"
    elif ended.status == 0:
        how = "was saved, because its node or another's is taken away"
    else:
        how = f"ended with status {ended.status}"
    lines = f"; its last lines:\n{ended.last_lines}" if ended.last_lines else "; it wrote nothing to stderr"
    return f"rank {ended.rank} ({ended.where}) {how}{lines if has_lines else ''}"


class _Output:
    """Output of the process, buffered until it is sent."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._unsent: list[Said] = []
        self._num_unsent = 0
        self._tail: deque[str] = deque(maxlen=NUM_LAST_LINES + 1)

    def read(self, pipe: IO[bytes] | None, stream: Stream) -> threading.Thread:
        """Starts the thread that reads a pipe to its end."""
        thread = threading.Thread(target=self._read, args=(pipe, stream), name=stream, daemon=True)
        thread.start()
        return thread

    def _read(self, pipe: IO[bytes], stream: Stream) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while data := os.read(pipe.fileno(), 1 << 16):
            self.add(stream, decoder.decode(data))

    def add(self, stream: Stream, text: str, is_own: bool = False) -> None:
        with self._lock:
            if stream == "stderr" and not is_own:
                rest = self._tail.pop() if self._tail else ""
                self._tail.extend((rest + text).split("\n"))
            self._unsent.append((self._rank, stream, text))
            self._num_unsent += len(text)
            while self._num_unsent > MAX_UNSENT and len(self._unsent) > 1:
                self._num_unsent -= len(self._unsent.pop(0)[2])

    def take(self) -> list[Said]:
        with self._lock:
            taken = self._unsent
            self._unsent = []
            self._num_unsent = 0
            return taken

    @property
    def last_lines(self) -> list[str]:
        with self._lock:
            return [line for line in self._tail if line.strip()][-NUM_LAST_LINES:]
