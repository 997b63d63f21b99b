"""Conversion between our requests and completions and those of vLLM."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lit_async_rl.engines.vllm.process import VLLMProcess
from lit_async_rl.errors import EngineError, InvariantError
from lit_async_rl.models.tokenizer import StopStrings
from lit_async_rl.types import Completion, GenerationRequest, SamplerHead, SamplingParams, join_heads
from lit_async_rl.utils.spans import ENGINE, recorder

# -- Thread-safe record of an engine's running requests, finished samples and first failure ---------------------------


class RequestBook:
    """Counts requests and tokens and queues finished samples; all methods are thread-safe.

    Args:
        name: of the engine, for messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_tokens = 0
        self._changed = threading.Condition()
        self._running: set[int] = set()
        self._finished: deque[Completion] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._busy_since = 0.0
        self._busy_s = 0.0
        self._lane = recorder().lane(ENGINE)  # of a timeline; that of the run is asked for when it begins
        self.version = 0  # of the weights that were loaded last
        self._drawn_until = 0.0
        self._drawn_tokens = 0
        self._too_much_s = 0.0

    def begin(self, request_ids: Iterable[int]) -> None:
        """Marks requests as running."""
        with self._changed:
            if not self._running:
                self._lane = recorder().lane(ENGINE)
                self._busy_since = self._drawn_until = time.monotonic()
            self._running.update(request_ids)

    def add(self, request_id: int, num_tokens: int, completions: list[Completion]) -> None:
        """Counts tokens and queues completions; those of an ended request are counted only."""
        with self._changed:
            self.num_tokens += num_tokens
            self._draw(time.monotonic())
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
                self._draw(now, is_empty=True)
            self._changed.notify_all()

    def drop(self, request_ids: set[int]) -> None:
        """Ends requests and drops their completions."""
        with self._changed:
            self.end(request_ids)
            self._finished = deque(c for c in self._finished if c.request_id not in request_ids)

    def take(self, timeout_s: float) -> list[Completion]:
        """Completions finished since the last call; waits for the first. Empty after `close`.

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
        """Records the engine's error and raises it in all waiting threads; only the first is kept."""
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
            raise EngineError(f"{self.name} broke and was stopped: {why}") from self._error
        if self._closed:
            raise EngineError(f"{self.name} was closed")

    def pause(self, seconds: float) -> None:
        """Subtracts seconds in which running requests were paused from `busy_s`."""
        with self._changed:
            if self._running:
                self._busy_s -= seconds
                now = time.monotonic()
                self._draw(now - seconds)
                self._too_much_s += max(0.0, self._drawn_until - (now - seconds))
                self._drawn_until = now

    def _draw(self, until: float, is_empty: bool = False) -> None:
        """Adds a span for the time since the last call; what a pause took back is subtracted from it."""
        if not (self._running or is_empty) or until <= self._drawn_until:
            return
        seconds = until - self._drawn_until
        back = min(seconds, self._too_much_s)
        self._too_much_s -= back
        num_tokens = self.num_tokens - self._drawn_tokens
        self._drawn_tokens = self.num_tokens
        self._lane.add(
            "decode",
            self._drawn_until,
            seconds - back,
            self.version,
            version=self.version,
            slots=len(self._running),
            tokens=num_tokens,
        )
        self._drawn_until = until

    @property
    def num_running(self) -> int:
        """Number of running requests."""
        return len(self._running)

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one request was running."""
        with self._changed:
            return self._busy_s + (time.monotonic() - self._busy_since if self._running else 0.0)


# -- Heads of sampling distributions from vLLM's log-probabilities of the likeliest tokens (`logprobs=k`) -------------
# With `logprobs_mode: processed_logprobs` these are of the distribution that was sampled from: temperature and
# truncation (top-k, top-p, min-p) are applied, and tokens outside of the support have -inf. vLLM returns no entropy.


NO_PROBABILITY = -9999.0  # in place of -inf in JSON


def head_of(positions: Sequence[Iterable[tuple[int, float]]], width: int) -> SamplerHead:
    """Head of the tokens of a completion, with entropy NaN.

    Args:
        positions: for each token, the ids and log-probabilities that vLLM returned: of the likeliest tokens, and of the
            sampled one, which may be among them.
        width: entries of each token; missing ones are impossible.
    """
    ids = torch.zeros(len(positions), width, dtype=torch.int32)
    logprobs = torch.full((len(positions), width), -torch.inf)
    for row, found in enumerate(positions):
        best = sorted(dict(found).items(), key=lambda pair: -pair[1])[:width]
        if best:
            ids[row, : len(best)] = torch.tensor([token for token, _ in best])
            logprobs[row, : len(best)] = torch.tensor([value for _, value in best])
    logprobs[logprobs <= NO_PROBABILITY] = -math.inf
    return SamplerHead(torch.full((len(positions),), torch.nan), ids, logprobs)


MIN_TEMPERATURE = 0.01  # of vLLM: it raises what is below, and refuses what is above
MAX_TEMPERATURE = 2.0
MAX_SAMPLES = 16384  # of a request, unless VLLM_MAX_N_SEQUENCES says otherwise


def check_sampling(setting: str, sampling: SamplingParams, num_samples: int) -> None:
    """Refuses sampling parameters that vLLM refuses, or replaces by others.

    Args:
        setting: path of the parameters in messages, such as `data.sampling`.
        sampling: the parameters.
        num_samples: samples of one request.

    Raises:
        ValueError: names the setting and its value.
    """
    temperature = sampling.temperature
    if temperature and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise ValueError(
            f"{setting}.temperature must be 0 or in [{MIN_TEMPERATURE}, {MAX_TEMPERATURE}] with vLLM, got {temperature}"
        )
    most = int(os.environ.get("VLLM_MAX_N_SEQUENCES") or MAX_SAMPLES)
    if temperature and num_samples > most:
        raise ValueError(
            f"vLLM takes at most {most} samples of a prompt in one request, got {num_samples}: lower data.group_size, "
            "set data.intake.replicate_prompts, or set the environment variable VLLM_MAX_N_SEQUENCES"
        )


def sampling_arguments(request: GenerationRequest, eos_token_ids: Iterable[int]) -> dict[str, Any]:
    """Fields of vLLM's `SamplingParams`.

    With stop strings vLLM detokenizes, in order to stop by itself; `end_at_stop` makes the final decision. vLLM samples
    a greedy completion only once, see `SampleBuffer.add`.
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
        "ignore_eos": True,  # its own, which are fewer: the ones above end a completion
        "logprobs": sampling.head or 0,  # of this many tokens besides the sampled one
        "detokenize": bool(sampling.stop),
        **stops,
    }


