"""Tasks and agents of `verifiers` (https://github.com/PrimeIntellect-ai/verifiers), trained as they are.

`verifiers` runs an agent's program (a *harness*) on a task, in a subprocess, a container or a sandbox, catches its
calls to a model and hands them to a `Client`: here the episode, whose calls are sampled, recorded and trained as those
of any agent. The rewards are those of the task.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from lit_async_rl.agents.calls import AgentCallError, CallSampling, Reply
from lit_async_rl.agents.episode import AgentEpisode
from lit_async_rl.agents.results import AgentResult
from lit_async_rl.problem import Prompt
from lit_async_rl.prompts.sources import PromptSource
from lit_async_rl.runtime.shared_context import SharedContext
from lit_async_rl.utils.checks import check_range

MISSING = 'tasks of verifiers need the package verifiers: pip install "lit-async-rl[verifiers]"'
INDEX = "verifiers_index"
KEY = "verifiers_key"
START_TIMEOUT_S = 300.0  # shared tool servers may be containers
NOWHERE = "http://127.0.0.1:9/v1"  # of calls that are no model's turns: refused at once
NO_KEY = "LIT_ASYNC_RL_NO_KEY"  # an environment variable that nobody sets


class VerifiersError(RuntimeError):
    """An episode of `verifiers` failed; the message is its last error."""


class VerifiersPrompts(PromptSource):
    """Tasks of a taskset as prompts, for `VerifiersAgent`.

    Example:
        ```yaml
        prompts: {class_path: VerifiersPrompts, init_args: {taskset: {id: my_taskset}, size: 1000}}
        ```

    Args:
        taskset: as `verifiers` configures it: `id` is an installed package or a module on the path.
        size: number of tasks; None takes all of them.
        first: index of the first; use disjoint ranges for training and validation.

    Raises:
        ValueError: a setting is out of range, or there are no such tasks.
    """

    def __init__(self, taskset: Mapping[str, Any], size: int | None = None, first: int = 0) -> None:
        check_range("VerifiersPrompts", "integer >= 1", size=size)
        check_range("VerifiersPrompts", "integer >= 0", first=first)
        self.taskset = dict(taskset)
        self.size = size
        self.first = first
        last = None if size is None else first + size
        loaders = _loaders()
        loaded = loaders.load_taskset(loaders.resolve_env_config({"taskset": self.taskset}).taskset)
        if size is None and not loaded.bounded:
            raise ValueError(f"VerifiersPrompts.size must be set: the taskset {loaded.config.id!r} is infinite")
        self._prompts = [_prompt(index, task) for index, task in itertools.islice(enumerate(loaded), first, last)]
        if len(self._prompts) < (size or 1):
            raise ValueError(
                f"VerifiersPrompts with first={first} and size={size} needs {first + (size or 1)} tasks: the taskset "
                f"{loaded.config.id!r} has only {first + len(self._prompts)} tasks"
            )

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self._prompts):
            raise IndexError(index)
        return self._prompts[index]


def _prompt(index: int, task: Any) -> Prompt:
    """A task for logs and reports; what the policy reads is the harness's doing."""
    from verifiers.v1.types import content_text

    data = task.data
    said = data.prompt
    if said is None:
        said = data.description or data.name or f"task {index}"
    text = said if isinstance(said, str) else "\n".join(content_text(message.content) for message in said)
    return Prompt(text=text, metadata={INDEX: index, KEY: task.key})


def _loaders() -> Any:
    """Configuration loaders of `verifiers`.

    Raises:
        ImportError: the package `verifiers` is not installed.
    """
    try:
        from verifiers.v1.utils import loaders
    except ImportError as error:
        raise ImportError(f"{MISSING} ({error})") from error
    return loaders


def _environment(config: Mapping[str, Any]) -> Any:
    """The environment of a configuration; raises as `_loaders`."""
    loaders = _loaders()
    return loaders.load_environment(loaders.resolve_env_config(dict(config)))


