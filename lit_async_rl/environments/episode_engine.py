"""Multi-turn rollouts: wraps an engine and lets an environment respond after each turn.

Each turn is a request to the inner engine, with the whole conversation as its prompt. A finished episode is one
completion with the environment's tokens masked. `multi_request` has the life of an episode.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

from lit_async_rl.engines.base import RolloutEngine, set_up
from lit_async_rl.environments.base import Environment, Episode, Observation, close_one
from lit_async_rl.environments.multi_request import MultiRequestEngine, OpenRequest, PlayedSample
from lit_async_rl.errors import EnvironmentFailure, InvariantError
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.problem import Prompt
from lit_async_rl.runtime.loop import SharedLoop
from lit_async_rl.runtime.retries import TryPolicy
from lit_async_rl.runtime.spans import ENVIRONMENT, Overlap, recorder
from lit_async_rl.sampler_records import ExpertChoices, SamplerHead, blank_head, join_heads
from lit_async_rl.types import Completion, FinishReason, GenerationRequest, Turn
from lit_async_rl.utils.checks import as_reward, check_range
from lit_async_rl.utils.elsewhere import RemoteProxy, original_of
from lit_async_rl.utils.identity import reward_identity

# -- State of a multi-turn rollout while it is sampled ----------------------------------------------------------------


NO_PROMPT = "an environment needs the prompt, not only its tokens"


@dataclass(eq=False)
class GrowingRow:
    """Turns of the policy, and tokens between them; lists have one entry per token after the prompt."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    heads: list[SamplerHead] = field(default_factory=list)  # one per turn, and one for the tokens between two
    experts: ExpertChoices | None = None  # including the prompt's
    turns: list[Turn] = field(default_factory=list)

    def add_sampled(self, sampled: Completion, state: int, call: int | None = None) -> None:
        """Appends a turn of the policy, without a reward.

        Args:
            sampled: the turn.
            state: see `Turn`.
            call: see `Turn`.
        """
        self.token_ids += sampled.token_ids
        self.logprobs += sampled.logprobs
        self.versions += sampled.versions
        self.loss_mask += [True] * len(sampled.token_ids)
        if sampled.head is not None:
            self.heads.append(sampled.head)
        self.add_experts(sampled)
        self.turns.append(Turn(end=len(self.token_ids), reward=0.0, state=state, call=call))

    def add_experts(self, sampled: Completion) -> None:
        """Adds the experts of a turn and all tokens before it: each token's first recording counts."""
        if sampled.experts is not None:
            self.experts = sampled.experts if self.experts is None else self.experts.continued(sampled.experts)

    def add_given(self, token_ids: tuple[int, ...]) -> None:
        """Appends tokens that the policy did not sample."""
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.versions += [self.versions[-1]] * len(token_ids)
        self.loss_mask += [False] * len(token_ids)
        if self.heads:
            self.heads.append(blank_head(len(token_ids), self.heads[0].width))

    def fields(self, num_prompt_tokens: int) -> dict[str, Any]:
        """Fields of a `TokenRow` that follows so many tokens."""
        num_read = num_prompt_tokens + len(self.token_ids) - 1  # the model has not read the last token
        return dict(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            loss_mask=tuple(self.loss_mask),
            head=join_heads(self.heads) if self.heads else None,
            experts=None if self.experts is None else self.experts.padded(num_read),
            turns=tuple(self.turns),
        )


