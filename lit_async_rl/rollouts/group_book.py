"""Groups between admission and training: states, requests to the engine, form in a checkpoint.

Not thread-safe: call everything but `GroupEntry.is_open` with `Producer.changed` held.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from lit_async_rl.errors import InvariantError
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.problem import Prompt
from lit_async_rl.rollouts.packed_branches import PREFIX, pack_branches, pack_turns, unpack_branches, unpack_turns
from lit_async_rl.sampler_records import pack_choices, pack_heads, unpack_choices, unpack_heads
from lit_async_rl.types import Completion, FinishReason, GenerationRequest, Rollout, RolloutGroup, SamplingParams


class GroupState(Enum):
    """States of a group, in order; `DROPPED` may follow the first three."""

    SAMPLING = "sampling"  # lacks completions
    SCORING = "scoring"  # has all completions, and lacks rewards
    FINISHED = "finished"  # may be taken
    TAKEN = "taken"  # handed out, and in the checkpoint of a step that is not done
    TRAINED = "trained"
    DROPPED = "dropped"


@dataclass(kw_only=True)
class GroupEntry:
    """A group from its admission on.

    Attributes:
        index: `RolloutGroup.index`.
        position: of its prompt in the stream.
        prompt_ids: of the prompt.
        version: `RolloutGroup.admitted_version`.
        deadline: last round it may train in; set when it is taken, and in checkpoints.
        state: see `GroupState`.
        rollouts: completions so far, by sample; rollouts once they have rewards.
        result: the finished group, as filters have left it.
        generation_s: seconds from admission to the last token; 0 until then.
        requests: ids of its requests in the engine.
        began: `time.monotonic` of the admission, or of a resume; likewise `finished_at`.
        rewarded: samples whose reward was filed in this run.
        lost: samples given up by the engine, without which the group is complete; sampled again after a resume.
        is_submitted: whether its completions went together to a reward that scores groups.
    """

    index: int
    position: int
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    version: int
    deadline: int = 0
    state: GroupState = GroupState.SAMPLING
    rollouts: dict[int, Completion] = field(default_factory=dict)
    result: RolloutGroup | None = None
    generation_s: float = 0.0
    requests: tuple[int, ...] = ()
    began: float = field(default_factory=time.monotonic, compare=False)
    finished_at: float = field(default=0.0, compare=False)
    rewarded: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set, compare=False)
    is_submitted: bool = field(default=False, compare=False)

    @property
    def is_open(self) -> bool:
        """True while it is being sampled or scored.

        Reward workers read it without the lock; if the group is dropped right after, `GroupBook.reward` ignores the
        reward.
        """
        return self.state in (GroupState.SAMPLING, GroupState.SCORING)

    @property
    def finished(self) -> RolloutGroup:
        """The group that is trained on.

        Raises:
            InvariantError: it is not finished.
        """
        if self.result is None:
            raise InvariantError(f"group {self.index} is in state {self.state.value}, but was read as finished")
        return self.result

    @property
    def newest_version(self) -> int:
        """Newest version of a token of its completions; without any, that of its admission."""
        return max([self.version, *(v for completion in self.known().values() for v in completion.all_versions)])

    def known(self) -> dict[int, Completion]:
        """Its completions by sample, as filters have left them."""
        return self.rollouts if self.result is None else dict(enumerate(self.result.rollouts))


class GroupBook:
    """All groups that were admitted and are not trained on, and their requests.

    Args:
        codec: decodes token ids.
        group_size: completions per prompt.
        sampling: sampling parameters.
        replicate_prompts: one request per completion.

    Attributes:
        groups: by index, in the order of admission; then those taken, in the order of taking.

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
        self.groups: dict[int, GroupEntry] = {}

    def in_state(self, *states: GroupState) -> list[GroupEntry]:
        """Groups that are in one of these states."""
        groups = list(self.groups.values())  # a notice of a long wait reads them in its own thread, without the lock
        return [group for group in groups if group.state in states]

    @property
    def unfinished(self) -> list[GroupEntry]:
        """Groups that are being sampled or scored."""
        return self.in_state(GroupState.SAMPLING, GroupState.SCORING)

    def group_of(self, request_id: int) -> GroupEntry | None:
        """The unfinished group of a request; None if it is gone."""
        index, _ = self.requests.place_of(request_id)
        group = self.groups.get(index)
        return group if group is not None and group.is_open else None

    # -- the life of a group, in this order ---------------------------------------------------------------------------

    def open(self, index: int, position: int, prompt: Prompt, version: int) -> list[GenerationRequest]:
        """Opens a group; returns its requests."""
        prompt_ids = self.codec.encode(prompt)
        group = GroupEntry(index=index, position=position, prompt=prompt, prompt_ids=prompt_ids, version=version)
        self.groups[index] = group
        return self.missing(group)

    def missing(self, group: GroupEntry, partials: Iterable[Completion] = ()) -> list[GenerationRequest]:
        """Requests for the samples that a group lacks; those in `partials` are resumed."""
        lacking = [n for n in range(self.group_size) if n not in group.rollouts and n not in group.lost]
        requests = self.requests.make(group.index, group.prompt, group.prompt_ids, lacking, partials)
        group.requests = tuple(request.id for request in requests)
        return requests

    def collect(self, completion: Completion) -> tuple[GroupEntry, int] | None:
        """Files a completion; returns its group and sample index. None if the group is gone."""
        completion = self.requests.whole(completion)
        group = self.groups.get(completion.request_id)
        if group is None or not group.is_open:
            return None
        self._file(group, completion)
        if group.state is GroupState.SCORING:
            group.generation_s = time.monotonic() - group.began
        return group, completion.sample_index

    def _file(self, group: GroupEntry, completion: Completion) -> None:
        """Adds a completion with its text."""
        has_turns = completion.turns is not None or completion.loss_mask is not None
        stop = () if has_turns else self.sampling.stop  # each turn has ended with one
        text = self.codec.decode(completion.token_ids, stop, self.sampling.stop_token_ids)
        group.rollouts[completion.sample_index] = dataclasses.replace(completion, text=text)
        self._note_complete(group)

    def _note_complete(self, group: GroupEntry) -> None:
        if len(group.rollouts) + len(group.lost) == self.group_size:
            group.state = GroupState.SCORING

    def lose(self, request_id: int, sample: int) -> GroupEntry | None:
        """Files a sample that the engine has given up; returns its group, unless that is gone."""
        index, sample = self.requests.place_of(request_id, sample)
        group = self.groups.get(index)
        if group is None or not group.is_open or sample in group.rollouts:
            return None
        group.lost.add(sample)
        self._note_complete(group)
        if group.state is GroupState.SCORING:
            group.generation_s = time.monotonic() - group.began
        return group

    def finish_if_rewarded(self, group: GroupEntry) -> bool:
        """Finishes a group that has all rewards; returns whether it has."""
        if not group.rewarded or len(group.rewarded) + len(group.lost) < self.group_size:
            return False
        self._finish(group)
        return True

    def reward(self, group: GroupEntry, sample: int, reward: float) -> bool:
        """Files a reward; returns whether the group is finished."""
        if not group.is_open:
            return False
        group.rollouts[sample] = group.rollouts[sample].scored(reward)
        group.rewarded.add(sample)
        return self.finish_if_rewarded(group)

    def _finish(self, group: GroupEntry) -> None:
        rollouts = tuple(rollout for _, rollout in sorted(group.rollouts.items()) if isinstance(rollout, Rollout))
        if len(rollouts) != len(group.rollouts):
            raise InvariantError(f"a completion of group {group.index} was stored without its reward")
        group.result = RolloutGroup(
            index=group.index,
            prompt=group.prompt,
            prompt_ids=group.prompt_ids,
            rollouts=rollouts,
            admitted_version=group.version,
            generation_s=group.generation_s,
        )
        group.state = GroupState.FINISHED
        group.finished_at = time.monotonic()
        self.requests.forget(group.requests)

    def reopen(self, group: GroupEntry) -> None:
        """Undoes the finish of a group: it has all rewards, and is finished again after a resume."""
        group.state = GroupState.SCORING
        group.result = None

    def hand_out(self, index: int, deadline: int, max_staleness: int) -> RolloutGroup:
        """A finished group to train on, with its staleness bound."""
        group = self.groups.pop(index)
        queue_s = time.monotonic() - group.finished_at
        group.result = dataclasses.replace(group.finished, queue_s=queue_s, max_staleness=max_staleness)
        group.state = GroupState.TAKEN
        group.deadline = deadline
        self.groups[index] = group  # behind all others
        return group.result

    def begin_step(self) -> list[GroupEntry]:
        """Removes and returns the groups handed out before, which are trained on."""
        trained = self.in_state(GroupState.TAKEN)
        for group in trained:
            group.state = GroupState.TRAINED
            del self.groups[group.index]
        return trained

    def drop(self, group: GroupEntry) -> tuple[int, ...]:
        """Removes a group not handed out; returns the ids of its running requests."""
        was_open = group.is_open
        group.state = GroupState.DROPPED
        del self.groups[group.index]
        if not was_open:
            return ()
        self.requests.forget(group.requests)
        return group.requests

    def progress_of(self, group: GroupEntry, partials: Iterable[Completion]) -> tuple[float, float]:
        """Mean tokens so far of a group's started rollouts, and seconds since its admission."""
        known = group.known()
        seconds = group.generation_s
        if group.is_open:
            known = self._with_partials(partials)[group.index]
            seconds = time.monotonic() - group.began
        return sum(len(completion.token_ids) for completion in known.values()) / max(1, len(known)), seconds

    def num_tokens(self, group: GroupEntry, partials: Iterable[Completion]) -> int:
        """Tokens that the policy has sampled for a group so far."""
        known = self._with_partials(partials)[group.index] if group.is_open else group.known()
        return sum(completion.num_trained_tokens for completion in known.values())

    def num_running_tokens(self, group: GroupEntry, partials: Iterable[Completion]) -> int:
        """Those of them in completions that the engine has not handed over."""
        return self.num_tokens(group, partials) - self.num_tokens(group, ()) if group.is_open else 0

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, deadlines: Mapping[int, int], partials: Iterable[Completion]) -> list[GroupEntry]:
        """Copies of groups with a deadline, or taken and not trained on, with their completions so far."""
        begun = self._with_partials(partials)
        return [
            dataclasses.replace(
                group,
                rollouts=begun[index] if group.is_open else group.known(),
                deadline=deadlines.get(index, group.deadline),
            )
            for index, group in sorted(self.groups.items())
            # `Ring` may have lost a group that the producer has not dropped yet: it has no deadline any more
            if index in deadlines or group.state is GroupState.TAKEN
        ]

    def _with_partials(self, partials: Iterable[Completion]) -> dict[int, dict[int, Completion]]:
        """Completions of each unfinished group; partial ones include tokens resumed from an earlier run."""
        begun: dict[int, dict[int, Completion]] = {group.index: {} for group in self.unfinished}
        for partial in partials:
            whole = self.requests.whole(partial)
            if whole.request_id in begun:
                begun[whole.request_id][whole.sample_index] = whole
        return {index: known | self.groups[index].rollouts for index, known in begun.items()}

    def restore(self, group: GroupEntry) -> list[GenerationRequest]:
        """Adds a group of `unpack_groups` in its former state; returns requests for unfinished samples."""
        is_finished = group.state is GroupState.FINISHED
        saved = list(group.rollouts.values())
        group.rollouts = {}
        group.state = GroupState.SAMPLING
        self.groups[group.index] = group
        for completion in saved:
            if is_finished or completion.finish_reason != "abort":
                self._file(group, completion)
        if is_finished:
            self._finish(group)
            return []
        return self.missing(group, saved)


