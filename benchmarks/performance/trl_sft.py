"""Loss, time and memory of supervised fine-tuning, here and by TRL's SFTTrainer: same model, batch, optimizer, threads.

TRL needs an environment of its own:

    python -m venv /tmp/trl && /tmp/trl/bin/pip install torch==2.13.0 trl==1.16.0
    OMP_NUM_THREADS=1 python benchmarks/performance/trl_sft.py --trl_python /tmp/trl/bin/python \
        --write docs/measurements/trl_sft_smollm2.json

Each run is a process of its own that trains on the same eight records in every step, four at a time, padded; the two
take turns. Lists of numbers are sorted, so that rows have 30 to 200 tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.measurement import measurement, write_measurement

WORKERS = Path(__file__).resolve().parent / "workers"
NAMES = {"trl": "TRL SFTTrainer", "padded": "padded", "packed": "packed"}


def make_records(number: int) -> list[dict[str, str]]:
    """Lists of numbers to sort, as chats that are rendered already."""
    chance = random.Random(0)
    records = []
    for _ in range(number):
        numbers = [chance.randrange(100) for _ in range(chance.randrange(5, 45))]
        question = f"<|im_start|>user\nSort {' '.join(map(str, numbers))}<|im_end|>\n<|im_start|>assistant\n"
        records.append({"prompt": question, "completion": " ".join(map(str, sorted(numbers)))})
    return records


def run(name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Losses and seconds of the steps of one process, and its largest resident memory."""
    output = folder / f"{name}.json"
    script, python = ("trl_sft_run.py", args.trl_python) if name == "trl" else ("our_sft_run.py", sys.executable)
    settings = dict(model=args.model, records=str(folder / "records.jsonl"), steps=args.steps, packed=name == "packed")
    words = ["--settings", json.dumps(settings), "--output", str(output)]
    subprocess.run([python, str(WORKERS / script), *words], check=True, cwd=folder)
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--trl_python", default="/tmp/trl/bin/python")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--machine", default="one thread, float32, programs in turns; medians")
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    args.model = str(Path(args.model).resolve())
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}
    with tempfile.TemporaryDirectory() as folder:
        lines = [json.dumps(record) for record in make_records(8)]
        Path(folder, "records.jsonl").write_text("\n".join(lines))
        for _ in range(args.rounds):
            for name in NAMES:
                found[name].append(run(name, args, Path(folder)))
    theirs = found["trl"][0]["losses"]
    rows = []
    medians = {}
    for name, title in NAMES.items():
        one = found[name][0]["losses"]
        seconds = [second for result in found[name] for second in result["processor_s"][1:]]  # the first one warms up
        medians[name] = statistics.median(seconds)
        memory = statistics.median(result["memory_gb"] for result in found[name])
        differences = [abs(a - b) for a, b in zip(one, theirs, strict=True)]
        rows.append(
            [title, round(one[0], 7), f"{differences[0]:.1e}", f"{max(differences):.1e}", medians[name], memory]
        )
        rows[-1][4:] = [round(medians[name], 2), round(memory, 2)]
        print(*rows[-1], flush=True)
    if args.write:
        columns = ["SmolLM2-135M, 8 rows", "loss", "less TRL's", "in any step", "step, processor s", "peak, GB"]
        made = measurement(
            args.write.stem,
            round(medians["trl"] / medians["padded"], 2),
            "times the speed of TRL's SFTTrainer on the same padded batches (SmolLM2-135M, processor time)",
            columns=columns,
            rows=rows,
            command=f"OMP_NUM_THREADS=1 python benchmarks/performance/trl_sft.py --rounds {args.rounds}",
            machine=args.machine,
        )
        write_measurement(args.write, made)


if __name__ == "__main__":
    main()
