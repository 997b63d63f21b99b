"""Processes of vLLM replicas: the environment that they get. None is started here, see test_vllm_fleet.py."""

import pytest

from lit_async_rl.assets import asset
from lit_async_rl.engines.vllm import replica_process, replicas
from lit_async_rl.engines.vllm.engine_arguments import LAUNCHER_VARIABLES
from lit_async_rl.engines.vllm.replicas import VLLMReplicas


@pytest.fixture
def environments(monkeypatch):
    """Environments of the processes that would have been started."""
    found = []

    class Process:
        def __init__(self, command, env, **settings):
            found.append(env)

        def terminate(self):
            pass

        wait = poll = lambda self, *limit: None

    monkeypatch.setattr(replica_process.subprocess, "Popen", Process)
    monkeypatch.setattr(replicas, "check_vllm", lambda: None)
    monkeypatch.setattr(replicas.ReplicaFleet, "_wait_until_they_listen", lambda self: None)
    monkeypatch.setattr(replicas.VLLMServerEngine, "setup", lambda self, model: None)
    return found


def test_replicas_do_not_take_themselves_for_ranks_of_the_trainer(environments, monkeypatch):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("SOME_OTHER", "4")
    engine = VLLMReplicas(replicas=2)
    engine.setup(asset("sort_policy"))
    engine._fleet.replicas[1].restart(0.0)
    engine.close()
    assert len(environments) == 3
    for environment in environments:
        assert not environment.keys() & set(LAUNCHER_VARIABLES)
        assert environment["SOME_OTHER"] == "4"
        assert environment["VLLM_API_KEY"]


@pytest.mark.parametrize(("theirs", "found"), [("7", "7"), (None, "2")])
def test_the_users_number_of_threads_is_kept(environments, monkeypatch, theirs, found):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if theirs is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", theirs)
    engine = VLLMReplicas(replicas=2, num_threads=2)
    engine.setup(asset("sort_policy"))
    engine.close()
    assert [environment["OMP_NUM_THREADS"] for environment in environments] == [found, found]
