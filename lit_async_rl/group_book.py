"""Groups between admission and training, and how they come back after a resume or a restarted engine. No threads."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_async_rl.engine import Completion, GenerationRequest, SamplingParams
from lit_async_rl.group_state import SavedGroup
from lit_async_rl.text import TextCodec
from lit_async_rl.types import Prompt, Rollout, RolloutGroup


@dataclass
class OpenGroup:
    """A group between admission and its last reward."""

    index: int
    position: int
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    version: int
    began: float
    completions: dict[int, Completion] = field(default_factory=dict)


@dataclass(frozen=True)
class _Part:
    """What a request stands for, where that is not sample n of group `id`: a sample, and the tokens it has already."""

    index: int
    sample: int
    prefix: Completion | None


class GroupBook:
    """Who is being sampled, who is finished, and who was handed out in this step.

    Args:
        codec: ids to text.
        group_size: completions of each prompt.
        sampling: how they are sampled.
    """

    def __init__(self, codec: TextCodec, group_size: int, sampling: SamplingParams) -> None:
        self.codec, self.group_size, self.sampling = codec, group_size, sampling
        self.unfinished: dict[int, OpenGroup] = {}
        self.finished: dict[int, RolloutGroup] = {}
        self.finished_at: dict[int, float] = {}
        self.in_step: dict[int, tuple[RolloutGroup, int]] = {}  # handed out, but not yet trained on; with its deadline
        self.positions: dict[int, int] = {}  # of the prompts of all of these, in the stream
        self._parts: dict[int, list[_Part]] = {}
        self._next_part = -1  # ids of requests that stand for parts are negative, those of groups are not

    def open(self, index: int, position: int, prompt: Prompt, version: int) -> GenerationRequest:
        """A new group, and the request for it."""
        ids = self.codec.encode(prompt)
        self.positions[index] = position
        self.unfinished[index] = OpenGroup(index, position, prompt, ids, version, time.monotonic())
        return self._request(index, prompt, ids, self.group_size, self.sampling)

    def _request(
        self, index: int, prompt: Prompt, ids: tuple[int, ...], num: int, sampling: SamplingParams
    ) -> GenerationRequest:
        return GenerationRequest(id=index, prompt_ids=ids, num_samples=num, sampling=sampling, prompt=prompt)

    def collect(self, completion: Completion) -> OpenGroup | None:
        """Files a completion; returns its group when that has all of them."""
        if completion.request_id in self._parts:
            completion = _join(self._parts[completion.request_id][completion.sample_index], completion)
        group = self.unfinished.get(completion.request_id)
        if group is None:  # given up meanwhile
            return None
        group.completions[completion.sample_index] = completion
        return group if len(group.completions) == self.group_size else None

    def texts(self, group: OpenGroup) -> list[str]:
        """Completions as text, in order."""
        return [self.codec.decode(group.completions[n].token_ids) for n in range(self.group_size)]

    def close(self, group: OpenGroup, rewards: Sequence[float], generation_s: float) -> None:
        """A group has its rewards."""
        if self.unfinished.pop(group.index, None) is None:
            return
        samples = [group.completions[n] for n in range(self.group_size)]
        rollouts = zip(samples, self.texts(group), rewards, strict=True)
        self.finished[group.index] = RolloutGroup(
            index=group.index,
            prompt=group.prompt,
            prompt_ids=group.prompt_ids,
            rollouts=tuple(_rollout(completion, text, reward) for completion, text, reward in rollouts),
            admitted_version=group.version,
            generation_s=generation_s,
        )
        self.finished_at[group.index] = time.monotonic()

    def hand_out(self, index: int, deadline: int) -> RolloutGroup:
        """A finished group, to be trained on."""
        waited = time.monotonic() - self.finished_at.pop(index)
        group = dataclasses.replace(self.finished.pop(index), queue_s=waited)
        self.in_step[index] = (group, deadline)
        return group

    def begin_step(self) -> None:
        """What was handed out before has been trained on."""
        for index in self.in_step:
            del self.positions[index]
        self.in_step = {}

    def give_up(self, index: int) -> None:
        """Forgets an unfinished group."""
        del self.unfinished[index], self.positions[index]

    # -- checkpoints and restarts -------------------------------------------------------------------------------------

    def save(self, deadlines: Mapping[int, int], partials: Iterable[Completion]) -> list[SavedGroup]:
        """Every group that has a deadline, with all it has so far."""
        done = {**self.finished, **{index: group for index, (group, _) in self.in_step.items()}}
        begun: dict[int, dict[int, Completion]] = {index: {} for index in self.unfinished}
        for partial in partials:
            parts = self._parts.get(partial.request_id)
            joined = _join(parts[partial.sample_index], partial) if parts else partial
            if joined.request_id in begun:
                begun[joined.request_id][joined.sample_index] = joined
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

    def restore(self, saved: SavedGroup, prompt: Prompt) -> OpenGroup:
        """Files a saved group as it was; what was being sampled is asked for by `missing`."""
        ids, now = saved.prompt_ids, time.monotonic()
        group = OpenGroup(saved.index, saved.position, prompt, ids, saved.admitted_version, now)
        self.positions[saved.index] = saved.position
        self.unfinished[saved.index] = group
        whole = [c for c in saved.completions if saved.is_finished or c.finish_reason != "abort"]
        group.completions = {c.sample_index: c for c in whole}
        if saved.is_finished:
            rewards = [group.completions[n].reward for n in range(self.group_size)]
            self.close(group, [reward for reward in rewards if reward is not None], saved.generation_s)
        return group

    def missing(self, group: OpenGroup, partials: Iterable[Completion] = ()) -> list[GenerationRequest]:
        """Requests for the samples a group lacks; those in `partials` go on from what they have."""
        prefixes = {c.sample_index: c for c in partials if c.token_ids and c.finish_reason == "abort"}
        lacking = [n for n in range(self.group_size) if n not in group.completions]
        fresh = [n for n in lacking if n not in prefixes]
        requests = []
        self._parts.pop(group.index, None)
        if fresh:
            self._parts[group.index] = [_Part(group.index, n, None) for n in fresh]
            requests.append(self._request(group.index, group.prompt, group.prompt_ids, len(fresh), self.sampling))
        for n in lacking:
            if n in prefixes:
                prefix = prefixes[n]
                left = self.sampling.max_tokens - len(prefix.token_ids)
                rest = dataclasses.replace(self.sampling, max_tokens=left)
                ids = group.prompt_ids + prefix.token_ids
                requests.append(self._request(self._next_part, group.prompt, ids, 1, rest))
                self._parts[self._next_part] = [_Part(group.index, n, prefix)]
                self._next_part -= 1
        return requests


def _join(part: _Part, rest: Completion) -> Completion:
    """A completion under its group's id and its own number, with the tokens it had before."""
    named = dataclasses.replace(rest, request_id=part.index, sample_index=part.sample)
    if part.prefix is None:
        return named
    return dataclasses.replace(
        named,
        token_ids=part.prefix.token_ids + rest.token_ids,
        logprobs=part.prefix.logprobs + rest.logprobs,
        versions=part.prefix.versions + rest.versions,
    )


def _rollout(completion: Completion, text: str, reward: float) -> Rollout:
    return Rollout(
        completion_ids=completion.token_ids,
        behavior_logprobs=completion.logprobs,
        versions=completion.versions,
        finish_reason=completion.finish_reason,
        text=text,
        reward=reward,
        loss_mask=completion.loss_mask,
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
    )
