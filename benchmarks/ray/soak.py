"""Kills replicas at random moments of a run, and counts what that costs: every step and group once, or it fails.

    OMP_NUM_THREADS=1 python benchmarks/ray/soak.py --kills 100 --output docs/measurements/ray_soak.json

SIGKILL, or SIGSTOP for some seconds, of a random replica, after a random time: while it samples, starts or takes an
update. The next one comes when all replicas are back.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import lit_async_rl as rl
from benchmarks.common.measurement import measurement, write_measurement

STOP_S = 3.0


class Kills(pl.Callback):
    """Kills, and checks that each step's groups are new and within their bound.

    Args:
        number: kills, after which the run ends.
        seed: of their moments.
    """

    def __init__(self, number: int, seed: int) -> None:
        self.number = number
        self.rng = random.Random(seed)
        self.trained: set[int] = set()
        self.kinds: list[str] = []
        self.back_s: list[float] = []
        self.step_s: list[float] = []
        self._last = 0.0
        self._step = 0
        self._is_over = threading.Event()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._last = time.monotonic()
        self._thread = threading.Thread(target=self._kill, args=(trainer.datamodule.engine,), daemon=True)
        self._thread.start()

    def _kill(self, engine: rl.RayEngine) -> None:
        while len(self.kinds) < self.number and not self._is_over.wait(self.rng.uniform(0.2, 4.0)):
            pid = self.rng.choice(engine.pids)
            kind = "stop" if self.rng.random() < 0.2 else "kill"
            began = time.monotonic()
            lost = engine.num_lost
            os.kill(pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
            if kind == "stop":
                self._is_over.wait(STOP_S)
                os.kill(pid, signal.SIGCONT)
            while kind == "kill" and engine.num_lost == lost and time.monotonic() < began + 30:
                time.sleep(0.05)
            while engine.num_ready < engine.replicas and not self._is_over.is_set():
                time.sleep(0.05)
            if kind == "kill":
                self.back_s.append(time.monotonic() - began)
            self.kinds.append(kind)
            print(f"{len(self.kinds)}: {kind}, all are back after {time.monotonic() - began:.1f} s", flush=True)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        now = time.monotonic()
        self.step_s.append(now - self._last)
        self._last = now
        groups = trainer.datamodule.last_step_groups
        for group in groups:
            if group.index in self.trained:
                raise RuntimeError(f"group {group.index} was trained on twice")
            oldest = min(min(rollout.versions) for rollout in group.rollouts)
            if pl_module.stabilizer_signals["version"] - oldest > trainer.datamodule.max_staleness:
                raise RuntimeError(f"group {group.index} has a token of version {oldest}")
        self.trained |= {group.index for group in groups}
        trainer.should_stop = len(self.kinds) >= self.number

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._is_over.set()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--machine", default="two cores")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    model = str(rl.asset("sort_policy"))
    engine = rl.RayEngine(rl.EmbeddedEngine(), replicas=args.replicas, num_cpus=0.1)
    data = rl.RolloutDataModule(
        model=model,
        engine=engine,
        prompts=rl.SortDigits(8, size=100_000),
        reward=rl.exact_match,
        groups_per_step=4,
        group_size=4,
        max_staleness=4,
        sampling=rl.SamplingParams(max_tokens=12),
    )
    kills = Kills(args.kills, args.seed)
    module = rl.PolicyModule(model, learning_rate=1e-5)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=10**7,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[rl.WeightSync(), kills],
    )
    trainer.fit(module, datamodule=data)
    steps = trainer.global_step
    if len(kills.trained) != 4 * steps or data.feed.num_restarts:
        raise RuntimeError(f"{len(kills.trained)} groups in {steps} steps, {data.feed.num_restarts} engine restarts")
    table = [
        ["kills of a replica", kills.kinds.count("kill")],
        [f"replicas stopped for {STOP_S:g} s", kills.kinds.count("stop")],
        ["optimizer steps", steps],
        ["groups trained on, each once", len(kills.trained)],
        ["restarts of the whole engine", data.feed.num_restarts],
        ["median seconds until a killed replica was back", round(statistics.median(kills.back_s), 1)],
        ["most seconds until a killed replica was back", round(max(kills.back_s), 1)],
        ["longest step in seconds", round(max(kills.step_s[5:]), 1)],
    ]
    write_measurement(
        args.output,
        measurement(
            "ray_soak",
            len(kills.kinds),
            "kills and stops of replicas in one run, without a group lost, doubled or beyond its staleness bound",
            columns=["", "number"],
            rows=table,
            command=f"python benchmarks/ray/soak.py --kills {args.kills}",
            machine=f"{args.machine}, load {os.getloadavg()[0]:.1f} at the end",
        ),
    )


if __name__ == "__main__":
    main()
