"""Check of graders on their own reference answers, in the background at the start of a run.

A reward that compares completions with `prompt.answer` may fail to parse some answers: correct completions then always
get 0, or wrong ones get 1. On a sample of prompts, a reward that declares a completion for each reference answer
(`References`) must give full marks to the prompt's own answer, and not to another prompt's. Other rewards are never
called, because a call may cost money.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lit_async_rl.errors import RewardError, StalledError, describe
from lit_async_rl.problem import Prompt
from lit_async_rl.prompts.sources import PromptSource
from lit_async_rl.rewards.answers import read_answer
from lit_async_rl.rewards.calls import Reward, reward_name, score
from lit_async_rl.rewards.combined import named_parts
from lit_async_rl.rewards.references import References, references_of
from lit_async_rl.rewards.scorer import Awaiter
from lit_async_rl.runtime.loop import run_once
from lit_async_rl.runtime.threads import start_thread

NUM_SAMPLES = 64  # prompts of each source
NUM_EXAMPLES = 3  # in the warning
CLOSE_TIMEOUT_S = 5.0
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fault:
    """A prompt whose reference answer has a wrong grade, and the problem in words."""

    prompt: Prompt
    problem: str


def check_references(
    reward: Reward,
    references: References,
    prompts: Sequence[Prompt],
    wait: Callable[[Any], float] = run_once,
    is_wanted: Callable[[], bool] = lambda: True,
) -> list[Fault]:
    """Grades each prompt with its own reference answer, and with a different one of the following prompts.

    Prompts without an answer are skipped. `wait` returns the result of an `async` reward; `is_wanted` is called before
    each prompt, and False ends the check.
    """
    jobs: list[tuple[Prompt, str | None, tuple[str, str] | None]]
    if references.wrong is None:
        known = [(prompt, text) for prompt in prompts if (text := references.completion(prompt)) is not None]
        jobs = [(prompt, text, _other(known[n + 1 :] + known[:n], prompt)) for n, (prompt, text) in enumerate(known)]
    else:
        jobs = [(prompt, references.completion(prompt), references.wrong(prompt)) for prompt in prompts]
    reward = references.reward or reward
    faults = []
    for prompt, own, other in jobs:
        if not is_wanted():
            break
        try:
            marks = references.full_marks if own is None else score(reward, prompt, own, wait=wait)
            wrong = 0.0 if other is None else score(reward, prompt, other[0], wait=wait)
        except (RewardError, StalledError) as error:
            faults.append(Fault(prompt, f"cannot be graded ({_cause(error)})"))
            continue
        if marks < references.full_marks:
            faults.append(Fault(prompt, f"has {marks:g} of {references.full_marks:g} for itself"))
        elif other is not None and (wrong >= references.full_marks or (wrong > 0 and not references.partial_credit)):
            faults.append(Fault(prompt, f"has {wrong:g} for {other[1]}"))
    return faults


def _other(following: Sequence[tuple[Prompt, str]], prompt: Prompt) -> tuple[str, str] | None:
    """The completion for the first prompt with another answer, and a word for it."""
    for other, text in following:
        if _differ(other.answer, prompt.answer):
            return text, f"the answer {_short(other.answer)}"
    return None


def _differ(one: str | None, other: str | None) -> bool:
    """Whether two answers certainly differ: as numbers if both are, else as text."""
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
    """Checks graders in a separate thread, and logs one warning per grader and source with wrong grades; ends no run.

    Other rewards are not called. A call of an `async` grader may take `timeout_s` seconds.
    """

    def __init__(self, reward: Any, timeout_s: float = 60.0) -> None:
        self._reward = reward
        self._timeout_s = timeout_s
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, sources: Iterable[tuple[str, Sequence[Prompt]]]) -> None:
        """Starts the check, on pairs of setting and sample of its prompts."""
        graders = [(name, part) for name, part in named_parts(self._reward) if _may_grade(part)]
        if not graders:
            return
        samples = [(name, list(prompts)) for name, prompts in sources]
        self._thread = start_thread(self._run, graders, samples, name="reference-check")

    def _run(self, graders: list[tuple[str, Any]], sources: list[tuple[str, list[Prompt]]]) -> None:
        awaiter = Awaiter(self._timeout_s, self._reward)
        try:
            for name, grader in graders:
                references = references_of(grader) or grader.ask_references()
                for setting, prompts in sources if references is not None else ():
                    faults = check_references(
                        grader, references, prompts, wait=awaiter.wait, is_wanted=lambda: not self._is_closed.is_set()
                    )
                    if faults and not self._is_closed.is_set():
                        _warn_of(faults, name, setting=setting, num_checked=len(prompts))
        except Exception as error:  # raised by a user's `completion` function
            log.warning(
                "the reference answers for reward %s could not be checked: %s",
                reward_name(self._reward),
                describe(error),
            )
        finally:
            awaiter.close()

    def join(self, timeout_s: float) -> bool:
        """Waits up to `timeout_s` for the end of the check; returns whether it has ended."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def close(self) -> None:
        """Ends the check after the current call. Safe to call twice."""
        self._is_closed.set()
        self.join(CLOSE_TIMEOUT_S)


def _may_grade(reward: Any) -> bool:
    return references_of(reward) is not None or hasattr(reward, "ask_references")


def _warn_of(faults: list[Fault], name: str, setting: str, num_checked: int) -> None:
    named = [(fault, fault.prompt.text if fault.prompt.answer is None else fault.prompt.answer) for fault in faults]
    examples = "; ".join(f"{_short(name)} {fault.problem}" for fault, name in named[:NUM_EXAMPLES])
    log.warning(
        "reward %s gives wrong grades to %d of %d reference answers sampled from %s: %s%s. The prompts of "
        "these reference answers teach the policy wrong answers or nothing: rewrite the reference answers, leave out "
        "the prompts, or use another reward",
        name,
        len(faults),
        num_checked,
        setting,
        examples,
        "; ..." if len(faults) > NUM_EXAMPLES else "",
    )


def sample_prompts(source: PromptSource, number: int = NUM_SAMPLES) -> list[Prompt]:
    """Prompts spread evenly over a source, without unusable ones, which the run reports."""
    size = len(source)
    prompts = []
    for n in sorted({n * size // min(number, size) for n in range(min(number, size))}):
        try:
            prompts.append(source[n])
        except ValueError:
            continue
    return prompts
