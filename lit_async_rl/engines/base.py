"""Interface of rollout engines: requests in, completions out, each token with the version of its weights.

The producer's thread calls `submit` and `poll`; the trainer's thread calls `setup`, `load_weights` and `close`. An
engine with its own thread (vLLM) generates continuously; the embedded one generates inside `poll`.
"""

from __future__ import annotations

import inspect
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from lit_async_rl.errors import InvariantError, SetupError
from lit_async_rl.models.tokenizer import SpecialTokens, TextCodec
from lit_async_rl.runtime.retries import Work
from lit_async_rl.types import Completion, GenerationRequest, SamplingParams

__all__ = ["Completion", "GenerationRequest", "RolloutEngine", "SamplingParams"]

WeightReport = Callable[[int, Iterable[tuple[str, Tensor]]], None]  # called with a version and its weights


class RolloutEngine(ABC):
    """Samples completions from the newest loaded weights.

    Guarantee: a token of a request submitted after `load_weights(v, ...)` returned has a version >= v.

    Attributes:
        in_flight_weight_updates: True if running requests continue with new weights; False if they finish first.
        scores: whether completions have rewards.
        takes_adapters: whether `load_weights` accepts low-rank adapters beside frozen weights, see `stream_weights`.
        takes_changes: whether `load_weights` accepts `UNCHANGED` in place of weights loaded before.
        records_heads: whether completions have the distributions they were sampled from (`sampling.head`).
        records_entropy: whether these distributions have their entropy.
        records_experts: whether completions have the experts of each token (`sampling.experts`).
        records_spans: whether the engine adds spans to the timeline, in a lane of `lit_async_rl.runtime.spans` that it
            gets in `setup`; otherwise the timeline shows the increase of `busy_s` in each `poll`.
        startup_timeout_s: timeout of `setup` in seconds, downloads included, after which the engine counts as hanging.
        num_slots: samples decoded together, also by validation.
        num_replicas: engines behind this one, if a setting `replicas` says how many; None otherwise.
        update_timeout_s: timeout of other calls in seconds, if longer than `data.limits.rollout_timeout_s`.
        has_model: False for engines without a model; their log-probabilities are meaningless.
        dtype: precision of weights and computation; determines the expected error of log-probabilities.
        uses_probe: whether the trainer must set `probe` before the first `load_weights`, and when `needs_probe`.
        needs_probe: whether the trainer must pass log-probabilities of the present weights to `take_probe`.
        held_s: seconds in which `load_weights` waited for the slowest of several replicas.
        sleep_level: 0 if `sleep` does nothing.
        needs_weights: whether weights were freed: `load_weights` must come before the next token.
        probe: the trainer's log-probabilities, for engines that check their own; None if it cannot compute any.
        is_used: whether a run has set the engine up; another run then makes a fresh one.
        has_failed: whether the run replaces it by a new one and keeps nothing of it.
        special_tokens: form of special tokens in texts for environments, see `data.scoring.special_tokens`.
        self_check: whether decoding is compared with plain forward passes; None is the model's setting.
    """

    in_flight_weight_updates: bool
    scores: bool = False
    takes_adapters: bool = False
    takes_changes: bool = False
    records_heads: bool = False
    records_entropy: bool = False
    records_experts: bool = False
    records_spans: bool = False
    startup_timeout_s: float = 3600.0
    num_slots: int = 64
    num_replicas: int | None = None
    update_timeout_s: float = 0.0
    has_model: bool = True
    dtype: str = "unknown"
    uses_probe: bool = False
    needs_probe: bool = False
    needs_weights: bool = False
    held_s: float = 0.0
    sleep_level: int = 0
    probe: Probe | None = None
    is_used: bool = False
    has_failed: bool = False
    self_check: bool | None = None
    special_tokens: SpecialTokens = "tags"
    _made_with: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Stores the constructor arguments for `fresh`."""
        engine = super().__new__(cls)
        engine._made_with = (args, kwargs)
        return engine

    def fresh(self, out_of_memory: bool = False) -> RolloutEngine:
        """A new engine with the same arguments, not set up; replaces one that hangs or failed.

        Args:
            out_of_memory: whether this engine ran out of memory; the new one should use less, if possible.
        """

        def renewed(argument: Any) -> Any:
            return argument.fresh(out_of_memory) if isinstance(argument, RolloutEngine) else argument

        args, kwargs = self._made_with
        named = {name: renewed(argument) for name, argument in kwargs.items()}
        engine: RolloutEngine = type(self)(*map(renewed, args), **named)
        engine.special_tokens = self.special_tokens
        return engine

    def around(self, engine: RolloutEngine, codec: TextCodec) -> RolloutEngine:
        """Extends another engine in the same way as this one extends plain generation; used by validation."""
        return engine

    def check_sampling(self, setting: str, sampling: SamplingParams, num_samples: int) -> None:  # noqa: B027
        """Refuses unsupported sampling parameters; called before `setup`.

        Args:
            setting: path of the parameters in messages, such as `data.sampling`.
            sampling: sampling parameters.
            num_samples: of one request.

        Raises:
            ValueError: names the setting and its value.
        """

    @abstractmethod
    def setup(self, model: str) -> None:
        """Loads the architecture of `model`, a Hugging Face name or folder. Called once, before any other method."""

    @property
    def scoring_identity(self) -> str | None:
        """Digest of the settings that affect the engine's rewards, for resumes; None if unknown."""
        return None

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """Maximum number of prompt and completion tokens of a request."""

    @abstractmethod
    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queues requests atomically: the next decode step sees all of them or none. Does not block."""

    @abstractmethod
    def poll(self, timeout_s: float) -> list[Completion]:
        """Samples finished since the last call; waits at most `timeout_s` for the first.

        Raises the engine's error after a failure.
        """

    @abstractmethod
    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads `weights` (Hugging Face names, full tensors) of this version.

        Consumes the iterable before it returns. With in-flight updates, running requests continue with the new weights;
        otherwise they finish with the old ones, and requests submitted later wait for them.
        """

    @abstractmethod
    def abort(self, request_ids: Sequence[int]) -> None:
        """Aborts these requests; their finished and partial samples are dropped."""

    def partial_completions(self) -> list[Completion]:
        """Partial completions that can be resumed by prefilling them.

        Their `finish_reason` is `abort`. Without support the list is empty, and requests start over.
        """
        return []

    def take_given_up(self) -> list[int]:
        """Requests given up since the last call, without further completions; their prompts are left out.

        A request is given up if its environment failed in all tries. The producer's thread calls this after each
        `poll`.
        """
        return []

    def take_lost(self) -> list[tuple[int, int]]:
        """Samples given up since the last call, as request and sample; their requests go on without them.

        The producer's thread calls this after each `poll`.
        """
        return []

    @property
    def starting(self) -> str:
        """Progress of `setup`, for the notice of a long one."""
        return "it loads the model, and may compile"

    def outside_work(self) -> Work | None:
        """Running calls outside of the engine that delay tokens, such as an environment's; None without any."""
        return None

    def end(self) -> None:  # noqa: B027
        """Closes resources shared by restarted engines and validations, such as an environment.

        Called at the end of a run, after `close`. Safe to call twice.
        """

    def watch_weights(self, report: WeightReport) -> bool:
        """Registers `report(version, weights)`, to be called after each update and before the next token.

        The weights are the updated ones, read back from the memory that the engine samples from.

        Returns:
            False if the engine cannot read them back; `report` is then never called.
        """
        return False

    def sleep(self) -> None:  # noqa: B027  (most have nothing to free)
        """Frees memory of the accelerator until the next `load_weights`, if `sleep_level` is set and no request runs.

        The trainer's thread calls this when sampling waits for training. A request submitted meanwhile wakes the engine
        up, or waits for the next weights.
        """

    def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float] | None:
        """Log-probabilities of all tokens but the first, at temperature 1, under the weights in use.

        Called from any thread while nothing else is submitted. None if the engine computes none.
        """
        return None

    def random_state(self) -> Tensor | None:
        """State of the random number generator, for a checkpoint; None if there is none to save."""
        return None

    def set_random_state(self, state: Tensor) -> None:
        """Restores a state returned by `random_state`."""
        raise NotImplementedError(f"{type(self).__name__} saves no random state")

    def take_probe(self, probe: Probe) -> None:
        """Takes the log-probabilities that `needs_probe` asked for."""
        self.probe = probe

    @abstractmethod
    def close(self) -> None:
        """Releases all resources. Safe to call twice and from any thread."""

    @property
    def num_running(self) -> int | None:
        """Samples or requests being generated now; None if the engine does not say."""
        return None

    @property
    @abstractmethod
    def busy_s(self) -> float:
        """Seconds spent generating so far."""

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Tokens generated so far."""


# -- Base class of engines around another engine ----------------------------------------------------------------------


class _OfInner:
    """An attribute or method of the inner engine, unless a subclass or the instance has its own."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, wrapper: EngineWrapper | None, kind: type) -> Any:
        return self if wrapper is None else getattr(wrapper.engine, self._name)


