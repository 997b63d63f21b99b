"""Evaluation of a reward function on one completion."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from lit_async_rl.errors import RewardError, StalledError
from lit_async_rl.rewards.awaiting import Awaiter
from lit_async_rl.types import Prompt
from lit_async_rl.utils.checks import as_reward

LIMITS = ("timeout_s", "max_memory_gb", "latency_s")
Reward = Callable[..., float | Awaitable[float]]  # of prompt and completion, and of token_ids where it names them


def reward_name(reward: Any) -> str:
    """Dotted name of a reward function, or of the class of a callable object."""
    if hasattr(reward, "__qualname__"):
        return f"{reward.__module__}.{reward.__qualname__}"
    return f"{type(reward).__module__}.{type(reward).__qualname__}"


def reward_identity(reward: Any) -> str:
    """Name of a reward with the texts and numbers that it was made with; another identity is another reward.

    Works for environments, too. Settings are what a `functools.partial` binds, and the constructor's arguments that an
    object keeps under their names; they may be nested: lists, dictionaries, functions and objects with settings of
    their own. Limits of time and memory (`timeout_s` and the like) are left out: they change no reward. Settings appear
    as a digest: one may be a key, and identities stand in checkpoints and messages.
    """
    if isinstance(reward, functools.partial):
        name, given = reward_identity(reward.func), {str(n): value for n, value in enumerate(reward.args)}
        given |= reward.keywords
    else:
        kind: Any = type(reward)
        name = reward_name(reward)
        known: Iterable[str] = () if hasattr(reward, "__qualname__") else inspect.signature(kind.__init__).parameters
        given = {argument: getattr(reward, argument) for argument in known if hasattr(reward, argument)}
    known_values = {name: _identity(value) for name, value in given.items() if not name.endswith(LIMITS)}
    plain = {argument: value for argument, value in known_values.items() if value is not None}
    digest = hashlib.sha256(repr(plain).encode()).hexdigest()[:12]
    return f"{name}({', '.join(plain)}: {digest})" if plain else name


def wants_token_ids(reward: Callable[..., Any]) -> bool:
    """Whether a reward has a parameter `token_ids`, and is called with the token ids of the completion."""
    try:
        return "token_ids" in inspect.signature(reward).parameters
    except (TypeError, ValueError):  # of a function in C, which does not tell
        return False


def _identity(value: Any) -> Any:
    """A setting in a form whose `repr` is the same in every process; None for what has no such form."""
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        parts = [_identity(part) for part in value]
        return sorted(parts, key=repr) if isinstance(value, set | frozenset) else parts
    if isinstance(value, Mapping):
        return sorted(((repr(key), _identity(part)) for key, part in value.items()), key=repr)
    if isinstance(value, functools.partial) or inspect.isroutine(value):
        return reward_identity(value)
    if callable(value) and not isinstance(value, type):
        return reward_identity(value)
    return None


def score(
    reward: Reward,
    prompt: Prompt,
    completion: str,
    wait: Callable[[Awaitable[float]], float] = Awaiter.once,
    token_ids: Sequence[int] = (),
) -> float:
    """Evaluates the reward of one completion.

    Args:
        reward: reward function, plain or `async`.
        prompt: prompt of the completion.
        completion: text to score.
        wait: returns the result of an `async` reward.
        token_ids: of the completion, stop token included; for a reward that has a parameter of that name.

    Raises:
        RewardError: the function raised, or did not return a finite number.
    """
    where = f"reward {reward_name(reward)} on prompt {prompt.text[:200]!r}, completion {completion[:200]!r}"
    try:
        ids = {"token_ids": tuple(token_ids)} if wants_token_ids(reward) else {}
        value: Any = reward(prompt, completion, **ids)
        if inspect.isawaitable(value):
            value = wait(value)
    except StalledError:
        raise
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # in a thread the last two would end the run in silence
        raise RewardError(f"{where} raised {type(error).__name__}: {error}") from error
    try:
        return as_reward(value)
    except (TypeError, ValueError) as error:
        raise RewardError(f"{where} returned {error}") from None
