"""Random runs, each resumed with one thing changed: fresh data keep their identities, and rewards are those of now.

`chosen_runs` draws settings, `try_run` trains with them, saves, changes one thing and goes on. Each group that trains
is compared with the reward that the present settings give it, so that one whose reward would be another must have been
sampled again; where nothing that makes rewards has changed, finished groups must have been kept.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import tempfile
import types
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flow import fit, make_data, make_module
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import DDPStrategy

import lit_async_rl as rl

MODEL = rl.asset("small_sort_policy")
SHARE = 0.001
NUM_TOKENS = 50  # fresh ones in a check
LIMIT_S = 300.0  # of a reward: the machine may be busy
STEPS = 4  # before the checkpoint, and after it
NAMED = ("data.", "model.", "trainer.", "engine.")  # settings, in a line that refuses a run
MODULE = "resumed_reward_of_a_file"

LOSSES = ["PPOClip", "Reinforce", "GSPO", "CISPO", "TOPR", "ScoreCentering", "DPPO", "SAPO", "MiniRL", "OPMD", "ESTR"]
LOSSES += ["ASPO", "GSPOToken", "IPO", "KimiRegression", "M2PO", "BAPO"]
CORRECTIONS = ["TokenTruncatedIS", "SequenceTruncatedIS", "IcePop", "GeometricTruncatedIS", "SecondMomentMask"]
CORRECTIONS += ["SequenceMaskedIS", "TokenRejection", "GeometricRejection"]
ADVANTAGES = ["GroupMeanStd", "GroupMean", "LeaveOneOut", "LengthWeighted", "GlobalMeanStd", "LogMeanExp"]


# -- Rewards: VALUE + SHARE * (a number of the text), with VALUE kept in one place or another -------------------------


def part_of(text: str) -> float:
    """A small number that differs between texts."""
    return SHARE * (sum(map(ord, text)) % 17)


class OfObject:
    """In a private attribute."""

    def __init__(self, given: float) -> None:
        self._kept = {"value": [given]}

    def __call__(self, prompt: rl.Prompt, completion: str) -> float:
        return self._kept["value"][0] + part_of(completion)

    def method(self, prompt: rl.Prompt, completion: str) -> float:
        """The same."""
        return self(prompt, completion)


class OfSlots:
    """In a slot."""

    __slots__ = ("held",)

    def __init__(self, given: float) -> None:
        self.held = given

    def __call__(self, prompt: rl.Prompt, completion: str) -> float:
        return self.held + part_of(completion)


class OfGroup:
    """In an attribute, for whole groups."""

    def __init__(self, given: float) -> None:
        self._value = given

    def __call__(self, prompt: rl.Prompt, completion: str) -> float:
        return self._value + part_of(completion)

    def score_group(self, prompt: rl.Prompt, completions: Any) -> list[float]:
        """One of each."""
        return [self(prompt, completion) for completion in completions]


def of_base(value: float) -> Any:
    """In an attribute of a base class."""
    base = type("Base", (), {"value": value, "__module__": __name__})

    class Derived(base):
        def __call__(self, prompt: rl.Prompt, completion: str) -> float:
            return self.value + part_of(completion)

    return Derived()


def of_closure(value: float) -> Any:
    """In a variable that a function closes over."""

    def reward(prompt: rl.Prompt, completion: str) -> float:
        return value + part_of(completion)

    return reward


def of_default(value: float) -> Any:
    """In a default."""

    def reward(prompt: rl.Prompt, completion: str, value: float = value) -> float:
        return value + part_of(completion)

    return reward


def of_keyword(value: float) -> Any:
    """In the default of a keyword."""

    def reward(prompt: rl.Prompt, completion: str, *, value: float = value) -> float:
        return value + part_of(completion)

    return reward


def of_async(value: float) -> Any:
    """In a closure of a coroutine function."""

    async def reward(prompt: rl.Prompt, completion: str) -> float:
        return value + part_of(completion)

    return reward


def of_batch(value: float) -> Any:
    """In a closure of a function of batches."""

    def reward(prompts: list[rl.Prompt], completions: list[str]) -> list[float]:
        return [value + part_of(completion) for completion in completions]

    return reward


def of_trl(value: float) -> Any:
    """In a closure of a function in TRL's form."""

    def reward(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        return [value + part_of(completion) for completion in completions]

    return reward


FILE = """
VALUE = {value}

def plus(text):
    return VALUE + 0.001 * (sum(map(ord, text)) % 17)

def reward(prompt, completion):
    return plus(completion)
"""


def of_global(value: float) -> Any:
    """In a global of the module, which a function reads that the reward calls."""
    module = types.ModuleType(MODULE)
    sys.modules[MODULE] = module
    exec(compile(FILE.format(value=value), f"{MODULE}.py", "exec"), vars(module))
    return module.reward


def of_process(value: float) -> Any:
    """In the file of a reward that works in another process."""
    sys.modules.pop(MODULE, None)
    Path(_folder(), f"{MODULE}.py").write_text(FILE.format(value=value))
    return rl.IsolatedReward(f"{MODULE}.reward", timeout_s=LIMIT_S / 2)


def _folder() -> str:
    for entry in sys.path:
        if Path(entry).name.startswith(MODULE):
            return entry
    sys.path.append(tempfile.mkdtemp(prefix=MODULE))
    return sys.path[-1]


def of_answer(value: float) -> Any:
    """In the prompts' answers."""
    return lambda prompt, completion: float(prompt.answer) + part_of(completion)


def of_metadata(value: float) -> Any:
    """In an object among the prompts' metadata."""
    return lambda prompt, completion: prompt.metadata["held"].held + part_of(completion)


REWARDS = {
    "object": OfObject,
    "method": lambda value: OfObject(value).method,
    "slots": OfSlots,
    "group": OfGroup,
    "base": of_base,
    "closure": of_closure,
    "default": of_default,
    "keyword": of_keyword,
    "lambda": lambda value: lambda prompt, completion: value + part_of(completion),
    "partial": lambda value: partial(_partial, value),
    "async": of_async,
    "batch": of_batch,
    "trl": of_trl,
    "global": of_global,
    "process": of_process,
    "answer": of_answer,
    "metadata": of_metadata,
    "combined": lambda value: {"a": of_closure(value - 0.5), "b": lambda prompt, completion: 0.5},
    "weighted": lambda value: rl.CombinedReward({"a": _one, "b": of_closure(0.0)}, weights={"a": value}),
}


def _partial(value: float, prompt: rl.Prompt, completion: str) -> float:
    return value + part_of(completion)


def _one(prompt: rl.Prompt, completion: str) -> float:
    return 1.0


class Turns(rl.Environment):
    """Rewards the last of some turns with a value."""

    def __init__(self, value: float, turns: int = 1) -> None:
        self._value = value
        self._turns = turns
        self._num_started = 0

    async def start(self, prompt: rl.Prompt) -> rl.Episode:
        self._num_started += 1
        return Turn(self._value, self._turns)


class Turn(rl.Episode):
    def __init__(self, value: float, turns: int) -> None:
        self._value = value
        self._left = turns

    async def step(self, completion: str) -> rl.Observation:
        self._left -= 1
        if self._left:
            return rl.Observation(text="12=")
        return rl.Observation(reward=self._value, done=True)


def agent_of(value: float) -> Any:
    """An agent that asks twice and closes over its reward."""

    async def agent(prompt: rl.Prompt, client: Any) -> float:
        first = await client.completions.create(prompt=prompt.text)
        await client.completions.create(prompt=prompt.text + first.choices[0].text + ">")
        return value

    return agent


class Agent:
    """An agent that keeps its reward under another name."""

    def __init__(self, given: float) -> None:
        self._kept = given

    async def __call__(self, prompt: rl.Prompt, client: Any) -> float:
        await client.completions.create(prompt=prompt.text)
        return self._kept


class Shift(rl.GroupFilter):
    """A filter that adds to rewards."""

    def __init__(self, given: float) -> None:
        self._by = given

    def __call__(self, group: rl.RolloutGroup) -> rl.RolloutGroup:
        return replace(group, rollouts=tuple(one.add_reward(self._by, part="shift") for one in group.rollouts))


# -- Settings of a run, and the one thing that changes ----------------------------------------------------------------


OF_REWARDS = ("value", "filter", "step_cut_turns", "special_tokens")  # changes that make other rewards
OF_SAMPLES = ("temperature", "group_size")  # changes after which samples are others
CHANGES = (*["value"] * 6, *["filter"] * 3, "step_cut_turns", "special_tokens", *OF_SAMPLES, *["nothing"] * 3)
CHANGES += (
    "loss",
    "correction",
    "learning_rate",
    "max_staleness",
    "admission",
    "in_flight",
    "micro_batches",
    "workers",
)
PENALTIES = ("OverlongPenalty", "Shift")


def chosen_runs(number: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Random settings of runs, each with the thing that changes before it is resumed."""
    chance = random.Random(seed)
    for _ in range(number):
        source = chance.choice([*["reward"] * 5, "environment", "agent"])
        chosen = {
            "source": source,
            "reward": chance.choice([*REWARDS]) if source == "reward" else chance.choice(["object", "closure"]),
            "turns": chance.choice([1, 2]),
            "step_cut_turns": chance.random() < 0.5,
            "filter": chance.choice([None, None, *PENALTIES, "OverlongFilter", "DynamicSampling"]),
            "loss": chance.choice(LOSSES),
            "correction": chance.choice([None, None, *CORRECTIONS]),
            "advantage": chance.choice(ADVANTAGES),
            "admission": chance.choice(["Bounded", "Bounded", "FixedLag", "Drop", "Retry", "Ring"]),
            "max_staleness": chance.choice([0, 1, 1, 2, 3]),
            "dtype": chance.choice(["float32", "float32", "bfloat16"]),
            "in_flight": chance.random() < 0.5,
            "own_process": chance.random() < 0.05,
            "packing": chance.choice([None, None, None, "SharedPromptPacking"]),
            "replay": chance.random() < 0.1,
            "micro_batches": chance.choice([1, 2]),
            "temperature": chance.choice([1.0, 1.0, 0.8]),
            "top_p": chance.choice([1.0, 1.0, 0.9]),
            "special_tokens": "tags",
            "resume_rewards": "anew",
            "group_size": 4,
            "learning_rate": 1e-3,
            "workers": 1,
            "value": 1.0,
            "factor": 1.0,
            "ranks": 2 if chance.random() < 0.05 else 1,
            "change": chance.choice(CHANGES),
        }
        # mostly what is not refused, without which little would be tried
        if chance.random() < 0.95:
            if getattr(rl, chosen["loss"]).needs_behavior_proximal:
                chosen["correction"] = None
            if source != "reward":
                chosen["in_flight"] = True
                chosen["admission"] = "Bounded" if chosen["admission"] == "FixedLag" else chosen["admission"]
            if chosen["admission"] == "FixedLag":
                chosen["in_flight"] = False
                chosen["replay"] = False
                chosen["filter"] = None if chosen["filter"] == "DynamicSampling" else chosen["filter"]
        if source != "reward" and chosen["filter"] == "DynamicSampling":
            chosen["filter"] = None  # all of its rewards are equal, and none would train
        yield chosen


def changed(chosen: dict[str, Any]) -> dict[str, Any]:
    """The settings of the resumed run."""
    name = chosen["change"]
    others = {
        "value": {"value": 5.0},
        "filter": {"factor": 4.0} if chosen["filter"] in PENALTIES else {"filter": "Shift"},
        "step_cut_turns": {"step_cut_turns": not chosen["step_cut_turns"]},
        "special_tokens": {"special_tokens": "all"},
        "temperature": {"temperature": 0.9},
        "group_size": {"group_size": 6},
        "nothing": {},
        "loss": {"loss": "Reinforce" if chosen["loss"] != "Reinforce" else "PPOClip"},
        "correction": {"correction": None if chosen["correction"] else _correction_of(chosen["loss"])},
        "learning_rate": {"learning_rate": 5e-4},
        "max_staleness": {"max_staleness": abs(chosen["max_staleness"] - 1)},
        "admission": {"admission": "Bounded" if chosen["admission"] != "Bounded" else "Drop"},
        "in_flight": {"in_flight": not chosen["in_flight"]},
        "micro_batches": {"micro_batches": 3 - chosen["micro_batches"]},
        "workers": {"workers": 3},
    }
    return chosen | others[name]


def _correction_of(loss: str) -> str | None:
    return None if getattr(rl, loss).needs_behavior_proximal else "TokenTruncatedIS"


def _data(chosen: dict[str, Any]) -> Any:
    value = chosen["value"]
    engine: Any = rl.EmbeddedEngine(
        dtype=chosen["dtype"], own_process=chosen["own_process"], in_flight_weight_updates=chosen["in_flight"]
    )
    reward = None
    if chosen["source"] == "environment":
        turns = chosen["turns"]
        engine = rl.EpisodeEngine(engine, Turns(value, turns), step_cut_turns=chosen["step_cut_turns"])
    elif chosen["source"] == "agent":
        engine = rl.AgentEngine(engine, Agent(value) if chosen["reward"] == "object" else agent_of(value))
    else:
        reward = REWARDS[chosen["reward"]](value)
    filters = {
        "OverlongPenalty": lambda: rl.OverlongPenalty(9, 4, factor=chosen["factor"]),
        "Shift": lambda: Shift(chosen["factor"]),
        None: lambda: None,
    }
    made = filters.get(chosen["filter"], lambda: getattr(rl, chosen["filter"])())()
    admission = {"Ring": lambda: rl.Ring(num_sampling=3, capacity=6)}
    prompts = [
        {"prompt": f"{n}=", "answer": str(value) if chosen["reward"] == "answer" else "1", "held": OfSlots(value)}
        for n in range(10, 99)
    ]
    return make_data(
        model=MODEL,
        prompts=prompts,
        reward=reward,
        engine=engine,
        filters=None if made is None else [made],
        advantage=getattr(rl, chosen["advantage"])(),
        admission=admission.get(chosen["admission"], lambda: getattr(rl, chosen["admission"])())(),
        max_staleness=chosen["max_staleness"],
        groups_per_step=2,
        group_size=chosen["group_size"],
        micro_batches_per_step=chosen["micro_batches"],
        sampling=rl.SamplingParams(max_tokens=9, temperature=chosen["temperature"], top_p=chosen["top_p"]),
        special_tokens=chosen["special_tokens"],
        resume_rewards=chosen["resume_rewards"],
        reward_workers=chosen["workers"],
        reward_timeout_s=LIMIT_S,
        rollout_timeout_s=2 * LIMIT_S,
        replay=rl.ReplayBuffer() if chosen["replay"] else None,
    )


def _module(chosen: dict[str, Any]) -> Any:
    parts = {name: getattr(rl, chosen[name])() for name in ("loss", "packing") if chosen[name]}
    if chosen["correction"] is not None:
        bounds = {"max_ratio": 2.0} if chosen["correction"].endswith("Rejection") else {}
        parts |= {"correction": getattr(rl, chosen["correction"])(**bounds), "proximal": rl.CurrentProximal()}
    return make_module(model=MODEL, dtype=chosen["dtype"], learning_rate=chosen["learning_rate"], **parts)


def faults_of(group: rl.RolloutGroup, chosen: dict[str, Any]) -> list[str]:
    """Rewards of a group that are not those that the settings give."""
    faults = []
    for one in group.rollouts:
        expected = [chosen["value"] + (part_of(one.text) if chosen["source"] == "reward" else 0.0)]
        if chosen["source"] == "environment" and one.finish_reason == "length":
            shown = chosen["step_cut_turns"] and chosen["turns"] == 1
            expected = expected if shown else [0.0]  # of two turns, the first was cut or the last not seen
            expected += [chosen["value"]] if chosen["step_cut_turns"] else []
        if chosen["filter"] == "OverlongPenalty":
            excess = max(0, one.num_policy_tokens - 5)
            expected = [number - chosen["factor"] * min(1.0, excess / 4) for number in expected]
        if chosen["filter"] == "Shift":
            expected = [number + chosen["factor"] for number in expected]
        if all(abs(one.reward - number) > 1e-6 for number in expected):
            faults.append(f"the reward {one.reward} of {one.text!r} ({one.finish_reason}), and not {expected}")
    return faults


class Lines(logging.Handler):
    """Keeps what the package says."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a line."""
        self.lines.append(record.getMessage())


def _fit(
    chosen: dict[str, Any], steps: int, path: str | None = None, save_to: str | None = None
) -> tuple[int, list[str]]:
    """(fresh tokens checked, lines of the log).

    Raises:
        AssertionError: a group has a reward of other settings, or a token is too old.
    """
    data = _data(chosen)
    found: list[str] = []

    def look(trainer: Any, module: Any, *_: Any) -> None:
        for group in data.last_step_groups:
            found.extend(faults_of(group, chosen))
        assert not found, found[:3]

    def look_at_ages(trainer: Any, module: Any, batch: Any, index: int) -> None:
        # of rows of the replay buffer only the group's first tokens are bound
        if not chosen["replay"] and batch.loss_mask.any():
            oldest = int((module.version - batch.versions[batch.loss_mask]).max())
            assert oldest <= chosen["max_staleness"], f"a token is {oldest} versions old"

    monitor = rl.FreshDataMonitor(num_tokens=NUM_TOKENS, on_error="stop")
    save = LambdaCallback(
        on_train_batch_start=look_at_ages,
        on_train_batch_end=look,
        on_train_end=lambda trainer, _: save_to and trainer.save_checkpoint(save_to),
    )
    ranks: dict[str, Any] = {}
    if chosen["ranks"] == 2:
        ranks = dict(devices=2, strategy=DDPStrategy(process_group_backend="gloo"))
    lines = Lines()
    log = logging.getLogger("lit_async_rl")
    log.addHandler(lines)
    try:
        callbacks = [rl.EngineCheck(bound=100.0), monitor, save]
        fit(_module(chosen), data, steps, callbacks=callbacks, ckpt_path=path, **ranks)
    finally:
        log.removeHandler(lines)
    return monitor.num_checked_tokens, lines.lines


def try_run(chosen: dict[str, Any], folder: str | None = None) -> str:
    """`held`, `held, few fresh tokens`, or `refused` with the setting that a run was refused for; else raises.

    Raises:
        AssertionError: a promise was broken in silence.
    """
    with tempfile.TemporaryDirectory() as own:
        path = str(Path(folder or own, "last.ckpt"))
        after = changed(chosen)
        try:
            num_tokens, _ = _fit(chosen, STEPS, save_to=path)
            more, lines = _fit(after, 2 * STEPS, path=path)
        except ValueError as refused:
            if any(part in str(refused) for part in NAMED):
                return f"refused: {str(refused)[:300]}"
            raise
    if chosen["ranks"] == 1:
        _check_lines(chosen, lines)
    return "held" if num_tokens + more else "held, few fresh tokens"


def _check_lines(chosen: dict[str, Any], lines: list[str]) -> None:
    """That a change of rewards or samples was said, and that nothing was sampled again without one."""
    again = [line for line in lines if "of the checkpoint are sampled again" in line]
    change = chosen["change"]
    if change == "step_cut_turns" and chosen["source"] != "environment":
        change = "nothing"
    if change in (*OF_REWARDS, *OF_SAMPLES):
        assert "resumed: 0 finished groups are kept, 0 unfinished groups continue" in lines, lines
    elif change not in ("max_staleness", "admission"):
        assert not again, again


def main() -> None:
    """On one of several ranks: the run of a file, whose result it writes beside it."""
    file = Path(sys.argv[1])
    torch.set_num_threads(1)
    result = try_run(json.loads(file.read_text()), str(file.parent))
    (file.parent / "result").write_text(result)


if __name__ == "__main__":
    main()
