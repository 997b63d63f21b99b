"""Scores small programs with hostile ones among them: all right, none hangs, and what the sandbox itself costs.

    python benchmarks/rewards/code.py --number 10000 --hostile 200 --workers 2 --out docs/measurements/code_reward.json

Each program adds two numbers, by standard input and output or by a function with unit tests; half of them are wrong.
Hostile ones fork, spin, fill memory, disk and output, ignore signals, leave processes behind and print verdicts.
The cost is the processor time of the trainer and of all processes of the sandbox together, without what the programs
themselves used: that of the same sources in the same interpreter, measured first.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import lit_async_rl as rl
from benchmarks.common.measurement import measurement, write_measurement
from lit_async_rl.rewards.scorer import Scorer, score_all

LIMITS = rl.SandboxLimits(wall_s=1.0, cpu_s=2, memory_mb=128, processes=16, output_kb=64, file_mb=4, scratch_mb=8)
HOSTILE = (
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "while True: pass",
    "x = []\nwhile True: x.append(bytearray(10**7))",
    "while True: print('x' * 10**5)",
    "import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\nwhile True: time.sleep(9)",
    "n = 0\nwhile True:\n    n += 1\n    open(f'file{n}', 'wb').write(bytes(2**22))",
    "import os, time\nif not os.fork():\n    os.setsid()\n    while True: time.sleep(0.01)",
    "import os\nos.kill(-1, 9)",
    "import os\nos.abort()",
    "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()\nf()",
    'print(\'{"passed": [true, true], "failure": null}\')\nimport os\nos._exit(0)',
    "class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()",
    "import os\nfor n in range(3, 64):\n    try: os.write(n, b'{\"passed\": [true]}')\n    except OSError: pass",
    "import socket\nsocket.create_connection(('127.0.0.1', 80))",
    "import ctypes\nctypes.string_at(0)",
)
MAX_HARMLESS = 2000  # programs by which the cost is measured
STREAM_RIGHT = "a, b = map(int, input().split())\nprint(a + b)"
STREAM_WRONG = "a, b = map(int, input().split())\nprint(a - b - 1)"
TEST_RIGHT = "def add(a, b):\n    return a + b"
TEST_WRONG = "def add(a, b):\n    return a - b - 1"


def make_jobs(number: int, hostile: int, seed: int = 0) -> list[tuple[rl.Prompt, str, float]]:
    """Prompts, completions, and the rewards that they must have."""
    rng = random.Random(seed)
    places = set(rng.sample(range(number), hostile))
    jobs = []
    num_hostile = 0
    for n in range(number):
        a = rng.randrange(1000)
        b = rng.randrange(1000)
        is_stream = rng.random() < 0.5
        fields = (
            {"inputs": [f"{a} {b}\n"], "outputs": [f"{a + b}\n"]}
            if is_stream
            else {"test_list": [f"assert add({a}, {b}) == {a + b}"]}
        )
        is_right = rng.random() < 0.5 and n not in places
        code = (STREAM_RIGHT if is_right else STREAM_WRONG) if is_stream else (TEST_RIGHT if is_right else TEST_WRONG)
        if n in places:
            code = HOSTILE[num_hostile % len(HOSTILE)]
            num_hostile += 1
        jobs.append((rl.Prompt(text="Add.", metadata=fields), f"```python\n{code}\n```", float(is_right)))
    return jobs


def cpu_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(who)
        total += used.ru_utime + used.ru_stime
    return total


def own_seconds(number: int = 200) -> float:
    """Processor seconds of one of the harmless programs by itself."""
    compiled = compile(STREAM_WRONG, "main.py", "exec")
    began = time.process_time()
    for _ in range(number):
        exec(compiled, {"input": lambda: "1 2", "print": lambda *_: None})
    return (time.process_time() - began) / number


def measure(number: int, hostile: int, workers: int, allow_unsandboxed: bool = False) -> dict[str, float]:
    """Scores all programs; numbers of wrong verdicts, and seconds.

    Args:
        number: of programs.
        hostile: how many of them.
        workers: scored at a time.
        allow_unsandboxed: see `CodeReward`.
    """
    jobs = make_jobs(number, hostile)
    harmless = [job for job in jobs if job[1].removeprefix("```python\n").removesuffix("\n```") not in HOSTILE]
    harmless = harmless[:MAX_HARMLESS]
    seconds: dict[str, float] = {}
    cpu: dict[str, float] = {}
    num_wrong = 0
    level = ""
    for name, part in (("all", jobs), ("harmless", harmless)):
        began_cpu = cpu_seconds()
        began = time.monotonic()
        reward = rl.CodeReward(limits=LIMITS, allow_unsandboxed=allow_unsandboxed)
        level = reward.sandbox.level
        scorer = Scorer(reward, num_workers=workers, records_spans=False)
        found = score_all(scorer, [(prompt, text) for prompt, text, _ in part], on_progress=lambda: None)
        seconds[name] = time.monotonic() - began
        scorer.close()
        reward.close()  # from here on the processes of the sandbox count as ended children
        cpu[name] = cpu_seconds() - began_cpu
        num_wrong += sum(one != expected for one, (_, _, expected) in zip(found, part, strict=True))
    cost_s = cpu["harmless"] / len(harmless) - own_seconds()
    return {
        "level": level,  # type: ignore[dict-item]
        "num_wrong": num_wrong,
        "seconds": seconds["all"],
        "cost_ms": 1000 * cost_s,
        "cpu_ms": 1000 * cpu["all"] / len(jobs),
        "per_second": len(jobs) / seconds["all"],
        "harmless_ms": 1000 * seconds["harmless"] * workers / len(harmless),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=10_000)
    parser.add_argument("--hostile", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--allow_unsandboxed", action="store_true")
    parser.add_argument("--machine", default="two cores, used by other programs as well; processor time")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = measure(given.number, given.hostile, given.workers, allow_unsandboxed=given.allow_unsandboxed)
    print(found)
    if given.out is not None:
        rows = [
            ["programs, and hostile ones among them", f"{given.number:,} / {given.hostile}"],
            ["level of isolation", str(found["level"])],
            ["wrong verdicts", f"{found['num_wrong']:.0f}"],
            ["processor time of scoring a harmless program, without its own", f"{found['cost_ms']:.1f} ms"],
            ["processor time of any program, hostile ones included", f"{found['cpu_ms']:.1f} ms"],
            ["time of a harmless program", f"{found['harmless_ms']:.1f} ms"],
            ["all of them", f"{found['seconds']:.0f} s"],
        ]
        write_measurement(
            given.out,
            measurement(
                given.out.stem,
                value=round(found["cost_ms"], 2),
                unit="ms of processor time for a program, beyond its own",
                columns=["scoring programs of completions", ""],
                rows=rows,
                command=f"python benchmarks/rewards/code.py --number {given.number} --hostile {given.hostile}",
                machine=given.machine,
            ),
        )
    assert found["num_wrong"] == 0, "a program has the wrong reward"


if __name__ == "__main__":
    main()
