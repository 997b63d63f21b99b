"""Rewards and environments in actors: the same results as here, each once whatever happens, and nothing left behind."""

import asyncio
import os
import signal
import threading
import time

import lightning.pytorch as pl
import pool_parts
import pytest
from failing_engines import Watch, said
from flow import fit, make_data, make_module
from judge_servers import JudgeServer
from pool_parts import notes
from processes import wait_for_the_end_of
from sandboxes import LIMITS, levels

import lit_async_rl as rl
from lit_async_rl.errors import (
    EnvironmentFailure,
    FinalRewardError,
    LostEnvironment,
    RewardError,
    RewardSetupError,
)
from lit_async_rl.problem import Prompt, Score
from lit_async_rl.ray.pool import pack_prompt
from lit_async_rl.ray.reward_worker import RewardWorker
from lit_async_rl.rewards import hooks
from lit_async_rl.rewards.combined import CombinedReward
from lit_async_rl.rewards.scorer import Scorer
from lit_async_rl.tasks.arithmetic import Addition
from lit_async_rl.tasks.calculator import Calculator
from lit_async_rl.utils.identity import reward_identity

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]  # a busy machine starts processes slowly

SMALL = {"CPU": 0.1}
PROMPT = Prompt(text="p", answer="42", metadata={"unit": "m"}, other_answers=("43",))
LIMIT_S = 60.0
BRIEF_S = 4.0  # which a call on a busy machine keeps, too, unless it hangs
WAIT_S = 300.0


def pooled(reward, timeout_s=LIMIT_S, **settings):
    cluster = rl.RayCluster(rewards=rl.RewardActors(resources=SMALL, **settings))
    return cluster.with_reward_actors(reward, workers=16, timeout_s=timeout_s)


def ask(*calls):
    """What several coroutines return or raise."""

    async def ask():
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), WAIT_S)

    return asyncio.run(ask())


def until(condition):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def parts(ray_cluster):
    """Several rewards in one pool."""
    names = ("length", "described", "faulty", "slow", "batched", "pid", "once")
    made = pooled(CombinedReward({name: getattr(pool_parts, name) for name in names}), timeout_s=LIMIT_S, actors=2)
    pool = made.rewards["length"].pool
    pool.open()
    until(lambda: len(pool.pids) == 2)
    yield made
    pids = pool.pids
    hooks.close(made)
    hooks.close(made)
    wait_for_the_end_of(*pids)


# -- rewards ----------------------------------------------------------------------------------------------------------


def test_rewards_of_all_forms_are_those_that_the_trainer_would_have_given(parts):
    texts = ["", "a", "none", "score", "abc"]
    names = ("length", "faulty", "slow", "batched")
    here = CombinedReward({name: getattr(pool_parts, name) for name in names})
    there = CombinedReward({name: parts.rewards[name] for name in names})
    expected = ask(*(here(PROMPT, text) for text in texts))
    found = ask(*(there(PROMPT, text) for text in texts))
    for one in (*expected, *found):
        one.parts.pop("batched", None)  # says how many were in its batch
    assert [one.parts for one in found] == [one.parts for one in expected]
    assert "faulty" not in found[2].parts, "None: does not apply"
    assert ask(parts.rewards["described"](PROMPT, "x", token_ids=(1, 2, 3))) == [4.0]
    (whole,) = ask(parts.rewards["faulty"](PROMPT, "score"))
    assert isinstance(whole, Score)
    assert whole.parts == {"a": 1.0, "b": 0.5}
    assert len(set(ask(*(parts.rewards["pid"](PROMPT, "x") for _ in range(40))))) == 2, "both actors"
    assert reward_identity(there) == reward_identity(here), "a run with a pool goes on from one without"


def test_completions_that_wait_are_one_batch(parts):
    sizes = ask(*(parts.rewards["batched"](PROMPT, "x") for _ in range(40)))
    assert max(sizes) > 8
    assert {round((size - int(size)) * 1000) for size in sizes} == {1}


def test_errors_say_what_was_raised_and_where(parts):
    faulty = parts.rewards["faulty"]
    before = faulty.pool.num_lost
    raised, final, setup, left, text, nan = ask(
        *(faulty(PROMPT, word) for word in ("raise", "final", "setup", "exit", "text", "nan"))
    )
    assert type(raised) is RewardError
    pids = faulty.pool.pids
    assert "raised KeyError: 'no such case'" in str(raised)
    assert "pool_parts.py" in str(raised)
    assert any(f"pid {pid}" in str(raised) for pid in pids)
    assert type(final) is FinalRewardError
    assert "has tried itself" in str(final)
    assert type(setup) is RewardSetupError
    assert setup.ends_run
    assert "SystemExit: 3" in str(left)
    assert "returned '0.5', which is not a number" in str(text)
    assert "nan; a reward must be finite" in str(nan)
    assert faulty.pool.num_lost == before


