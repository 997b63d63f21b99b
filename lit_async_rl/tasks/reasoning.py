"""Procedural tasks of the `reasoning-gym` library."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from typing import Any

from lit_async_rl.problem import Prompt
from lit_async_rl.prompts.records import check_template
from lit_async_rl.rewards.references import References
from lit_async_rl.runtime.isolation import IsolatedFunction
from lit_async_rl.tasks.splits import MAX_DRAWS_PER_PROBLEM, Split, SplitPrompts
from lit_async_rl.utils.checks import check_range


class ReasoningGym(SplitPrompts):
    """Problems of one `reasoning-gym` task, for use with `ReasoningGymReward`.

    The library seeds problem i with seed + i, so seeds 0 and 1 share all problems but one. Here training and held-out
    problems never share a question.

    Args:
        task: name of the task, for example `chain_sum`.
        size: number of problems.
        split: training or held-out set, which are disjoint.
        seed: of the problems.
        template: text around the question, with the placeholder `{prompt}`.
        config: settings of the task.

    Raises:
        ModuleNotFoundError: the library is not installed.
        ValueError: there is no such task, or a setting is wrong.
    """

    def __init__(
        self,
        task: str,
        size: int = 1000,
        split: Split = "train",
        seed: int = 0,
        template: str = "{prompt}",
        config: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(size, split)
        check_range("ReasoningGym", "integer", seed=seed)
        check_template(template)
        try:
            import reasoning_gym
        except ImportError:
            raise ModuleNotFoundError('ReasoningGym needs: pip install "lit-async-rl[tasks]"') from None
        self.task = task
        self.template = template
        self.config = json.dumps(config or {})
        try:
            self._dataset = reasoning_gym.create_dataset(
                task, size=size * MAX_DRAWS_PER_PROBLEM, seed=seed, **(config or {})
            )
        except (ValueError, AssertionError, TypeError) as error:
            raise ValueError(f"ReasoningGym: task={task!r}, size={size}, config={config}: {error}") from error

    def candidates(self, index: int) -> Iterator[tuple[str, Prompt]]:
        """Problems of the library reserved for this index."""
        for number in range(index, self.size * MAX_DRAWS_PER_PROBLEM, self.size):
            entry = self._dataset[number]
            text = self.template.replace("{prompt}", entry["question"])
            metadata = {"task": self.task, "config": self.config, "entry": entry}
            yield entry["question"], Prompt(text=text, answer=entry["answer"], metadata=metadata)


class ReasoningGymReward:
    """Score in [0, 1] by the task of the prompt; many tasks give partial credit.

    Args:
        answer_tag: with `answer`, score only the text between the last `<answer>` and `</answer>`; a completion
            without the tag has reward 0. None scores the whole completion, stripped.
        timeout_s: seconds per completion; a timeout gives reward 0. Scoring runs in a separate process, as some tasks
            execute the completion.

    Raises:
        ModuleNotFoundError: the library is not installed.
        ValueError: the time limit is not positive.
    """

    def __init__(self, answer_tag: str | None = None, timeout_s: float = 3.0) -> None:
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ModuleNotFoundError('ReasoningGymReward needs: pip install "lit-async-rl[tasks]"')
        self.answer_tag = answer_tag
        self.references = References(self._tagged, partial_credit=True)
        self._grade = IsolatedFunction("lit_async_rl.rewards.functions:reasoning_grader", timeout_s)
        self.call_timeout_s = timeout_s

    def _tagged(self, prompt: Prompt) -> str | None:
        tag = self.answer_tag
        return prompt.answer if tag is None or prompt.answer is None else f"<{tag}>{prompt.answer}</{tag}>"

    def __call__(self, prompt: Prompt, completion: str) -> float:
        """Reward of the completion.

        Raises:
            ValueError: the prompt is not from `ReasoningGym`.
        """
        if "entry" not in prompt.metadata:
            raise ValueError("ReasoningGymReward scores only prompts of ReasoningGym")
        if self.answer_tag is not None:
            tag = re.escape(self.answer_tag)
            answers = re.findall(f"<{tag}>(.*?)</{tag}>", completion, flags=re.DOTALL)
            if not answers:
                return 0.0
            completion = answers[-1]
        metadata = prompt.metadata
        try:
            return float(self._grade(metadata["task"], metadata["config"], metadata["entry"], completion.strip()))
        except TimeoutError:
            return 0.0
