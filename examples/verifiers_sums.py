"""Trains the agent `null` of `verifiers` on sums, with a tool.

    pip install "lit-async-rl[verifiers]"
    python examples/verifiers_sums.py

Taskset, tool server (started by `verifiers`) and training are in this file; usually a taskset is a package.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from pathlib import Path

import verifiers.v1 as vf

import lit_async_rl as rl


class SumData(vf.TaskData):
    """A sum, and what it is."""

    answer: str


class Calculator(vf.Toolset[vf.ToolsetConfig]):
    """The tool server."""

    TOOL_PREFIX = None

    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b


class SumTask(vf.Task[SumData]):
    """Asks for a sum."""

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        """1 if the last reply is the sum."""
        return float(trace.last_reply == self.data.answer)


class Sums(vf.Taskset[SumTask]):
    """Sums of numbers of three digits."""

    def load(self) -> Iterable[SumTask]:
        for seed in range(10_000):
            a, b = random.Random(seed).choices(range(100, 1000), k=2)
            yield SumTask(SumData(prompt=f"{a}+{b}=", answer=str(a + b)), self.config.task)

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [Calculator(vf.ToolsetConfig())]


__all__ = ["Sums"]


def main(max_steps: int = 2) -> dict[str, float]:
    """Trains; returns the last metrics."""
    folder = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])  # of the tool server
    taskset = {"id": "verifiers_sums"}
    role = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": 3}
    agent = rl.VerifiersAgent({"taskset": taskset, "agent": role})
    trainer = rl.fit(
        rl.asset("calculator_policy"),
        rl.VerifiersPrompts(taskset, size=1000),
        recipe=None,
        engine=rl.AgentEngine(
            rl.EmbeddedEngine(),
            agent,
            parser=rl.CalculatorParser(),
            chat_template="calculator_chat.jinja",
        ),
        sampling={"max_tokens": 12},
        max_steps=max_steps,
        max_staleness=2,
        groups_per_step=2,
        group_size=2,
        accelerator="cpu",
    )
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


if __name__ == "__main__":
    if "VF_CONFIG" in os.environ:
        Calculator.run()
    else:
        print(main())