@dataclass(eq=False)
class Conversation(GrowingRow, PlayedSample):
    """A multi-turn rollout so far."""

    reward: float = 0.0
    state: int = 0  # hash of the environment's last state
    episode: Episode | None = None

    @property
    def prompt(self) -> Prompt:
        """The prompt for the environment."""
        if self.request.prompt is None:
            raise InvariantError(NO_PROMPT)
        return self.request.prompt

    def set_result(self, observation: Observation) -> None:
        """Sets the reward of the last turn and the initial state of the next."""
        self.reward += observation.reward
        self.turns[-1] = replace(self.turns[-1], reward=observation.reward)
        self.state = hash63(observation.text if observation.state is None else observation.state)

    def next_request(self) -> GenerationRequest:
        """The request of the next turn."""
        conversation_ids = self.request.prompt_ids + tuple(self.token_ids)
        seed = None if self.request.seed is None else self.request.seed + self.sample_index
        return replace(self.request, prompt_ids=conversation_ids, num_samples=1, seed=seed)

    def failure(
        self, environment: Environment, text: str, what: str, cause: EnvironmentFailure | None = None
    ) -> EnvironmentFailure:
        """An environment's error at the turn `text`: `what` happened; `cause`, if known, says whether to try again."""
        where = f"on prompt {self.prompt.text[:200]!r}, turn {text[:200]!r}"
        failure = EnvironmentFailure(f"environment {name_of(environment)} {where} {what}")
        if cause is not None:
            failure.is_lost = cause.is_lost
            failure.ends_run = cause.ends_run
        return failure

    def completion(self, finish_reason: FinishReason) -> Completion:
        """The rollout as a completion."""
        return Completion(
            request_id=self.request.id,
            sample_index=self.sample_index,
            finish_reason=finish_reason,
            reward=self.reward,
            **self.fields(len(self.request.prompt_ids)),
        )


def name_of(environment: Environment) -> str:
    """Name of an environment's class, wherever it plays."""
    return type(original_of(environment)).__name__


