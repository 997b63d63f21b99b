"""Running episodes behind a real endpoint: the embedded engine, the quick start's policy, and chats of characters."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from lit_async_rl.agents import AgentEngine
from lit_async_rl.agents.endpoint.clients import EndpointClients
from lit_async_rl.agents.endpoint.server import Endpoint
from lit_async_rl.assets import asset
from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.problem import Prompt
from lit_async_rl.types import Completion, GenerationRequest

MODEL = str(asset("sort_policy"))
WAIT_S = 60.0
# every conversation is the bare texts of its messages: the policy sorts the last digits that it reads
CHARACTERS = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
# as ChatML, with the tools and the calls of tools in it
TOOLS = (
    "{% if tools %}{{ 'tools ' + (tools | tojson) + '\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message['tool_calls'] %}{{ '<tool_call>' + (call['function'] | tojson) + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


class Episodes:
    """Episodes of an engine whose thread samples until `close`.

    Attributes:
        engine: the engine.
        finished: samples that are finished.
        errors: what `poll` raised.
    """

    def __init__(self, engine: AgentEngine, model: str = MODEL) -> None:
        self.engine = engine
        self.finished: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self.given_up: list[int] = []
        self.errors: list[BaseException] = []
        self._may_sample = threading.Event()
        self._may_sample.set()
        self._sampling = threading.Lock()  # held while `poll` runs
        self._is_closing = threading.Event()
        engine.setup(model)
        lm = AutoModelForCausalLM.from_pretrained(model)
        engine.load_weights(0, lm.named_parameters())
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def _poll(self) -> None:
        try:
            while not self._is_closing.is_set():
                if self._may_sample.wait(0.02):
                    with self._sampling:
                        self._sample()
        except BaseException as error:
            self.errors.append(error)

    def _sample(self) -> None:
        if not self._may_sample.is_set():  # paused between the wait and the lock
            return
        for completion in self.engine.poll(0.02):
            self.finished.put(completion)
        self.given_up += self.engine.take_given_up()

    def pause(self) -> None:
        """Nothing is sampled from here on: a `poll` under way would take a call that comes after it began."""
        self._may_sample.clear()
        assert self._sampling.acquire(timeout=WAIT_S)
        self._sampling.release()

    def resume(self) -> None:
        """Sampling goes on."""
        self._may_sample.set()

    def submit(self, prompt: Prompt, num_samples: int = 1, **sampling: Any) -> None:
        """Starts one group."""
        self._number = getattr(self, "_number", -1) + 1
        params = SamplingParams(**({"max_tokens": 12} | sampling))
        self.engine.submit(
            [GenerationRequest(id=self._number, prompt_ids=(), num_samples=num_samples, sampling=params, prompt=prompt)]
        )

    def results(self, number: int) -> list[Completion]:
        """The next samples that finish."""
        return [self.finished.get(timeout=WAIT_S) for _ in range(number)]

    @property
    def endpoint(self) -> Endpoint:
        """The server."""
        return self.engine.clients._endpoint

    def close(self) -> None:
        self.resume()
        self._is_closing.set()
        self._thread.join(WAIT_S)
        self.engine.close()
        self.engine.end()


class Held:
    """An agent that hands its client to the test, and ends when the test says so."""

    def __init__(self) -> None:
        self.clients: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.is_over = threading.Event()

    async def __call__(self, prompt: Prompt, client: Any) -> float:
        self.clients.put(client)
        while not self.is_over.is_set():
            await asyncio.sleep(0.01)
        return 1.0


def make_engine(agent: Callable[..., Any], **settings: Any) -> AgentEngine:
    """An engine whose agents have clients of an endpoint."""
    names = ("host", "port", "max_body_mb", "max_messages", "ignored_options", "timeout_s")
    given = {name: settings.pop(name) for name in names if name in settings}
    num_slots = settings.pop("num_slots", 16)
    inner = settings.pop("inner", None) or EmbeddedEngine(num_slots=num_slots, self_check=False)
    return AgentEngine(inner, agent=agent, clients=EndpointClients(**given), **settings)


def wait_for(condition: Callable[[], Any], limit_s: float = WAIT_S) -> None:
    """Waits until a condition is true."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def template(folder: Path, text: str = CHARACTERS) -> str:
    """A file with a chat template."""
    path = folder / "template.jinja"
    path.write_text(text)
    return str(path)


@contextmanager
def importable(folder: Path, source: str) -> Iterator[str]:
    """Name of a module with this source, which another process finds, too."""
    name = f"agents_of_{folder.name.replace('-', '_')}"
    (folder / f"{name}.py").write_text(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield name
        sys.modules.pop(name, None)


@contextmanager
def playing(agent: Any, folder: Path, prompt: Prompt, num_samples: int = 1, **settings: Any) -> Iterator[Episodes]:
    """One group of an agent, which fails at its first error."""
    settings = {"chat_template": template(folder), "forks": True, "tries": 1} | settings
    episodes = Episodes(AgentEngine(EmbeddedEngine(self_check=False), agent=agent, **settings), MODEL)
    try:
        episodes.submit(prompt, num_samples=num_samples)
        yield episodes
    finally:
        episodes.close()


@contextmanager
def held(folder: Path, num_samples: int = 1, model: str = MODEL, **settings: Any) -> Iterator[tuple[Episodes, list]]:
    """Episodes that wait for the test, and their clients."""
    agent = Held()
    sampling = settings.pop("sampling", {})
    if model == MODEL:
        settings.setdefault("chat_template", template(folder))
        settings.setdefault("forks", True)
    episodes = Episodes(make_engine(agent, **settings), model)
    try:
        episodes.submit(Prompt(text="sort", answer="1234"), num_samples=num_samples, **sampling)
        clients = [agent.clients.get(timeout=WAIT_S) for _ in range(num_samples)]
        episodes.end_agents = agent.is_over.set
        yield episodes, clients
    finally:
        agent.is_over.set()
        episodes.close()
    assert not episodes.errors, episodes.errors