class _SetInInner(_OfInner):
    """The same, and setting it sets that of the inner engine."""

    def __set__(self, wrapper: EngineWrapper, value: Any) -> None:
        setattr(wrapper.engine, self._name, value)


W = TypeVar("W", bound="EngineWrapper")


class EngineWrapper(RolloutEngine):
    """Forwards attributes and calls to an inner engine, except those that a subclass overrides.

    Requests, partial completions and the random state are not forwarded: subclasses implement them.

    Args:
        engine: inner engine, before `setup`.
    """

    max_model_len: Any = _OfInner()
    busy_s: Any = _OfInner()
    num_tokens: Any = _OfInner()
    setup: Any = _OfInner()
    close: Any = _OfInner()
    if not TYPE_CHECKING:  # the others have the types of `RolloutEngine`
        records_heads = _OfInner()
        records_entropy = _OfInner()
        records_experts = _OfInner()
        records_spans = _OfInner()
        startup_timeout_s = _OfInner()
        update_timeout_s = _OfInner()
        takes_adapters = _OfInner()
        takes_changes = _OfInner()
        sleep_level = _OfInner()
        self_check = _OfInner()
        has_model = _OfInner()
        uses_probe = _OfInner()
        dtype = _OfInner()
        is_used = _SetInInner()
        has_failed = _SetInInner()
        scoring_identity = _OfInner()
        num_slots = _OfInner()
        num_running = _OfInner()
        needs_weights = _OfInner()
        needs_probe = _OfInner()
        held_s = _OfInner()
        starting = _OfInner()
        check_sampling = _OfInner()
        take_probe = _OfInner()
        take_given_up = _OfInner()
        take_lost = _OfInner()
        outside_work = _OfInner()
        watch_weights = _OfInner()
        sleep = _OfInner()
        prompt_logprobs = _OfInner()
        end = _OfInner()

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine

    def with_engine(self: W, engine: RolloutEngine, **changes: Any) -> W:
        """The same wrapper around another engine, with the same arguments but for `changes`; not set up."""
        args, kwargs = self._made_with
        bound = inspect.signature(type(self)).bind(*args, **kwargs)
        bound.arguments |= changes | {"engine": engine}
        return type(self)(*bound.args, **bound.kwargs)

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.engine.probe = self.probe
        self.engine.load_weights(version, weights)


