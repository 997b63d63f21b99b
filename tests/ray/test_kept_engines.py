"""Engines that outlive their trainer keep process and weights, prove both to the next one, and end when they should."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from processes import is_running, wait_for_the_end_of
from replays import assert_replayed, key, requests_of
from test_ray_engine import endless, gathered, said
from test_trainer_ranks import ROOT, SMALL, When, folder_of, steps_of
from tiny_models import save, tiny_llama

from lit_async_rl.cli import kept_engines
from lit_async_rl.cli.app import main
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.errors import EngineError
from lit_async_rl.ray.engine import RayEngine
from lit_async_rl.ray.residence import NAME, end_replicas, names_with
from lit_async_rl.ray.supervise import ADDRESS

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]
engines = []  # of the test that runs


@pytest.fixture(autouse=True)
def _none_are_left(ray_cluster):
    """Also when a test has failed, whose engines have their names still."""
    yield
    import ray

    for engine in engines:
        engine.has_failed = True  # so that nothing is kept
        engine.close()
    engines.clear()
    end_replicas(ray, names_with(ray, f"{NAME}."))
    wait_for_the_end_of(*replica_pids(ray_cluster))


def kept(address, **settings):
    inner = EmbeddedEngine(num_slots=4, device="cpu", update_timeout_s=60.0, seed=3)
    made = RayEngine(inner, **{"replicas": 1, "num_cpus": 0.1, "address": address, "keep_engines": True, **settings})
    engines.append(made)
    return made


def test_the_next_trainer_finds_process_and_weights_and_reads_only_other_weights(
    ray_cluster, tmp_path, caplog, monkeypatch
):
    lms = {3: endless(), 1: endless(seed=1)}  # so that all samples have their full length
    model = save(lms[3], tmp_path)
    requests = requests_of([4, 9, 1], max_tokens=20)

    engine = kept(ray_cluster.address)
    engine.setup(model)
    engine.load_weights(3, lms[3].named_parameters())
    pids = engine.pids
    random_state = engine.random_state()
    engine.submit(requests_of([4], max_tokens=200))  # which nobody waits for
    engine.close()
    assert said(caplog, "1 engines stay on the cluster")
    caplog.clear()

    said_of = [(3, "it keeps the weights of version 3"), (1, "reads new weights"), (1, "it keeps the weights")]
    for version, words in said_of:
        engine = kept(ray_cluster.address)
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

    zombie = kept(ray_cluster.address)
    zombie.setup(model)
    zombie.load_weights(1, lms[1].named_parameters())
    with monkeypatch.context() as patched:
        zombie._residence.leave()  # as in another process, of another run
        patched.setattr("lit_async_rl.ray.residence.socket.gethostname", lambda: "elsewhere")
        patched.setattr("lit_async_rl.ray.engine.BUSY_S", 0.5)
        with pytest.raises(
            EngineError, match=r"replica 0 is in use by the run of process .*keep_engines=true is for runs"
        ):
            kept(ray_cluster.address).setup(model)
    zombie.submit(requests)
    assert len(gathered(zombie, 9)) == 9
    zombie._residence.leave()  # as in another process of the same run
    other = kept(ray_cluster.address)
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


RUN = """
import sys, time
sys.path[:0] = sys.argv[3].split(":")
from test_kept_engines import kept
from tiny_models import tiny_llama
engine = kept(sys.argv[1], engine_lease_s=float(sys.argv[4]))
engine.setup(sys.argv[2])
engine.load_weights(5, tiny_llama().named_parameters())
print(*engine.pids, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("lease_s", [5.0, pytest.param(600.0, marks=pytest.mark.soak)])
def test_after_kill_9_of_the_trainer_engines_stay_for_their_lease_and_no_longer(ray_cluster, tmp_path, lease_s):
    model = save(tiny_llama(), tmp_path)
    words = [sys.executable, "-c", RUN, ray_cluster.address, model, ":".join(sys.path), str(lease_s)]
    trainer = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    pids = list(map(int, trainer.stdout.readline().split()))
    time.sleep(6.0)  # the trainer asks for nothing, and is there
    assert all(map(is_running, pids))
    trainer.kill()
    trainer.wait(60)
    if lease_s < 600.0:
        wait_for_the_end_of(*pids)
        return
    engine = kept(ray_cluster.address, engine_lease_s=lease_s)
    engine.setup(model)
    engine.load_weights(5, tiny_llama().named_parameters())
    assert engine.pids == pids
    engine.close()
    kept_engines.main(["--address", ray_cluster.address, "--end"])
    wait_for_the_end_of(*pids)


def replica_pids(cluster):
    raylet = psutil.Process(cluster.head_node.all_processes["raylet"][0].process.pid)
    found = []
    for child in raylet.children():
        try:
            found += [child.pid] * ("ray::Replica" in " ".join(child.cmdline()))
        except psutil.Error:  # it has ended since
            continue
    return sorted(found)


def rank_of(cluster):
    """Process of the only trainer rank on the cluster; None without one."""
    for process in psutil.process_iter():
        try:
            is_rank = any("lit_async_rl.ray.rank" in word for word in process.cmdline())
            if is_rank and process.environ().get(ADDRESS) == cluster.address:
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
    assert capfd.readouterr().err.count("was there already: it keeps") == 2
    steps = steps_of(folder_of(tmp_path))
    assert steps == list(range(len(steps)))
    wait_for_the_end_of(*at_kill["engines"])
    assert replica_pids(ray_cluster) == []
