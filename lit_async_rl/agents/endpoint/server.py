"""The endpoint: episodes by their keys, and the server that answers their agents.

| who | waits for | woken by |
|---|---|---|
| the server's thread | requests, and replies of episodes | sockets, and the engine's thread |
| `Endpoint.start` | the server to listen, at most `START_TIMEOUT_S` | the server's thread |
| a client | its answer, at most its own time-out | the server's thread |

The listening socket outlives the server: if the server ends by an error, it starts again on the same socket, and
clients that were cut off get the answers of their calls when they try again.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import logging
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from lit_async_rl.agents.api.answers import Answer, TokenTexts
from lit_async_rl.agents.api.bodies import (
    CHAT,
    Call,
    CallLimits,
    chat_call,
    check_length,
    checked_options,
    parse_body,
    text_call,
)
from lit_async_rl.agents.api.errors import SERVER_ERROR, ApiError
from lit_async_rl.agents.api.exchange import ApiRequest, ApiResponse
from lit_async_rl.agents.calls import AgentCallError
from lit_async_rl.agents.clients import call_ids, sample
from lit_async_rl.agents.endpoint.openai_clients import MISSING
from lit_async_rl.agents.endpoint.retries import MAX_KEY_CHARS, CallBook, RepeatableCall, digest_of
from lit_async_rl.agents.episode import AgentEpisode
from lit_async_rl.errors import EngineError, SetupError, describe
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.waiting import Wait, use_awake_clock

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 5.0
BACKLOG = 2048
MAX_RESTARTS = 5  # within `RESTART_WINDOW_S`
RESTART_WINDOW_S = 60.0
RESTART_PAUSE_S = 0.2
NUM_ENDED_KEYS = 4096
# for connections, whose clients' machines may go without a word: after two minutes of silence
KEEP_ALIVE = (
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 60),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 15),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", 4),
)
EVENTS = "text/event-stream; charset=utf-8"
log = logging.getLogger(__name__)
_listening: dict[str, Endpoint] = {}  # by address
ENDED = ApiError(503, "the agents' endpoint has ended", code="engine_failed", kind=SERVER_ERROR).response
MakeServer = Callable[["Endpoint", Callable[[], None]], Any]


@dataclass(frozen=True, kw_only=True)
class EndpointSettings:
    """Settings of the endpoint that agents reach by an OpenAI client.

    Args:
        host: address to listen on. Others than loopback are reached from other machines: whoever has the key of a
            running episode can sample from the policy, and texts are not encrypted.
        port: port; 0 chooses a free one.
        max_body_mb: largest body of a request, in MiB.
        max_messages: largest number of messages in a call.
        ignored_options: options of a call that are accepted and have no effect, where they would be refused because
            they change the distribution that tokens are sampled from, such as `temperature`, `response_format` or
            `tool_choice`.

    Raises:
        ValueError: a setting is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 0
    max_body_mb: float = 8.0
    max_messages: int = 2000
    ignored_options: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_range("endpoint", "positive", max_body_mb=self.max_body_mb)
        check_range("endpoint", "integer >= 1", max_messages=self.max_messages)
        check_range("endpoint", "integer in [0, 65535]", port=self.port)
        names = checked_options(self.ignored_options, "endpoint.ignored_options")
        object.__setattr__(self, "ignored_options", names)

    @property
    def limits(self) -> CallLimits:
        """Limits of a call."""
        return CallLimits(
            max_body_bytes=int(self.max_body_mb * 2**20),
            max_messages=self.max_messages,
            ignored_options=frozenset(self.ignored_options),
        )


