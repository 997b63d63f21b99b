"""Libraries that judge answers, as they run in a process of their own (see `isolation`): nothing here needs torch."""

from __future__ import annotations

import functools
import importlib
import json
import logging
from collections.abc import Callable, Mapping
from typing import Any


def math_grader() -> Callable[[str, str], bool | None]:
    """`grade(reference, completion)`: whether the final answers are equal; None if the reference is no mathematics."""
    import math_verify

    for module in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(module).setLevel(logging.CRITICAL)

    def grade(reference: str, completion: str) -> bool | None:
        # the library's own time limits are signals that Python handles, too late for what does not return to Python
        parse = functools.partial(math_verify.parse, parsing_timeout=None)
        gold = parse(f"${reference}$")
        return bool(math_verify.verify(gold, parse(completion), timeout_seconds=None)) if gold else None

    grade("1", "$1$")  # loads what it loads on first use
    return grade


def reasoning_grader() -> Callable[[str, str, Mapping[str, Any], str], float]:
    """`grade(task, config as JSON, entry, answer)`: the task's own score."""
    import reasoning_gym

    @functools.lru_cache(maxsize=64)
    def make_task(task: str, config: str) -> Any:
        return reasoning_gym.create_dataset(task, size=1, seed=0, **json.loads(config))

    def grade(task: str, config: str, entry: Mapping[str, Any], answer: str) -> float:
        return float(make_task(task, config).score_answer(answer, entry=entry))

    return grade


def load_function(path: str) -> Callable[..., Any]:
    """What `package.module.name` names."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