# -- Requests of the engine and the samples that they are for, resumed ones included ---------------------------------


@dataclass(frozen=True)
class _Part:
    """Sample that a request stands for, with its resumed tokens, if it is not sample n of group `id`."""

    index: int
    sample: int
    prefix: Completion | None = None


class SampleRequests:
    """Makes requests for missing samples and maps completions back to groups; takes settings of `GroupBook`."""

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

        Samples without tokens share one request, whose id is the group's index. Others have one each, with negative
        ids.
        """
        prefixes = {c.sample_index: c for c in partials if c.token_ids and c.finish_reason == "abort"}
        fresh = [n for n in lacking if n not in prefixes and not self.replicate_prompts]
        is_fresh = set(fresh)  # a group may have a hundred thousand samples
        requests = []
        whole = GenerationRequest(
            id=index,
            prompt_ids=prompt_ids,
            num_samples=len(fresh),
            sampling=self.sampling,
            prompt=prompt,
            session=index,
        )
        self._parts.pop(index, None)
        if fresh:
            if len(fresh) < self.group_size:
                self._parts[index] = [_Part(index, n) for n in fresh]
            requests.append(whole)
        for n in lacking:
            if n in is_fresh:
                continue
            part = _Part(index, n, prefixes.get(n))
            known = () if part.prefix is None else part.prefix.token_ids
            request = whole.rest(-1 - (index * self.group_size + n), known)
            requests.append(request)
            self._parts[request.id] = [part]
        return requests

    def place_of(self, request_id: int, sample: int = 0) -> tuple[int, int]:
        """Group of a request's sample, and its number there; all samples are for the same group."""
        parts = self._parts.get(request_id)
        return (parts[sample].index, parts[sample].sample) if parts else (request_id, sample)

    def whole(self, completion: Completion) -> Completion:
        """A completion, finished or not, under its group's id and sample index, with its resumed tokens."""
        if completion.request_id not in self._parts:
            return completion
        part = self._parts[completion.request_id][completion.sample_index]
        named = dataclasses.replace(completion, request_id=part.index, sample_index=part.sample)
        return named if part.prefix is None else named.continuing(part.prefix)

    def forget(self, request_ids: Iterable[int]) -> None:
        """Removes these request ids; later completions for them are dropped."""
        for request_id in request_ids:
            self._parts.pop(request_id, None)


