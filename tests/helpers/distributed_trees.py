"""Run by two processes (and by one, for comparison): rollouts with branches, in trees; rank 0 writes the weights.

python distributed_trees.py OUTPUT.json
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from agent_runs import MODEL, groups
from distributed_opob import RANK, WORLD, weights_after
from lightning.pytorch.strategies import DDPStrategy

from lit_async_rl.advantages.group import GroupMeanStd
from lit_async_rl.baselines.optimal import Norms, OptimalBaseline
from lit_async_rl.corrections import SequenceTruncatedIS
from lit_async_rl.corrections.weights import CurrentProximal
from lit_async_rl.data.collate import collate_step
from lit_async_rl.losses import GSPO, Reinforce
from lit_async_rl.losses.aggregation import TokenMean
from lit_async_rl.models.packing import PrefixTreePacking
from lit_async_rl.training.module import PolicyModule

OBJECTIVES: dict[str, dict[str, Any]] = {
    "opob": dict(
        loss=Reinforce(),
        proximal=CurrentProximal(),
        correction=SequenceTruncatedIS(floor=0.5),
        baseline=OptimalBaseline(Norms.SCORE),
    ),
    "gspo": dict(loss=GSPO(100.0, 100.0)),  # the recorded probabilities are random: nothing shall be clipped
}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5)


def run(name: str, packing: PrefixTreePacking | None, **trainer: Any) -> list[float]:
    """One step of four micro-batches, of which each rank takes its share."""
    torch.manual_seed(0)
    module = PolicyModule(MODEL, packing=packing, optimizer=sgd, **OBJECTIVES[name])
    batches = collate_step(
        groups(num_groups=3),
        advantage=GroupMeanStd(),
        aggregation=TokenMean(),
        num_micro_batches=4,
        pad_token_id=0,
        temperature=1.0,
        keep_groups_whole=module.wants_whole_groups,
        shares_prefixes=packing is not None,
        needs_single_rows=module.objective.needs_single_rows,
    )
    return weights_after(module, batches, len(batches), **trainer)


def main(output: str) -> None:
    results = {}
    for name in OBJECTIVES:
        for way, packing in {"rows": None, "trees": PrefixTreePacking()}.items():
            strategy = {} if WORLD == 1 else {"strategy": DDPStrategy(process_group_backend="gloo")}
            results[f"{name}-{way}"] = run(name, packing, **strategy)
    if RANK == 0:
        Path(output).write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
