"""Wraps an engine and runs an agent program for each sample; the policy trains on its calls.

`multi_request` has the life of an episode. A sample holds the slot of its group from before its first call until the
group was trained on, and every token has the version that sampled it: the staleness bound holds for each of them,
however long an agent takes. The trainer waits for it, at most `timeout_s`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lit_async_rl.agents.calls import AgentCallError
from lit_async_rl.agents.clients import ClientFactory, InProcessClients
from lit_async_rl.agents.credit import BranchCredit, Share
from lit_async_rl.agents.episode import AgentCallInfo, AgentEpisode, EpisodeRules
from lit_async_rl.agents.graph import DriftCounts
from lit_async_rl.agents.parsing import ReplyParser
from lit_async_rl.agents.rendering import ChatRenderer
from lit_async_rl.agents.results import AgentResult, result_of
from lit_async_rl.agents.rows import trained_turns
from lit_async_rl.agents.template_parser import AutoParser
from lit_async_rl.assets import asset
from lit_async_rl.engines.base import RolloutEngine, set_up
from lit_async_rl.environments.multi_request import MultiRequestEngine, OpenRequest
from lit_async_rl.errors import EngineError, EnvironmentFailure, SetupError
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.runtime.retries import TryPolicy
from lit_async_rl.types import Completion, GenerationRequest
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.elsewhere import original_of
from lit_async_rl.utils.identity import reward_identity

log = logging.getLogger(__name__)
Agent = Callable[[Any, Any], Any]
CLEANUP_TIMEOUT_S = 5.0  # for an agent that was cancelled; less than the time that its engine has to close


@runtime_checkable
class HoldingAgent(Protocol):
    """An agent that holds something for all of its episodes."""

    async def astart(self) -> None:
        """Makes it, if it is not there, before the time of each episode begins. An error ends the run."""

    async def aclose(self) -> None:
        """Frees it at the end of a run; a later one may need it again."""


@dataclass
class AgentStats:
    """Totals of an engine's episodes.

    Attributes:
        num_episodes: finished episodes.
        num_calls: their calls to the policy.
        num_rows: their rows that train.
        num_orphans: replies that reached no agent, which never train; likewise `num_side_turns`, of side calls.
        num_lost: samples whose agent failed in all tries.
        drift: see `lit_async_rl.agents.graph`.
    """

    num_episodes: int = 0
    num_calls: int = 0
    num_rows: int = 0
    num_orphans: int = 0
    num_side_turns: int = 0
    num_lost: int = 0
    drift: DriftCounts = field(default_factory=DriftCounts)

    def add(self, episode: AgentEpisode, completion: Completion) -> None:
        """Adds an episode that has finished."""
        turns = episode.graph.turns
        num_side = sum(turn.is_side for turn in turns)
        self.num_episodes += 1
        self.num_calls += episode.num_calls
        self.num_rows += len(completion.rows)
        self.num_side_turns += num_side
        self.num_orphans += len(turns) - num_side - len(trained_turns(turns))
        self.drift.add(episode.graph.drift)


class AgentEngine(MultiRequestEngine[AgentEpisode]):
    """Runs `agent(prompt, client)` for each sample; its result is the reward, in place of `data.reward`.

    Example:
        ```python
        import lit_async_rl as rl

        async def agent(prompt, client):
            answer = await client.chat.completions.create(messages=[{"role": "user", "content": prompt.text}])
            return float(answer.choices[0].message.content == prompt.answer)

        engine = rl.AgentEngine(rl.EmbeddedEngine(), agent=agent)
        ```

    An agent may call the policy concurrently. `sampling.max_tokens` bounds one reply. Calls that continue a
    conversation extend the recorded tokens, see `lit_async_rl.agents.graph`. Each conversation that ends somewhere
    trains as its own row; replies that the agent has never read, and side calls, do not train.

    Args:
        engine: samples the replies.
        agent: coroutine function of a prompt and a client, or its name, `module.function`. Returns the reward, or an
            `AgentResult`. See also `HoldingAgent`.
        clients: makes the clients; None is `InProcessClients`, unless the agent has `clients`.
        timeout_s: limit of an episode; its agent is then cancelled, and counts as failed.
        max_calls: calls to the policy in one episode.
        tries: failures (errors or timeouts) of an agent after which its sample is given up with a warning; its group
            trains with the others. Ten prompts that lost all samples, without a finished episode in between, end the
            run. None ends it at the first failure.
        backoff_s: seconds before the second try; each further pause is twice as long.
        side_calls: decides whether a side call, which shares neither system prompt nor tools with the first call,
            trains nevertheless; None trains none.
        credit: part of the advantage that each row gets.
        parser: finds tool calls and reasoning in replies; None is the one that fits the model.
        chat_template: file with a chat template in place of the tokenizer's, or name of a shipped one.
        forks: train with a template that writes earlier messages differently as a conversation goes on, each call as
            its own row; otherwise such a template is refused.

    Raises:
        ValueError: a setting is out of range, the engine does not update weights in flight, or the agent runs in
            another process and the clients have no address for it.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        agent: Agent | str,
        clients: ClientFactory | None = None,
        timeout_s: float = 600.0,
        max_calls: int = 64,
        tries: int | None = 1,
        backoff_s: float = 0.0,
        side_calls: Callable[[AgentCallInfo], bool] | None = None,
        credit: BranchCredit | None = None,
        parser: ReplyParser | None = None,
        chat_template: str | None = None,
        forks: bool = False,
    ) -> None:
        check_range("data.engine", "integer >= 1", max_calls=max_calls)
        policy = TryPolicy(
            owner="data.engine",
            timeout_s=timeout_s,
            tries=tries,
            backoff_s=backoff_s,
            done="played",
        )
        self.agent = load_agent(agent)
        super().__init__(engine, policy, player=f"agent {agent_name(self.agent)}")
        self.clients = clients or _own_clients(self.agent) or InProcessClients()
        _check_address(self.agent, self.clients)
        self.max_calls = max_calls
        self.side_calls = side_calls
        self.credit = credit or Share()
        self.parser = parser or AutoParser()
        self.chat_template = chat_template
        self.forks = forks
        self.stats = AgentStats()
        self._rules: EpisodeRules | None = None

    def with_engine(self, engine: RolloutEngine, **changes: Any) -> AgentEngine:
        """See `EngineWrapper`; agent and clients are the same objects, also for an agent given by name."""
        return super().with_engine(engine, **({"agent": self.agent, "clients": self.clients} | changes))

    @property
    def scoring_identity(self) -> str:
        """See `RolloutEngine`: the agent's identity, the calls that it may make, and which train, how much."""
        rows = ", ".join(map(reward_identity, (self.credit, self.side_calls)))
        return f"max_calls={self.max_calls}, {rows}, {reward_identity(self.agent)}"

    def _use(self, engine: RolloutEngine, codec: TextCodec) -> None:
        super()._use(engine, codec)
        renderer = ChatRenderer(codec, _template(self.chat_template))
        if renderer.has_template and renderer.problem and not self.forks:
            raise SetupError(
                f"data.engine.forks=false does not work with the model {codec.model!r}, because {renderer.problem}, "
                "so a conversation cannot continue from its recorded tokens. Set data.engine.chat_template to a "
                "template that only appends text, or set data.engine.forks=true, which trains on each call as a "
                "separate row"
            )
        if renderer.has_template and renderer.tool_problem and not self.forks:
            log.warning(
                "data.engine.forks=false works only in part with the model %r: when tools are used, %s. Calls that "
                "therefore cannot continue a recorded conversation become separate training rows, counted in the "
                "metric agent/drift_template",
                codec.model,
                renderer.tool_problem,
            )
        self._rules = EpisodeRules(
            renderer=renderer,
            parser=self.parser.for_model(codec),
            credit=self.credit,
            trains_side_call=self.side_calls or (lambda call: False),
            max_calls=self.max_calls,
            trains=self._trains,
        )

    def setup(self, model: str) -> None:
        self.clients.prepare()
        super().setup(model)

    def fresh(self, out_of_memory: bool = False) -> RolloutEngine:
        """See `RolloutEngine`; the totals go on."""
        other: Any = super().fresh(out_of_memory)
        other.stats = self.stats
        return other

    def metrics(self) -> dict[str, float]:
        """Totals since the start, for loggers."""
        stats = self.stats
        return {
            "agent/num_calls": float(stats.num_calls),
            "agent/num_rows": float(stats.num_rows),
            "agent/num_orphans": float(stats.num_orphans),
            "agent/num_side_turns": float(stats.num_side_turns),
            "agent/num_lost": float(stats.num_lost),
            "agent/num_healed": float(stats.drift.healed),
            "agent/drift_template": float(stats.drift.template),
            "agent/drift_tokens": float(stats.drift.tokens),
            "agent/drift_other": float(stats.drift.other),
        }

    def episode(self, key: str) -> AgentEpisode | None:
        """The running episode with this key; None if there is none."""
        return next((episode for episode in self.running if episode.key == key), None)

    # -- life of an episode -------------------------------------------------------------------------------------------

    def _begin(self, opened: OpenRequest[AgentEpisode]) -> list[GenerationRequest]:
        """Starts an agent for each sample; it makes all requests."""
        for sample in range(opened.request.num_samples):
            self._start(opened, sample)
        return []

    def _begin_again(self, failed: AgentEpisode, pause_s: float) -> None:
        opened = self._open[failed.request.id]
        self._start(opened, failed.sample_index, num_failed=failed.num_failed, pause_s=pause_s)

    def _start(
        self, opened: OpenRequest[AgentEpisode], sample: int, *, num_failed: int = 0, pause_s: float = 0.0
    ) -> None:
        episode = AgentEpisode(
            opened.request,
            sample,
            set_up(self._rules),
            lock=self._lock,
            max_model_len=self.max_model_len,
            submit=lambda inner: self._submit_call(inner, episode),
            abort=self._abort_calls,
            fail=self._break,
            num_failed=num_failed,
        )
        opened.samples.append(episode)
        self._play(episode, lambda: self._run(episode), pause_s)

    def _submit_call(self, request: GenerationRequest, episode: AgentEpisode) -> int:
        """Gives a call to the inner engine, and returns its id there; called with the lock held."""
        inner = self._register(request, dict.fromkeys(range(request.num_samples), episode))
        try:
            self.engine.submit([inner])
        except Exception as error:  # the engine's, which `poll` raises: another engine may replace it
            self._break(error)
            raise AgentCallError("the engine has failed", "engine_failed", status=503) from error
        return inner.id

    def _abort_calls(self, numbers: Sequence[int]) -> None:
        with self._lock:
            aborted = self._forget(numbers)
        self.engine.abort(aborted)

    def _receive(self, episode: AgentEpisode, completion: Completion) -> None:
        episode.receive(completion)

    def _keeps_prompt(self, episode: AgentEpisode) -> bool:
        opened = self._open[episode.request.id]
        return opened.num_lost + 1 < opened.request.num_samples

    def _give_up(self, episode: AgentEpisode) -> list[int]:
        """Leaves one sample out of its group."""
        self.stats.num_lost += 1
        self._open[episode.request.id].num_lost += 1
        self._lost.append((episode.request.id, episode.sample_index))
        return self._leave(episode)

    def end(self) -> None:
        """Closes what clients share, in the episodes' event loop, once after each use."""
        super().end()
        self._tasks.shared.end(self._end_clients)

    async def _end_clients(self) -> None:
        if isinstance(self.agent, HoldingAgent):  # before the server that it calls
            try:
                await self.agent.aclose()
            except (Exception, asyncio.CancelledError) as error:
                self._warnings.warning("closing an agent raised %s: %s", type(error).__name__, error)
        try:
            await self.clients.end()
        except (Exception, asyncio.CancelledError) as error:
            self._warnings.warning("clients of agents: end raised %s: %s", type(error).__name__, error)

    # -- event loop's thread ------------------------------------------------------------------------------------------

    async def _run(self, episode: AgentEpisode) -> None:
        """Runs an agent to its end, finishes its sample, and aborts calls that it has left under way."""
        if isinstance(self.agent, HoldingAgent):
            await self.agent.astart()
        result = await self._result(episode)
        with self._lock:
            if episode.is_over:
                return
            try:
                completion = _with_reward(episode.completion(), result)
            except EnvironmentFailure as failure:
                raise self._failure(episode, f"trains nothing: {failure}") from failure
            self.stats.add(episode, completion)
            inner = self._finish(episode, completion)
        if inner:
            self.engine.abort(inner)

    async def _result(self, episode: AgentEpisode) -> AgentResult:
        """Result of the agent within its time limit. All errors but the engine's are `EnvironmentFailure`."""
        task = asyncio.ensure_future(self._call_agent(episode))
        task.add_done_callback(_note_error)
        try:
            # Not `wait_for`: it would wait for an agent that does not let itself be cancelled, with the slot taken.
            done, _ = await asyncio.wait({task}, timeout=self.policy.timeout_s)
        except asyncio.CancelledError:  # the episode was aborted
            task.cancel()
            await asyncio.wait({task}, timeout=CLEANUP_TIMEOUT_S)
            raise
        if not done:
            task.cancel()
            raise self._failure(episode, f"did not end within {self.policy.limit}")
        if task.cancelled():
            raise self._failure(episode, "was cancelled")
        error = task.exception()
        if isinstance(error, EngineError):  # of what serves the episodes
            raise error
        if error is not None:
            raise self._failure(episode, f"raised {type(error).__name__}: {error}") from error
        return task.result()

    async def _call_agent(self, episode: AgentEpisode) -> AgentResult:
        try:
            client = await self.clients.open(episode)
            try:
                return result_of(await self.agent(episode.prompt, client))
            finally:
                await self._close_client(client, episode)
        except SystemExit as error:  # one agent that exits must not end the loop of all
            raise EnvironmentFailure(f"it called sys.exit({error.code!r})") from error

    async def _close_client(self, client: Any, episode: AgentEpisode) -> None:
        try:
            await self.clients.close(client, episode)
        except Exception as error:
            self._warnings.warning("closing an agent's client raised %s: %s", type(error).__name__, error)

    def _failure(self, episode: AgentEpisode, what: str) -> EnvironmentFailure:
        where = f"on prompt {episode.prompt.text[:200]!r}"
        return EnvironmentFailure(f"agent {agent_name(self.agent)} {where} {what}")


