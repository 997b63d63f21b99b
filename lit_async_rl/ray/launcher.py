"""Starts a run's trainer ranks through Ray Train, shows what they say, passes signals on, and returns how they ended.

    command ──signals──▶ coordinator ──▶ worker of Ray Train ──▶ process of the rank (torchrun's variables)
       ▲                  (actor)    ◀── output, ends ───────────┘
       └─────────────────────┘

Ray Train places the workers (packed), and starts them again after a failure. Everything else is the run's own, as under
torchrun: Lightning connects the ranks, and checkpoints, queue included, are what a new start resumes from.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sys
import sysconfig
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_async_rl.errors import RankError, SetupError
from lit_async_rl.ray.cluster import RayCluster
from lit_async_rl.ray.coordinator import Coordinator, Ended, Said, Stream
from lit_async_rl.ray.dry_run import connected_with_room
from lit_async_rl.ray.process import stop_actors
from lit_async_rl.ray.rank import Place
from lit_async_rl.ray.runtime import NAMESPACE
from lit_async_rl.ray.security import is_loopback
from lit_async_rl.ray.supervise import ANSWER_S, describe_end, supervise

PAUSE_S = 0.2
HOLD_S = 1.0  # how long a line of another rank waits for the same one of rank 0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
START_TIMEOUT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
PASSED = (
    "LIT_ASYNC_RL_",
    "NCCL_",
    "GLOO_",
    "OMP_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
    "HF_HUB_OFFLINE",
    "WANDB_MODE",
)
OF_RAY_TRAIN = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Args:
        status: exit status of rank 0, as a shell counts it; its message, if there is one, has been shown.
        result: what rank 0 gave; None if it gave nothing.
        folder: of the run's checkpoints; None before training began.
    """

    status: int
    result: Any
    folder: str | None


def launch(cluster: RayCluster, job: Callable[[Place], None], *, uses_gpus: bool) -> Outcome:
    """Runs `job` in each of the cluster's trainer ranks, until all have ended.

    Args:
        cluster: says where.
        job: called in the main thread of each rank; it and what it refers to must be importable, or be pickled.
        uses_gpus: whether a rank gets a GPU by default, if the cluster has some.

    Raises:
        SetupError: Ray is not installed, not reachable, reachable by others without a token, or has no room.
        RankError: the ranks failed more often than `cluster.max_failures` (names node, process and last lines), or the
            cluster is gone.
    """
    run = _Run(cluster, uses_gpus=uses_gpus)
    with run.connected() as ray:
        try:
            with run.coordinated(job), _received_signals() as received:
                return run.until_the_end(received)
        except ray.exceptions.RayError as error:
            reason = str(error).strip().partition("\n")[0]
            raise RankError(f"the Ray cluster does not answer ({type(error).__name__}: {reason})") from error


