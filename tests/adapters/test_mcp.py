"""MCP servers: their tools train, what fails says so, and keys are written nowhere. `make test-adapters`."""

from __future__ import annotations

import asyncio
import runpy
import subprocess
import sys
from types import SimpleNamespace

import pytest
from markdown_blocks import ROOT
from page_runs import TIMEOUT_S, check_that_no_file_has, metrics_of, shown, train

import lit_async_rl as rl
from lit_async_rl.agents.mcp import McpAgent, McpServerError, McpTools

pytest.importorskip("mcp", reason="mcp is not installed: `make test-adapters`")
pytestmark = pytest.mark.timeout(300)
PAGE = ROOT / "docs" / "agents.md"
PLANTED = "sk-planted-mcp-77aa01c2d3e4"
SERVER = """
import os, sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("trying")
calls = []

@server.tool()
def count() -> int:
    "Counts its calls."
    calls.append(1)
    return len(calls)

@server.tool()
def fail(how: str) -> str:
    "Fails."
    print("the key is", os.environ.get("MY_KEY"), file=sys.stderr, flush=True)
    if how == "exit":
        os._exit(3)
    raise ValueError(how)

server.run("stdio")
"""
HOSTILE = [r'"\ud83d"', "NaN", "1e999", "9" * 5000, *["[" * depth + "]" * depth for depth in (250, 900, 100_000)]]


@pytest.fixture
def server(tmp_path):
    path = tmp_path / "trying.py"
    path.write_text(SERVER)
    return [sys.executable, str(path)]


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120.0))


class Scripted:
    """A client whose policy says what was written down."""

    def __init__(self, *replies):
        self.replies = list(replies)
        self.seen = []
        self.chat = SimpleNamespace(completions=self)

    async def create(self, *, messages, tools, model):
        self.seen.append((list(messages), tools))
        said = self.replies.pop(0)
        calls = None
        if not isinstance(said, str):
            calls = [SimpleNamespace(id="1", function=SimpleNamespace(name=said[0], arguments=said[1]))]
            said = ""
        message = SimpleNamespace(content=said, tool_calls=calls)
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])


def test_mistakes_of_the_policy_and_errors_of_a_tool_are_texts(server):
    async def ask():
        async with McpTools(server) as tools:
            names = [schema["function"]["name"] for schema in tools.schemas]
            asked = [("count", "{}"), ("nothing", "{}"), ("count", "{"), ("count", "[]"), ("fail", '{"how": 1}')]
            asked += [("fail", f'{{"how": {how}}}') for how in HOSTILE]
            asked += [("fail", {"how": "\ud83d"}), ("fail", {"how": float("nan")})]
            said = [await tools.call(name, arguments) for name, arguments in asked]
            return names, [*said, await tools.call("fail", {"how": "raise"}), await tools.call("count", {})]

    names, said = run(ask())
    assert names == ["count", "fail"]
    assert (said[0], said[-1]) == ("1", "2")
    assert said[1].startswith("error: unknown tool 'nothing'")
    assert all("error" in text.lower() for text in said[2:-1]), said


def test_a_server_that_ends_is_named_with_its_last_words_and_without_the_key(server, monkeypatch):
    monkeypatch.setenv("MY_KEY", PLANTED)

    async def ask():
        async with McpTools(server, environment=["MY_KEY"]) as tools:
            await tools.call("fail", {"how": "exit"})

    message = r"trying\.py': a call to the tool fail was not answered.*key is \(MY_KEY\)"
    with pytest.raises(McpServerError, match=message) as error:
        run(ask())
    assert PLANTED not in str(error.value)


