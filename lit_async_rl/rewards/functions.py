"""Reward functions: callables `reward(prompt, completion) -> float`."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import comb
from typing import Any

from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.answers import SCALE, bare_formula, read_answer
from lit_async_rl.rewards.forms import TakesAnswerField, as_reward_function, wanted
from lit_async_rl.rewards.references import References, any_accepted, explained, grades, references_of
from lit_async_rl.runtime.isolation import IsolatedFunction
from lit_async_rl.runtime.loop import run_once
from lit_async_rl.utils.checks import as_reward
from lit_async_rl.utils.identity import module_code

# -- Graders that run in a separate process (see `runtime.isolation`); their libraries do not import torch ------------


def reasoning_grader() -> Callable[[str, str, Mapping[str, Any], str], float]:
    """Makes `grade(task, config as JSON, entry, answer)`, the task's score; 0 for a text that the task cannot read."""
    import reasoning_gym

    @functools.lru_cache(maxsize=64)
    def make_task(task: str, config: str) -> Any:
        return reasoning_gym.create_dataset(task, size=1, seed=0, **json.loads(config))

    def grade(task: str, config: str, entry: Mapping[str, Any], answer: str) -> float:
        problems = make_task(task, config)
        try:
            return float(problems.score_answer(answer, entry=entry))
        except Exception:
            problems.score_answer(entry["answer"], entry=entry)  # raises if it is not the text that it cannot read
            return 0.0

    return grade


def load_reward(path: str) -> Callable[..., Any]:
    """Imports the reward function `package.module.name`, and makes a function that checks its return values.

    Each call has the answer's column for a reward in TRL's form, see `name_answers`. Without a completion, a grader
    gives the completion with the prompt's reference answer; without a prompt, full marks and whether there is partial
    credit; other rewards give None. An `async` reward is awaited.
    """
    from lit_async_rl.rewards.combined import name_answers  # in the child only

    module, _, name = path.rpartition(".")
    reward = as_reward_function(getattr(importlib.import_module(module), name))
    references = references_of(reward)

    def call(
        prompt: Any, completion: str | None, token_ids: tuple[int, ...] = (), answer_field: str | None = None
    ) -> Any:
        if prompt is None or completion is None:
            if references is None:
                return None
            if prompt is None:
                return references.full_marks, references.partial_credit
            return references.completion(prompt)
        name_answers(reward, answer_field)
        value = reward(prompt, completion, **wanted(reward, token_ids=token_ids))
        if inspect.iscoroutine(value):  # no other call waits for this process
            value = run_once(value)
        try:
            return as_reward(value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"returned {error}") from None

    return call


@explained(lambda prompt, completion: (completion.strip(), "the same text, or not"))
@grades(lambda prompt: prompt.answer)
@any_accepted
def exact_match(prompt: Prompt, completion: str) -> float:
    """1 if the completion equals the answer up to surrounding whitespace, else 0.

    Raises:
        ValueError: the prompt has no answer.
    """
    return float(completion.strip() == reference_answer(prompt).strip())


def no_reward(prompt: Prompt, completion: str) -> float:
    """0 for every completion: for distillation alone, where nothing is measured either."""
    return 0.0


@explained(lambda prompt, completion: (completion, "characters at the same position"))
@grades(lambda prompt: prompt.answer, partial_credit=True)
@any_accepted
def share_correct(prompt: Prompt, completion: str) -> float:
    """Share of characters equal to the answer at the same position, which gives partial credit; 1 only for the answer.

    Raises:
        ValueError: the prompt has no answer.
    """
    answer = reference_answer(prompt)
    right = sum(a == b for a, b in zip(completion, answer, strict=False))
    longer = max(len(answer), len(completion))
    return right / longer if longer else 1.0


def _last_number(prompt: Prompt, completion: str) -> str | None:
    """The last number of a completion as it is written; a fraction if the answer is one."""
    number = rf"\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?: ?(?:{SCALE}|k\b))?"
    if "/" in reference_answer(prompt):
        number = rf"(?:\d+ +)?\d+/\d+|{number}"
    found = re.findall(rf"(?:(?<!\S)-)?(?:{number})", completion.replace(",", "").replace("−", "-"))
    return found[-1] if found else None


def _explain_last_number(prompt: Prompt, completion: str) -> tuple[str, str]:
    found = _last_number(prompt, completion)
    return (found, "the last number") if found is not None else ("", "no number was found")


@explained(_explain_last_number)
@grades(lambda prompt: prompt.answer)
@any_accepted
def last_number(prompt: Prompt, completion: str) -> float:
    """1 if the last number in the completion is the answer, else 0. A minus sign must follow a space.

    Thousands separators, a unit and a percent sign of the answer are ignored. If the answer is a fraction or a mixed
    number, fractions and mixed numbers of the completion count as numbers.

    Raises:
        ValueError: the prompt has no answer, or one that is not a number.
    """
    answer = reference_answer(prompt)
    reference = read_answer(answer)
    own = _last_number(prompt, answer)
    if own is None or reference.number != read_answer(own).number:  # also `2 hours 30 minutes`, which are not 30
        raise ValueError(
            f"last_number needs a number as the reference answer, got {answer[:100]!r}: use MathVerify or exact_match"
        )
    found = _last_number(prompt, completion)
    last = read_answer(found).number if found is not None else None
    return float(last is not None and last == reference.number)


def _in_a_box(prompt: Prompt) -> str | None:
    """The answer in a box, as a model writes it."""
    if prompt.answer is None:
        return None
    answer = final_part(prompt.answer)
    return answer if "\\boxed" in answer else f"\\boxed{{{bare_formula(answer)}}}"


