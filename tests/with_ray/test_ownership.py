"""Engines of placed ranks outlive these, prove process and weights to the next start, and end with the command."""

import os
import signal
import subprocess
import sys
import uuid
from functools import partial

import psutil
import pytest
import ray_jobs
import torch
from processes import wait_for_the_end_of
from replays import assert_replayed, key, requests_of
from test_ray_engine import endless, gathered, said, until
from test_trainer_ranks import ROOT, SMALL, When, folder_of, launch, steps_of
from tiny_models import save, tiny_llama

import lit_async_rl as rl
from lit_async_rl.cli.app import main
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.errors import EngineError
from lit_async_rl.ray.coordinator import Coordinator
from lit_async_rl.ray.engine import RayEngine
from lit_async_rl.ray.runtime import NAMESPACE
from lit_async_rl.ray.supervise import RUN_ID

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]
engines = []  # of the test that runs


@pytest.fixture(autouse=True)
def _none_are_left(ray_cluster):
    """Also when a test has failed, whose engines have their names still."""
    yield
    for engine in engines:
        engine.has_failed = True  # so that nothing stays for another start
        engine.close()
    engines.clear()
    wait_for_the_end_of(*replica_pids(ray_cluster))


@pytest.fixture
def placed(ray_cluster, monkeypatch):
    """This process is a rank, and the command that owns the run's coordinator."""
    import ray

    name = f"run-{uuid.uuid4().hex}"
    coordinator = ray.remote(num_cpus=0)(Coordinator).options(name=name, namespace=NAMESPACE).remote([])
    monkeypatch.setenv(RUN_ID, name)
    yield
    ray.kill(coordinator)


def shared(address, **settings):
    inner = EmbeddedEngine(num_slots=4, device="cpu", update_timeout_s=60.0, seed=3)
    made = RayEngine(inner, **{"replicas": 1, "num_cpus": 0.1, "address": address, **settings})
    engines.append(made)
    return made


def test_the_next_start_of_a_rank_finds_process_and_weights_and_reads_only_other_weights(
    ray_cluster, placed, tmp_path, caplog
):
    lms = {3: endless(), 1: endless(seed=1)}  # so that all samples have their full length
    model = save(lms[3], tmp_path)
    requests = requests_of([4, 9, 1], max_tokens=20)

    engine = shared(ray_cluster.address)
    engine.setup(model)
    engine.load_weights(3, lms[3].named_parameters())
    pids = engine.pids
    random_state = engine.random_state()
    engine.submit(requests_of([4], max_tokens=200))  # which nobody waits for
    engine.close()

    said_of = [(3, "it keeps the weights of version 3"), (1, "reads new weights"), (1, "it keeps the weights")]
    for version, words in said_of:
        engine = shared(ray_cluster.address)
        engine.setup(model)
        engine.load_weights(version, lms[version].named_parameters())
        assert engine.pids == pids
        assert said(caplog, words)
        assert engine.num_lost == 0
        caplog.clear()
        assert torch.equal(engine.random_state(), random_state), "that of a new engine"
        engine.submit(requests)
        found = sorted(gathered(engine, 9), key=key)
        assert {v for c in found for v in c.versions} == {version}
        assert_replayed({version: lms[version]}, requests, found, num_tokens=20, cache_cleared=False)
        engine.close()

    zombie = shared(ray_cluster.address)
    zombie.setup(model)
    zombie.load_weights(1, lms[1].named_parameters())
    zombie._fleet._actors.leave()  # as in another process
    other = shared(ray_cluster.address)
    other.setup(model)
    with pytest.raises(EngineError, match="another trainer has taken over replica 0"):
        gathered(zombie, 1)
    zombie.close()
    other.load_weights(1, lms[1].named_parameters())
    other.submit(requests)
    assert len(gathered(other, 9)) == 9
    assert other.pids == pids
    other.has_failed = True  # the run replaces it: nothing is kept
    other.close()
    wait_for_the_end_of(*pids)


def test_a_start_finds_as_many_as_it_has_and_none_that_was_ended(ray_cluster, placed, tmp_path):
    lm = tiny_llama()
    model = save(lm, tmp_path)

    def started(replicas):
        engine = shared(ray_cluster.address, replicas=replicas)
        engine.setup(model)
        engine.load_weights(0, lm.named_parameters())
        return engine

    engine = started(2)
    first = engine.pids
    engine.resize(1)
    until(lambda: len(engine._fleet.entries) == 1, engine)
    (ended,) = set(first) - set(engine.pids)
    wait_for_the_end_of(ended)
    engine.close()
    engine = started(2)
    second = engine.pids
    assert set(first) & set(second) == set(first) - {ended}
    engine.close()
    engine = started(1)
    assert engine.pids == second[:1]
    wait_for_the_end_of(second[1])


