"""Adapters of packages that are not installed say which extra has them; nothing else needs the packages."""

import asyncio
import sys
import threading

import pytest

import lit_async_rl as rl


@pytest.fixture
def _without(monkeypatch):
    for name in ("mcp", "openai", "openenv", "verifiers"):
        for module in [one for one in sys.modules if one.partition(".")[0] == name]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, name, None)


async def agent(prompt, client):
    return 1.0


async def enter_tools():
    async with rl.McpTools(["python"]):
        pass


@pytest.mark.parametrize(
    ("use", "extra"),
    [
        (lambda: asyncio.run(enter_tools()), "mcp"),
        (lambda: rl.OpenEnvPrompts("http://127.0.0.1:9")[0], "openenv"),
        (lambda: rl.VerifiersPrompts({"id": "sums"}), "verifiers"),
        (lambda: asyncio.run(rl.VerifiersAgent({"taskset": {"id": "sums"}})(rl.Prompt(text="?"), None)), "verifiers"),
        (lambda: asyncio.run(rl.McpAgent(["python"]).astart()), "mcp"),
        (lambda: rl.AgentEngine(rl.EmbeddedEngine(), agent).setup(rl.asset("sort_policy")), "agents"),
        (lambda: rl.AgentEngine(rl.EmbeddedEngine(), agent, rl.EndpointClients()).setup("a model"), "agents"),
    ],
)
@pytest.mark.usefixtures("_without")
def test_a_missing_package_is_one_line_with_its_extra(use, extra):
    with pytest.raises(ImportError) as error:
        use()
    assert f'pip install "lit-async-rl[{extra}]"' in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("env", [{}, {"taskset": {}}, {"taskset": None}])
def test_an_environment_of_verifiers_without_a_taskset_is_refused(env):
    with pytest.raises(ValueError, match=r"VerifiersAgent\.env must name a taskset"):
        rl.VerifiersAgent(env)


def test_an_agent_with_tools_ends_the_thread_of_its_async_reward():
    threads = []

    async def reward(prompt, completion):
        threads.append(threading.current_thread())
        return 0.5

    agent = rl.McpAgent(["python"], reward=reward)
    for _ in range(2):  # another run may use it again
        assert agent._score(rl.Prompt(text="?"), "4") == 0.5
        asyncio.run(agent.aclose())
        assert not threads[-1].is_alive()


@pytest.mark.parametrize(
    "reward",
    [
        lambda prompts, completions: [float(text == "4") for text in completions],
        lambda completions, **_: [float(text == "4") for text in completions],
        lambda completion, prompt: float(completion == "4"),
    ],
)
def test_the_reward_of_an_agent_with_tools_may_have_any_form(reward):
    agent = rl.McpAgent(["python"], reward=reward)
    assert [agent._score(rl.Prompt(text="?"), text) for text in ("4", "5")] == [1.0, 0.0]
    with pytest.raises(ValueError, match=r"^McpAgent\.reward=.* a parameter is missing"):
        rl.McpAgent(["python"], reward=lambda completion: 1.0)
