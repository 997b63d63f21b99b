"""Several named rewards of one completion, and their combination into the training reward."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary

from lit_async_rl.errors import RewardError
from lit_async_rl.problem import Prompt, Score
from lit_async_rl.rewards.calls import NamedErrors, is_async, reward_name
from lit_async_rl.rewards.forms import TakesAnswerField, as_reward_function, wanted, wants
from lit_async_rl.rewards.scorer import MAX_QUEUED
from lit_async_rl.utils.checks import as_reward, check_choice, check_range
from lit_async_rl.utils.elsewhere import Rebuildable

Part = Callable[..., float | Awaitable[float | None] | None]


class CombinedReward:
    """A reward made of named parts.

    A part that returns None does not apply to the completion: it is omitted from the sum, the product and the logged
    means (`reward/part/<name>`). Parts are stored with their rollout, in checkpoints, tapes, samples and the report.
    `GDPO` normalises each part within its group, instead of the combination.

    Example:
        ```python
        reward = CombinedReward(
            {"answer": last_number, "format": has_tags, "length": is_short},
            weights={"length": 0.1},
            gates={"format": 1.0},
        )
        ```
        An answer counts in the right format only; a short completion adds 0.1.

    Args:
        rewards: parts by name: `reward(prompt, completion) -> float | None`, plain or `async`. Names consist of
            letters, digits, `_` and `-`.
        weights: weight of each part in the sum; 1 by default.
        combine: `sum`: sum over the parts of weight times reward. `product`: product of the parts, without weights.
        gates: minimum rewards of some parts; if one is not reached, all parts without a gate count as 0 in the
            combination. Conditioned rewards of GDPO, arXiv:2601.05242, section 3.
        success: part compared with the success threshold, for pass@k and pass rates; None is the only grader among the
            parts, or else the combined reward.

    Raises:
        ValueError: there are no parts, a setting names an unknown part, or a setting is out of range.
    """

    def __init__(
        self,
        rewards: Mapping[str, Part],
        weights: Mapping[str, float] | None = None,
        combine: Literal["sum", "product"] = "sum",
        gates: Mapping[str, float] | None = None,
        success: str | None = None,
    ) -> None:
        if not rewards:
            raise ValueError("data.reward must hold at least one reward, got an empty mapping")
        for name, reward in rewards.items():
            if not name or not name.replace("_", "").replace("-", "").isalnum():
                raise ValueError(
                    f"data.reward: names of rewards must consist of letters, digits, _ and -, got {name!r}"
                )
            if not callable(reward):
                raise ValueError(
                    f"data.reward.{name} must be a function, reward(prompt, completion) -> float, got {reward!r}"
                )
        check_choice("data.reward", ("sum", "product"), combine=combine)
        if combine == "product" and weights:
            raise ValueError("data.reward.weights applies to combine=sum only; a product takes no weights")
        named = {"weights": weights or {}, "gates": gates or {}, "success": [] if success is None else [success]}
        for setting, names in named.items():
            if unknown := sorted(set(names) - set(rewards)):
                parts = ", ".join(rewards)
                raise ValueError(
                    f"data.reward.{setting} refers to {', '.join(unknown)}, but the rewards are named {parts}"
                )
        check_range("data.reward.weights", "finite", **(weights or {}))
        check_range("data.reward.gates", "finite", **(gates or {}))
        self.rewards = {name: as_reward_function(reward) for name, reward in rewards.items()}
        self.weights = dict(weights or {})
        self.combine = combine
        self.gates = dict(gates or {})
        self.success = success
        self._limits: dict[str, int] = {}  # of concurrent calls, by part
        # One set per event loop, since a blocked loop is replaced; weak, to end with its loop.
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Semaphore]] = WeakKeyDictionary()

    def __call__(self, prompt: Prompt, completion: str, token_ids: Sequence[int] = ()) -> Score | Awaitable[Score]:
        """The combined reward with its parts; an awaitable if a part is `async`.

        Raises:
            RewardError: a part raised, or did not return a finite number; or no part applies.
        """
        found = self.begin(prompt, completion, token_ids)
        return found if isinstance(found, Score) else found()

    def begin(
        self, prompt: Prompt, completion: str, token_ids: Sequence[int] = ()
    ) -> Score | Callable[..., Awaitable[Score]]:
        """Calls the plain parts.

        Returns:
            The score, or a function that calls the `async` parts in an event loop. It calls its argument `begun` when
            the last of them begins to work, and whenever one with its own queue calls its `begun` again later: the time
            of the call does not include waiting for a turn.

        Raises:
            RewardError: see `__call__`.
        """
        found: dict[str, Any] = {}  # some of which may be awaitables
        calls: dict[str, Callable[..., Awaitable[Any]]] = {}
        for name, reward in self.rewards.items():
            ids = wanted(reward, token_ids=tuple(token_ids))
            if is_async(reward):
                calls[name] = partial(reward, prompt, completion, **ids)
                continue
            with _errors_of(name):
                found[name] = reward(prompt, completion, **ids)
        if calls or any(inspect.isawaitable(value) for value in found.values()):
            return partial(self._finish, found, calls)
        return self.combined_score(found)

    async def _finish(
        self,
        found: Mapping[str, Any],
        calls: Mapping[str, Callable[..., Awaitable[Any]]],
        begun: Callable[[], None] = lambda: None,
    ) -> Score:
        """Calls the `async` parts concurrently: two judges take as long as the slower one."""
        waiting = set(calls)

        def begin(name: str) -> None:  # from the thread of a judge, too
            waiting.discard(name)
            if not waiting:
                begun()

        async def value_of(name: str) -> Any:
            with _errors_of(name):
                if name not in calls:
                    value = found[name]
                    return await value if inspect.isawaitable(value) else value
                async with self.places(name):
                    try:
                        if wants(self.rewards[name], "begun"):
                            return await calls[name](begun=partial(begin, name))
                        begin(name)
                        return await calls[name]()
                    finally:
                        if name in waiting:
                            begin(name)

        names = list(self.rewards)
        values = await asyncio.gather(*(value_of(name) for name in names))
        return self.combined_score(dict(zip(names, values, strict=True)))

    def limit_calls(self, num_calls: int) -> int | None:
        """Limits concurrent calls of `async` parts; returns the largest limit, None if no part is `async`.

        Args:
            num_calls: limit of parts without `max_concurrent`. Parts with a queue of their own keep it.
        """
        limits = []
        for name, reward in self.rewards.items():
            if not is_async(reward):
                continue
            if wants(reward, "begun"):
                limits.append(max(MAX_QUEUED, getattr(reward, "max_concurrent", None) or 1))
            else:
                self._limits[name] = getattr(reward, "max_concurrent", None) or num_calls
                limits.append(self._limits[name])
        return max(limits, default=None)

    def places(self, name: str) -> AbstractAsyncContextManager[Any]:
        """Context of a call of an `async` part, which waits for a free place."""
        if name not in self._limits:
            return nullcontext()
        of_loop = self._places.setdefault(asyncio.get_running_loop(), {})
        if name not in of_loop:
            of_loop[name] = asyncio.Semaphore(self._limits[name])
        return of_loop[name]

    def combined_score(self, found: Mapping[str, Any]) -> Score:
        """Combines the values of the parts, see `__call__`."""
        parts: dict[str, float] = {}
        for name, value in found.items():
            if value is None:
                continue
            try:
                parts[name] = as_reward(value)
            except (TypeError, ValueError) as error:
                raise RewardError(f"its part {name!r} returned {error}") from None
        if not parts:
            raise RewardError(f"no reward applies to the completion: {', '.join(found)} returned None")
        return Score(self.combined(parts), parts)

    def combined(self, parts: Mapping[str, float]) -> float:
        """The combination of the parts that apply to a completion."""
        is_closed = any(name in parts and parts[name] < least for name, least in self.gates.items())
        counted = {name: 0.0 if is_closed and name not in self.gates else value for name, value in parts.items()}
        if self.combine == "product":
            return math.prod(counted.values())
        return math.fsum(self.weights.get(name, 1.0) * value for name, value in counted.items())

    @property
    def call_timeout_s(self) -> float | None:
        """Sum of the time limits of parts in separate processes, which are called one after the other, in seconds."""
        limits = [getattr(part, "call_timeout_s", None) for part in self.rewards.values()]
        known = [limit for limit in limits if limit is not None]
        return sum(known) if known else None


def _errors_of(part: str) -> NamedErrors:
    """Context that converts an exception to a `RewardError` with the name of the part."""
    return NamedErrors(lambda: f"its part {part!r}")


def named_parts(reward: Any) -> list[tuple[str, Any]]:
    """Pairs of readable name and part of a `CombinedReward`; any other reward is its only part."""
    if isinstance(reward, CombinedReward):
        return [(f"{reward_name(part)} (part {name})", part) for name, part in reward.rewards.items()]
    return [(getattr(reward, "name", None) or reward_name(reward), reward)]


def name_answers(owner: Any, answer_field: str | None) -> None:
    """Sets the answer's column of the prompts for rewards in TRL's form, unless it is set already.

    The owner is a reward, or an environment or agent with a `reward`; a judge may have one as its `fallback`.
    """
    found = [owner]
    for one in found:  # which grows
        held = [getattr(one, "__dict__", {}).get(name) for name in ("reward", "fallback")]
        inner = [*one.rewards.values()] if isinstance(one, CombinedReward) else held
        found += [part for part in inner if part is not None and not any(part is known for known in found)]
        if isinstance(one, TakesAnswerField) and one.answer_field is None:
            one.answer_field = answer_field
        if isinstance(one, Rebuildable) and one._once_made is None and answer_field is not None:
            # a copy in another process makes the parts within it anew
            one._once_made = partial(name_answers, answer_field=answer_field)
