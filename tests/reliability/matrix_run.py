"""One run of `kill_matrix.py` over all of its processes: started by fork, watched by its journal, killed, resumed."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import yaml
from matrix_probe import RAISE

from lit_async_rl.runtime.ports import free_port

# -- Settings of the runs of `kill_matrix.py`, a covering design of them, and the configuration file of one run -------


LAG = 2
GROUPS = 4
GROUP_SIZE = 4
ROLLOUT_TIMEOUT_S = 60.0
RANK_TIMEOUT_S = 30.0
REPLAY_STALENESS = 6
FACTORS: dict[str, tuple[Any, ...]] = {
    "trigger": ("steps", "last", "time", "validation", "metric", "epoch", "exception"),
    "micro_batches": (1, 2, 4),
    "ranks": (1, 2),
    "weight_sync_steps": (1, 3),
    "source": ("whole steps", "streamed", "replay buffer"),
    "schedule": ("fixed_lag", "free", "adaptive"),
    "evaluation": (False, True),
}


@dataclass(frozen=True)
class Combo:
    """One row of the matrix."""

    trigger: str = "steps"
    micro_batches: int = 1
    ranks: int = 1
    weight_sync_steps: int = 1
    source: str = "whole steps"
    schedule: str = "fixed_lag"
    evaluation: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether the result must be bitwise independent of kills."""
        return self.schedule == "fixed_lag"

    def __str__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return ", ".join(f"{name}={value}" for name, value in values.items())


def covering(seed: int, tries: int = 40) -> list[Combo]:
    """Few combinations in which all pairs of settings occur: under `fixed_lag`, and each with every schedule."""
    chance = random.Random(seed)
    missing = set(_required())
    chosen: list[Combo] = []
    while missing:
        candidates = _random(chance, tries)
        best = max(candidates, key=lambda combo: (sum(_has(combo, pair) for pair in missing), -combo.ranks))
        covered = {pair for pair in missing if _has(best, pair)}
        chosen += [best] if covered else []
        missing -= covered
    return chosen


def _random(chance: random.Random, number: int) -> list[Combo]:
    return [Combo(**{name: chance.choice(values) for name, values in FACTORS.items()}) for _ in range(number)]


Settings = tuple[tuple[str, Any], ...]


def _required() -> list[Settings]:
    pairs = itertools.combinations(FACTORS.items(), 2)
    of_values = (((a, x), (b, y)) for (a, xs), (b, ys) in pairs for x in xs for y in ys)
    return [pair if "schedule" in dict(pair) else (*pair, ("schedule", "fixed_lag")) for pair in of_values]


def _has(combo: Combo, settings: Settings) -> bool:
    return all(getattr(combo, name) == value for name, value in settings)


def write_config(combo: Combo, folder: Path, steps: int) -> Path:
    """A configuration file as a user would write it."""
    path = folder / "combo.yaml"
    path.write_text(yaml.safe_dump(_config(combo, folder, steps), sort_keys=False))
    return path


def _config(combo: Combo, folder: Path, steps: int) -> dict[str, Any]:
    data: dict[str, Any] = {
        "admission": "FixedLag" if combo.is_exact else "Bounded",
        "max_staleness": LAG,
        "groups_per_step": GROUPS,
        "group_size": GROUP_SIZE,
        "micro_batches_per_step": combo.micro_batches,
        "weight_sync_steps": combo.weight_sync_steps,
        "stream_groups": combo.source == "streamed",
        "limits": {"rollout_timeout_s": ROLLOUT_TIMEOUT_S, "rank_timeout_s": RANK_TIMEOUT_S},
    }
    if combo.source == "replay buffer":
        data["replay"] = {"fresh_fraction": 0.5, "max_staleness": REPLAY_STALENESS}
    trainer: dict[str, Any] = {"max_steps": steps, "devices": combo.ranks}
    if combo.ranks > 1:
        trainer["strategy"] = {"class_path": "lightning.pytorch.strategies.DDPStrategy"}
    validates = combo.trigger in ("validation", "metric")
    if validates:
        data["validation"] = {"prompts": _prompts(8)}
        trainer |= {"val_check_interval": 2 * combo.micro_batches, "check_val_every_n_epoch": None}
    if combo.trigger == "epoch":
        trainer["limit_train_batches"] = 3 * combo.micro_batches
    trainer["logger"] = _part("lit_async_rl.training.trackers.CSVLog", save_dir=str(folder), name="log")
    trainer["callbacks"] = [
        _part("lightning.pytorch.callbacks.ModelCheckpoint", dirpath=str(folder / "checkpoints"), **_when(combo)),
        _part("RolloutTape", folder=str(folder / "tape")),
        _part("matrix_probe.Journal", folder=str(folder / "journal")),
    ]
    if combo.evaluation:
        trainer["callbacks"].append(_part("Evaluation", datasets={"sort": _prompts(8)}, every_n_steps=3))
    if combo.schedule == "adaptive":
        trainer["callbacks"].append(_part("AdaptiveStaleness", target_ess_ratio=0.9, band=0.01, smoothing=0.2))
    return {"data": data, "trainer": trainer}


