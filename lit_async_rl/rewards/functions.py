"""Rewards: `reward(prompt, completion) -> float`, a function or an object that can be called."""

from __future__ import annotations

import importlib.util

from lit_async_rl.rewards.graders import load_reward
from lit_async_rl.types import Prompt
from lit_async_rl.utils.isolation import IsolatedFunction


def exact_match(prompt: Prompt, completion: str) -> float:
    """1 if the completion is the answer, apart from space around it; else 0.

    Raises:
        ValueError: the prompt has no answer.
    """
    return float(completion.strip() == reference_answer(prompt).strip())


def share_correct(prompt: Prompt, completion: str) -> float:
    """Share of the answer's characters that stand in their place; 1 only for the answer itself.

    Denser than `exact_match`: an almost right completion is worth more than a wrong one.

    Raises:
        ValueError: the prompt has no answer.
    """
    answer = reference_answer(prompt)
    right = sum(a == b for a, b in zip(completion, answer, strict=False))
    longer = max(len(answer), len(completion))
    return right / longer if longer else 1.0


class MathVerify:
    """1 if the completion's final answer equals the reference, whatever its form (`1/2` or `0.5`), else 0.

    Uses the `math-verify` library: pip install "lit-async-rl[tasks]". A reference may be a whole worked solution in
    GSM8K's form, whose answer stands behind `####`.

    Args:
        timeout_s: longest for one completion, which may ask for 9^9^9^9; one that takes longer is worth 0. The library
            runs in a process of its own, so that nothing else waits.

    Raises:
        ModuleNotFoundError: the library is not installed.
        ValueError: the time limit is not positive.
    """

    def __init__(self, timeout_s: float = 3.0) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ModuleNotFoundError('MathVerify needs: pip install "lit-async-rl[tasks]"')
        self._grade = IsolatedFunction("lit_async_rl.rewards.graders:math_grader", timeout_s)

    def __call__(self, prompt: Prompt, completion: str) -> float:
        """Compares final answers.

        Raises:
            ValueError: the prompt has no answer, or none that can be read as mathematics.
        """
        reference = reference_answer(prompt).rpartition("####")[2].strip()
        try:
            is_right = self._grade(reference, completion)
        except TimeoutError:
            return 0.0
        if is_right is None:
            raise ValueError(f"MathVerify cannot read the reference answer {reference!r}")
        return float(is_right)


class IsolatedReward:
    """Another reward function, in a process of its own that is killed when a call takes too long.

    `data.scoring.timeout_s` alone cannot end a call: it leaves it to itself, and a loop goes on using a core, or holds
    the interpreter's lock and so stops everything. With `data.scoring.tries` the group is tried again. The trainer
    reads nothing but a number from the process, and kills what the process has started with it. It is not a sandbox:
    the function can still use files and the network as the trainer can.

    Args:
        reward: its dotted path, `package.module.function`; imported in the child.
        timeout_s: longest for one completion; should be less than `data.scoring.timeout_s` by the size of a group.
        max_memory_gb: memory (address space, on Linux) that calls may use beyond what the imports take; one that needs
            more fails with MemoryError. None sets no limit.

    Raises:
        ValueError: a limit is not positive, or the path has no dot.
    """

    def __init__(self, reward: str, timeout_s: float = 5.0, max_memory_gb: float | None = None) -> None:
        if "." not in reward:
            raise ValueError(f"IsolatedReward.reward must be a dotted path, package.module.function, got {reward!r}")
        self.reward = reward
        maker = f"{load_reward.__module__}:{load_reward.__name__}"
        self._call = IsolatedFunction(maker, timeout_s, reward, max_memory_gb=max_memory_gb)

    def __call__(self, prompt: Prompt, completion: str) -> float:
        """The function's value.

        Raises:
            TimeoutError: the call took too long, or its process was killed.
            IsolatedCallError: the function raised, or returned no number.
            RuntimeError: the process ended by itself, or sent something that is no reply.
        """
        value = self._call(prompt, completion)
        if not isinstance(value, int | float):
            raise RuntimeError(f"{self.reward} sent {type(value).__name__}, which is not a number")
        return float(value)


def reference_answer(prompt: Prompt) -> str:
    """What the completion is compared with.

    Raises:
        ValueError: there is none: a reward that is 0 for everything would teach nothing, and say nothing.
    """
    if prompt.answer is None:
        raise ValueError("this reward needs a reference answer: set answer_field of the prompt source")
    return prompt.answer
