"""The procedural tasks of the `reasoning-gym` library."""

from __future__ import annotations

from typing import Any

from lit_async_rl.prompts import PromptSource
from lit_async_rl.types import Prompt


class ReasoningGym(PromptSource):
    """Problems of one of its tasks; use it with `ReasoningGymReward`, which asks the task itself for the score.

    Args:
        task: name of the task, for example `chain_sum`.
        size: number of problems.
        seed: of the problems; give held-out ones another.
        template: text around the question, with `{prompt}` where it goes.
        config: settings of the task.

    Raises:
        ModuleNotFoundError: the library is not installed.
        ValueError: there is no such task, or a setting is wrong.
    """

    def __init__(
        self,
        task: str,
        size: int = 1000,
        seed: int = 0,
        template: str = "{prompt}",
        config: dict[str, Any] | None = None,
    ) -> None:
        try:
            import reasoning_gym
        except ImportError:
            raise ModuleNotFoundError('ReasoningGym needs: pip install "lit-async-rl[tasks]"') from None
        try:
            self._dataset = reasoning_gym.create_dataset(task, size=size, seed=seed, **(config or {}))
        except (ValueError, AssertionError, TypeError) as error:
            raise ValueError(f"ReasoningGym: task={task!r}, size={size}, config={config}: {error}") from error
        self.template = template

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Prompt:
        entry = self._dataset[index]
        text = self.template.replace("{prompt}", entry["question"])
        return Prompt(text=text, answer=entry["answer"], metadata={"dataset": self._dataset, "entry": entry})


class ReasoningGymReward:
    """The task's own score, between 0 and 1; many tasks give partial credit."""

    def __call__(self, prompt: Prompt, completion: str) -> float:
        """Score of the completion without the space around it."""
        return float(prompt.metadata["dataset"].score_answer(completion.strip(), entry=prompt.metadata["entry"]))
