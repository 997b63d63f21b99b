"""Groups between admission and training, and their recovery after a resume or an engine restart. Not thread-safe."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lit_async_rl.engines.base import Completion, GenerationRequest, SamplingParams
from lit_async_rl.errors import InvariantError
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.rollouts.sample_requests import SampleRequests
from lit_async_rl.rollouts.serialization import SavedGroup
from lit_async_rl.types import Prompt, Rollout, RolloutGroup


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
        self.codec, self.group_size, self.sampling = codec, group_size, sampling
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
