"""Agents in processes of their own: their rewards, and what follows when they fail, block or die."""

import asyncio
import os
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from agent_endpoints import WAIT_S, importable, playing, wait_for

from lit_async_rl.agents import AgentEngine, CommandAgent, InProcessClients, ProcessAgent, ProcessAgentError
from lit_async_rl.agents.endpoint import process
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.problem import Prompt
from lit_async_rl.runtime.loop import SharedLoop
from lit_async_rl.utils.identity import reward_identity

ROOT = Path(__file__).resolve().parents[2]
KEY = "agent-key-of-a-test"
PROMPT = Prompt(text="8312=", answer="1238", metadata={"level": 3})
pytestmark = pytest.mark.timeout(240)

MODULE = """
import asyncio, os, pathlib, sys, time

from lit_async_rl.agents import AgentResult
from lit_async_rl.runtime import loop

HERE = pathlib.Path(__file__).parent


async def asks(prompt, client):
    messages = [{"role": "user", "content": prompt.text}]
    answer = (await client.chat.completions.create(model="any", messages=messages)).choices[0].message
    messages += [answer, {"role": "user", "content": "52="}]
    await client.chat.completions.create(model="any", messages=messages)
    print("noise on stdout")
    return AgentResult(reward=0.5, parts={"pid": float(os.getpid())})


async def tells(prompt, client):
    reward = float(prompt.metadata["level"] + (client.api_key == "agent-key-of-a-test"))
    return AgentResult(reward=reward, parts={"timeout": client.timeout, "torch": float("torch" in sys.modules)})


async def says_its_process(prompt, client):
    return os.getpid()


async def fails(prompt, client):
    await asyncio.sleep(0)
    if prompt.text == "error":
        raise KeyError(f"no {client.api_key}")
    if prompt.text == "exit":
        sys.exit(3)
    if prompt.text == "end":
        os.kill(os.getpid(), 9)
    wrong = {"nan": float("nan"), "part": AgentResult(reward=1.0, parts={"a": float("nan")}), "nothing": None}
    return wrong.get(prompt.text, 1.0)


async def blocks(prompt, client):
    loop.BLOCKED_S = 0.5
    (HERE / "blocked").touch()
    time.sleep(3600)


async def waits(prompt, client):
    try:
        (HERE / "pid").write_text(f"{os.getpid()}\\\\n")
        await asyncio.sleep(3600)
    finally:
        (HERE / "cancelled").touch()


class Made:
    def __init__(self, value=1.0):
        self.value = value

    async def __call__(self, prompt, client):
        return self.value
"""


@pytest.fixture
def module(tmp_path):
    """Name of the module of these agents."""
    with importable(tmp_path, MODULE.replace("\\\\n", "\\n")) as name:
        yield name


def run(agent, *prompts, together=False):
    """Results, or errors, of episodes that are played one after the other or at a time."""
    client = SimpleNamespace(base_url="http://127.0.0.1:9/v1/", api_key=KEY, timeout=7.0)

    async def play():
        try:
            if together:
                return await asyncio.gather(*(agent(one, client) for one in prompts), return_exceptions=True)
            return [await agent(one, client) for one in prompts]
        finally:
            await agent.aclose()

    return asyncio.run(play())


def is_over(episodes, num_samples):
    stats = episodes.engine.stats
    return stats.num_episodes + stats.num_lost >= num_samples or episodes.given_up or episodes.errors


@pytest.mark.slow
def test_episodes_are_trained_as_those_of_the_same_agent_here(module, tmp_path):
    with playing(ProcessAgent(f"{module}.asks", processes=2), tmp_path, PROMPT, 4) as episodes:
        samples = episodes.results(4)
        assert not episodes.errors
        pids = {int(sample.reward_parts["pid"]) for sample in samples}
        assert len(pids) == 2, "an episode goes to the process with the fewest"
        assert os.getpid() not in pids
    assert {sample.reward for sample in samples} == {0.5}
    assert all(not sample.branches and not all(sample.loss_mask) for sample in samples), "two turns are one row"
    assert episodes.engine.stats.drift.total == 0
    wait_for(lambda: not any(map(psutil.pid_exists, pids)))


