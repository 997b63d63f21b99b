"""Models that a judge asks: one behind an HTTP address (`Endpoint`), or one that runs here (`LocalModel`).

Everything but the thread of `LocalModel` runs in the judge's event loop. Tries are made here, and nowhere else: what
fails after them is a `FinalRewardError`, which `data.scoring.tries` does not try again.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import heapq
import itertools
import json
import os
import queue
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from lit_async_rl.engines.base import RolloutEngine
from lit_async_rl.errors import FinalRewardError, RewardSetupError, describe
from lit_async_rl.models.architecture import stored_buffers
from lit_async_rl.models.loading import load_policy
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.types import GenerationRequest, Prompt, SamplingParams
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.secrets import check_address, key_of_variable
from lit_async_rl.utils.spans import unrecorded

MAX_ANSWER_BYTES = 4 * 2**20
MAX_DOUBLINGS = 20
MAX_PAUSE_S = 60.0  # between two tries, unless the endpoint asks for more
SHOWN = 300  # characters of an answer in a message
TRANSIENT = (408, 409, 425, 429)
REFUSED = (401, 403, 404)
JOIN_S = 10.0
POLL_S = 0.1
CONNECTIONS_PER_POOL = 4
LIMITED = 429
MAX_TAG_TOKENS = 16  # of the tag that opens reasoning, and of the space behind it
REFUSALS = 4  # in a row, by 429: the endpoint refuses everything, and not one of ten requests


@dataclass(frozen=True, kw_only=True)
class JudgeLimits:
    """Limits of the calls of a judge.

    Args:
        max_concurrent: requests under way at a time, of all groups together.
        timeout_s: of one question with all its tries and the pauses between them, from its first request on; must be
            less than `data.scoring.timeout_s`.
        request_timeout_s: of one request.
        tries: failed requests of one question. Tried again are 408, 409, 425, 429 and 5xx, connections that fail, and
            answers that are no chat completion. `data.scoring.tries` does not try these again. A 429 says when to come
            back, and is no failure of the question: it counts towards `timeout_s` only.
        backoff_s: longest pause before the second request, which is random. While nothing is answered, each further
            one is longer by twice as much as the one before (1 to 2 times `backoff_s`, 3 to 4, 7 to 8); none grows
            while the endpoint answers other questions, and none is shorter than the endpoint's `Retry-After`. A
            question that pauses leaves its place to others; after four 429 in a row all wait for `Retry-After`.

    Raises:
        ValueError: a setting is out of range.
    """

    max_concurrent: int = 32
    timeout_s: float = 50.0
    request_timeout_s: float = 30.0
    tries: int = 5
    backoff_s: float = 1.0

    def __post_init__(self) -> None:
        check_range("JudgeLimits", "integer positive", max_concurrent=self.max_concurrent, tries=self.tries)
        check_range("JudgeLimits", "positive", timeout_s=self.timeout_s, request_timeout_s=self.request_timeout_s)
        check_range("JudgeLimits", ">= 0 and finite", backoff_s=self.backoff_s)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model has answered.

    Attributes:
        text: None if it has no text, such as a refusal in a field of its own.
        prompt_tokens: that were read; None where the endpoint does not say. Likewise `completion_tokens`.
        is_cut: whether it ends at the limit of tokens, and it is not known if it begins within reasoning.
    """

    text: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    is_cut: bool = False


# -- Places of requests under way -------------------------------------------------------------------------------------


