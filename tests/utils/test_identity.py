"""Identities of rewards: another number is another identity, and the same object has the same one in every process."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest
import torch

import lit_async_rl as rl
from lit_async_rl.utils.identity import UNKNOWN, file_contents, is_comparable, name_of, reward_identity

REWARDS = """
import collections, dataclasses, functools, random, re, threading
import numpy as np
import lit_async_rl as rl
from rewards_helpers import shape

PATTERN = re.compile("b+")
ARRAY = np.arange(3) * 1.5
CLIENT = np.random.default_rng
def nested(prompt, completion): return LIMIT["most"][1] if completion else shape(completion)
def matches(prompt, completion): return float(bool(PATTERN.search(completion))) * ARRAY.sum() + bool(CLIENT)

class Base:
    share = 1.0
    def value(self): return self.share

class Scale(Base):
    def __init__(self, scale, names=()):
        self._scale = scale
        self._names = set(names)
        self._lock = threading.Lock()
        self._pattern = re.compile("a+")
        self._random = random.Random(3)
        self._counts = collections.Counter(names)
    def __call__(self, prompt, completion): return self._scale * self.value()
    def method(self, prompt, completion): return self._scale

class Slots:
    __slots__ = ("scale",)
    def __init__(self, scale): self.scale = scale
    def __call__(self, prompt, completion): return self.scale

@dataclasses.dataclass
class Record:
    scale: float
    def __call__(self, prompt, completion): return self.scale

class Room(rl.Environment):
    def __init__(self, value):
        self._value = value
        self._file = open("/dev/null")
    async def start(self, prompt): raise NotImplementedError

class Shift(rl.GroupFilter):
    def __init__(self, by): self._by = by
    def __call__(self, group): return group

def closure(scale):
    def reward(prompt, completion): return scale
    return reward

def defaults(scale):
    def reward(prompt, completion, scale=scale): return scale
    return reward

def keywords(scale):
    def reward(prompt, completion, *, scale=scale): return scale
    return reward

@functools.cache
def cached(prompt, completion): return LIMIT["most"][0]

LIMIT = {"most": [1.0, 2.0]}
MADE = {
    "object": lambda: Scale(1.0, "abc"),
    "slots": lambda: Slots(1.0),
    "record": lambda: Record(1.0),
    "closure": lambda: closure(1.0),
    "lambda": lambda: (lambda scale: lambda prompt, completion: scale)(1.0),
    "defaults": lambda: defaults(1.0),
    "keywords": lambda: keywords(1.0),
    "partial": lambda: functools.partial(nested, b=1.0),
    "wrapped": lambda: functools.update_wrapper(functools.partial(nested, c=1.0), nested),
    "attribute": lambda: functools.wraps(Slots)(closure(7.0)),
    "method": lambda: Scale(1.0).method,
    "cached": lambda: cached,
    "global": lambda: nested,
    "objects": lambda: matches,
    "combined": lambda: rl.CombinedReward({"a": closure(1.0), "b": closure(2.0)}),
    "environment": lambda: Room(1.0),
    "filter": lambda: Shift(1.0),
    "penalty": lambda: rl.OverlongPenalty(8, 4, factor=1.0),
    "isolated": lambda: rl.IsolatedReward("rewards_helpers.shape"),
}
"""
HELPERS = "SHIFT = 1.0\n\ndef shape(completion):\n    return SHIFT\n"
# what is edited, and whose rewards may be others by it
EDITS = {
    "Scale(1.0": ("Scale(2.0", {"object", "method"}),
    "Slots(1.0)": ("Slots(2.0)", {"slots"}),
    "Record(1.0)": ("Record(2.0)", {"record"}),
    "closure(1.0)": ("closure(3.0)", {"closure", "combined"}),
    "scale)(1.0)": ("scale)(2.0)", {"lambda"}),
    "defaults(1.0)": ("defaults(2.0)", {"defaults"}),
    "keywords(1.0)": ("keywords(2.0)", {"keywords"}),
    "b=1.0": ("b=2.0", {"partial"}),
    "c=1.0": ("c=2.0", {"wrapped"}),
    "(7.0)": ("(8.0)", {"attribute"}),
    '"b+"': ('"c+"', {"objects"}),
    "arange(3) * 1.5": ("arange(3) * 2.5", {"objects"}),
    "share = 1.0": ("share = 2.0", {"object", "method"}),
    "return self.share": ("return -self.share", {"object", "method"}),
    "[1.0, 2.0]": ("[1.0, 3.0]", {"cached", "global", "partial", "wrapped"}),
    "SHIFT = 1.0": ("SHIFT = 2.0", {"global", "partial", "wrapped", "isolated"}),
    "return SHIFT": ("return -SHIFT", {"global", "partial", "wrapped", "isolated"}),
    'closure(1.0), "b": closure(2.0)': ('closure(2.0), "b": closure(1.0)', {"combined"}),
    "Room(1.0)": ("Room(2.0)", {"environment"}),
    "Shift(1.0)": ("Shift(2.0)", {"filter"}),
    "factor=1.0": ("factor=2.0", {"penalty"}),
    "def closure(scale):": ("# a comment\n\ndef closure(scale):\n    '''What it does.'''", set()),
}


@pytest.fixture
def identities(tmp_path, monkeypatch):
    """Identities of what the module makes, after an edit."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def of(old="", new=""):
        for name, text in (("rewards_helpers", HELPERS), ("edited_rewards", REWARDS)):
            (tmp_path / f"{name}.py").write_text(text.replace(old, new) if old else text)
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        made = importlib.import_module("edited_rewards").MADE
        found = {name: reward_identity(make()) for name, make in made.items()}
        assert found == {name: reward_identity(make()) for name, make in made.items()}, "in one process"
        return found

    yield of
    for name in ("rewards_helpers", "edited_rewards"):
        sys.modules.pop(name, None)


