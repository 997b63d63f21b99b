"""Run by one process or several: trains under a strategy; rank 0 writes what came out.

python sharded_training.py STRATEGY:STALENESSxMICRO_BATCHES[s|d],... OUTPUT.json (streamed groups, distillation)
python sharded_training.py STRATEGY:endless [RANK THAT FAILS]
python sharded_training.py STRATEGY:mixed OUTPUT.json
python sharded_training.py crossing OUTPUT.json FOLDER STRATEGY[+lora|+saved][:CHECKPOINT] ...
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from flow import MODEL, barrier_engine, fit, make_data, make_module
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.tensor import DTensor

from lit_async_rl.callbacks import EngineCheck, GradientClipping
from lit_async_rl.losses import Reinforce
from lit_async_rl.models.lora import LoRA
from lit_async_rl.models.sharding import FSDPStrategy, Sharding, is_transformer_block
from lit_async_rl.prompts.sources import InMemoryPrompts
from lit_async_rl.tasks import SortDigits
from lit_async_rl.training.distillation import Distillation, LocalTeacher, SourceTeachers

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
STEPS = 10


def make_strategy(name: str) -> Any:
    if name == "single":
        return "auto"
    if name == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    if name == "fsdp1":
        return FSDPStrategy(state_dict_type="sharded")
    tensor = WORLD if name == "tp" else 2 if name == "fsdp2_tp" else 1
    return ModelParallelStrategy(WORLD // tensor, tensor, save_distributed_checkpoint=False)


class Record(pl.Callback):
    """Loss of every step over all ranks, as it is before anything multiplies it."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rewards: list[float] = []
        self.norms: list[float] = []
        self._sum = 0.0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self._sum += float(outputs["loss"])  # Lightning has divided it by the micro-batches
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            total = torch.tensor(self._sum)
            if WORLD > 1:
                dist.all_reduce(total)
            self.losses.append(float(total) / WORLD)
            self._sum = 0.0
            self.norms.append(float(trainer.callback_metrics["grad/norm"]))
            groups = trainer.datamodule.last_step_groups
            self.rewards.append(sum(r.reward for g in groups for r in g.rollouts))


class CheckTeachers(pl.Callback):
    """A device mesh divides a teacher: under FSDP2 no rank holds the whole of it."""

    def __init__(self, strategy: str) -> None:
        self.has_mesh = strategy in ("fsdp2", "tp")

    def on_train_end(self, trainer, pl_module) -> None:
        if (distiller := pl_module.objective.distiller) is not None:
            for teacher in distiller.ready._teachers:
                blocks = [m for m in teacher.policy.modules() if is_transformer_block(m)]
                assert blocks
                assert {isinstance(p, DTensor) for block in blocks for p in block.parameters()} == {self.has_mesh}


def teachers() -> dict[str, Any]:
    """The first policy teaches its successors, which rewards move away from it: two copies, by the prompt's parity.

    Micro-batches have prompts of one of them only, and different numbers of chunks.
    """
    sources = SourceTeachers(key="kind", teachers={"even": MODEL, "odd": LocalTeacher(model=MODEL)})
    prompts = [SortDigits(8, size=1000)[n] for n in range(1000)]
    records = [dict(prompt=p.text, answer=p.answer, kind=("even", "odd")[n % 2]) for n, p in enumerate(prompts)]
    distillation = Distillation(teacher=sources, with_reward=True)
    return dict(prompts=InMemoryPrompts(records), distillation=distillation, logprob_chunk_tokens=13)


def run(
    strategy: str,
    staleness: int,
    accumulate: int,
    begin: str | None = None,
    keep: str | None = None,
    stream=False,
    prompts: Any = None,
    **extra: Any,
):
    pl.seed_everything(0, verbose=False)
    record = Record()
    clip = GradientClipping(0.5)
    data = make_data(
        schedule="fixed_lag",
        max_staleness=staleness,
        micro_batches_per_step=accumulate,
        stream_groups=stream,
        engine=barrier_engine(),
        rollout_timeout_s=150.0,  # blocks are compiled in the first step
        **({} if prompts is None else {"prompts": prompts}),
    )
    module = make_module(**(dict(loss=Reinforce(), learning_rate=1e-4) | extra))
    saving = [ModelCheckpoint(keep, "{step}", every_n_train_steps=5, save_top_k=-1)] if keep else []
    check = EngineCheck(every_n_updates=1, num_rollouts=2, on_error="stop")  # not where one process is the reference
    checks = [check] if WORLD > 1 else []
    fit(
        module,
        data,
        STEPS,
        callbacks=[record, clip, CheckTeachers(strategy), *checks, *saving],
        ckpt_path=begin,
        strategy=make_strategy(strategy),
        devices=WORLD,
        enable_checkpointing=bool(keep),
    )
    if checks and begin is None:
        assert check.num_checks >= (1 if strategy == "fsdp1" and staleness else STEPS - staleness - 1)
    weights = torch.cat([w.flatten() for _, w in sorted((n, w.clone()) for n, w in module.stream_weights())])
    result = dict(losses=record.losses, norms=record.norms, rewards=record.rewards, version=module.version)
    return result | dict(weights=weights[::97].tolist(), norm=float(weights.double().norm()))


