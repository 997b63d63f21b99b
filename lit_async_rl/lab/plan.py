"""`lit-async-rl plan`: how to divide devices between trainer and engines, from a run or from a configuration."""

from __future__ import annotations

import argparse
import csv
import inspect
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lit_async_rl
from lit_async_rl.cli.settings import all_settings
from lit_async_rl.errors import UnsupportedModelError
from lit_async_rl.simulation.plan import (
    DEVICES,
    ModelSize,
    Prediction,
    StepCost,
    cost_by_formula,
    fastest,
    lowest_bound,
    splits,
)
from lit_async_rl.utils.checks import OneLineParser
from lit_async_rl.utils.config_files import load_config

if TYPE_CHECKING:
    from lit_async_rl.lab.memory import StepShape

SLOTS = ("num_slots", "max_num_seqs")  # argument of an engine
COLUMNS = ("perf/step_s", "perf/rollout_wait_s", "perf/weight_sync_s", "perf/engine_idle_share", "rollout/length_mean")
BYTES = {"float64": 8, "bfloat16": 2, "float16": 2}  # of a value; of float32, and what vLLM chooses, 4
EXAMPLES = """\
examples:
  lit-async-rl plan runs/quickstart/version_0 --devices 8
  lit-async-rl plan configs/gsm8k_grpo_vllm.yaml --devices 8 --device h100 --completion_tokens 300
  lit-async-rl plan configs/gsm8k_grpo.yaml --devices 1 --device rtx4090
"""


def main(args: Sequence[str] | None = None) -> None:
    """Command line of the plan command."""
    parser = OneLineParser(
        "plan",
        "Predicts the best split of devices between trainer and engines, in virtual time. A run's folder "
        "gives measured times; a configuration needs --device and is calculated from the size of its model. With "
        "--device, memory is counted, too, and settings that save some are named where it is too little.",
        epilog=EXAMPLES,
    )
    parser.add_argument("source", type=Path, help="folder of a run, or a configuration file")
    parser.add_argument("--devices", type=int, required=True, help="number of devices to divide")
    parser.add_argument("--replica_devices", type=int, default=1, help="devices of one engine (default: %(default)s)")
    parser.add_argument("--max_staleness", type=int, help="bound to plan for (default: that of the configuration)")
    parser.add_argument(
        "--spread",
        type=float,
        default=1.0,
        help="standard deviation of the logarithm of the lengths (default: %(default)s, long tails)",
    )
    parser.add_argument(
        "--efficiency",
        type=float,
        default=0.9,
        help="speed that trainer devices keep at each doubling (default: %(default)s)",
    )
    parser.add_argument("--ranks", type=int, help="of a run: devices that trained (default: by its configuration)")
    parser.add_argument("--device", choices=sorted(DEVICES), help="of a configuration: its kind of device")
    parser.add_argument("--prompt_tokens", type=int, default=256, help="of a configuration (default: %(default)s)")
    parser.add_argument("--completion_tokens", type=int, help="of a configuration (default: half of max_tokens)")
    arguments = parser.parse_args(args)
    try:
        print("\n".join(plan(arguments)))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def plan(arguments: argparse.Namespace) -> list[str]:
    """Lines of the answer: the split of devices, and what one must hold if its kind is known.

    Raises:
        ValueError: an argument is out of range, or the source does not say enough.
        OSError: the source cannot be read.
    """
    if arguments.source.is_dir():
        settings = _settings(arguments.source / "config.yaml")
        if arguments.ranks is not None and arguments.ranks < 1:
            raise ValueError(f"--ranks must be >= 1, got {arguments.ranks}")
        cost = measured_cost(
            arguments.source,
            settings,
            spread=arguments.spread,
            efficiency=arguments.efficiency,
            num_ranks=arguments.ranks,
        )
        origin = f"measured in {arguments.source}"
    else:
        settings = _settings(arguments.source)
        cost = _calculated_cost(arguments, settings)
        origin = f"calculated for {arguments.device}, not measured"
    bound = arguments.max_staleness
    if bound is None:
        bound = _count(settings, "data.max_staleness")
    if bound < 0:
        raise ValueError(f"--max_staleness must be >= 0, got {bound}")
    is_alone = arguments.devices == 1 and arguments.device is not None  # trains and samples: nothing is divided
    lines: list[str] = []
    trainer_devices = 1
    if not is_alone:
        predictions = splits(
            cost, devices=arguments.devices, replica_devices=arguments.replica_devices, max_staleness=bound
        )
        best = fastest(predictions)
        low = lowest_bound(cost, trainer_devices=best.trainer_devices, replicas=best.replicas)
        trainer_devices = best.trainer_devices
        lines = ["", *_table(predictions, best), "", *_advice(best, low, bound)]
    if arguments.device is not None:
        lines += ["", *_memory(arguments, settings, None if is_alone else trainer_devices)]
    return [
        f"an optimizer step, {origin}:",
        f"  training     {_seconds(cost.train_s)} on one device, publishing {_seconds(cost.sync_s)}",
        f"  sampling     {cost.groups_per_step} groups of {cost.group_size}, {_seconds(cost.sample_s)} a sample, "
        f"{_seconds(cost.longest * cost.sample_s)} at most",
        f"  an engine    {cost.num_slots} slots",
        *lines,
    ]