def test_an_edit_makes_others_of_the_rewards_whose_numbers_it_may_change_and_of_no_more(identities):
    before = identities()
    assert all(is_comparable(identity) for identity in before.values()), before
    assert identities() == before
    for old, (new, names) in EDITS.items():
        assert {name for name, one in identities(old, new).items() if one != before[name]} == names, old


@pytest.mark.slow
def test_they_are_the_same_in_another_process(identities, tmp_path):
    before = identities()
    code = "from edited_rewards import MADE; from lit_async_rl.utils.identity import reward_identity as of; "
    code += "print({name: of(make()) for name, make in MADE.items()})"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "1"}  # of the order of sets
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert eval(done.stdout) == before


class Holds:
    """A reward that holds what it is given."""

    def __init__(self, held):
        self._held = held

    def __call__(self, prompt, completion):
        return 1.0


def test_tensors_count_by_their_values():
    def of(value):
        layer = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(layer.weight, value)
        torch.nn.init.constant_(layer.bias, 0.0)
        return reward_identity(Holds(layer))

    assert of(1.0) == of(1.0) != of(1.5)
    assert reward_identity(Holds(torch.zeros(2))) != reward_identity(Holds(torch.zeros(2, dtype=torch.float16)))


LARGE = list(range(500)), {str(n): [n, {n}] for n in range(500)}


@pytest.mark.parametrize("held", [*LARGE, [float, {"a": float}]], ids=len)
def test_large_and_odd_values_count(held):
    assert reward_identity(Holds(held)) == reward_identity(Holds(held.copy()))
    other = [*held, 1] if isinstance(held, list) else held | {"3": [4]}
    assert reward_identity(Holds(held)) != reward_identity(Holds(other))


def test_a_value_that_contains_itself_has_an_identity():
    def of(value):
        held = [value]
        held.append(held)
        return reward_identity(Holds(held))

    assert of(1) == of(1) != of(2)


def test_what_has_moved_has_the_identity_that_checkpoints_know():
    for moved, was in {
        "CodeReward": "lit_async_rl.rewards.code",
        "JudgeReward": "lit_async_rl.rewards.judge",
        "JudgeLimits": "lit_async_rl.rewards.judge_models",
        "RewardModel": "lit_async_rl.rewards.model",
        "PythonTool": "lit_async_rl.environments.python_tool",
        "CalculatorAgent": "lit_async_rl.tasks.calculator_agent",
        "exact_match": "lit_async_rl.rewards.functions",
        "grades": "lit_async_rl.rewards.references",
        "Prompt": "lit_async_rl.types",
        "AgentResult": "lit_async_rl.agents.calls",
    }.items():
        assert name_of(getattr(rl, moved)) == f"{was}.{moved}"


def test_what_cannot_be_compared_is_named(tmp_path):
    (tmp_path / "answers.txt").write_text("1")
    with (tmp_path / "answers.txt").open() as file:
        identity = reward_identity(Holds({"file": file, "next": (n for n in range(3))}))
    named = sorted(identity.partition(UNKNOWN)[2].split(", "))
    assert named == ["Holds._held['file'] (_io.TextIOWrapper)", "Holds._held['next'] (builtins.generator)"]


def test_a_secret_is_not_shown():
    assert "sk-1234" not in reward_identity(Holds({"api_key": "sk-1234"}))


def test_a_program_counts_with_its_script(tmp_path):
    script = tmp_path / "agent.py"
    script.write_text("print(1)")
    assert file_contents(["python", str(script), "-v"]) == {str(script): b"print(1)"}