@contextlib.contextmanager
def _variables_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Context with variables of this process's environment, by which Ray Train takes its settings."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _received_signals() -> Iterator[list[int]]:
    """Signals that ask for the run's end, in order; the process goes on. Other threads than the main one get none."""
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
    """One run of ranks, seen from the command."""

    def __init__(self, cluster: RayCluster, *, uses_gpus: bool) -> None:
        self._cluster = cluster
        self._uses_gpus = uses_gpus
        self._name = f"run-{uuid.uuid4().hex[:12]}"
        self._screen = Screen()
        self._ray: Any = None
        self._coordinator: Any = None
        self._is_local = True
        self._told: set[int] = set()  # starts of the ranks of which a line has said how they ended
        self._error: BaseException | None = None

    @contextlib.contextmanager
    def connected(self) -> Iterator[Any]:
        """Ray is there: a cluster, or one on this machine for the run."""
        with (
            _variables_set(OF_RAY_TRAIN | {START_TIMEOUT: str(self._cluster.start_timeout_s)}),
            connected_with_room(self._cluster, uses_gpus=self._uses_gpus) as ray,
        ):
            self._ray = ray
            self._is_local = all(is_loopback(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"])
            yield ray

    @contextlib.contextmanager
    def coordinated(self, job: Callable[[Place], None]) -> Iterator[None]:
        """The coordinator is there; with it, whatever is left of the ranks ends, and the engines that it owns.

        It is on the command's own node: on another one the loss of that would end the run.
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

    def _ask(self, method: str, *args: Any) -> Any:
        return self._ray.get(getattr(self._coordinator, method).remote(*args), timeout=ANSWER_S)

    def until_the_end(self, received: list[int]) -> Outcome:
        """Starts the ranks and returns when they have ended; a second Ctrl-C ends them at once."""
        has_gpus = self._uses_gpus and self._ray.cluster_resources().get("GPU", 0) > 0
        resources = self._cluster.rank_resources(has_gpus=has_gpus)
        storage = tempfile.mkdtemp(prefix=".ray-", dir=None if self._is_local else os.getcwd())
        thread = threading.Thread(target=self._fit, args=(resources, storage), name="ray-train", daemon=True)
        thread.start()
        num_passed = 0
        try:
            while thread.is_alive():
                for number in received[num_passed:]:
                    self._ask("order", number)
                    num_passed += 1
                if received.count(signal.SIGINT) > 1:
                    return Outcome(128 + signal.SIGINT, None, None)
                self._show()
                if received and not self._ask("pids"):  # nothing has begun that could be saved
                    return Outcome(128 + received[0], None, None)
                time.sleep(PAUSE_S)
            ended = self._show(is_last=True)
            stop_actors(self._ray, list(self._ask("replicas").values()))
        finally:
            shutil.rmtree(storage, ignore_errors=True)
        return self._outcome(ended)

    def _fit(self, resources: dict[str, float], storage: str) -> None:
        """Ray Train's part, in a thread: it waits where no signal would be handled."""
        try:
            from ray.train.v2.api.config import ScalingConfig
            from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

            trainer: Any = DataParallelTrainer(
                supervise,
                train_loop_config={
                    "run": self._name,
                    "namespace": NAMESPACE,
                    "cwd": os.getcwd(),
                    "argv": sys.argv,
                    "variables": _variables(),
                },
                backend_config=_shared_gpus(),
                scaling_config=ScalingConfig(
                    num_workers=self._cluster.trainer_ranks,
                    use_gpu=resources.get("GPU", 0) > 0,
                    resources_per_worker=resources,
                    placement_strategy="PACK",
                ),
                run_config=self._run_config(storage),
            )
            trainer.fit()
        except BaseException as error:
            self._error = error

    def _run_config(self, storage: str) -> Any:
        from ray.train.v2.api.config import FailureConfig, LoggingConfig, RunConfig

        return RunConfig(
            name=self._name,
            storage_path=storage,
            failure_config=FailureConfig(
                max_failures=self._cluster.max_failures,
                controller_failure_limit=0,  # no room within the start's timeout
            ),
            logging_config=LoggingConfig(log_level="ERROR"),
        )

    def _show(self, is_last: bool = False) -> list[Ended]:
        said, ended = self._ask("take")
        self._screen.show(said, is_last=is_last)
        for one in ended:
            if not one.is_final and one.attempt not in self._told:  # the others of its start follow from the first
                self._told.add(one.attempt)
                limit = f"cluster.max_failures={self._cluster.max_failures}"
                log.warning("%s; all ranks start again, if %s allows it", describe_end(one, has_lines=False), limit)
        return list(ended)

    def _outcome(self, ended: list[Ended]) -> Outcome:
        """Outcome of the run from the exit records of the ranks.

        Raises:
            RankError: they failed.
            SetupError: they could not be started.
        """
        newest = max((one.attempt for one in ended), default=-1)
        of_last = {one.rank: one for one in ended if one.attempt == newest}
        if self._error is None:
            leading = of_last.get(0)
            others = [one.status for one in of_last.values() if one.status]
            status = leading.status if leading is not None and leading.status else next(iter(others), 0)
            return Outcome(status if status >= 0 else 128 - status, self._ask("result"), self._ask("folder"))
        causes = [one for one in of_last.values() if not one.is_final]
        if causes:
            cause = min(causes, key=lambda one: one.status)  # a signal before what follows from it
            tries = f"cluster.max_failures={self._cluster.max_failures}"
            raise RankError(f"{describe_end(cause)}\n(the last start that {tries} allows)") from self._error
        reason = str(self._error).strip().splitlines() or [type(self._error).__name__]
        raise SetupError(
            f"Ray Train could not run cluster.trainer_ranks={self._cluster.trainer_ranks} "
            f"(cluster.start_timeout_s={self._cluster.start_timeout_s:g}): {' '.join(reason[-3:])}"
        ) from self._error


def _variables() -> dict[str, str]:
    """Variables that ranks have from the command: where its modules are, how wide the terminal is, and `PASSED`.

    Others are those of the node's `ray start`, keys above all: they are never sent.
    """
    own = {Path(path).resolve() for path in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")) if path}
    found = [path for path in sys.path if path and os.path.isdir(path)]
    paths = [path for path in found if not any(Path(path).resolve().is_relative_to(one) for one in own)]
    passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED)}
    columns = str(shutil.get_terminal_size().columns)
    return passed | {"PYTHONPATH": os.pathsep.join(paths), "COLUMNS": columns, "PYTHONUNBUFFERED": "1"}


def _shared_gpus() -> Any:
    """Each rank sees all GPUs of the ranks on its node, as under torchrun: Lightning chooses by the local rank."""
    from ray.train.backend import Backend, BackendConfig

    class SharedGpus(Backend):
        share_cuda_visible_devices = True

    class SharedGpusConfig(BackendConfig):
        @property
        def backend_cls(self) -> type[Backend]:
            return SharedGpus

    return SharedGpusConfig()


class Screen:
    """Shows what the ranks say: rank 0 as it is, and lines of the others that none said before, with their rank."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._held: list[tuple[float, int, Stream, str]] = []  # when, rank, stream, line
        self._rests: dict[tuple[int, Stream], str] = {}

    def show(self, said: list[Said], is_last: bool = False) -> None:
        """Prints output in its order.

        Args:
            said: new output.
            is_last: whether lines that wait are printed as well.
        """
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