@grades(_in_a_box)
class MathVerify:
    """1 if the final answer of the completion equals the reference mathematically (`1/2` and `0.5`), else 0.

    Needs the `math-verify` library: pip install "lit-async-rl[tasks]". The reference may be a worked solution in the
    format of GSM8K, with the answer after `####`. Units are compared if both sides have a known one: 18 cents are not
    18 dollars, and 1.8 m are 180 cm. A missing unit is no error, and counted objects are not compared.

    Args:
        timeout_s: time limit per completion in seconds, after which the reward is 0. The library runs in a separate
            process, because a completion may contain 9^9^9^9.

    Raises:
        ModuleNotFoundError: the library is not installed.
        ValueError: the time limit is not positive.
    """

    def __init__(self, timeout_s: float = 3.0) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ModuleNotFoundError('MathVerify needs: pip install "lit-async-rl[tasks]"')
        self._grade = IsolatedFunction("lit_async_rl.rewards.math_grading:math_grader", timeout_s)
        self.call_timeout_s = timeout_s

    @any_accepted
    def __call__(self, prompt: Prompt, completion: str) -> float:
        """Reward of the completion.

        Raises:
            ValueError: the prompt has no answer, or one that cannot be parsed.
        """
        return self._explained(prompt, completion)[0]

    def explain(self, prompt: Prompt, completion: str) -> tuple[float, str, str]:
        """Reward of the completion, its extracted answer, and the reason; raises as a call does."""
        variants = [replace(prompt, answer=answer, other_answers=()) for answer in prompt.answers] or [prompt]
        return max((self._explained(variant, completion) for variant in variants), key=lambda found: found[0])

    def _explained(self, prompt: Prompt, completion: str) -> tuple[float, str, str]:
        reference = final_part(reference_answer(prompt))
        try:
            is_right, extracted, why = self._grade(reference, completion)
        except TimeoutError:
            return 0.0, "", f"not read within {self.call_timeout_s:g} s"
        if is_right is None:
            raise ValueError(f"MathVerify cannot read the reference answer {reference!r}")
        return float(is_right), extracted, why


class IsolatedReward(TakesAnswerField):
    """Runs a reward function in a separate process, which is killed when a call times out.

    `data.scoring.timeout_s` alone cannot end a call, whose thread keeps using a core, or holds the GIL and blocks the
    process. With `data.scoring.tries` the completion is scored again. The trainer reads only a number from the process,
    and kills its children with it. It is no sandbox: the function has the trainer's access to files and network.

    Args:
        reward: dotted path `package.module.function`, imported in the child; an `async` function has an event loop for
            each call.
        timeout_s: time limit per completion in seconds; must be less than `data.scoring.timeout_s`.
        max_memory_gb: memory in GB (address space, on Linux) for calls, beyond the imports; a call that exceeds it
            fails with MemoryError. None is no limit.

    Attributes:
        answer_field: of a function in TRL's form; set by the run, and no part of the reward's identity.

    Raises:
        ValueError: a limit is not positive, or the path has no dot.
    """

    def __init__(self, reward: str, timeout_s: float = 5.0, max_memory_gb: float | None = None) -> None:
        if not isinstance(reward, str) or "." not in reward:
            kind = "" if isinstance(reward, str) else ": objects of this process do not exist in the reward's process"
            raise ValueError(
                f"IsolatedReward.reward must be a dotted path, package.module.function, got {reward!r:.100}{kind}"
            )
        self.reward = reward
        maker = f"{load_reward.__module__}:{load_reward.__name__}"
        self._call = IsolatedFunction(maker, timeout_s, reward, max_memory_gb=max_memory_gb)
        self.call_timeout_s = timeout_s

    def __call__(self, prompt: Prompt, completion: str, token_ids: Sequence[int] = ()) -> float:
        """Value of the reward function, which gets `token_ids` if it has a parameter of that name.

        Raises:
            TimeoutError: the call took too long, or its process was killed.
            IsolatedCallError: the function raised, or did not return a number.
            RuntimeError: the process exited, or sent an invalid reply.
        """
        value = self._call(prompt, completion, tuple(token_ids), self.answer_field)
        if not isinstance(value, int | float):
            raise RuntimeError(
                f"the process of reward {self.reward} sent a value of type {type(value).__name__}, which is not a "
                "number"
            )
        return float(value)

    def identified_by(self) -> dict[str, Any]:
        """Code of the function's module, which affects rewards as an argument does; see `reward_identity`."""
        return {"code": module_code(self.reward)}

    def ask_references(self) -> References | None:
        """`References` of the function, evaluated in its process; None if it is not a grader."""
        declaration = self._call(None, None)
        if declaration is None:
            return None
        full_marks, partial_credit = declaration
        return References(lambda prompt: self._call(prompt, None), float(full_marks), bool(partial_credit))


def final_part(answer: str) -> str:
    """Text after the last `####` of a worked solution in GSM8K's format, or the whole answer without any."""
    return answer.rpartition("####")[2].strip()


def reference_answer(prompt: Prompt) -> str:
    """Reference answer of a prompt.

    Raises:
        ValueError: the prompt has none.
    """
    if prompt.answer is None:
        raise ValueError("this reward needs a reference answer: set answer_field of the prompt source")
    return prompt.answer


# -- Metrics over several scored completions of a prompt --------------------------------------------------------------


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k samples is correct.

    pass@k = 1 - C(n - c, k) / C(n, k) for n samples with c correct ones. Chen et al. 2021, arXiv:2107.03374, eq. 1.

    Raises:
        ValueError: k is not in [1, n].
    """
    if not 0 < k <= num_samples:
        raise ValueError(f"pass@k needs 0 < k <= samples, got k={k} with {num_samples} samples")
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)
