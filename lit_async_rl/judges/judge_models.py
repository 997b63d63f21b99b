"""Backends of a judge: a model behind an HTTP address (`Endpoint`) or in this process (`LocalModel`).

Everything but the thread of `LocalModel` runs in the judge's event loop. Only backends retry: a request that fails in
its last try raises `FinalRewardError`, which `data.scoring.tries` does not retry.
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
from lit_async_rl.problem import Prompt
from lit_async_rl.runtime.spans import unrecorded
from lit_async_rl.runtime.threads import start_thread
from lit_async_rl.types import GenerationRequest, SamplingParams
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.secrets import check_address, key_of_variable

MAX_ANSWER_BYTES = 4 * 2**20
MAX_DOUBLINGS = 20
MAX_PAUSE_S = 60.0  # between two tries, unless the endpoint asks for a longer one
MAX_SHOWN_CHARS = 300  # of an answer, in a message
TRANSIENT = (408, 409, 425, 429)
REFUSED = (401, 403, 404)
JOIN_S = 10.0
POLL_S = 0.1
CONNECTIONS_PER_POOL = 4
LIMITED = 429
MAX_TAG_TOKENS = 16  # of the opening tag of reasoning with the whitespace behind it
MAX_REFUSALS = 4  # consecutive 429s from which the endpoint refuses everything, and not one request in ten


@dataclass(frozen=True, kw_only=True)
class JudgeLimits:
    """Limits of the calls of a judge.

    Args:
        max_concurrent: concurrent requests, over all groups.
        timeout_s: limit of one question with all tries and pauses, from its first request on; must be less than
            `data.scoring.timeout_s`.
        request_timeout_s: limit of one request.
        tries: failed requests of one question. 408, 409, 425, 429, 5xx, failed connections and answers that are no chat
            completion are retried here, not by `data.scoring.tries`. A 429 is no failure, and counts towards
            `timeout_s` only.
        backoff_s: upper limit of the random pause before the second request. Later ones grow exponentially while the
            endpoint answers nothing (1 to 2 times `backoff_s`, 3 to 4, 7 to 8), stay short while it answers other
            questions, and are never below its `Retry-After`. A pausing question holds no permit; after four consecutive
            429s all questions wait for `Retry-After`.

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
    """Answer of a model.

    Attributes:
        text: None for an answer without text, such as a refusal in a separate field.
        prompt_tokens: tokens read; None if the endpoint does not report them. Likewise `completion_tokens`.
        is_cut: whether the token limit ended it, perhaps within its reasoning.
        latency_s: seconds of its request.
    """

    text: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    is_cut: bool = False
    latency_s: float = 0.0


Asked = tuple[GenerationRequest, concurrent.futures.Future[Answer]]


# -- Concurrent requests ----------------------------------------------------------------------------------------------


