"""Keys of configurations that have another name now: some are read under the old one, others name the new one.

`docs/migration.md` has both as a table.
"""

from __future__ import annotations

import functools
import logging
import re

import yaml

log = logging.getLogger(__name__)

MOVED = {  # still read, in files and as flags
    "data.intake.filters": "data.filters",
    "data.intake.curriculum": "data.curriculum",
    "data.intake.seed": "data.seed",
    "data.intake.shuffle": "data.shuffle",
    "data.intake.success_reward": "data.scoring.success_reward",
    "data.intake.stream_groups": "data.stream_groups",
    "data.intake.replicate_prompts": "data.replicate_prompts",
}
RENAMED = {  # refused
    "data.schedule": "data.admission",
    "data.tape": "data.admission: {class_path: FromTape, init_args: {folder: ...}}",
    "data.async_ratio": "data.admission: {class_path: Bounded, init_args: {async_ratio: ...}}",
    "data.redundant_groups": "data.admission: {class_path: Bounded, init_args: {redundant_groups: ...}}",
    "data.ring": "data.admission: {class_path: Ring, init_args: {num_sampling: ..., capacity: ...}}",
    "data.intake.at_bound": "data.admission: Drop or Retry",
    "data.intake": "data.filters, data.curriculum, data.seed and others (docs/migration.md)",
    "data.val_prompts": "data.validation.prompts",
    "data.num_val_samples": "data.validation.num_samples",
    "data.val_batch_size": "data.validation.batch_size",
    "data.val_sampling": "data.validation.sampling",
    "data.success_reward": "data.validation.success_reward",
    "data.reward_workers": "data.scoring.workers",
    "data.reward_timeout_s": "data.scoring.timeout_s",
    "data.reward_tries": "data.scoring.tries",
    "data.rollout_timeout_s": "data.limits.rollout_timeout_s",
    "data.rank_timeout_s": "data.limits.rank_timeout_s",
    "data.engine_restarts": "data.limits.engine_restarts",
    "data.use_chat_template": "as_chat of the prompt source",
    "model.warmup_steps": "model.scheduler: {class_path: ConstantRate, init_args: {warmup: ...}}",
}
_RAY = (
    "RayEngine with replicas and num_gpus around VLLMEngine: {class_path: RayEngine, init_args: {replicas: 2, "
    "num_gpus: 1, engine: {class_path: VLLMEngine, init_args: {...}}}} (docs/ray.md)"
)
REMOVED = {  # commands and classes
    "serve": f"data.engine: {_RAY}; Ray starts it",
    "VLLMReplicas": _RAY,
    "VLLMServerEngine": _RAY,
}
_FLAG = re.compile(r"--data\.intake(?:\.init_args)?\.(\w+)")


def new_name(name: str) -> str | None:
    """`OLD is now NEW` for a key that is refused, or for a setting within it; None if it was never one."""
    old = next((old for old in RENAMED if name == old or name.startswith(f"{old}.")), None)
    return None if old is None else f"{old} is now {RENAMED[old]}"


def new_class(text: str) -> str | None:
    """`OLD is now NEW` for the first removed class that a text names; None if it names none."""
    name = next((name for name in re.findall(r"VLLM\w+", text) if name in REMOVED), None)
    return None if name is None else f"data.engine={name} is now {REMOVED[name]}"


def moved_flag(word: str) -> str:
    """A word of a command line, under the present name of its setting."""
    match = _FLAG.match(word)
    if match is None:
        return word
    return f"--{_moved(match[1])}{word[match.end() :]}"


def _moved(name: str) -> str:
    """The present full name of a setting of `data.intake`; an unknown one is left to the parser to refuse.

    Raises:
        ValueError: it has gone from there before.
    """
    old = f"data.intake.{name.rstrip('+')}"
    if old in RENAMED:
        raise ValueError(new_name(old))
    if old in MOVED:
        _warn(old)
    return MOVED.get(old, f"data.{name.rstrip('+')}") + ("+" if name.endswith("+") else "")


@functools.cache  # files are read several times
def _warn(old: str) -> None:
    log.warning("%s is now %s", old, MOVED[old])


def move_keys(root: yaml.MappingNode) -> None:
    """Moves the settings of `data.intake` of a configuration, as settings or as a class, to their present places."""
    data = _child(root, "data")
    intake = None if data is None else _child(data, "intake")
    if data is None or (intake is None and not _take(data, "intake")):
        return
    _take(data, "intake")
    given = intake and (_child(intake, "init_args") or intake)
    for key, value in given.value if given else ():
        if key.value == "class_path":
            continue
        *sections, name = _moved(key.value).split(".")[1:]
        place = data
        for section in sections:
            inner = _child(place, section)
            if inner is None:
                _take(place, section)  # null
                inner = yaml.MappingNode("tag:yaml.org,2002:map", [])
                place.value.append((yaml.ScalarNode("tag:yaml.org,2002:str", section), inner))
            place = inner
        place.value.append((yaml.ScalarNode("tag:yaml.org,2002:str", name), value))


def _child(node: yaml.MappingNode, name: str) -> yaml.MappingNode | None:
    """The mapping under a key, if there is one."""
    return next((v for k, v in node.value if k.value == name and isinstance(v, yaml.MappingNode)), None)


def _take(node: yaml.MappingNode, name: str) -> bool:
    """Removes a key; whether it was there."""
    kept = [(key, value) for key, value in node.value if key.value != name]
    is_there = len(kept) < len(node.value)
    node.value = kept
    return is_there
