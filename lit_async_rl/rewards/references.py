"""Declaration of a reward that grades by reference answers. Imports nothing large: processes of rewards load it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.calls import Reward

R = TypeVar("R", bound=Callable[..., Any])


@dataclass(frozen=True)
class References:
    """Declares, as attribute `references` of a reward, that it grades by reference answers.

    Attributes:
        completion: function from a prompt to a completion that deserves full marks; None for a prompt without an
            answer.
        full_marks: reward of a correct answer; also the default of `success_reward`.
        partial_credit: whether a wrong answer may have a reward between 0 and full marks.
        wrong: function from a prompt to a completion that does not deserve full marks, and a word for it; None takes
            the completion for another prompt.
        reward: called in place of a reward that counts its calls.
    """

    completion: Callable[[Prompt], str | None]
    full_marks: float = 1.0
    partial_credit: bool = False
    wrong: Callable[[Prompt], tuple[str, str] | None] | None = None
    reward: Reward | None = None


def grades(completion: Callable[[Prompt], str | None], full_marks: float = 1.0, partial_credit: bool = False) -> Any:
    """Decorator of a reward function or class that grades by reference answers; arguments as of `References`.

    Example: `@grades(lambda prompt: f"The answer is {prompt.answer}")`.
    """

    def declare(reward: R) -> R:
        reward.references = References(completion, full_marks, partial_credit)  # type: ignore[attr-defined]
        return reward

    return declare


def explained(explain: Callable[[Prompt, str], tuple[str, str]]) -> Any:
    """Decorator of a reward function, for `lit-async-rl grade`.

    Args:
        explain: function from prompt and completion to the compared text, and how it is compared.
    """

    def declare(reward: R) -> R:
        def explain_all(prompt: Prompt, completion: str) -> tuple[float, str, str]:
            return reward(prompt, completion), *explain(prompt, completion)

        reward.explain = explain_all  # type: ignore[attr-defined]
        return reward

    return declare


def any_accepted(reward: R) -> R:
    """Decorator of a function or method that compares with `prompt.answer`: maximum over all accepted answers."""

    @functools.wraps(reward)
    def best(*args: Any) -> float:
        *instance, prompt, completion = args  # `instance` has one item for a method, and none for a function
        if len(prompt.answers) < 2:
            return reward(*args)  # type: ignore[no-any-return]
        variants = [replace(prompt, answer=answer, other_answers=()) for answer in prompt.answers]
        return max(reward(*instance, variant, completion) for variant in variants)

    return best  # type: ignore[return-value]


def references_of(reward: Any) -> References | None:
    """The declaration of a reward that grades by reference answers; None without one."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    references = getattr(reward, "references", None)
    return references if isinstance(references, References) else None
