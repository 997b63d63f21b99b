"""Reward functions: callables `reward(prompt, completion) -> float`."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence

from lit_async_rl.rewards.answers import bare_formula, read_answer
from lit_async_rl.rewards.graders import load_reward
from lit_async_rl.rewards.references import References, grades
from lit_async_rl.types import Prompt
from lit_async_rl.utils.isolation import IsolatedFunction


@grades(lambda prompt: prompt.answer)
def exact_match(prompt: Prompt, completion: str) -> float:
    """1 if the completion equals the answer up to surrounding whitespace, else 0.

    Raises:
        ValueError: the prompt has no answer.
    """
    return float(completion.strip() == reference_answer(prompt).strip())


@grades(lambda prompt: prompt.answer, partial_credit=True)
def share_correct(prompt: Prompt, completion: str) -> float:
    """Share of characters equal to the answer at the same position; 1 only for the answer itself.

    Denser than `exact_match`: gives partial credit.

    Raises:
        ValueError: the prompt has no answer.
    """
    answer = reference_answer(prompt)
    right = sum(a == b for a, b in zip(completion, answer, strict=False))
    longer = max(len(answer), len(completion))
    return right / longer if longer else 1.0


@grades(lambda prompt: prompt.answer)
def last_number(prompt: Prompt, completion: str) -> float:
    """1 if the last number in the completion is the answer, else 0. A minus counts after a space only.

    The answer may have thousands separators, a unit or a percent sign, which is left out; a fraction or a mixed number
    is compared with the last one of the completion.

    Raises:
        ValueError: the prompt has no answer, or one that is not a number.
    """
    answer = reference_answer(prompt)
    reference = read_answer(answer)
    if reference.number is None:
        raise ValueError(
            f"last_number needs a number as the reference answer, got {answer[:100]!r}: use MathVerify or exact_match"
        )
    number = r"\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
    if "/" in answer:
        number = rf"(?:\d+ +)?\d+/\d+|{number}"
    found = re.findall(rf"(?:(?<!\S)-)?(?:{number})", completion.replace(",", ""))
    last = read_answer(found[-1]).number if found else None
    return float(last is not None and last == reference.number)


def _in_a_box(prompt: Prompt) -> str | None:
    """The answer as a model writes it; one that is written so already, as it is."""
    if prompt.answer is None:
        return None
    answer = final_part(prompt.answer)
    return answer if "\\boxed" in answer else f"\\boxed{{{bare_formula(answer)}}}"


@grades(_in_a_box)
class MathVerify:
    """1 if the final answer of the completion is mathematically equal to the reference (`1/2` and `0.5`), else 0.

    Uses the `math-verify` library: pip install "lit-async-rl[tasks]". The reference may be a worked solution in the
    format of GSM8K, with the answer after `####`.

    Args:
        timeout_s: seconds per completion, which may contain 9^9^9^9; a timeout gives reward 0. The library runs in a
            separate process.

    Raises:
        ModuleNotFoundError: the library is not installed.
        ValueError: the time limit is not positive.
    """

    def __init__(self, timeout_s: float = 3.0) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ModuleNotFoundError('MathVerify needs: pip install "lit-async-rl[tasks]"')
        self._grade = IsolatedFunction("lit_async_rl.rewards.graders:math_grader", timeout_s)
        self.call_timeout_s = timeout_s

    def __call__(self, prompt: Prompt, completion: str) -> float:
        """Reward of the completion.

        Raises:
            ValueError: the prompt has no answer, or one that cannot be parsed.
        """
        reference = final_part(reference_answer(prompt))
        try:
            is_right = self._grade(reference, completion)
        except TimeoutError:
            return 0.0
        if is_right is None:
            raise ValueError(f"MathVerify cannot read the reference answer {reference!r}")
        return float(is_right)


class IsolatedReward:
    """Runs a reward function in a separate process, which is killed when a call times out.

    `data.scoring.timeout_s` alone cannot end a call: its thread keeps using a core, or holds the GIL and blocks the
    process. With `data.scoring.tries` the completion is scored again. The trainer reads only a number from the process,
    and kills its children with it. This is not a sandbox: the function has the trainer's access to files and network.

    Args:
        reward: dotted path `package.module.function`, imported in the child process.
        timeout_s: seconds per completion; must be less than `data.scoring.timeout_s`, also per completion.
        max_memory_gb: memory (address space, on Linux) for calls beyond that of the imports; a call that exceeds it
            fails with MemoryError. None is no limit.

    Raises:
        ValueError: a limit is not positive, or the path has no dot.
    """

    def __init__(self, reward: str, timeout_s: float = 5.0, max_memory_gb: float | None = None) -> None:
        if "." not in reward:
            raise ValueError(f"IsolatedReward.reward must be a dotted path, package.module.function, got {reward!r}")
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
        value = self._call(prompt, completion, tuple(token_ids))
        if not isinstance(value, int | float):
            raise RuntimeError(f"{self.reward} sent {type(value).__name__}, which is not a number")
        return float(value)

    def ask_references(self) -> References | None:
        """`References` of the function, in whose process they are asked; None if it is no grader."""
        found = self._call(None, None)
        if found is None:
            return None
        return References(lambda prompt: self._call(prompt, None), float(found[0]), bool(found[1]))


def final_part(answer: str) -> str:
    """Text after the last `####` of a worked solution in the format of GSM8K; else the whole answer."""
    return answer.rpartition("####")[2].strip()


def reference_answer(prompt: Prompt) -> str:
    """Reference answer of a prompt.

    Raises:
        ValueError: the prompt has none.
    """
    if prompt.answer is None:
        raise ValueError("this reward needs a reference answer: set answer_field of the prompt source")
    return prompt.answer
