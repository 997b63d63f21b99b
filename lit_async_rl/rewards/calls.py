"""Evaluation of a reward function on one completion: name, form, errors with their origin, and value."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any

from lit_async_rl.errors import RewardError, StalledError
from lit_async_rl.problem import Prompt, Score
from lit_async_rl.rewards.forms import BatchedReward, wanted
from lit_async_rl.runtime.loop import run_once
from lit_async_rl.utils.checks import as_reward
from lit_async_rl.utils.elsewhere import original_of

Reward = Callable[..., float | Awaitable[float]]  # of prompt and completion; token_ids where named


def reward_name(reward: Any) -> str:
    """Dotted name of a reward function, or of the class of a callable object."""
    reward = original_of(reward)
    if isinstance(reward, BatchedReward):
        return reward_name(reward.reward)
    if hasattr(reward, "__qualname__"):
        return f"{reward.__module__}.{reward.__qualname__}"
    return f"{type(reward).__module__}.{type(reward).__qualname__}"


def is_async(reward: Any) -> bool:
    """Whether a reward is an `async` function, or an object whose `__call__` is one."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    call = inspect.getattr_static(type(reward), "__call__", None)
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(call)


def scores_groups(reward: Any) -> bool:
    """Whether a reward scores the completions of a group together, with a method `score_group`."""
    return callable(getattr(reward, "score_group", None))


GIVEN_BY_NAME = ("token_ids", "begun")  # to a reward with parameters of these names


def check_reward(reward: Any, setting: str = "data.reward") -> None:
    """Refuses a reward that cannot be called as `reward(prompt, completion)`, before anything is sampled.

    The forms of `as_reward_function` are accepted.

    Raises:
        ValueError: the reward is no function, is a class, or has other parameters.
    """
    form = "reward(prompt, completion) -> float"
    if not callable(reward):
        raise ValueError(f"{setting} must be a function, {form}, got {reward!r:.100}")
    if isinstance(reward, type):
        name = reward.__name__
        raise ValueError(f"{setting} must be a function of the form {form}, but {name} is a class: write {name}(...)")
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # a C function without a signature
        return
    if "completions" in signature.parameters or scores_groups(reward):
        return  # a batch or TRL's form: columns are known only with the prompts
    ids = {name: () for name in GIVEN_BY_NAME if name in signature.parameters}
    shown = f"{setting}={reward_name(reward)} has the parameters {signature}"
    try:
        bound = signature.bind("prompt", "completion", **ids)
    except TypeError as error:
        raise ValueError(f"{shown}, and must be a function, {form}: {_misfit(signature, error)}") from None
    names = [name for name, value in bound.arguments.items() if value in ("prompt", "completion")]
    if names == ["completion", "prompt"] and inspect.isroutine(reward):
        return  # called by keyword, see `as_reward_function`
    if len(names) == 2 and names[0].startswith(("completion", "response")) and names[1].startswith("prompt"):
        raise ValueError(f"a reward is called with the prompt first, as {form}, but {shown}: swap the two parameters")


def _misfit(signature: inspect.Signature, error: TypeError) -> str:
    """Missing or superfluous parameters of a signature, in words."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [one for one in signature.parameters.values() if one.kind in kinds and one.name not in GIVEN_BY_NAME]
    if len(positional) < 2 and not any(one.kind is one.VAR_POSITIONAL for one in signature.parameters.values()):
        return "a parameter is missing"
    extra = [one.name for one in positional[2:] if one.default is one.empty]
    extra += [
        one.name for one in signature.parameters.values() if one.kind is one.KEYWORD_ONLY and one.default is one.empty
    ]
    if not extra:
        return str(error)
    return f"nothing gives it {', '.join(extra)}; what belongs to a prompt is in prompt.answer and prompt.metadata"


class NamedErrors:
    """Context that turns every error of a reward into a `RewardError` with its origin.

    That includes exits and cancellations, which in a thread would end the run silently, but not Ctrl-C in the main
    thread, as of the command that grades a file. It is a class because `contextlib.contextmanager` re-raises
    `StopIteration` in place of an error caused by it.

    Args:
        where: completes "... raised"; called after an error.
    """

    def __init__(self, where: Callable[[], str]) -> None:
        self._where = where

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, StalledError):
            return
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            return
        if isinstance(error, NotANumber):
            raise RewardError(f"{self._where()} returned {error}") from None
        if isinstance(error, RewardError):  # keeps its class, which may forbid retries or end the run
            raise type(error)(f"{self._where()}: {error}") from error
        raise RewardError(f"{self._where()} raised {type(error).__name__}: {error}") from error


def naming(reward: Reward, prompt: Prompt, completions: Sequence[str]) -> NamedErrors:
    """Context whose errors name reward, prompt and completion."""

    def where() -> str:
        which = f"completion {completions[0][:200]!r}" if len(completions) == 1 else f"{len(completions)} completions"
        return f"reward {reward_name(reward)} on prompt {prompt.text[:200]!r}, {which}"

    return NamedErrors(where)


class NotANumber(Exception):
    """A reward that is not a finite number; the message describes it."""


def checked(value: Any) -> float:
    """The value of a reward, which must be a finite number."""
    try:
        number = as_reward(value)
    except (TypeError, ValueError) as error:
        raise NotANumber(str(error)) from None
    return Score(number, value.parts) if isinstance(value, Score) else number


def score(
    reward: Reward,
    prompt: Prompt,
    completion: str,
    wait: Callable[[Awaitable[float]], float] = run_once,
    token_ids: Sequence[int] = (),
) -> float:
    """Evaluates the reward of one completion; `wait` returns the result of an `async` one.

    `token_ids`, with the stop token, are passed if the reward has a parameter of that name.

    Raises:
        RewardError: the function raised, or did not return a finite number.
    """
    with naming(reward, prompt, [completion]):
        value: Any = reward(prompt, completion, **wanted(reward, token_ids=tuple(token_ids)))
        return checked(wait(value) if inspect.isawaitable(value) else value)
