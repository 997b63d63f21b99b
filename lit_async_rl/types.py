"""Data types of the trainer, in the order of the data flow: prompts, rollouts, groups, batches.

Shapes: B rollouts of a batch, T token positions (prompt and completion, right-padded). Every [B, T] tensor is aligned
with `input_ids`: position t belongs to the token at t, so `logprobs[:, t]` is log p(input_ids[:, t] | input_ids[:, :t])
and position 0 never trains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lit_async_rl.errors import InvariantError
from lit_async_rl.expert_choices import ExpertChoices
from lit_async_rl.messages import checked_messages
from lit_async_rl.sampler_head import SamplerHead

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One problem: the input of the policy (`text` or `messages`), and the data for its reward.

    Example: `Prompt(text="sort 3142=", answer="1234")`, or
    `Prompt(messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}], answer="4")`.

    Attributes:
        text: the prompt; for messages a readable form for logs, one line `role: content` per message.
        messages: conversation to which the model's chat template is applied. Each message has a `role` (system,
            developer, user, assistant or tool) and its text, `content`; other keys are passed to the template.
        answer: reference answer.
        metadata: passed to the reward unchanged.

    Raises:
        ValueError: neither text nor messages are given, or both; or a message is malformed.
    """

    text: str = None  # type: ignore[assignment]  # set in __post_init__
    messages: Sequence[Mapping[str, Any]] | None = None
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.messages is not None:
            messages = checked_messages(self.messages)
            rendering = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
            if self.text is not None and self.text != rendering:
                raise ValueError("a prompt is text or messages, not both")
            object.__setattr__(self, "messages", messages)
            object.__setattr__(self, "text", rendering)
        elif self.text is None:
            raise ValueError("a prompt needs text or messages")


@dataclass(frozen=True)
class Turn:
    """One turn of the policy within a rollout.

    Attributes:
        end: number of rollout tokens up to and including the turn's last one.
        reward: reward of the turn.
        state: identifier of the environment's observation before the turn; equal numbers mean equal states.
    """

    end: int
    reward: float
    state: int


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One completion. `behavior_logprobs` and `versions` have one entry for each token of `completion_ids`.

    Attributes:
        completion_ids: token ids of the completion, stop token included.
        behavior_logprobs: log-probability of each token under the sampling distribution (temperature, top-p and so on
            applied), in float32 accuracy.
        versions: policy version that sampled each token; may change within a rollout (in-flight updates).
        finish_reason: why sampling ended: stop token or string, length limit, or abort.
        text: decoded completion.
        reward: reward of the whole completion.
        loss_mask: False for tokens that the policy did not sample (tool output); None if all tokens train.
        turns: turns of the policy, whose rewards sum to `reward`; None is a single turn.
        head: recorded sampling distributions, if `sampling.head` is set.
        experts: experts chosen for prompt and completion, if `sampling.experts` is set.
    """

    completion_ids: tuple[int, ...]
    behavior_logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason
    text: str
    reward: float
    loss_mask: tuple[bool, ...] | None = None
    turns: tuple[Turn, ...] | None = None
    head: SamplerHead | None = None
    experts: ExpertChoices | None = None

    def __post_init__(self) -> None:
        lengths = {len(self.completion_ids), len(self.behavior_logprobs), len(self.versions)}
        if self.loss_mask is not None:
            lengths.add(len(self.loss_mask))
        if self.head is not None:
            lengths.add(len(self.head))
        if len(lengths) != 1:
            raise InvariantError(f"per-token fields of a rollout differ in length: {lengths}")

    @property
    def num_trained_tokens(self) -> int:
        """Number of completion tokens that train, by `loss_mask`."""
        return len(self.completion_ids) if self.loss_mask is None else sum(self.loss_mask)

    @property
    def num_policy_tokens(self) -> int:
        """Number of tokens that the policy wrote: those that train; all of the completion where a filter masked it."""
        return self.num_trained_tokens or len(self.completion_ids)

    def add_reward(self, amount: float) -> Rollout:
        """Copy of the rollout with `amount` added to its reward and to that of its last turn."""
        if not amount:
            return self
        turns = self.turns
        if turns:
            turns = (*turns[:-1], replace(turns[-1], reward=turns[-1].reward + amount))
        return replace(self, reward=self.reward + amount, turns=turns)


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
        return sum(len(rollout.completion_ids) for rollout in self.rollouts)


class RolloutBatch:
    """One micro-batch of rollouts.

    Not a dataclass: Lightning would cast the fields of one (`behavior_logprobs` to bfloat16 under some precisions) and
    refuses frozen ones. Objects with their own `.to` are left unchanged.

    Attributes:
        loss_mask: True where a token trains.
        token_weights: weight of each token in the average; sums to 1 over all micro-batches and ranks of the *step*, 0
            where `loss_mask` is False. With streamed groups, only after multiplication by the `gradient_scale`.
        group_index: `RolloutGroup.index` of each row, -1 for padding rows.
        lengths: tokens of each row's completion that the policy wrote, also where they do not train; None if unknown.
        temperature: sampling temperature of the completions, also applied to the policy's log-probabilities.
        truncated: whether the completions were sampled with top-k, top-p or min-p.
        gradient_scale: factor applied to the accumulated gradient after this micro-batch; other than 1 only in the
            last micro-batch of a step with streamed groups.
        max_staleness: staleness bound of each row's tokens, in versions; None if unbounded.
        head_ids, head_logprobs, behavior_entropy: `SamplerHead` of each token; None if not recorded.
        experts: `ExpertChoices` to replay for each token; None if not recorded.
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
        temperature: float = 1.0,
        truncated: bool = False,
        gradient_scale: float = 1.0,
        max_staleness: Int[Tensor, " B"] | None = None,
        head_ids: Int[Tensor, "B T k"] | None = None,
        head_logprobs: Float[Tensor, "B T k"] | None = None,
        behavior_entropy: Float[Tensor, "B T"] | None = None,
        experts: Int[Tensor, "B T n k"] | None = None,
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
        self.temperature = temperature
        self.truncated = truncated
        self.gradient_scale = gradient_scale
        self.max_staleness = max_staleness
        self.head_ids, self.head_logprobs, self.behavior_entropy = head_ids, head_logprobs, behavior_entropy
        self.experts = experts
        self.step, self.micro_batch, self.num_micro_batches = step, micro_batch, num_micro_batches

    def __len__(self) -> int:
        return self.input_ids.shape[0]

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
