"""Whose a replica is: one trainer's at a time, until nobody comes for it any more. Without Ray."""

import json
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

import lit_async_rl as rl
from lit_async_rl.cli import kept_engines
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.errors import SetupError
from lit_async_rl.ray import residence, tenancy
from lit_async_rl.ray.residence import digest_of, end_replicas, end_unwanted, find_residence, names_with
from lit_async_rl.ray.supervise import RUN_ID
from lit_async_rl.ray.tenancy import Lease, Tenancy

MODEL = {"name": "m", "config": {"layers": 2}}


class Cluster:
    """What is asked of Ray about named actors."""

    def __init__(self, *names):
        self.names = list(names)
        self.util = SimpleNamespace(
            list_named_actors=lambda all_namespaces: [{"name": n, "namespace": residence.NAMESPACE} for n in self.names]
        )
        self.stopped = []

    def get_actor(self, name, namespace):
        if name not in self.names:
            raise ValueError(name)
        return SimpleNamespace(name=name, stop=SimpleNamespace(remote=lambda: self.stopped.append(name)))

    def wait(self, refs, num_returns, timeout):
        return refs, []

    def kill(self, actor, no_restart):
        self.names.remove(actor.name)


def over(lease, cluster=None, timeout_s=30.0):
    """The reason why a replica without a trainer ends."""
    reasons = []
    done = threading.Event()
    Tenancy(lease).watch(cluster or Cluster(), lambda reason: (reasons.append(reason), done.set()))
    assert done.wait(timeout_s)
    return reasons[0]


def test_a_start_of_the_same_run_takes_over_at_once_and_calls_of_the_earlier_one_are_refused():
    mine = Tenancy(None)
    assert mine.claim("first", "run 1", "a") == ""
    assert mine.hears("first")
    assert mine.claim("second", "run 1", "b") == ""
    assert (mine.hears("first"), mine.hears("second")) == (False, True)


def test_another_run_waits_until_the_replica_is_released_or_its_trainer_silent(monkeypatch):
    mine = Tenancy(None)
    mine.claim("first", "run 1", "the run of process host:1")
    assert mine.claim("other", "run 2", "b") == "the run of process host:1"
    assert mine.hears("first"), "it is still the first one's"
    mine.release()
    assert mine.claim("other", "run 2", "b") == ""
    monkeypatch.setattr(tenancy, "BUSY_S", 0.0)
    assert mine.claim("third", "run 3", "c") == ""


def test_a_replica_that_nobody_calls_ends_after_its_lease_and_with_its_runs_command(monkeypatch):
    monkeypatch.setattr(tenancy, "LOOK_S", 0.01)
    monkeypatch.setattr(tenancy, "ORPHAN_S", 0.02)
    here = Lease(seconds=0.2, run="run-1", namespace="n")
    assert over(here, Cluster("run-1")) == "no trainer has called for engine_lease_s=0.2"
    assert over(Lease(seconds=600.0, run="run-1", namespace="n")) == "the command of its run has ended"
    kept = Tenancy(Lease(seconds=None, run=None, namespace="n"))
    time.sleep(0.05)
    assert kept._over(Cluster()) == ""


def test_names_say_whose_replicas_are_and_which_the_next_run_may_have(monkeypatch):
    def home(engine=None, keep_engines=False, lease_s=None):
        found = find_residence(engine or EmbeddedEngine(), MODEL, keep_engines=keep_engines, lease_s=lease_s)
        found.leave()
        return found

    alone = home()
    assert (alone.outlives, alone.options(3).get("lifetime")) == (False, None)
    kept = home(keep_engines=True)
    assert kept.lease == Lease(seconds=None, run=None, namespace=residence.NAMESPACE)
    assert kept.prefix == home(keep_engines=True, lease_s=5.0).prefix
    assert kept.options(3) == kept.options(3) | {"lifetime": "detached", "get_if_exists": True}
    assert kept.prefix != home(EmbeddedEngine(num_slots=3), keep_engines=True).prefix
    assert digest_of(EmbeddedEngine(), MODEL) != digest_of(EmbeddedEngine(), MODEL | {"config": {"layers": 3}})
    monkeypatch.setenv(RUN_ID, "run-7")
    placed = home()
    assert placed.lease == Lease(seconds=600.0, run="run-7", namespace=residence.NAMESPACE)
    assert placed.prefix.startswith(residence.prefix_of("run-7"))
    assert placed.run == home().run != kept.run