class _Listening(socket.socket):
    """A listening socket that knows the connections it accepted.

    A server that ends in the middle leaves connections that it accepted and has no transport for yet; its error's
    traceback keeps them open, so that their clients would wait for an answer until their own time-outs.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._accepted: WeakSet[socket.socket] = WeakSet()

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        self._accepted.add(connection)
        return connection, address

    def close_all(self) -> None:
        """Closes the socket and its connections; no thread may use them any more."""
        self.close()
        for connection in list(self._accepted):
            connection.close()


@dataclass(eq=False)
class _Session:
    episode: AgentEpisode
    limits: CallLimits
    book: CallBook = field(default_factory=CallBook)


class Endpoint:
    """Serves running episodes to OpenAI clients. Thread-safe.

    Args:
        settings: settings.
        codec: codec of the model.

    Attributes:
        limits: limits of calls.
    """

    def __init__(self, settings: EndpointSettings, codec: TextCodec) -> None:
        self.settings = settings
        self.limits = settings.limits
        self._texts = TokenTexts(codec)
        self._model = codec.model
        self._lock = threading.Lock()  # of the two dictionaries: episodes begin and end in other threads
        self._sessions: dict[str, _Session] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._socket: _Listening | None = None
        self._thread: threading.Thread | None = None
        self._serving: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None
        self._failure: BaseException | None = None
        self._is_closing = threading.Event()

    # -- the server ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts to listen.

        Raises:
            ImportError: Starlette or uvicorn is not installed.
            OSError: the address cannot be used; names it.
            StalledError: the server does not start.
        """
        try:
            from lit_async_rl.agents.endpoint.app import make_server
        except ImportError as error:
            raise ImportError(f"{MISSING} ({error})") from error
        self._socket = self._listen()
        started = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(make_server, started), name="agent endpoint", daemon=True
        )
        self._thread.start()
        limit = f"the agents' endpoint did not start within {START_TIMEOUT_S:g} s"
        Wait(START_TIMEOUT_S, limit, check=self.check).until(started.wait)
        _listening[self.base_url] = self

    def _listen(self) -> _Listening:
        settings = self.settings
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        listening = _Listening(family, socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            for level, name, value in KEEP_ALIVE:
                if hasattr(socket, name):
                    listening.setsockopt(level, getattr(socket, name), value)
            listening.bind((settings.host, settings.port))
            listening.listen(BACKLOG)
        except OSError as error:
            listening.close()
            raise OSError(
                f"the agents' endpoint cannot listen on endpoint.host={settings.host!r}, "
                f"endpoint.port={settings.port}: {error}"
            ) from error
        return listening

    def _run(self, make_server: MakeServer, started: threading.Event) -> None:
        """Body of the thread: serves until `close`, again if the server ends by itself."""
        failures: deque[float] = deque(maxlen=MAX_RESTARTS + 1)
        while not self._is_closing.is_set():
            error: BaseException
            try:
                self._serve_once(make_server, started)
                error = EngineError("its server has stopped")
            except BaseException as raised:  # SystemExit, too: the agents wait for this thread
                error = raised
            self._serving = None
            if self._is_closing.is_set():
                return
            failures.append(time.monotonic())
            if len(failures) > MAX_RESTARTS and failures[-1] - failures[0] < RESTART_WINDOW_S:
                self._failure = error
                self._close_socket()  # so that clients are refused, and do not wait
                log.error("the agents' endpoint has ended, and is not started again: %s", describe(error))
                return
            log.warning("the agents' endpoint has ended, and is started again: %s", describe(error))
            self._is_closing.wait(RESTART_PAUSE_S)

    def _serve_once(self, make_server: MakeServer, started: threading.Event) -> None:
        if self._socket is None:
            raise SetupError("the agents' endpoint is not started")
        listening = self._socket.dup()  # the original stays open for the next server
        try:
            asyncio.run(self._serve(make_server, started, listening))
        finally:
            listening.close_all()

    async def _serve(self, make_server: MakeServer, started: threading.Event, listening: _Listening) -> None:
        task = asyncio.current_task()
        if task is None:
            raise SetupError("the agents' endpoint is served by a task")
        self._serving = (use_awake_clock(asyncio.get_running_loop()), task)
        if not self._is_closing.is_set():  # else `close` may have come too early to cancel the task
            await make_server(self, started.set).serve(sockets=[listening])

    def check(self) -> None:
        """Checks that the server runs, or is about to run again.

        Raises:
            EngineError: it has ended for good.
        """
        if self._failure is not None:
            raise EngineError("the agents' endpoint has ended") from self._failure

    def close(self) -> None:
        """Ends the server; clients that wait are cut off. Safe to call twice and from any thread."""
        self._is_closing.set()
        for address in [address for address, endpoint in list(_listening.items()) if endpoint is self]:
            del _listening[address]
        serving = self._serving
        if serving is not None:
            loop, task = serving
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(task.cancel)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(STOP_TIMEOUT_S)
        self._close_socket()
        with self._lock:
            self._sessions.clear()

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()

    @property
    def base_url(self) -> str:
        """Address for clients, as `OPENAI_BASE_URL` has it."""
        if self._socket is None:
            raise EngineError("the agents' endpoint is not started")
        host = self.settings.host
        port = self._socket.getsockname()[1]
        return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"

    # -- episodes ------------------------------------------------------------------------------------------------------

    def open(self, episode: AgentEpisode) -> None:
        """Accepts calls with the key of an episode.

        Raises:
            EngineError: the server has ended for good.
        """
        self.check()
        limits = self.limits.of_episode(episode.trains)
        with self._lock:
            self._sessions[episode.key] = _Session(episode, limits)

    def end(self, key: str) -> None:
        """Refuses further calls with a key."""
        with self._lock:
            if self._sessions.pop(key, None) is None:
                return
            self._ended[key] = None
            while len(self._ended) > NUM_ENDED_KEYS:
                self._ended.popitem(last=False)

    def session(self, authorization: str | None) -> _Session:
        """The episode of a request's header `Authorization`.

        Raises:
            ApiError: the key is missing, unknown, or of an episode that has ended.
        """
        scheme, _, key = (authorization or "").partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise ApiError(
                401,
                "You didn't provide an API key. Send it in the header Authorization: Bearer KEY; the agent of an "
                "episode has it in OPENAI_API_KEY.",
                code="invalid_api_key",
            )
        with self._lock:
            session = self._sessions.get(key)
            has_ended = key in self._ended
        if session is not None and hmac.compare_digest(session.episode.key.encode(), key.encode()):
            return session
        if has_ended:
            raise ApiError(401, "The episode of this API key has ended.", code="invalid_api_key")
        raise ApiError(401, "Incorrect API key provided.", code="invalid_api_key")

    def models(self) -> list[dict[str, Any]]:
        """The one model, as `/v1/models` lists it."""
        return [{"id": self._model, "object": "model", "created": 0, "owned_by": "lit-async-rl"}]

    # -- calls ---------------------------------------------------------------------------------------------------------

    async def respond(self, request: ApiRequest, has_gone: Callable[[], bool] = lambda: False) -> ApiResponse:
        """The answer to a call, or the refusal of one. Cancelled when its client has gone.

        Args:
            request: the call.
            has_gone: whether its client has gone, although the call was not cancelled yet.
        """
        try:
            return await self._answer(request, has_gone)
        except ApiError as error:
            return error.response
        except Exception as error:  # which clients try again
            log.warning("the agents' endpoint failed to answer %s: %s", request.path, describe(error))
            return ApiError(500, describe(error)[:500], code=SERVER_ERROR, kind=SERVER_ERROR).response

    async def _answer(self, request: ApiRequest, has_gone: Callable[[], bool]) -> ApiResponse:
        if self._failure is not None:
            return ENDED
        session = self.session(request.authorization)
        if len(request.body) > self.limits.max_body_bytes:
            raise self.too_long
        read = chat_call if request.path == CHAT else text_call
        call = read(parse_body(request.body), session.episode.request.sampling, session.limits)
        check_length(call, session.episode.max_model_len, longest_token=self._texts.longest)
        known = session.book.join(
            digest_of(request.path, request.body),
            attempt=_attempt(request.attempt),
            idempotency_key=_idempotency_key(request.idempotency_key),
        )
        try:
            replies = await sample(session.episode, call, call_ids(call, known.id))
        except AgentCallError as error:
            session.book.fail(known)
            raise ApiError(error.status, str(error), param=error.param, code=error.code) from None
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
        answer = Answer(call, replies, self._texts, number=known.number, created=known.created)
        if call.stream:
            return ApiResponse(body=answer.events, media_type=EVENTS, headers={"Cache-Control": "no-cache"})
        return ApiResponse(body=answer.whole, lose=functools.partial(self._lose, session, call, known=known))

    def _lose(self, session: _Session, call: Call, known: RepeatableCall) -> None:
        """The client of a request has not read the answer that it was given."""
        session.book.lose(known)
        self._withdraw(session, call, known)

    def _leave(self, session: _Session, call: Call, known: RepeatableCall) -> None:
        """A request goes without its answer: what nobody has read does not train, unless it is asked for again."""
        session.book.leave(known, delivered=False)
        self._withdraw(session, call, known)

    @staticmethod
    def _withdraw(session: _Session, call: Call, known: RepeatableCall) -> None:
        if not known.num_waiting and not known.is_delivered:
            for call_id in call_ids(call, known.id):
                session.episode.withdraw(call_id)

    @property
    def too_long(self) -> ApiError:
        """The refusal of a body that is longer than `limits`."""
        return ApiError(
            413,
            f"the body is longer than {self.limits.max_body_bytes} bytes "
            f"(EndpointClients.max_body_mb={self.settings.max_body_mb:g})",
            code="request_too_large",
        )


def endpoint_at(address: str) -> Endpoint | None:
    """The endpoint of this process that listens at an address, a client's `base_url`; None if there is none."""
    return _listening.get(address.rstrip("/"))


async def respond_at(address: str, request: ApiRequest) -> ApiResponse:
    """The answer of the endpoint of this process that listens at an address."""
    endpoint = endpoint_at(address)
    return ENDED if endpoint is None else await endpoint.respond(request)


def _attempt(header: str | None) -> int:
    return int(header) if header is not None and header.isdecimal() and len(header) < 6 else 0


def _idempotency_key(header: str | None) -> str | None:
    if header is None:
        return None
    if not 0 < len(header) <= MAX_KEY_CHARS:
        raise ApiError(400, f"Idempotency-Key must have 1 to {MAX_KEY_CHARS} characters", code="invalid_value")
    return header
