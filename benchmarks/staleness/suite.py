"""Suites of the staleness benchmark, read from `configs/bench/suites/*.yaml`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

CONFIGS = Path("configs")
BEST = "best"
FIRST_SEARCH_SEED = 100  # seeds from here on choose learning rates, and are not reported


@dataclass(frozen=True, order=True)
class Cell:
    """One training run.

    Args:
        regime: name of a file in `configs/bench/regimes`.
        method: names of files in `configs/bench/methods` or `configs/stabilizers`, joined by `+`.
        lag: `data.max_staleness`, in versions; 0 is synchronous.
        learning_rate_scale: multiplies the regime's learning rate.
        seed: of prompts, sampling and everything else.
    """

    regime: str
    method: str
    lag: int
    learning_rate_scale: float
    seed: int

    @property
    def folder(self) -> Path:
        """Folder of its results, relative to the benchmark's."""
        name = f"lag={self.lag},lr={self.learning_rate_scale:g},seed={self.seed}"
        return Path("cells", self.regime, self.method, name)

    @classmethod
    def of(cls, folder: Path) -> Cell:
        """Inverse of `folder`."""
        settings = dict(part.split("=") for part in folder.name.split(","))
        regime = folder.parent.parent.name
        method = folder.parent.name
        return cls(
            regime, method, int(settings["lag"]), learning_rate_scale=float(settings["lr"]), seed=int(settings["seed"])
        )

    def arguments(self) -> list[str]:
        """Arguments of `scripts/train.py` for the same run.

        Raises:
            FileNotFoundError: a method or regime has no file.
        """
        regime = find("regime", self.regime)
        arguments = ["--config", "configs/bench/base.yaml", "--config", str(regime)]
        for part in self.method.split("+"):
            arguments += ["--config", str(find("method", part))]
        learning_rate = _learning_rate(regime.read_text()) * self.learning_rate_scale
        return [
            *arguments,
            *("--model.learning_rate", f"{learning_rate:g}", "--data.max_staleness", str(self.lag)),
            *("--seed_everything", str(self.seed), "--data.seed", str(self.seed)),
        ]


@dataclass(frozen=True)
class Block:
    """Cells of one regime: every method with every lag, learning rate and seed.

    `learning_rate_scales` is `best` where each (method, lag) uses the scale that did best in an earlier block, the
    search, whose seeds are other ones.
    """

    regime: str
    methods: tuple[str, ...]
    lags: tuple[int, ...]
    seeds: tuple[int, ...]
    learning_rate_scales: tuple[int | float, ...] | str = (1.0,)

    @property
    def is_search(self) -> bool:
        """Whether it tries several learning rates."""
        return not isinstance(self.learning_rate_scales, str) and len(self.learning_rate_scales) > 1

    def cells(self, best: dict[tuple[str, str, int], float]) -> list[Cell]:
        """Its runs, seed by seed, so that an interrupted grid covers all settings."""
        cells = []
        for seed, lag, method in product(self.seeds, self.lags, self.methods):
            scales = self.learning_rate_scales
            for scale in (best[self.regime, method, lag],) if isinstance(scales, str) else scales:
                cells.append(Cell(self.regime, method, lag, learning_rate_scale=float(scale), seed=seed))
        return cells


@dataclass(frozen=True)
class Suite:
    """Blocks in order; one cell may take `cell_timeout_s` seconds. With checkpoints it can be ended and continued."""

    name: str
    blocks: tuple[Block, ...]
    cell_timeout_s: float = 1800.0
    checkpoint_every_n_steps: int | None = None


def find(kind: str, name: str) -> Path:
    """The YAML of a regime or a method.

    Raises:
        FileNotFoundError: there is none.
    """
    folders = [CONFIGS / "bench" / f"{kind}s"] + ([CONFIGS / "stabilizers"] if kind == "method" else [])
    for folder in folders:
        if (path := folder / f"{name}.yaml").is_file():
            return path
    raise FileNotFoundError(f"{kind} {name!r}: no {name}.yaml in {' or '.join(map(str, folders))}")


@cache
def _learning_rate(regime: str) -> float:  # of the same file for many cells
    settings: Any = OmegaConf.create(regime)
    return float(settings.model.learning_rate)


def load_suite(name: str) -> Suite:
    """Reads `configs/bench/suites/<name>.yaml`.

    Raises:
        FileNotFoundError: there is no such suite, or it names an unknown regime or method.
        ValueError: a key is unknown.
    """
    path = CONFIGS / "bench" / "suites" / f"{name}.yaml"
    if not path.is_file():
        known = sorted(p.stem for p in path.parent.glob("*.yaml"))
        raise FileNotFoundError(f"suite={name!r}: no such suite; there are {known}")
    raw: Any = OmegaConf.to_container(OmegaConf.load(path))
    known_keys = set(Block.__dataclass_fields__)
    blocks = []
    for block in raw.pop("blocks"):
        if unknown := set(block) - known_keys:
            raise ValueError(f"{path}: unknown keys {sorted(unknown)} in a block; there are {sorted(known_keys)}")
        settings: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in block.items()}
        blocks.append(Block(**settings))
        if any((seed >= FIRST_SEARCH_SEED) != blocks[-1].is_search for seed in blocks[-1].seeds):
            raise ValueError(
                f"{path}: seeds={list(blocks[-1].seeds)}: blocks that search for a learning rate have seeds from "
                f"{FIRST_SEARCH_SEED} on, others below"
            )
        find("regime", blocks[-1].regime)
        for part in {part for method in blocks[-1].methods for part in method.split("+")}:
            find("method", part)
    if unknown := set(raw) - {"cell_timeout_s", "checkpoint_every_n_steps"}:
        known = "blocks, cell_timeout_s and checkpoint_every_n_steps"
        raise ValueError(f"{path}: unknown keys {sorted(unknown)}; there are {known}")
    return Suite(name, tuple(blocks), **raw)