class VerifiersAgent:
    """Plays tasks of `verifiers` with its harnesses; all of their chat calls are those of the policy.

    Example:
        ```yaml
        agent:
          class_path: lit_async_rl.VerifiersAgent
          init_args:
            env:
              taskset: {id: my_taskset}
              agent: {harness: {id: "null"}, runtime: {type: subprocess}, max_turns: 4}
        ```

    Roles that pin their own model (`client`, such as a judge's) keep it. The reward is that of the trained roles'
    traces, their mean if there are several; its parts are the task's rewards by name.

    Args:
        env: the block `env` of `verifiers`' configuration: `taskset`, roles such as `agent`, `timeout`, `retries`. A
            role's default `runtime` is a sandbox of the hosted service Prime, which needs a key.

    Raises:
        ValueError: `env` names no taskset.
    """

    def __init__(self, env: Mapping[str, Any]) -> None:
        if not (env.get("taskset") or {}).get("id"):
            raise ValueError("VerifiersAgent.env must name a taskset: {taskset: {id: my_taskset}}")
        self.env = dict(env)
        self._services = SharedContext("the services of verifiers", self._serve, START_TIMEOUT_S)

    async def astart(self) -> None:
        """Starts the services that all episodes share.

        Raises:
            ImportError: the package `verifiers` is not installed.
            Exception: what `verifiers` raises.
        """
        await self._services.start()

    async def aclose(self) -> None:
        """Ends the services; a later episode starts others."""
        await self._services.close()

    async def __call__(self, prompt: Prompt, client: Any) -> AgentResult:
        """Plays one episode.

        Raises:
            ValueError: the prompt is of another taskset.
            VerifiersError: the episode failed.
        """
        services = await self._services.get()
        from verifiers.v1 import Sampling
        from verifiers.v1.clients import ModelContext

        task = services.task(prompt)
        context = ModelContext(model="policy", client=services.policy, sampling=Sampling())
        started: dict[str, _Calls] = {}

        def begin(trace: Any) -> None:
            started[trace.id] = services.calls[trace.id] = _Calls(client.episode, trace.id)

        def discard(trace: Any) -> None:
            started[trace.id].discard()  # `verifiers` tries again: what was sampled in vain must not train

        try:
            episode = await services.env.run_episode(task, context, on_trace=begin, on_discard=discard)
        finally:
            for trace_id in started:
                services.calls.pop(trace_id, None)
        return _result(episode, is_complete=services.env.complete(episode))

    @asynccontextmanager
    async def _serve(self) -> AsyncIterator[_Services]:
        env = await asyncio.to_thread(_environment, self.env)
        async with env.serving():
            services = _Services(env)
            # no public way leads to the client of a run: it is made from a configuration, by its type
            env._interception = services.interception(env._interception)
            yield services


class _Services:
    """State shared by the episodes of a run.

    Attributes:
        env: the environment of `verifiers`, with its servers.
        policy: configuration of a client, which tells calls of the policy from those of judges.
        calls: those of running traces, by id.
    """

    def __init__(self, env: Any) -> None:
        from verifiers.v1.clients import TrainClientConfig

        self.env = env
        self.policy = TrainClientConfig(base_url=NOWHERE, api_key_var=NO_KEY)
        self.calls: dict[str, _Calls] = {}
        self._numbered = enumerate(env.taskset)
        self._tasks: list[Any] = []

    def task(self, prompt: Prompt) -> Any:
        """The task of a prompt.

        Raises:
            ValueError: it is none of this taskset.
        """
        index = prompt.metadata.get(INDEX)
        if not isinstance(index, int):
            raise ValueError("VerifiersAgent needs data.prompts of class VerifiersPrompts")
        self._tasks += [task for _, task in itertools.islice(self._numbered, max(0, index + 1 - len(self._tasks)))]
        if index >= len(self._tasks) or self._tasks[index].key != prompt.metadata.get(KEY):
            raise ValueError(f"task {index} differs between VerifiersPrompts and the taskset of VerifiersAgent.env")
        return self._tasks[index]

    def interception(self, inner: Any) -> Any:
        """The servers that catch harnesses' calls, with the policy as their client."""
        from verifiers.v1.interception import Interception

        services = self

        class PolicyInterception(Interception):
            async def start(self) -> None:
                pass  # who has made `inner` starts and stops it

            @asynccontextmanager
            async def acquire(self, session: Any) -> AsyncIterator[Any]:
                async with inner.acquire(session) as slot:
                    if session.ctx.client == services.policy:
                        session.client = _policy_client()(services.calls[session.trace.id])
                    yield slot

        return PolicyInterception()


