"""Groups for tapes, without a run."""

from __future__ import annotations

from lit_async_rl.problem import Prompt
from lit_async_rl.types import Rollout, RolloutGroup


def groups_of_step(step: int, num_groups: int = 2) -> list[RolloutGroup]:
    """Two completions each."""
    rollout = Rollout(
        token_ids=(3, 4), logprobs=(-0.5, -0.25), versions=(step, step), finish_reason="stop", text="ab",
        reward=1.0,
    )  # fmt: skip
    return [
        RolloutGroup(
            index=step * num_groups + number,
            prompt=Prompt(text="1=", answer="1"),
            prompt_ids=(1, 2),
            rollouts=(rollout, rollout),
            admitted_version=step,
            generation_s=0.1,
            queue_s=0.1,
        )
        for number in range(num_groups)
    ]
