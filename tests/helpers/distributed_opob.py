"""Run by two processes (and by one, for comparison): the optimal baseline under every strategy; rank 0 writes weights.

python distributed_opob.py OUTPUT.json
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from distributed_stabilizers import full_weights
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from lit_async_rl.assets import asset
from lit_async_rl.baselines.optimal import Norms, OptimalBaseline
from lit_async_rl.corrections import SequenceTruncatedIS
from lit_async_rl.corrections.weights import CurrentProximal
from lit_async_rl.losses import Reinforce
from lit_async_rl.models.loading import load_policy
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.models.sharding import FSDPStrategy
from lit_async_rl.training.module import PolicyModule
from lit_async_rl.types import RolloutBatch

MODEL = asset("small_sort_policy")
RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
STEPS = 2
GROUPS = 2
SIZE = 4
LENGTH = 12
BLOCKS = {LlamaDecoderLayer}


@torch.no_grad()
def parts(num_parts: int) -> list[RolloutBatch]:
    """Micro-batches of whole groups for each step; the last one of each is empty."""
    policy = CausalPolicy(load_policy(MODEL))
    generator = torch.Generator().manual_seed(0)
    found = []
    for step in range(STEPS):
        rows = GROUPS * SIZE
        num_rows = (num_parts - 1) * GROUPS * SIZE
        for part in range(num_parts):
            empty = part == num_parts - 1
            shape = (1 if empty else rows, LENGTH)
            lengths = torch.randint(7, LENGTH + 1, (shape[0], 1), generator=generator)
            at = torch.arange(LENGTH)[None]
            mask = (at >= 4) & (at < lengths) & (not empty)
            index = torch.arange(GROUPS).repeat_interleave(SIZE) + GROUPS * (part + num_parts * step)
            ids = torch.randint(2, 90, shape, generator=generator)
            noise = torch.randn(shape, generator=generator) * 0.3
            batch = RolloutBatch(
                input_ids=ids,
                attention_mask=at < lengths,
                loss_mask=mask,
                behavior_logprobs=(policy(ids, mask).logprobs + noise) * mask,
                versions=torch.zeros(shape, dtype=torch.long),
                advantages=torch.zeros(shape),
                token_weights=mask / mask.sum(1, keepdim=True).clamp(min=1) / num_rows,
                rewards=torch.rand(shape[0], generator=generator),
                group_index=index[: shape[0]] if not empty else torch.tensor([-1]),
            )
            found.append(batch)
    return found


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


class FullySharded(PolicyModule):
    """With FSDP2: each decoder layer, and the rest with the head."""

    def configure_model(self) -> None:
        for layer in self.policy.causal_lm.base_model.layers:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.policy, mesh=self.device_mesh["data_parallel"])


def weights_after(module: PolicyModule, batches: list[RolloutBatch], per_step: int, **trainer: Any) -> list[float]:
    """All weights after a fit to micro-batches, `per_step` of each step, of which each rank takes its share."""
    mine: list[Any] = batches[RANK::WORLD]
    fitted = pl.Trainer(
        accelerator="cpu", devices=WORLD, max_epochs=1, accumulate_grad_batches=per_step // WORLD, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, **trainer,
    )  # fmt: skip
    fitted.fit(module, train_dataloaders=DataLoader(mine, batch_size=None, collate_fn=lambda part: part))
    return full_weights(module, fitted.strategy.model).tolist()


def run(kind: type[PolicyModule], norms: Norms, num_parts: int, **trainer: Any) -> list[float]:
    torch.manual_seed(0)
    module = kind(
        model=MODEL,
        loss=Reinforce(),
        proximal=CurrentProximal(),
        correction=SequenceTruncatedIS(cap=8.0),
        baseline=OptimalBaseline(norms=norms),
        optimizer=sgd,
    )
    return weights_after(module, parts(num_parts), num_parts, **trainer)


def main(output: str) -> None:
    strategies: dict[str, Any] = {
        "ddp": (PolicyModule, lambda: DDPStrategy(process_group_backend="gloo")),
        "fsdp1": (
            PolicyModule,
            lambda: FSDPStrategy(use_orig_params=True, state_dict_type="sharded", auto_wrap_policy=BLOCKS),
        ),
        "fsdp2": (FullySharded, lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)),
    }
    results = {}
    for num_parts in (2, 4):
        for norms in Norms:
            if WORLD == 1:
                results[f"single-{norms.value}-{num_parts}"] = run(PolicyModule, norms, num_parts)
                continue
            for name, (kind, strategy) in strategies.items():
                if norms is not Norms.PER_TRAJECTORY or name == "ddp":
                    results[f"{name}-{norms.value}-{num_parts}"] = run(kind, norms, num_parts, strategy=strategy())
    if WORLD > 1:
        kind, strategy = strategies["fsdp2"]
        divided = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2)
        with pytest.raises(ValueError, match=r"norms=GHOST with trainer\.strategy\.tensor_parallel_size=2: its norms"):
            run(PolicyModule, Norms.GHOST, 2, strategy=divided)
        with pytest.raises(ValueError, match="norms=PER_TRAJECTORY does not work with sharded parameters"):
            run(kind, Norms.PER_TRAJECTORY, 2, strategy=strategy())
    if RANK == 0:
        Path(output).write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