def test_two_engines_of_one_process_never_share_replicas():
    settings = {"keep_engines": True, "lease_s": None}
    both = [find_residence(EmbeddedEngine(), MODEL, **settings) for _ in range(2)]
    assert both[0].prefix != both[1].prefix
    for one in both:
        one.leave()


def test_the_digest_of_an_engine_is_the_same_in_another_process():
    code = "import sys, json; from lit_async_rl.ray.residence import digest_of; import lit_async_rl as rl; "
    code += "print(digest_of(rl.VLLMEngine(transfer=rl.FileTransfer(), sleep_level=1), json.loads(sys.argv[1])))"
    there = subprocess.run(
        [sys.executable, "-c", code, json.dumps(MODEL)], capture_output=True, text=True, timeout=170, check=True
    )
    assert there.stdout.strip() == digest_of(rl.VLLMEngine(transfer=rl.FileTransfer(), sleep_level=1), MODEL)


def test_all_with_a_prefix_are_ended_and_those_beyond_the_number_of_a_resumed_run(monkeypatch):
    monkeypatch.setenv(RUN_ID, "run-7")
    home = find_residence(EmbeddedEngine(), MODEL, keep_engines=False, lease_s=None)
    home.leave()
    others = "lit_async_rl.run-8.a.1.0"
    cluster = Cluster(*(f"{home.prefix}{n}" for n in range(4)), others)
    end_unwanted(cluster, home, replicas=2)
    assert cluster.names == [f"{home.prefix}0", f"{home.prefix}1", others]
    assert end_replicas(cluster, names_with(cluster, residence.prefix_of("run-7"))) == 2
    assert (cluster.names, len(cluster.stopped)) == ([others], 4)


def test_the_command_lists_and_ends_engines_that_were_kept(monkeypatch, capsys):
    cluster = Cluster("lit_async_rl.kept.0123.1.0", "lit_async_rl.run-8.a.1.0")
    monkeypatch.setattr(kept_engines.runtime, "connect", lambda *args, **settings: cluster)
    kept_engines.main([])
    kept_engines.main(["--end"])
    kept_engines.main([])
    assert capsys.readouterr().out.splitlines() == [
        "lit_async_rl.kept.0123.1.0",
        "ended 1 engines",
        "no engines were kept",
    ]


def test_settings_that_cannot_be_met_are_refused_in_one_line(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ValueError, match=r"cluster\.engines\.engine_lease_s must be >= 5 and finite, got 0"):
        rl.EngineReplicas(replicas=2, engine_lease_s=0.0)
    with pytest.raises(ValueError, match=r"cluster\.engines\.keep_engines=true needs replicas or max above 1, got 1"):
        rl.EngineReplicas(keep_engines=True)
    with pytest.raises(ValueError, match=r"data\.engine\.engine_lease_s must be >= 5 and finite, got -1"):
        rl.RayEngine(engine_lease_s=-1.0)
    pytest.importorskip("ray")
    cluster = rl.RayCluster(engines=rl.EngineReplicas(replicas=2, keep_engines=True))
    with pytest.raises(SetupError, match=r"cluster\.engines\.keep_engines=true needs a Ray that outlives the run"):
        cluster.check()
    with pytest.raises(SetupError, match=r"`ray start --head`, and data\.engine\.address=auto"):
        rl.RayEngine(keep_engines=True).setup("nowhere")