def test_judges_and_sandboxes_work_in_actors(ray_cluster):
    """A judge's calls and a program's processes are the actor's; what they say and count arrives here."""
    server = JudgeServer()
    limits = {"limits": LIMITS, "allow_unsandboxed": not levels()}
    code = rl.CodeReward(**limits)
    judge = rl.JudgeReward("a-judge", base_url=server.url, cache=None)
    prompt = Prompt(text="Double it.", metadata={"test_list": ["assert double(2) == 4"]})
    programs = {
        "def double(x):\n    return 2 * x": 1.0,
        "def double(x):\n    return x": 0.0,
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)": 0.0,
        "import os\nos._exit(0)": 0.0,
    }
    texts = [f"```python\n{program}\n```" for program in programs]
    made = pooled(CombinedReward({"code": code, "judge": judge}), actors=1)
    try:
        found = ask(*(made(prompt, text) for text in texts))
        assert [one.parts["code"] for one in found] == list(programs.values())
        assert [one.parts["judge"] for one in found] == [pytest.approx(0.7)] * len(texts)
        quick = ["one", "after", "the other"]
        for text in quick:
            ask(made.rewards["judge"](prompt, text))
        # also what the last call has cost, after which nothing is asked
        until(lambda: hooks.metrics_of(made).get("judge/num_calls") == len(texts + quick))
        assert server.num_answers.total() == len(texts + quick)
        pool = made.rewards["code"].pool
        assert pool.num_lost == 0, "the program that kills its parent has killed a process of the sandbox"
        pids = pool.pids
    finally:
        hooks.close(made)
        code.close()
        judge.close()
        server.close()
    wait_for_the_end_of(*pids)


class Jobs:
    """Completions that a scorer scores; each is filed once or given up."""

    def __init__(self, reward, **settings):
        self.scorer = Scorer(reward, num_workers=4, timeout_s=LIMIT_S, **settings)
        self.done = []

    def submit(self, texts):
        for text in texts:
            self.scorer.submit(PROMPT, text, done=lambda value, text=text: self.done.append((text, value)))

    def finish(self, number):
        def is_done():
            self.scorer.check()
            return len(self.done) >= number

        until(is_done)


def test_killed_actors_cost_no_completion_and_double_none(parts, tmp_path, caplog):
    once = parts.rewards["once"]
    jobs = Jobs(once)
    texts = [str(tmp_path / f"{n}{'-' if n in (20, 60) else ''}") for n in range(100)]
    jobs.submit(texts)
    until(lambda: len(jobs.done) > 5)
    os.kill(once.pool.pids[0], signal.SIGKILL)
    jobs.finish(100)
    jobs.scorer.close()
    assert sorted(jobs.done) == sorted((text, 1.0) for text in texts)
    assert once.pool.num_lost >= 2, "by a reward that ends its process, and from outside"
    told = said(caplog, "an actor is started again")
    assert told
    assert all("pid" in line for line in told)
    until(lambda: len(once.pool.pids) == 2)


@pytest.fixture(scope="module")
def brief(ray_cluster):
    """Rewards of which some do not return in time."""
    rewards = {name: getattr(pool_parts, name) for name in ("faulty", "slow", "in_steps")}
    made = pooled(CombinedReward(rewards), timeout_s=BRIEF_S, actors=2)
    faulty, slow = made.rewards["faulty"], made.rewards["slow"]
    assert ask(faulty(PROMPT, "x"), slow(PROMPT, "x")) == [1.0, 1.0]
    until(lambda: len(faulty.pool.pids) == 2)
    yield made
    hooks.close(made)


def test_the_time_of_a_reward_begins_anew_when_it_gets_on(brief):
    in_steps = brief.rewards["in_steps"]
    found, late = ask(in_steps(PROMPT, "x"), in_steps(PROMPT, "hang"))
    assert found == 1.0
    assert f"did not return within data.scoring.timeout_s={BRIEF_S:g}" in str(late)


