"""Completions and log-probabilities in the answers of vLLM servers, compared with what was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lit_async_rl.engines.base import Completion, GenerationRequest
from lit_async_rl.engines.completion_check import find_fault, show
from lit_async_rl.engines.vllm.requests import head_of
from lit_async_rl.engines.vllm.servers.schema import Choice, Generated, MalformedAnswer, SampledToken, Scored
from lit_async_rl.types import SamplerHead


def completions_of(answer: Generated, request: GenerationRequest, run: str) -> list[Completion]:
    """The samples of a request, by index; a greedy one is sampled once.

    Raises:
        MalformedAnswer: samples are missing, or there are too many; per-token lists differ; another run's weights.
    """
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    asked = request.num_samples if request.sampling.temperature > 0 else 1
    if [choice["index"] for choice in choices] != list(range(asked)):
        found = show([choice["index"] for choice in choices])
        raise MalformedAnswer(f"has samples {found}, asked for {asked}")
    if len(choices) < request.num_samples:
        choices = choices * request.num_samples
    return [_completion(request, index, choice, run=run) for index, choice in enumerate(choices)]


def _completion(request: GenerationRequest, index: int, choice: Choice, run: str) -> Completion:
    token_ids = choice["token_ids"]
    sampled = choice["logprobs"]["content"]
    where = f"sample {index}"
    if [token["token_id"] for token in sampled] != token_ids:
        raise MalformedAnswer(f"{where} has {len(token_ids)} tokens and log-probabilities of {len(sampled)} others")
    versions: list[int] = []
    spans = choice.get("weight_versions")
    if spans is None:
        raise MalformedAnswer(f"{where} does not say which weights sampled which token: needs vLLM >= 0.32")
    for span in spans:
        owner, _, version = span["version"].rpartition("-")
        if owner != run or not (version.isascii() and version.isdecimal() and len(version) < 16):
            raise MalformedAnswer(
                f"{where} comes from weights tagged {show(span['version'])}: does another trainer use it, too?"
            )
        if span["start"] != len(versions) or not span["start"] <= span["end"] <= len(token_ids):
            raise MalformedAnswer(f"{where} has versions of tokens {span['start']} to {span['end']}, out of order")
        versions += [int(version)] * (span["end"] - span["start"])
    if len(versions) != len(token_ids):
        raise MalformedAnswer(f"{where} has {len(token_ids)} tokens and versions of {len(versions)}")
    return Completion(
        request_id=request.id,
        sample_index=index,
        token_ids=tuple(token_ids),
        logprobs=tuple(float(token["logprob"]) for token in sampled),
        versions=tuple(versions),
        finish_reason=choice["finish_reason"],
        head=_head(request, sampled, where),
    )


def _head(request: GenerationRequest, sampled: Sequence[SampledToken], where: str) -> SamplerHead | None:
    width = request.sampling.head
    if width is None:
        return None
    positions = [[(one["token_id"], one["logprob"]) for one in token.get("top_logprobs", ())] for token in sampled]
    if (least := min(map(len, positions), default=width)) < width:
        raise MalformedAnswer(f"{where} has {least} likely tokens in one place, asked for sampling.head={width}")
    return head_of(positions, width)


def first_fault(
    completions: Sequence[Completion],
    request: GenerationRequest,
    versions: tuple[int, int],
    vocab_size: int,
    max_model_len: int,
) -> str:
    """Describes the first fault of the samples of a request, as `find_fault`; empty if there is none."""
    limits: dict[str, Any] = dict(versions=versions, vocab_size=vocab_size, max_model_len=max_model_len)
    for completion in completions:
        if fault := find_fault(completion, request, **limits, scores=False, is_partial=False):
            return f"sample {completion.sample_index} of request {request.id} {fault}"
    return ""


def prompt_logprobs(answer: Scored, token_ids: tuple[int, ...]) -> list[float]:
    """Log-probabilities of all tokens of a prompt but the first.

    Raises:
        MalformedAnswer: one is missing.
    """
    found = answer["prompt_logprobs"]
    if len(found) != len(token_ids):
        raise MalformedAnswer(f"has log-probabilities of {len(found)} tokens of a prompt of {len(token_ids)}")
    values = []
    for token, by_id in zip(token_ids[1:], found[1:], strict=True):
        if by_id is None or str(token) not in by_id:
            raise MalformedAnswer(f"has no log-probability of the prompt's token {token}")
        values.append(float(by_id[str(token)]["logprob"]))
    return values
