"""Kills replicas, nodes, trainer ranks and the command of one run, and stops nodes: all of it once, or it fails.

    OMP_NUM_THREADS=1 python benchmarks/ray/soak.py --kills 100 --output docs/measurements/ray_soak.json

A cluster of simulated nodes on loopback: the command and its ranks on the first one, a replica on each of the others.
SIGKILL after a random time (while it samples, starts, takes an update or a checkpoint is written); or SIGSTOP of all
processes of a node, which is cut off for the others, and SIGCONT twenty seconds later, when it has been given up. The
next one comes when the run has trained on, three times in four before all replicas are back: the other one may be
starting still. Each is a line of `--folder`/kills.jsonl, and a soak that was interrupted goes on from there, with the
run's own `last.ckpt`. Every step and group has to be trained on once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.measurement import ROOT, measurement, write_measurement
from lit_async_rl.ray import runtime
from lit_async_rl.ray.security import CLUSTERS

KINDS = {"replica": 0.45, "node": 0.1, "partition": 0.1, "rank": 0.25, "command": 0.1}  # shares of the kills
PARTITION_S = 20.0
LIMIT_S = 300.0  # until the run has trained on, or the soak ends: that is a hang
IS_BACK = (" is back, with the weights of version ", "the ranks start again, for the ")
CHECKPOINT_STEPS = 5
HEALTH = dict(initial_delay_ms=1000, period_ms=500, timeout_ms=500, failure_threshold=10)  # a node is lost after 10 s
RUN = [
    *(sys.executable, "scripts/train.py", "--config", "configs/quickstart.yaml"),
    *("--config", "configs/strategies/ddp.yaml", "--trainer.accelerator", "cpu", "--trainer.max_steps", "1000000"),
    *("--trainer.val_check_interval", "1000000", "--data.validation.prompts.init_args.size", "8"),
    *("--model.scheduler", "null", "--model.learning_rate", "1e-6", "--data.groups_per_step", "4"),
    *("--data.group_size", "4", "--defaults.checkpoint.init_args.every_n_train_steps", str(CHECKPOINT_STEPS)),
    *("--defaults.checkpoint.init_args.save_top_k", "0", "--trainer.enable_progress_bar", "false"),
    *("--trainer.callbacks+", "benchmarks.ray.trained_groups.TrainedGroups"),
    *("--cluster", "RayCluster", "--cluster.max_failures", "-1", "--cluster.engines.init_args.replicas", "2"),
]


@dataclass
class Nodes:
    """The cluster: a node for the command and its ranks, and one for each replica."""

    num_replicas: int
    was_whole: bool = True  # all replicas were back after the last kill

    def __post_init__(self) -> None:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # before ray is imported
        runtime.import_ray("the soak")
        from ray._private import ray_constants
        from ray.cluster_utils import Cluster

        os.environ[CLUSTERS] = "0"  # all on loopback
        ray_constants.ENABLE_RAY_CLUSTER = False
        os.environ["PYTHONPATH"] = runtime.search_path()
        os.environ |= {f"RAY_health_check_{name}": str(value) for name, value in HEALTH.items()}
        head = dict(num_cpus=4, object_store_memory=200 << 20, include_dashboard=False)
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.others = [self._add() for _ in range(self.num_replicas)]
        self.cluster.wait_for_nodes()

    def _add(self) -> Any:
        return self.cluster.add_node(num_cpus=1, object_store_memory=100 << 20, resources={"engine": 1.0})

    @property
    def replicas(self) -> list[int]:
        """Processes of the engines."""
        found = []
        for node in (self.cluster.head_node, *self.others):
            try:
                raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
                found += [p.pid for p in raylet.children() if "ray::Replica" in " ".join(p.cmdline())]
            except (psutil.Error, KeyError):
                continue
        return found

    @contextmanager
    def cut_off(self, number: int) -> Iterator[None]:
        """The processes of a node stand still, at least for `PARTITION_S`; it is lost, and another one joins."""
        raylet = psutil.Process(self.others[number].all_processes["raylet"][0].process.pid)
        stopped = [raylet, *raylet.children(recursive=True)]
        began = time.monotonic()
        for process in stopped:
            process.suspend()
        try:
            yield
            time.sleep(max(0.0, began + PARTITION_S - time.monotonic()))
        finally:
            for process in stopped:
                with suppress(psutil.NoSuchProcess):
                    process.resume()
        time.sleep(1.0)  # in which it says what it has to say
        self.lose(number)

    def lose(self, number: int) -> None:
        """Takes a node away without notice; another one joins."""
        self.cluster.remove_node(self.others[number], allow_graceful=False)
        self.others[number] = self._add()


class Run:
    """The command, its processes, and what they have trained on."""

    def __init__(self, folder: Path, address: str, *, ranks: int, replicas: int) -> None:
        self.folder = folder
        self.command: subprocess.Popen[bytes] | None = None
        self._flags = ["--cluster.address", address, "--cluster.trainer_ranks", str(ranks)]
        if ranks == 1:
            self._flags += ["--cluster.trainer_resources", '{"CPU": 0.5}']
        self._flags += ["--cluster.engines", json.dumps({"replicas": replicas, "resources": {"engine": 1.0}})]
        self._flags += ["--trainer.logger.init_args.save_dir", str(folder / "runs")]

    def start(self) -> None:
        """Starts the command, from the run's last checkpoint if there is one."""
        saved = sorted(self.folder.glob("runs/**/last.ckpt"), key=lambda path: path.stat().st_mtime)
        flags = self._flags + (["--ckpt_path", str(saved[-1])] if saved else [])
        with (self.folder / "log.txt").open("a") as log:
            self.command = subprocess.Popen(
                [*RUN, *flags], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(os.environ)
            )

    @property
    def ranks(self) -> list[int]:
        """Processes of the trainer."""
        found = []
        for process in psutil.process_iter():
            try:
                is_rank = any("lit_async_rl.ray.rank" in part for part in process.cmdline())
                if is_rank and process.environ().get("TRAINED_GROUPS") == str(self.folder):
                    found.append(process.pid)
            except psutil.Error:
                continue
        return found

    def records(self) -> Iterator[dict[str, Any]]:
        """Training data of each step of each rank, in order of time."""
        for path in sorted(self.folder.glob("groups_*.jsonl")):
            for line in path.read_text().splitlines():
                if line.endswith("}"):  # else it was being written when its rank was killed
                    yield json.loads(line)

    def num_records(self) -> int:
        """Steps that were trained, those that were repeated after a kill among them."""
        return sum(path.read_text().count("\n") for path in self.folder.glob("groups_*.jsonl"))

    def has_trained(self, before: int) -> bool:
        """Whether a few more steps were trained than so many.

        Raises:
            RuntimeError: the command has ended.
        """
        if assert_command(self).poll() is not None:
            raise RuntimeError(f"the command has ended: {(self.folder / 'log.txt').read_text()[-2000:]}")
        return self.num_records() > before + 2