@pytest.mark.slow
def test_an_agent_gets_prompt_and_key_and_its_settings(module):
    found = run(ProcessAgent(f"{module}.tells"), PROMPT, PROMPT)
    assert [one.reward for one in found] == [4.0, 4.0]
    assert [one.parts["timeout"] for one in found] == [7.0, 7.0]
    assert found[0].parts["torch"] == 0.0, "a second and 200 MB of each process"
    made = __import__(module).Made
    assert run(ProcessAgent(made(0.25)), PROMPT)[0].reward == 0.25


@pytest.mark.slow
def test_an_agent_that_fails_is_named_and_harms_no_other(module):
    faults = {
        "error": r"KeyError: .*no \(the episode's key\)[\s\S]*agents_of_.*line \d+, in fails",
        "exit": r"it called sys\.exit\(3\)",
        "nan": "finite",
        "part": "not JSON compliant",
        "nothing": "None",
    }
    texts = [text for fault in faults for text in (fault, "right", fault)]
    found = run(ProcessAgent(f"{module}.fails"), *(Prompt(text=text) for text in texts), together=True)
    for text, one in zip(texts, found, strict=True):
        if text == "right":
            assert one.reward == 1.0
        else:
            assert isinstance(one, ProcessAgentError)
            assert re.search(faults[text], str(one)), text


def test_of_a_process_that_an_agent_ends_each_episode_says_how(module):
    for error in run(ProcessAgent(f"{module}.fails"), Prompt(text="end"), Prompt(text="end"), together=True):
        assert isinstance(error, ProcessAgentError)
        assert "agent fails: its process was ended by SIGKILL" in str(error)


@pytest.mark.slow
def test_a_prompt_that_only_the_trainer_knows_is_refused(module, monkeypatch):
    kind = type("Local", (), {"__module__": "gone"})
    monkeypatch.setitem(sys.modules, "gone", SimpleNamespace(Local=kind))
    (error,) = run(ProcessAgent(f"{module}.tells"), Prompt(text="a", metadata={"x": kind()}), together=True)
    assert "No module named 'gone'" in str(error)


@pytest.mark.slow
def test_a_process_outlives_the_thread_that_started_it_and_one_that_has_ended_fails_no_episode(module):
    """The thread of an event loop ends with a validation, and the next engine has another."""
    agent = ProcessAgent(f"{module}.says_its_process")
    client = SimpleNamespace(base_url="http://127.0.0.1:9/v1/", api_key=KEY)
    shared = SharedLoop("environments", runs="an agent")

    def in_a_thread(coroutine):
        loop = shared.enter()
        try:
            return loop.call(coroutine, WAIT_S, "an episode")
        finally:
            shared.leave()

    async def noticed():
        while not (await agent._places[0].shared.get()).has_ended:
            await asyncio.sleep(0.01)

    first = int(in_a_thread(agent(PROMPT, client)).reward)
    assert in_a_thread(agent(PROMPT, client)).reward == first
    os.kill(first, signal.SIGKILL)
    in_a_thread(noticed())
    assert in_a_thread(agent(PROMPT, client)).reward not in (first, os.getpid())
    in_a_thread(agent.aclose())