class Places:
    """A semaphore whose places go to the waiter of the lowest order first. Not thread-safe: of one event loop.

    Args:
        number: of places.
    """

    def __init__(self, number: int) -> None:
        self._num_free = number
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._opens_at = 0.0  # of the loop's clock
        self._opening: asyncio.TimerHandle | None = None  # None while places are given out

    async def take(self, order: int) -> None:
        """Waits for a place; those of a lower `order` come first."""
        if self._num_free and self._opening is None:
            self._num_free -= 1
            return
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (order, next(self._numbers), future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # it was given one in the same turn of the loop
                self.give_back()
            raise

    def give_back(self) -> None:
        """Passes a place on."""
        self._num_free += 1
        self._give_out()

    def close_for(self, seconds: float) -> None:
        """Gives no place out for so long, or longer if that was said before; those that are taken stay so."""
        loop = asyncio.get_running_loop()
        opens_at = loop.time() + seconds
        if self._opening is not None:
            if opens_at <= self._opens_at:
                return
            self._opening.cancel()
        self._opens_at = opens_at
        self._opening = loop.call_at(opens_at, self._open)

    def _open(self) -> None:
        self._opening = None
        self._give_out()

    def _give_out(self) -> None:
        while self._num_free and self._waiting and self._opening is None:
            future = heapq.heappop(self._waiting)[2]
            if not future.done():
                self._num_free -= 1
                future.set_result(None)


class Turn:
    """The place of one question, which it leaves while it pauses. Give it back in any case.

    Args:
        places: of the judge.
        order: see `Places.take`.
    """

    def __init__(self, places: Places, order: int) -> None:
        self._places = places
        self._order = order
        self._has_place = False

    async def take(self) -> None:
        """Waits for a place."""
        await self._places.take(self._order)
        self._has_place = True

    def give_back(self) -> None:
        """Gives the place back, if it has one."""
        if self._has_place:
            self._has_place = False
            self._places.give_back()

    async def pause(self, seconds: float) -> None:
        """Sleeps without a place."""
        self.give_back()
        await asyncio.sleep(seconds)
        await self.take()

    def close_for_all(self, seconds: float) -> None:
        """No question gets a place for so long."""
        self._places.close_for(seconds)


# -- An OpenAI-compatible endpoint ------------------------------------------------------------------------------------


class TransientError(Exception):
    """A request failed, and may succeed when it is made again; after `retry_after_s` seconds, if that is known.

    `is_limited` says that the endpoint has refused it because there were too many.
    """

    def __init__(self, message: str, retry_after_s: float = 0.0, is_limited: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.is_limited = is_limited


class Endpoint:
    """Chat completions of an OpenAI-compatible endpoint, with tries.

    The key is read from the environment where a connection pool is opened, and kept nowhere else.

    Args:
        base_url: up to `/v1`.
        model: name that the endpoint knows.
        api_key_env: environment variable with the key; None sends none.
        fields: further fields of each request, such as `temperature`.
        limits: of the calls.
        on_request: called before each request; may refuse it by raising.
        on_answer: called with each answer and its latency in seconds.

    Raises:
        ModuleNotFoundError: the extra `judge` is not installed.
        ValueError: the address is none, or holds a password; or the variable is not set.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key_env: str | None,
        *,
        fields: Mapping[str, Any],
        limits: JudgeLimits,
        on_request: Callable[[bool], None],
        on_answer: Callable[[Answer, float], None],
    ) -> None:
        try:
            import httpx
            import tenacity
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                'a judge behind an address needs: pip install "lit-async-rl[judge]"', name=error.name
            ) from error
        check_address("JudgeReward.base_url", base_url, "JudgeReward.api_key_env")
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            shown = repr(base_url) if re.search(r"[.:/]", base_url) else "a word without a dot (not shown)"
            raise ValueError(f"JudgeReward.base_url must be an address such as http://localhost:8000/v1, got {shown}")
        key_of_variable("JudgeReward.api_key_env", api_key_env)
        self._httpx = httpx
        self._tenacity = tenacity
        self._url = base_url.rstrip("/") + "/chat/completions"
        self._model = model
        self._api_key_env = api_key_env
        self._fields = dict(fields)
        self._limits = limits
        self._on_request = on_request
        self._on_answer = on_answer
        self._clients: list[Any] = []
        self._num_under_way: list[int] = []  # of each client
        self._failures_in_row = 0  # of all questions, since the last answer
        self._refusals_in_row = 0  # likewise, by 429

    special_tokens: tuple[str, ...] = ()  # not known here

    async def open(self) -> None:
        """Makes the connection pools, unless there are some."""
        if self._clients:
            return
        key = self._key()
        # The places limit the connections; a second limit here would be a second queue, in which requests time out. A
        # pool looks at each of its connections for each request: several small ones take a tenth of the time of one.
        context = self._httpx.create_ssl_context()
        for _ in range(-(-self._limits.max_concurrent // CONNECTIONS_PER_POOL)):
            client = self._httpx.AsyncClient(
                headers={"Authorization": f"Bearer {key}"} if key else {},
                limits=self._httpx.Limits(max_connections=None, max_keepalive_connections=CONNECTIONS_PER_POOL),
                timeout=None,  # each request has one
                verify=context,
            )
            self._clients.append(client)
        self._num_under_way = [0 for _ in self._clients]

    async def close(self) -> None:
        """Closes all connections; `open` makes others."""
        clients = self._clients
        self._clients = []
        for client in clients:
            await client.aclose()

    async def ask(self, messages: Sequence[Mapping[str, str]], turn: Turn, deadline: float) -> Answer:
        """Asks until there is an answer.

        Args:
            messages: the conversation.
            turn: has a place, which is left in pauses.
            deadline: of the loop's clock, by which there must be an answer.

        Raises:
            FinalRewardError: there is none after all tries, or in time; or the endpoint refuses the request.
            RewardSetupError: it refuses every request.
        """
        tenacity = self._tenacity
        loop = asyncio.get_running_loop()
        limits = self._limits
        num_requests = 0
        num_failures = 0

        def pause_s(state: Any) -> float:
            """Grows with the failures of this question, as long as the endpoint has answered no other meanwhile."""
            asked_s = state.outcome.exception().retry_after_s
            doublings = min(state.attempt_number, self._failures_in_row, MAX_DOUBLINGS) - 1
            growing_s = min(MAX_PAUSE_S, limits.backoff_s * (2 ** max(0, doublings) - 1 + random.random()))
            return max(growing_s, asked_s + random.random() * limits.backoff_s if asked_s else 0.0)

        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(TransientError),
            stop=lambda state: num_failures >= limits.tries or loop.time() + state.upcoming_sleep >= deadline,
            wait=pause_s,
            sleep=turn.pause,
            reraise=True,
        )
        last: TransientError | None = None

        async def post() -> Answer:
            nonlocal num_requests, num_failures, last
            left_s = deadline - loop.time()
            if left_s <= 0 and last is not None:  # others had the places, or the endpoint had closed them
                raise last
            num_requests += 1
            try:
                answer = await self._post(messages, left_s, is_first=num_requests == 1)
            except TransientError as error:
                last = error
                num_failures += not error.is_limited
                self._note_failure(error, turn)
                raise
            self._failures_in_row = 0
            self._refusals_in_row = 0
            return answer

        try:
            answer: Answer = await retrying(post)
            return answer
        except TransientError as error:
            raise FinalRewardError(
                f"{self._url} gave no answer in {num_requests} requests (JudgeLimits.tries={limits.tries}) within "
                f"JudgeLimits.timeout_s={limits.timeout_s:g}; the last: {error}"
            ) from None

    def _note_failure(self, error: TransientError, turn: Turn) -> None:
        """Counts it; an endpoint that refuses everything is asked nothing for as long as it says."""
        self._failures_in_row += 1
        self._refusals_in_row = self._refusals_in_row + 1 if error.is_limited else 0
        if self._refusals_in_row >= REFUSALS and error.retry_after_s:
            turn.close_for_all(min(error.retry_after_s, MAX_PAUSE_S))

    async def _post(self, messages: Sequence[Mapping[str, str]], left_s: float, is_first: bool) -> Answer:
        self._on_request(is_first)
        began = time.monotonic()
        limit_s = max(0.001, min(self._limits.request_timeout_s, left_s))
        body = {"model": self._model, "messages": list(messages)} | self._fields
        try:
            status, headers, content = await asyncio.wait_for(self._exchange(body), limit_s)
        except (TimeoutError, asyncio.TimeoutError):
            raise TransientError(f"no answer within {limit_s:.3g} s (JudgeLimits.request_timeout_s)") from None
        except self._httpx.HTTPError as error:
            raise TransientError(self._without_key(f"{type(error).__name__}: {error}")) from None
        except ValueError as error:  # of what no client can read, such as a broken encoding
            raise TransientError(self._without_key(describe(error))) from None
        if status != 200:
            raise self._failure(status, headers, content)
        answer = _read_answer(content)
        self._on_answer(answer, time.monotonic() - began)
        return answer

    async def _exchange(self, body: Mapping[str, Any]) -> tuple[int, Mapping[str, str], bytes]:
        content = bytearray()
        pool = min(range(len(self._clients)), key=self._num_under_way.__getitem__)
        counts = self._num_under_way
        counts[pool] += 1
        try:
            async with self._clients[pool].stream("POST", self._url, json=body) as response:
                async for chunk in response.aiter_bytes():
                    content += chunk
                    if len(content) > MAX_ANSWER_BYTES:
                        raise TransientError(f"the answer is larger than {MAX_ANSWER_BYTES >> 20} MiB")
                return response.status_code, response.headers, bytes(content)
        finally:
            counts[pool] -= 1

    def _failure(self, status: int, headers: Mapping[str, str], content: bytes) -> Exception:
        shown = self._without_key(content.decode("utf-8", "replace"))[:SHOWN]
        message = f"HTTP {status}: {shown!r}"
        is_unpaid = status == 429 and b"insufficient_quota" in content
        if status in REFUSED or is_unpaid:
            key = "no key" if self._api_key_env is None else f"the key in {self._api_key_env}"
            return RewardSetupError(f"{self._url} refuses model {self._model!r} with {key}: {message}")
        if status in TRANSIENT or status >= 500:
            return TransientError(message, retry_after_s(headers.get("retry-after", "")), is_limited=status == LIMITED)
        return FinalRewardError(f"{self._url} refuses the request: {message}")

    def _key(self) -> str:
        return os.environ.get(self._api_key_env, "") if self._api_key_env else ""

    def _without_key(self, text: str) -> str:
        """Text of others for a message; some endpoints repeat the key that they refuse."""
        key = self._key()
        return text.replace(key, "***") if key else text


def retry_after_s(value: str) -> float:
    """Seconds of a `Retry-After` header, which is a number or a date (RFC 9110); 0 if it is neither."""
    if re.fullmatch(r"\d{1,6}(\.\d{1,6})?", value.strip()):
        return float(value)
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return 0.0


def _read_answer(content: bytes) -> Answer:
    """The answer in a chat completion.

    Raises:
        TransientError: it is none.
    """
    try:
        found = json.loads(content)
        choice = found["choices"][0]
        text = choice["message"].get("content")
        is_cut = choice.get("finish_reason") == "length"
        usage = found.get("usage") or {}
        prompt_tokens = usage.get("prompt_tokens")
        completion_tokens = usage.get("completion_tokens")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise TransientError(f"no chat completion: {content[:SHOWN].decode('utf-8', 'replace')!r}") from None
    if isinstance(text, list):  # parts, of which some are text
        text = "".join(part["text"] for part in text if isinstance(part, dict) and isinstance(part.get("text"), str))
    return Answer(
        text=text if isinstance(text, str) else None,
        prompt_tokens=_number(prompt_tokens),
        completion_tokens=_number(completion_tokens),
        is_cut=is_cut,
    )


def _number(value: Any) -> int | None:
    """A number of tokens; None for what is none: a negative one would give a part of the budget back."""
    return value if isinstance(value, int) and value >= 0 else None


def opened_reasoning(codec: TextCodec, prompt_ids: Sequence[int]) -> str:
    """The opening tag of reasoning that a prompt ends with, which belongs to the answer; empty without one."""
    end = codec.decode(prompt_ids[-MAX_TAG_TOKENS:])
    return found[0] if (found := re.search(r"<(?:\w+:)?think(?:ing)?>\s*\Z", end)) is not None else ""


# -- A model that runs here -------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Asked:
    token_ids: tuple[int, ...]
    future: concurrent.futures.Future[Answer]


class LocalModel:
    """A model on an engine of its own, in a thread; requests that come together are decoded together.

    It is not the policy's engine: that one belongs to the producer, changes its weights within completions, and is
    replaced when it fails, with everything that it was sampling.

    Args:
        model: Hugging Face name or folder.
        engine: not set up; a fresh one of the same settings is used for each run.
        sampling: of the answers.
        on_request: as of `Endpoint`; likewise `on_answer`.
    """

    def __init__(
        self,
        model: str,
        engine: RolloutEngine,
        *,
        sampling: SamplingParams,
        on_request: Callable[[bool], None],
        on_answer: Callable[[Answer, float], None],
    ) -> None:
        self._model = model
        self._given = engine
        self._sampling = sampling
        self._on_request = on_request
        self._on_answer = on_answer
        self._codec: TextCodec | None = None
        self._thread: threading.Thread | None = None
        self._inbox: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._loaded: concurrent.futures.Future[RolloutEngine] = concurrent.futures.Future()
        self._problem: RewardSetupError | None = None  # why the thread has ended
        self.special_tokens: tuple[str, ...] = ()

    async def open(self) -> None:
        """Loads the model, unless it is loaded; waits for it.

        Raises:
            RewardSetupError: it cannot be loaded.
        """
        if self._thread is None:
            self._loaded = concurrent.futures.Future()
            self._inbox = queue.SimpleQueue()
            self._problem = None
            self._thread = threading.Thread(
                target=self._work, args=(self._inbox, self._loaded), name="judge-model", daemon=True
            )
            self._thread.start()
        await asyncio.shield(asyncio.wrap_future(self._loaded))

    async def close(self) -> None:
        """Closes the engine and ends the thread."""
        thread = self._thread
        self._thread = None
        if thread is not None:
            self._inbox.put(None)
            await asyncio.get_running_loop().run_in_executor(None, thread.join, JOIN_S)

    async def ask(self, messages: Sequence[Mapping[str, str]], turn: Turn, deadline: float) -> Answer:
        """Answers a conversation; see `Endpoint.ask`."""
        self._on_request(True)
        began = time.monotonic()
        if self._problem is not None:
            raise self._problem
        if self._codec is None:
            raise RewardSetupError(f"the judge {self._model!r} was asked before it was loaded")
        try:
            ids = self._codec.encode(Prompt(messages=messages))
        except ValueError as error:
            raise FinalRewardError(f"the judge {self._model!r} cannot be asked: {error}") from error
        asked = _Asked(ids, concurrent.futures.Future())
        self._inbox.put(asked)
        left_s = deadline - asyncio.get_running_loop().time()
        try:
            answer = await asyncio.wait_for(asyncio.wrap_future(asked.future), max(0.001, left_s))
        except (TimeoutError, asyncio.TimeoutError):
            raise FinalRewardError(f"the judge {self._model!r} did not answer within JudgeLimits.timeout_s") from None
        self._on_answer(answer, time.monotonic() - began)
        return answer

    def _work(self, inbox: queue.SimpleQueue[_Asked | None], loaded: concurrent.futures.Future[RolloutEngine]) -> None:
        waiting: dict[int, _Asked] = {}
        engine = self._given.fresh()
        problem = FinalRewardError(f"the judge {self._model!r} was closed")
        try:
            # A verdict is followed by the token that ends the turn, which is no part of its line.
            codec = self._codec = TextCodec(self._model, "tags")
            self.special_tokens = tuple(map(str, codec.tokenizer.all_special_tokens))
            with unrecorded():
                engine.setup(self._model)
                engine.load_weights(0, _weights(self._model))
            loaded.set_result(engine)
            numbers = itertools.count()
            while True:
                for asked in _taken(inbox, wait=not waiting):
                    if asked is None:
                        return
                    self._submit(engine, next(numbers), asked, waiting=waiting)
                for completion in engine.poll(POLL_S) if waiting else ():
                    done = waiting.pop(completion.request_id)
                    text = opened_reasoning(codec, done.token_ids)
                    text += codec.decode(completion.token_ids, self._sampling.stop)
                    _resolve(
                        done.future,
                        Answer(
                            text=text, prompt_tokens=len(done.token_ids), completion_tokens=len(completion.token_ids)
                        ),
                    )
        except Exception as error:
            reason = describe(error).replace("model.model", "JudgeReward.model")
            problem = self._problem = RewardSetupError(f"the judge {self._model!r} failed: {reason}")
            if not loaded.done():
                loaded.set_exception(problem)
        finally:
            engine.close()
            for asked in (*waiting.values(), *filter(None, _taken(inbox, wait=False))):
                _resolve(asked.future, problem)

    def _submit(self, engine: RolloutEngine, number: int, asked: _Asked, *, waiting: dict[int, _Asked]) -> None:
        room = engine.max_model_len - len(asked.token_ids)
        if room < 1:
            length = len(asked.token_ids)
            longest = engine.max_model_len
            _resolve(
                asked.future, FinalRewardError(f"a question of {length} tokens is longer than the judge's {longest}")
            )
            return
        sampling = replace(self._sampling, max_tokens=min(self._sampling.max_tokens, room))
        request = GenerationRequest(id=number, prompt_ids=asked.token_ids, num_samples=1, sampling=sampling)
        waiting[number] = asked
        engine.submit([request])


def _taken(inbox: queue.SimpleQueue[_Asked | None], wait: bool) -> list[_Asked | None]:
    """Everything in a queue; waits for the first if it is to."""
    found = [inbox.get()] if wait else []
    while not inbox.empty():
        found.append(inbox.get())
    return found


def _resolve(future: concurrent.futures.Future[Answer], outcome: Answer | FinalRewardError) -> None:
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # given up meanwhile
        if isinstance(outcome, Answer):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)


def _weights(model: str) -> Iterator[tuple[str, Any]]:
    lm = load_policy(model)
    yield from lm.named_parameters()
    yield from stored_buffers(lm)
