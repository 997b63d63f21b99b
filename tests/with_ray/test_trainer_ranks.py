"""Trainer ranks that Ray places: the quick start, signals, kills, and what is left when the command is killed."""

import csv
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import ray_jobs
from processes import is_running, wait_for_the_end_of

import lit_async_rl as rl
from lit_async_rl.cli.app import main
from lit_async_rl.errors import RankError, SetupError

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]  # a busy machine starts processes slowly
ROOT = Path(__file__).parents[2]
LIMIT_S = 300.0
SMALL = [
    *("--config", "configs/quickstart.yaml", "--model.model", "lit_async_rl/assets/small_sort_policy"),
    *("--model.scheduler", "null", "--model.learning_rate", "1e-4", "--data.groups_per_step", "2"),
    *("--data.group_size", "2", "--data.validation.prompts.init_args.size", "4"),
    *("--data.reward", "hostile_rewards.sleeps_30_ms", "--trainer.val_check_interval", "1000"),
    *("--defaults.checkpoint.init_args.every_n_train_steps", "3", "--trainer.accelerator", "cpu"),
    *("--cluster", "RayCluster", "--cluster.trainer_ranks", "2"),
]
DDP = ["--config", "configs/strategies/ddp.yaml"]
FSDP2 = ["--config", "configs/strategies/fsdp2.yaml", "--trainer.strategy.init_args.data_parallel_size", "2"]


def launch(cluster, job, uses_gpus=False):
    from lit_async_rl.ray.launcher import launch

    return launch(cluster, job, uses_gpus=uses_gpus)


@pytest.fixture
def address(ray_cluster, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return ray_cluster.address


class When:
    """Does something in a thread once a condition holds, and says whether it did."""

    def __init__(self, condition, action):
        self.is_done = False
        self._condition = condition
        self._action = action
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        ends_at = time.monotonic() + LIMIT_S
        while not (found := self._condition()):
            if time.monotonic() > ends_at:
                return
            time.sleep(0.05)
        self._action(found)
        self.is_done = True


def rank_processes(rank=None):
    """Processes of ranks by number."""
    found = {}
    for process in psutil.Process().children(recursive=True) + _of_ray():
        try:
            if any("lit_async_rl.ray.rank" in word for word in process.cmdline()):
                found[int(process.environ()["RANK"])] = process.pid
        except (psutil.Error, KeyError):
            continue
    return found if rank is None else found.get(rank)


def _of_ray():
    return [process for process in psutil.process_iter() if process.username() == psutil.Process().username()]


def wait_until_nothing_is_reserved():
    """Ray gives back the room of ranks a little later."""
    from ray.util import placement_group_table

    ends_at = time.monotonic() + 60.0
    while any(group["state"] != "REMOVED" for group in placement_group_table().values()):
        assert time.monotonic() < ends_at
        time.sleep(0.1)


def folder_of(tmp_path):
    (folder,) = tmp_path.glob("runs/quickstart/version_*")
    return folder


def steps_of(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file) if row.get("policy/loss")]


