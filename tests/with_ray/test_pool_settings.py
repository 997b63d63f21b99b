"""Settings of pools, their answers when these are wrong, and the dry run; without Ray, but for the last test."""

import asyncio
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pool_parts
import pytest

import lit_async_rl as rl
from lit_async_rl.cli.app import AsyncRLCLI, main
from lit_async_rl.environments.episode_engine import name_of
from lit_async_rl.errors import LostRewardError, RewardError, SetupError
from lit_async_rl.problem import Prompt
from lit_async_rl.ray import actors as ray_actors
from lit_async_rl.ray import pool
from lit_async_rl.ray.dry_run import Node, await_room, described, find_lack, place, roles_of
from lit_async_rl.ray.environment_pool import _find_wrong as find_wrong_observation
from lit_async_rl.ray.pool import pack_prompt, unpack_prompt
from lit_async_rl.ray.pool_worker import find_fault
from lit_async_rl.ray.reward_pool import Call, RayReward, _find_wrong, _find_wrong_notes
from lit_async_rl.ray.reward_worker import RewardWorker
from lit_async_rl.rewards import hooks
from lit_async_rl.rewards.calls import reward_name
from lit_async_rl.rewards.forms import BatchedReward, TRLReward
from lit_async_rl.runtime.retries import LOST_TRIES, Retries, TryPolicy
from lit_async_rl.tasks.calculator import Calculator
from lit_async_rl.utils.identity import reward_identity

QUICKSTART = ["--config", "configs/quickstart.yaml"]


@pytest.fixture
def at_the_root(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (rl.RewardActors, dict(actors=0), "cluster.rewards.actors must be >= 1, got 0"),
        (rl.RewardActors, dict(calls=0), "cluster.rewards.calls must be >= 1, got 0"),
        (rl.RewardActors, dict(resources={"cpu": 1}), "cluster.rewards.resources.cpu: Ray calls it CPU"),
        (rl.EnvironmentActors, dict(actors=0), "cluster.environments.actors must be >= 1, got 0"),
        (rl.EnvironmentActors, dict(resources={"GPU": -1}), "cluster.environments.resources.GPU must be a number >= 0"),
    ],
)
def test_settings_out_of_range_are_refused(kind, settings, message):
    with pytest.raises(ValueError, match=message):
        kind(**settings)


def test_pools_need_a_reward_and_an_environment():
    cluster = rl.RayCluster(rewards=rl.RewardActors(), environments=rl.EnvironmentActors())
    with pytest.raises(ValueError, match=r"cluster.rewards is set, but data.reward is not"):
        cluster.with_reward_actors(None, workers=1, timeout_s=1.0)
    with pytest.raises(ValueError, match=r"cluster.environments is set, but data.engine \(EmbeddedEngine\) has no env"):
        cluster.with_environment_actors(rl.EmbeddedEngine())


def test_the_settings_of_a_run_from_python_are_a_configuration():
    cluster = rl.RayCluster(rewards=rl.RewardActors(actors=3), environments=rl.EnvironmentActors(resources={"GPU": 1}))
    given = cluster.as_config()["init_args"]
    assert given["rewards"] == {"actors": 3, "resources": None, "calls": 1}
    assert given["environments"] == {"actors": 2, "resources": {"GPU": 1}}


@pytest.mark.slow
def test_a_configuration_with_a_pool_of_rewards_scores_with_it(at_the_root, tmp_path):
    flags = ["--cluster", "RayCluster", "--cluster.rewards.actors", "3", "--cluster.rewards.resources", "{CPU: 1}"]
    logs = ["--trainer.logger.save_dir", str(tmp_path)]
    cli = AsyncRLCLI([*QUICKSTART, *flags, *logs], starts_ranks=True)
    plain = AsyncRLCLI([*QUICKSTART, *logs], starts_ranks=True)
    assert not cli.places_ranks
    reward = cli.datamodule.reward
    assert isinstance(reward, RayReward)
    assert (reward.pool.settings.actors, str(reward.pool.settings.resources)) == (3, "num_cpus=1")
    assert reward_identity(reward) == reward_identity(plain.datamodule.reward)
    assert reward_name(reward) == reward_name(plain.datamodule.reward)
    assert reward.references is plain.datamodule.reward.references
    assert cli.datamodule.held_out.success == plain.datamodule.held_out.success


