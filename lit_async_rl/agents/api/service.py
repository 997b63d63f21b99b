"""Answers to the calls of running episodes, over HTTP or from a client in this process."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lit_async_rl.agents.api.answers import Answer
from lit_async_rl.agents.api.bodies import (
    CHAT,
    DISTRIBUTION,
    TEXT,
    Call,
    CallLimits,
    chat_call,
    parse_body,
    text_call,
)
from lit_async_rl.agents.api.errors import response_of
from lit_async_rl.agents.api.exchange import ATTEMPT, IDEMPOTENCY_KEY, ApiRequest, ApiResponse
from lit_async_rl.agents.api.response_answers import ResponseAnswer
from lit_async_rl.agents.api.response_bodies import RESPONSES, response_call
from lit_async_rl.agents.api.retries import MAX_KEY_CHARS, CallBook, RepeatableCall, digest_of
from lit_async_rl.agents.calls import AgentCallError, CallSampling, Reply
from lit_async_rl.agents.episode import AgentEpisode
from lit_async_rl.errors import describe
from lit_async_rl.models.tokenizer import TextCodec

MODELS = "/v1/models"
READERS = {CHAT: chat_call, TEXT: text_call, RESPONSES: response_call}
EVENTS = "text/event-stream; charset=utf-8"
ENDED = response_of(AgentCallError("the agents' endpoint has ended", "engine_failed", status=503))
log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Session:
    episode: AgentEpisode
    book: CallBook = field(default_factory=CallBook)


class CallService:
    """Serves running episodes to OpenAI clients, each by its key. Thread-safe.

    Args:
        limits: limits of calls.
        codec: of the model.
    """

    def __init__(self, limits: CallLimits, codec: TextCodec) -> None:
        self.limits = limits
        self._codec = codec
        self._model = codec.model
        self._sessions: dict[str, _Session] = {}  # in single operations: episodes begin and end in other threads

    # -- episodes ------------------------------------------------------------------------------------------------------

    def open(self, episode: AgentEpisode) -> None:
        """Accepts calls with the key of an episode."""
        self._sessions[episode.key] = _Session(episode)

    def end(self, key: str) -> None:
        """Refuses further calls with a key."""
        self._sessions.pop(key, None)

    @property
    def episodes(self) -> list[AgentEpisode]:
        """Episodes whose calls are accepted."""
        return [session.episode for session in list(self._sessions.values())]

    def session(self, request: ApiRequest) -> _Session:
        """The episode of a request, by its header `Authorization`.

        Raises:
            AgentCallError: the path is none of the API, or the key is missing, unknown, or of an episode that has
                ended.
        """
        _check_path(request)
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise AgentCallError(
                "You didn't provide an API key. Send it in the header Authorization: Bearer KEY; the agent of an "
                "episode has it in OPENAI_API_KEY.",
                "invalid_api_key",
                status=401,
            )
        session = self._sessions.get(key)
        if session is None:
            raise AgentCallError("Incorrect API key provided, or its episode has ended.", "invalid_api_key", status=401)
        return session

    # -- calls ---------------------------------------------------------------------------------------------------------

    async def respond(self, request: ApiRequest, has_gone: Callable[[], bool] = lambda: False) -> ApiResponse:
        """The answer to a request, or its refusal. Cancelled when its client has gone.

        Args:
            request: the request.
            has_gone: whether its client has gone, although the call was not yet cancelled.
        """
        try:
            session = self.session(request)
            return self._models(request) if request.method == "GET" else await self._answer(session, request, has_gone)
        except AgentCallError as error:
            return response_of(error)
        except Exception as error:  # which clients try again
            log.warning("the agents' endpoint failed to answer a request to %s: %s", request.path, describe(error))
            return response_of(AgentCallError(describe(error)[:500], "server_error", status=500))

    def _models(self, request: ApiRequest) -> ApiResponse:
        """The one model, in a list or by its name."""
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "lit-async-rl"}
        name = request.path.removeprefix(MODELS).removeprefix("/")
        if name not in ("", self._model):
            raise AgentCallError(
                f"The model {name[:200]!r} does not exist", "model_not_found", status=404, param="model"
            )
        return ApiResponse(body=json.dumps(model if name else {"object": "list", "data": [model]}).encode())

    async def _answer(self, session: _Session, request: ApiRequest, has_gone: Callable[[], bool]) -> ApiResponse:
        if len(request.body) > self.limits.max_body_bytes:
            raise self.too_long
        ignored = self.limits.ignored_options
        if not session.episode.trains:  # an agent names the distribution of training, which validation may not have
            ignored = ignored.union(DISTRIBUTION)
        body = {name: value for name, value in parse_body(request.body).items() if name not in ignored}
        call = READERS[request.path](body, session.episode.request.sampling, self.limits)
        known = session.book.join(
            digest_of(request.path, request.body),
            attempt=_attempt(request.headers.get(ATTEMPT, "")),
            idempotency_key=_idempotency_key(request.headers.get(IDEMPOTENCY_KEY)),
        )
        try:
            replies = await _sample(session.episode, call, call_ids(call, known.id))
        except AgentCallError as error:
            session.book.fail(known)
            if error.param == "messages":
                error.param = call.param
            raise
        except asyncio.CancelledError:
            self._leave(session, call, known)
            raise
        except BaseException:
            session.book.fail(known)
            raise
        if has_gone():
            self._leave(session, call, known)
        else:
            session.book.leave(known, delivered=True)
        shape = Answer if call.request is None else ResponseAnswer
        answer = shape(call, replies, self._codec, number=known.number, created=known.created)
        if call.stream:
            return ApiResponse(body=answer.events, media_type=EVENTS, headers={"Cache-Control": "no-cache"})
        return ApiResponse(body=answer.whole, lose=functools.partial(self._lose, session, call, known=known))

    def _lose(self, session: _Session, call: Call, known: RepeatableCall) -> None:
        """The client has not read the answer that it was given."""
        session.book.lose(known)
        self._withdraw(session, call, known)

    def _leave(self, session: _Session, call: Call, known: RepeatableCall) -> None:
        """A request goes without its answer, which does not train unless it is asked for again."""
        session.book.leave(known, delivered=False)
        self._withdraw(session, call, known)

    @staticmethod
    def _withdraw(session: _Session, call: Call, known: RepeatableCall) -> None:
        if not known.num_waiting and not known.is_delivered:
            for call_id in call_ids(call, known.id):
                session.episode.withdraw(call_id)

    @property
    def too_long(self) -> AgentCallError:
        """The refusal of a body longer than `limits`."""
        limit = self.limits.max_body_bytes
        return AgentCallError(
            f"the body is longer than {limit} bytes (EndpointClients.max_body_mb={limit / 2**20:g})",
            "request_too_large",
            status=413,
        )


def call_ids(call: Call, call_id: str) -> list[str]:
    """Names of a call's parts for the episode: one for each prompt."""
    return [call_id] if call.messages else [f"{call_id}-{number}" for number in range(len(call.prompts))]


