"""Two replicas of which one stands still, is ten times slower, or takes as long for an update as the other: two steps.

    OMP_NUM_THREADS=1 python benchmarks/ray/slow_replicas.py --output docs/measurements/ray_slow_replicas.json

Each run is a process; its result is kept in `--folder`, and a benchmark that was interrupted goes on from there. A step
of the trainer takes a second, most of which it sleeps, so that one replica can do the work of both and other work on
the machine matters little. The policy does not learn, so that the lengths of completions can be compared.

| run | replica 1 |
|---|---|
| undisturbed | as replica 0 |
| ten times slower | its process runs 10 ms of every 100 ms |
| frozen | its process is stopped after some steps, for as long as others take |
| slow updates | both take two seconds for an update, twice the time of a step |
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import lit_async_rl as rl
from benchmarks.common.measurement import measurement, write_measurement
from benchmarks.common.process import recorded
from lit_async_rl.callbacks import WeightSync
from lit_async_rl.rewards.functions import exact_match

STEP_S = 1.0
TIMEOUT_S = 1200.0
NUM_SKIPPED = 5  # steps while the pipeline fills
NUM_FROZEN = 15  # steps during which a process stands still
SLICE_S = 0.1  # of which a slow process runs a tenth
SCENARIOS = {"undisturbed": 130, "ten times slower": 130, "frozen": 25, "slow updates": 25}  # steps of each


class SlowUpdates(rl.EmbeddedEngine):
    """Takes two steps' time to read weights, from the second ones on."""

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Waits, then loads."""
        time.sleep(2 * STEP_S * (version > 0))
        super().load_weights(version, weights)


class Disturb(pl.Callback):
    """Disturbs replica 1 from step `NUM_SKIPPED` on, and keeps times and lengths of each step.

    Args:
        scenario: one of `SCENARIOS`.
        result: filled in.
    """

    def __init__(self, scenario: str, result: dict[str, Any]) -> None:
        self.scenario = scenario
        self.result = result
        self.ends: list[float] = []
        self.lengths: list[int] = []
        self.staleness = 0
        self.is_over = threading.Event()
        self.thread: threading.Thread | None = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Lets the step take its time."""
        time.sleep(max(0.0, STEP_S - (time.monotonic() - self.ends[-1] if self.ends else 0.0)))
        self.ends.append(time.monotonic())
        version = pl_module.stabilizer_signals["version"]
        for group in trainer.datamodule.last_step_groups:
            self.lengths += [len(rollout.token_ids) for rollout in group.rollouts]
            self.staleness = max(self.staleness, version - min(min(one.versions) for one in group.rollouts))
        step = trainer.global_step
        if step == NUM_SKIPPED and self.scenario in ("ten times slower", "frozen"):
            disturb = self._slow_down if self.scenario == "ten times slower" else self._freeze
            self.thread = threading.Thread(target=disturb, args=(trainer.datamodule.engine.pids[1],), daemon=True)
            self.thread.start()
        if step == NUM_SKIPPED + NUM_FROZEN and self.scenario == "frozen":
            self.is_over.set()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Keeps what was measured."""
        self.is_over.set()
        if self.thread is not None:
            self.thread.join()
        times = self.ends[NUM_SKIPPED:]
        self.result |= {
            "steps_per_s": (len(times) - 1) / (times[-1] - times[0]),
            "longest_step_s": max(b - a for a, b in itertools.pairwise(times)),
            "lengths": self.lengths,
            "staleness": self.staleness,
            "num_lost": trainer.datamodule.engine.num_lost,
        }

    def _slow_down(self, pid: int) -> None:
        while not self.is_over.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.9 * SLICE_S)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.1 * SLICE_S)

    def _freeze(self, pid: int) -> None:
        line = Line(f"replica 1 (pid {pid}, ")
        logging.getLogger("lit_async_rl").addHandler(line)
        began = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        self.is_over.wait(TIMEOUT_S / 2)
        os.kill(pid, signal.SIGCONT)
        self.result |= {"named_after_s": line.at and line.at - began, "line": line.text}


class Line(logging.Handler):
    """The first line that names a replica.

    Args:
        text: it holds.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.wanted = text
        self.text = ""
        self.at: float | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the first one."""
        if self.at is None and self.wanted in record.getMessage():
            self.at = time.monotonic()
            self.text = record.getMessage()


def run(scenario: str, folder: Path) -> None:
    """One run, in this process."""
    model = rl.asset("sort_policy")
    kind = SlowUpdates if scenario == "slow updates" else rl.EmbeddedEngine
    with recorded(folder, [scenario]) as result:
        engine = rl.RayEngine(kind(num_slots=32, device="cpu"), replicas=2, num_cpus=0.5)
        data = rl.RolloutDataModule(
            model=model,
            prompts=rl.SortDigits(8, size=10000),
            reward=exact_match,
            engine=engine,
            groups_per_step=4,
            group_size=4,
            max_staleness=8,
            sampling=rl.SamplingParams(max_tokens=48, temperature=3.0),
        )
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=SCENARIOS[scenario],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Disturb(scenario, result), WeightSync()],
        )
        trainer.fit(rl.PolicyModule(model=model, learning_rate=1e-9), datamodule=data)


def result(scenario: str, folder: Path) -> dict[str, Any]:
    """Result of a run, which is started unless it is there."""
    place = folder / scenario.replace(" ", "_")
    if not (place / "result.json").exists():
        command = [sys.executable, __file__, "--run", scenario, "--folder", str(place)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=TIMEOUT_S)
    found: dict[str, Any] = json.loads((place / "result.json").read_text())
    if found["error"]:
        raise RuntimeError(f"{scenario}: {found['error']} ({place / 'log.txt'})")
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", choices=list(SCENARIOS), help="one run, in this process")
    parser.add_argument("--scenarios", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--folder", type=Path, default=Path("runs/slow_replicas"))
    parser.add_argument("--machine", default="two cores, idle otherwise")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.run:
        run(args.run, args.folder)
        return
    rows = []
    found = {}
    for scenario in args.scenarios:
        one = found[scenario] = result(scenario, args.folder)
        lengths = one["lengths"][-2000:]
        error = statistics.stdev(lengths) / math.sqrt(len(lengths))
        rows.append(
            [
                scenario,
                round(one["steps_per_s"], 3),
                round(one["longest_step_s"], 1),
                f"{statistics.fmean(lengths):.2f} ± {error:.2f} ({len(lengths)})",
                one["staleness"],
                one["num_lost"],
            ]
        )
        print(*rows[-1], one.get("named_after_s", ""), one.get("line", ""), sep=" | ", flush=True)
    if args.output and args.scenarios == list(SCENARIOS):
        write_measurement(
            args.output,
            measurement(
                args.output.stem,
                round(found["ten times slower"]["steps_per_s"] / found["undisturbed"]["steps_per_s"], 3),
                "of the undisturbed rate, with one of two replicas ten times slower",
                columns=[
                    "run",
                    "steps a second",
                    "longest step, s",
                    "mean length of the last completions (number)",
                    "largest staleness (bound 8)",
                    "replicas lost",
                ],
                rows=rows,
                command="python benchmarks/ray/slow_replicas.py",
                machine=f"{args.machine}, load {os.getloadavg()[0]:.1f} at the end",
                named_after_s=round(found["frozen"]["named_after_s"], 1),
                line=found["frozen"]["line"],
            ),
        )


if __name__ == "__main__":
    main()
