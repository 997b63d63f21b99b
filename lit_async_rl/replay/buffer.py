"""Replay buffer beside the producer, for losses that accept data of any age.

A step of B groups has m B fresh ones (m is the "most on-policy" fraction of TBA, arXiv:2503.18929), and others drawn
from earlier steps. Fresh groups keep the producer's staleness bound; replayed ones have their own, `max_staleness`
here, enforced by dropping older ones.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lit_async_rl.problem import Prompt
from lit_async_rl.sampler_records import ExpertChoices, SamplerHead
from lit_async_rl.types import Branch, Rollout, RolloutGroup, TokenRow, Turn
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.plain import plain

# -- Sampling weights of the replay buffer ----------------------------------------------------------------------------


class ReplayWeighting(ABC):
    """Log-weights of prompts and completions in the draws, up to an additive constant."""

    def prompt_log_weight(self, age: int) -> float:
        """Log-weight of a prompt with a newest completion of `age` versions."""
        return 0.0

    @abstractmethod
    def rollout_log_weight(self, reward: float, age: int) -> float:
        """Log-weight of a completion within its prompt."""


@dataclass(frozen=True)
class UniformReplay(ReplayWeighting):
    """Uniform over prompts and over the completions of a prompt."""

    def rollout_log_weight(self, reward: float, age: int) -> float:
        """0."""
        return 0.0


@dataclass(frozen=True)
class RewardReplay(ReplayWeighting):
    """Completions in proportion to exp(inverse_temperature * reward), prompts uniformly, as in TBA.

    Args:
        inverse_temperature: 0 is `UniformReplay`.
    """

    inverse_temperature: float = 1.0

    def rollout_log_weight(self, reward: float, age: int) -> float:
        """inverse_temperature * reward."""
        return self.inverse_temperature * reward


@dataclass(frozen=True)
class RecencyReplay(ReplayWeighting):
    """Weights of prompts and completions halve every `half_life` versions of age.

    Args:
        half_life: in versions.

    Raises:
        ValueError: `half_life` is not positive.
    """

    half_life: float = 10.0

    def __post_init__(self) -> None:
        check_range("RecencyReplay", "positive", half_life=self.half_life)

    def prompt_log_weight(self, age: int) -> float:
        """-log 2 * age / half_life."""
        return -math.log(2) * age / self.half_life

    def rollout_log_weight(self, reward: float, age: int) -> float:
        """-log 2 * age / half_life."""
        return self.prompt_log_weight(age)


_Key = tuple[tuple[int, ...], str | None]  # prompt ids and answer
Snapshot = tuple[list["_Stored"], list[_Key], dict[str, int], Any]  # entries, order of prompts, counts, random state
log = logging.getLogger(__name__)
EARLIER_NAMES = {"completion_ids": "token_ids", "behavior_logprobs": "logprobs"}  # of fields in older checkpoints
Row = TypeVar("Row", bound=TokenRow)
_MIN_ROLLOUTS = 2  # per prompt, because a single completion has no advantage


@dataclass(frozen=True, kw_only=True)
class ReplayStats:
    """Totals since the start, and the draws of the last step.

    Attributes:
        num_rollouts: stored completions.
        num_prompts: their prompts.
        num_added: new completions.
        num_duplicates: completions that replaced an equal older one.
        num_evicted: completions removed because the buffer was full.
        num_expired: completions removed because they were too old.
        num_replayed: completions of the last step that came from the buffer.
        replayed_staleness: their mean age, in versions.
        replayed_staleness_max: their maximum age.
    """

    num_rollouts: int
    num_prompts: int
    num_added: int
    num_duplicates: int
    num_evicted: int
    num_expired: int
    num_replayed: int
    replayed_staleness: float
    replayed_staleness_max: int


@dataclass(frozen=True)
class _Stored:
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    index: int
    rollout: Rollout
    version: int  # of its oldest token


class ReplayBuffer:
    """Stores completions by prompt; of equal completions only the newest.

    Runs in the trainer's thread only, and therefore has no lock.

    Args:
        fresh_fraction: share m of a step's groups that are new; the engine samples only those.
        capacity: maximum number of completions; first in, first out.
        max_per_prompt: maximum number of completions per prompt.
        max_staleness: age in versions after which a completion is dropped.
        min_prompts: stored prompts at which replay starts; until then steps have fresh groups only.
        weighting: sampling weights; None is `UniformReplay()`.
        seed: seed of the draws.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        fresh_fraction: float = 0.5,
        capacity: int = 10_000,
        max_per_prompt: int = 100,
        max_staleness: int = 100,
        min_prompts: int = 1,
        weighting: ReplayWeighting | None = None,
        seed: int = 0,
    ) -> None:
        check_range("data.replay", "in (0, 1]", fresh_fraction=fresh_fraction)
        check_range("data.replay", "integer >= 1", capacity=capacity, max_per_prompt=max_per_prompt)
        check_range("data.replay", "integer >= 1", min_prompts=min_prompts)
        check_range("data.replay", "integer", seed=seed)
        check_range("data.replay", "integer >= 0", max_staleness=max_staleness)
        self.fresh_fraction = fresh_fraction
        self.capacity = capacity
        self.max_per_prompt = max_per_prompt
        self.max_staleness = max_staleness
        self.min_prompts = min_prompts
        self.weighting = weighting or UniformReplay()
        self._random = random.Random(seed)
        self._prompts: dict[_Key, dict[tuple[int, ...], _Stored]] = {}
        self._order: dict[tuple[_Key, tuple[int, ...]], None] = {}  # in order of arrival
        self._counts = dict.fromkeys(("added", "duplicates", "evicted", "expired"), 0)
        self._replayed_ages: list[int] = []

    def __len__(self) -> int:
        return len(self._order)

    def num_fresh(self, groups_per_step: int) -> int:
        """Number of groups of a step from the engine, at least one."""
        return max(1, round(self.fresh_fraction * groups_per_step))

    def mix(self, fresh: Sequence[RolloutGroup], groups_per_step: int, version: int) -> list[RolloutGroup]:
        """Groups of a step: fresh ones and draws from the buffer; then adds the fresh ones to it."""
        self.expire(version)
        replayed: list[RolloutGroup] = []
        if len(self._prompts) >= self.min_prompts:
            size = max(len(group.rollouts) for group in fresh)
            replayed = self.sample(
                groups_per_step - len(fresh), size, version, exclude={_key(group) for group in fresh}
            )
        self._replayed_ages = [version - _version(r, g) for g in replayed for r in g.rollouts]
        for group in fresh:
            self.add(group)
        return [*fresh, *replayed]

    def add(self, group: RolloutGroup) -> None:
        """Adds every completion; replaces equal ones."""
        key = _key(group)
        for rollout in group.rollouts:
            ids = _all_ids(rollout)
            self._counts["duplicates" if (key, ids) in self._order else "added"] += 1
            self._remove(key, ids)
            stored = _Stored(
                group.prompt, group.prompt_ids, group.index, rollout=rollout, version=_version(rollout, group)
            )
            self._prompts.setdefault(key, {})[ids] = stored
            self._order[key, ids] = None
            self._evict(key)

    def expire(self, version: int) -> None:
        """Drops completions older than `max_staleness` at `version`."""
        old = [(key, ids) for key, ids in self._order if version - self._prompts[key][ids].version > self.max_staleness]
        for key, ids in old:
            self._remove(key, ids)
        self._counts["expired"] += len(old)

    def discard_after(self, version: int) -> None:
        """Drops completions with a token of a later version, which a rollback has discarded."""
        for key, ids in list(self._order):
            if any(v > version for v in self._prompts[key][ids].rollout.all_versions):
                self._remove(key, ids)

    def sample(
        self, num_groups: int, group_size: int, version: int, exclude: set[_Key] | None = None
    ) -> list[RolloutGroup]:
        """Groups of different prompts, drawn without replacement; fewer if too few are stored."""
        ages = {
            key: version - max(stored.version for stored in rollouts.values())
            for key, rollouts in self._prompts.items()
            if len(rollouts) >= _MIN_ROLLOUTS and key not in (exclude or ())
        }
        keys = self._draw(list(ages), [self.weighting.prompt_log_weight(age) for age in ages.values()], num_groups)
        return [self._sample_group(key, group_size, version) for key in keys]

    def _sample_group(self, key: _Key, group_size: int, version: int) -> RolloutGroup:
        stored = list(self._prompts[key].values())
        weights = [self.weighting.rollout_log_weight(s.rollout.reward, version - s.version) for s in stored]
        drawn = self._draw(stored, weights, group_size)
        return RolloutGroup(
            index=max(s.index for s in stored),
            prompt=drawn[0].prompt,
            prompt_ids=drawn[0].prompt_ids,
            rollouts=tuple(s.rollout for s in drawn),
            admitted_version=min(s.version for s in drawn),
            max_staleness=self.max_staleness,
        )

    def _draw(self, items: Sequence[Any], log_weights: Sequence[float], number: int) -> list[Any]:
        """Draws without replacement in proportion to the weights (Gumbel top-k)."""
        keys = [w - math.log(self._random.expovariate(1) + 1e-300) for w in log_weights]
        top = sorted(range(len(items)), key=lambda n: -keys[n])[: max(0, number)]
        return [items[n] for n in top]

    def clear(self) -> None:
        """Removes a checkpoint's completions, which were scored or recorded with other settings."""
        log.warning(
            "resume: the checkpoint's replay buffer (%d completions) is discarded, because the completions were scored "
            "or recorded with other settings",
            len(self),
        )
        self._prompts = {}
        self._order = {}

    def _evict(self, key: _Key) -> None:
        before = len(self)
        while len(self._prompts[key]) > self.max_per_prompt:
            self._remove(key, next(iter(self._prompts[key])))
        while len(self) > self.capacity:
            self._remove(*next(iter(self._order)))
        self._counts["evicted"] += before - len(self)

    def _remove(self, key: _Key, ids: tuple[int, ...]) -> None:
        if (key, ids) in self._order:
            del self._order[key, ids], self._prompts[key][ids]
            if not self._prompts[key]:
                del self._prompts[key]

    def stats(self) -> ReplayStats:
        """Totals, and the draws of the last step."""
        ages = self._replayed_ages
        return ReplayStats(
            num_rollouts=len(self),
            num_prompts=len(self._prompts),
            num_replayed=len(ages),
            replayed_staleness=sum(ages) / max(1, len(ages)),
            replayed_staleness_max=max(ages, default=0),
            **{f"num_{name}": count for name, count in self._counts.items()},
        )

    def snapshot(self) -> Snapshot:
        """The present state, for a later `state_dict`."""
        entries = [self._prompts[key][ids] for key, ids in self._order]
        return entries, list(self._prompts), dict(self._counts), self._random.getstate()

    def state_dict(self, snapshot: Snapshot | None = None) -> dict[str, Any]:
        """Stored completions in order of arrival and the random state, as plain containers.

        Args:
            snapshot: earlier state to save; None is the present one.
        """
        entries, prompts, counts, random_state = snapshot or self.snapshot()  # draws depend on the order of prompts
        stored = [dataclasses.asdict(entry) for entry in entries]
        for entry in stored:
            entry["prompt"]["metadata"] = plain(entry["prompt"]["metadata"])
        return {"stored": stored, "prompts": prompts, "counts": counts, "random": random_state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._prompts = {key: {} for key in state["prompts"]}
        self._order = {}
        for entry in state["stored"]:
            rollout = _restored(Rollout, entry["rollout"])
            stored = _Stored(**{**entry, "prompt": Prompt(**entry["prompt"]), "rollout": rollout})
            key = (stored.prompt_ids, stored.prompt.answer)
            ids = _all_ids(stored.rollout)
            self._prompts[key][ids] = stored
            self._order[key, ids] = None
        self._counts = dict(state["counts"])
        self._random.setstate(state["random"])
        for key in list(self._prompts):  # the limits may be lower than before the resume
            if key in self._prompts:
                self._evict(key)


def _key(group: RolloutGroup) -> _Key:
    return group.prompt_ids, group.prompt.answer


def _all_ids(rollout: Rollout) -> tuple[int, ...]:
    """Tokens of all rows, which identify a prompt's completions; -1 between rows and before another prompt."""
    ids = rollout.token_ids
    if rollout.prompt_ids is not None:
        ids = (*rollout.prompt_ids, -1, *ids)
    for branch in rollout.branches:
        ids = (*ids, -1, *branch.prompt_ids, -1, *branch.token_ids)
    return ids


def _restored(kind: type[Row], fields: dict[str, Any]) -> Row:
    """A row of a checkpoint, perhaps an older one, where some fields have other names or are missing."""
    given = {EARLIER_NAMES.get(name, name): value for name, value in fields.items()}
    if given.get("head") is not None:
        given["head"] = SamplerHead(**given["head"])
    if given.get("experts") is not None:
        given["experts"] = ExpertChoices(**given["experts"])
    if given.get("turns") is not None:
        given["turns"] = tuple(Turn(**turn) for turn in given["turns"])
    if "branches" in given:
        given["branches"] = tuple(_restored(Branch, branch) for branch in given["branches"])
    return kind(**given)


def _version(rollout: Rollout, group: RolloutGroup) -> int:
    return min(rollout.all_versions, default=group.admitted_version)
