"""Input and output of an engine: sampling parameters, requests, completions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from lit_async_rl.expert_choices import ExpertChoices
from lit_async_rl.sampler_head import SamplerHead
from lit_async_rl.types import FinishReason, Prompt, Turn
from lit_async_rl.utils.checks import check_range

SUPPORT_TOKENS = 128  # recorded of a support of any size: one kilobyte for each sampled token


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of completions.

    Args:
        temperature: divides the logits; 0 means greedy (log-probabilities are then those of temperature 1).
        top_p: keep the smallest set of tokens with at least this probability; 1 keeps all.
        top_k: keep the k likeliest tokens; 0 keeps all.
        min_p: keep tokens at least this fraction as likely as the likeliest; 0 keeps all.
        max_tokens: at most this many completion tokens.
        stop_token_ids: end the completion (the stop token is its last token); added to the model's end tokens.
        end_token_ids: end tokens of the model, in place of those that its generation_config.json, config.json,
            tokenizer and chat template name; None is their union, an empty list lets nothing end a completion.
        head: record, for every token, the entropy of the distribution it was sampled from, and this many of its
            likeliest tokens with their log-probabilities; 0 records the entropy only, None nothing. Score centering
            and the replay of truncated supports need it: training samples with `top_p`, `top_k` or `min_p` always have
            it, see `recorded`.
        experts: record the experts that the model's routers choose for every token of prompt and completion; the
            trainer then uses the same (router replay).
        stop: strings that end the completion, at the token that completes the first of them. All tokens train,
            including that one; the reward gets the text before the stop string.

    Raises:
        ValueError: a setting is out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 64
    stop_token_ids: tuple[int, ...] = ()
    end_token_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    head: int | None = None
    experts: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"sampling.stop must be a list of non-empty strings, got {self.stop!r}")
        object.__setattr__(self, "stop", tuple(self.stop))
        check_range("sampling", "integer >= 0", top_k=self.top_k)
        check_range("sampling", ">= 0", temperature=self.temperature)
        check_range("sampling", "finite", temperature=self.temperature)
        check_range("sampling", "in (0, 1]", top_p=self.top_p)
        check_range("sampling", "in [0, 1]", min_p=self.min_p)
        check_range("sampling", "integer >= 1", max_tokens=self.max_tokens)
        for name in ("stop_token_ids", "end_token_ids"):
            ids = getattr(self, name)
            if ids is None:
                continue
            if any(token < 0 for token in ids):
                raise ValueError(f"sampling.{name} must be >= 0, got {list(ids)}")
            object.__setattr__(self, name, tuple(ids))
        check_range("sampling", "integer >= 0", head=self.head)

    def ends(self, eos_token_ids: Iterable[int]) -> tuple[int, ...]:
        """Tokens that end a completion of a model with the end tokens `eos_token_ids`."""
        own = tuple(eos_token_ids) if self.end_token_ids is None else self.end_token_ids
        return own + self.stop_token_ids

    @property
    def truncates(self) -> bool:
        """Whether tokens are sampled from fewer than the whole vocabulary: top-p, top-k or min-p."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def recorded(self) -> SamplingParams:
        """The same parameters with a head that holds all tokens that a truncated sampler can choose.

        With `top_k` these are at most that many, and `head` becomes as large. Without, top-p and min-p leave any
        number: they then choose among the `head` likeliest (`SUPPORT_TOKENS` unless it is positive), which becomes
        `top_k`. Unchanged if nothing is truncated.
        """
        if not self.truncates:
            return self
        if self.top_k:
            return replace(self, head=max(self.top_k, self.head or 0))
        width = self.head or SUPPORT_TOKENS
        return replace(self, head=width, top_k=width)

    @property
    def distribution(self) -> dict[str, float]:
        """Settings that log-probabilities depend on."""
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """Request for `num_samples` completions of one prompt; `id` is unique among the requests an engine holds.

    `prompt` is the source of `prompt_ids`; only engines with an environment use it. Engines with a queue of their own
    serve waiting requests of a higher `priority` first; others serve them in order. The last `num_resumed` of the
    `prompt_ids` belong to the completion: an interrupted run sampled them, and a stop string may begin in them.

    With a `seed` >= 0, random numbers of the embedded engine depend on `seed` + sample and the token's position alone,
    whatever else is sampled, and in whichever order. Other engines do not read it.

    Requests of one `session` begin alike, such as the turns of an episode or the parts of a group: engines with several
    servers send them where that beginning is cached.
    """

    id: int
    prompt_ids: tuple[int, ...]
    num_samples: int
    sampling: SamplingParams
    prompt: Prompt | None = None
    priority: int = 0
    num_resumed: int = 0
    session: int | None = None
    seed: int | None = None

    @property
    def resumed_ids(self) -> tuple[int, ...]:
        """Tokens of the completion that are already in the prompt."""
        return self.prompt_ids[len(self.prompt_ids) - self.num_resumed :]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished sample of a request; `logprobs` and `versions` have one entry per token.

    `head` has the recorded distributions if `sampling.head` is set, `experts` the experts that were chosen for prompt
    and completion if `sampling.experts` is.
    An engine with an environment also sets `loss_mask` (tokens written by the policy), `turns` and `reward`.
    """

    request_id: int
    sample_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason
    loss_mask: tuple[bool, ...] | None = None
    reward: float | None = None
    turns: tuple[Turn, ...] | None = None
    head: SamplerHead | None = None
    experts: ExpertChoices | None = None