@pytest.mark.parametrize("command", [["/no/such/program"], [sys.executable, "-c", "import sys; sys.exit('no luck')"]])
def test_a_server_that_does_not_start_is_one_error(command):
    async def ask():
        async with McpTools(command):
            pass

    with pytest.raises(McpServerError, match=r"does not start: .*(No such file|no luck)"):
        run(ask())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(command="python server.py"), "McpTools.command must be a list"),
        (dict(command=[]), "McpTools.command must be a list"),
        (dict(command=["a"], environment="KEY"), "McpTools.environment must be a list"),
        (
            dict(command=["a"], environment=["NO_SUCH_KEY"]),
            "McpTools.environment='NO_SUCH_KEY' names an environment variable that is not set",
        ),
        (dict(command=["a"], timeout_s=0.0), "McpTools.timeout_s must be positive"),
        (dict(command=["a"], max_turns=0), "McpAgent.max_turns must be"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        McpAgent(**settings)


def test_episodes_share_a_server_or_have_their_own(server):
    async def play(agent):
        clients = [Scripted(("count", "{}"), "done") for _ in range(3)]
        await asyncio.gather(*[agent(rl.Prompt(text="?", answer="done"), client) for client in clients])
        await agent.aclose()
        return sorted(client.seen[1][0][-1]["content"] for client in clients)

    assert run(play(McpAgent(server))) == ["1", "2", "3"]
    assert run(play(McpAgent(server, per_episode=True))) == ["1", "1", "1"]


def test_a_shared_server_that_has_ended_is_started_again_and_ends_with_the_run(server):
    agent = McpAgent(server, system_prompt="Count.", max_turns=2)
    prompt = rl.Prompt(text="?", answer="done")

    async def play():
        rewards = [await agent(prompt, Scripted(("count", "{}"), "done"))]
        with pytest.raises(McpServerError):
            await agent(prompt, Scripted(("fail", '{"how": "exit"}')))
        again = Scripted(("count", "{}"), ("count", "{}"))
        rewards.append(await agent(prompt, again))  # its last reply is a call
        assert again.seen[0][0][0] == {"role": "system", "content": "Count."}
        assert [getattr(one, "tool_calls", None) is not None for one in again.seen[1][0]] == [False, False, True, False]
        assert again.seen[1][0][-1]["content"] == "1"
        await agent.aclose()
        await agent.aclose()
        return rewards

    assert run(play()) == [1.0, 0.0]
    found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, timeout=20.0, check=True).stdout
    assert server[1] not in found


@pytest.mark.parametrize("flags", [(), ("--data.engine.init_args.agent.init_args.per_episode", "true")])
def test_the_page_trains_with_a_server_and_writes_its_keys_nowhere(tmp_path, tmp_path_factory, flags):
    """The server has one key of a variable, which it writes to stderr, and one of a file."""
    config = shown(PAGE, tmp_path, "McpAgent")
    file = tmp_path_factory.mktemp("elsewhere") / "key"
    file.write_text(f"{PLANTED}-of-a-file")
    script = tmp_path / "my_tools.py"
    told = "import os, pathlib, sys\nprint(os.environ['MY_SEARCH_API_KEY'], file=sys.stderr)\n"
    told += f"print(len(pathlib.Path({str(file)!r}).read_text()), file=sys.stderr)\n"
    script.write_text(told + script.read_text())
    tape = ["--trainer.callbacks+=RolloutTape", "--trainer.callbacks.folder", str(tmp_path / "runs" / "tape")]
    runs = train(
        tmp_path,
        config,
        *tape,
        *flags,
        policy="calculator_policy",
        validation=None,
        MY_SEARCH_API_KEY=PLANTED,
        WANDB_MODE="offline",
    )
    found = metrics_of(runs)
    assert found["agent/num_calls"][-1] >= 8
    assert found["agent/num_lost"][-1] == found["agent/drift_template"][-1] == found["agent/drift_other"][-1] == 0
    check_that_no_file_has({PLANTED}, tmp_path)
    command = [sys.executable, "-c", "from lit_async_rl.cli.console import main; main()", "report"]
    folder = next(runs.rglob("metrics.csv")).parent
    subprocess.run([*command, str(folder)], cwd=tmp_path, capture_output=True, timeout=TIMEOUT_S, check=True)
    check_that_no_file_has({PLANTED}, tmp_path)


def test_the_example_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    metrics = runpy.run_path(str(ROOT / "examples" / "mcp_sums.py"))["main"]()
    assert metrics["agent/num_calls"] >= 2 * 4 * 4
    assert metrics["agent/num_lost"] == 0.0
