"""Suites of the benchmark, read from `configs/time_to_accuracy`.

`workloads.yaml` and `systems.yaml` define workloads and systems as configuration files and arguments of the command
line; a suite in `suites/` lists which of them run, with which seeds.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

CONFIGS = Path("configs/time_to_accuracy")
RATE = "@"  # between a system and a multiple of the workload's learning rate


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A task, with the steps of its synchronous run.

    Attributes:
        configs: configuration files; `arguments` come after those of the system, with the cell's seed for `SEED`.
        num_steps: optimizer steps of a system that does not say otherwise.
        snapshot_steps: steps between two snapshots of the policy in a run of `num_steps`; longer runs keep as many
            in all.
        evaluation: further arguments when the snapshots are evaluated, e.g. without delays.
        reference: system that the others are compared with.
        final: further arguments of the one evaluation after the last step, which is on more problems; none makes none.
        learning_rate: that of the configuration, which `SYSTEM@FACTOR` multiplies; None: no system may do so.
        sleeps: whether tools and rewards take their time. If not, a run's own clock says nothing: that of a synchronous
            run is `latency.clock`.
        slept_as: workload that a synchronous run counts as, with its latencies on the clock; None: none.
        latency_factor: of these latencies.
    """

    configs: tuple[str, ...]
    num_steps: int
    snapshot_steps: int
    arguments: tuple[str, ...] = ()
    evaluation: tuple[str, ...] = ()
    reference: str = "synchronous"
    final: tuple[str, ...] = ()
    learning_rate: float | None = None
    sleeps: bool = True
    slept_as: str | None = None
    latency_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class System:
    """A way to train, as an overlay.

    Attributes:
        configs: configuration files, after those of the workload.
        steps: multiple of the workload's `num_steps`: an asynchronous run may use the time that it saves.
        is_trl: whether TRL's GRPOTrainer trains, with the model, prompts and schedule of these settings.
    """

    configs: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    steps: float = 1.0
    is_trl: bool = False


@dataclass(frozen=True, order=True)
class Cell:
    """One training run. `SYSTEM@FACTOR` is a system at a multiple of the workload's learning rate."""

    workload: str
    system: str
    seed: int

    @property
    def folder(self) -> Path:
        """Folder of its results, relative to the benchmark's."""
        return Path("cells", self.workload, self.system, f"seed={self.seed}")

    @classmethod
    def of(cls, folder: Path) -> Cell:
        """Inverse of `folder`."""
        return cls(folder.parent.parent.name, folder.parent.name, int(folder.name.removeprefix("seed=")))

    @property
    def settings(self) -> System:
        """The system's, at the workload's rate."""
        return systems()[self.system.partition(RATE)[0]]

    @property
    def num_steps(self) -> int:
        """Optimizer steps."""
        return round(workloads()[self.workload].num_steps * self.settings.steps)

    def rate(self) -> list[str]:
        """Arguments for the learning rate, if it is not that of the configuration.

        Raises:
            ValueError: the workload does not say which that is.
        """
        _, _, factor = self.system.partition(RATE)
        if not factor:
            return []
        rate = workloads()[self.workload].learning_rate
        if rate is None:
            raise ValueError(f"system={self.system!r}: the workload {self.workload} has no learning_rate to multiply")
        return [f"--model.learning_rate={rate * float(factor):.6g}"]

    def arguments(self) -> list[str]:
        """Arguments of `scripts/train.py` for the same run."""
        workload = workloads()[self.workload]
        system = self.settings
        configs = [part for path in (*workload.configs, *system.configs) for part in ("--config", path)]
        steps = ["--trainer.max_steps", str(self.num_steps), "--seed_everything", str(self.seed)]
        seeds = ["--data.seed", str(self.seed)]
        arguments = [*configs, *system.arguments, *workload.arguments, *self.rate(), *steps, *seeds]
        return [argument.replace("SEED", str(self.seed)) for argument in arguments]


@dataclass(frozen=True)
class Suite:
    """Cells in order; one may take `cell_timeout_s` seconds."""

    name: str
    cells: tuple[Cell, ...]
    cell_timeout_s: float = 3600.0


def workloads() -> Mapping[str, Workload]:
    """All workloads, by name."""
    return {name: Workload(**_tuples(one)) for name, one in _read(CONFIGS / "workloads.yaml").items()}


def systems() -> Mapping[str, System]:
    """All systems, by name."""
    return {name: System(**_tuples(one or {})) for name, one in _read(CONFIGS / "systems.yaml").items()}


def load_suite(name: str) -> Suite:
    """Reads `suites/<name>.yaml`: seed by seed, so that an interrupted suite covers all systems.

    Raises:
        FileNotFoundError: there is no such suite.
        ValueError: it names an unknown key, workload or system.
    """
    path = CONFIGS / "suites" / f"{name}.yaml"
    if not path.is_file():
        known = sorted(p.stem for p in path.parent.glob("*.yaml"))
        raise FileNotFoundError(f"suite={name!r}: no such suite; there are {known}")
    raw = _read(path)
    cells: list[Cell] = []
    for block in raw.pop("blocks"):
        _check(path, block, ("workload", "systems", "seeds"))
        _check(path, [block["workload"]], tuple(workloads()))
        _check(path, [name.partition(RATE)[0] for name in block["systems"]], tuple(systems()))
        cells += [Cell(block["workload"], system, seed) for seed, system in product(block["seeds"], block["systems"])]
    _check(path, raw, ("cell_timeout_s",))
    return Suite(name, tuple(cells), float(raw.get("cell_timeout_s", Suite.cell_timeout_s)))


def _check(path: Path, names: Any, known: tuple[str, ...]) -> None:
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{path}: unknown {sorted(unknown)}; there are {sorted(known)}")


def _read(path: Path) -> dict[str, Any]:
    return copy.deepcopy(_parsed(path.read_text()))


@cache
def _parsed(text: str) -> dict[str, Any]:  # of the same files for every cell
    read: Any = OmegaConf.to_container(OmegaConf.create(text))
    return read


def _tuples(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(map(str, value)) if isinstance(value, list) else value for name, value in settings.items()}
