"""Groups between admission and training, and their recovery after a resume or an engine restart. Not thread-safe."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from lit_async_rl.errors import InvariantError
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.types import (
    Completion,
    ExpertChoices,
    FinishReason,
    GenerationRequest,
    Prompt,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Turn,
    join_heads,
    pack_choices,
    pack_heads,
    unpack_choices,
    unpack_heads,
)

# -- Mapping between requests of the engine and the samples of groups, including resumed ones -------------------------


@dataclass(frozen=True)
class _Part:
    """Sample that a request stands for, with its resumed tokens, if it is not sample n of group `id`."""

    index: int
    sample: int
    prefix: Completion | None = None


class SampleRequests:
    """Makes requests for missing samples and maps completions back to groups.

    Args:
        group_size: completions per prompt.
        sampling: sampling parameters.
        replicate_prompts: one request per completion.
    """

    def __init__(self, group_size: int, sampling: SamplingParams, replicate_prompts: bool) -> None:
        self.group_size = group_size
        self.sampling = sampling
        self.replicate_prompts = replicate_prompts
        self._parts: dict[int, list[_Part]] = {}

    def make(
        self,
        index: int,
        prompt: Prompt,
        prompt_ids: tuple[int, ...],
        lacking: Sequence[int],
        partials: Iterable[Completion],
    ) -> list[GenerationRequest]:
        """Requests for the samples `lacking` of group `index`; those in `partials` are resumed.

        Samples without tokens share one request whose id is the group's index. Others have a request each, with
        negative ids.
        """
        prefixes = {c.sample_index: c for c in partials if c.token_ids and c.finish_reason == "abort"}
        fresh = [n for n in lacking if n not in prefixes and not self.replicate_prompts]
        is_fresh = set(fresh)  # a group may have a hundred thousand samples
        requests = []
        self._parts.pop(index, None)
        if fresh:
            if len(fresh) < self.group_size:
                self._parts[index] = [_Part(index, n) for n in fresh]
            requests.append(
                GenerationRequest(
                    id=index,
                    prompt_ids=prompt_ids,
                    num_samples=len(fresh),
                    sampling=self.sampling,
                    prompt=prompt,
                    session=index,
                )
            )
        for n in lacking:
            if n in is_fresh:
                continue
            part = _Part(index, n, prefixes.get(n))
            known = () if part.prefix is None else part.prefix.token_ids
            rest = dataclasses.replace(self.sampling, max_tokens=self.sampling.max_tokens - len(known))
            request_id = -1 - (index * self.group_size + n)
            requests.append(
                GenerationRequest(
                    id=request_id,
                    prompt_ids=prompt_ids + known,
                    num_samples=1,
                    sampling=rest,
                    prompt=prompt,
                    num_resumed=len(known),
                    session=index,
                )
            )
            self._parts[request_id] = [part]
        return requests

    def index_of(self, request_id: int) -> int:
        """The group that a request is for."""
        parts = self._parts.get(request_id)
        return parts[0].index if parts else request_id

    def whole(self, completion: Completion) -> Completion:
        """A completion, finished or not, under its group's id and sample index, with its resumed tokens."""
        if completion.request_id not in self._parts:
            return completion
        part = self._parts[completion.request_id][completion.sample_index]
        named = dataclasses.replace(completion, request_id=part.index, sample_index=part.sample)
        if part.prefix is None:
            return named
        heads = [head for head in (part.prefix.head, completion.head) if head is not None]
        return dataclasses.replace(
            named,
            head=join_heads(heads) if len(heads) == 2 else None,
            experts=_continued(part.prefix, completion),
            token_ids=part.prefix.token_ids + completion.token_ids,
            logprobs=part.prefix.logprobs + completion.logprobs,
            versions=part.prefix.versions + completion.versions,
        )

    def forget(self, request_ids: Iterable[int]) -> None:
        """Removes these request ids; later completions for them are dropped."""
        for request_id in request_ids:
            self._parts.pop(request_id, None)


def _continued(prefix: Completion, rest: Completion) -> ExpertChoices | None:
    """Experts of a resumed completion: of each token when the next one was sampled."""
    if prefix.experts is None or rest.experts is None:
        return None
    return prefix.experts.continued(rest.experts)


# -- Groups admitted but not trained on as tensors of a checkpoint, without pickle ------------------------------------
# Prompts are saved as positions in the stream, and their token ids are compared on loading. G groups, R completions of
# all of them (finished or partial), N tokens of all completions.


REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort")


