"""Results of a suite for the documentation: a picture, and a table as a measurement."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from benchmarks.common.measurement import measurement, write_measurement
from benchmarks.staleness.figures import save
from benchmarks.time_to_accuracy.report import as_share, speedup_with_interval, with_interval
from benchmarks.time_to_accuracy.statistics import LAST, SHARES, level_at, smoothed, speedup, summarize, time_to
from benchmarks.time_to_accuracy.suite import Cell, workloads

# not beside the tables of the staleness benchmark, all of which that benchmark reads
CURVES = Path("docs/results/time_to_accuracy")
TITLES = {
    "tools_0.1": "tools answer after 0.1 s",
    "tools_0.4": "tools answer after 0.4 s",
    "tools_1.6": "tools answer after 1.6 s",
    "lengths": "completions of 3 to 120 digits",
    "quickstart": "quick start",
    "agent_0.4": "agent behind the endpoint, tools of 0.4 s",
    "smollm2_2s": "SmolLM2, rewards of 2 s",
    "smollm2_8s": "SmolLM2, rewards of 8 s",
}
COLOURS = {
    "synchronous": "0.35",
    "plain": "C1",
    "default": "C0",
    "redundant": "C2",
    "vcpo": "C3",
    "environment": "C5",
    "process": "C2",
    "in_process": "C4",
    "quickstart_plain_sync": "0.35",
    "quickstart_sync": "0.65",
    "quickstart_plain": "C1",
    "quickstart_default": "C0",
    "quickstart_own_process": "C2",
    "lengths_trl": "C4",
    "smollm2_trl": "C4",
    "redundant1": "C2",
}
NAMES = {
    "plain": "plain GRPO",
    "default": "recipe",
    "redundant": "recipe, 4 of 20 groups redundant",
    "vcpo": "VCPO, exact norms",
    "environment": "the same task as an environment in the trainer's process, recipe",
    "in_process": "recipe, the agent's client in the trainer's process",
    "process": "recipe, the agent in a process of its own",
    "redundant_process": "recipe, the agent in a process of its own, 4 of 20 groups redundant",
    "synchronous_redundant": "synchronous, 4 of 20 groups redundant",
    "redundant1": "recipe, 1 of 5 groups redundant",
    "synchronous_redundant1": "synchronous, 1 of 5 groups redundant",
    "synchronous_recipe": "recipe, synchronous",
    "synchronous_recipe_twice": "recipe, synchronous, twice the steps",
    "synchronous_recipe_linear": "recipe, synchronous, linear rate",
    "synchronous_recipe_linear_twice": "recipe, synchronous, linear rate, twice the steps",
    "synchronous_1e4": "synchronous, rate 1e-4",
    "default_4_1e4": "recipe, `max_staleness` 4, rate 1e-4",
    "plain_4_1e4": "plain GRPO, `max_staleness` 4, rate 1e-4",
    "quickstart_plain_sync": "plain GRPO, synchronous",
    "quickstart_sync": "recipe, synchronous",
    "quickstart_plain": "plain GRPO, `max_staleness` 4",
    "quickstart_default": "recipe, `max_staleness` 4",
    "quickstart_own_process": "recipe, `max_staleness` 4, `own_process`",
    "periodic": "Periodic Asynchrony",
    "pipeline": "PipelineRL",
    "quickstart_trl": "TRL GRPOTrainer, two threads",
    "lengths_trl": "TRL GRPOTrainer, two threads",
    "smollm2_trl": "TRL GRPOTrainer",
    "tools_periodic": "Periodic Asynchrony",
    "tools_pipeline": "PipelineRL",
}
SHOWN = {  # in the pictures; the tables have all
    "tools_0.1": ("synchronous", "plain_4", "default_4"),
    "tools_0.4": ("synchronous", "plain_8", "default_8", "redundant_8"),
    "tools_1.6": ("synchronous", "plain_8", "default_8", "redundant_8"),
    "lengths": ("synchronous", "plain_4", "default_4", "lengths_trl"),
    "quickstart": ("quickstart_plain_sync", "quickstart_sync", "quickstart_plain", "quickstart_own_process"),
    "agent_0.4": ("synchronous", "in_process_8", "process_8", "environment_8"),
    "smollm2_2s": ("synchronous", "smollm2_trl", "default_8", "redundant1_8"),
    "smollm2_8s": ("synchronous", "default_8", "redundant1_4"),
}
LIKE_FOR_LIKE = {  # what a kind of system is compared with, besides the workload's reference
    "redundant": "synchronous_redundant",
    "redundant_process": "synchronous_redundant",
    "redundant1": "synchronous_redundant1",
    "quickstart_default": "quickstart_sync",
    "quickstart_own_process": "quickstart_sync",
    "default": "synchronous_recipe_linear_twice",
}
HEADLINES = {  # of a suite
    "tools": ("tools_1.6", "redundant_8", "tools of 1.6 s, recipe with redundant groups, max_staleness 8"),
    "lengths": ("lengths", "default_4", "completions of 3 to 120 digits, recipe, max_staleness 4"),
    "quickstart": ("quickstart", "quickstart_default", "the quick start, against synchronous plain GRPO"),
    "tools_0.1": ("tools_0.1", "default_4", "tools of 0.1 s, recipe, max_staleness 4"),
    "lengths_trl": ("lengths", "default_4", "completions of 3 to 120 digits, recipe, max_staleness 4"),
    "agents": ("agent_0.4", "process_8", "agent behind the endpoint, tools of 0.4 s, recipe, max_staleness 8"),
    "smollm2": ("smollm2_2s", "default_8", "SmolLM2, rewards of 2 s, recipe, max_staleness 8"),
    "smollm2_8s": ("smollm2_8s", "redundant1_4", "SmolLM2, rewards of 8 s, redundant groups, max_staleness 4"),
}


def kind(system: str) -> str:
    """`plain` of `plain_8`."""
    name, _, bound = system.rpartition("_")
    return name if bound.isdigit() else system


def title(system: str) -> str:
    """A system for readers: `recipe, max_staleness 8`."""
    name = NAMES.get(kind(system), kind(system).replace("_", " "))
    return name if kind(system) == system else f"{name}, `max_staleness` {system.rpartition('_')[2]}"


def algorithm(workload: str, system: str) -> str:
    """Training method of a system: loss, schedule and number of steps."""
    return f"{loss(workload, system)}, {schedule(workload, system)} rate, {Cell(workload, system, 0).num_steps} steps"


def loss(workload: str, system: str) -> str:
    """The loss and correction of a system."""
    one = Cell(workload, system, 0).settings
    if "pipeline" in system:
        return "CISPO"
    has_recipe = any("vcpo" in config for config in one.configs)
    is_quick_start = workload == "quickstart" and not one.is_trl and "periodic" not in system
    has_recipe |= is_quick_start and "configs/stabilizers/plain.yaml" not in one.configs
    return "VCPO" if has_recipe else "PPO-clip GRPO"


def schedule(workload: str, system: str) -> str:
    """How the rate of a system changes."""
    if workload == "quickstart":
        return "stable and decaying" if loss(workload, system) == "VCPO" else "one-cycle"
    return "linear" if "--model.scheduler=Linear" in Cell(workload, system, 0).settings.arguments else "constant"


def compared(name: str, system: str, against: str, share: float, found: tuple[float, float, float]) -> dict[str, Any]:
    """One comparison, with the names of both systems."""
    value, low, high = (None if math.isnan(number) else round(number, 2) for number in found)
    sides = {"system": system, "against": against}
    told = {side: {"name": title(one), "trains": algorithm(name, one)} for side, one in sides.items()}
    return {
        "workload": TITLES[name],
        "share": share,
        "value": value,
        "interval": None if low is None else [low, high],
    } | told


def comparable(table: pd.DataFrame) -> list[str]:
    """Workloads of the results, in the order of `TITLES`, whose reference system has run."""
    done = {str(name): set(rows["system"]) for name, rows in table.groupby("workload")}
    return [name for name in TITLES if workloads()[name].reference in done.get(name, ())]


def drawn(curve: pd.DataFrame) -> pd.Series:
    """The smoothed curve from the accuracy before training on, which is no mean."""
    values = smoothed(curve)
    values.iloc[0] = curve["accuracy"].iloc[0]
    return values


def picture(table: pd.DataFrame, names: list[str]) -> Any:
    """Held-out accuracy over time, a panel for each workload, its legend beside it; thin lines are single runs."""
    figure, axes = plt.subplots(len(names), 1, figsize=(8.3, 3.4 * len(names)), squeeze=False, layout="constrained")
    for axis, name in zip(axes[:, 0], names, strict=True):
        rows = table[table["workload"] == name]
        reference = workloads()[name].reference
        base = [one.sort_values("step") for _, one in rows[rows["system"] == reference].groupby("seed")]
        summary = summarize(rows, name, reference).set_index("system")
        for system, runs in rows.groupby("system"):
            if system not in SHOWN[name]:
                continue
            each = [one.sort_values("step") for _, one in runs.groupby("seed")]
            colour = COLOURS[kind(str(system))]
            for one in each:
                axis.plot(one["wall_s"], drawn(one), color=colour, alpha=0.3, linewidth=0.8)
            mean = pd.concat([one.assign(smooth=drawn(one)) for one in each]).groupby("step").mean(numeric_only=True)
            said = title(str(system)).replace("`", "")
            factor = summary.loc[system, "time_speedup_0.95"][0]
            if system != reference and factor > 0:
                said += f": {factor:.1f} times as fast"
            axis.plot(mean["wall_s"], mean["smooth"], color=colour, linewidth=2, label=said)
        axis.axhline(level_at(base, 0.95), color="0.6", linewidth=0.7, linestyle=":")
        axis.set(xlabel="seconds of training", ylabel="held-out accuracy", title=TITLES[name])
        axis.grid(alpha=0.3)
        axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    return figure


def rows_of(table: pd.DataFrame, name: str) -> list[list[Any]]:
    """Rows of the table: S(p) over time with intervals, and what explains it."""
    found = []
    for _, row in summarize(table, name, workloads()[name].reference).iterrows():
        ratios = [speedup_with_interval(row[f"time_speedup_{share}"]) for share in SHARES]
        steps = row["steps_speedup_0.95"][0] or math.nan
        cells = [TITLES[name], title(row["system"]), algorithm(name, str(row["system"])), row["seeds"]]
        cells += [round(row["step_s"], 2), *ratios]
        cells += ["not reached" if math.isnan(steps) else f"{steps:.2f}", f"{row['final']:.3f}"]
        cells += [with_interval(row["difference"], 3), f"{row['staleness']:.1f}", as_share(row["wait_share"])]
        cells += [f"{row['cpu_s']:.2f}", f"{row['cpu_s'] / row['step_s']:.2f}"]
        found.append([*cells, f"{row['load']:.0f}"])
    return found


def compared_in(table: pd.DataFrame, name: str) -> list[dict[str, Any]]:
    """How much sooner each system of a workload is than another one, to levels of the workload's reference."""
    rows = table[table["workload"] == name]
    reference = workloads()[name].reference
    runs = {
        str(system): [one.sort_values("step") for _, one in own.groupby("seed")]
        for system, own in rows.groupby("system", sort=False)
    }
    found = []
    for system, share in product(runs, SHARES):
        level = level_at(runs[reference], share)
        times = [time_to(curve, level) for curve in runs[system]]
        for against in (reference, LIKE_FOR_LIKE.get(kind(system), "")):
            if system != reference and against in runs:
                ratio = speedup([time_to(curve, level) for curve in runs[against]], times)
                if ratio[0] > 0:
                    found.append(compared(name, system, against, share=share, found=ratio))
    return found


