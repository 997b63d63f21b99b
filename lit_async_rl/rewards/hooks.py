"""Optional methods of a reward, which a run calls on it or on its parts.

| method | called |
|---|---|
| `close()` | at the end of the run; a later call of the reward may reopen its resources |
| `metrics() -> dict[str, float]` | after each step, for the loggers |
| `check_prompt(prompt)` | for each prompt at the start (of more than 10,000: on first use); ValueError refuses it |
| `end_check()` | when the prompts of a run have been checked |
| `use_folder(path)` | at the start, with the folder of the run, on every rank |
| `use_policy(producer)` | if `wants_policy` is true: by the producer, at the start of a fit; with None at its end |
| `concurrency_setting` | by the verdict: name and value of the argument that limits concurrent calls, or None |
| `num_actors` | by the verdict: how many processes of a cluster call it |
| `save_state() -> dict`, `restore_state(state)` | for checkpoints; `state` has numbers and texts only |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.calls import is_async
from lit_async_rl.rewards.combined import CombinedReward
from lit_async_rl.rewards.forms import BatchedReward

MAX_WAITING = 64  # threads waiting for one plain part of a combined reward


def parts_of(reward: Any) -> list[Any]:
    """The user's own objects, see `owner_of`, in all parts of a reward; empty for None."""
    if isinstance(reward, CombinedReward):
        return [owner for part in reward.rewards.values() for owner in parts_of(part)]
    return [] if reward is None else [owner_of(reward)]


def owner_of(reward: Any) -> Any:
    """The user's own object in a reward without parts: the function of a batched reward, else the reward."""
    return reward.reward if isinstance(reward, BatchedReward) else reward


def _found(reward: Any, name: str) -> list[Any]:
    """An optional method or attribute, from the reward or each part that has it."""
    return [one for owner in parts_of(reward) if (one := getattr(owner, name, None)) is not None]


def num_threads(reward: Any, num_workers: int) -> int:
    """Worker threads of a scorer: `num_workers`, or more if a batch or a plain part's calls need them."""
    wanted = [num_workers, getattr(reward, "max_batch_size", 1)]
    if isinstance(reward, CombinedReward):
        wanted += [getattr(part, "max_batch_size", 1) for part in reward.rewards.values()]
        plain = [owner for owner in parts_of(reward) if not is_async(owner)]  # others are awaited in one loop
        wanted += [min(MAX_WAITING, getattr(owner, "max_concurrent", None) or 1) for owner in plain]
    return max(wanted)


def num_actors(reward: Any) -> int | None:
    """Number of a cluster's processes that call the reward or a part of it; None if it is called here."""
    return next(iter(_found(reward, "num_actors")), None)


def metrics_of(reward: Any) -> dict[str, float]:
    """Metrics of all parts."""
    found: dict[str, float] = {}
    for metrics in _found(reward, "metrics"):
        found |= metrics()
    return found


def checking(encode: Callable[[Prompt], Sequence[int]], reward: Any) -> Callable[[Prompt], Sequence[int]]:
    """Extends an encoding of prompts by the checks of all parts."""
    checks = _found(reward, "check_prompt")

    def checked(prompt: Prompt) -> Sequence[int]:
        for check in checks:
            check(prompt)
        return encode(prompt)

    return checked if checks else encode


def end_check(reward: Any) -> None:
    """Tells all parts that the prompts have been checked."""
    for end in _found(reward, "end_check"):
        end()


def wants_folder(reward: Any) -> bool:
    """Whether a part uses the run's folder."""
    return bool(_found(reward, "use_folder"))


def use_folder(reward: Any, folder: Path) -> None:
    """Passes the run's folder to all parts."""
    for use in _found(reward, "use_folder"):
        use(folder)


def wants_policy(reward: Any) -> bool:
    """Whether a part asks the policy in training."""
    return any(_found(reward, "wants_policy"))


def use_policy(reward: Any, producer: Any) -> None:
    """Gives the producer, whose engine has the policy, to parts that ask it; None takes it away."""
    for owner in parts_of(reward):
        if getattr(owner, "wants_policy", False):
            owner.use_policy(producer)


def save_state(reward: Any) -> dict[str, Any]:
    """States of all parts, by position; empty without any."""
    owners = enumerate(parts_of(reward))
    return {str(n): owner.save_state() for n, owner in owners if hasattr(owner, "save_state")}


def restore_state(reward: Any, state: Mapping[str, Any]) -> None:
    """Restores the result of `save_state`; states without a matching part are ignored."""
    for n, owner in enumerate(parts_of(reward)):
        if str(n) in state and hasattr(owner, "restore_state"):
            owner.restore_state(state[str(n)])


def close(reward: Any) -> None:
    """Closes all parts. Safe to call twice if their `close` is."""
    for end in _found(reward, "close"):
        end()
