"""Run folders as a run writes them, of any size, without training."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

BEGAN = 1.8e9  # seconds since 1970
METRICS = (
    *("reward/mean", "sample/staleness_mean", "sample/staleness_max", "importance/ess_ratio", "importance/kl_k1"),
    *("policy/entropy", "grad/norm", "grad/cosine", "perf/tokens_per_s", "perf/trainer_wait_share"),
    *("perf/engine_idle_share", "perf/step_s", "rollout/length_mean", "sample/total_tokens"),
)


def write_metrics(folder: Path, steps: int) -> None:
    """`metrics.csv`: a row for each step, and one for each of ten validations."""
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["epoch", *METRICS, "step", "val/pass@1", "val/reward"])
        writer.writeheader()
        for step in range(steps):
            if step % max(1, steps // 10) == 0:
                share = step / steps
                writer.writerow({"epoch": 0, "step": step, "val/pass@1": share, "val/reward": share})
            values = {name: f"{math.sin(step / 50 + n) + n:.6f}" for n, name in enumerate(METRICS)}
            writer.writerow({"epoch": 0, "step": step, **values})


def rollout(step: int, group: int, sample: int, length: int = 12, **changes: object) -> dict[str, object]:
    """A line of `samples.jsonl`."""
    version = max(0, step - 1 - sample % 5)
    row: dict[str, object] = {
        "step": step,
        "group": group,
        "prompt": f"prompt {group}=",
        "completion": "word " * length,
        "answer": "word",
        "reward": float((step + sample) % 2),
        "oldest_version": version,
        "newest_version": version + 1,
        "sample": sample,
        "policy_version": step - 1,
        "finish_reason": "stop",
        "num_tokens": length,
        "tokens": ["word "] * length,
        "versions": [version + (n > length // 2) for n in range(length)],
        "log_ratios": [round(math.sin(n) * 0.9, 4) for n in range(length)],
        "advantages": [round(sample - 3.5, 2)] * length,
        "entropies": [round(abs(math.cos(n)) * 1.5, 4) for n in range(length)],
    }
    return row | changes


def write_samples(folder: Path, steps: int, per_step: int, group_size: int = 8, tokens: int = 12) -> None:
    """`samples.jsonl` with all rollouts of all steps."""
    with (folder / "samples.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            for n in range(per_step):
                group = step * per_step // group_size + n // group_size
                file.write(json.dumps(rollout(step, group, n % group_size, length=tokens)) + "\n")


def write_held_out(folder: Path, steps: tuple[int, ...]) -> None:
    """`held_out.jsonl`: three prompts at each validation."""
    with (folder / "held_out.jsonl").open("w") as file:
        for step in steps:
            for n in range(3):
                row = {"step": step, "prompt": f"held out {n}=", "completion": f"at step {step}", "answer": "x"}
                file.write(json.dumps(row | {"reward": float(step > steps[0])}) + "\n")


def event(category: str, name: str, begin: float, seconds: float, **args: object) -> str:
    """An event of the timeline as a line of its file; `begin` in seconds since the run began."""
    tid = {"trainer": 1, "engine": 2, "reward": 3}[category]
    span = {"name": name, "cat": category, "ph": "X", "ts": (BEGAN + begin) * 1e6, "dur": seconds * 1e6}
    return json.dumps({**span, "pid": 0, "tid": tid, "args": args}) + ",\n"


def step_events(step: int, lag: int, more: int = 0) -> list[str]:
    """One second of the pipeline: the engine beside the trainer, or in turns with it where `lag` is 0."""
    begin = float(step)
    version = max(0, step - lag)
    events = [event("engine", "prefill", begin, seconds=0.05, version=version, slots=64, tokens=512)]
    decode = 0.85 if lag else 0.45
    parts = 4 + more
    for n in range(parts):
        at = begin + 0.05 + n * decode / parts
        events.append(event("engine", "decode", at, seconds=decode / parts, version=version, slots=64, tokens=256))
        events.append(event("reward", "score", at + 0.02, seconds=0.01, group=step))
    wait = 0.1 if lag else 0.5
    events.append(event("trainer", "wait", begin, seconds=wait, step=step))
    training = event(
        "trainer",
        "forward_backward",
        begin + wait,
        seconds=0.3,
        step=step,
        micro_batch=0,
        versions=[version, version + 1],
        staleness=lag,
    )
    events.append(training)
    events.append(event("trainer", "optimizer", begin + wait + 0.3, seconds=0.04, step=step))
    events.append(event("trainer", "publish", begin + wait + 0.34, seconds=0.06, step=step, version=step + 1))
    if step % 25 == 24:
        events.append(event("trainer", "validation", begin + wait + 0.4, seconds=0.05, step=step))
    return events


def write_timeline(folder: Path, steps: int, lag: int, more: int = 0) -> None:
    """`timeline/rank0.json` of a run that was killed: without its closing bracket, and with a torn line."""
    (folder / "timeline").mkdir(exist_ok=True)
    with (folder / "timeline" / "rank0.json").open("w") as file:
        file.write("[\n")
        for tid, name in ((1, "trainer"), (2, "engine"), (3, "rewards")):
            meta = {"name": "thread_name", "ph": "M", "pid": 0, "tid": tid, "args": {"name": name}}
            file.write(json.dumps(meta) + ",\n")
        for step in range(steps):
            file.writelines(step_events(step, lag, more))
        file.write('{"name": "wait", "cat": "trai')


def make_run(folder: Path, steps: int = 40, lag: int = 2, per_step: int = 8) -> Path:
    """A whole run folder."""
    folder.mkdir(parents=True)
    write_metrics(folder, steps)
    write_samples(folder, steps, per_step)
    write_held_out(folder, (0, steps // 2, steps))
    write_timeline(folder, steps, lag)
    (folder / "config.yaml").write_text("data:\n  max_staleness: 2\n")
    return folder