def _note_error(task: asyncio.Task[AgentResult]) -> None:
    """Marks an agent's error as seen: nobody waits for an agent past its limit."""
    if not task.cancelled():
        task.exception()


def _own_clients(agent: Agent) -> ClientFactory | None:
    found = getattr(agent, "clients", None)
    return found if isinstance(found, ClientFactory) else None


def _check_address(agent: Agent, clients: ClientFactory) -> None:
    own = _own_clients(agent)
    if own is not None and own.has_address and not clients.has_address:
        raise ValueError(
            f"data.engine.clients={type(clients).__name__} gives agents no address, but the agent of "
            f"{type(agent).__name__} runs in another process and needs an address to call the policy. Leave clients "
            "out, or use EndpointClients"
        )


def _template(name: str | None) -> str | None:
    """The chat template of a file, or a shipped one."""
    if name is None:
        return None
    path = Path(name).expanduser()
    try:
        return (path if path.is_file() else Path(asset(name))).read_text()
    except (OSError, ValueError) as error:
        raise ValueError(f"data.engine.chat_template={name!r} cannot be read as a file: {error}") from error


def _with_reward(completion: Completion, result: AgentResult) -> Completion:
    """The sample with its reward, which goes to the turn sampled last."""
    reward = float(result.reward)
    return replace(completion.rewarded(reward), reward=reward, reward_parts=dict(result.parts) or None)


def load_agent(agent: Agent | str, setting: str = "data.engine.agent") -> Agent:
    """The agent, imported if it is a name, and made if it is a class.

    Raises:
        ValueError: there is no such agent, or it is no coroutine function.
    """
    found: Any = agent
    if isinstance(agent, str):
        try:
            found = pkgutil.resolve_name(agent)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"{setting}={agent!r} cannot be imported: {error}") from error
    if inspect.isclass(found):
        found = found()
    call = found if inspect.isfunction(found) or inspect.ismethod(found) else getattr(found, "__call__", None)  # noqa: B004
    if not inspect.iscoroutinefunction(inspect.unwrap(call) if callable(call) else call):
        raise ValueError(f"{setting}={agent!r} must be a coroutine function: async def agent(prompt, client)")
    return found


def agent_name(agent: Agent) -> str:
    """Name for messages."""
    agent = original_of(agent)
    return getattr(agent, "__qualname__", type(agent).__name__)