def wait_until(condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> float:
    """Seconds until something holds.

    Raises:
        TimeoutError: it did not within the limit.
    """
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > limit_s:
            raise TimeoutError(f"{what} took more than {limit_s:g} s")
        time.sleep(0.1)
    return time.monotonic() - began


def kill(run: Run, nodes: Nodes, kind: str, rng: random.Random) -> dict[str, Any]:
    """One kill; what it cost.

    Raises:
        TimeoutError: the run did not go on.
        RuntimeError: something was left of a command that was killed, or engines were restarted with the trainer.
    """
    before = sorted(nodes.replicas)
    is_whole = len(before) == len(nodes.others) and nodes.was_whole
    num_proved = num_back(run)
    began = time.monotonic()
    if kind == "replica":
        os.kill(rng.choice(before or run.ranks), signal.SIGKILL)
    elif kind == "node":
        nodes.lose(rng.randrange(len(nodes.others)))
    elif kind == "rank":
        os.kill(rng.choice(run.ranks), signal.SIGKILL)
    elif kind == "command":
        assert_command(run).kill()
        assert_command(run).wait()
        left_s = wait_until(lambda: not run.ranks and not nodes.replicas, "the end of all that a command had started")
        run.start()
    with nodes.cut_off(rng.randrange(len(nodes.others))) if kind == "partition" else nullcontext():
        trained = run.num_records()
        on_s = wait_until(lambda: run.has_trained(trained), f"training after the kill of a {kind}")
    on_s = time.monotonic() - began if kind in ("rank", "command") else on_s
    found: dict[str, Any] = {"kind": kind, "trains_s": round(on_s, 2), "others_were_there": is_whole}
    nodes.was_whole = rng.random() < 0.25
    if nodes.was_whole:
        wait_until(lambda: len(nodes.replicas) == len(nodes.others), f"all replicas after the kill of a {kind}")
        if kind in ("replica", "node", "partition"):
            wait_until(lambda: num_back(run) > num_proved, "the proof of a replica")
        found["all_back_s"] = round(time.monotonic() - began, 2)
    if kind == "command":
        found["gone_s"] = round(left_s, 2)
    if kind == "rank":
        found["engines_kept"] = set(before) <= set(nodes.replicas)
    return found


def num_back(run: Run) -> int:
    """How often a replica has proved to be what the run needs, alone or with new ranks."""
    text = (run.folder / "log.txt").read_text()
    return sum(map(text.count, IS_BACK))


def assert_command(run: Run) -> subprocess.Popen[bytes]:
    """The command.

    Raises:
        RuntimeError: it was not started.
    """
    if run.command is None:
        raise RuntimeError("the command was not started")
    return run.command


def check(run: Run) -> dict[str, int]:
    """Counts steps and groups of the run's final history: what was repeated from a checkpoint counts as it was last.

    Raises:
        RuntimeError: a step is missing, a group was trained on twice, or a token is older than the bound.
    """
    steps: dict[tuple[int, int], dict[str, Any]] = {}
    repeated = 0
    for record in run.records():
        if record["step"] < record["resumed"]:
            raise RuntimeError(f"step {record['step']} before its checkpoint {record['resumed']}")
        key = (record["rank"], record["step"])
        if record["is_first"]:  # of a start: what came after its checkpoint is repeated
            gone = [k for k in steps if k[0] == record["rank"] and k[1] >= record["step"]]
            repeated += len(gone)
            for k in gone:
                del steps[k]
        steps[key] = record
        if record["lag"] > record["bound"]:
            raise RuntimeError(f"step {record['step']} has a token {record['lag']} versions old: {record['bound']}")
    for rank in {rank for rank, _ in steps}:
        mine = sorted(step for r, step in steps if r == rank)
        if mine != list(range(1, len(mine) + 1)):
            raise RuntimeError(f"steps of rank {rank} are not each there once: {mine[:5]} ... {mine[-5:]}")
    groups = [group for record in steps.values() for group in record["groups"]]
    if len(set(groups)) != len(groups):
        raise RuntimeError(f"{len(groups) - len(set(groups))} groups were trained on twice")
    return {"steps": max(step for _, step in steps), "groups": len(groups), "repeated": repeated}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e6, help="no further kill after so long")
    parser.add_argument("--folder", type=Path, default=Path("runs/ray_soak"))
    parser.add_argument("--machine", default="two cores")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    ends_at = time.monotonic() + 60 * args.minutes
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    os.environ["TRAINED_GROUPS"] = str(folder)  # also of the nodes: by it the processes of this soak are known
    kills = folder / "kills.jsonl"
    done = [json.loads(line) for line in kills.read_text().splitlines()] if kills.exists() else []
    nodes = Nodes(args.replicas)
    run = Run(folder, nodes.cluster.address, ranks=args.ranks, replicas=args.replicas)
    try:
        trained = run.num_records()
        run.start()
        wait_until(lambda: run.has_trained(trained), "the start")
        while len(done) < args.kills and time.monotonic() < ends_at:
            rng = random.Random(f"{args.seed} {len(done)}")
            time.sleep(rng.uniform(0.2, 4.0))
            (kind,) = rng.choices(args.kinds, [KINDS[one] for one in args.kinds])
            done.append(kill(run, nodes, kind=kind, rng=rng))
            with kills.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")
            print(f"{time.strftime('%H:%M:%S')} {len(done)}: {done[-1]}", flush=True)
        assert_command(run).send_signal(signal.SIGTERM)
        wait_until(lambda: assert_command(run).poll() is not None, "the end of the command", limit_s=120.0)
        wait_until(lambda: not run.ranks and not nodes.replicas, "the end of ranks and engines")
    finally:
        if run.command is not None and run.command.poll() is None:
            run.command.kill()
        nodes.cluster.shutdown()
    report(args, done, check(run))