@pytest.mark.slow
def test_a_configuration_with_a_pool_of_environments_plays_in_it(at_the_root, tmp_path):
    flags = ["--cluster", "RayCluster", "--cluster.environments.actors", "3", "--cluster.engines.replicas", "2"]
    words = ["--config", "configs/calculator.yaml", *flags, "--trainer.logger.save_dir", str(tmp_path)]
    engine = AsyncRLCLI(words).datamodule.engine
    assert isinstance(engine.engine, rl.RayEngine)
    assert engine.environment.pool.settings.actors == 3
    assert name_of(engine.environment) == "Calculator"
    assert engine.fresh().environment is engine.environment, "also after a restart"
    plain = AsyncRLCLI(["--config", "configs/calculator.yaml", "--trainer.logger.save_dir", str(tmp_path)])
    assert engine.scoring_identity == plain.datamodule.engine.scoring_identity


def test_rewards_and_environments_with_processes_are_made_anew_where_they_arrive():
    for made in (
        rl.CodeReward(allow_unsandboxed=True, timeout_s=7.0),
        rl.JudgeReward(model="m", engine=None, base_url="http://127.0.0.1:1/v1"),
        rl.IsolatedReward("my.reward", timeout_s=7.0),
        rl.PythonTool(allow_unsandboxed=True, max_calls=7),
        rl.GymnasiumEnvironment(pool_parts.length, max_threads=7),
        BatchedReward(pool_parts.batched, 7),
        TRLReward(pool_parts.batched, "solution", 7),
    ):
        other = pickle.loads(pickle.dumps(made))
        assert type(other) is type(made)
        assert reward_identity(other) == reward_identity(made)


def test_a_prompt_arrives_as_it_was():
    messages = [{"role": "user", "content": "2 + 2?"}]
    for prompt in (Prompt(text="a", answer="b", metadata={"c": [1]}, other_answers=("d",)), Prompt(messages=messages)):
        there = unpack_prompt(pack_prompt(prompt))
        assert (there.text, there.answers, there.metadata) == (prompt.text, prompt.answers, prompt.metadata)
        assert there.messages == prompt.messages


# -- starts -----------------------------------------------------------------------------------------------------------


def test_an_actor_whose_process_ends_four_times_while_it_starts_is_given_up(monkeypatch):
    """Calls that Ray refuses, because it is bringing the actor back, do not count."""
    now = [0.0]
    lengths = [0.3, 0.3, 20.0, 0.3, 20.0, 20.0, 20.0, 20.0]
    killed = []
    for module in (pool, ray_actors):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(pool, "RETRY_S", 0.0)

    async def start():
        now[0] += lengths.pop(0)
        raise OSError("the process is gone")

    actor = SimpleNamespace(start=SimpleNamespace(remote=start))
    cluster = rl.RayCluster(environments=rl.EnvironmentActors(actors=1))
    actors = cluster.with_environment_actors(rl.EpisodeEngine(rl.EmbeddedEngine(), Calculator())).environment.pool
    actors._ray = SimpleNamespace(
        exceptions=SimpleNamespace(ActorDiedError=KeyError), kill=lambda actor, no_restart: killed.append(no_restart)
    )
    assert asyncio.run(actors._start(actor, "actor 0")) is None
    assert lengths == [20.0], "four of them"
    assert killed == [True]
    reason = "actor 0: its process has ended while it started (OSError: the process is gone)"
    assert actors._why_none() == f"cluster.environments: none of 1 actors could be started; {reason}"


# -- tries ------------------------------------------------------------------------------------------------------------


def test_a_lost_process_is_no_failure_of_the_reward_until_it_comes_again_and_again():
    policy = dict(owner="data.scoring", timeout_s=1.0)
    lost, own = LostRewardError("gone"), RewardError("raised")
    retries = Retries(TryPolicy(**policy))
    with pytest.raises(RewardError, match="raised"):
        retries.may_try_again("p", 1, own)
    assert all(retries.may_try_again("p", n, lost) for n in range(1, LOST_TRIES))
    with pytest.raises(LostRewardError, match="gone"):
        retries.may_try_again("p", LOST_TRIES, lost)
    retries = Retries(TryPolicy(**policy, tries=2))
    assert retries.may_try_again("p", 1, lost)
    assert not retries.may_try_again("p", 2, lost), "the number that was set counts"