def _when(combo: Combo) -> dict[str, Any]:
    """Triggers and retention of `ModelCheckpoint`."""
    return {
        "steps": dict(every_n_train_steps=2, save_top_k=-1, filename="{step}"),
        "last": dict(every_n_train_steps=3, save_last=True),
        "time": dict(train_time_interval="0:00:00.15", save_top_k=-1),
        "validation": dict(every_n_epochs=1, save_on_train_epoch_end=False, save_top_k=-1, filename="{step}"),
        "metric": dict(every_n_train_steps=2, monitor="val/reward", mode="max", save_top_k=2, save_last="link"),
        "epoch": dict(every_n_epochs=1, save_on_train_epoch_end=True, save_top_k=-1),
        "exception": dict(every_n_train_steps=4, save_on_exception=True, save_top_k=-1, filename="{step}"),
    }[combo.trigger]


def _prompts(size: int) -> dict[str, Any]:
    return _part("lit_async_rl.tasks.SortDigits", num_digits=4, size=size, split="held_out")


def _part(class_path: str, **init_args: Any) -> dict[str, Any]:
    return {"class_path": class_path, "init_args": init_args}


LIMIT_S = ROLLOUT_TIMEOUT_S + 10.0  # longest without a micro-batch, or until a process ends whose other rank is gone
HERE = Path(__file__).parent
BASE = HERE / "kill_matrix.yaml"
POLL_S = 0.001
MOMENTS = ("any time", "checkpoint written", "checkpoint being written", "between micro-batches", "first micro-batch")


class Hung(Exception):
    """No progress for `LIMIT_S`."""