# -- Groups as tensors of a checkpoint, without pickle ----------------------------------------------------------------
# Prompts are saved as positions in the stream, and their token ids are compared on loading. G groups, R completions of
# all of them (finished or partial), N tokens of all completions.


UNLISTED = ("head_", "expert_", "turn", PREFIX)  # tensors that are unpacked as such
REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort")


def pack_groups(groups: Sequence[GroupEntry]) -> dict[str, Tensor]:
    """Flat tensors: `groups` [G, 7], `generation_s` [G], `rows` [R, 4], `rewards` [R], and [N] for each token.

    If there are any: `turns` (see `pack_turns`), recorded distributions in `head_*`, chosen experts in `expert_*`,
    branches in `branch_*`. `part_<name>` [R] are the parts of the rewards, NaN where one does not apply.
    """
    rows = [completion for group in groups for completion in group.rollouts.values()]
    masks = [c.loss_mask if c.loss_mask is not None else (True,) * len(c.token_ids) for c in rows]
    is_finished = [group.state in (GroupState.FINISHED, GroupState.TAKEN) for group in groups]
    heads = [
        [g.index, g.position, g.version, g.deadline, is_done, len(g.rollouts), len(g.prompt_ids)]
        for g, is_done in zip(groups, is_finished, strict=True)
    ]
    labels = [[c.sample_index, len(c.token_ids), REASONS.index(c.finish_reason), c.loss_mask is not None] for c in rows]
    recorded = pack_heads([c.head for c in rows]) | pack_choices([c.experts for c in rows]) | pack_branches(rows)
    return recorded | {
        "groups": torch.tensor(heads, dtype=torch.long).reshape(-1, 7),
        "generation_s": torch.tensor([group.generation_s for group in groups], dtype=torch.float64),
        "prompt_ids": _flat([g.prompt_ids for g in groups], torch.long),
        "rows": torch.tensor(labels, dtype=torch.long).reshape(-1, 4),
        "rewards": torch.tensor([math.nan if c.reward is None else c.reward for c in rows], dtype=torch.float64),
        "token_ids": _flat([c.token_ids for c in rows], torch.long),
        "logprobs": _flat([c.logprobs for c in rows], torch.float64),
        "versions": _flat([c.versions for c in rows], torch.long),
        "loss_mask": _flat(masks, torch.bool),
        **pack_turns(rows),
        **_pack_parts(rows),
    }