@pytest.mark.slow
def test_a_process_that_an_agent_blocks_is_replaced_and_the_agent_named(module, monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(process, "ANSWER_TIMEOUT_S", 1.0)
    agent = ProcessAgent(f"{module}.blocks")

    async def play():
        client = SimpleNamespace(base_url="http://127.0.0.1:9/v1/", api_key=KEY)
        blocked = asyncio.ensure_future(agent(PROMPT, client))
        while not (tmp_path / "blocked").exists():
            await asyncio.sleep(0.05)
        beside = asyncio.ensure_future(agent(PROMPT, client))
        said = ""
        while "agent blocks has blocked its event loop for 0.5 s" not in said:
            await asyncio.sleep(0.05)
            said += capfd.readouterr().err
        blocked.cancel()
        try:
            await beside
        finally:
            await agent.aclose()

    with pytest.raises(ProcessAgentError, match="did not answer for 1 s, blocked by an agent, and was killed"):
        asyncio.run(play())


@pytest.mark.slow
def test_a_run_that_ends_in_the_middle_of_calls_says_nothing(module, tmp_path, caplog):
    with playing(ProcessAgent(f"{module}.asks"), tmp_path, PROMPT, 8) as episodes:
        episodes.pause()
        wait_for(lambda: sum(one.num_calls for one in episodes.engine.running) >= 8)
    assert not [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


@pytest.mark.slow
def test_an_episode_over_its_time_is_cancelled_there(module, tmp_path):
    with playing(ProcessAgent(f"{module}.waits"), tmp_path, PROMPT, 1, timeout_s=3.0) as episodes:
        wait_for(lambda: is_over(episodes, 1))
        wait_for((tmp_path / "cancelled").exists)
        assert episodes.engine.stats.num_lost == 1


def test_what_another_process_cannot_make_is_refused(module, tmp_path, monkeypatch):
    async def local(prompt, client):
        return 1.0

    with pytest.raises(ValueError, match=r"ProcessAgent\.agent=.*local cannot be sent to another process"):
        ProcessAgent(local)
    monkeypatch.setattr(local, "__module__", "__main__")
    with pytest.raises(ValueError, match=r"is defined in the main script.* put it into a module of its own"):
        ProcessAgent(local)
    with pytest.raises(ValueError, match=r"ProcessAgent\.agent='no\.agent' cannot be imported"):
        ProcessAgent("no.agent")
    with pytest.raises(ValueError, match=r"ProcessAgent\.processes must be >= 1, got 0"):
        ProcessAgent(f"{module}.tells", processes=0)
    agent = ProcessAgent(f"{module}.tells")
    (tmp_path / f"{module}.py").write_text("raise RuntimeError('broken meanwhile')")
    with playing(agent, tmp_path, PROMPT, 1) as episodes:
        wait_for(lambda: episodes.errors)
    assert "cannot be created in its process: RuntimeError: broken meanwhile" in str(episodes.errors[0])


def test_clients_without_an_address_are_refused(module):
    for agent in (ProcessAgent(f"{module}.tells"), CommandAgent(["true"])):
        with pytest.raises(
            ValueError, match=r"clients=InProcessClients gives agents no address, but the agent of \w+Agent"
        ):
            AgentEngine(EmbeddedEngine(), agent=agent, clients=InProcessClients())
        assert AgentEngine(EmbeddedEngine(), agent=agent).clients is agent.clients


def test_a_reward_is_the_same_one_wherever_its_agent_works(module):
    function = __import__(module).tells
    assert reward_identity(ProcessAgent(function, processes=2)) == reward_identity(function)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel of Linux kills with the parent")
def test_a_trainer_that_is_killed_takes_its_processes_with_it(process, module, tmp_path):
    trainer = "import asyncio, os; from types import SimpleNamespace; from lit_async_rl.agents import ProcessAgent\n"
    trainer += "from lit_async_rl.types import Prompt\nopen('trainer', 'w').write(str(os.getpid()))\n"
    trainer += f"agent = ProcessAgent({module + '.waits'!r})\n"
    trainer += "asyncio.run(agent(Prompt(text='a'), SimpleNamespace(base_url='http://127.0.0.1:9/v1', api_key='k')))"
    with ThreadPoolExecutor(1) as threads:
        threads.submit(process.run, [], tmp_path, code=trainer, limit_s=2 * WAIT_S)
        is_there = lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith("\n")  # noqa: E731
        wait_for(is_there, limit_s=2 * WAIT_S)
        pid = int((tmp_path / "pid").read_text())
        trainer_pid = int((tmp_path / "trainer").read_text())
        assert os.getpgid(pid) != trainer_pid, "it would be killed with its group"
        os.kill(trainer_pid, signal.SIGKILL)
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")
