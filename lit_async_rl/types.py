"""Data types of the trainer, in the order of the data flow: prompts, rollouts, groups, batches.

Shapes: B rollouts of a batch, T token positions (prompt and completion, right-padded). Every [B, T] tensor is aligned
with `input_ids`: position t belongs to the token at t, so `logprobs[:, t]` is log p(input_ids[:, t] | input_ids[:, :t])
and position 0 never trains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_async_rl.errors import InvariantError
from lit_async_rl.problem import Prompt, Score
from lit_async_rl.sampler_records import ExpertChoices, SamplerHead, join_heads
from lit_async_rl.utils.checks import MANY, check_range

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Turn:
    """One turn of the policy within a rollout.

    Attributes:
        end: number of the row's tokens up to and including the turn's last.
        reward: reward of the turn.
        state: identifier of the environment's observation before the turn; equal numbers mean equal states.
        call: number of the agent's call that sampled it, which orders the turns of several rows; None is its position
            among them.
    """

    end: int
    reward: float
    state: int
    call: int | None = None


def _plain(turns: tuple[Turn, ...] | None) -> tuple[Turn, ...] | None:
    """The turns with rewards that are Python's numbers."""
    return None if turns is None else tuple(replace(turn, reward=float(turn.reward)) for turn in turns)


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """Tokens that follow others, and their records; see `Completion` and `Branch`."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    loss_mask: tuple[bool, ...] | None = None
    head: SamplerHead | None = None
    experts: ExpertChoices | None = None
    prompt_ids: tuple[int, ...] | None = None
    credit: float = 1.0
    turns: tuple[Turn, ...] | None = None

    @property
    def num_own_tokens(self) -> int:
        """Number of tokens that train in this row, by `loss_mask`."""
        return len(self.token_ids) if self.loss_mask is None else sum(self.loss_mask)


@dataclass(frozen=True, kw_only=True)
class Branch(TokenRow):
    """A further row of a sample: another branch of an agent's conversation, or a sub-agent's.

    Fields of tokens have one entry for each of `token_ids`, as in a `Completion`.

    Attributes:
        prompt_ids: tokens that the branch follows; those that the policy sampled train in another row.
        token_ids, logprobs, versions, loss_mask, head, experts: see `Completion`.
        credit: factor of the sample's advantage in this row.
        turns: turns of the policy that train in this row; None if they are unknown.
    """

    prompt_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


Sample = TypeVar("Sample", bound="Completion")


@dataclass(frozen=True, kw_only=True)
class Completion(TokenRow):
    """One sample of a request, as an engine returns it. Fields of tokens have one entry for each of `token_ids`.

    An agent's sample may have several rows of tokens: its own and those of its `branches`. They share one reward, and
    the sample's length is the sum of theirs.

    Attributes:
        request_id: request that it answers.
        sample_index: number among the request's samples.
        token_ids: token ids of the completion, stop token included.
        logprobs: log-probability of each token under the sampling distribution (temperature, top-p and so on applied),
            in float32 accuracy.
        versions: policy version of each token; may change within a completion (in-flight updates).
        finish_reason: why sampling ended: stop token or string, length limit, or abort.
        text: decoded completion, as rewards read it; engines leave it empty.
        loss_mask: False for tokens that the policy did not sample (tool output); None if all tokens train.
        reward: of the whole completion, from an engine with an environment; None until it is scored.
        reward_parts: the reward's parts, by name; None without parts.
        turns: turns of the policy, whose rewards sum to `reward` together with the branches'; None is a single turn.
        head: recorded sampling distributions, if `sampling.head` is set.
        experts: experts chosen for prompt and completion, if `sampling.experts` is set.
        prompt_ids: tokens that the completion follows, if not those of its request: agents write their own prompts.
        credit: factor of the advantage in the completion's own row.
        branches: further rows of the sample.
    """

    request_id: int
    sample_index: int
    finish_reason: FinishReason
    text: str = ""
    reward: float | None = None
    reward_parts: Mapping[str, float] | None = None
    branches: tuple[Branch, ...] = ()

    @property
    def num_trained_tokens(self) -> int:
        """Number of tokens that train, in all rows of the sample."""
        return sum(row.num_own_tokens for row in self.rows)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all rows, trained or not."""
        return sum(len(row.token_ids) for row in self.rows)

    @property
    def rows(self) -> tuple[TokenRow, ...]:
        """All rows of tokens: the completion's own, and its branches."""
        return (self, *self.branches)

    @property
    def all_versions(self) -> tuple[int, ...]:
        """Versions of the tokens of all rows."""
        if not self.branches:
            return self.versions
        return tuple(version for row in self.rows for version in row.versions)

    def rewarded(self: Sample, amount: float) -> Sample:
        """Copy with `amount` added to the reward of the turn that was sampled last, in whichever row."""
        ends = [(turns[-1].call or 0, -n) for n, row in enumerate(self.rows) if (turns := row.turns)]
        if not ends:
            return self
        number = -max(ends)[1]
        *earlier, last = self.rows[number].turns or ()
        changed = (*earlier, replace(last, reward=last.reward + amount))
        if number == 0:
            return replace(self, turns=changed)
        branches = list(self.branches)
        branches[number - 1] = replace(branches[number - 1], turns=changed)
        return replace(self, branches=tuple(branches))

    def continuing(self, begun: Completion) -> Completion:
        """The completion behind the tokens of `begun`, which it continued."""
        heads = [head for head in (begun.head, self.head) if head is not None]
        experts = None if begun.experts is None or self.experts is None else begun.experts.continued(self.experts)
        return replace(
            self,
            token_ids=begun.token_ids + self.token_ids,
            logprobs=begun.logprobs + self.logprobs,
            versions=begun.versions + self.versions,
            head=join_heads(heads) if len(heads) == 2 else None,
            experts=experts,
        )

    def scored(self, reward: float) -> Rollout:
        """The completion with its reward, and the parts of a `Score`."""
        # float(): some rewards are numbers of numpy, and checkpoints hold none
        parts = reward.parts if isinstance(reward, Score) else self.reward_parts
        plain = {
            "turns": _plain(self.turns),
            "branches": tuple(replace(b, turns=_plain(b.turns)) for b in self.branches),
        }
        return Rollout(**(vars(self) | plain | {"reward": float(reward), "reward_parts": parts}))


