"""Acceptance of a machine with a GPU: everything that needs one, as one table.

    python benchmarks/gpu_acceptance --output gpu.json    # the first GPU; again until nothing remains
    python benchmarks/gpu_acceptance --device cpu         # the same without one: what cannot run there says so
    python benchmarks/gpu_acceptance --only packing vllm

Installs nothing. Each check runs in a process of its own with a time limit; one that fails or hangs is a line of the
table, and the exit status. A call takes at most `--budget_s`, eight minutes by default: the next one with the same
`--output` goes on with the checks that are not in it, and within a check with the parts that are not, also after a
kill. The most valuable checks come first. `share of peak` compares with the matrix products of the same precision that
the first check measures.

Needs this repository, torch, transformers, lightning, peft, omegaconf, jsonargparse, torchmetrics and jaxtyping; wandb
only where a run logs to it. Nothing is downloaded: `models/smollm2`, if it is there, adds a check.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from checks import CHECKS

HERE = Path(__file__).parent
WORK = "tflops_"  # prefix of a number: useful operations in the precision named behind it
PART = ": "  # between a part and its number
EXIT_UNFINISHED = 3
SHORTEST_S = 20.0  # no check starts with less time left
SLOWER = 4  # limits of a rehearsal on a shared CPU, as a factor


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS), metavar="CHECK")
    parser.add_argument("--timeout_s", type=float, help="of one check (default: its own limit)")
    parser.add_argument("--output", type=Path, help="the results as JSON")
    parser.add_argument("--budget_s", type=float, default=480.0, help="of this call; 0 is no limit")
    args = parser.parse_args()
    results = finished(args.output, args.device)
    waiting = [name for name in args.only if name not in {result["check"] for result in results}]
    deadline = time.monotonic() + (args.budget_s or float("inf"))
    parts = None if args.output is None else args.output.with_suffix(".parts.jsonl")
    while waiting and (left_s := deadline - time.monotonic()) > SHORTEST_S:
        name = waiting.pop(0)
        limit_s = args.timeout_s or CHECKS[name].limit_s * (SLOWER if args.device == "cpu" else 1)
        results.append(run(name, args.device, timeout_s=min(limit_s, left_s), parts=parts))
        print(line(results[-1]), flush=True)
        if args.output is not None:
            args.output.write_text(json.dumps({"device": args.device, "results": results}, indent=1))
    print("\n" + table(results, peaks(results)))
    if args.device == "cpu":
        print("\n" + needs_gpu(results))
    if waiting:
        print(f"\nnot yet run, for want of --budget_s: {', '.join(waiting)}; the same command goes on with them")
    failed = [result["check"] for result in results if not result["ok"] and not result["skipped"]]
    sys.exit(f"failed: {', '.join(failed)}" if failed else EXIT_UNFINISHED if waiting else 0)


def finished(output: Path | None, device: str) -> list[dict]:
    """Results of earlier calls that need not be repeated: those of failures are."""
    if output is None or not output.exists():
        return []
    earlier = json.loads(output.read_text())
    if earlier["device"] != device:
        sys.exit(f"--output={output} holds results of --device={earlier['device']}: choose another file")
    return [result for result in earlier["results"] if result["ok"] or result["skipped"]]


def peaks(results: list[dict]) -> dict[str, float]:
    """Measured TFLOPS of matrix products by precision."""
    machine = next((result["numbers"] for result in results if result["check"] == "machine" and result["ok"]), {})
    prefix = "matmul_tflops_"
    return {name.removeprefix(prefix): value for name, value in machine.items() if name.startswith(prefix)}


def needs_gpu(results: list[dict]) -> str:
    """Which checks a CPU leaves open."""
    lines = [f"  {result['check']}: {result['note']}" for result in results if result["skipped"]]
    on_gpu = "  overlap: that a tenth of the time is saved; all speeds, memory, and kernels of CUDA"
    return "\n".join(["needs a GPU:", *lines, on_gpu])


def run(name: str, device: str, timeout_s: float, parts: Path | None) -> dict:
    """One check in a process of its own."""
    began = time.monotonic()
    root = str(HERE.parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(HERE / "checks.py"), name, device, *([] if parts is None else [str(parts)])]
    result = {"check": name, "ok": False, "skipped": False, "numbers": {}, "note": ""}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        try:
            out, err = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)
            child.communicate()
            result["note"] = f"did not end within {timeout_s:.0f} s"
            result["numbers"] = parts_of(name, parts)
        else:
            answer = next((text for text in reversed(out.splitlines()) if text.startswith("{")), "")
            last = next((text for text in reversed(err.splitlines()) if text.strip()), "no message")
            result |= json.loads(answer) if answer else {"note": f"exit status {child.returncode}: {last[:300]}"}
    return result | {"seconds": round(time.monotonic() - began, 1)}


def parts_of(name: str, parts: Path | None) -> dict[str, float]:
    """Numbers of the parts of a check that have been measured so far."""
    rows = [] if parts is None or not parts.exists() else [json.loads(row) for row in parts.read_text().splitlines()]
    found = [row for row in rows if row["check"] == name]
    return {f"{row['part']}: {key}": value for row in found for key, value in row["numbers"].items()}


def line(result: dict) -> str:
    """One line with the result of a check."""
    state = "skipped" if result["skipped"] else "ok" if result["ok"] else "FAILED"
    parts = {name.partition(PART)[0] for name in result["numbers"] if PART in name}
    listed = "  ".join(f"{name} {value:.4g}" for name, value in result["numbers"].items() if PART not in name)
    numbers = f"{len(parts)} parts" if parts else listed
    return f"{result['check']:<12} {state:<8} {result['seconds']:>6.1f} s  {numbers}  {result['note']}".rstrip()


def table(results: list[dict], peaks: dict[str, float]) -> str:
    """Markdown."""
    rows = ["| check | result | seconds | numbers | share of peak |", "|---|---|---|---|---|"]
    for result in results:
        state = (
            "skipped: " + result["note"]
            if result["skipped"]
            else "ok"
            if result["ok"]
            else "**failed**: " + result["note"]
        )
        numbers = {
            name: value for name, value in result["numbers"].items() if not name.startswith(WORK) and PART not in name
        }
        listed = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        rows.append(f"| {result['check']} | {state} | {result['seconds']:.0f} | {listed} | {share(result, peaks)} |")
    rows += ["", "| check | part | numbers |", "|---|---|---|"]
    for result in results:
        by_part: dict[str, list[str]] = {}
        for name, value in result["numbers"].items():
            part, _, number = name.partition(PART)
            if number:
                by_part.setdefault(part, []).append(f"{number} {value:.4g}")
        rows += [f"| {result['check']} | {part} | {', '.join(found)} |" for part, found in by_part.items()]
    return "\n".join(rows)


def share(result: dict, peaks: dict[str, float]) -> str:
    """Share of the peak of the same precision; empty without work or peak."""
    for name, value in result["numbers"].items():
        precision = name.removeprefix(WORK)
        if name.startswith(WORK) and precision in peaks:
            return f"{value / peaks[precision]:.1%} of {precision}"
    return ""


if __name__ == "__main__":
    main()
