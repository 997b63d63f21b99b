"""Run by two processes: all callbacks at once, also where one rank has nothing to train on.

python distributed_battery.py FOLDER
"""

import sys
from pathlib import Path

from battery import SITUATIONS, run
from lightning.pytorch.strategies import DDPStrategy

RUNS = {
    "policy": ("one rollout", "NaN in a gradient, clipped by value"),
    "trajectory": ("nothing trains", "micro-batches without rollouts"),
}


def main(folder: str) -> None:
    for kind, situations in RUNS.items():
        for situation in situations:
            settings = dict(SITUATIONS[situation])
            trainer = settings.pop("trainer", {}) | dict(strategy=DDPStrategy(process_group_backend="gloo"), devices=2)
            run(Path(folder), kind, trainer=trainer, **settings)


if __name__ == "__main__":
    main(sys.argv[1])