# -- answers that cannot be right -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        (None, "None for 1 completions"),
        ([], "0 values for 1 completions"),
        ([1.0, 2.0], "2 values for 1 completions"),
        (["1.0"], "a reward that is '1.0'"),
        ([1], "a reward that is 1"),
        ([float("nan")], "a reward that is nan; a reward must be finite"),
        ([1e300], "at most 3.4e38"),
        ([{"value": 1.0}], "a reward that is {'value': 1.0}"),
        ([{"value": 1.0, "parts": {1: 1.0}}], "a reward that is {'value'"),
        ([{"value": 1.0, "parts": {"a": "x"}}], "a reward that is 'x'"),
        ([{"wrong": 1}], "a reason that is 1"),
    ],
)
def test_wrong_rewards_are_refused(values, wrong):
    assert wrong in _find_wrong(values, 1)


def test_wrong_notes_errors_and_observations_are_refused():
    assert _find_wrong([None, 1.0, {"value": 1.0, "parts": {"a": 1.0}}, {"wrong": "x"}], 4) == ""
    assert "a state that is" in _find_wrong_notes({"state": {"a": [1]}})
    assert "metrics that are" in _find_wrong_notes({"metrics": {"a": "1"}})
    assert "metrics that are" in _find_wrong_notes({"metrics": {"a": 1.0}, "restored": {"a": None}})
    assert _find_wrong_notes({"state": {"a": 1}, "metrics": {"a": 1.0}}) == ""
    assert find_fault("x") == "an error that is str"
    assert find_fault({"type": "ValueError"}) == "an error whose message is None"
    right = {"text": "a", "reward": 1.0, "done": False, "state": None}
    assert find_wrong_observation(right) == ""
    for name, value in (("text", 1), ("reward", float("inf")), ("reward", 1), ("done", 0), ("state", 1)):
        assert f"an observation whose {name} is" in find_wrong_observation({**right, name: value})


# -- dry run ----------------------------------------------------------------------------------------------------------


def nodes(number=2, **resources):
    return [Node(f"node {n}", {"CPU": 4.0, **resources}) for n in range(number)]


def test_while_a_run_waits_for_room_an_autoscaler_is_told_what_it_needs(monkeypatch):
    pytest.importorskip("ray")
    there = [{"Alive": True, "NodeManagerAddress": "10.0.0.1", "NodeID": "a" * 9, "Resources": {"CPU": 1.0}}]
    asked = []

    def request_resources(bundles):
        asked.append(bundles)
        there.append(there[0] | {"Resources": {"CPU": 4.0}})  # the node that it adds

    monkeypatch.setattr("ray.autoscaler.sdk.request_resources", request_resources)
    cluster = rl.RayCluster(engines=rl.EngineReplicas(replicas=2, resources={"CPU": 2}), start_timeout_s=30.0)
    await_room(SimpleNamespace(nodes=lambda: there), cluster, uses_gpus=False)
    assert asked == [[{"CPU": 2.0}, {"CPU": 2.0}], []], "and that it needs nothing more"
    await_room(SimpleNamespace(nodes=lambda: there), cluster, uses_gpus=False)
    assert len(asked) == 2, "nobody waits"


def test_a_placement_packs_ranks_and_spreads_the_rest():
    cluster = rl.RayCluster(
        trainer_ranks=2,
        trainer_resources={"CPU": 1.0},
        engines=rl.EngineReplicas(replicas=2, max=8, resources={"CPU": 1.0}),
        rewards=rl.RewardActors(actors=2, resources={"CPU": 0.5}),
        environments=rl.EnvironmentActors(actors=1),
    )
    roles = roles_of(cluster, has_gpus=False)
    found = nodes()
    place(roles, found)
    assert found[0].held == {
        "cluster.trainer_ranks": 2,
        "cluster.engines.replicas": 1,
        "cluster.rewards.actors": 1,
        "cluster.environments.actors": 1,
    }
    assert found[1].held == {"cluster.engines.replicas": 1, "cluster.rewards.actors": 1}
    text = "\n".join(described(cluster, roles, found))
    assert "cluster.trainer_ranks        2       CPU 1    2 on node 0" in text
    assert "cluster.engines.max=8: there is room for 2 of 6 more" in text


