"""Graders checked against their own references, at the start of a run and in the background.

A reward that compares completions with `prompt.answer` may be unable to read some answers: then right completions get 0
for ever, or wrong ones get 1. A reward that says how a completion with the reference answer looks (`References`) is run
on a sample of them: each must have full marks for its own answer, and none for another's. Other rewards are never
called, because a call may cost money.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from lit_async_rl.errors import RewardError, StalledError, describe
from lit_async_rl.prompts.sources import PromptSource
from lit_async_rl.rewards.answers import read_answer
from lit_async_rl.rewards.combined import named_parts
from lit_async_rl.rewards.scorer import Awaiter, Reward, reward_name, score
from lit_async_rl.types import Prompt

NUM_SAMPLES = 64  # references of each source
NUM_EXAMPLES = 3
CLOSE_S = 5.0
log = logging.getLogger(__name__)
R = TypeVar("R", bound=Callable[..., Any])


@dataclass(frozen=True)
class References:
    """The claim of a reward (its attribute `references`) that it grades by reference answers.

    Attributes:
        completion: a completion with the prompt's reference answer, which has full marks; None for a prompt without
            one.
        full_marks: reward of a right answer; also the default of `success_reward`.
        partial_credit: whether another answer may have a reward between 0 and full marks.
    """

    completion: Callable[[Prompt], str | None]
    full_marks: float = 1.0
    partial_credit: bool = False


def grades(completion: Callable[[Prompt], str | None], full_marks: float = 1.0, partial_credit: bool = False) -> Any:
    """Decorator of a reward function or class that grades by reference answers; arguments as of `References`.

    Example: `@grades(lambda prompt: f"The answer is {prompt.answer}")`.
    """

    def declare(reward: R) -> R:
        reward.references = References(completion, full_marks, partial_credit)  # type: ignore[attr-defined]
        return reward

    return declare


def any_accepted(reward: R) -> R:
    """Decorator of a reward that compares with `prompt.answer`: of several accepted answers the best counts."""

    @functools.wraps(reward)
    def best(*args: Any) -> float:
        *me, prompt, completion = args  # `me` is the object of a method
        if len(prompt.answers) < 2:
            return reward(*args)  # type: ignore[no-any-return]
        return max(reward(*me, replace(prompt, answer=one, other_answers=()), completion) for one in prompt.answers)

    return best  # type: ignore[return-value]


def references_of(reward: Any) -> References | None:
    """Its claim to grade by references; None without one."""
    while isinstance(reward, functools.partial):
        reward = reward.func
    found = getattr(reward, "references", None)
    return found if isinstance(found, References) else None


@dataclass(frozen=True)
class Fault:
    """A reference that is graded wrong.

    Attributes:
        prompt: its prompt.
        problem: its grade, in words.
    """

    prompt: Prompt
    problem: str


def check_references(
    reward: Reward,
    references: References,
    prompts: Sequence[Prompt],
    wait: Callable[[Any], float] = Awaiter.once,
    is_wanted: Callable[[], bool] = lambda: True,
) -> list[Fault]:
    """Grades each prompt's reference against itself and against the next prompt's with another answer.

    Args:
        reward: grader, plain or `async`.
        references: its claim.
        prompts: those without an answer are left out.
        wait: returns the result of an `async` reward.
        is_wanted: asked before each call; False ends the check.
    """
    known = [(prompt, text) for prompt in prompts if (text := references.completion(prompt)) is not None]
    faults = []
    for n, (prompt, own) in enumerate(known):
        following = known[n + 1 :] + known[:n]
        other = next((one for one in following if _differ(one[0].answer, prompt.answer)), None)
        if not is_wanted():
            break
        try:
            marks = score(reward, prompt, own, wait=wait)
            wrong = 0.0 if other is None else score(reward, prompt, other[1], wait=wait)
        except (RewardError, StalledError) as error:
            faults.append(Fault(prompt, f"cannot be graded ({_cause(error)})"))
            continue
        if marks < references.full_marks:
            faults.append(Fault(prompt, f"has {marks:g} of {references.full_marks:g} for itself"))
        elif other is not None and (wrong >= references.full_marks or (wrong > 0 and not references.partial_credit)):
            faults.append(Fault(prompt, f"has {wrong:g} for the answer {_short(other[0].answer)}"))
    return faults


def _differ(one: str | None, other: str | None) -> bool:
    """Whether two answers are surely different: their numbers, where both are numbers, else their texts."""
    if one is None or other is None:
        return one is not other
    first = read_answer(one)
    second = read_answer(other)
    if first.number is not None and second.number is not None:
        return first.number not in (second.number, second.number / 100, second.number * 100)
    return one.strip().casefold() != other.strip().casefold() and (first.words or one) != (second.words or other)


def _cause(error: Exception) -> str:
    return describe(error.__cause__ if isinstance(error.__cause__, Exception) else error)[:200]


def _short(answer: str | None) -> str:
    text = repr(answer)
    return text if len(text) <= 60 else f"{text[:28]}...{text[-28:]}"


class ReferenceCheck:
    """Checks a grader in a thread of its own and warns in one line of what it grades wrong; never ends a run.

    Args:
        reward: grader, or another reward, which is not called.
        timeout_s: limit of one call, for `async` rewards.
    """

    def __init__(self, reward: Any, timeout_s: float = 60.0) -> None:
        self._reward = reward
        self._timeout_s = timeout_s
        self._graders: list[tuple[str, Any]] = []
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, sources: Iterable[tuple[str, Sequence[Prompt]]]) -> None:
        """Begins; `sources` are samples of prompts, each under the name of its setting."""
        self._graders = [(name, part) for name, part in named_parts(self._reward) if _may_grade(part)]
        if not self._graders:
            return
        samples = [(name, list(prompts)) for name, prompts in sources]
        self._thread = threading.Thread(target=self._run, args=(samples,), name="reference-check", daemon=True)
        self._thread.start()

    def _run(self, sources: list[tuple[str, list[Prompt]]]) -> None:
        awaiter = Awaiter(self._timeout_s)
        try:
            for name, grader in self._graders:
                references = references_of(grader) or grader.ask_references()
                for setting, prompts in sources if references is not None else ():
                    faults = check_references(
                        grader, references, prompts, wait=awaiter.wait, is_wanted=lambda: not self._is_closed.is_set()
                    )
                    if faults and not self._is_closed.is_set():
                        _warn_of(faults, name, setting=setting, num_checked=len(prompts))
        except Exception as error:  # of a user's `completion`
            log.warning("the references of %s could not be checked: %s", reward_name(self._reward), describe(error))
        finally:
            awaiter.close()

    def join(self, timeout_s: float) -> bool:
        """Waits for the end of the check; returns whether it has ended."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def close(self) -> None:
        """Ends the check after the call that runs. Safe to call twice."""
        self._is_closed.set()
        self.join(CLOSE_S)


def _may_grade(reward: Any) -> bool:
    return references_of(reward) is not None or hasattr(reward, "ask_references")


def _warn_of(faults: list[Fault], name: str, setting: str, num_checked: int) -> None:
    examples = "; ".join(f"{_short(fault.prompt.answer)} {fault.problem}" for fault in faults[:NUM_EXAMPLES])
    log.warning(
        "%s grades %d of %d sampled references of %s wrong: %s%s. Such prompts teach nothing, or what is wrong: "
        "rewrite these answers, leave them out, or use another reward",
        name,
        len(faults),
        num_checked,
        setting,
        examples,
        "; ..." if len(faults) > NUM_EXAMPLES else "",
    )


def sample_prompts(source: PromptSource, number: int = NUM_SAMPLES) -> list[Prompt]:
    """Prompts spread evenly over a source; unusable ones, which the run names itself, are left out."""
    size = len(source)
    found = []
    for n in sorted({n * size // min(number, size) for n in range(min(number, size))}):
        try:
            found.append(source[n])
        except ValueError:
            continue
    return found