@dataclass(frozen=True, kw_only=True)
class SavedGroup:
    """An admitted group.

    Attributes:
        index: `RolloutGroup.index`; `position`: of its prompt in the stream; `deadline`: last round it may train in.
        is_finished: whether all completions are present and scored.
        completions: finished ones, and partial ones with `finish_reason` `abort`.
    """

    index: int
    position: int
    prompt_ids: tuple[int, ...]
    admitted_version: int
    deadline: int
    generation_s: float = 0.0
    is_finished: bool = False
    completions: tuple[Completion, ...] = field(default=())


def pack_groups(groups: Sequence[SavedGroup]) -> dict[str, Tensor]:
    """Flat tensors: `groups` [G, 7], `generation_s` [G], `rows` [R, 4], `rewards` [R], and [N] for each token.

    Rollouts of several turns have `turns` [K, 3], row, end and state of each, and `turn_rewards` [K]. Recorded
    distributions are in `head_*` and chosen experts in `expert_*`, if there are any.
    """
    rows = [completion for group in groups for completion in group.completions]
    masks = [c.loss_mask if c.loss_mask is not None else (True,) * len(c.token_ids) for c in rows]
    heads = [
        [g.index, g.position, g.admitted_version, g.deadline, g.is_finished, len(g.completions), len(g.prompt_ids)]
        for g in groups
    ]
    labels = [[c.sample_index, len(c.token_ids), REASONS.index(c.finish_reason), c.loss_mask is not None] for c in rows]
    turns = [(n, turn) for n, c in enumerate(rows) if c.turns is not None for turn in c.turns]
    no_reward = float("nan")
    recorded = pack_heads([c.head for c in rows]) | pack_choices([c.experts for c in rows])
    return recorded | {
        "groups": torch.tensor(heads, dtype=torch.long).reshape(-1, 7),
        "generation_s": torch.tensor([group.generation_s for group in groups], dtype=torch.float64),
        "prompt_ids": _flat([g.prompt_ids for g in groups], torch.long),
        "rows": torch.tensor(labels, dtype=torch.long).reshape(-1, 4),
        "rewards": torch.tensor([no_reward if c.reward is None else c.reward for c in rows], dtype=torch.float64),
        "token_ids": _flat([c.token_ids for c in rows], torch.long),
        "logprobs": _flat([c.logprobs for c in rows], torch.float64),
        "versions": _flat([c.versions for c in rows], torch.long),
        "loss_mask": _flat(masks, torch.bool),
        "turns": torch.tensor([[n, turn.end, turn.state] for n, turn in turns], dtype=torch.long).reshape(-1, 3),
        "turn_rewards": torch.tensor([turn.reward for _, turn in turns], dtype=torch.float64),
    }


def _flat(values: Sequence[Sequence[Any]], dtype: torch.dtype) -> Tensor:
    return torch.tensor([value for row in values for value in row], dtype=dtype)


def unpack_groups(packed: dict[str, Tensor]) -> list[SavedGroup]:
    """Inverse of `pack_groups`: the saved groups."""
    lists = {name: tensor.tolist() for name, tensor in packed.items() if not name.startswith(("head_", "expert_"))}
    size = len(lists["rows"])
    heads = unpack_heads(packed, size)
    experts = unpack_choices(packed, size)
    groups = []
    token = 0
    prompt_token = 0
    number = 0
    turns: dict[int, list[Turn]] = {}
    for (row, end, state), reward in zip(lists["turns"], lists["turn_rewards"], strict=True):
        turns.setdefault(row, []).append(Turn(end, reward, state))
    rows = iter(zip(lists["rows"], lists["rewards"], strict=True))
    for head, generation_s in zip(lists["groups"], lists["generation_s"], strict=True):
        index, position, version, deadline, is_finished, num_rows, prompt_length = head
        completions = []
        for (sample, length, reason, has_mask), reward in islice(rows, num_rows):
            here = slice(token, token := token + length)
            completions.append(
                Completion(
                    request_id=index,
                    sample_index=sample,
                    token_ids=tuple(lists["token_ids"][here]),
                    logprobs=tuple(lists["logprobs"][here]),
                    versions=tuple(lists["versions"][here]),
                    finish_reason=REASONS[reason],
                    loss_mask=tuple(lists["loss_mask"][here]) if has_mask else None,
                    reward=None if reward != reward else reward,
                    turns=tuple(turns[number]) if number in turns else None,
                    head=heads[number],
                    experts=experts[number],
                )
            )
            number += 1
        prompt_ids = lists["prompt_ids"][prompt_token : (prompt_token := prompt_token + prompt_length)]
        groups.append(
            SavedGroup(
                index=index,
                position=position,
                prompt_ids=tuple(prompt_ids),
                admitted_version=version,
                deadline=deadline,
                generation_s=generation_s,
                is_finished=bool(is_finished),
                completions=tuple(completions),
            )
        )
    return groups