@dataclass(frozen=True, kw_only=True)
class Rollout(Completion):
    """A completion with its reward, ready for training.

    Within a group `request_id` is the group's index. Both ids may be left out, and comparisons ignore them.

    Raises:
        InvariantError: fields of tokens differ in length.
    """

    request_id: int = field(default=0, compare=False)
    sample_index: int = field(default=0, compare=False)
    reward: float = field()  # without the default that it has in a completion

    def __post_init__(self) -> None:
        for row in self.rows:
            lengths = {len(row.token_ids), len(row.logprobs), len(row.versions)}
            if row.loss_mask is not None:
                lengths.add(len(row.loss_mask))
            if row.head is not None:
                lengths.add(len(row.head))
            if len(lengths) != 1:
                raise InvariantError(f"per-token fields of a rollout differ in length: {lengths}")

    @property
    def num_policy_tokens(self) -> int:
        """Number of tokens that the policy wrote: those that train, or all where a filter masked the completion."""
        return self.num_trained_tokens or self.num_tokens

    @property
    def score(self) -> float:
        """The reward, with its parts if it has any."""
        return self.reward if self.reward_parts is None else Score(self.reward, self.reward_parts)

    def add_reward(self, amount: float, part: str) -> Rollout:
        """Copy of the rollout with `amount` added to its reward and to that of the last sampled turn.

        The amount becomes a part of a reward with parts, under the name `part`.
        """
        if not amount and self.reward_parts is None:
            return self
        parts = self.reward_parts
        if parts is not None:
            parts = {**parts, part: parts.get(part, 0.0) + amount}
        return replace(self.rewarded(amount), reward=self.reward + amount, reward_parts=parts)