class ConcurrencyLimiter:
    """Semaphore that serves the lowest `order` first, and can be paused. Bound to one event loop.

    Args:
        max_concurrent: permits held at a time.
    """

    def __init__(self, max_concurrent: int) -> None:
        self._num_free = max_concurrent
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._resumes_at = 0.0  # by the loop's clock
        self._resume_timer: asyncio.TimerHandle | None = None  # None unless paused

    async def acquire(self, order: int) -> None:
        """Waits for a permit; the lowest `order` comes first."""
        if self._num_free and self._resume_timer is None:
            self._num_free -= 1
            return
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (order, next(self._numbers), future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # granted in the same iteration of the loop
                self.release()
            raise

    def release(self) -> None:
        """Passes a permit on to the next waiter."""
        self._num_free += 1
        self._grant()

    def pause_for(self, seconds: float) -> None:
        """Grants nothing for so long, or until an earlier pause ends if that is later; held permits stay valid."""
        loop = asyncio.get_running_loop()
        resumes_at = loop.time() + seconds
        if self._resume_timer is not None:
            if resumes_at <= self._resumes_at:
                return
            self._resume_timer.cancel()
        self._resumes_at = resumes_at
        self._resume_timer = loop.call_at(resumes_at, self._resume)

    def _resume(self) -> None:
        self._resume_timer = None
        self._grant()

    def _grant(self) -> None:
        while self._num_free and self._waiting and self._resume_timer is None:
            future = heapq.heappop(self._waiting)[2]
            if not future.done():
                self._num_free -= 1
                future.set_result(None)


class Permit:
    """Permit of one question, given up in its pauses. Always release it.

    Args:
        limiter: shared by all questions of the judge.
        order: see `ConcurrencyLimiter.acquire`.
    """

    def __init__(self, limiter: ConcurrencyLimiter, order: int) -> None:
        self.limiter = limiter
        self._order = order
        self._is_held = False

    async def acquire(self) -> None:
        """Waits for the permit."""
        await self.limiter.acquire(self._order)
        self._is_held = True

    def release(self) -> None:
        """Releases the permit, if it is held."""
        if self._is_held:
            self._is_held = False
            self.limiter.release()

    async def pause(self, seconds: float) -> None:
        """Sleeps without holding the permit."""
        self.release()
        await asyncio.sleep(seconds)
        await self.acquire()


# -- An OpenAI-compatible endpoint ------------------------------------------------------------------------------------


class TransientError(Exception):
    """A failed request that may succeed when retried, after `retry_after_s` seconds if the endpoint says so.

    `is_limited` marks a refusal for too many requests.
    """

    def __init__(self, message: str, retry_after_s: float = 0.0, is_limited: bool = False) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.is_limited = is_limited


class Endpoint:
    """Chat completions from an OpenAI-compatible endpoint, with retries.

    The key is read from the environment when the connection pools open, and stored only there.

    Args:
        base_url: up to `/v1`.
        model: name that the endpoint knows.
        api_key_env: environment variable with the key; None sends none.
        fields: further fields of each request, such as `temperature`.
        limits: for the calls.
        on_request: called before each request; may refuse it by raising.

    Raises:
        ModuleNotFoundError: the extra `judge` is not installed.
        ValueError: the address is invalid or holds a password, or the variable is not set.
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
    ) -> None:
        try:
            import httpx
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                'JudgeReward.base_url needs: pip install "lit-async-rl[judge]"', name=error.name
            ) from error
        check_address("JudgeReward.base_url", base_url, "JudgeReward.api_key_env")
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            shown = repr(base_url) if re.search(r"[.:/]", base_url) else "a word without a dot (not shown)"
            raise ValueError(f"JudgeReward.base_url must be an address such as http://localhost:8000/v1, got {shown}")
        key_of_variable("JudgeReward.api_key_env", api_key_env)
        self._httpx = httpx
        self._url = base_url.rstrip("/") + "/chat/completions"
        self._model = model
        self._api_key_env = api_key_env
        self._fields = dict(fields)
        self._limits = limits
        self._on_request = on_request
        self._clients: dict[Any, int] = {}  # with their numbers of requests under way
        self._failures_in_row = 0  # over all questions, since the last answer
        self._refusals_in_row = 0  # likewise, by 429

    special_tokens: tuple[str, ...] = ()  # unknown for a remote model

    async def open(self) -> None:
        """Opens the connection pools, unless they are open."""
        if self._clients:
            return
        key = self._key()
        # Permits limit the connections; a second limit here would be a second queue, in which requests time out. A pool
        # scans all its connections for each request: several small pools take a tenth of the time of a large one.
        context = self._httpx.create_ssl_context()
        for _ in range(-(-self._limits.max_concurrent // CONNECTIONS_PER_POOL)):
            client = self._httpx.AsyncClient(
                headers={"Authorization": f"Bearer {key}"} if key else {},
                limits=self._httpx.Limits(max_connections=None, max_keepalive_connections=CONNECTIONS_PER_POOL),
                timeout=None,  # each request has one
                verify=context,
            )
            self._clients[client] = 0

    async def close(self) -> None:
        """Closes all connections; `open` opens new ones."""
        clients = self._clients
        self._clients = {}
        for client in clients:
            await client.aclose()

    async def ask(self, messages: Sequence[Mapping[str, str]], permit: Permit, deadline: float) -> Answer:
        """Answers a conversation, with retries.

        Args:
            messages: the conversation.
            permit: held, except during pauses.
            deadline: time by the loop's clock after which no try begins or continues.

        Raises:
            FinalRewardError: no answer after all tries or by the deadline, or the endpoint refuses the request.
            RewardSetupError: the endpoint refuses every request.
        """
        loop = asyncio.get_running_loop()
        limits = self._limits
        num_requests = 0
        num_failures = 0
        last: TransientError | None = None
        while last is None or loop.time() < deadline:  # otherwise time ran out while it waited for a permit
            num_requests += 1
            try:
                answer = await self._post(messages, deadline - loop.time(), is_first=num_requests == 1)
            except TransientError as error:
                last = error
            else:
                self._failures_in_row = 0
                self._refusals_in_row = 0
                return answer
            num_failures += not last.is_limited
            self._note_failure(last, permit)
            pause_s = self._pause_s(last, num_requests)
            if num_failures >= limits.tries or loop.time() + pause_s >= deadline:
                break
            await permit.pause(pause_s)
        raise FinalRewardError(
            f"{self._url} gave no answer in {num_requests} requests (JudgeLimits.tries={limits.tries}) within "
            f"JudgeLimits.timeout_s={limits.timeout_s:g}; the last error: {last}"
        )

    def _pause_s(self, error: TransientError, num_requests: int) -> float:
        """Grows with a question's requests while the endpoint answers no other question either."""
        backoff_s = self._limits.backoff_s
        doublings = min(num_requests, self._failures_in_row, MAX_DOUBLINGS) - 1
        growing_s = min(MAX_PAUSE_S, backoff_s * (2 ** max(0, doublings) - 1 + random.random()))
        return max(growing_s, error.retry_after_s + random.random() * backoff_s if error.retry_after_s else 0.0)

    def _note_failure(self, error: TransientError, permit: Permit) -> None:
        """Counts a failure; pauses all questions for the `Retry-After` of an endpoint that refuses all."""
        self._failures_in_row += 1
        self._refusals_in_row = self._refusals_in_row + 1 if error.is_limited else 0
        if self._refusals_in_row >= MAX_REFUSALS and error.retry_after_s:
            permit.limiter.pause_for(min(error.retry_after_s, MAX_PAUSE_S))

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
        except ValueError as error:  # an unreadable response, such as a broken encoding
            raise TransientError(self._without_key(describe(error))) from None
        if status != 200:
            raise self._failure(status, headers, content)
        return replace(_read_answer(content), latency_s=time.monotonic() - began)

    async def _exchange(self, body: Mapping[str, Any]) -> tuple[int, Mapping[str, str], bytes]:
        content = bytearray()
        clients = self._clients
        client = min(clients, key=clients.__getitem__)
        clients[client] += 1
        try:
            async with client.stream("POST", self._url, json=body) as response:
                async for chunk in response.aiter_bytes():
                    content += chunk
                    if len(content) > MAX_ANSWER_BYTES:
                        raise TransientError(f"the judge's answer is larger than {MAX_ANSWER_BYTES >> 20} MiB")
                return response.status_code, response.headers, bytes(content)
        finally:
            clients[client] -= 1

    def _failure(self, status: int, headers: Mapping[str, str], content: bytes) -> Exception:
        shown = self._without_key(content.decode("utf-8", "replace"))[:MAX_SHOWN_CHARS]
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
        """Redacts the key from a server's text: some repeat the key that they refuse."""
        key = self._key()
        return text.replace(key, "***") if key else text


def retry_after_s(value: str) -> float:
    """Seconds in a `Retry-After` header, a number or a date (RFC 9110); 0 if it is neither."""
    if re.fullmatch(r"\d{1,6}(\.\d{1,6})?", value.strip()):
        return float(value)
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return 0.0


def _read_answer(content: bytes) -> Answer:
    """Parses the answer from a chat completion; anything else is a `TransientError`."""
    try:
        found = json.loads(content)
        choice = found["choices"][0]
        text = choice["message"].get("content")
        is_cut = choice.get("finish_reason") == "length"
        usage = found.get("usage") or {}
        prompt_tokens = usage.get("prompt_tokens")
        completion_tokens = usage.get("completion_tokens")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise TransientError(f"no chat completion: {content[:MAX_SHOWN_CHARS].decode('utf-8', 'replace')!r}") from None
    if isinstance(text, list):  # content parts; only some are text
        text = "".join(part["text"] for part in text if isinstance(part, dict) and isinstance(part.get("text"), str))
    return Answer(
        text=text if isinstance(text, str) else None,
        prompt_tokens=_number(prompt_tokens),
        completion_tokens=_number(completion_tokens),
        is_cut=is_cut,
    )


def _number(value: Any) -> int | None:
    """A token count; None if invalid: a negative one would refund budget."""
    return value if isinstance(value, int) and value >= 0 else None


def decoded_answer(codec: TextCodec, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> Answer:
    """The answer in a completion, after the opening reasoning tag that its prompt may end with."""
    end = codec.decode(prompt_ids[-MAX_TAG_TOKENS:])
    opening = re.search(r"<(?:\w+:)?think(?:ing)?>\s*\Z", end)
    text = ("" if opening is None else opening[0]) + codec.decode(completion_ids)
    return Answer(text=text, prompt_tokens=len(prompt_ids), completion_tokens=len(completion_ids))


# -- A model on an engine ---------------------------------------------------------------------------------------------


def request_of(
    messages: Sequence[Mapping[str, str]],
    *,
    codec: TextCodec,
    sampling: SamplingParams,
    max_model_len: int,
    number: int,
    who: str,
    priority: int = 0,
) -> GenerationRequest:
    """The request for the answer to a conversation.

    Args:
        messages: the conversation.
        codec: of the model.
        sampling: for the answer, which ends at the latest where the context does.
        max_model_len: of the engine.
        number: of the request.
        who: name of the judge, for messages.
        priority: of the request.

    Raises:
        FinalRewardError: the conversation has no encoding, or is too long.
    """
    try:
        ids = codec.encode(Prompt(messages=messages))
    except ValueError as error:
        raise FinalRewardError(f"{who} cannot be asked: {error}") from error
    if (room := max_model_len - len(ids)) < 1:
        raise FinalRewardError(
            f"a question to the judge has {len(ids)} tokens, which is more than the engine's "
            f"max_model_len={max_model_len}"
        )
    sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
    return GenerationRequest(id=number, prompt_ids=ids, num_samples=1, sampling=sampling, priority=priority)


async def answer_of(future: concurrent.futures.Future[Answer], deadline: float, *, began: float, who: str) -> Answer:
    """The answer to a request.

    Args:
        future: of the answer.
        deadline: time by the loop's clock.
        began: when the request was made, by `time.monotonic`.
        who: name of the judge, for messages.

    Raises:
        FinalRewardError: there is none by the deadline.
    """
    left_s = deadline - asyncio.get_running_loop().time()
    try:
        answer = await asyncio.wait_for(asyncio.wrap_future(future), max(0.001, left_s))
    except (TimeoutError, asyncio.TimeoutError):
        raise FinalRewardError(f"{who} did not answer within JudgeLimits.timeout_s") from None
    return replace(answer, latency_s=time.monotonic() - began)


class LocalModel:
    """A model on its own engine, in a thread; concurrent requests are decoded in one batch.

    The policy's engine has no fixed weights: they change within completions (see `PolicyModel`).

    Args:
        model: Hugging Face name or folder.
        engine: template; each run sets up a fresh engine with the same settings.
        sampling: parameters for the answers.
        on_request: see `Endpoint`.
    """

    def __init__(
        self,
        model: str,
        engine: RolloutEngine,
        *,
        sampling: SamplingParams,
        on_request: Callable[[bool], None],
    ) -> None:
        self._model = model
        self._given = engine
        self._sampling = sampling
        self._on_request = on_request
        self._who = f"the judge {model!r}"
        self._numbers = itertools.count()  # of requests
        self._thread: threading.Thread | None = None
        self._inbox: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        self._loaded: concurrent.futures.Future[tuple[RolloutEngine, TextCodec]] = concurrent.futures.Future()
        self._problem: RewardSetupError | None = None  # why the thread ended
        self.special_tokens: tuple[str, ...] = ()

    async def open(self) -> None:
        """Loads the model, unless it is loaded.

        Raises:
            RewardSetupError: the model cannot be loaded.
        """
        if self._thread is None:
            self._loaded = concurrent.futures.Future()
            self._inbox = queue.SimpleQueue()
            self._numbers = itertools.count()
            self._problem = None
            self._thread = start_thread(self._work, self._inbox, self._loaded, name="judge-model")
        await asyncio.shield(asyncio.wrap_future(self._loaded))

    async def close(self) -> None:
        """Closes the engine and ends the thread."""
        thread = self._thread
        self._thread = None
        if thread is not None:
            self._inbox.put(None)
            await asyncio.get_running_loop().run_in_executor(None, thread.join, JOIN_S)

    async def ask(self, messages: Sequence[Mapping[str, str]], permit: Permit, deadline: float) -> Answer:
        """Answers a conversation; see `Endpoint.ask`."""
        self._on_request(True)
        began = time.monotonic()
        if self._problem is not None:
            raise self._problem
        engine, codec = self._loaded.result()  # since `open`
        request = request_of(
            messages,
            codec=codec,
            sampling=self._sampling,
            max_model_len=engine.max_model_len,
            number=next(self._numbers),
            who=self._who,
        )
        future: concurrent.futures.Future[Answer] = concurrent.futures.Future()
        self._inbox.put((request, future))
        return await answer_of(future, deadline, began=began, who=self._who)

    def _work(
        self,
        inbox: queue.SimpleQueue[Asked | None],
        loaded: concurrent.futures.Future[tuple[RolloutEngine, TextCodec]],
    ) -> None:
        waiting: dict[int, Asked] = {}
        engine = self._given.fresh()
        problem = FinalRewardError(f"{self._who} was closed")
        try:
            # The end-of-turn token behind a verdict must not become part of its line.
            codec = TextCodec(self._model, "tags")
            self.special_tokens = tuple(map(str, codec.tokenizer.all_special_tokens))
            with unrecorded():
                engine.setup(self._model)
                engine.load_weights(0, _weights(self._model))
            loaded.set_result((engine, codec))
            while True:
                for asked in _taken(inbox, wait=not waiting):
                    if asked is None:
                        return
                    waiting[asked[0].id] = asked
                    engine.submit([asked[0]])
                for completion in engine.poll(POLL_S) if waiting else ():
                    request, future = waiting.pop(completion.request_id)
                    resolve(future, decoded_answer(codec, request.prompt_ids, completion.token_ids))
        except Exception as error:
            reason = describe(error).replace("model.model", "JudgeReward.model")
            problem = self._problem = RewardSetupError(f"{self._who} failed: {reason}")
            if not loaded.done():
                loaded.set_exception(problem)
        finally:
            engine.close()
            for _, future in (*waiting.values(), *filter(None, _taken(inbox, wait=False))):
                resolve(future, problem)


def _taken(inbox: queue.SimpleQueue[Asked | None], wait: bool) -> list[Asked | None]:
    """Drains a queue; with `wait`, blocks for the first item."""
    found = [inbox.get()] if wait else []
    while not inbox.empty():
        found.append(inbox.get())
    return found


def resolve(future: concurrent.futures.Future[Answer], outcome: Answer | FinalRewardError) -> None:
    """Sets the answer or error of a question."""
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # the caller gave up
        if isinstance(outcome, Answer):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)


def _weights(model: str) -> Iterator[tuple[str, Any]]:
    lm = load_policy(model)
    yield from lm.named_parameters()
    yield from stored_buffers(lm)