def report(args: argparse.Namespace, done: list[dict[str, Any]], counted: dict[str, int]) -> None:
    """Writes the measurement."""
    rows = []
    for kind in KINDS:
        for is_whole in (True, False):
            mine = [one for one in done if one["kind"] == kind and one.get("others_were_there", True) is is_whole]
            if mine:
                trains = [one["trains_s"] for one in mine]
                while_others = "" if is_whole else ", while another started"
                row = [kind + while_others, len(trains), round(statistics.median(trains), 1), round(max(trains), 1)]
                back = [one["all_back_s"] for one in mine if "all_back_s" in one]
                rows.append([*row, round(statistics.median(back), 1) if back else "-"])
    kept = [one["engines_kept"] for one in done if one["kind"] == "rank"]
    write_measurement(
        args.output,
        measurement(
            "ray_soak",
            len(done),
            "kills in one run, without a step or group lost or trained on twice, or a token over its staleness bound",
            columns=["killed", "times", "median seconds until it trains on", "longest", "median until all are back"],
            rows=rows,
            command=f"python benchmarks/ray/soak.py --kills {args.kills} --ranks {args.ranks}",
            machine=f"{args.machine}, load {os.getloadavg()[0]:.1f} at the end",
            interval=None,
            hangs=0,
            steps=counted["steps"],
            groups_trained_on_once=counted["groups"],
            steps_repeated_from_checkpoints=counted["repeated"],
            trainer_deaths_that_engines_outlived=f"{sum(kept)} of {len(kept)}",
            longest_seconds_until_nothing_was_left_of_a_command=max(
                (d["gone_s"] for d in done if "gone_s" in d), default=None
            ),
        ),
    )


if __name__ == "__main__":
    main()