@dataclass(frozen=True, kw_only=True)
class RolloutGroup:
    """All completions of one prompt.

    Attributes:
        index: position in the order of admission, from 0; unique within a run, resumes included.
        prompt: prompt of the group.
        prompt_ids: token ids of the prompt.
        rollouts: completions of the prompt.
        admitted_version: version published at admission; no token is older.
        generation_s: seconds from admission to the last token.
        queue_s: seconds from the last token until the group was taken for training.
        max_staleness: staleness bound of its tokens, in versions; None if unbounded.
    """

    index: int
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    rollouts: tuple[Rollout, ...]
    admitted_version: int
    generation_s: float = 0.0
    queue_s: float = 0.0
    max_staleness: int | None = None

    @property
    def num_tokens(self) -> int:
        """Number of completion tokens of all rollouts."""
        return sum(rollout.num_tokens for rollout in self.rollouts)


class RolloutBatch:
    """One micro-batch of rollouts.

    Not a dataclass: Lightning would cast its fields (`behavior_logprobs` to bfloat16 under some precisions) and refuses
    frozen ones. It leaves objects with their own `.to` unchanged.

    Attributes:
        loss_mask: True where a token trains.
        token_weights: weight of each token in the average; sums to 1 over all micro-batches and ranks of the *step*, 0
            where `loss_mask` is False. With streamed groups, only after multiplication by the `gradient_scale`.
        rewards: reward of each row's rollout; NaN in rows of branches, so that each rollout counts once.
        group_index: `RolloutGroup.index` of each row, -1 for padding rows.
        lengths: tokens that the policy wrote in all rows of each row's rollout, trained or not; None if unknown.
        rollout: number of each row's rollout within the micro-batch, which has all of its rows; None if every row is a
            rollout.
        credits: factor of each token's advantage; None if all are 1. `advantages` contain it.
        temperature: sampling temperature of the completions, also applied to the policy's log-probabilities.
        truncated: whether the completions were sampled with top-k, top-p or min-p.
        gradient_scale: factor of the accumulated gradient after this micro-batch; 1 except in the last of a step with
            streamed groups.
        max_staleness: staleness bound of each row's tokens, in versions; None if unbounded.
        head_ids, head_logprobs, behavior_entropy: `SamplerHead` of each token; None if not recorded.
        experts: `ExpertChoices` to replay for each token; None if not recorded.
        as_rows: why rows are computed separately despite `model.packing`; empty if they are not.
        source: number of the source of each row's prompt, for `SourceTeachers`; None without them.
        step: optimizer step of the micro-batch, which is number `micro_batch` of `num_micro_batches`; None if the data
            module does not set it.
    """

    def __init__(
        self,
        *,
        input_ids: Int[Tensor, "B T"],
        attention_mask: Bool[Tensor, "B T"],
        loss_mask: Bool[Tensor, "B T"],
        behavior_logprobs: Float[Tensor, "B T"],
        versions: Int[Tensor, "B T"],
        advantages: Float[Tensor, "B T"],
        token_weights: Float[Tensor, "B T"],
        rewards: Float[Tensor, " B"],
        group_index: Int[Tensor, " B"],
        lengths: Int[Tensor, " B"] | None = None,
        rollout: Int[Tensor, " B"] | None = None,
        credits: Float[Tensor, "B T"] | None = None,
        temperature: float = 1.0,
        truncated: bool = False,
        gradient_scale: float = 1.0,
        max_staleness: Int[Tensor, " B"] | None = None,
        head_ids: Int[Tensor, "B T k"] | None = None,
        head_logprobs: Float[Tensor, "B T k"] | None = None,
        behavior_entropy: Float[Tensor, "B T"] | None = None,
        experts: Int[Tensor, "B T n k"] | None = None,
        as_rows: str = "",
        source: Int[Tensor, " B"] | None = None,
        step: int | None = None,
        micro_batch: int = 0,
        num_micro_batches: int = 1,
    ) -> None:
        self.input_ids = input_ids
        self.attention_mask = attention_mask
        self.loss_mask = loss_mask
        self.behavior_logprobs = behavior_logprobs
        self.versions = versions
        self.advantages = advantages
        self.token_weights = token_weights
        self.rewards = rewards
        self.group_index = group_index
        self.lengths = lengths
        self.rollout = rollout
        self.credits = credits
        self.temperature = temperature
        self.truncated = truncated
        self.gradient_scale = gradient_scale
        self.max_staleness = max_staleness
        self.head_ids = head_ids
        self.head_logprobs = head_logprobs
        self.behavior_entropy = behavior_entropy
        self.experts = experts
        self.as_rows = as_rows
        self.source = source
        self.step = step
        self.micro_batch = micro_batch
        self.num_micro_batches = num_micro_batches

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def tree_groups(self) -> Int[Tensor, " B"] | None:
        """Group of each row, within which a policy may compute shared prefixes once; None for separate rows."""
        return None if self.as_rows else self.group_index

    def replace(self, **changes: Any) -> RolloutBatch:
        """Copy of the batch with some fields changed."""
        return RolloutBatch(**{**vars(self), **changes})

    def select(self, rows: Int[Tensor, " n"], length: int) -> RolloutBatch:
        """Batch of some rows, of their first `length` positions."""
        width = self.input_ids.shape[1]
        chosen = {name: value[rows] for name, value in vars(self).items() if isinstance(value, Tensor)}
        has_positions = {name for name, value in chosen.items() if value.dim() > 1 and value.shape[1] == width}
        return self.replace(**{n: v[:, :length] if n in has_positions else v for n, v in chosen.items()})

    def to(self, device: torch.device | str, non_blocking: bool = False) -> RolloutBatch:
        """Copy of the batch on another device; dtypes are unchanged."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return self.replace(**{name: value.to(device, non_blocking=non_blocking) for name, value in tensors.items()})


class PromptBatch:
    """Batch of held-out prompts, and its position among all batches; opaque to Lightning."""

    def __init__(self, prompts: Sequence[Prompt], index: int = 0) -> None:
        self.prompts = tuple(prompts)
        self.index = index

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PromptBatch:
        """Returns the batch itself: it holds no tensors."""
        return self


# -- Input of an engine: sampling parameters and requests -------------------------------------------------------------


SUPPORT_TOKENS = 128  # default width of the head of a truncated sampler: one kilobyte for each sampled token


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
        end_token_ids: end tokens of the model, in place of those in its generation_config.json, config.json, tokenizer
            and chat template; None is their union, an empty list lets nothing end a completion.
        head: record, for every token, the entropy of its sampling distribution, and this many of the likeliest tokens
            with their log-probabilities; 0 records the entropy only, None nothing. Score centering and the replay of
            truncated supports need it: training samples with `top_p`, `top_k` or `min_p` always have it, see
            `recorded`.
        experts: record the experts that routers choose for every token of prompt and completion; the trainer then uses
            the same (router replay).
        stop: strings that end the completion, at the token that completes the first. That token trains, too; the reward
            gets the text before the stop string.

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
        check_range("sampling", f"<= {MANY}", head=self.head, top_k=self.top_k)

    def ends(self, eos_token_ids: Iterable[int]) -> tuple[int, ...]:
        """Tokens that end a completion of a model with the end tokens `eos_token_ids`."""
        own = tuple(eos_token_ids) if self.end_token_ids is None else self.end_token_ids
        return own + self.stop_token_ids

    @property
    def truncates(self) -> bool:
        """Whether top-p, top-k or min-p leaves only a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def recorded(self) -> SamplingParams:
        """The same parameters with a head of all tokens that a truncated sampler can choose.

        With `top_k`, `head` becomes at least as large. Without, top-p and min-p leave any number: they then choose
        among the `head` likeliest (`SUPPORT_TOKENS` unless it is positive), which becomes `top_k`. Unchanged if nothing
        is truncated.
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
    serve requests of a higher `priority` first; others serve them in order. The last `num_resumed` of the `prompt_ids`
    belong to the completion: an earlier run or another replica sampled them, and a stop string may begin in them.

    With a `seed` >= 0, random numbers of the embedded engine depend on `seed` + sample and the token's position alone,
    whatever else is sampled, in any order. Other engines do not read it.

    Requests of one `session` begin alike, such as the turns of an episode or the parts of a group: engines with several
    replicas send them where that beginning is cached.
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

    def rest(self, request_id: int, token_ids: tuple[int, ...]) -> GenerationRequest:
        """Request for the rest of one sample after `token_ids`."""
        return replace(
            self,
            id=request_id,
            prompt_ids=self.prompt_ids + token_ids,
            num_samples=1,
            sampling=replace(self.sampling, max_tokens=self.sampling.max_tokens - len(token_ids)),
            num_resumed=self.num_resumed + len(token_ids),
        )