# -- Checks that engines share ----------------------------------------------------------------------------------------


T = TypeVar("T")


def set_up(part: T | None) -> T:
    """A member that `setup` creates, if it is not None.

    Raises:
        SetupError: `setup` was not called yet.
    """
    if part is None:
        raise SetupError("the engine was used before its setup")
    return part


def check_request(request: GenerationRequest, max_model_len: int, vocab_size: int) -> None:
    """Refuses a request that can never be served.

    Raises:
        ValueError: prompt and completion do not fit, or a token of the prompt is not in the vocabulary.
    """
    if request.num_samples < 1:
        raise InvariantError(f"a request for no samples: {request}")
    ids = request.prompt_ids
    max_tokens = request.sampling.max_tokens
    if not ids:
        raise ValueError("a prompt has no tokens")
    if len(ids) + max_tokens > max_model_len:
        raise ValueError(
            f"a prompt of {len(ids)} tokens and sampling.max_tokens={max_tokens} need {len(ids) + max_tokens} "
            f"positions, but the engine has max_model_len={max_model_len}"
        )
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(
            f"a prompt contains token ids from {min(ids)} to {max(ids)}, but the model's vocabulary has only "
            f"{vocab_size} tokens: tokenizer and model do not match"
        )


# -- Largest difference between log-probabilities of engine and trainer, by their precision ---------------------------


# mean absolute difference in nats, by dtype
LOGPROB_ERROR_BOUNDS = {"float32": 1e-4, "tf32": 2e-3, "float16": 0.03, "bfloat16": 0.1}
PROBE_TOKENS = 48


def default_bound(*dtypes: str) -> float:
    """Largest mean absolute difference, in nats, expected from rounding in the coarsest of these dtypes.

    Measured: about 1e-5 for float32 on CPUs, a few 1e-4 for float32 multiplied in TF32 on accelerators, and 2e-3 to
    4e-2 for bfloat16. Unknown names count as the coarsest dtype.
    """
    return max(LOGPROB_ERROR_BOUNDS.get(dtype, max(LOGPROB_ERROR_BOUNDS.values())) for dtype in dtypes)


@dataclass(frozen=True)
class Probe:
    """Log-probabilities of a fixed token sequence under the trainer's weights of one version.

    Attributes:
        version: of the weights.
        token_ids: T tokens.
        logprobs: T - 1 log-probabilities, of all tokens but the first, at temperature 1.
        dtype: precision in which the trainer computed them.
    """

    version: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    dtype: str

    def error(self, logprobs: Sequence[float]) -> float:
        """Mean absolute difference from other log-probabilities of the same tokens."""
        differences = [abs(a - b) for a, b in zip(self.logprobs, logprobs, strict=True)]
        return sum(differences) / len(differences)


def probe_tokens(vocab_size: int, max_length: int = PROBE_TOKENS) -> tuple[int, ...]:
    """A fixed sequence of random tokens."""
    rng = random.Random(vocab_size)
    return tuple(rng.randrange(vocab_size) for _ in range(min(PROBE_TOKENS, max_length)))
