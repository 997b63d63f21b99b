"""Agents that are programs: what they get, what they say, and how they die."""

import asyncio
import gc
import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from agent_endpoints import MODEL, WAIT_S, Episodes, template, wait_for

from lit_async_rl.agents import AgentEngine, AgentResult, CommandAgent, CommandAgentError
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.errors import EnvironmentFailure
from lit_async_rl.problem import Prompt

ROOT = Path(__file__).resolve().parents[2]
KEY = "agent-key-of-a-test"
LINUX = sys.platform.startswith("linux")
PROMPT = Prompt(text="8312=", answer="1238", metadata={"level": 3})
pytestmark = pytest.mark.timeout(240)

ASKS = """
import json, os, sys, urllib.request
prompt = json.load(sys.stdin)
def ask(text):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""
OPENAI = """
import json, sys
import openai
prompt = json.load(sys.stdin)
client = openai.OpenAI()
messages = [{"role": "user", "content": prompt["text"]}]
answer = client.chat.completions.create(model="gpt-4o-mini", messages=messages).choices[0].message
messages += [answer, {"role": "user", "content": "52="}]
client.chat.completions.create(model="gpt-4o-mini", messages=messages)
print(json.dumps({"reward": 0.5, "parts": {"length": len(answer.content)}}))
"""


def script(folder: Path, text: str, name: str = "agent.py") -> list[str]:
    path = folder / name
    path.write_text(text)
    return [sys.executable, str(path)]


def run(command, prompt=PROMPT, **settings) -> AgentResult:
    client = SimpleNamespace(base_url="http://127.0.0.1:9/v1/", api_key=KEY)
    return asyncio.run(CommandAgent(command, **settings)(prompt, client))


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == "zombie"
    except psutil.NoSuchProcess:
        return True


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def play(agent, folder, num_samples, **settings):
    """Samples of one group, and the engine."""
    settings = {"chat_template": template(folder), "forks": True, "tries": 1} | settings
    episodes = Episodes(AgentEngine(EmbeddedEngine(self_check=False), agent=agent, **settings), MODEL)
    try:
        episodes.submit(PROMPT, num_samples=num_samples)
        stats = episodes.engine.stats
        wait_for(lambda: stats.num_episodes + stats.num_lost >= num_samples or episodes.given_up or episodes.errors)
        time.sleep(0.1)
        found = []
        while not episodes.finished.empty():
            found.append(episodes.finished.get())
        return found, episodes
    finally:
        episodes.close()


@pytest.mark.slow
def test_an_unmodified_script_is_trained_as_it_is(tmp_path):
    samples, episodes = play(CommandAgent(script(tmp_path, OPENAI)), tmp_path, 2)
    assert len(samples) == 2
    assert {sample.reward for sample in samples} == {0.5}
    assert all(set(sample.reward_parts) == {"length"} for sample in samples)
    assert all(not sample.branches and not all(sample.loss_mask) for sample in samples), "two turns are one row"
    assert episodes.engine.stats.drift.total == 0


def test_a_process_gets_prompt_address_and_key():
    text = "import json,os,sys; p=json.load(sys.stdin); n=('OPENAI_BASE_URL','OPENAI_API_KEY','NO_PROXY','MORE')"
    text += "; print(json.dumps([p]+[os.environ[x] for x in n]), file=sys.stderr); sys.exit(3)"
    with pytest.raises(CommandAgentError, match="exit status 3") as error:
        run(python(text), environment={"MORE": "more"})
    prompt, url, key, proxy, more = json.loads(str(error.value).partition("wrote: ")[2])
    assert prompt == {"text": "8312=", "messages": None, "answer": "1238", "metadata": {"level": 3}}
    assert url == "http://127.0.0.1:9/v1"
    assert key == "(the episode's key)"
    assert proxy.endswith("127.0.0.1")
    assert more == "more"


@pytest.mark.parametrize(
    ("said", "reward"),
    [("0.25", 0.25), ("1", 1.0), ("true", 1.0), ("log\\n\\n-2e-1\\n\\n", -0.2), ('{"reward": 2, "more": 1}', 2.0)],
)
def test_the_last_line_is_the_reward(said, reward):
    assert run(python(f"print('{said}')")).reward == reward


@pytest.mark.parametrize(
    "said", ["", "done", "NaN", "Infinity", "[1]", '{"reward": "1"}', '{"parts": {}}', "1 2", "null"]
)
def test_a_last_line_without_a_reward_is_an_error(said):
    with pytest.raises(CommandAgentError, match="must write its reward"):
        run(python(f"print('''{said}''')"))


def test_the_exit_status_may_be_the_reward():
    for status, reward in ((0, 1.0), (1, 0.0)):
        assert run(python(f"print('x'); raise SystemExit({status})"), reward="exit_status").reward == reward
    with pytest.raises(CommandAgentError, match="exit status 2"):
        run(python("raise SystemExit(2)"), reward="exit_status")
    with pytest.raises(CommandAgentError, match="SIGKILL"):
        run(python("import os; os.kill(os.getpid(), 9)"), reward="exit_status")


def test_a_program_that_is_not_there_is_named():
    with pytest.raises(CommandAgentError, match=r"exit status 127; it wrote: no-such-program: .*No such file"):
        run(["no-such-program"])
    for command in ([], "python agent.py"):
        with pytest.raises(ValueError, match=r"CommandAgent\.command must be a list"):
            CommandAgent(command)


def test_a_run_without_its_program_ends_in_one_line(tmp_path, caplog):
    """Not in ten of each episode that fails: no other try can succeed."""
    _, episodes = play(CommandAgent(["no-such-program"]), tmp_path, 2)
    (error,) = episodes.errors
    assert str(error) == "CommandAgent.command=['no-such-program']: there is no program 'no-such-program'"
    assert not [record for record in caplog.records if record.name == "asyncio" or "left out" in record.message]


def test_a_program_is_looked_for_where_its_process_does(tmp_path):
    program = tmp_path / "mine"
    program.write_text("#!/bin/sh\necho 0.5\n")
    with pytest.raises(EnvironmentFailure, match="there is no program 'mine'"):
        asyncio.run(CommandAgent(["mine"]).astart())
    agent = CommandAgent(["mine"], environment={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"})
    with pytest.raises(EnvironmentFailure, match="there is no program 'mine'"):
        asyncio.run(agent.astart())  # it cannot be executed
    program.chmod(0o755)
    asyncio.run(agent.astart())
    client = SimpleNamespace(base_url="http://127.0.0.1:9/v1/", api_key=KEY)
    assert asyncio.run(agent(PROMPT, client)).reward == 0.5


def test_output_without_end_is_read_and_not_kept():
    found = run(python("import sys\nfor _ in range(300): sys.stdout.write('x' * 100_000)\nprint(); print(0.5)"))
    assert found.reward == 0.5


def test_a_process_that_leaves_another_with_its_output_is_not_waited_for():
    for own_session in (False, True):
        text = (
            f"import subprocess; p = subprocess.Popen(['sleep', '60'], start_new_session={own_session}); print(p.pid)"
        )
        began = time.monotonic()
        pid = int(run(python(text)).reward)
        assert time.monotonic() - began < 50
        if own_session and not LINUX:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda pid=pid: is_gone(pid))


def test_a_program_ends_as_it_did_without_a_guard():
    """Its group, its exit status and its signal are its own; the guard is not hit by what it says to its group."""
    assert run(["bash", "-c", "trap 'exit 0' TERM; kill -TERM 0; sleep 60 & wait"], reward="exit_status").reward == 1.0
    with pytest.raises(CommandAgentError, match="SIGTERM"):
        run(["bash", "-c", "kill -TERM $$"])


def test_no_run_ends_with_tracebacks_of_asyncio(caplog):
    async def cancelled():
        client = SimpleNamespace(base_url="http://127.0.0.1:9/v1/", api_key=KEY)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(CommandAgent(["sleep", "3600"])(PROMPT, client), 0.5)
        await CommandAgent(["echo", "1"])(PROMPT, client)
        with pytest.raises(CommandAgentError):
            await CommandAgent(["false"])(PROMPT, client)

    asyncio.run(cancelled())
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"], caplog.text


def test_arguments_are_not_read_by_a_shell(tmp_path):
    victim = tmp_path / "victim"
    assert run([*python("print(1)"), f"; touch {victim}", f"$(touch {victim})"]).reward == 1.0
    assert not victim.exists()


def test_what_a_process_leaves_behind_is_killed(tmp_path):
    """A process over its time, and its child, which would go on for an hour."""
    place = tmp_path / "pids"
    text = f"import os, subprocess, time; p = subprocess.Popen(['sleep', '3600']); open({str(place)!r}, 'a')"
    text += ".write(f'{os.getpid()} {p.pid} ')\ntime.sleep(3600)"
    samples, _ = play(CommandAgent(python(text)), tmp_path, 1, timeout_s=3.0)
    assert not samples
    pids = [int(pid) for pid in place.read_text().split()]
    assert len(pids) == 2
    wait_for(lambda: all(map(is_gone, pids)))


@pytest.mark.slow
@pytest.mark.skipif(not LINUX, reason="the kernel of Linux tells of the trainer's end")
def test_a_trainer_that_is_killed_takes_its_agents_with_it(process, tmp_path):
    """And what they have started: behind a shell, in a group and a session of its own, without a parent."""
    place = tmp_path / "pids"
    sleeps = f"sh -c 'echo $$ >> {place}; exec sleep 3600'"
    shell = f"{sleeps} & setsid {sleeps} & timeout 3600 {sleeps} & (setsid {sleeps} & ) ; echo $$ >> {place}; wait"
    trainer = "import asyncio, os; from types import SimpleNamespace; from lit_async_rl.agents import CommandAgent\n"
    trainer += "from lit_async_rl.types import Prompt\nopen('trainer', 'w').write(str(os.getpid()))\n"
    trainer += f"agent = CommandAgent(['bash', '-c', {shell!r}])\n"
    trainer += "asyncio.run(agent(Prompt(text='a'), SimpleNamespace(base_url='http://127.0.0.1:9/v1', api_key='k')))"
    with ThreadPoolExecutor(1) as threads:
        threads.submit(process.run, [], tmp_path, code=trainer, limit_s=2 * WAIT_S)
        wait_for(lambda: place.exists() and place.read_text().count("\n") == 5, limit_s=2 * WAIT_S)
        pids = [int(pid) for pid in place.read_text().split()]
        trainer_pid = int((tmp_path / "trainer").read_text())
        assert trainer_pid not in map(os.getpgid, pids), "they would be killed with its group"
        os.kill(trainer_pid, signal.SIGKILL)
    wait_for(lambda: all(map(is_gone, pids)))
