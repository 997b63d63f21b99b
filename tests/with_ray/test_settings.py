"""Settings of RayEngine, names of its replicas, and a package that never needs Ray for anything else."""

import json

import pytest

import lit_async_rl as rl
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.ray import runtime
from lit_async_rl.simulation.environment import Delayed
from lit_async_rl.tasks.calculator import Calculator


def test_settings_out_of_range_are_refused():
    for settings, words in (
        (dict(replicas=0), r"data\.engine\.replicas must be"),
        (dict(num_cpus=-1.0), r"data\.engine\.num_cpus must be >= 0, got -1"),
        (dict(replicas=2, min_replicas=3), r"data\.engine\.min_replicas must be in \[1, 2\], got 3"),
        (dict(session_margin=-1.0), r"data\.engine\.session_margin must be >= 0"),
        (dict(engine=rl.RayEngine()), "must be a single engine, got RayEngine"),
        (dict(engine=rl.EpisodeEngine(EmbeddedEngine(), Delayed(Calculator()))), r"EpisodeEngine\(RayEngine"),
    ):
        with pytest.raises(ValueError, match=words):
            rl.RayEngine(**settings)


def test_it_has_the_abilities_and_limits_of_its_engine():
    engine = rl.RayEngine(EmbeddedEngine(num_slots=3, update_timeout_s=7.0, in_flight_weight_updates=False), replicas=4)
    assert (engine.num_slots, engine.update_timeout_s, engine.in_flight_weight_updates) == (12, 7.0, False)
    assert engine.records_heads
    assert engine.takes_adapters
    again = engine.fresh(out_of_memory=True)
    assert (again.num_slots, again.replicas) == (4, 4)
    assert rl.RayEngine(replicas=2).fresh(out_of_memory=True).num_slots == 64


def test_the_recipe_of_an_engine_makes_the_same_again_with_other_random_numbers():
    pytest.importorskip("ray")
    from lit_async_rl.ray.replica import Recipe

    engine = EmbeddedEngine(3, seed=5, max_model_len=17)
    for number in (0, 2):
        made = Recipe.of(engine).make(number)
        assert (made.num_slots, made.seed, made.engine.settings.max_model_len) == (3, 5 + number, 17)
    halved = engine.fresh(out_of_memory=True)
    assert Recipe.of(halved).make(0).num_slots == 1


MODEL = {"name": "m", "needs": {"num_cpus": 2.0}}


@pytest.mark.slow
def test_the_digest_of_an_engine_is_the_same_in_another_process_and_another_for_other_settings(process, tmp_path):
    pytest.importorskip("ray")
    from lit_async_rl.ray.ownership import digest_of

    code = "import sys, json; from lit_async_rl.ray.ownership import digest_of; import lit_async_rl as rl; "
    code += "print(digest_of(rl.VLLMEngine(transfer=rl.FileTransfer(), sleep_level=1), json.loads(sys.argv[1])))"
    there = process.run([json.dumps(MODEL)], tmp_path, code=code)
    assert there.said.strip() == digest_of(rl.VLLMEngine(transfer=rl.FileTransfer(), sleep_level=1), MODEL)
    engine = EmbeddedEngine(num_slots=3)
    others = [
        (EmbeddedEngine(num_slots=4), MODEL),
        (engine, MODEL | {"name": "n"}),
        (engine, MODEL | {"needs": {"num_cpus": 1.0}}),
    ]
    assert digest_of(engine, MODEL) == digest_of(EmbeddedEngine(num_slots=3), MODEL)
    assert len({digest_of(*one) for one in others} | {digest_of(engine, MODEL)}) == 4


def test_two_engines_of_one_process_never_share_replicas_and_a_name_is_free_after_its_engine(monkeypatch):
    pytest.importorskip("ray")
    from lit_async_rl.ray.actors import Resources
    from lit_async_rl.ray.ownership import ReplicaActors

    monkeypatch.delenv("LIT_ASYNC_RL_RAY_RUN", raising=False)
    needs = Resources({"CPU": 1.0})

    def replicas():
        return ReplicaActors(None, EmbeddedEngine(), model="m", resources=needs)

    first, second = replicas(), replicas()
    names = first._name(0), second._name(0)
    assert names[0] != names[1]
    assert not first.outlive_the_trainer
    first.leave()
    third = replicas()
    assert third._name(0) == names[0]
    for one in (second, third):
        one.leave()


ALONE = """
import sys
import lit_async_rl as rl
engine = rl.RayEngine(replicas=2)
rl.EmbeddedEngine, rl.RolloutDataModule, rl.PolicyModule, rl.fit
assert "ray" not in sys.modules, "ray was imported"
sys.modules["ray"] = None
try:
    engine.setup("nothing")
except rl.errors.SetupError as error:
    print(error)
"""


@pytest.mark.slow
def test_ray_is_not_imported_before_it_is_used_and_its_absence_is_explained(process, tmp_path):
    """Nor by what every command imports."""
    done = process.run([], tmp_path, code=ALONE)
    assert done.status == 0, done.said
    assert "pip install 'lit-async-rl[ray]'" in done.said


def test_a_cluster_that_is_not_there_is_named(monkeypatch):
    ray = pytest.importorskip("ray")
    if ray.is_initialized():
        pytest.skip("connected already")
    monkeypatch.setattr(runtime, "RETRY_S", 0.0)
    tries = []

    def init(**settings):
        tries.append(settings["address"])
        raise ConnectionError("Could not find any running Ray instance")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(runtime, "follow", lambda address: None)  # asks the head, which this test is not about
    with pytest.raises(runtime.SetupError, match=r"Ray at 10\.0\.0\.1:6379 did not answer .*Could not find any"):
        runtime.connect("10.0.0.1:6379")
    assert len(tries) == 2