def measured_cost(
    folder: Path, settings: Mapping[str, Any], *, spread: float, efficiency: float, num_ranks: int | None = None
) -> StepCost:
    """Cost of a step by the second half of a run, after compiling and filling the queue.

    Args:
        folder: of the run.
        settings: of the run.
        spread: see `StepCost`.
        efficiency: see `StepCost`.
        num_ranks: devices that trained; None is the number in the settings.

    Raises:
        ValueError: the run has logged too little.
        OSError: its metrics cannot be read.
    """
    with (folder / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if all(row.get(name) for name in COLUMNS)]
    if len(rows) < 4:
        raise ValueError(
            f"in the run {folder}, only {len(rows)} steps have {', '.join(COLUMNS)}, but at least 4 such steps "
            "are needed"
        )
    half = rows[len(rows) // 2 :]
    median = {name: statistics.median(float(row[name]) for row in half) for name in COLUMNS}
    step_s = median["perf/step_s"]
    sync_s = median["perf/weight_sync_s"]
    num_ranks = _num_ranks(settings) if num_ranks is None else num_ranks
    groups_per_step = _count(settings, "data.groups_per_step")
    group_size = _count(settings, "data.group_size")
    num_slots = _num_slots(settings)
    num_replicas = int(_of(settings, "cluster.init_args.engines.replicas", 1))
    busy_s = (1 - median["perf/engine_idle_share"]) * step_s * num_replicas
    max_tokens = _count(settings, "data.sampling.max_tokens")
    on_one = StepCost(
        train_s=max(1e-6, step_s - median["perf/rollout_wait_s"] - sync_s),
        sample_s=max(1e-6, busy_s * num_slots / (groups_per_step * group_size)),
        num_slots=num_slots,
        groups_per_step=groups_per_step,
        group_size=group_size,
        sync_s=sync_s,
        spread=spread,
        longest=max(1.01, max_tokens / median["rollout/length_mean"]),
        efficiency=efficiency,
    )
    if num_ranks == 1:
        return on_one
    ratio = on_one.train_s / (on_one.training_s(num_ranks) - sync_s)
    return replace(on_one, train_s=on_one.train_s * ratio)


def _calculated_cost(arguments: argparse.Namespace, settings: Mapping[str, Any]) -> StepCost:
    if arguments.device is None:
        raise ValueError(
            f"{arguments.source} is a configuration, not a run with measured times: add --device (one of "
            f"{', '.join(sorted(DEVICES))}), or give the folder of a run"
        )
    model = _model(arguments.source, settings)
    max_tokens = _count(settings, "data.sampling.max_tokens")
    completion_tokens = arguments.completion_tokens
    if completion_tokens is None:
        completion_tokens = max(1, max_tokens // 2)
    if not 0 < completion_tokens < max_tokens:
        raise ValueError(
            f"--completion_tokens must be below data.sampling.max_tokens={max_tokens}, got {completion_tokens}"
        )
    if arguments.prompt_tokens < 1:
        raise ValueError(f"--prompt_tokens must be >= 1, got {arguments.prompt_tokens}")
    return cost_by_formula(
        model_size(model),
        DEVICES[arguments.device],
        prompt_tokens=arguments.prompt_tokens,
        completion_tokens=completion_tokens,
        max_tokens=max_tokens,
        num_slots=_num_slots(settings),
        groups_per_step=_count(settings, "data.groups_per_step"),
        group_size=_count(settings, "data.group_size"),
        replica_devices=arguments.replica_devices,
        spread=arguments.spread,
        efficiency=arguments.efficiency,
    )


def model_size(model: str) -> ModelSize:
    """Size of a model by its configuration, without reading weights. All experts of a layer count."""
    from transformers import AutoModelForCausalLM

    from lit_async_rl.models.loading import load_config as load_model_config
    from lit_async_rl.models.loading import parameters_on_meta

    config = load_model_config(model)
    with parameters_on_meta():
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return ModelSize(parameters=parameters, cache_bytes=2 * 2 * text.num_hidden_layers * heads * width)


def _memory(arguments: argparse.Namespace, settings: Mapping[str, Any], trainer_devices: int | None) -> list[str]:
    """Memory that one device needs, and settings to change if it is too much.

    Args:
        arguments: of the command.
        settings: of the run.
        trainer_devices: devices that train, beside those of engines; None is one device for both.
    """
    from lit_async_rl.lab.memory import USABLE, Fit, ways_to_fit
    from lit_async_rl.models.loading import load_config as load_model_config

    model = _model(arguments.source, settings)
    capacity = DEVICES[arguments.device].memory
    shape = _step_shape(settings, arguments.prompt_tokens, trainer_devices or 1)
    length = shape.prompt_tokens + shape.completion_tokens
    size = model_size(model)
    is_shared = trainer_devices is None
    engine = _engine_bytes(settings, size, length=length, capacity=capacity, is_shared=is_shared)
    strategy = str(_of(settings, "trainer.strategy.class_path", _of(settings, "trainer.strategy", "auto")))
    is_sharded = "FSDP" in strategy.upper() or "ModelParallel" in strategy
    reference = _reference_bytes(settings, size) / ((trainer_devices or 1) if is_sharded else 1)
    is_fsdp2 = "ModelParallel" in strategy  # alone divides a teacher
    teacher = _teacher_bytes(settings) / ((trainer_devices or 1) if is_fsdp2 else 1)
    beside = reference + teacher + (engine if is_shared else 0.0)
    title = f"memory of one {arguments.device} ({capacity / 1e9:.0f} GB), counted without the device:"
    others = [f"  an engine    {engine / 1e9:.1f} GB, on {'the same device' if is_shared else 'devices of its own'}"]
    if reference:
        others.append(f"  a reference  {reference / 1e9:.1f} GB, the frozen copy of model.kl_coefficient")
    if teacher:
        others.append(f"  a teacher    {teacher / 1e9:.1f} GB of weights, frozen")
    try:
        fits = ways_to_fit(
            load_model_config(model),
            shape,
            capacity=int(capacity - beside),
            trainer_devices=trainer_devices or 1,
            is_sharded=is_sharded,
        )
    except UnsupportedModelError as error:
        states = 4 * shape.dtype.itemsize * size.parameters
        return [title, f"  training     {states / 1e9:.1f} GB of weights, gradients and moments; {error}", *others]

    def line(fit: Fit) -> str:
        return f"{(fit.num_bytes + beside) / 1e9:.1f} GB"

    lines = [
        title,
        f"  training     {fits[0].num_bytes / 1e9:.1f} GB at most, with {shape.rows} rows of {length} tokens in a "
        "micro-batch",
        *others,
    ]
    if len(fits) == 1:
        return [*lines, f"  together     {line(fits[0])}: it fits" if beside else "  it fits"]
    lines.append(f"  too much: {line(fits[0])}. With each of these settings, and those above it:")
    lines += [f"    {fit.settings[-1]:<45} {line(fit)}" for fit in fits[1:]]
    is_enough = fits[-1].num_bytes <= USABLE * (capacity - beside)
    return [*lines, "  it fits with all of these" if is_enough else "  it does not fit with any of these settings"]


def _step_shape(settings: Mapping[str, Any], prompt_tokens: int, trainer_devices: int) -> StepShape:
    """A training step on each of the devices, with the longest completions."""
    import torch

    from lit_async_rl.lab.memory import StepShape
    from lit_async_rl.models.lora import LoRA

    micro_batches = _count(settings, "data.micro_batches_per_step")
    samples = _count(settings, "data.groups_per_step") * _count(settings, "data.group_size")
    dtype = getattr(torch, _of(settings, "model.dtype", "float32"))
    is_mixed = str(_of(settings, "trainer.precision", "bf16-mixed")).endswith("mixed")
    compute = _of(settings, "model.sharding.compute_dtype", "bfloat16" if is_mixed else None)
    lora = _of(settings, "model.lora", None)
    return StepShape(
        rows=max(1, math.ceil(samples / (micro_batches * trainer_devices))),
        prompt_tokens=prompt_tokens,
        completion_tokens=_count(settings, "data.sampling.max_tokens"),
        micro_batches=micro_batches,
        logprob_chunk_tokens=_count(settings, "model.logprob_chunk_tokens"),
        gradient_checkpointing=bool(_of(settings, "model.gradient_checkpointing", False)),
        dtype=dtype,
        compute_dtype=dtype if compute is None else getattr(torch, compute),
        lora=None if lora is None else LoRA(**lora),
    )


def _reference_bytes(settings: Mapping[str, Any], size: ModelSize) -> float:
    """Bytes of the copy that a KL penalty needs; none where adapters can be switched off to get it."""
    lora = _of(settings, "model.lora", None)
    is_copied = lora is None or _of(lora, "modules_to_save", None) or _of(lora, "continue_adapter", False)
    if not float(_of(settings, "model.kl_coefficient", 0.0)) or not is_copied:
        return 0.0
    return float(BYTES.get(_of(settings, "model.dtype", "float32"), 4) * size.parameters)


def _teacher_bytes(settings: Mapping[str, Any]) -> float:
    """Bytes of the weights of all teachers in the trainer's process."""
    teachers = _local_teachers(_of(settings, "model.distillation.teacher", None))
    return sum((float(BYTES.get(dtype, 4) * _teacher_size(model).parameters) for model, dtype in teachers), 0.0)


def _local_teachers(teacher: Any) -> list[tuple[str, str]]:
    """Models in the trainer's process, and the types of their weights."""
    if isinstance(teacher, str):
        return [(teacher, "float32")]
    name = str(_of(teacher, "class_path", ""))
    if name.endswith("SourceTeachers"):
        return [found for one in _of(teacher, "init_args.teachers", {}).values() for found in _local_teachers(one)]
    if not name.endswith("LocalTeacher"):
        return []
    return [(str(_of(teacher, "init_args.model", "")), str(_of(teacher, "init_args.dtype", "float32")))]


def _teacher_size(model: str) -> ModelSize:
    from lit_async_rl.models.loading import errors_naming

    with errors_naming("model.distillation.teacher"):
        return model_size(model)


def _engine_bytes(
    settings: Mapping[str, Any], size: ModelSize, *, length: int, capacity: float, is_shared: bool
) -> float:
    """Bytes of an engine: weights, twice while new ones arrive, and keys and values of all slots.

    vLLM takes its share of the device, whatever it needs.
    """
    name, engine = _innermost_engine(settings)
    share = _of(engine, "init_args.gpu_memory_utilization", None)
    if share is None and name.endswith("VLLMEngine"):
        from lit_async_rl.vllm.sleep import default_memory_share

        share = default_memory_share(None if is_shared else [0], int(_of(engine, "init_args.sleep_level", 0)))
    if share is not None:
        return float(share) * capacity
    dtype = _of(engine, "init_args.dtype", "float32")
    values = BYTES.get(dtype, 4)
    cache = _num_slots(settings) * length * size.cache_bytes * values / 2
    return 2 * values * size.parameters + cache


def _model(source: Path, settings: Mapping[str, Any]) -> str:
    model = _of(settings, "model.model", None)
    if model is None:
        raise ValueError(f"{source}: model.model is not set, so the model's size is unknown")
    return str(model)


def _settings(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ValueError(f"{file}: there is no such file")
    return load_config(file)


def _of(settings: Any, name: str, default: Any) -> Any:
    """A setting by its dotted name; the default where it is not set."""
    value: Any = settings
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return default if value is None else value


def _count(settings: Mapping[str, Any], name: str) -> int:
    """A setting that is a number; where the source is silent, the default of a run."""
    return int(_of(settings, name, all_settings()[name]["default"]))


def _innermost_engine(settings: Mapping[str, Any]) -> tuple[str, Any]:
    """Class of the engine that samples, and its settings: others wrap it."""
    engine: Any = _of(settings, "data.engine", {})
    while isinstance(inner := _of(engine, "init_args.engine", None), str | Mapping):
        engine = inner
    return engine if isinstance(engine, str) else _of(engine, "class_path", "EmbeddedEngine"), engine


def _num_slots(settings: Mapping[str, Any]) -> int:
    """Slots of the innermost engine, by default its class's.

    Raises:
        ValueError: the engine has no such setting.
    """
    name, engine = _innermost_engine(settings)
    kind = getattr(lit_async_rl, name.rpartition(".")[2], None)
    parameters = {} if kind is None else dict(inspect.signature(kind).parameters)
    for slots in SLOTS:
        if slots in parameters:
            return int(_of(engine, f"init_args.{slots}", parameters[slots].default))
    raise ValueError(
        f"data.engine={name}: the number of completions that the engine samples at once is unknown, because the engine "
        f"has none of the settings {', '.join(SLOTS)}"
    )


def _num_ranks(settings: Mapping[str, Any]) -> int:
    ranks = int(_of(settings, "cluster.init_args.trainer_ranks", 1))
    devices = _of(settings, "trainer.devices", "auto")
    if isinstance(devices, list):
        local = len(devices)
    elif isinstance(devices, int) and devices > 0:
        local = devices
    elif ranks > 1 or _of(settings, "trainer.accelerator", "auto") == "cpu":
        local = 1  # `auto` of CPUs
    else:
        raise ValueError(f"trainer.devices={devices} does not say how many devices trained in this run: add --ranks")
    return max(ranks, local * _count(settings, "trainer.num_nodes"))


def _table(predictions: Sequence[Prediction], best: Prediction) -> list[str]:
    lines = [f"{'trainer devices':>17}{'engines':>9}{'step':>10}{'trainer waits':>15}{'engines idle':>14}"]
    for found in predictions:
        steps = found.steps
        mark = "  <- fastest" if found is best else ""
        lines.append(
            f"{found.trainer_devices:>17}{found.replicas:>9}{_seconds(found.step_s):>10}"
            f"{steps.wait_s / steps.wall_s:>15.0%}{max(0.0, 1 - steps.engine_busy_s / steps.wall_s):>14.0%}{mark}"
        )
    return lines


def _advice(best: Prediction, low: Prediction, bound: int) -> list[str]:
    lines = []
    if low.max_staleness < bound:
        lines.append(f"data.max_staleness {low.max_staleness} instead of {bound} would be as fast, with fresher data")
    elif low.step_s < best.step_s / 1.1:
        lines.append(f"data.max_staleness {low.max_staleness} instead of {bound}: {_seconds(low.step_s)} a step")
    return [
        *lines,
        "add to the run's command: --cluster.class_path RayCluster",
        f"  --cluster.trainer_ranks {best.trainer_devices} --cluster.engines.replicas {best.replicas}",
    ]


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"