def test_calls_that_do_not_return_are_ended_and_others_go_on(brief, caplog):
    faulty, slow = brief.rewards["faulty"], brief.rewards["slow"]
    hung, other = ask(faulty(PROMPT, "hang"), faulty(PROMPT, "x"))
    assert other == 1.0
    (cancelled,) = ask(slow(PROMPT, "hang"))
    for late in (hung, cancelled):
        assert type(late) is RewardError, "which uses up a try"
        assert f"did not return within data.scoring.timeout_s={BRIEF_S:g} (pid" in str(late)
    until(lambda: said(caplog, "was killed: a reward did not return"))
    assert any("last words" in line for line in said(caplog, "was killed")), "the last lines of its log"
    until(lambda: len(faulty.pool.pids) == 2)
    (blocked,) = ask(slow(PROMPT, "block"))
    assert isinstance(blocked, RewardError)
    until(lambda: said(caplog, "is blocked: it has not answered"))
    until(lambda: len(faulty.pool.pids) == 2)
    assert ask(*(faulty(PROMPT, "x") for _ in range(4))) == [1.0] * 4


def test_a_reward_that_counts_is_in_one_actor_and_goes_on_in_the_next(ray_cluster, tmp_path):
    counting = pooled(pool_parts.Counting(str(tmp_path)), timeout_s=BRIEF_S, actors=2)
    hooks.use_folder(counting, tmp_path)
    hooks.restore_state(counting, {"0": {"num": 100}})
    began = []
    found = ask(*(counting(PROMPT, "x", begun=lambda: began.append(1)) for _ in range(20)))
    assert sorted(found) == [float(n) for n in range(101, 121)]
    assert sum(began) == 20
    assert ask(counting(PROMPT, "late")) == [121.0], "its time begins with its work"
    assert hooks.save_state(counting) == {"0": {"num": 121}}
    assert ask(counting.score_group(PROMPT, ["a", "b"])) == [[2.0, 2.0]]
    time.sleep(0.6)  # the metrics are told so often
    ask(counting(PROMPT, "x"))
    assert hooks.metrics_of(counting) == {"counting/num_calls": 122.0, "counting/latency_s": 0.5}
    for pid in counting.pool.pids:
        os.kill(pid, signal.SIGKILL)
    until(lambda: counting.pool.num_lost == 2)
    assert ask(counting(PROMPT, "x")) == [123.0]
    assert hooks.metrics_of(counting)["counting/num_calls"] == 123.0, "what the state brought counts once"
    counting.close()
    assert hooks.metrics_of(counting)["counting/num_calls"] == 123.0
    assert any(line.startswith(f"closed 123 {tmp_path}") for line in notes(tmp_path, "closed"))


def test_whichever_call_comes_first_goes_on_from_the_state_and_the_others_do_not_begin_anew(tmp_path):
    """Ray may begin with any of the calls that are under way."""
    worker = RewardWorker({"reward": pool_parts.Counting(str(tmp_path))}, 1)

    async def found(start):
        call = worker.call("reward", [pack_prompt(PROMPT)], ["x"], [], False, start)
        return (await call)["values"][0]

    async def all_found():
        starts = [{"number": 1, "state": {"num": 100}}] * 3 + [None, {"number": 2, "state": {"num": 7}}]
        return [await found(start) for start in starts]

    assert asyncio.run(all_found()) == [101.0, 102.0, 103.0, 104.0, 8.0]


def test_what_cannot_be_sent_or_started_is_said_at_once(ray_cluster):
    lock = threading.Lock()
    reward = pooled(lambda prompt, completion: float(lock.locked()))
    (error,) = ask(reward(PROMPT, "x"))
    assert isinstance(error, RewardSetupError)
    assert "cluster.rewards: reward" in str(error)
    assert "cannot be sent to another process" in str(error)
    cluster = rl.RayCluster(rewards=rl.RewardActors(resources={"no_such_thing": 1.0}), start_timeout_s=0.5)
    nowhere = cluster.with_reward_actors(pool_parts.length, workers=1, timeout_s=5.0)
    (error,) = ask(nowhere(PROMPT, "x"))
    assert error.ends_run
    assert "none of 2 actors had started within cluster.start_timeout_s=0.5; each needs no_such_thing=1" in str(error)
    nowhere.close()


# -- environments -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ladder_folder(tmp_path_factory):
    """Where episodes write that they begin and end."""
    return tmp_path_factory.mktemp("ladder")


