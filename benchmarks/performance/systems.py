"""Published systems on the quick-start task: what each reaches with equal tokens and in equal time.

    python benchmarks/performance/systems.py --pace          # on an idle machine: how fast is a step?
    python benchmarks/performance/systems.py                 # three seeds of each; finished runs are not run again
    python benchmarks/performance/systems.py --only_table

Every run is `scripts/train.py` with the files of the system; the table is read from its `metrics.csv`. Equal tokens:
accuracy when as many completion tokens were trained on as the shortest run has. Equal time: when the fastest system has
finished, step n being at n times the seconds of a step. Those come from `--pace`, runs of a few steps without
validation, one at a time; so do idle shares. Other runs may then share a machine: what they take counts for nothing.
Accuracy between two validations is interpolated. The age of data is in optimizer steps.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from omegaconf import OmegaConf

from lit_async_rl.cli import app as cli
from lit_async_rl.utils.config_files import load_config

QUICKSTART = "configs/quickstart.yaml"
PLAIN = "configs/stabilizers/plain.yaml"
SYSTEMS = {
    "synchronous": [PLAIN, "configs/quickstart_sync.yaml"],
    "asynchronous": [PLAIN],
    "periodic": ["configs/systems/periodic.yaml"],
    "roll": ["configs/systems/roll.yaml"],
    "areal": ["configs/systems/areal.yaml"],
    "pipeline": ["configs/systems/pipeline.yaml"],
    "tba": ["configs/systems/tba.yaml"],
    "tba_prime": ["configs/systems/tba_prime.yaml"],
    "oapl": ["configs/systems/oapl.yaml"],
}
FINISHED = "finished.json"
WARM_UP_STEPS = 8  # not counted in the pace: the queue fills


@dataclass(frozen=True)
class Run:
    """One training run of a system; `seed` None is the one that measures its pace."""

    out: Path
    system: str
    seed: int | None
    num_steps: int
    val_steps: int

    @property
    def folder(self) -> Path:
        """Folder of its log."""
        return self.out / self.system / ("pace" if self.seed is None else f"seed{self.seed}")

    @property
    def is_finished(self) -> bool:
        """Whether it has trained for enough steps."""
        mark = self.folder / FINISHED
        return mark.is_file() and json.loads(mark.read_text())["num_steps"] == self.num_steps

    def arguments(self) -> list[str]:
        """Arguments of `scripts/train.py`."""
        configs = [flag for path in [QUICKSTART, *SYSTEMS[self.system]] for flag in ("--config", path)]
        place = {"save_dir": str(self.folder), "name": "", "version": "", "flush_logs_every_n_steps": 10}
        logger = {"class_path": "lit_async_rl.training.trackers.CSVLog", "init_args": place}
        flags = {
            "trainer.logger": json.dumps(logger),
            "trainer.max_steps": self.num_steps,
            "seed_everything": self.seed or 0,
            "data.seed": self.seed or 0,
            "trainer.enable_progress_bar": "false",
            "trainer.val_check_interval": self.val_steps * self.data_setting("micro_batches_per_step"),
        }
        if self.seed is None:
            flags["trainer.limit_val_batches"] = 0
        return [*configs, *(part for name, value in flags.items() for part in (f"--{name}", str(value)))]

    def data_setting(self, name: str) -> int:
        """A number of `data:` in the system's files that is 1 where they say nothing."""
        settings = OmegaConf.merge(*(load_config(Path(file)) for file in [QUICKSTART, *SYSTEMS[self.system]]))
        return int(OmegaConf.select(settings, f"data.{name}", default=1))

    def train(self) -> None:
        """Trains, unless it has finished before with as many steps.

        Raises:
            RuntimeError: training failed; `log.txt` says why.
        """
        if self.is_finished:
            return
        print(self.folder, flush=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        # a forked child need not import torch, Lightning and transformers again
        process = multiprocessing.get_context("fork").Process(target=self._train)
        process.start()
        process.join()
        if process.exitcode != 0:
            raise RuntimeError(f"{self.folder} ended with exit code {process.exitcode}, see log.txt there")
        (self.folder / FINISHED).write_text(json.dumps({"num_steps": self.num_steps, "arguments": self.arguments()}))

    def _train(self) -> None:
        with (self.folder / "log.txt").open("w", buffering=1) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            cli.main(self.arguments())

    def steps(self) -> pd.DataFrame:
        """A row for each optimizer step: what was logged with it."""
        return self._log().dropna(subset=["perf/step_s"])

    def age(self) -> tuple[float, float]:
        """Mean and maximum age of the data in optimizer steps."""
        log = self.steps()
        every = self.data_setting("weight_sync_steps")
        since = log["step"] % every
        mean, most = (log[f"sample/staleness_{name}"] * every + since for name in ("mean", "max"))
        return float(mean.mean()), float(most.max())

    def accuracy_at(self, step: float) -> float:
        """Held-out accuracy after `step` optimizer steps."""
        rows = self._log().dropna(subset=["val/pass@1"])
        # Lightning numbers the validation after n steps n - 1, but the one before training 0 and the last one n
        done = [0, *(rows["step"].iloc[1:-1] + 1), rows["step"].iloc[-1]]
        return float(np.interp(step, done, rows["val/pass@1"]))

    def steps_for(self, num_tokens: float) -> float:
        """Optimizer steps until this many tokens were trained on."""
        tokens = np.cumsum([0, *self.tokens])
        return float(np.interp(num_tokens, tokens, np.arange(len(tokens))))

    @property
    def tokens(self) -> pd.Series:
        """Completion tokens of each step."""
        steps = self.steps()
        return steps["perf/tokens_per_s"] * steps["perf/step_s"]

    def _log(self) -> pd.DataFrame:
        return pd.read_csv(self.folder / "metrics.csv")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--num_steps", type=int, default=60)
    parser.add_argument("--val_steps", type=int, default=20, help="optimizer steps between validations")
    parser.add_argument("--pace_steps", type=int, default=32)
    parser.add_argument("--pace", action="store_true", help="measure the seconds of a step")
    parser.add_argument("--only_table", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/systems"))
    args = parser.parse_args()
    paces = {s: Run(args.out, s, None, num_steps=args.pace_steps, val_steps=args.pace_steps) for s in args.systems}
    runs = {
        s: [Run(args.out, s, n, num_steps=args.num_steps, val_steps=args.val_steps) for n in args.seeds]
        for s in args.systems
    }
    if not args.only_table:
        by_seed = [run for several in zip(*runs.values(), strict=True) for run in several]
        for run in paces.values() if args.pace else by_seed:
            run.train()
    print(table(paces, runs))


def table(paces: dict[str, Run], runs: dict[str, list[Run]]) -> str:
    """Markdown table of the finished runs, one row per system."""
    runs = {s: [run for run in several if run.is_finished] for s, several in runs.items()}
    runs = {s: several for s, several in runs.items() if several and paces[s].is_finished}
    if not runs:
        return "no system has a finished run with and without --pace"
    num_tokens = min(float(run.tokens.sum()) for several in runs.values() for run in several)
    paced = {s: paces[s].steps().iloc[WARM_UP_STEPS:] for s in runs}
    step_s = {s: float(rows["perf/step_s"].mean()) for s, rows in paced.items()}
    num_steps = next(iter(runs.values()))[0].num_steps
    seconds = min(step_s.values()) * num_steps
    head = ["system", "seeds", f"{num_steps} steps", f"{num_tokens / 1000:.0f} k tokens", f"{seconds:.0f} s"]
    head += ["seconds a step", "age of data: mean, most", "engine idle", "trainer waits"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for system, several in runs.items():
        ages = np.array([run.age() for run in several])
        cells = [
            *(system, str(len(several))),
            spread([run.accuracy_at(num_steps) for run in several]),
            spread([run.accuracy_at(run.steps_for(num_tokens)) for run in several]),
            spread([run.accuracy_at(seconds / step_s[system]) for run in several]),
            f"{step_s[system]:.2f}",
            f"{ages[:, 0].mean():.1f}, {ages[:, 1].max():.0f}",
            f"{paced[system]['perf/engine_idle_share'].mean():.0%}",
            f"{paced[system]['perf/trainer_wait_share'].mean():.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    """Mean and range."""
    return f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()