def end_at_stop(completion: Completion, request: GenerationRequest, finder: StopStrings | None) -> Completion:
    """Truncates a completion at the token that completes its first stop string.

    vLLM misses stop strings that begin in tokens resumed from an earlier run, detects one late if its last token also
    begins the next character, and ignores all of them if it was started without a tokenizer.
    """
    if finder is None or not request.sampling.stop:
        return completion
    before = request.resumed_ids
    end = finder.first_end(before + completion.token_ids, request.sampling.stop, after=len(before))
    if end is None:
        return completion
    kept = end - len(before)
    fields = ("token_ids", "logprobs", "versions")
    parts = {name: getattr(completion, name)[:kept] for name in fields}
    head = None if completion.head is None else completion.head.first(kept)
    return replace(completion, finish_reason="stop", head=head, **parts)


def end_fault(completion: Completion, request: GenerationRequest, eos_token_ids: Iterable[int]) -> str:
    """Describes an end of a completion that was not asked for; empty if there is nothing wrong with it."""
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
        """Appends a `vllm.CompletionOutput`; returns the completion with the last one.

        Raises:
            EngineError: vLLM ended the request for an unexpected reason.
        """
        self._token_ids += output.token_ids
        self._logprobs += [found[token].logprob for token, found in zip(output.token_ids, output.logprobs, strict=True)]
        if (head := _head(self.request, output.logprobs)) is not None:
            self._heads.append(head)
        if output.finish_reason is None:
            return []
        if output.finish_reason not in ("stop", "length"):
            raise EngineError(f"vLLM ended request {self.request.id} with {output.finish_reason!r}")
        versions = [int(span.version) for span in output.weight_versions for _ in range(span.start, span.end)]
        if len(versions) != len(self._token_ids):
            raise InvariantError(f"{len(versions)} versions of {len(self._token_ids)} tokens")
        is_greedy = self.request.sampling.temperature == 0
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
        indices = range(self.request.num_samples) if is_greedy else [self.sample_index]
        return [replace(completion, sample_index=index) for index in indices]


def _head(request: GenerationRequest, logprobs: Sequence[Mapping[int, Any]]) -> SamplerHead | None:
    """Head of consecutive tokens, from vLLM's `Logprob` by token id for each."""
    width = request.sampling.head
    if width is None:
        return None
    return head_of([[(token, found.logprob) for token, found in one.items()] for one in logprobs], width)