def _pack_parts(rows: Sequence[Completion]) -> dict[str, Tensor]:
    parts = [row.reward_parts or {} for row in rows]
    names = dict.fromkeys(name for row in parts for name in row)
    return {
        f"part_{name}": torch.tensor([row.get(name, math.nan) for row in parts], dtype=torch.float64) for name in names
    }


def _unpack_parts(lists: Mapping[str, list[Any]], row: int) -> dict[str, float] | None:
    values = {name.removeprefix("part_"): rows[row] for name, rows in lists.items() if name.startswith("part_")}
    return {name: value for name, value in values.items() if not math.isnan(value)} or None


def _flat(values: Sequence[Sequence[Any]], dtype: torch.dtype) -> Tensor:
    return torch.tensor([value for row in values for value in row], dtype=dtype)


def unpack_prompts(packed: Mapping[str, Tensor]) -> list[tuple[int, tuple[int, ...]]]:
    """Position in the stream and token ids of the prompt of each group of `pack_groups`."""
    token_ids = packed["prompt_ids"].tolist()
    found = []
    begin = 0
    for head in packed["groups"].tolist():
        position = head[1]
        end = begin + head[6]
        found.append((position, tuple(token_ids[begin:end])))
        begin = end
    return found


def unpack_groups(packed: dict[str, Tensor], prompt_at: Callable[[int], Prompt]) -> list[GroupEntry]:
    """Inverse of `pack_groups`: the saved groups, finished (also those taken) or to be sampled.

    Args:
        packed: tensors of `pack_groups`.
        prompt_at: the prompt at a position of the stream.
    """
    lists = {name: tensor.tolist() for name, tensor in packed.items() if not name.startswith(UNLISTED)}
    size = len(lists["rows"])
    heads = unpack_heads(packed, size)
    experts = unpack_choices(packed, size)
    own = unpack_branches(packed, size)
    groups = []
    token = 0
    prompt_token = 0
    number = 0
    turns = unpack_turns(packed)
    rows = iter(zip(lists["rows"], lists["rewards"], strict=True))
    for head, generation_s in zip(lists["groups"], lists["generation_s"], strict=True):
        index, position, version, deadline, is_finished, num_rows, prompt_length = head
        completions: dict[int, Completion] = {}
        for (sample, length, reason, has_mask), reward in islice(rows, num_rows):
            here = slice(token, token := token + length)
            completion = Completion(
                request_id=index,
                sample_index=sample,
                token_ids=tuple(lists["token_ids"][here]),
                logprobs=tuple(lists["logprobs"][here]),
                versions=tuple(lists["versions"][here]),
                finish_reason=REASONS[reason],
                loss_mask=tuple(lists["loss_mask"][here]) if has_mask else None,
                reward_parts=_unpack_parts(lists, number),
                turns=turns.get(number),
                head=heads[number],
                experts=experts[number],
                **own[number],
            )
            completions[sample] = completion if math.isnan(reward) else completion.scored(reward)
            number += 1
        prompt_ids = lists["prompt_ids"][prompt_token : (prompt_token := prompt_token + prompt_length)]
        groups.append(
            GroupEntry(
                index=index,
                position=position,
                prompt=prompt_at(position),
                prompt_ids=tuple(prompt_ids),
                version=version,
                deadline=deadline,
                state=GroupState.FINISHED if is_finished else GroupState.SAMPLING,
                rollouts=completions,
                generation_s=generation_s,
            )
        )
    return groups
