"""Replicas as Ray actors: the same samples, every sample once whatever happens, and nothing left behind."""

import os
import signal
import time

import pytest
import torch
from processes import wait_for_the_end_of
from replays import assert_replayed, key, own_engine, requests_of
from tiny_models import save, tiny_llama

from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.errors import EngineError, StalledError
from lit_async_rl.models.weights import UNCHANGED
from lit_async_rl.ray.engine import RayEngine

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]  # a busy machine starts processes slowly


def endless(seed=0):
    lm = tiny_llama(seed=seed)
    lm.generation_config.eos_token_id = []
    return lm


def ray_engine(lm, tmp_path, engine=None, **settings):
    inner = engine or EmbeddedEngine(num_slots=4, device="cpu", update_timeout_s=60.0)
    made = RayEngine(inner, **{"num_cpus": 0.1, **settings})
    made.setup(save(lm, tmp_path))
    made.load_weights(0, lm.named_parameters())
    return made


def gathered(engine, number, timeout_s=300.0):
    """Exactly so many completions: a few more turns bring none."""
    found = []
    deadline = time.monotonic() + timeout_s
    while len(found) < number:
        assert time.monotonic() < deadline, f"{len(found)} of {number}"
        found += engine.poll(0.5)
    return found + engine.poll(0.3)