@dataclass
class OpenGroup:
    """A group between admission and its last reward.

    Attributes:
        requests: their ids in the engine.
        completions: received so far, by sample; rewards are added to them.
        texts: of these completions.
        rewarded: samples whose reward has been filed.
        generation_s: seconds from admission to the last token.
    """

    index: int
    position: int
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    version: int
    began: float
    requests: tuple[int, ...] = ()
    completions: dict[int, Completion] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    rewarded: set[int] = field(default_factory=set)
    generation_s: float = 0.0


class GroupBook:
    """Groups being sampled, finished, and handed out in this step.

    Args:
        codec: decodes token ids.
        group_size: completions per prompt.
        sampling: sampling parameters.
        replicate_prompts: one request per completion.

    Raises:
        ValueError: a stop string is a special token.
    """

    def __init__(
        self, codec: TextCodec, group_size: int, sampling: SamplingParams, replicate_prompts: bool = False
    ) -> None:
        codec.check_stop(sampling.stop, sampling.stop_token_ids)
        self.codec = codec
        self.group_size = group_size
        self.sampling = sampling
        self.requests = SampleRequests(group_size, sampling, replicate_prompts)
        self.unfinished: dict[int, OpenGroup] = {}
        self.finished: dict[int, RolloutGroup] = {}
        self.finished_at: dict[int, float] = {}
        self.in_step: dict[int, tuple[RolloutGroup, int]] = {}  # handed out, but not yet trained on; with its deadline
        self.positions: dict[int, int] = {}  # of the prompts of all of these, in the stream

    def open(self, index: int, position: int, prompt: Prompt, version: int) -> list[GenerationRequest]:
        """Opens a group; returns it with its requests."""
        group = OpenGroup(index, position, prompt, self.codec.encode(prompt), version, time.monotonic())
        self.positions[index] = position
        self.unfinished[index] = group
        return self.missing(group)

    def collect(self, completion: Completion) -> tuple[OpenGroup, int] | None:
        """Files a completion; returns its group and sample index. None if the group is gone."""
        completion = self.requests.whole(completion)
        group = self.unfinished.get(completion.request_id)
        if group is None:
            return None
        self._file(group, completion)
        if len(group.completions) == self.group_size:
            group.generation_s = time.monotonic() - group.began
        return group, completion.sample_index

    def group_of(self, request_id: int) -> OpenGroup | None:
        """The unfinished group that a request belongs to; None if it is gone."""
        return self.unfinished.get(self.requests.index_of(request_id))

    @property
    def lacking(self) -> list[OpenGroup]:
        """Groups with completions missing; all other unfinished ones are being scored."""
        groups = list(self.unfinished.values())  # a notice of a long wait reads it in its own thread, without the lock
        return [group for group in groups if len(group.completions) < self.group_size]

    def _file(self, group: OpenGroup, completion: Completion) -> None:
        group.completions[completion.sample_index] = completion
        stop = self.sampling.stop if completion.turns is None else ()  # else each turn has ended with one
        group.texts[completion.sample_index] = self.codec.decode(
            completion.token_ids, stop, self.sampling.stop_token_ids
        )

    def is_open(self, group: OpenGroup) -> bool:
        """Whether a group is still being sampled or scored, and was not dropped."""
        return self.unfinished.get(group.index) is group

    def reward(self, group: OpenGroup, sample: int, reward: float) -> bool:
        """Files a reward; returns whether the group is finished."""
        if not self.is_open(group):
            return False
        group.completions[sample] = dataclasses.replace(group.completions[sample], reward=reward)
        group.rewarded.add(sample)
        if len(group.rewarded) < self.group_size:
            return False
        self._close(group)
        return True

    def _close(self, group: OpenGroup) -> None:
        self._remove(group)
        samples = range(self.group_size)
        self.finished[group.index] = RolloutGroup(
            index=group.index,
            prompt=group.prompt,
            prompt_ids=group.prompt_ids,
            rollouts=tuple(rollout_of(group.completions[n], group.texts[n]) for n in samples),
            admitted_version=group.version,
            generation_s=group.generation_s,
        )
        self.finished_at[group.index] = time.monotonic()

    def _remove(self, group: OpenGroup) -> None:
        del self.unfinished[group.index]
        self.requests.forget(group.requests)

    def hand_out(self, index: int, deadline: int, max_staleness: int) -> RolloutGroup:
        """A finished group to train on, with its staleness bound."""
        waited = time.monotonic() - self.finished_at.pop(index)
        group = dataclasses.replace(self.finished.pop(index), queue_s=waited, max_staleness=max_staleness)
        self.in_step[index] = (group, deadline)
        return group

    def begin_step(self) -> None:
        """Marks the groups handed out before as trained on."""
        for index in self.in_step:
            del self.positions[index]
        self.in_step = {}

    def give_up(self, index: int) -> tuple[int, ...]:
        """Drops a group that was not handed out; returns the ids of its running requests."""
        del self.positions[index]
        if index in self.finished:
            del self.finished[index], self.finished_at[index]
            return ()
        group = self.unfinished[index]
        self._remove(group)
        return group.requests

    def progress_of(self, index: int, partials: Iterable[Completion]) -> tuple[float, float]:
        """Mean tokens so far of a group's started rollouts, and seconds since its admission."""
        if index in self.finished:
            group = self.finished[index]
            return group.num_tokens / len(group.rollouts), group.generation_s
        known = self._begun(partials)[index] | self.unfinished[index].completions
        seconds = time.monotonic() - self.unfinished[index].began
        return sum(len(completion.token_ids) for completion in known.values()) / max(1, len(known)), seconds

    # -- checkpoints and restarts -------------------------------------------------------------------------------------

    def save(self, deadlines: Mapping[int, int], partials: Iterable[Completion]) -> list[SavedGroup]:
        """All groups with a deadline, with their completions so far."""
        done = {**self.finished, **{index: group for index, (group, _) in self.in_step.items()}}
        begun = self._begun(partials)
        groups = []
        for index, deadline in sorted(deadlines.items()):
            group: Any = done.get(index) or self.unfinished[index]
            known: dict[str, Any] = dict(index=index, position=self.positions[index], prompt_ids=group.prompt_ids)
            if index in done:
                known |= dict(admitted_version=group.admitted_version, generation_s=group.generation_s)
                completions = [_completion(index, n, rollout) for n, rollout in enumerate(group.rollouts)]
            else:
                known |= dict(admitted_version=group.version)
                completions = [*(begun[index] | group.completions).values()]
            is_finished = index in done
            groups.append(
                SavedGroup(**known, deadline=deadline, is_finished=is_finished, completions=tuple(completions))
            )
        return groups

    def _begun(self, partials: Iterable[Completion]) -> dict[int, dict[int, Completion]]:
        """Partial completions of each unfinished group, with tokens resumed from an earlier run."""
        begun: dict[int, dict[int, Completion]] = {index: {} for index in self.unfinished}
        for partial in partials:
            whole = self.requests.whole(partial)
            if whole.request_id in begun:
                begun[whole.request_id][whole.sample_index] = whole
        return begun

    def restore(self, saved: SavedGroup, prompt: Prompt) -> OpenGroup:
        """Restores a saved group; `missing` requests its unfinished samples."""
        group = OpenGroup(
            saved.index, saved.position, prompt, saved.prompt_ids, saved.admitted_version, time.monotonic()
        )
        self.positions[saved.index] = saved.position
        self.unfinished[saved.index] = group
        for completion in saved.completions:
            if saved.is_finished or completion.finish_reason != "abort":
                self._file(group, completion)
        if len(group.completions) == self.group_size:
            group.generation_s = saved.generation_s
        if saved.is_finished:
            self._close(group)
        return group

    def missing(self, group: OpenGroup, partials: Iterable[Completion] = ()) -> list[GenerationRequest]:
        """Requests for the samples that a group lacks; those in `partials` are resumed."""
        lacking = [n for n in range(self.group_size) if n not in group.completions]
        requests = self.requests.make(group.index, group.prompt, group.prompt_ids, lacking, partials)
        group.requests = tuple(request.id for request in requests)
        return requests