async def _sample(episode: AgentEpisode, call: Call, names: Sequence[str]) -> list[Reply]:
    """The policy's replies to a call; names are those of `call_ids`."""
    sampling = CallSampling(max_tokens=call.max_tokens, stop=call.stop, seed=call.seed)
    if call.messages:
        return await episode.complete(
            call.messages,
            tools=call.tools,
            sampling=sampling,
            n=call.n,
            call_id=names[0],
            chat_template_kwargs=call.chat_template_kwargs,
            parses_tools=call.calls_tools,
            check=None if call.rule is None else call.rule.fault,
        )
    tasks = [
        asyncio.ensure_future(episode.complete_text(prompt, sampling=sampling, n=call.n, call_id=name))
        for prompt, name in zip(call.prompts, names, strict=True)
    ]
    try:
        return [reply for replies in await asyncio.gather(*tasks) for reply in replies]
    except BaseException:  # the agent gets an error, and none of the replies to the other prompts
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for name in names:
            episode.withdraw(name)
        raise


def _check_path(request: ApiRequest) -> None:
    """Refuses a path that the API does not have, or has with another method."""
    is_model = request.path == MODELS or request.path.startswith(f"{MODELS}/")
    method = "POST" if request.path in READERS else "GET" if is_model else None
    if request.method != method:
        raise AgentCallError(
            f"Unknown request URL: {request.method} {request.path[:200]}; the endpoint has POST {CHAT}, POST "
            f"{RESPONSES}, POST {TEXT} and GET {MODELS}",
            "unknown_url",
            status=404 if method is None else 405,
        )


def _attempt(header: str) -> int:
    return int(header) if header.isdecimal() and len(header) < 6 else 0


def _idempotency_key(header: str | None) -> str | None:
    if header is None:
        return None
    if not 0 < len(header) <= MAX_KEY_CHARS:
        raise AgentCallError(f"Idempotency-Key must have 1 to {MAX_KEY_CHARS} characters", "invalid_value")
    return header