def until(condition, engine, timeout_s=300.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        assert engine.poll(0.2) == []


def said(caplog, text):
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


def test_with_one_replica_samples_random_states_and_aborts_are_those_of_the_engine_itself(ray_cluster, tmp_path):
    runs, states = [], []
    # the first as the resumed sample 0 of group 0
    requests = requests_of([4, 9, 1], max_tokens=20, head=3, top_p=0.9, first_id=-1)
    for is_on_ray in (False, True):
        lm = tiny_llama()
        inner = dict(num_slots=4, device="cpu", in_flight_weight_updates=False, seed=3)
        if is_on_ray:
            engine = ray_engine(lm, tmp_path, EmbeddedEngine(**inner), replicas=1, delta=True)
            sent = engine._store.num_bytes
        else:
            engine = own_engine(lm, tmp_path, **inner)
        engine.submit(requests)
        found = sorted(gathered(engine, 9), key=key)
        with torch.no_grad():
            lm.model.layers[1].mlp.up_proj.weight[3, :2] += 0.5
        engine.load_weights(1, ((n, UNCHANGED if "norm" in n else w) for n, w in lm.named_parameters()))
        engine.submit(requests_of([7], first_id=10, max_tokens=20, head=3))
        runs.append(found + sorted(gathered(engine, 3), key=key))
        assert not is_on_ray or engine._store.num_bytes == sent + 2 * (4 + 4), "places and values of two numbers"
        states.append(engine.random_state())
        engine.set_random_state(states[0])
        engine.submit(requests_of([5, 5], first_id=20, max_tokens=200))
        engine.abort([20, 21])
        engine.submit(requests_of([6], first_id=20, max_tokens=3))  # the number is free again
        assert all(len(c.token_ids) <= 3 for c in gathered(engine, 3))
        assert engine.num_tokens > 0
        assert engine.busy_s > 0
        with pytest.raises(ValueError, match="vocabulary has only 64"):
            engine.submit([requests_of([2])[0].__class__(**{**vars(requests[0]), "prompt_ids": (64,)})])
        engine.close()
        engine.close()
        assert engine.poll(0.0) == []
    assert runs[0] == runs[1]
    assert {v for c in runs[1][9:] for v in c.versions} == {1}
    assert torch.equal(*states)


@pytest.mark.soak
def test_stopped_for_a_while_or_killed_while_it_samples_or_updates_each_sample_comes_once_and_nothing_is_left(
    ray_cluster, tmp_path, caplog
):
    lms = {0: endless()}
    engine = ray_engine(lms[0], tmp_path, replicas=2)
    pids = set(engine.pids)
    requests = requests_of([20, 9, 4, 3], max_tokens=60, num_samples=20)
    engine.submit(requests)
    found = engine.poll(30.0)
    os.kill(engine.pids[0], signal.SIGSTOP)
    lms[1] = endless(1)
    engine.load_weights(1, lms[1].named_parameters())  # the trainer does not wait
    for _ in range(4):
        found += engine.poll(0.5)
    os.kill(engine.pids[0], signal.SIGCONT)
    assert engine.num_lost == 0
    for version, is_updating in ((2, False), (3, True)):
        requests += requests_of([5], max_tokens=60, first_id=100 * version, num_samples=20)
        engine.submit(requests[-1:])
        found += engine.poll(30.0)
        victim = engine.pids[version % 2]
        lms[version] = endless(version)
        if not is_updating:
            os.kill(victim, signal.SIGKILL)
        before = engine.num_lost
        engine.load_weights(version, lms[version].named_parameters())
        if is_updating:
            os.kill(victim, signal.SIGKILL)
        requests += requests_of([5], max_tokens=60, first_id=100 * version + 1, num_samples=20)
        engine.submit(requests[-1:])
        while engine.num_lost == before or engine.num_ready < 2:
            found += engine.poll(0.5)
        pids |= set(engine.pids)
    found += gathered(engine, 160 - len(found))
    assert sorted(map(key, found)) == sorted((r.id, n) for r in requests for n in range(r.num_samples))
    assert_replayed(lms, requests, found, num_tokens=60, cache_cleared=False)
    for version in (2, 3):
        assert min(v for c in found if c.request_id == 100 * version + 1 for v in c.versions) >= version
    assert len(pids) == 4
    lost = said(caplog, "requests go to other replicas")
    assert len(lost) == engine.num_lost == 2
    assert all("(pid " in line and "node " in line for line in lost), lost
    engine.close()
    wait_for_the_end_of(*pids)


def test_weights_models_and_resources_that_do_not_fit_are_refused_at_once(ray_cluster, tmp_path):
    lm = tiny_llama()
    engine = RayEngine(EmbeddedEngine(num_slots=2, device="cpu"), replicas=1, num_cpus=0.1)
    engine.setup(save(lm, tmp_path))
    with pytest.raises(ValueError, match=r"lack what the engine's model has(.|\n)*last lines of its log(.|\n)*load"):
        engine.load_weights(0, list(lm.named_parameters())[1:])
    engine.close()
    engine = engine.fresh()
    with pytest.raises(OSError, match="nowhere"):
        engine.setup(str(tmp_path / "nowhere"))
    engine.close()
    engine = RayEngine(replicas=1, num_cpus=0.1, resources={"unobtainium": 1.0})
    engine.engine.startup_timeout_s = 2.0
    lack = r"needs num_cpus=0.1, unobtainium=1, where the cluster has CPU 16 \(\S+ free\), unobtainium 0 \(0 free\)"
    with pytest.raises(StalledError, match=rf"data.engine.min_replicas=1 replicas are needed, but only 0 had .*{lack}"):
        engine.setup(save(lm, tmp_path))
    assert engine.starting.startswith("0 of 1 replicas have started; each loads the model, and needs num_cpus=0.1")
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.submit(requests_of([3]))


def test_the_cause_of_a_death_on_another_node_is_told(ray_cluster, tmp_path, caplog):
    node = ray_cluster.add_node(num_cpus=1, object_store_memory=80 << 20, resources={"engine": 1.0})
    ray_cluster.wait_for_nodes()
    engine = ray_engine(endless(), tmp_path, replicas=1, resources={"engine": 1.0})
    os.kill(engine.pids[0], signal.SIGABRT)
    until(lambda: said(caplog, "it is started again"), engine)
    (line,) = said(caplog, "it is started again")
    assert "The last lines of its log:\n" in line
    assert "Fatal Python error: Aborted" in line
    engine.close()
    ray_cluster.remove_node(node)


@pytest.mark.soak
def test_when_a_node_is_gone_the_others_go_on_and_a_node_that_joins_takes_the_replica(ray_cluster, tmp_path, caplog):
    import ray

    node = dict(num_cpus=1, object_store_memory=100 << 20)
    nodes = [ray_cluster.add_node(**node, resources={"engine": 1.0}) for _ in range(2)]
    ray_cluster.wait_for_nodes()
    lms = {0: endless(), 1: endless(1)}
    engine = ray_engine(lms[0], tmp_path, replicas=2, resources={"engine": 1.0})
    places = {entry.place["node"]: entry.number for entry in engine._fleet.entries}
    assert set(places) == {one.node_id for one in nodes}
    requests = requests_of([20, 9, 4, 3], max_tokens=100, num_samples=20)
    engine.submit(requests)
    found = engine.poll(30.0)
    ray_cluster.remove_node(nodes[1], allow_graceful=False)
    until_lost = time.monotonic() + 300
    while not engine.num_lost:
        assert time.monotonic() < until_lost
        found += engine.poll(0.5)
    engine.load_weights(1, lms[1].named_parameters())
    found += gathered(engine, 80 - len(found))
    assert len(set(map(key, found))) == len(found) == 80
    assert_replayed(lms, requests, found, num_tokens=100, cache_cleared=False)
    assert said(caplog, f"replica {places[nodes[1].node_id]} (pid ")
    assert engine.num_ready == 1
    nodes[1] = ray_cluster.add_node(**node, resources={"engine": 1.0})
    until(lambda: engine.num_ready == 2, engine)
    assert {entry.place["node"] for entry in engine._fleet.entries} == {one.node_id for one in nodes}
    engine.close()
    for one in nodes:
        ray_cluster.remove_node(one)
    assert ray.is_initialized()
