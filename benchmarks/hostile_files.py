"""Damaged and malicious files, and mutated configurations: each must be refused in one line, or work.

python benchmarks/hostile_files.py --files 300 --configs 200 --seed 0

Prints a table, and what went wrong; ends with status 1 if anything did. An audit hook watches for processes, system
calls of payloads and imports of modules that only a payload would ask for.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from hostile_configs import mutate
from hostile_makers import Files

from lit_async_rl.cli.app import AsyncRLCLI, command
from lit_async_rl.utils.config_files import load_config

ROOT = Path(__file__).parent.parent
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
    chance, counts, wrong = random.Random(seed), Counter[tuple[str, str]](), []
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
                result, said = "EXECUTED", f"{executed}"
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
