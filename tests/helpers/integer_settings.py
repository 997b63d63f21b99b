"""Public settings given a wrong value in Python: prints what each says, as JSON.

`float`: each that is an integer, given as 2.5. `none`: each that is a number and not optional, given as None.

Run in a process of its own: the tests' type checks would refuse the float before the code under test sees it.
"""

from __future__ import annotations

import inspect
import json
import sys
import typing
from typing import Any

import lit_async_rl as rl
from lit_async_rl.assets import asset
from lit_async_rl.simulation.latency import Constant

MODEL = asset("sort_policy")
PROMPTS = rl.SortDigits(4, size=8)
SHOWN = [{"prompt": "21=", "completion": "12"}]
NEEDED: dict[str, dict[str, Any]] = {  # arguments that a class cannot be made without
    "AgentEngine": dict(engine=rl.EmbeddedEngine(), agent=print),
    "JudgeReward": dict(model="judge", base_url="http://127.0.0.1:1/v1"),
    "Distillation": dict(teacher=MODEL),
    "ServerTeacher": dict(base_url="http://127.0.0.1:1/v1", model="teacher"),
    "FlawedAnswers": dict(prompts=PROMPTS),
    "ProcessAgent": dict(agent="lit_async_rl.tasks.CalculatorAgent"),
    "RewardModel": dict(model=MODEL),
    "RayEngine": dict(engine=rl.EmbeddedEngine()),
    "LMEvalValidation": dict(tasks=["none"]),
    "BatchedReward": dict(reward=lambda prompts, completions: [0.0]),
    "TRLReward": dict(reward=lambda completions, **columns: [0.0]),
    "EpisodeEngine": dict(engine=rl.EmbeddedEngine(), environment=rl.Calculator()),
    "Evaluation": dict(datasets={"held_out": PROMPTS}),
    "GymnasiumEnvironment": dict(make=lambda prompt: None),
    "GymnasiumPrompts": dict(make=lambda prompt: None),
    "InMemoryPrompts": dict(records=[{"prompt": "a"}]),
    "McpAgent": dict(command=["none"]),
    "OpenEnvPrompts": dict(url="http://127.0.0.1:1"),
    "OverlongPenalty": dict(max_tokens=8, buffer_tokens=4),
    "PolicyModule": dict(model=MODEL),
    "ReasoningGym": dict(task="chain_sum"),
    "Ring": dict(num_sampling=2, capacity=4),
    "RolloutDataModule": dict(prompts=PROMPTS, reward=rl.exact_match, model=MODEL),
    "SFTDataModule": dict(model=MODEL, records=SHOWN),
    "SFTModule": dict(model=MODEL),
    "SimulatedEngine": dict(latency=Constant(0.001)),
    "Tape": dict(folder="none"),
    "VerifiersPrompts": dict(taskset={"id": "none"}),
    "sft": dict(model=MODEL, records=SHOWN),
    "fit": dict(model=MODEL, prompts=PROMPTS, reward=rl.exact_match),
}
VALUES = {  # and what engines make
    "AgentEpisode",
    "Completion",
    "GenerationRequest",
    "Program",
    "ProgramResult",
    "PromptBatch",
    "Reply",
    "Rollout",
    "RolloutBatch",
    "RolloutGroup",
    "Turn",
}
FILES = {
    "CsvPrompts",
    "HuggingFacePrompts",
    "JsonlPrompts",
    "ParquetPrompts",
    "RecordPrompts",
}  # `InMemoryPrompts` stands for them
LIGHTNING = {"CSVLog", "FSDPStrategy", "LinkedCheckpoint", "ModelParallelStrategy"}  # arguments of its own classes


def integers() -> list[tuple[str, str]]:
    """Public class or function, and its parameter."""
    found = []
    for name in rl.NAMES:
        kind = getattr(rl, name)
        is_error = inspect.isclass(kind) and issubclass(kind, Exception)
        if name in VALUES | FILES | LIGHTNING or is_error or not callable(kind):
            continue
        # annotations of a function as they are written: those of `fit` name types that only type checkers import
        hints = typing.get_type_hints(kind.__init__) if inspect.isclass(kind) else kind.__annotations__
        for setting in inspect.signature(kind).parameters:
            if hints.get(setting) in (int, int | None, "int", "int | None"):
                found.append((name, setting))
    return found


def required_numbers() -> list[tuple[str, str]]:
    """Public class, and its parameter that is a number, and not optional; of values, too."""
    found = []
    for name in rl.NAMES:
        kind = getattr(rl, name)
        if name in LIGHTNING or not inspect.isclass(kind) or issubclass(kind, Exception) or inspect.isabstract(kind):
            continue
        hints = typing.get_type_hints(kind.__init__)
        for setting, parameter in inspect.signature(kind).parameters.items():
            parts = typing.get_args(hints.get(setting)) or (hints.get(setting),)
            if all(part in (int, float) for part in parts) and parameter.default is not None:
                found.append((name, setting))
    return found


def answer(name: str, setting: str, value: float | None) -> str:
    """Type and message of what the class raises with this value; empty if it takes it."""
    try:
        getattr(rl, name)(**(NEEDED.get(name, {}) | {setting: value}))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    floats = {f"{name}.{setting}": answer(name, setting, 2.5) for name, setting in integers()}
    nothing = {f"{name}.{setting}": answer(name, setting, None) for name, setting in required_numbers()}
    json.dump({"float": floats, "none": nothing}, sys.stdout)