def test_the_quick_start_under_ddp_survives_a_killed_rank_and_goes_on_under_fsdp2(address, tmp_path, capfd, caplog):
    """SIGKILL of a rank, then SIGTERM of the command, then a resume: every step is there once."""
    own = ["--cluster.address", address, "--trainer.logger.init_args.save_dir", str(tmp_path / "runs")]
    killed = When(
        lambda: list(tmp_path.glob("runs/**/last.ckpt")), lambda _: os.kill(rank_processes(1), signal.SIGKILL)
    )

    def has_gone_on():
        return killed.is_done and any(len(steps_of(one)) >= 20 for one in tmp_path.glob("runs/quickstart/version_0"))

    stopped = When(has_gone_on, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    main([*SMALL, *DDP, *own, "--trainer.max_steps", "100000"])
    said = capfd.readouterr()
    assert (killed.is_done, stopped.is_done) == (True, True)
    assert re.search(r"rank 1 \(node 127\S+, pid \d+\) was killed by SIGKILL; all ranks start again", caplog.text)
    assert said.out.count("resume with: ") == 1
    assert said.out.count("run summary") == 1
    folder = folder_of(tmp_path)
    steps = steps_of(folder)
    assert steps == list(range(len(steps)))
    assert not rank_processes()

    last = len(steps) + 2
    checkpoint = str(folder / "checkpoints" / "last.ckpt")
    main([*SMALL, *FSDP2, *own, "--trainer.max_steps", str(last), "--ckpt_path", checkpoint])
    assert "distributed_backend=gloo" in capfd.readouterr().err
    assert steps_of(folder_of(tmp_path)) == list(range(last))


def mean_length(prompt, completion):
    return float(len(completion) % 2)


@pytest.mark.soak
def test_fit_returns_the_module_that_a_placed_rank_has_trained(address, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prompts = [{"prompt": "3142=", "answer": "1234"}, {"prompt": "21=", "answer": "12"}]
    trainer = rl.fit(
        rl.asset("small_sort_policy"),
        prompts,
        mean_length,
        max_steps=2,
        max_staleness=1,
        groups_per_step=2,
        group_size=4,
        accelerator="cpu",
        distillation=rl.Distillation(teacher=rl.asset("sort_policy"), with_reward=True),
        cluster=rl.RayCluster(address=address, trainer_resources={"CPU": 0.5}),
    )
    assert trainer.lightning_module.version == 2
    assert {"policy/loss", "policy/teacher_divergence"} <= set(trainer.callback_metrics)
    assert (tmp_path / "runs/version_0/config.yaml").read_text().count("class_path: RayCluster") == 1


# -- the launcher alone: what ranks do here needs no training ---------------------------------------------------------


def test_a_mistake_ends_the_run_at_once(address, capfd):
    outcome = launch(rl.RayCluster(address=address, trainer_ranks=2, max_failures=-1), ray_jobs.fail)
    assert outcome.status == 1
    wait_until_nothing_is_reserved()
    assert "rank 1: ValueError: data.max_staleness must be >= 0, got -1" in capfd.readouterr().err


@pytest.mark.soak
def test_a_rank_that_always_dies_is_named_with_its_last_lines(address, capfd):
    with pytest.raises(RankError) as caught:
        launch(rl.RayCluster(address=address, trainer_resources={"CPU": 0.5}, max_failures=0), ray_jobs.die)
    assert str(caught.value).startswith("rank 0 (node ")
    assert "was killed by SIGKILL; its last lines:\nabout to die\n" in str(caught.value)
    assert "cluster.max_failures=0" in str(caught.value)
    assert capfd.readouterr().err.count("about to die") == 1


def test_a_run_that_does_not_fit_is_refused_at_once(address, capsys):
    lack = r"cluster.trainer_ranks=3 with CPU 6 each need CPU 18, and the cluster has CPU \d+ on \d nodes?: there is"
    with pytest.raises(SetupError, match=lack):
        launch(rl.RayCluster(address=address, trainer_ranks=3, trainer_resources={"CPU": 6}), ray_jobs.fail)
    with pytest.raises(SystemExit) as end:
        main([*SMALL[:-2], "--cluster.address", address, "--cluster.engines.replicas", "40"])
    said = f"{end.value.code}{capsys.readouterr().err}"
    assert "cluster.engines.replicas=40 with CPU 0.5 each need CPU 20, and the cluster has CPU 1" in said


@pytest.mark.soak
def test_the_second_ctrl_c_ends_at_once(address, tmp_path):
    """The first one is for the ranks, which do not end here."""

    def press(_):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.0)
        pids.update(rank_processes())
        os.kill(os.getpid(), signal.SIGINT)

    pids = {}
    pressed = When(lambda: len(list(tmp_path.glob("pid_*"))) == 2, press)
    outcome = launch(rl.RayCluster(address=address, trainer_ranks=2), partial(ray_jobs.sleep, str(tmp_path)))
    assert (outcome.status, pressed.is_done, len(pids)) == (130, True, 2)
    assert len(list(tmp_path.glob("told_*"))) == 2
    wait_for_the_end_of(*pids.values())


@pytest.mark.soak
def test_nothing_is_left_of_a_command_that_is_killed(address, tmp_path):
    code = "import sys, ray_jobs; from functools import partial; import lit_async_rl as rl; "
    code += "from lit_async_rl.ray.launcher import launch; "
    code += "cluster = rl.RayCluster(address=sys.argv[1], trainer_ranks=2); "
    code += "sys.exit(launch(cluster, partial(ray_jobs.sleep, sys.argv[2]), uses_gpus=False).status)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = subprocess.Popen([sys.executable, "-c", code, address, str(tmp_path)], env=environment)
    files = [tmp_path / "pid_0", tmp_path / "pid_1"]
    ends_at = time.monotonic() + LIMIT_S
    while not all(file.exists() and file.read_text() for file in files):
        assert command.poll() is None
        assert time.monotonic() < ends_at
        time.sleep(0.1)
    pids = [int(file.read_text()) for file in files]
    assert all(map(is_running, pids))
    command.kill()
    command.wait(LIMIT_S)
    wait_for_the_end_of(*pids)


@pytest.mark.soak
def test_a_node_that_is_taken_away_is_left_with_a_checkpoint(ray_cluster, address, tmp_path):
    """Ray's notice: the rank saves, ends, and starts again where there is room, from what it saved."""
    from ray._raylet import GcsClient
    from ray.core.generated import autoscaler_pb2

    settings = dict(num_cpus=1, resources={"spot": 1}, object_store_memory=80 << 20)
    nodes = {}
    for _ in range(2):
        node = ray_cluster.add_node(**settings)
        nodes[node.all_processes["raylet"][0].process.pid] = node
    ray_cluster.wait_for_nodes()

    def drain(_):
        worker = int((tmp_path / "worker").read_text())
        node = nodes[psutil.Process(worker).ppid()]
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline_ms = int((time.time() + 600) * 1000)
        GcsClient(address=ray_cluster.address).drain_node(node.node_id, reason, "spot", deadline_ms)

    drained = When(lambda: (tmp_path / "ready").exists(), drain)
    cluster = rl.RayCluster(address=address, trainer_resources={"CPU": 0.5, "spot": 1}, max_failures=1)
    outcome = launch(cluster, partial(ray_jobs.save_when_told, str(tmp_path)))
    for node in nodes.values():
        ray_cluster.remove_node(node)
    assert drained.is_done
    assert (outcome.status, outcome.result) == (0, str(tmp_path / "last.ckpt"))
