"""Acceptance of a machine with a GPU: everything that needs one, in ten minutes, as one table.

    python benchmarks/gpu_acceptance                      # the first GPU
    python benchmarks/gpu_acceptance --device cpu         # the same without one: what cannot run there says so
    python benchmarks/gpu_acceptance --only packing vllm

Installs nothing. Each check runs in a process of its own with a time limit; one that fails or hangs is a line of the
table, and the exit status. `share of peak` compares with the matrix products that the first check measures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from checks import CHECKS

HERE = Path(__file__).parent


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS), metavar="CHECK")
    parser.add_argument("--timeout_s", type=float, default=240.0, help="of one check")
    parser.add_argument("--output", type=Path, help="the results as JSON")
    args = parser.parse_args()
    results = []
    for name in args.only:
        results.append(run(name, args.device, args.timeout_s))
        print(line(results[-1]), flush=True)
    peak = next((r["numbers"]["matmul_tflops"] for r in results if r["check"] == "machine" and r["ok"]), None)
    print("\n" + table(results, peak))
    if args.output is not None:
        args.output.write_text(json.dumps({"device": args.device, "results": results}, indent=1))
    failed = [result["check"] for result in results if not result["ok"] and not result["skipped"]]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def run(name: str, device: str, timeout_s: float) -> dict:
    """One check in a process of its own."""
    began = time.monotonic()
    root = str(HERE.parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(HERE / "checks.py"), name, device]
    result = {"check": name, "ok": False, "skipped": False, "numbers": {}, "note": ""}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        try:
            out, err = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)
            child.communicate()
            result["note"] = f"did not end within --timeout_s={timeout_s:g}"
        else:
            answer = next((text for text in reversed(out.splitlines()) if text.startswith("{")), "")
            last = next((text for text in reversed(err.splitlines()) if text.strip()), "no message")
            result |= json.loads(answer) if answer else {"note": f"exit status {child.returncode}: {last[:300]}"}
    return result | {"seconds": round(time.monotonic() - began, 1)}


def line(result: dict) -> str:
    """What a check found."""
    state = "skipped" if result["skipped"] else "ok" if result["ok"] else "FAILED"
    numbers = "  ".join(f"{name} {value:.4g}" for name, value in result["numbers"].items())
    return f"{result['check']:<12} {state:<8} {result['seconds']:>6.1f} s  {numbers}  {result['note']}".rstrip()


def table(results: list[dict], peak: float | None) -> str:
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
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in result["numbers"].items() if name != "tflops")
        tflops = result["numbers"].get("tflops")
        share = f"{tflops / peak:.1%}" if tflops and peak else ""
        rows.append(f"| {result['check']} | {state} | {result['seconds']:.0f} | {numbers} | {share} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
