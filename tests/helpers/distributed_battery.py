"""Run by two processes: all callbacks at once, also where one rank has nothing to train on; a rollback; a blend.

python distributed_battery.py FOLDER
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from battery import SITUATIONS, run
from blended_runs import blended
from controlled_runs import controlled
from flow import parameters
from lightning.pytorch.strategies import DDPStrategy

BLEND = "blend.json"
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
    _, shares, module = blended(trainer=dict(strategy=DDPStrategy(process_group_backend="gloo"), devices=2))
    expected = json.loads(Path(folder, BLEND).read_text())  # of one process
    torch.testing.assert_close(torch.tensor(shares), torch.tensor(expected["shares"]), rtol=0, atol=1e-4)
    torch.testing.assert_close(parameters(module), torch.tensor(expected["weights"]), rtol=0, atol=1e-5)
    strategy = DDPStrategy(process_group_backend="gloo")
    controller, trained, module, _ = controlled(trainer=dict(strategy=strategy, devices=2))
    found = [controller.reports, controller.state_dict(), trained.is_corrected, parameters(module).tolist()]
    of_ranks = [None, None]
    dist.all_gather_object(of_ranks, found)
    assert of_ranks[0] == of_ranks[1]
    assert len(controller.reports) == 2, controller.reports
    assert "What versions after 0 have sampled is discarded" in controller.reports[0], controller.reports


if __name__ == "__main__":
    main(sys.argv[1])
