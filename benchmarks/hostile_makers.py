"""Damaged and malicious checkpoints, tapes and prompt files, for `hostile_files.py`.

Each maker writes a file and returns its kind and a function that reads it back and compares.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lit_async_rl.assets import asset
from lit_async_rl.prompts.sources import JsonlPrompts
from lit_async_rl.replay.tape import Tape, TapeWriter
from lit_async_rl.training.checkpoint_io import AtomicCheckpointIO
from lit_async_rl.training.module import PolicyModule
from lit_async_rl.types import Prompt, Rollout, RolloutGroup


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