def rollout_of(completion: Completion, text: str) -> Rollout:
    """A completion with its reward as a rollout; `text` is what the reward has read.

    Raises:
        InvariantError: it has no reward.
    """
    if completion.reward is None:
        raise InvariantError(f"a completion of group {completion.request_id} was filed without its reward")
    turns = completion.turns
    return Rollout(
        completion_ids=completion.token_ids,
        behavior_logprobs=completion.logprobs,
        versions=completion.versions,
        finish_reason=completion.finish_reason,
        text=text,
        reward=float(completion.reward),  # of numpy, from some engines: checkpoints hold none
        loss_mask=completion.loss_mask,
        turns=None if turns is None else tuple(dataclasses.replace(turn, reward=float(turn.reward)) for turn in turns),
        head=completion.head,
        experts=completion.experts,
    )


def _completion(index: int, sample: int, rollout: Rollout) -> Completion:
    return Completion(
        request_id=index,
        sample_index=sample,
        token_ids=rollout.completion_ids,
        logprobs=rollout.behavior_logprobs,
        versions=rollout.versions,
        finish_reason=rollout.finish_reason,
        loss_mask=rollout.loss_mask,
        reward=rollout.reward,
        turns=rollout.turns,
        head=rollout.head,
        experts=rollout.experts,
    )