def write_documents(table: pd.DataFrame, suite: str, command: str, commit: str, machine: str, root: Path) -> None:
    """Writes a measurement to `docs/measurements`, the curves to `CURVES`, and their picture to `docs/assets`.

    `python docs/pictures.py` draws the measurement.
    """
    names = comparable(table)
    (workload, system, said) = HEADLINES[suite]
    file = "time_to_accuracy" if suite == "tools" else f"time_to_accuracy_{suite.replace('.', '_')}"
    curves = root / CURVES
    curves.mkdir(parents=True, exist_ok=True)
    table.to_parquet(curves / f"{file}.parquet")
    save(picture(table, names), str(root / f"docs/assets/{file}_curves.png"))
    reference = workloads()[workload].reference
    summary = summarize(table, workload, reference)
    best = summary.set_index("system").loc[system, "time_speedup_0.95"]
    columns = ["workload", "system", "trains", "seeds", "seconds per step", *(f"S({share})" for share in SHARES)]
    columns += ["over steps: S(0.95)", f"accuracy, last {LAST} evaluations", "minus synchronous"]
    columns += ["mean staleness", "waiting"]
    columns += ["processor s per step", "cores it got", "load"]
    found = measurement(
        file,
        round(best[0], 2),
        f"times as fast to 95 % of the synchronous rise ({said}, against {title(reference)})",
        columns=columns,
        rows=[row for name in names for row in rows_of(table, name)],
        interval=[round(best[1], 2), round(best[2], 2)],
        command=command,
        commit=commit,
        machine=f"{machine} (load average in the table)",
        comparisons=[one for name in names for one in compared_in(table, name)],
    )
    write_measurement(root / f"docs/measurements/{file}.json", found)