TOO_MANY = rl.RewardActors(actors=5, resources={"GPU": 1})
TOO_LARGE = rl.EnvironmentActors(resources={"CPU": 3})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            dict(rewards=TOO_MANY),
            "cluster.rewards.actors=5: not all of these processes fit on the cluster. Each process needs GPU 1, and "
            "all of them need GPU 5. The cluster has GPU 2 on 2 nodes, enough for 2 of the processes",
        ),
        (
            dict(trainer_ranks=4, trainer_resources={"CPU": 1}, environments=TOO_LARGE),
            "cluster.environments.actors=2: not all of these processes fit on the cluster. Each process needs CPU 3, "
            "and all of them need CPU 6. The cluster has CPU 4 left on 2 nodes, enough for 1 of the processes",
        ),
        (
            dict(trainer_ranks=5, trainer_resources={"CPU": 1}),
            "cluster.trainer_ranks=5: Ray would place the ranks as 4 on node 0, 1 on node 1",
        ),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(settings, message):
    with pytest.raises(SetupError, match=message) as error:
        place(roles_of(rl.RayCluster(**settings), has_gpus=False), nodes(GPU=1.0))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            dict(engines=rl.EngineReplicas(replicas=40)),
            "cluster.engines.replicas=40 with CPU 0.5 each need CPU 20, and the cluster has CPU 8 on 2 nodes: there is "
            "room for 16",
        ),
        (
            dict(engines=rl.EngineReplicas(replicas=40, min=20)),
            "cluster.engines.min=20 with CPU 0.5 each need CPU 10, and the cluster has CPU 8 on 2 nodes: there is room "
            "for 16",
        ),
        (
            dict(trainer_ranks=1, trainer_resources={"CPU": 5}),
            "cluster.trainer_ranks=1 with CPU 5 each need CPU 5, and the cluster has CPU 8 on 2 nodes: there is room "
            "for 0",
        ),
        (
            dict(engines=rl.EngineReplicas(replicas=12), rewards=rl.RewardActors(actors=4, resources={"CPU": 1})),
            "cluster.engines.replicas=12 with CPU 0.5 each, cluster.rewards.actors=4 with CPU 1 each need CPU 10 "
            "together, and the cluster has CPU 8",
        ),
        (dict(engines=rl.EngineReplicas(replicas=40, min=8), rewards=rl.RewardActors(actors=4)), ""),
    ],
)
def test_what_can_never_fit_is_said_before_anything_starts(settings, message):
    assert find_lack(roles_of(rl.RayCluster(**settings), has_gpus=False, at_least=True), nodes()) == message


def test_a_wrong_model_is_said_before_ray_starts(at_the_root, capsys, monkeypatch):
    monkeypatch.setattr(rl.RayCluster, "connected", lambda self, **_: pytest.fail("connects"))
    with pytest.raises(SystemExit) as end:
        main(
            [*QUICKSTART, "--cluster", "RayCluster", "--cluster.trainer_ranks", "2", "--model.model", "/nowhere/model"]
        )
    assert "'/nowhere/model': there is no such folder" in f"{end.value.code}{capsys.readouterr().err}"
    cluster = rl.RayCluster(trainer_ranks=2)
    with pytest.raises(FileNotFoundError, match="/nowhere/model"):
        rl.fit("/nowhere/model", [{"prompt": "1", "answer": "1"}], rl.exact_match, max_steps=1, cluster=cluster)


DYING = """
import faulthandler, os, threading
from lit_async_rl.ray.pool_worker import PoolWorker
faulthandler.enable(all_threads=False)  # as Ray does
PoolWorker()
threading.Thread(target=threading.Event().wait, daemon=True).start()
os.abort()
"""


