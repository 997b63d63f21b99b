"""Mutations of a configuration, for `hostile_files.py`."""

from __future__ import annotations

import copy
import random
from typing import Any

import yaml

VALUES: list[Any] = [None, -1, 0, 10**30, float("nan"), float("inf"), "", "x", [], {}, True, [1], {"a": 1}, "${a.b}"]
PATHS = ["os.system", "subprocess.Popen", "builtins.eval", "shutil.rmtree", "lit_async_rl.losses.Nope"]
PATHS += ["torch.nn.Linear", "lit_async_rl.rewards.functions.exact_match", "no.such.module", "pathlib.Path", "..", "1"]
BOMB = b"".join(b"%c: &%c [%s]\n" % (98 + n, 98 + n, b",".join([b"*%c" % (97 + n)] * 9)) for n in range(9))
TEXTS = [
    b"data: {seed: \xff}", b"\xff\xfe\0\0", b"data: [", b"- 1", b"", b"\0", b"data: &a {seed: *a}", b"a: " + b"[" * 500,
    b"a: &a [x,x,x,x,x,x,x,x,x]\n" + BOMB,
    b"data: {seed: 1, seed: 2}", b"data: {seed: !!python/object/apply:os.system [ls]}", b"<<: *nothing",
    b"data: 3", b"? [a]\n: 1",
]  # fmt: skip


def mutate(config: dict[str, Any], chance: random.Random) -> tuple[str, bytes]:
    """One to three mutations of a configuration, as YAML."""
    if chance.random() < 0.15:
        return "config, text", chance.choice(TEXTS)
    config, kinds = copy.deepcopy(config), []
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        holder, key = chance.choice(_places(config))
        kind = chance.choice(["drop", "rename", "value", "value", "wrap", "class path"])
        kinds.append(kind)
        if kind == "drop":
            del holder[key]
        elif kind == "rename":
            holder[str(key) + chance.choice(["s", "_", ".x"])] = holder.pop(key)
        elif kind == "value":
            holder[key] = chance.choice(VALUES)
        elif kind == "wrap":
            holder[key] = chance.choice([[holder[key]], {"init_args": holder[key]}])
        else:
            path = chance.choice(PATHS)
            arguments = {"command": "true", "path": "/tmp/nothing", "args": ["true"]}
            holder[key] = chance.choice([path, {"class_path": path}, {"class_path": path, "init_args": arguments}])
    return f"config, {kinds[0] if len(kinds) == 1 else 'several'}", yaml.safe_dump(config).encode()


def _places(config: Any) -> list[tuple[dict[Any, Any], Any]]:
    found = [(config, key) for key in config]
    return found + [place for value in config.values() if isinstance(value, dict) for place in _places(value)]
