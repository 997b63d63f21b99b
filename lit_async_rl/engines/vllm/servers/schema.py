"""Typed schema of what vLLM servers answer. Every answer is validated as a whole before any of it is used.

A server, or a proxy before it, may answer status 200 with anything: an error page, half an answer, the answer to
another request. Whatever does not fit is a `MalformedAnswer`, which counts as a failure of that server.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import ConfigDict, Field, NonNegativeInt, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

from lit_async_rl.engines.completion_check import MAX_LOGPROB, MIN_LOGPROB, show
from lit_async_rl.engines.vllm.requests import NO_PROBABILITY

T = TypeVar("T")
STRICT = ConfigDict(strict=True)  # a number is no text, and True is no number
Logprob = Annotated[float, Field(ge=MIN_LOGPROB, le=MAX_LOGPROB, allow_inf_nan=False)]


class MalformedAnswer(ValueError):
    """An answer that does not fit the schema, or not the request; one line."""


class Span(TypedDict):
    """Stretch of tokens that were sampled from one version."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    version: str
    start: NonNegativeInt
    end: NonNegativeInt


class LikelyToken(TypedDict):
    """One of the likeliest tokens in the place of a sampled one; impossible ones have `NO_PROBABILITY`."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    token_id: NonNegativeInt
    logprob: Annotated[float, Field(ge=NO_PROBABILITY, le=MAX_LOGPROB, allow_inf_nan=False)]


class SampledToken(TypedDict):
    """A token with its log-probability, and the likeliest tokens in its place if `sampling.head` asks for them."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    token_id: NonNegativeInt
    logprob: Logprob
    top_logprobs: NotRequired[list[LikelyToken]]


class SampledTokens(TypedDict):
    """Sampled tokens of one sample, with log-probabilities."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    content: list[SampledToken]


class Choice(TypedDict):
    """One sample of an answer of `/inference/v1/generate`."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    index: NonNegativeInt
    finish_reason: Literal["stop", "length"]
    token_ids: list[NonNegativeInt]
    logprobs: SampledTokens
    weight_versions: NotRequired[list[Span] | None]


class PromptToken(TypedDict):
    """Log-probability of a token of the prompt."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    logprob: Logprob


class Generated(TypedDict):
    """Answer of `/inference/v1/generate`: all samples of a request."""

    choices: list[Choice]


class Scored(TypedDict):
    """The same with the log-probabilities of the prompt, by token id; the first token has none."""

    prompt_logprobs: list[dict[str, PromptToken] | None]


class ModelCard(TypedDict):
    """Entry of `/v1/models`: one served model."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    max_model_len: Annotated[int, Field(ge=1)]


class Models(TypedDict):
    """Answer of `/v1/models`: at least one model."""

    data: Annotated[list[ModelCard], Field(min_length=1)]


class WeightInfo(TypedDict):
    """Answer of `/weight_info`: the version of the weights in use."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    weight_version: str


class WorkerReport(TypedDict):
    """Description of a worker, see `WorkerExtension.describe_policy`."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    model: dict[str, Any]
    transformers: str
    dtype: str
    can_sleep: bool
    problems: list[str]


class WorkerReports(TypedDict):
    """Answer of `/collective_rpc` with `describe_policy`: one report per worker."""

    results: Annotated[list[WorkerReport], Field(min_length=1)]


class Sleeping(TypedDict):
    """Answer of `/is_sleeping`: whether memory was released."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    is_sleeping: bool


class Loaded(TypedDict):
    """Answer of `/collective_rpc` with a method that loads weights: one entry per worker."""

    results: Annotated[list[Any], Field(min_length=1)]


class LoadingState(TypedDict):
    """Whether a worker has loaded the weights that it began with."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    loaded: bool


class LoadingStates(TypedDict):
    """Answer of `/collective_rpc` to `policy_weights_state`."""

    results: Annotated[list[LoadingState], Field(min_length=1)]


class Schema(Generic[T]):
    """Parser of one kind of answer.

    Args:
        kind: a TypedDict of this module.
    """

    def __init__(self, kind: type[T]) -> None:
        self._adapter = TypeAdapter(kind)

    def parse(self, body: bytes) -> T:
        """The answer in `body`.

        Raises:
            MalformedAnswer: it is not JSON in UTF-8, or does not fit.
        """
        try:
            return self._adapter.validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            place = ".".join(map(str, first["loc"]))
            found = "" if first["type"] in ("missing", "json_invalid") else f", got {show(first['input'])}"
            more = f" and {error.error_count() - 1} more" if error.error_count() > 1 else ""
            reason = f"{place + ': ' if place else ''}{first['msg']}{found}{more}"
            raise MalformedAnswer(f"{' '.join(reason.split())[:200]}, in {excerpt(body)}") from error


GENERATED = Schema(Generated)
SCORED = Schema(Scored)
MODELS = Schema(Models)
WEIGHT_INFO = Schema(WeightInfo)
WORKER_REPORTS = Schema(WorkerReports)
LOADED = Schema(Loaded)
LOADING = Schema(LoadingStates)
SLEEPING = Schema(Sleeping)


def excerpt(body: bytes) -> str:
    """The beginning of an answer on one line, for messages."""
    text = " ".join(body[:400].decode("utf-8", "replace").split())
    return "an empty answer" if not body else repr(text[:60] + ("..." if len(text) > 60 else ""))
