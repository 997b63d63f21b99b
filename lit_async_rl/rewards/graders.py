"""Graders that run in a separate process (see `utils.isolation`); their libraries do not import torch."""

from __future__ import annotations

import functools
import importlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lit_async_rl.rewards import answers
from lit_async_rl.utils.checks import as_reward


def math_grader() -> Callable[[str, str], bool | None]:
    """Makes `grade(reference, completion)`: whether the final answers are equal; None for an unparsable reference.

    Numbers, quantities and words are read by `rewards.answers`, on both sides; all else is the library's.
    """
    import math_verify

    for module in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(module).setLevel(logging.CRITICAL)

    # no timeouts of the library: they are signals, which cannot interrupt native code
    parse = functools.partial(math_verify.parse, parsing_timeout=None)
    config = math_verify.LatexExtractionConfig()
    # The library takes letters for units that it leaves out: it reads `7ab` as 7, and `5m` as 5.
    keeps_letters = replace(config, normalization_config=replace(config.normalization_config, units=False))
    parse_algebra = functools.partial(parse, extraction_config=[keeps_letters, math_verify.ExprExtractionConfig()])

    def grade(reference: str, completion: str) -> bool | None:
        right = answers.read_answer(reference)
        if right.words is not None:
            if not right.words:
                return None
            return answers.is_right_in_words(right.words, answers.final_words(completion))
        formula = right.math or ""
        is_algebra = answers.has_variables(formula)
        is_text = "$" in formula or "\\[" in formula or "\\(" in formula
        gold = (parse_algebra if is_algebra else parse)(formula if is_text else f"${formula}$")
        if not gold:
            return None
        boxed = answers.final_answer(completion)
        given = None if boxed is None else answers.read_as_quantity(boxed, right.unit)
        if given is None or given.number is None:
            if boxed is not None and (latex := answers.as_latex(boxed)) != boxed:
                completion = f"\\boxed{{{latex}}}"
            completion = answers.improper(completion)
            parsers = (parse_algebra, parse) if is_algebra else (parse,)  # its answer may have a unit
            return any(math_verify.verify(gold, read(completion), timeout_seconds=None) for read in parsers)
        if right.number is not None and not right.is_percentage and not given.is_percentage:
            larger = max(abs(right.number), abs(given.number))
            if right.number == given.number or larger < answers.SMALL:
                return abs(right.number - given.number) <= larger / 10**6
        return bool(math_verify.verify(gold, parse(f"${given.math}$"), timeout_seconds=None))

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


def load_reward(path: str) -> Callable[..., Any]:
    """Imports the reward function `package.module.name`, and checks that it returns numbers.

    Called without a completion, it returns that with the prompt's reference answer; and without a prompt, full marks
    and whether there is partial credit, or None for a reward that is no grader.
    """
    # prompts need `types`; imported here, outside of the limits of calls
    references_of = importlib.import_module("lit_async_rl.rewards.references").references_of
    module, _, name = path.rpartition(".")
    reward: Callable[..., Any] = getattr(importlib.import_module(module), name)

    references = references_of(reward)
    wants_ids = importlib.import_module("lit_async_rl.rewards.score").wants_token_ids(reward)

    def call(prompt: Any, completion: str | None, token_ids: tuple[int, ...] = ()) -> Any:
        if prompt is None or completion is None:
            if references is None:
                return None
            if prompt is None:
                return references.full_marks, references.partial_credit
            return references.completion(prompt)
        value = reward(prompt, completion, token_ids=token_ids) if wants_ids else reward(prompt, completion)
        try:
            return as_reward(value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"returned {error}") from None

    return call