@pytest.fixture(scope="module")
def ladder(ray_cluster, ladder_folder):
    cluster = rl.RayCluster(environments=rl.EnvironmentActors(actors=2, resources=SMALL))
    engine = rl.EpisodeEngine(rl.EmbeddedEngine(), pool_parts.Ladder(str(ladder_folder)))
    environment = cluster.with_environment_actors(engine).environment
    environment.prepare()
    until(lambda: len(environment.pool.pids) == 2)
    yield environment
    asyncio.run(environment.close())


def test_episodes_stay_in_their_actor_and_are_closed_once(ladder, ladder_folder):
    async def play():
        episode = await ladder.start(PROMPT)
        turns = [await episode.step("x") for _ in range(3)]
        cut = await episode.step_cut("x")
        await episode.close()
        return turns, cut

    played = ask(*(play() for _ in range(10)))
    for turns, cut in played:
        assert [turn.reward for turn in turns] == [0.5] * 3
        assert [turn.state for turn in turns] == ["turn 1", "turn 2", "turn 3"]
        assert [turn.done for turn in turns] == [False, False, True]
        assert len({turn.text for turn in turns}) == 1, "one process"
        assert cut.reward == -1.0
    assert len({turns[0].text for turns, _ in played}) == 2, "both"
    begun = sorted(line.split()[1:] for line in notes(ladder_folder, "begun"))
    assert len(begun) >= 10
    assert begun == sorted(line.split()[1:] for line in notes(ladder_folder, "ended"))


def test_cancelled_starts_and_steps_end_there_too(ladder, ladder_folder):
    before = len(notes(ladder_folder, "begun"))

    async def play():
        starting = asyncio.ensure_future(ladder.start(Prompt(text="slow start")))
        episode = await ladder.start(PROMPT)
        hung = asyncio.ensure_future(episode.step("hang"))
        await asyncio.sleep(0.5)
        for task in (starting, hung):
            task.cancel()
        await asyncio.gather(starting, hung, return_exceptions=True)
        await episode.close()

    ask(play())
    until(lambda: notes(ladder_folder, "start cancelled"))
    assert len(notes(ladder_folder, "begun")) == len(notes(ladder_folder, "ended")) == before + 1
    assert ladder.pool.num_lost == 0


def test_an_episode_whose_process_is_gone_has_failed_and_others_play_on(ladder, caplog):
    async def play(*turns):
        episode = await ladder.start(PROMPT)
        try:
            return [await asyncio.wait_for(episode.step(turn), 3.0 if turn == "block" else WAIT_S) for turn in turns]
        finally:
            await episode.close()

    raised, crashed = ask(play("raise"), play("x", "crash"))
    assert type(raised) is EnvironmentFailure
    assert "raised ValueError: no such rung" in str(raised)
    assert "pool_parts.py" in str(raised)
    assert "pid" in str(raised)
    assert type(crashed) is LostEnvironment
    assert crashed.is_lost
    assert "pid" in str(crashed)
    assert len(ask(play("x"))[0]) == 1
    until(lambda: len(ladder.pool.pids) == 2)
    (blocked,) = ask(play("block"))
    assert isinstance(blocked, asyncio.TimeoutError)
    until(lambda: said(caplog, "is blocked"))
    assert len(ask(play("x"))[0]) == 1


# -- runs -------------------------------------------------------------------------------------------------------------


class Kill(pl.Callback):
    """Kills a process of each pool after some steps."""

    def __init__(self, *pools):
        self.pools = pools

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step in (2, 5):
            for pid in [pid for pool in self.pools for pid in pool.pids[:1]]:
                os.kill(pid, signal.SIGKILL)


def test_a_run_whose_environments_are_killed_trains_on_every_group_once(ray_cluster):
    cluster = rl.RayCluster(environments=rl.EnvironmentActors(actors=2, resources=SMALL))
    model = rl.asset("calculator_policy")
    engine = cluster.with_environment_actors(rl.EpisodeEngine(rl.EmbeddedEngine(), Calculator(), max_turns=4))
    data = make_data(
        model=model,
        engine=engine,
        reward=None,
        prompts=Addition(3, size=1000),
        groups_per_step=2,
        max_staleness=2,
    )
    pool = engine.environment.pool
    watch = Watch()
    fit(make_module(model=model), data, 8, [Kill(pool), watch])
    assert len(set(watch.trained)) == len(watch.trained) == 16
    assert pool.num_lost >= 1
    assert pool.pids == [], "closed at the end of the run"
