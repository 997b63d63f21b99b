"""Adapters of packages that are not installed say which extra has them; nothing else needs the packages."""

import asyncio
import sys
import threading

import pytest

import lit_async_rl as rl
from lit_async_rl.agents.held import Held


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


# -- what episodes share -----------------------------------------------------------------------------------------------


class Service:
    """A context manager that must be left by the task that has entered it."""

    def __init__(self, error=None, hangs=False):
        self.error = error
        self.hangs = hangs
        self.log = []

    async def __aenter__(self):
        self.task = asyncio.current_task()
        self.log.append("enters")
        await asyncio.sleep(0.01)
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return self

    async def __aexit__(self, *_):
        assert self.task is asyncio.current_task()
        self.log.append("leaves")


def held(*services):
    left = list(services)
    return Held("the service", lambda: left.pop(0), start_timeout_s=0.2 if services[0].hangs else 30.0)


def test_a_service_is_entered_once_by_many_and_left_by_its_own_task():
    async def use():
        service = Service()
        shared = held(service, Service())
        assert set(await asyncio.gather(*[shared.get() for _ in range(5)])) == {service}
        cancelled = asyncio.ensure_future(shared.get())
        cancelled.cancel()
        await asyncio.wait({cancelled})
        assert await shared.get() is service
        await shared.close()
        await shared.close()
        assert service.log == ["enters", "leaves"]
        again = await shared.get()
        assert again is not service
        await shared.discard(service)  # that one is gone already
        assert again.log == ["enters"]
        await shared.discard(again)
        assert again.log == ["enters", "leaves"]

    asyncio.run(use())


def test_a_service_is_started_before_its_first_use_and_not_for_one_that_has_ended():
    async def use():
        services = [Service(), Service(), Service()]
        shared = held(*services)
        await asyncio.gather(shared.start(), shared.start())
        assert await shared.get() is services[0]
        await shared.discard(services[0])
        await shared.start()  # the next one that needs it finds out what is wrong
        assert not services[1].log
        assert await shared.get() is services[1]
        await shared.close()
        await shared.start()
        assert services[2].log == ["enters"]
        await shared.close()

    asyncio.run(use())


def test_a_service_that_fails_or_hangs_at_its_start_tells_everybody_and_may_be_tried_again():
    async def fail():
        shared = held(Service(error=OSError("no disk")), Service())
        found = await asyncio.gather(*[shared.get() for _ in range(3)], return_exceptions=True)
        assert [str(error) for error in found] == ["no disk"] * 3
        assert isinstance(await shared.get(), Service)
        await shared.close()

    async def hang():
        service = Service(hangs=True)
        with pytest.raises(TimeoutError, match=r"the service did not start within 0\.2 s"):
            await held(service).get()
        assert service.task.cancelled() or service.task.done()

    asyncio.run(fail())
    asyncio.run(hang())