def hash63(state: str) -> int:
    """Hash of a text: 63 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(state.encode(), digest_size=8).digest(), "big") >> 1


def prepare(environment: Environment) -> None:
    """Starts the processes of an environment, if any, before the time of its episodes counts."""
    if isinstance(environment, RemoteProxy):
        environment.prepare()


class EnvironmentGrader:
    """Reward of the first turn of a new episode, in the event loop of the environment.

    Args:
        environment: of the run.
        loop: of its episodes.
        timeout_s: limit of start and response together, in seconds.

    Attributes:
        references: those of the environment; None if it has none.
        name: of its class.
    """

    def __init__(self, environment: Environment, loop: SharedLoop, timeout_s: float) -> None:
        self._environment = environment
        self._loop = loop
        self._timeout_s = timeout_s
        self.references = environment.references
        self.name = name_of(environment)

    def __call__(self, prompt: Prompt, completion: str) -> float:
        """Reward of the completion as the only turn.

        Raises:
            StalledError: the environment did not respond in time.
        """
        loop = self._loop.enter()
        try:
            return loop.call(self._first_turn(prompt, completion), self._timeout_s, f"environment {self.name}")
        finally:
            self._loop.leave()

    async def _first_turn(self, prompt: Prompt, completion: str) -> float:
        episode = await self._environment.start(prompt)
        try:
            return (await episode.step(completion)).reward
        finally:
            if episode is not self._environment:
                await close_one(episode)


class EpisodeEngine(MultiRequestEngine[Conversation]):
    """Alternates turns of `engine` and `environment`; the environment's rewards replace `data.reward`.

    A turn ends with the end-of-sequence token, a stop token or a stop string; all stay in the context, but the
    environment receives the text before the stop string. `sampling.max_tokens` bounds one turn. An episode that the
    environment does not end has the finish reason `length`: after a turn that reached `max_tokens`, after `max_turns`,
    or when another turn might not fit into the context.

    Running episodes always continue under new weights, so later turns may have newer versions; every token is tagged
    with its version, and the bound holds for all. Incompatible with `FixedLag`.

    If its environment fails, an episode restarts from the first turn; nothing of the failed one is trained on.

    Args:
        engine: generates the turns.
        environment: responds to them.
        max_turns: maximum turns of the policy in one episode.
        step_timeout_s: timeout of an environment's start or response, and of the end of an episode.
        tries: failures (errors or timeouts) of the environment after which an episode is given up with a warning, and
            another prompt replaces its own. Ten such prompts without a finished episode in between end the run. None
            ends it at the first failure.
        backoff_s: seconds before the second try; each further pause is twice as long.
        step_cut_turns: let the environment reward a turn that reached `max_tokens` (`Episode.step_cut`). False: such
            an episode ends with the rewards of its earlier turns.

    Raises:
        ValueError: a setting is out of range, or the engine does not update weights in flight.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        environment: Environment,
        max_turns: int = 8,
        step_timeout_s: float = 60.0,
        tries: int | None = None,
        backoff_s: float = 0.0,
        step_cut_turns: bool = True,
    ) -> None:
        check_range("EpisodeEngine", "integer >= 1", max_turns=max_turns)
        policy = TryPolicy(
            owner="data.engine",
            timeout_s=step_timeout_s,
            tries=tries,
            backoff_s=backoff_s,
            timeout_name="step_timeout_s",
            done="played",
        )
        super().__init__(engine, policy, player=f"environment {name_of(environment)}")
        self.environment = environment
        self.max_turns = max_turns
        self.step_timeout_s = step_timeout_s
        self.step_cut_turns = step_cut_turns
        self._environment_spans = Overlap("answer")

    def grader(self) -> EnvironmentGrader:
        """The environment as a reward of single turns, to check it against reference answers."""
        return EnvironmentGrader(self.environment, self._tasks.shared, self.policy.timeout_s)

    @property
    def scoring_identity(self) -> str:
        """See `RolloutEngine`: the environment's identity, and which turns it may respond to."""
        turns = f"max_turns={self.max_turns}, step_cut_turns={self.step_cut_turns}"
        return f"{turns}, {reward_identity(self.environment)}"

    def around(self, engine: RolloutEngine, codec: TextCodec) -> RolloutEngine:
        prepare(self.environment)
        return super().around(engine, codec)

    def setup(self, model: str) -> None:
        prepare(self.environment)
        super().setup(model)
        self._environment_spans.lane = recorder().lane(ENVIRONMENT)  # not in validation, which never calls `setup`

    # -- life of a conversation ---------------------------------------------------------------------------------------

    def _begin(self, opened: OpenRequest[Conversation]) -> list[GenerationRequest]:
        """One request for the first turns of all samples, which share its prompt."""
        request = opened.request
        if request.prompt is None:
            raise InvariantError(NO_PROMPT)
        opened.samples = [Conversation(request, n) for n in range(request.num_samples)]
        return [self._register(request, dict(enumerate(opened.samples)))]

    def _begin_again(self, failed: Conversation, pause_s: float) -> None:
        request = failed.request
        conversation = Conversation(request, failed.sample_index, num_failed=failed.num_failed)
        self._open[request.id].samples.append(conversation)
        self._play(conversation, lambda: self._take_first_turn(conversation), pause_s)

    async def _take_first_turn(self, conversation: Conversation) -> None:
        with self._lock:
            if not conversation.is_over:
                self._submit_turn(conversation)

    def _give_up(self, conversation: Conversation) -> list[int]:
        """Gives up all samples of the prompt, which another one replaces."""
        self._given_up.append(conversation.request.id)
        return self._drop([conversation.request.id])

    def _release(self, conversation: Conversation) -> None:
        """Starts closing a conversation's episode, if any."""
        episode = conversation.episode
        conversation.episode = None
        if episode is not None and episode is not self.environment:  # which `end` closes
            self._tasks.finish(self._close(episode))

    async def _close(self, owner: Episode | Environment) -> None:
        """Calls `close` of an episode or environment; only logs errors."""
        try:
            await asyncio.wait_for(close_one(owner), self.step_timeout_s)
        except asyncio.TimeoutError:
            self._warn_of_close(f"did not return within {self.policy.limit}")
        except (Exception, asyncio.CancelledError) as error:
            self._warn_of_close(f"raised {type(error).__name__}: {error}")

    def _warn_of_close(self, what: str) -> None:
        self._warnings.warning("environment %s: close %s", name_of(self.environment), what)

    def end(self) -> None:
        """Closes the environment in the event loop of its episodes, once after each use."""
        super().end()
        close: Any = getattr(self.environment, "close", None)
        if close is not None and getattr(close, "__func__", None) is not Environment.close:
            self._tasks.shared.end(lambda: self._close(self.environment))

    def _receive(self, conversation: Conversation, completion: Completion) -> None:
        """Adds a finished turn, and passes it to the environment unless the episode is over."""
        conversation.add_sampled(completion, conversation.state)
        is_cut = completion.finish_reason != "stop"
        if is_cut and not self.step_cut_turns:
            self._finish(conversation, conversation.completion(completion.finish_reason))
            return
        sampling = conversation.request.sampling
        text = set_up(self._codec).decode(completion.token_ids, sampling.stop, sampling.stop_token_ids)
        self._play(conversation, lambda: self._continue_with_environment(conversation, text, is_cut))

    async def _continue_with_environment(self, conversation: Conversation, text: str, is_cut: bool) -> None:
        """Ends the episode, or submits the policy's next turn, with the environment's response."""
        ids = await self._response_tokens(conversation, text, is_cut)
        with self._lock:
            if conversation.is_over:
                return
            if is_cut or (ids is not None and not self._has_room(conversation, len(ids))):
                self._finish(conversation, conversation.completion("length"))
            elif ids is None:
                self._finish(conversation, conversation.completion("stop"))
            else:
                conversation.add_given(ids)
                self._submit_turn(conversation)

    def _has_room(self, conversation: Conversation, num_given: int) -> bool:
        """Whether the policy may take another turn after so many tokens of the environment."""
        request = conversation.request
        length = len(request.prompt_ids) + len(conversation.token_ids) + num_given + request.sampling.max_tokens
        return len(conversation.turns) < self.max_turns and length <= self.max_model_len

    async def _response_tokens(self, conversation: Conversation, text: str, is_cut: bool) -> tuple[int, ...] | None:
        """Tokens of the environment's response; None if the episode ends. All errors are `EnvironmentFailure`."""
        try:
            with self._environment_spans.one(turns=1):
                return await asyncio.wait_for(self._call_environment(conversation, text, is_cut), self.step_timeout_s)
        except asyncio.TimeoutError:  # not the built-in TimeoutError before Python 3.11
            limit = f"step_timeout_s={self.step_timeout_s:g}"
            raise conversation.failure(self.environment, text, f"did not answer within {limit}") from None
        except asyncio.CancelledError:  # by the environment itself; after an abort the error is ignored
            raise conversation.failure(self.environment, text, "was cancelled") from None

    async def _call_environment(self, conversation: Conversation, text: str, is_cut: bool) -> tuple[int, ...] | None:
        try:
            if conversation.episode is None:
                conversation.episode = await self.environment.start(conversation.prompt)
            step_cut = getattr(conversation.episode, "step_cut", conversation.episode.step)
            observation: Observation = await (step_cut if is_cut else conversation.episode.step)(text)
            as_reward(observation.reward)
            conversation.set_result(observation)
            return None if observation.done else set_up(self._codec).encode_continuation(observation.text)
        except EnvironmentFailure as error:  # of an episode in another process
            raise conversation.failure(self.environment, text, str(error), cause=error) from error
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # its own TimeoutError, too, which is not our limit; sys.exit would end the loop
            raise conversation.failure(self.environment, text, f"raised {type(error).__name__}: {error}") from error

    def _submit_turn(self, conversation: Conversation) -> None:
        """Submits the next turn of a conversation."""
        self.engine.submit([self._register(conversation.next_request(), {0: conversation})])
