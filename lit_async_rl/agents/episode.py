"""One running agent: its calls to the policy, and the graph of what was said.

Calls may come from any event loop and thread: from the agent itself, or from a server that agents in other processes
call. The lock of the engine guards the state, and replies come through futures. The costly part of a call (its
template, its tokens, a rule of the user) runs without that lock, for which the engine would wait: the calls of one
episode begin one after the other under their own lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from lit_async_rl.agents.call_requests import call_request
from lit_async_rl.agents.calls import AgentCallError, CallSampling, Reply, ReplyMessage, ReplyReason
from lit_async_rl.agents.credit import BranchCredit
from lit_async_rl.agents.graph import Match, MessageGraph, SampledTurn
from lit_async_rl.agents.parsing import ReplyParser
from lit_async_rl.agents.rendering import (
    UNSTABLE,
    ChatRenderer,
    Messages,
    checked_call_messages,
    checked_tools,
    kind_of,
    length_of,
    message_key,
)
from lit_async_rl.agents.reply_rules import MAX_TRIES
from lit_async_rl.agents.rows import completion_of
from lit_async_rl.environments.multi_request import PlayedSample
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.problem import Prompt
from lit_async_rl.types import Completion, GenerationRequest

MAX_SAMPLES = 128  # of one call
ReplyCheck = Callable[[Reply], str | None]


@dataclass(frozen=True, kw_only=True)
class AgentCallInfo:
    """A call as `AgentEngine.side_calls` sees it.

    Attributes:
        messages: of the call; empty for a text.
        tools: its tools.
        first_messages: those of the episode's first call; likewise `first_tools`.
    """

    messages: Messages
    tools: Messages
    first_messages: Messages
    first_tools: Messages

    @property
    def is_side_call(self) -> bool:
        """Whether it shares neither the system prompt nor the tools of the first call."""
        shares_system = system_prompt(self.messages) == system_prompt(self.first_messages)
        shares_tools = bool(self.tools) and list(self.tools) == list(self.first_tools)
        return not shares_system and not shares_tools


def system_prompt(messages: Messages) -> str:
    """Contents of the system and developer messages that begin a conversation."""
    system = itertools.takewhile(lambda message: message["role"] in ("system", "developer"), messages)
    return "\n".join(str(message["content"]) for message in system)


@dataclass(frozen=True, kw_only=True)
class EpisodeRules:
    """Settings of all episodes of an engine; see `AgentEngine`."""

    renderer: ChatRenderer
    parser: ReplyParser
    credit: BranchCredit
    trains_side_call: Callable[[AgentCallInfo], bool]
    max_calls: int
    trains: bool = True


@dataclass(eq=False)
class _Call:
    """A call under way, or one that was answered."""

    sampling: CallSampling
    num_samples: int
    id: str | None  # under which it may be asked for again
    messages: Messages = ()
    tools: Messages = ()
    parses_tools: bool = True
    # set before it is sampled
    keys: list[str] = field(default_factory=list)  # of the messages
    match: Match | None = None
    parent: SampledTurn | None = None
    given_ids: tuple[int, ...] = ()
    given_text: str = ""
    prompt_ids: tuple[int, ...] = ()
    is_side: bool = False
    # of one try
    number: int = field(default=-1, init=False)
    request_id: int = field(default=-1, init=False)  # of the inner engine
    completions: dict[int, Completion] = field(default_factory=dict, init=False)  # those that have come, by sample
    turns: list[SampledTurn] = field(default_factory=list, init=False)
    replies: Future[list[Reply]] = field(default_factory=Future, init=False)
    num_waiting: int = field(default=0, init=False)  # for the first try and all that follow it
    again: _Call | None = field(default=None, init=False)  # next try: samples in place of those that were discarded

    @property
    def tries(self) -> list[_Call]:
        """This try and all that follow it."""
        calls = [self]
        while (again := calls[-1].again) is not None:
            calls.append(again)
        return calls

    @property
    def all_turns(self) -> list[SampledTurn]:
        """Turns of all tries."""
        return [turn for one in self.tries for turn in one.turns]


class AgentEpisode(PlayedSample):
    """One running agent: one sample of a group; calls are refused when it is over.

    Args:
        request: of the outer engine.
        sample_index: which of its samples.
        rules: settings.
        lock: guards the state; the `threading.RLock` of the engine.
        max_model_len: largest number of tokens of a call and its reply.
        submit: gives a request to the inner engine, and returns its id there; called with the lock held.
        abort: aborts requests of the inner engine, called without the lock.
        fail: tells the engine that what serves its episodes has failed, by this error.
        num_failed: failed tries before this one.

    Attributes:
        key: unguessable; an endpoint takes it as the API key of the agent.
        graph: what was said.
    """

    def __init__(
        self,
        request: GenerationRequest,
        sample_index: int,
        rules: EpisodeRules,
        lock: Any,
        max_model_len: int,
        submit: Callable[[GenerationRequest], int],
        abort: Callable[[Sequence[int]], None],
        fail: Callable[[Exception], None],
        num_failed: int = 0,
    ) -> None:
        super().__init__(request, sample_index, num_failed=num_failed)
        self.key = f"agent-{secrets.token_urlsafe(24)}"
        self.graph = MessageGraph()
        self._rules = rules
        self._lock = lock
        self.max_model_len = max_model_len
        self._submit_request = submit
        self._abort = abort
        self.fail = fail
        self._calls: list[_Call] = []
        self._by_id: dict[str, _Call] = {}
        self._first: tuple[Messages, Messages] | None = None
        self._ids = itertools.count()
        self._beginning = threading.Lock()  # taken before `_lock`
        # of text completions: prompt and reply, and the rest of the reply, which begins with a stop string
        self._texts: dict[SampledTurn, tuple[str, str]] = {}

    def __repr__(self) -> str:
        return f"AgentEpisode(request {self.request.id}, sample {self.sample_index})"  # without its key

    @property
    def prompt(self) -> Prompt:
        """The problem.

        Raises:
            ValueError: the request has tokens only.
        """
        if self.request.prompt is None:
            raise ValueError("an agent needs the prompt's text or messages, but the request has only its tokens")
        return self.request.prompt

    @property
    def codec(self) -> TextCodec:
        """Encodes and decodes with the tokenizer of the model."""
        return self._rules.renderer.codec

    @property
    def trains(self) -> bool:
        """Whether its tokens train, and are not only validated."""
        return self._rules.trains

    @property
    def num_calls(self) -> int:
        """Calls so far; a repeated call counts once, a call that was sampled again with each try."""
        return len(self._calls)

    # -- calls, from any event loop -----------------------------------------------------------------------------------

    async def complete(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        sampling: CallSampling | None = None,
        n: int = 1,
        call_id: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        parses_tools: bool = True,
        check: ReplyCheck | None = None,
    ) -> list[Reply]:
        """Replies of the policy to a conversation.

        Args:
            messages: the whole conversation, in the form of OpenAI's chat messages.
            tools: JSON schemas of the tools.
            sampling: what the call asks of the sampler.
            n: number of replies.
            call_id: name of the call, under which a retry gets the same replies; without one each call is another
                sample.
            chat_template_kwargs: further arguments of the chat template.
            parses_tools: whether tool calls are found in the replies; otherwise they stay text.
            check: returns the fault of a reply, None if it has none. A reply with a fault does not train and is sampled
                again, with at most `MAX_TRIES` tries in all; each counts as a call. See `reply_rules`.

        Raises:
            AgentCallError: the call cannot be answered, or no try passed the check.
        """

        def begin() -> _Call:
            call = _Call(
                sampling=sampling or CallSampling(),
                num_samples=n,
                id=call_id,
                messages=checked_call_messages(messages),
                tools=checked_tools(tools),
                parses_tools=parses_tools,
            )
            self._continue_chat(call, dict(chat_template_kwargs or {}))
            return call

        return await self._answer(call_id, begin, check)

    async def complete_text(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: CallSampling | None = None,
        n: int = 1,
        call_id: str | None = None,
    ) -> list[Reply]:
        """Completions of a text, or of token ids.

        A text that begins with an earlier prompt and its completion continues them: what the policy wrote is not
        tokenised again, and keeps the token that ended it, which texts do not show, or the stop string if the text goes
        on with it. Arguments as in `complete`.

        Raises:
            AgentCallError: the call cannot be answered.
        """

        def begin() -> _Call:
            call = _Call(sampling=sampling or CallSampling(), num_samples=n, id=call_id)
            self._continue_text(call, prompt)
            return call

        return await self._answer(call_id, begin)

    async def _answer(
        self, call_id: str | None, begin: Callable[[], _Call], check: ReplyCheck | None = None
    ) -> list[Reply]:
        with self._beginning:
            with self._lock:
                self._check_open()
                call = self._by_id.get(call_id) if call_id is not None else None
                if call is None:
                    self._check_num_calls()
            if call is None:
                call = begin()
                self._submit(call)
            with self._lock:
                call.num_waiting += 1
        try:
            found = await self._passing(call, check)
        except BaseException:
            self._leave(call)
            raise
        with self._lock:
            call.num_waiting -= 1
            for _, turn in found:
                turn.is_kept = True
        return [reply for reply, _ in found]

    async def _passing(self, call: _Call, check: ReplyCheck | None) -> list[tuple[Reply, SampledTurn]]:
        """Replies that pass the check, with their turns, in the order of the samples."""
        replies = await _result(call.replies)
        found = list(zip(replies, call.turns, strict=True))
        if check is None:
            return found
        places = list(range(len(found)))  # of the samples of this try in the answer
        for num_tries in range(1, MAX_TRIES + 1):
            faults = [check(found[place][0]) for place in places]
            places = [place for place, fault in zip(places, faults, strict=True) if fault is not None]
            if not places:
                return found
            with self._lock:
                self.graph.discard([found[place][1] for place in places])
            if num_tries < MAX_TRIES:
                call = self._sample_again(call, num_samples=len(places), num_tries=num_tries)
                for place, pair in zip(places, zip(await _result(call.replies), call.turns, strict=True), strict=True):
                    found[place] = pair
        fault = next(fault for fault in faults if fault is not None)
        raise AgentCallError(
            f"the policy gave no valid reply in {MAX_TRIES} attempts; the last error: {fault}",
            "no_valid_reply",
            status=422,
        )

    def _sample_again(self, call: _Call, *, num_samples: int, num_tries: int) -> _Call:
        """The next try of a call; the same one for all that wait for the call."""
        with self._beginning, self._lock:
            if call.again is None:
                self._check_open()
                self._check_num_calls()
                again = replace(call, num_samples=num_samples)
                self._sample(again, num_tries)
                call.again = again
            return call.again

    def _sample(self, call: _Call, num_tries: int) -> None:
        """Asks the inner engine for a call's replies, with the lock held."""
        request = call_request(
            self.request,
            self.sample_index,
            call.prompt_ids,
            sampling=call.sampling,
            max_model_len=self.max_model_len,
            num_samples=call.num_samples,
            num_calls=len(self._calls),
            num_tries=num_tries,
        )
        call.request_id = self._submit_request(request)
        call.number = len(self._calls)
        self._calls.append(call)

    def _leave(self, call: _Call) -> None:
        """A caller no longer waits. A call that nobody can ask for again is aborted."""
        with self._lock:
            call.num_waiting -= 1
            last = call.tries[-1]
            is_abandoned = not call.num_waiting and call.id is None and not last.replies.done()
            if is_abandoned:
                last.replies.set_exception(AgentCallError("the call was cancelled", "cancelled", status=499))
        if is_abandoned:
            self._abort([last.request_id])

    def withdraw(self, call_id: str) -> None:
        """Its replies did not reach the agent, whose connection broke. A retry may still get them."""
        with self._lock:
            call = self._by_id.get(call_id)
            if call is not None and not call.num_waiting:
                for turn in call.all_turns:
                    turn.is_kept = False

    def discard(self, call_ids: Collection[str]) -> None:
        """The agent begins anew: these calls train nothing, and no later one continues them."""
        with self._lock:
            turns = [turn for call_id in call_ids if (call := self._by_id.get(call_id)) for turn in call.all_turns]
            for turn in turns:
                turn.is_kept = False
            self.graph.discard(turns)

    def _check_open(self) -> None:
        if self.is_over:
            raise AgentCallError("the episode that this API key belongs to has ended", "episode_over", status=401)

    def _check_num_calls(self) -> None:
        if self.num_calls >= self._rules.max_calls:
            raise AgentCallError(
                f"the episode has made max_calls={self._rules.max_calls} calls and cannot make another",
                "max_calls",
                status=429,
            )

    # -- beginning of a call, one after the other ---------------------------------------------------------------------

    def _continue_chat(self, call: _Call, options: Mapping[str, Any]) -> None:
        """Finds the turn that a call's messages continue, and what is new in them."""
        kind = kind_of(call.tools, options)
        # also of what the template leaves out: the graph keeps it
        self._check_length(max(len(kind), sum(map(length_of, call.messages))))
        call.keys = [message_key(message) for message in call.messages]
        with self._lock:
            match = self.graph.match(kind, call.messages, call.keys)
        call.match = match
        renderer = self._rules.renderer
        drift = self.graph.drift
        drift.other += match.is_edited
        parent = match.last
        text = None if parent is None else self._continuation(call, match, options)
        if parent is not None and text is not None:
            drift.healed += match.num_healed
            call.parent = parent
            self._check_length(len(text))
            call.given_ids = renderer.encode_after(parent.completion.token_ids, text)
        else:
            drift.template += parent is not None
            (text,) = renderer.segments(call.messages, call.tools, options)
            self._check_length(len(text))
            call.given_ids = renderer.encode(text)
        call.given_text = text

    def _continuation(self, call: _Call, match: Match, options: Mapping[str, Any]) -> str | None:
        """Text after the last turn that a call continues; None if the template renders earlier turns differently."""
        renderer = self._rules.renderer
        sampled = [place for place, _ in match.turns]
        try:
            segments = renderer.segments(call.messages, call.tools, options, sampled=sampled)
        except AgentCallError as error:
            if error.code != UNSTABLE:
                raise
            return None
        before = [turn.given_text for _, turn in match.turns]
        roles = [call.messages[place - 1]["role"] for place, _ in match.turns]
        is_continued = renderer.is_continued(before, segments[:-1], roles=roles, tools=call.tools, options=options)
        return segments[-1] if is_continued else None

    def _continue_text(self, call: _Call, prompt: str | Sequence[int]) -> None:
        """Finds the turn that a text or token ids continue, and what is new in them."""
        codec = self._rules.renderer.codec
        if isinstance(prompt, str):
            self._check_length(len(prompt))
            call.given_text = prompt
            call.parent, rest = self._continued_text(prompt)
            if call.parent is None:
                call.given_ids = codec.encode(Prompt(text=prompt)) if prompt else ()
            else:
                call.given_ids = codec.encode_continuation(rest)
        else:
            self._check_num_tokens(len(prompt))
            call.parent, call.given_ids = self._continued_ids(_checked_ids(prompt, codec.vocab_size))

    def _check_length(self, num_chars: int) -> None:
        """Refuses a text that cannot fit into the context whatever its tokens are, before seconds are spent on it."""
        self._check_num_tokens(-(-num_chars // self._rules.renderer.longest_token))

    def _check_num_tokens(self, least: int) -> None:
        if least > self.max_model_len:
            raise AgentCallError(
                f"the model's context is {self.max_model_len} tokens, and the call has at least {least}",
                "context_length_exceeded",
                param="messages",
            )

    def _continued_text(self, prompt: str) -> tuple[SampledTurn | None, str]:
        """The turn that a text continues, and the text behind it.

        The policy wrote the stop string that ended a turn, and reads it: a text that goes on with it continues behind
        it; any other has changed the turn: a drift.
        """
        with self._lock:
            texts = {turn: text for turn, text in self._texts.items() if not turn.is_discarded}
        begun = [turn for turn, (text, _) in texts.items() if self._begins(prompt, text, turn)]
        begun.sort(key=lambda one: (len(texts[one][0]), one.is_kept, one.call), reverse=True)
        for turn in begun:
            text, hidden = texts[turn]
            if prompt.startswith(hidden, len(text)):
                self.graph.drift.other += len(text) < len(texts[begun[0]][0])
                return turn, prompt[len(text) + len(hidden) :]
        self.graph.drift.other += bool(begun)
        return None, prompt

    @staticmethod
    def _begins(prompt: str, text: str, turn: SampledTurn) -> bool:
        """Whether a prompt begins with a turn; the same prompt, asked again, does not continue one that has ended."""
        goes_on = len(prompt) > len(text) or turn.completion.finish_reason == "length"
        return bool(text) and goes_on and prompt.startswith(text)

    def _continued_ids(self, ids: tuple[int, ...]) -> tuple[SampledTurn | None, tuple[int, ...]]:
        """The turn that token ids continue, with or without its end token, and the ids behind it."""
        ends = self.request.sampling.ends(self._rules.renderer.codec.ends.ids)
        with self._lock:
            turns = [turn for turn in self.graph.turns if not turn.is_discarded]
        best: tuple[SampledTurn | None, tuple[int, ...]] = (None, ids)
        for turn in turns:
            whole = turn.ids
            bare = whole[:-1] if whole[-1] in ends else whole
            for known in (whole, bare):
                goes_on = len(ids) > len(known) or turn.completion.finish_reason == "length"
                if goes_on and ids[: len(known)] == known:
                    if best[0] is None or len(ids) - len(known) <= len(best[1]):
                        best = (turn, ids[len(known) :])
                    break
        if best[0] is None and turns:
            text = self._spelled(ids)
            spelled = [self._spelled(turn.ids) for turn in turns]
            self.graph.drift.tokens += any(text != known and text.startswith(known) for known in spelled)
        return best

    def _spelled(self, ids: tuple[int, ...]) -> str:
        return str(self._rules.renderer.codec.tokenizer.decode(list(ids)))

    def _submit(self, call: _Call) -> None:
        """Has a call sampled after the turn that it continues."""
        n = call.num_samples
        if self._first is None:
            self._first = (call.messages, call.tools)
        if type(n) is not int or not 1 <= n <= MAX_SAMPLES:
            raise AgentCallError(f"n must be an integer from 1 to {MAX_SAMPLES}, got {n!r}", "invalid_n", param="n")
        call.prompt_ids = call.given_ids if call.parent is None else call.parent.ids + call.given_ids
        call.is_side = call.parent.is_side if call.parent is not None else self._is_side(call)
        with self._lock:
            self._check_open()  # it may have ended meanwhile
            self._sample(call, num_tries=0)
            if call.id is not None:
                self._by_id[call.id] = call

    def _is_side(self, call: _Call) -> bool:
        """Whether the new conversation of a call does not train."""
        if not self._calls or self._first is None:
            return False
        first_messages, first_tools = self._first
        info = AgentCallInfo(
            messages=call.messages, tools=call.tools, first_messages=first_messages, first_tools=first_tools
        )
        return info.is_side_call and not self._rules.trains_side_call(info)

    # -- end of a call and of the episode, with the lock held ---------------------------------------------------------

    def receive(self, completion: Completion) -> None:
        """Files a completion of the inner engine; the last one of a call answers it."""
        call = next((call for call in reversed(self._calls) if call.request_id == completion.request_id), None)
        if call is None:
            return
        call.completions[completion.sample_index] = completion
        if len(call.completions) == call.num_samples and not call.replies.done():
            call.replies.set_result([self._reply(call, call.completions[n]) for n in range(call.num_samples)])

    def _reply(self, call: _Call, completion: Completion) -> Reply:
        codec = self._rules.renderer.codec
        run = self.request.sampling
        stop = (*run.stop, *call.sampling.stop)
        text = codec.decode(completion.token_ids, stop, run.stop_token_ids)
        turn = SampledTurn(
            parent=call.parent,
            given_ids=call.given_ids,
            given_text=call.given_text,
            completion=completion,
            call=call.number,
            is_side=call.is_side,
            system=system_prompt(call.messages),
        )
        call.turns.append(turn)
        if call.match is None:
            message = ReplyMessage(content=text)
            self.graph.turns.append(turn)
            if call.given_text:
                whole = codec.decode(completion.token_ids, (), run.stop_token_ids)
                self._texts[turn] = (call.given_text + text, whole[len(text) :] if stop else "")
        else:
            message = self._rules.parser.parse(text, call.tools if call.parses_tools else (), self._new_tool_id)
            (recorded,) = checked_call_messages([message.as_message()])
            self.graph.add(call.match, call.messages, call.keys, reply=recorded, turn=turn)
        reason: ReplyReason = "length" if completion.finish_reason == "length" else "stop"
        return Reply(
            text=text,
            message=message,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            versions=completion.versions,
            finish_reason="tool_calls" if message.tool_calls and reason == "stop" else reason,
            prompt_token_count=len(call.prompt_ids),
            head=completion.head,
            token_texts=tuple(codec.token_texts(completion.token_ids)),
        )

    def _new_tool_id(self) -> str:
        return f"call{next(self._ids):05d}"  # nine letters and digits, which Mistral's templates want

    def end(self) -> None:
        """Ends the episode: pending calls get an error."""
        super().end()
        for call in self._calls:
            if not call.replies.done():
                call.replies.set_exception(AgentCallError("the episode has ended", "episode_over", status=401))

    def completion(self) -> Completion:
        """The sample without its reward.

        Raises:
            EnvironmentFailure: nothing was sampled that trains.
        """
        return completion_of(self.request, self.sample_index, self.graph.turns, credit=self._rules.credit)


def _checked_ids(ids: Any, vocab_size: int) -> tuple[int, ...]:
    checked = tuple(ids)
    if not all(type(token) is int and 0 <= token < vocab_size for token in checked):
        raise AgentCallError(
            f"a prompt of token ids must contain only integers from 0 to {vocab_size - 1}",
            "invalid_prompt",
            param="prompt",
        )
    return checked


async def _result(future: Future[list[Reply]]) -> list[Reply]:
    """Result of a future that others may wait for: a cancelled wait leaves it alone."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def wake(_: Future[list[Reply]]) -> None:
        with contextlib.suppress(RuntimeError):  # the caller's loop was closed
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(wake)
    await done.wait()
    return future.result()
