"""Requests to vLLM: bookkeeping, conversion to vLLM's types and back, asyncio tasks."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lit_async_rl.errors import EngineError, InvariantError
from lit_async_rl.models.tokenizer import StopStrings
from lit_async_rl.runtime.spans import ENGINE, recorder
from lit_async_rl.sampler_records import SamplerHead, blank_head, join_heads
from lit_async_rl.types import Completion, GenerationRequest, SamplingParams
from lit_async_rl.vllm.process import VLLMProcess

# -- Thread-safe record of vLLM's running requests, finished samples and first failure ---------------------------


class RequestBook:
    """Counts requests and tokens and queues finished samples; all methods are thread-safe."""

    def __init__(self) -> None:
        self.num_tokens = 0
        # shared by the producer (`take`), the trainer (`wait_until_idle`) and the thread that generates; its lock is
        # re-entrant, because `drop` calls `end`
        self._changed = threading.Condition()
        self._running: set[int] = set()
        self._finished: deque[Completion] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._busy_since = 0.0
        self._busy_s = 0.0
        self._lane = recorder().lane(ENGINE)  # of the timeline; `begin` replaces it by the run's
        self.version = 0  # of the newest loaded weights
        self._recorded_until = 0.0  # end of the last span
        self._recorded_tokens = 0
        self._overlap_s = 0.0  # seconds of pauses that were recorded as decoding, to subtract from the next spans

    def begin(self, request_ids: Iterable[int]) -> None:
        """Marks requests as running."""
        with self._changed:
            if not self._running:
                self._lane = recorder().lane(ENGINE)
                self._busy_since = self._recorded_until = time.monotonic()
            self._running.update(request_ids)

    def add(self, request_id: int, num_tokens: int, completions: list[Completion]) -> None:
        """Counts tokens, and queues completions unless their request has ended."""
        with self._changed:
            self.num_tokens += num_tokens
            self._record_span(time.monotonic())
            if completions and request_id in self._running:
                self._finished += completions
                self._changed.notify_all()

    def end(self, request_ids: Iterable[int]) -> None:
        """Marks requests as finished."""
        with self._changed:
            was_busy = bool(self._running)
            self._running.difference_update(request_ids)
            if was_busy and not self._running:
                now = time.monotonic()
                self._busy_s += now - self._busy_since
                self._record_span(now, is_empty=True)
            self._changed.notify_all()

    def drop(self, request_ids: set[int]) -> None:
        """Ends requests and drops their completions."""
        with self._changed:
            self.end(request_ids)
            self._finished = deque(c for c in self._finished if c.request_id not in request_ids)

    def take(self, timeout_s: float) -> list[Completion]:
        """Completions finished since the last call; waits up to `timeout_s` for the first. Empty after `close`.

        Raises:
            EngineError: `fail` was called.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._finished or self._error or self._closed, timeout_s)
            if self._closed:
                return []
            self.check()
            finished = list(self._finished)
            self._finished.clear()
        return finished

    @property
    def finished(self) -> list[Completion]:
        """Completions that the next `take` will return."""
        with self._changed:
            return list(self._finished)

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Waits until no request runs; False if the timeout passed first.

        Raises:
            EngineError: `fail` or `close` was called.
        """
        with self._changed:
            idle = self._changed.wait_for(lambda: not self._running or self._error or self._closed, timeout_s)
            self.check()
        return bool(idle)

    def fail(self, error: BaseException) -> None:
        """Records the engine's first error, which all waiting threads raise."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def close(self) -> None:
        """Unblocks all waiters."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def check(self) -> None:
        """Raises the recorded failure.

        Raises:
            EngineError: `fail` or `close` was called.
        """
        if self._error is not None:
            why = str(self._error) or type(self._error).__name__
            raise EngineError(f"vLLM broke and was stopped: {why}") from self._error
        if self._closed:
            raise EngineError("vLLM was closed")

    def pause(self, seconds: float) -> None:
        """Subtracts a pause of so many seconds, which ends now, from `busy_s` and the timeline."""
        with self._changed:
            if self._running:
                self._busy_s -= seconds
                now = time.monotonic()
                self._record_span(now - seconds)
                self._overlap_s += max(0.0, self._recorded_until - (now - seconds))
                self._recorded_until = now

    def _record_span(self, until: float, is_empty: bool = False) -> None:
        """Adds a span since the last one, less pauses that earlier spans contain."""
        if not (self._running or is_empty) or until <= self._recorded_until:
            return
        seconds = until - self._recorded_until
        overlap_s = min(seconds, self._overlap_s)
        self._overlap_s -= overlap_s
        num_tokens = self.num_tokens - self._recorded_tokens
        self._recorded_tokens = self.num_tokens
        self._lane.add(
            "decode",
            self._recorded_until,
            seconds - overlap_s,
            self.version,
            version=self.version,
            slots=len(self._running),
            tokens=num_tokens,
        )
        self._recorded_until = until

    @property
    def num_running(self) -> int:
        """Number of running requests."""
        return len(self._running)

    @property
    def busy_s(self) -> float:
        """Seconds with at least one running request, without pauses."""
        with self._changed:
            return self._busy_s + (time.monotonic() - self._busy_since if self._running else 0.0)


# -- Heads of sampling distributions from vLLM's log-probabilities of the likeliest tokens (`logprobs=k`) -------------
# With `logprobs_mode: processed_logprobs` these belong to the sampling distribution: temperature and truncation (top-k,
# top-p, min-p) are applied, and tokens outside of the support have -inf. vLLM returns no entropy.


def _head(request: GenerationRequest, positions: Sequence[Mapping[int, Any]]) -> SamplerHead | None:
    """Head of consecutive tokens, with entropy NaN; None if the request needs none.

    Args:
        request: of the tokens.
        positions: for each token, vLLM's `Logprob` of the likeliest tokens and of the sampled one, by token id.
    """
    width = request.sampling.head
    if width is None:
        return None
    head = blank_head(len(positions), width)
    for row, entries in enumerate(positions):
        top = sorted(((token, entry.logprob) for token, entry in entries.items()), key=lambda pair: -pair[1])[:width]
        if top:
            head.ids[row, : len(top)] = torch.tensor([token for token, _ in top])
            head.logprobs[row, : len(top)] = torch.tensor([value for _, value in top])
    return head


# limits of vLLM, which silently raises lower temperatures and refuses higher ones
MIN_TEMPERATURE = 0.01
MAX_TEMPERATURE = 2.0
MAX_SAMPLES = 16384  # per request, unless VLLM_MAX_N_SEQUENCES is set


def check_sampling(setting: str, sampling: SamplingParams, num_samples: int) -> None:
    """Checks that vLLM neither refuses nor replaces sampling parameters; see `RolloutEngine.check_sampling`.

    Raises:
        ValueError: it does either; names the setting and its value.
    """
    temperature = sampling.temperature
    if temperature and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise ValueError(
            f"{setting}.temperature must be 0 or in [{MIN_TEMPERATURE}, {MAX_TEMPERATURE}] with vLLM, got {temperature}"
        )
    max_samples = int(os.environ.get("VLLM_MAX_N_SEQUENCES") or MAX_SAMPLES)
    if temperature and num_samples > max_samples:
        raise ValueError(
            f"vLLM takes at most {max_samples} samples of a prompt in one request, got {num_samples}: lower "
            "data.group_size, set data.replicate_prompts, or set the environment variable VLLM_MAX_N_SEQUENCES"
        )


def sampling_arguments(request: GenerationRequest, eos_token_ids: Iterable[int]) -> dict[str, Any]:
    """Fields of vLLM's `SamplingParams`.

    With stop strings vLLM detokenizes and stops early; `end_at_stop` decides. A greedy completion is sampled once, see
    `SampleBuffer.add`.
    """
    sampling = request.sampling
    stops: dict[str, Any] = {"stop": list(sampling.stop), "include_stop_str_in_output": True} if sampling.stop else {}
    return {
        "n": request.num_samples if sampling.temperature > 0 else 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_tokens,
        "stop_token_ids": sorted({*sampling.ends(eos_token_ids)}),
        "ignore_eos": True,  # vLLM knows fewer end tokens than `stop_token_ids`
        "logprobs": sampling.head or 0,  # number of likeliest tokens besides the sampled one
        "detokenize": bool(sampling.stop),
        **stops,
    }


def end_at_stop(completion: Completion, request: GenerationRequest, finder: StopStrings | None) -> Completion:
    """Truncates a completion at the token that completes its first stop string.

    vLLM misses stop strings that begin in tokens resumed from an earlier run, detects one late if its last token also
    begins the next character, and ignores all if started without a tokenizer.
    """
    if finder is None or not request.sampling.stop:
        return completion
    before = request.resumed_ids
    end = finder.first_end(before + completion.token_ids, request.sampling.stop, after=len(before))
    if end is None:
        return completion
    length = end - len(before)
    return replace(
        completion,
        finish_reason="stop",
        token_ids=completion.token_ids[:length],
        logprobs=completion.logprobs[:length],
        versions=completion.versions[:length],
        head=None if completion.head is None else completion.head.first(length),
    )


def end_fault(completion: Completion, request: GenerationRequest, eos_token_ids: Iterable[int]) -> str:
    """Describes an end that the request does not explain; empty if it does."""
    ids = completion.token_ids
    sampling = request.sampling
    stops = {*sampling.ends(eos_token_ids)}
    if completion.finish_reason == "length" and len(ids) != sampling.max_tokens:
        return f"ended for its length after {len(ids)} of max_tokens={sampling.max_tokens} tokens"
    if completion.finish_reason == "stop" and not sampling.stop and not stops.intersection(ids[-1:]):
        return f"stopped at token {ids[-1] if ids else None}, which ends no completion"
    if early := stops.intersection(ids[:-1]):
        return f"goes on after token {min(early)}, which ends a completion"
    return ""


class SampleBuffer:
    """Accumulates the tokens of one sample, which vLLM sends in chunks."""

    def __init__(
        self,
        request: GenerationRequest,
        sample_index: int,
        finder: StopStrings | None = None,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        self.request = request
        self.sample_index = sample_index
        self._finder = finder
        self._eos_token_ids = eos_token_ids
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._heads: list[SamplerHead] = []

    def add(self, output: Any) -> list[Completion]:
        """Appends a `vllm.CompletionOutput`; after the last one returns the completion (greedy: of all samples).

        Raises:
            EngineError: vLLM ended the request for an unexpected reason.
        """
        self._token_ids += output.token_ids
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        self._logprobs += [entries[token].logprob for token, entries in pairs]
        if (head := _head(self.request, output.logprobs)) is not None:
            self._heads.append(head)
        if output.finish_reason is None:
            return []
        if output.finish_reason not in ("stop", "length"):
            raise EngineError(f"vLLM ended request {self.request.id} with {output.finish_reason!r}")
        versions = [int(span.version) for span in output.weight_versions for _ in range(span.start, span.end)]
        if len(versions) != len(self._token_ids):
            raise InvariantError(f"{len(versions)} versions of {len(self._token_ids)} tokens")
        completion = Completion(
            request_id=self.request.id,
            sample_index=self.sample_index,
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            versions=tuple(versions),
            finish_reason=output.finish_reason,
            head=join_heads(self._heads) if self._heads else None,
        )
        completion = end_at_stop(completion, self.request, self._finder)
        if fault := end_fault(completion, self.request, self._eos_token_ids):
            raise EngineError(f"request {self.request.id} {fault}")
        return _samples(self.request, completion)


def _samples(request: GenerationRequest, sampled: Completion) -> list[Completion]:
    """The sample, or all samples of a greedy request, which vLLM samples once."""
    if request.sampling.temperature > 0:
        return [sampled]
    return [replace(sampled, sample_index=index) for index in range(request.num_samples)]


def partial_completions(request: GenerationRequest, state: Any) -> list[Completion]:
    """Partial completion of a running sample, see `_samples`.

    Args:
        request: of the sample.
        state: vLLM's `RequestState` of the sample, which may have more tokens than were returned.
    """
    token_ids = tuple(state.detokenizer.output_token_ids)
    starts = state.weight_version_starts  # (tag, index of the first token) of each version
    ends = [start for _, start in starts[1:]] + [len(token_ids)]
    versions = [int(tag) for (tag, start), end in zip(starts, ends, strict=bool(starts)) for _ in range(start, end)]
    logprobs = state.logprobs_processor.logprobs[: len(token_ids)]
    completion = Completion(
        request_id=request.id,
        sample_index=state.request_index,
        token_ids=token_ids,
        logprobs=tuple(entries[token].logprob for token, entries in zip(token_ids, logprobs, strict=True)),
        versions=tuple(versions),
        finish_reason="abort",
        head=_head(request, logprobs),
    )
    return _samples(request, completion)


class RequestRunner:
    """One asyncio task per request of an `AsyncLLM`; called in the thread of its loop.

    Args:
        process: of the `AsyncLLM`.
        book: for completions, token counts and errors.
        eos_token_ids: tokens that end a completion.
        model: Hugging Face name or folder; its tokenizer is loaded for the first request with stop strings.
        vocab_size: of the model, which may be padded beyond its tokenizer.
    """

    def __init__(
        self, process: VLLMProcess, book: RequestBook, eos_token_ids: Iterable[int], *, model: str, vocab_size: int
    ) -> None:
        self.process = process
        self.book = book
        self.eos_token_ids = tuple(eos_token_ids)
        self.model = model
        self._vocab_size = vocab_size
        self._finder: StopStrings | None = None
        self._checked: set[str] = set()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._requests: dict[int, GenerationRequest] = {}

    def launch(self, requests: Sequence[GenerationRequest], salt: str) -> None:
        """Starts requests, whose prompts share their KV cache only within a `salt`. Errors go to the book."""
        try:
            if self._finder is None and any(request.sampling.stop for request in requests):
                self._finder = StopStrings.of_model(self.model, self._vocab_size)
                # vLLM was started without a tokenizer: prompts and completions are token ids
                self.process.llm.output_processor.tokenizer = self._finder.tokenizer
            for request in requests:
                self._requests[request.id] = request
                task = asyncio.get_running_loop().create_task(self._generate(request, salt))
                # not in the task itself, which never runs if it is cancelled before it has begun
                task.add_done_callback(partial(self._forget, request.id))
                self._tasks[request.id] = task
        except Exception as error:  # the loop only logs errors of its callbacks: the book hands them to the trainer
            self._fail(error)

    def _forget(self, request_id: int, task: asyncio.Task[None]) -> None:
        if self._tasks.get(request_id) is task:  # else another request has its number by now
            del self._tasks[request_id], self._requests[request_id]

    def _fail(self, error: Exception) -> None:
        self.book.fail(EngineError(self.process.death) if self.process.is_dead else error)

    def _parameters(self, request: GenerationRequest) -> Any:
        """The request's `vllm.SamplingParams`."""
        import vllm
        from vllm.sampling_params import RequestOutputKind

        arguments = sampling_arguments(request, self.eos_token_ids)
        params = vllm.SamplingParams(**arguments, output_kind=RequestOutputKind.DELTA)
        if request.sampling.temperature > 0:  # greedy sampling uses none of these
            for name in ("temperature", "top_p", "top_k", "min_p"):
                if (used := getattr(params, name)) != arguments[name]:
                    raise ValueError(f"data.sampling.{name}={arguments[name]}: vLLM would use {used} instead")
        return params

    def check(self, requests: Sequence[GenerationRequest]) -> None:
        """Checks in the submitting thread that vLLM accepts the sampling parameters.

        Raises:
            ValueError: it does not; vLLM's error is the cause.
        """
        for request in requests:
            kind = repr((request.sampling, request.num_samples))  # `repr`, because lists of stop tokens have no hash
            if kind in self._checked:
                continue
            try:
                self._parameters(request)
            except Exception as error:  # vLLM's own error class is not a ValueError
                raise ValueError(f"vLLM refuses the sampling settings (data.sampling) of a request: {error}") from error
            self._checked.add(kind)

    def cancel(self, request_ids: set[int]) -> None:
        """Cancels requests, which makes vLLM abort them."""
        for request_id in request_ids & self._tasks.keys():
            self._tasks[request_id].cancel()

    async def partial_completions(self) -> list[Completion]:
        """Partial completions of all running samples."""
        completions = []
        for state in self.process.llm.output_processor.request_states.values():
            our_id = (state.parent_req or state).external_req_id  # samples are children with ids of their own
            request = self._requests.get(int(our_id))
            if request is not None:  # None if vLLM died, which ended our task of the request
                completions += partial_completions(request, state)
        return completions

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities of all tokens but the first, at temperature 1.

        Raises:
            EngineError: vLLM returns none of a token.
        """
        import vllm
        from vllm import TokensPrompt

        params = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        prompt = TokensPrompt(prompt_token_ids=list(token_ids), cache_salt=uuid.uuid4().hex)  # nothing from the cache
        found: list[Any] = []
        async for answer in self.process.llm.generate(prompt, params, "-2"):  # no request of the run
            found = list(answer.prompt_logprobs or ())
        if len(found) != len(token_ids) or any(
            t not in (e or {}) for t, e in zip(token_ids[1:], found[1:], strict=True)
        ):
            raise EngineError(f"vLLM returned {len(found)} log-probabilities for a prompt of {len(token_ids)} tokens")
        return [float(entries[token].logprob) for token, entries in zip(token_ids[1:], found[1:], strict=True)]

    async def _generate(self, request: GenerationRequest, salt: str) -> None:
        """Runs one request to its end; errors go to the book."""
        try:
            from vllm import TokensPrompt

            params = self._parameters(request)
            prompt = TokensPrompt(prompt_token_ids=list(request.prompt_ids), cache_salt=salt)
            indices = range(request.num_samples)
            buffers = [
                SampleBuffer(request, index, self._finder, eos_token_ids=self.eos_token_ids) for index in indices
            ]
            num_finished = 0
            async for answer in self.process.llm.generate(prompt, params, str(request.id)):
                for output in answer.outputs:
                    finished = buffers[output.index].add(output)
                    num_finished += len(finished)
                    self.book.add(request.id, len(output.token_ids), finished)
            if num_finished < request.num_samples:
                raise EngineError(
                    f"vLLM ended request {request.id} after {num_finished} of {request.num_samples} samples"
                )
            self.book.end([request.id])
        except Exception as error:
            self._fail(error)