class _Calls:
    """Calls of one trace, an agent's try, to the policy."""

    def __init__(self, episode: AgentEpisode, trace_id: str) -> None:
        self._episode = episode
        self._trace_id = trace_id
        self._num_calls = 0

    async def complete(self, body: Mapping[str, Any]) -> Reply:
        """The reply to a chat completion's body; raises what `AgentEpisode.complete` raises, and ValueError."""
        lengths = [body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None]
        stop = body.get("stop") or ()
        sampling = CallSampling(  # all else is the policy's own
            max_tokens=next(iter(lengths), None),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            seed=body.get("seed"),
        )
        number = self._num_calls
        self._num_calls += 1
        replies = await self._episode.complete(
            body["messages"], tools=body.get("tools"), sampling=sampling, call_id=self._name(number)
        )
        return replies[0]

    def _name(self, number: int) -> str:
        return f"{self._trace_id}-{number}"

    def discard(self) -> None:
        """Trains none of them."""
        self._episode.discard([self._name(number) for number in range(self._num_calls)])


@functools.cache
def _policy_client() -> Any:
    """Class of a client of `verifiers` whose model is the policy."""
    from verifiers.v1.clients import Client
    from verifiers.v1.clients.train import serialize_completion
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.errors import ProviderError

    class PolicyClient(Client):
        def __init__(self, calls: _Calls) -> None:
            self._calls = calls

        async def get_response(
            self,
            dialect: Any,
            body: dict[str, Any],
            sampling: Any,
            session_id: str | None = None,
            turn: Any = None,
            headers: Mapping[str, str] | None = None,
        ) -> Any:
            if not isinstance(dialect, ChatDialect):
                text = f"the policy answers chat completions only, not calls of {type(dialect).__name__}"
                raise ProviderError(text, status_code=400)
            try:
                reply = await self._calls.complete(body)
            except ValueError as error:
                raise ProviderError(str(error), status_code=400) from error
            except AgentCallError as error:
                raise ProviderError(str(error), status_code=error.status) from error
            response = _response(reply, body["model"])
            response.raw = serialize_completion(response, body["model"])
            return response

    return PolicyClient


def _response(reply: Reply, model: str) -> Any:
    from verifiers.v1.types import AssistantMessage, Response, ToolCall, Usage

    message = reply.message
    calls = [ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in message.tool_calls]
    said = AssistantMessage(
        content=message.content or None, reasoning_content=message.reasoning, tool_calls=calls or None
    )
    usage = Usage(prompt_tokens=reply.prompt_token_count, completion_tokens=len(reply.token_ids))
    return Response(id="", created=0, model=model, message=said, finish_reason=reply.finish_reason, usage=usage)


def _result(episode: Any, is_complete: bool) -> AgentResult:
    """The reward of an episode, and its parts."""
    if not is_complete:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        last = errors[-1] if errors else None
        raise VerifiersError("an episode failed" if last is None else f"{last.type}: {last.message}")
    traces = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]
    if not traces:
        raise VerifiersError(
            "the episode gets no reward, because none of its agents is trainable: make an agent trainable"
        )
    parts: dict[str, float] = {}
    for trace in traces:
        for name, reward in trace.rewards.items():
            if reward is not None and math.isfinite(reward.value):
                parts[name] = parts.get(name, 0.0) + reward.value / len(traces)
    return AgentResult(reward=sum(trace.reward for trace in traces) / len(traces), parts=parts)
