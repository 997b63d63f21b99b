"""Graders that run in a separate process (see `utils.isolation`); their libraries do not import torch."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any


def math_grader() -> Callable[[str, str], bool | None]:
    """Makes `grade(reference, completion)`: whether the final answers are equal; None for an unparsable reference."""
    import math_verify

    for module in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(module).setLevel(logging.CRITICAL)

    def grade(reference: str, completion: str) -> bool | None:
        # no timeouts of the library: they are signals, which cannot interrupt native code
        parse = functools.partial(math_verify.parse, parsing_timeout=None)
        gold = parse(f"${reference}$")
        return bool(math_verify.verify(gold, parse(completion), timeout_seconds=None)) if gold else None

    grade("1", "$1$")  # triggers its lazy imports
    return grade


def reasoning_grader() -> Callable[[str, str, Mapping[str, Any], str], float]:
    """Makes `grade(task, config as JSON, entry, answer)`, the score that the task itself defines."""
    import reasoning_gym

    @functools.lru_cache(maxsize=64)
    def make_task(task: str, config: str) -> Any:
        return reasoning_gym.create_dataset(task, size=1, seed=0, **json.loads(config))

    def grade(task: str, config: str, entry: Mapping[str, Any], answer: str) -> float:
        return float(make_task(task, config).score_answer(answer, entry=entry))

    return grade


def load_reward(path: str) -> Callable[..., float]:
    """Imports the reward function `package.module.name`, and checks that it returns numbers."""
    importlib.import_module("lit_async_rl.types")  # prompts need it; imported here, outside of the limits of calls
    module, _, name = path.rpartition(".")
    reward: Callable[..., Any] = getattr(importlib.import_module(module), name)

    wants_ids = "token_ids" in inspect.signature(reward).parameters

    def call(prompt: Any, completion: str, token_ids: tuple[int, ...] = ()) -> float:
        value = reward(prompt, completion, token_ids=token_ids) if wants_ids else reward(prompt, completion)
        try:
            return float(value)
        except (TypeError, ValueError):
            raise TypeError(f"returned {value!r:.200}, which is not a number") from None

    return call
