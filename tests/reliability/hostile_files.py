"""Damaged and malicious files, and mutated configurations: each must be refused in one line, or work.

python tests/reliability/hostile_files.py --files 300 --configs 200 --seed 0

Prints a table, and what went wrong; ends with status 1 if anything did. An audit hook watches for processes, system
calls of payloads and imports of modules that only a payload would ask for.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import logging
import os
import pickle
import random
import shutil
import sys
import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from lit_async_rl.assets import asset
from lit_async_rl.cli.app import AsyncRLCLI, command
from lit_async_rl.problem import Prompt
from lit_async_rl.prompts.sources import JsonlPrompts
from lit_async_rl.replay.tape import Tape, TapeWriter
from lit_async_rl.training.checkpoint_io import AtomicCheckpointIO
from lit_async_rl.training.module import PolicyModule
from lit_async_rl.types import Rollout, RolloutGroup
from lit_async_rl.utils.config_files import load_config

# -- Mutations of a configuration, for `hostile_files.py` -------------------------------------------------------------


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
    config = copy.deepcopy(config)
    kinds = []
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


# -- Damaged and malicious checkpoints, tapes and prompt files, for `hostile_files.py` --------------------------------
# Each maker writes a file and returns its kind and a function that reads it back and compares.


class Payload:
    """Executes a command when unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("true",)


def damage(content: bytes, chance: random.Random) -> tuple[str, bytes]:
    """Random damage: its kind and the damaged content."""
    kind = chance.choice(["flip", "cut", "zeros", "garbage", "doubled", "empty", "insert"])
    place = chance.randrange(len(content))
    flipped = bytes([content[place] ^ (1 << chance.randrange(8))])
    return kind, {
        "flip": content[:place] + flipped + content[place + 1 :],
        "cut": content[:place],
        "zeros": content[:place] + bytes(min(4096, len(content) - place)) + content[place + 4096 :],
        "garbage": chance.randbytes(chance.randrange(1, 5000)),
        "doubled": content + content,
        "empty": b"",
        "insert": content[:place] + chance.randbytes(7) + content[place:],
    }[kind]