COMMAND = """
import sys, time
from lit_async_rl.ray import runtime
from lit_async_rl.ray.coordinator import Coordinator
ray = runtime.connect(sys.argv[1], what="the command")
kind = ray.remote(num_cpus=0)(Coordinator)
coordinator = kind.options(name=sys.argv[2], namespace=runtime.NAMESPACE).remote([])
ray.get(coordinator.folder.remote())
print("there", flush=True)
time.sleep(600)
"""


def test_after_kill_9_of_the_command_its_engines_end_at_once_though_a_rank_uses_them(
    ray_cluster, tmp_path, monkeypatch
):
    lm = endless()
    run = f"run-{uuid.uuid4().hex}"
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND, ray_cluster.address, run], stdout=subprocess.PIPE, text=True
    )
    assert command.stdout.readline() == "there\n"
    monkeypatch.setenv(RUN_ID, run)
    engine = shared(ray_cluster.address)
    engine.setup(save(lm, tmp_path))
    engine.load_weights(0, lm.named_parameters())
    engine.submit(requests_of([4, 9, 1], max_tokens=200))
    pids = replica_pids(ray_cluster)
    assert engine.pids == pids
    command.kill()
    command.wait(60)
    wait_for_the_end_of(*pids)
    with pytest.raises(EngineError):
        gathered(engine, 10**6)
    assert replica_pids(ray_cluster) == []


@pytest.mark.parametrize("end", ["raises", pytest.param("returns", marks=pytest.mark.soak)])
def test_engines_of_ranks_end_with_the_run_however_that_ends(ray_cluster, tmp_path, monkeypatch, end):
    monkeypatch.chdir(ROOT)
    model = save(tiny_llama(), tmp_path)
    cluster = rl.RayCluster(address=ray_cluster.address, trainer_resources={"CPU": 0.5})
    outcome = launch(cluster, partial(ray_jobs.set_up_engines, model, end))
    assert (outcome.status, len(outcome.result)) == (int(end == "raises"), 1)
    wait_for_the_end_of(*outcome.result)


def replica_pids(cluster):
    raylet = psutil.Process(cluster.head_node.all_processes["raylet"][0].process.pid)
    found = []
    for child in raylet.children():
        try:
            found += [child.pid] * ("ray::ReplicaProcess" in " ".join(child.cmdline()))
        except psutil.Error:  # it has ended since
            continue
    return sorted(found)


def rank_of(cluster):
    """Process of the only trainer rank on the cluster; None without one."""
    for process in psutil.process_iter():
        try:
            is_rank = any("lit_async_rl.ray.rank" in word for word in process.cmdline())
            if is_rank and process.environ().get("RAY_ADDRESS") == cluster.address:
                return process.pid
        except psutil.Error:
            continue
    return None


def test_engines_outlive_a_killed_rank_and_end_with_the_command(ray_cluster, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(ROOT)
    own = ["--cluster.address", ray_cluster.address, "--trainer.logger.init_args.save_dir", str(tmp_path / "runs")]
    own += ["--cluster.trainer_ranks", "1", "--cluster.trainer_resources", '{"CPU": 0.5}']
    own += ["--cluster.engines", '{"replicas": 2}', "--trainer.max_steps", "100000"]
    at_kill = {}

    def kill(_):
        at_kill["engines"] = replica_pids(ray_cluster)
        at_kill["steps"] = len(steps_of(folder_of(tmp_path)))
        at_kill["rank"] = rank_of(ray_cluster)
        os.kill(at_kill["rank"], signal.SIGKILL)

    killed = When(lambda: list(tmp_path.glob("runs/**/last.ckpt")), kill)

    def has_gone_on():
        is_back = killed.is_done and rank_of(ray_cluster) not in (None, at_kill["rank"])
        return is_back and len(steps_of(folder_of(tmp_path))) >= at_kill["steps"] + 10

    def stop(_):
        at_kill["engines afterwards"] = replica_pids(ray_cluster)
        os.kill(os.getpid(), signal.SIGTERM)

    stopped = When(has_gone_on, stop)
    main([*SMALL, *own])
    assert (killed.is_done, stopped.is_done) == (True, True)
    assert len(at_kill["engines"]) == 2
    assert at_kill["engines afterwards"] == at_kill["engines"]
    assert capfd.readouterr().err.count("was already running: it keeps") == 2
    steps = steps_of(folder_of(tmp_path))
    assert steps == list(range(len(steps)))
    wait_for_the_end_of(*at_kill["engines"])
    assert replica_pids(ray_cluster) == []