def cross(folder: str, legs: tuple[str, ...]) -> dict[str, Any]:
    """Each leg is a run of its own, from a checkpoint of another strategy or from the beginning."""
    results = {}
    for leg in legs:
        name, _, begin = leg.partition(":")
        strategy, _, lora = name.partition("+")
        also = ["embed_tokens", "norm"] if lora == "saved" else None
        later: dict[str, Any] = dict(lora=LoRA(rank=4, modules_to_save=also)) if lora else {}
        if strategy.startswith("fsdp") and not lora:
            later = dict(sharding=Sharding(meta_device=True))
        later |= dict(kl_coefficient=0.01)  # keeps a reference, which one device leaves out of its checkpoints
        source = str(Path(folder) / begin) if begin else None
        results[leg] = run(strategy, 2, 1, begin=source, keep=None if begin else f"{folder}/{name}", **later)
    return results


class Precision(pl.Callback):
    """Records the data that arrive in the training step, on rank 0, and the precision in which the policy computes."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if RANK == 0:
            sampled = [p for g in trainer.datamodule.last_step_groups for r in g.rollouts for p in r.logprobs]
            arrived = batch.behavior_logprobs[batch.loss_mask]
            same = bool(torch.isin(arrived, torch.tensor(sampled, dtype=torch.float32)).all())
            self.seen.append(dict(behavior=str(arrived.dtype), same=same))

        def note(module, args, output) -> None:
            self.seen[-1]["computed"] = str(output.dtype)
            handle.remove()

        if RANK == 0:
            handle = pl_module.policy.causal_lm.get_output_embeddings().register_forward_hook(note)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if RANK == 0:
            signals = pl_module.stabilizer_signals
            self.seen[-1]["log_ratio"] = str(signals["log_ratio"].dtype)
            self.seen[-1]["spread"] = float(signals["log_ratio"][signals["mask"]].abs().max())


def run_mixed(strategy: str) -> list[dict[str, Any]]:
    """bfloat16 where the strategy's own way to it is."""
    precision = Precision()
    fsdp2 = strategy in ("fsdp2", "tp")
    sharding = Sharding(compute_dtype="bfloat16" if fsdp2 else None)
    module = make_module(sharding=sharding, learning_rate=1e-6)  # what differs are roundings
    fit(
        module,
        make_data(max_staleness=1),
        3,
        callbacks=[precision, GradientClipping(1.0)],
        strategy=make_strategy(strategy),
        devices=WORLD,
        precision="32-true" if fsdp2 else "bf16-mixed",
    )
    assert all(w.dtype == torch.float32 for _, w in module.stream_weights())
    return precision.seen


class Fail(pl.Callback):
    """On one rank, in the middle of a step."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_before_backward(self, trainer, pl_module, loss) -> None:
        if trainer.global_step == 3 and trainer.global_rank == self.rank:
            print("failing now", flush=True)
            raise OSError("planted")


class Say(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        print(f"step {trainer.global_step}", flush=True)


def slow_reward(prompt: Any, completion: str) -> float:
    time.sleep(0.02)
    return float(len(completion))


def run_endless(strategy: str, failing: str) -> None:
    callbacks = [Say(), *([Fail(int(failing))] if failing else [])]
    data = make_data(reward=slow_reward, rank_timeout_s=8.0)
    fit(make_module(), data, 100_000, callbacks=callbacks, strategy=make_strategy(strategy), devices=WORLD)


def main(job: str, output: str, *arguments: str) -> None:
    strategy, _, settings = job.partition(":")
    if settings == "endless":
        run_endless(strategy, output)
        return
    if settings == "mixed":
        seen = run_mixed(strategy)
        if RANK == 0:
            Path(output).write_text(json.dumps(seen))
        return
    result = cross(arguments[0], arguments[1:]) if job == "crossing" else {}
    for setting in filter(None, settings.split(",")):
        staleness, accumulate = map(int, setting.rstrip("sd").split("x"))
        teacher = teachers() if setting.endswith("d") else {}
        result[setting] = run(
            strategy,
            staleness,
            accumulate,
            stream=setting.endswith("s"),
            gradient_checkpointing=WORLD > 1 and setting in ("0x1", "2x2"),
            torch_compile=WORLD > 1 and setting == "0x1" and strategy != "tp",
            **teacher,
        )
    if RANK == 0:
        Path(output).write_text(json.dumps(result))


if __name__ == "__main__":
    began = time.monotonic()
    main(*sys.argv[1:])
    print(f"{sys.argv[1]}: {time.monotonic() - began:.1f} s")