class MatrixRun:
    """A training run whose processes are forked from this one, in a process group of their own.

    Args:
        combo: its settings.
        folder: must not exist.
        steps: optimizer steps of the whole run.
    """

    def __init__(self, combo: Combo, folder: Path, steps: int) -> None:
        self.combo = combo
        self.folder = folder
        self.steps = steps
        self.segment = 0
        self.waits: list[float] = []  # seconds from the start of a process to its first micro-batch
        self._pids: dict[int, int] = {}  # of each rank that runs
        self.codes: list[int] = []  # exit codes of the last processes
        self._make_folder()

    def _make_folder(self) -> None:
        (self.folder / "journal").mkdir(parents=True)
        self.config = write_config(self.combo, self.folder, self.steps)

    # -- processes ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Forks one process per rank, from the newest checkpoint if there is one."""
        if self.segment and self.newest() is None:
            shutil.rmtree(self.folder)
            self._make_folder()
        self.segment += 1
        self._began = time.monotonic()
        self._first = True
        self._progress = self._began
        self._size = 0
        self.codes = []
        arguments = ["--config", str(BASE), "--config", str(self.config)]
        if (newest := self.newest()) is not None:
            arguments += ["--ckpt_path", str(newest)]
        port = free_port()
        group = 0
        for rank in range(self.combo.ranks):
            pid = os.fork()
            if pid == 0:
                self._train(arguments, rank, port, group)
            group = group or pid
            _ignore(lambda pid=pid, group=group: os.setpgid(pid, group))
            self._pids[rank] = pid
        self._group = group

    def _train(self, arguments: list[str], rank: int, port: int, group: int) -> NoReturn:
        """The child: the command line of `scripts/train.py`, started as by torchrun with two ranks."""
        code = 1
        try:
            os.setpgid(0, group)
            signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            log = os.open(self.folder / f"log.{self.segment}.{rank}", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ["SEGMENT"] = str(self.segment)
            if self.combo.ranks > 1:
                os.environ |= _torchrun(rank, self.combo.ranks, port)
            sys.argv = ["scripts/train.py", *arguments]
            from lit_async_rl.cli.app import main

            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
            print(end.code, file=sys.stderr)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        for rank, pid in list(self._pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._pids[rank]
                self.codes.append(os.waitstatus_to_exitcode(status))

    @property
    def is_running(self) -> bool:
        """Whether all ranks are alive. Also reads the journal.

        Raises:
            Hung: neither journal nor processes make progress.
        """
        self._reap()
        size = sum(path.stat().st_size for path in self._journals())
        if size > self._size:
            if self._first:
                self.waits.append(time.monotonic() - self._began)
            self._size = size
            self._progress = time.monotonic()
            self._first = False
        if time.monotonic() - max(self._progress, self._began) > LIMIT_S:
            raise Hung(f"{self.folder}: nothing for {LIMIT_S:g} s in segment {self.segment}")
        return len(self._pids) == self.combo.ranks

    def end(self) -> None:
        """Waits until all processes have ended.

        Raises:
            Hung: one has not, `RANK_TIMEOUT_S` + 10 s after another.
        """
        began = time.monotonic()
        while self._pids:
            self._reap()
            time.sleep(0.002)
            if time.monotonic() - began > RANK_TIMEOUT_S + 10.0:
                raise Hung(f"{self.folder}: ranks {list(self._pids)} live still, segment {self.segment}")

    def kill(self, rank: int | None = None, by: signal.Signals = signal.SIGKILL) -> None:
        """Kills all ranks, or one of them, which the others must detect."""
        if rank is None and self._pids:
            _ignore(lambda: os.killpg(self._group, by))
        elif rank in self._pids:
            os.kill(self._pids[rank], by)

    # -- what can be seen ---------------------------------------------------------------------------------------------

    def _journals(self) -> list[Path]:
        return list((self.folder / "journal").glob(f"{self.segment}.*.jsonl"))

    def lines(self) -> list[dict[str, Any]]:
        """Journal of rank 0's running process."""
        return list(read(self.folder / "journal" / f"{self.segment}.0.jsonl"))

    def checkpoints(self) -> dict[str, int]:
        """Names and times of checkpoints."""
        found = {}
        for path in (self.folder / "checkpoints").glob("*.ckpt"):
            _ignore(lambda path=path: found.update({path.name: path.stat().st_mtime_ns}))
        return found

    def newest(self) -> Path | None:
        """The newest checkpoint."""
        found = self.checkpoints()
        return self.folder / "checkpoints" / max(found, key=lambda name: found[name]) if found else None

    @property
    def step(self) -> int:
        """Step of the last micro-batch."""
        return max((line["step"] for line in self.lines() if line["at"] == "micro"), default=0)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches started by the running process."""
        return sum(line["at"] == "micro" for line in self.lines())

    def raise_in_a_step(self) -> bool:
        """Makes all ranks raise within a step; False if the run ended before."""
        request = self.folder / "journal" / RAISE
        request.write_text(str(self.step + 2))
        self.wait_for(lambda: False)
        self.end()
        request.unlink()
        return any(self.codes)

    def wait_for(self, is_time: Callable[[], bool], seconds: float = LIMIT_S) -> bool:
        """Waits for a moment; False if the run ended before, or after `seconds`."""
        began = time.monotonic()
        while self.is_running and time.monotonic() - began < seconds:
            if is_time():
                return True
            time.sleep(POLL_S)
        return False


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Complete lines of a journal."""
    if path.exists():
        for line in path.read_text().split("\n")[:-1]:
            yield json.loads(line)


def is_moment(name: str, run: MatrixRun, chance: random.Random) -> Callable[[], bool]:
    """Whether a moment of `MOMENTS` has come; polled."""
    before = run.checkpoints()
    began = time.monotonic()
    pause = chance.uniform(0.0, 3.0)
    per_step = run.combo.micro_batches
    place = chance.randrange(2, 12) * per_step + chance.randrange(1, max(2, per_step))
    return {
        "any time": lambda: time.monotonic() - began > pause,
        "checkpoint written": lambda: run.checkpoints() != before,
        "checkpoint being written": lambda: any((run.folder / "checkpoints").glob(".*.part")),
        "between micro-batches": lambda: run.num_micro_batches > place,
        "first micro-batch": lambda: run.num_micro_batches >= 2,
    }[name]


def _torchrun(rank: int, ranks: int, port: int) -> dict[str, str]:
    place = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, GROUP_RANK=0)
    where = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_RUN_ID="matrix", GLOO_SOCKET_IFNAME="lo")
    return {name: str(value) for name, value in (place | where).items()}


def _ignore(action: Callable[[], Any]) -> None:
    with contextlib.suppress(OSError):
        action()