def partial_completions(request: GenerationRequest, state: Any) -> list[Completion]:
    """Partial completion of a running sample.

    Args:
        request: of the sample.
        state: vLLM's `RequestState` of the sample, which may be ahead of its output.
    """
    token_ids = tuple(state.detokenizer.output_token_ids)
    starts = state.weight_version_starts  # (tag, first token) whenever the tag changes
    ends = [start for _, start in starts[1:]] + [len(token_ids)]
    versions = [int(tag) for (tag, start), end in zip(starts, ends, strict=bool(starts)) for _ in range(start, end)]
    logprobs = state.logprobs_processor.logprobs[: len(token_ids)]
    indices = range(request.num_samples) if request.sampling.temperature == 0 else [state.request_index]
    return [
        Completion(
            request_id=request.id,
            sample_index=index,
            token_ids=token_ids,
            logprobs=tuple(found[token].logprob for token, found in zip(token_ids, logprobs, strict=True)),
            versions=tuple(versions),
            finish_reason="abort",
            head=_head(request, logprobs),
        )
        for index in indices
    ]


class RequestRunner:
    """One asyncio task per request of an `AsyncLLM`; called in the thread of its loop.

    Args:
        process: owns the `AsyncLLM`.
        book: receives completions, token counts and errors.
        eos_token_ids: end a completion.
        model: Hugging Face name or folder; its tokenizer is loaded for the first request with stop strings.
    """

    def __init__(self, process: VLLMProcess, book: RequestBook, eos_token_ids: Iterable[int], model: str) -> None:
        self.process = process
        self.book = book
        self.eos_token_ids = tuple(eos_token_ids)
        self.model = model
        self._finder: StopStrings | None = None
        self._checked: set[str] = set()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._requests: dict[int, GenerationRequest] = {}

    def launch(self, requests: Sequence[GenerationRequest], salt: str) -> None:
        """Starts requests. Prompts share their KV cache only with those of the same `salt`. Errors go to the book."""
        try:
            self._launch(requests, salt)
        except Exception as error:  # nobody waits for the loop's callbacks
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.book.fail(EngineError(self.process.death) if self.process.is_dead else error)

    def _launch(self, requests: Sequence[GenerationRequest], salt: str) -> None:
        if self._finder is None and any(request.sampling.stop for request in requests):
            self._finder = StopStrings.of_model(self.model)
            # vLLM was started without a tokenizer: prompts and completions are token ids
            self.process.llm.output_processor.tokenizer = self._finder.tokenizer
        for request in requests:
            self._requests[request.id] = request
            self._tasks[request.id] = asyncio.get_running_loop().create_task(self._generate(request, salt))

    def _parameters(self, request: GenerationRequest) -> Any:
        """The request's `vllm.SamplingParams`.

        Raises:
            ValueError: vLLM refuses one of them, or would use another value.
        """
        import vllm
        from vllm.sampling_params import RequestOutputKind

        arguments = sampling_arguments(request, self.eos_token_ids)
        params = vllm.SamplingParams(**arguments, output_kind=RequestOutputKind.DELTA)
        if request.sampling.temperature > 0:  # else it needs none of them
            for name in ("temperature", "top_p", "top_k", "min_p"):
                if (used := getattr(params, name)) != arguments[name]:
                    raise ValueError(f"data.sampling.{name}={arguments[name]}: vLLM would use {used} instead")
        return params

    def check(self, requests: Sequence[GenerationRequest]) -> None:
        """Refuses requests whose sampling parameters vLLM refuses; for the thread that submits.

        Raises:
            ValueError: names the parameters; vLLM's error is the cause.
        """
        for request in requests:
            kind = repr((request.sampling, request.num_samples))  # a list of stop tokens has no hash
            if kind in self._checked:
                continue
            try:
                self._parameters(request)
            except Exception as error:  # of vLLM: its own class is no ValueError
                raise ValueError(f"vLLM refuses data.sampling of a request: {error}") from error
            self._checked.add(kind)

    def cancel(self, request_ids: set[int]) -> None:
        """Cancels requests, which makes vLLM abort them."""
        for request_id in request_ids & self._tasks.keys():
            self._tasks[request_id].cancel()

    async def partial_completions(self) -> list[Completion]:
        """Partial completions of all running samples."""
        found = []
        for state in self.process.llm.output_processor.request_states.values():
            id_given_by_us = (state.parent_req or state).external_req_id  # each sample is a child with an id of its own
            request = self._requests.get(int(id_given_by_us))
            if request is not None:  # else vLLM has died, and our side of the request with it
                found += partial_completions(request, state)
        return found

    async def _generate(self, request: GenerationRequest, salt: str) -> None:
        """Runs one request to its end; whatever it raises goes to the book, and so to the trainer."""
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
        finally:
            del self._tasks[request.id], self._requests[request.id]