class Files:
    """Valid files, and makers of damaged ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        module = PolicyModule(model=asset("sort_policy"))
        self.state: dict[str, Any] = dict(version=3, updated=False, random_state=torch.get_rng_state())
        self.state |= dict(state_dict=module.state_dict(), global_step=3)
        AtomicCheckpointIO().save_checkpoint(self.state, folder / "whole.ckpt")
        self.checkpoint = (folder / "whole.ckpt").read_bytes()
        writer = TapeWriter(folder / "whole")
        for step in range(5):
            writer.append(step, step, [group(step)])
            writer.flush()
        writer.release()
        self.steps = list(Tape(folder / "whole").steps())

    def make_checkpoint(self, chance: random.Random) -> tuple[str, Callable[[], bool]]:
        """A damaged checkpoint, a pickle, or an archive of something else."""
        path = self.folder / "c.ckpt"
        kind = chance.choice(["damaged"] * 5 + ["payload", "pickle", "foreign", "archive", "legacy", "resealed"])
        if kind == "damaged":
            kind, content = damage(self.checkpoint, chance)
            path.write_bytes(content)
        elif kind == "payload":
            AtomicCheckpointIO().save_checkpoint({**self.state, chance.choice("abc"): Payload()}, path)
        elif kind == "pickle":
            path.write_bytes(pickle.dumps(Payload(), protocol=chance.randrange(6)))
        elif kind == "foreign":
            torch.save(
                chance.choice([{"weight": torch.zeros(2)}, [1], torch.zeros(2), "text", {"state_dict": 1}]), path
            )
        elif kind == "legacy":
            torch.save({"a": Payload()}, path, _use_new_zipfile_serialization=False)
        else:
            self._archive(path, kind, chance)

        def read() -> bool:
            loaded = AtomicCheckpointIO().load_checkpoint(path)
            return all(torch.equal(v, loaded["state_dict"][k]) for k, v in self.state["state_dict"].items())

        return f"checkpoint, {kind}", read

    def _archive(self, path: Path, kind: str, chance: random.Random) -> None:
        """An archive with renamed members, or with a pickle replaced by a payload."""
        with zipfile.ZipFile(io.BytesIO(self.checkpoint)) as whole, zipfile.ZipFile(path, "w") as made:
            for name in whole.namelist():
                content = whole.read(name)
                if kind == "resealed" and name.endswith("data.pkl"):
                    content = pickle.dumps(Payload(), protocol=2)
                made.writestr("../../" + name if kind == "archive" and chance.random() < 0.5 else name, content)

    def make_tape(self, chance: random.Random) -> tuple[str, Callable[[], bool]]:
        """A tape with a file or the manifest damaged, missing, copied, or renamed."""
        folder = self.folder / "tape"
        shutil.copytree(self.folder / "whole", folder)
        files = sorted(folder.glob("*.arrow"))
        file = chance.choice([*files, folder / "manifest.jsonl"])
        kind = chance.choice(["damaged", "missing", "copied", "renamed", "damaged name", "no manifest and missing"])
        if kind == "damaged":
            kind, content = damage(file.read_bytes(), chance)
            file.write_bytes(content)
        elif kind == "missing":
            file.unlink()
        elif kind == "copied":
            shutil.copy(
                file, folder / ("copy-" + file.name if file.suffix != ".arrow" else file.name.replace("-0", "-1", 1))
            )
        elif kind == "renamed":
            file.rename(folder / file.name.replace("0000000", "0000001", 1))
        elif kind == "damaged name":
            file.rename(folder / f"{file.name[:-7]}x.arrow")
        else:
            (folder / "manifest.jsonl").unlink()
            shutil.copy(files[1], folder / files[1].name.replace("1-", "0-", 1))
        return f"tape, {kind}", lambda: list(Tape(folder).steps()) == self.steps

    def make_prompts(self, chance: random.Random) -> tuple[str, Callable[[], bool]]:
        """A prompt file with one invalid line."""
        lines = [json.dumps({"prompt": f"{n}=", "answer": str(n)}).encode() for n in range(6)]
        bad = {
            "surrogate": rb'{"prompt": "\ud83d", "answer": "1"}',
            "deep": b'{"prompt": ' + b"[" * 10**5 + b"]" * 10**5 + b"}",
            "number": b'{"prompt": 1' + b"0" * 9000 + b', "answer": "1"}',
            "bytes": chance.randbytes(50),
            "list": b"[1, 2]",
            "null": b'{"prompt": null, "answer": "1"}',
            "object": b'{"prompt": {"a": 1}, "answer": "1"}',
            "no field": b'{"answer": "1"}',
            "cut": lines[0][: chance.randrange(1, len(lines[0]))],
            "NaN": b'{"prompt": NaN, "answer": Infinity}',
            "null bytes": b"\0" * 20,
            "UTF-16": '{"prompt": "1", "answer": "1"}'.encode("utf-16"),
        }
        kind = chance.choice(sorted(bad))
        lines[chance.randrange(6)] = bad[kind]
        path = self.folder / "p.jsonl"
        path.write_bytes(b"\n".join(lines))

        def read() -> bool:
            source = JsonlPrompts(str(path))
            return all(source[n].text.encode() for n in range(len(source)))

        return f"prompts, {kind}", read


def group(step: int) -> RolloutGroup:
    """A group of one completion."""
    about: Any = dict(logprobs=(-0.5,), versions=(step,), finish_reason="stop", text="a", reward=1.0)
    rollouts = (Rollout(token_ids=(3,), **about),)
    times: Any = dict(admitted_version=step, generation_s=0.1, queue_s=0.1)
    return RolloutGroup(index=step, prompt=Prompt(text="1="), prompt_ids=(1,), rollouts=rollouts, **times)


ROOT = Path(__file__).parents[2]
EXECUTED: list[str] = []
WATCHED = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn", "shutil.rmtree")


def watch() -> None:
    """Records audit events of this process from now on."""
    sys.addaudithook(lambda event, args: EXECUTED.append(f"{event} {args}") if event.startswith(WATCHED) else None)


def build(path: Path, runs: Path) -> bool:
    """Parses a configuration and instantiates everything in it."""
    AsyncRLCLI(["--config", str(path), "--trainer.default_root_dir", str(runs)])
    return True


# -- running -------------------------------------------------------------------------------------------------------
def outcome(read: Callable[[], bool]) -> tuple[str, str]:
    """`works`, `one line`, or the kind of failure; and the output."""
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()), command():
            return ("works" if read() else "WRONG CONTENT"), ""
    except SystemExit as end:
        said = end.code if isinstance(end.code, str) else told.getvalue()
        said = said[said.find("error: ") :]
        is_good = end.code not in (0, None) and said.startswith("error: ") and "Traceback" not in told.getvalue() + said
        return ("one line" if is_good and len(said.strip().splitlines()) <= 3 else "BAD MESSAGE"), said
    except BaseException as error:
        return "TRACEBACK", repr(error)


def battery(num_files: int, num_configs: int, seed: int) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Outcomes by kind of file, and all failures."""
    chance = random.Random(seed)
    counts = Counter[tuple[str, str]]()
    wrong = []
    config = load_config(ROOT / "configs/quickstart.yaml")
    with tempfile.TemporaryDirectory() as name:
        files = Files(Path(name))
        makers = [files.make_checkpoint, files.make_tape, files.make_prompts]
        for number in range(num_files + num_configs):
            shutil.rmtree(Path(name) / "tape", ignore_errors=True)
            if number < num_files:
                kind, read = makers[number % 3](chance)
            else:
                kind, text = mutate(config, chance)
                path = Path(name) / "mutated.yaml"
                path.write_bytes(text)
                read = lambda path=path: build(path, Path(name) / "runs")  # noqa: E731
            EXECUTED.clear()
            result, said = outcome(read)
            if executed := [event for event in EXECUTED if "rmtree" not in event or name not in event]:
                result = "EXECUTED"
                said = f"{executed}"
            counts[kind, result] += 1
            if result.isupper():
                wrong.append(f"{number}: {kind}: {result}: {said}")
    return counts, wrong


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=300)
    parser.add_argument("--configs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    os.chdir(ROOT)
    sys.argv = sys.argv[:1]
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    watch()
    counts, wrong = battery(arguments.files, arguments.configs, arguments.seed)
    print(f"| {'file':32} | one line | works | wrong |\n|{'-' * 34}|---|---|---|")
    for kind in sorted({kind for kind, _ in counts}):
        bad = sum(n for (k, result), n in counts.items() if k == kind and result.isupper())
        print(f"| {kind:32} | {counts[kind, 'one line']} | {counts[kind, 'works']} | {bad} |")
    print(f"{sum(counts.values())} in all, {len(wrong)} wrong", *wrong, sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
