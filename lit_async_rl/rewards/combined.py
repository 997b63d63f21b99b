"""Several rewards of one completion, by name, and their combination into the one that is trained on."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from lit_async_rl.errors import RewardError, StalledError
from lit_async_rl.rewards.forms import TRLReward, as_reward_function, wants_token_ids
from lit_async_rl.rewards.scorer import reward_name
from lit_async_rl.types import Prompt, Score
from lit_async_rl.utils.checks import as_reward, check_range

Part = Callable[..., float | Awaitable[float | None] | None]


class CombinedReward:
    """A reward made of named parts.

    A part that returns None does not apply to the completion: it is left out of the sum, the product and the means that
    are logged (`reward/part/<name>`). Parts are kept with their rollout: in checkpoints, tapes, samples and the report.
    `GDPO` normalises each part within its group instead of their combination.

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
        rewards: the parts: `reward(prompt, completion) -> float | None`, plain or `async`, under names of letters,
            digits, `_` and `-`.
        weights: weight of each part in the sum, 1 for those that are not named.
        combine: `sum`: sum over the parts of weight times reward. `product`: product of the parts, without weights.
        gates: least reward of parts that must be reached for the others to count: below it all other parts are 0 in
            the combination. Conditioned rewards of GDPO, arXiv:2601.05242, section 3.
        success: the part that says whether a completion is right, for pass@k and pass rates; None is the only part that
            is a grader, and the combined reward where none is, or several are.

    Raises:
        ValueError: there are no parts, a name is not that of a part, or a setting is out of range.
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
            raise ValueError("data.reward needs at least one part, got an empty mapping")
        for name, reward in rewards.items():
            if not name or not name.replace("_", "").replace("-", "").isalnum():
                raise ValueError(f"data.reward: names of parts have letters, digits, _ and -, got {name!r}")
            if not callable(reward):
                raise ValueError(
                    f"data.reward.{name} must be a function, reward(prompt, completion) -> float, got {reward!r}"
                )
        if combine not in ("sum", "product"):
            raise ValueError(f"data.reward.combine must be sum or product, got {combine!r}")
        if combine == "product" and weights:
            raise ValueError("data.reward.weights belong to combine=sum: a product has none")
        named = {"weights": weights or {}, "gates": gates or {}, "success": [] if success is None else [success]}
        for setting, names in named.items():
            if unknown := sorted(set(names) - set(rewards)):
                parts = ", ".join(rewards)
                raise ValueError(f"data.reward.{setting} names {', '.join(unknown)}, but the parts are {parts}")
        check_range("data.reward.weights", "finite", **(weights or {}))
        check_range("data.reward.gates", "finite", **(gates or {}))
        self.rewards = {name: as_reward_function(reward) for name, reward in rewards.items()}
        self.weights = dict(weights or {})
        self.combine = combine
        self.gates = dict(gates or {})
        self.success = success

    def __call__(self, prompt: Prompt, completion: str, token_ids: Sequence[int] = ()) -> Score | Awaitable[Score]:
        """The combined reward with its parts; to be awaited if a part is `async`.

        Raises:
            RewardError: a part raised, or returned something that is no finite number; or no part applies.
        """
        found: dict[str, Any] = {}
        for name, reward in self.rewards.items():
            ids = {"token_ids": tuple(token_ids)} if wants_token_ids(reward) else {}
            with _naming(name):
                found[name] = reward(prompt, completion, **ids)
        if any(inspect.isawaitable(value) for value in found.values()):
            return self._awaited(found)
        return self._combined(found)

    async def _awaited(self, found: Mapping[str, Any]) -> Score:
        async def value_of(name: str, value: Any) -> Any:
            with _naming(name):
                return await value if inspect.isawaitable(value) else value

        # together, and not one after the other: two judges take as long as the slower one
        values = await asyncio.gather(*(value_of(name, value) for name, value in found.items()))
        return self._combined(dict(zip(found, values, strict=True)))

    def _combined(self, found: Mapping[str, Any]) -> Score:
        parts: dict[str, float] = {}
        for name, value in found.items():
            if value is None:
                continue
            try:
                parts[name] = as_reward(value)
            except (TypeError, ValueError) as error:
                raise RewardError(f"its part {name!r} returned {error}") from None
        if not parts:
            raise RewardError(f"none of its parts applies: {', '.join(found)} returned None")
        return Score(self.combined(parts), parts)

    def combined(self, parts: Mapping[str, float]) -> float:
        """The reward of a completion whose parts are these; those that do not apply are left out."""
        is_closed = any(name in parts and parts[name] < least for name, least in self.gates.items())
        counted = {name: 0.0 if is_closed and name not in self.gates else value for name, value in parts.items()}
        if self.combine == "product":
            return math.prod(counted.values())
        return math.fsum(self.weights.get(name, 1.0) * value for name, value in counted.items())

    @property
    def call_timeout_s(self) -> float | None:
        """Seconds after which the processes of its parts are ended, added up: they are called one after the other."""
        limits = [getattr(part, "call_timeout_s", None) for part in self.rewards.values()]
        known = [limit for limit in limits if limit is not None]
        return sum(known) if known else None


@contextmanager
def _naming(part: str) -> Iterator[None]:
    """Context in which an exception of a part is raised anew as a `RewardError` with the part's name."""
    try:
        yield
    except StalledError:
        raise
    except RewardError as error:  # keeps its class: one says that no other try helps, another ends the run
        raise type(error)(f"its part {part!r}: {error}") from error
    except Exception as error:
        raise RewardError(f"its part {part!r} raised {type(error).__name__}: {error}") from error


def named_parts(reward: Any) -> list[tuple[str, Any]]:
    """The parts of a `CombinedReward` under readable names; of another reward, itself."""
    if isinstance(reward, CombinedReward):
        return [(f"{reward_name(part)} (part {name})", part) for name, part in reward.rewards.items()]
    return [(getattr(reward, "name", None) or reward_name(reward), reward)]


def name_answers(reward: Any, answer_field: str | None) -> None:
    """Tells rewards in TRL's form the name of the column that holds the answer, unless they were told."""
    for _, part in named_parts(reward):
        if isinstance(part, TRLReward) and part.answer_field is None:
            part.answer_field = answer_field