def test_an_actor_that_dies_leaves_the_stacks_of_all_its_threads_in_its_log():
    done = subprocess.run([sys.executable, "-c", DYING], capture_output=True, text=True, timeout=120)
    assert done.stderr.startswith("Fatal Python error: Aborted")
    assert "in _bootstrap" in done.stderr  # of the other one


def test_without_anything_to_place_a_dry_run_starts_no_ray(at_the_root, capsys, monkeypatch):
    monkeypatch.setattr(rl.RayCluster, "connected", lambda self, **_: pytest.fail("connects"))
    main([*QUICKSTART, "--cluster", "RayCluster", "--cluster.dry_run", "true"])
    assert "dry run: Ray would place nothing" in capsys.readouterr().out


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_dry_run_shows_the_placement_or_fails_and_does_not_train(ray_cluster, at_the_root, tmp_path, capsys):
    settings = ["--cluster", "RayCluster", "--cluster.address", ray_cluster.address, "--cluster.dry_run", "true"]
    rewards = ["--cluster.rewards.actors", "3", "--cluster.trainer_ranks", "2"]
    logs = ["--trainer.logger.save_dir", str(tmp_path)]
    main([*QUICKSTART, *settings, *rewards, *logs])
    shown = capsys.readouterr().out
    assert "nothing was trained" in shown
    assert "cluster.rewards.actors" in shown
    assert "3 on 127.0.0.1" in shown
    with pytest.raises(SystemExit) as end:
        main([*QUICKSTART, *settings, *logs, "--cluster.rewards.resources", "{GPU: 8}"])
    message = str(end.value.code) if isinstance(end.value.code, str) else capsys.readouterr().err
    assert (
        "cluster.rewards.actors=2: not all of these processes fit on the cluster. Each process needs GPU 8" in message
    )
    assert list(tmp_path.iterdir()) == [], "no folder of a run"
    cluster = rl.RayCluster(address=ray_cluster.address, rewards=rl.RewardActors(), dry_run=True)
    trainer = rl.fit(
        rl.asset("sort_policy"), [{"prompt": "21=", "answer": "12"}], rl.exact_match, max_steps=2, cluster=cluster
    )
    assert trainer.global_step == 0
    assert "nothing was trained" in capsys.readouterr().out


def test_prompts_are_checked_at_the_start_with_rewards_in_actors_too():
    weak = Prompt(text="x", metadata={"test_list": ["assert f(1) != 2"]})
    grader = rl.CodeReward(tests="plain")
    in_actors = rl.RayCluster(rewards=rl.RewardActors()).with_reward_actors(grader, workers=1, timeout_s=60.0)
    for reward in (grader, in_actors):
        with pytest.raises(ValueError, match="weak"):
            hooks.checking(lambda prompt: (1,), reward)(weak)
    assert hooks.end_check(in_actors) == hooks.end_check(grader)


def test_a_metric_that_a_restored_reward_has_no_more_loses_no_call():
    cluster = rl.RayCluster(rewards=rl.RewardActors())
    reward = cluster.with_reward_actors(pool_parts.length, workers=1, timeout_s=5.0)
    reward._base = {"hits": 3.0}
    found = []
    call = Mock(spec=Call, completions=["x"], succeed=found.extend)
    answer = {"values": [1.0], "metrics": {}, "restored": {"hits": 3.0}}
    reward._file(answer, Mock(spec=pool.Process, number=0), [call])
    assert found == [1.0]
    assert reward._metrics() == {"hits": 3.0}
    reward.close()


def test_a_call_in_turn_that_is_cancelled_leaves_no_task():
    begun = []

    async def slow(prompt, completion, begun):
        await asyncio.sleep(20)

    async def left():
        worker = RewardWorker({"reward": slow}, 1)
        turns = worker.call_in_turn("reward", [pack_prompt(Prompt(text="?"))], ["x"], [], False, None)
        waiting = asyncio.ensure_future(anext(turns))
        await asyncio.sleep(0.1)
        begun.extend(asyncio.all_tasks())
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await asyncio.sleep(0.1)
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert not asyncio.run(left())
    assert len(begun) == 4, "this one, the turn, its call, and what waits for the call to get on"
