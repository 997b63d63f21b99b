"""How close a judge with failures and rate limits comes to the throughput that its places allow.

    python benchmarks/performance/judge_throughput.py --out docs/measurements/judge_throughput.json
    python benchmarks/performance/judge_throughput.py --num_calls 1000 --max_concurrent 32 --seeds 5
    python benchmarks/performance/judge_throughput.py --rate 40

All calls are submitted to a `Scorer` at once. The endpoint is a process of its own on loopback, so that it does not
share the client's interpreter lock. Its latencies are log-normal, and a share of the requests fails: half of them by
500, half by 429 with `Retry-After: 1`. What happens to the n-th request of a question is drawn from the seed, the
question and n, so that it does not depend on the client. With `--rate` the endpoint also admits that many requests a
second (a bucket that holds those of `--burst_s` seconds), and refuses others by 429.

`round` is the least time of a round by the time that it took. The least time is that of a client that loses nothing,
computed from the very latencies and failures that were drawn: it gives each free place at once to the first question
that may be asked, asks a failed one again at once, or as soon as `Retry-After` allows, and never exceeds the rate. A
finite round ends with fewer questions than places, and a chain of failures is as long as it is: the share of
places x time / work, which says nothing of that, cannot reach 1 for any client (`work` is what that client has of it).

`waiting` is the share of the places that work, or of the admitted rate that is used, from the first request until every
question has been asked once: as long as no place needs to be idle.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from aiohttp import web

import lit_async_rl as rl
from benchmarks.common.measurement import measurement, write_measurement
from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.scorer import Scorer, score_all

RETRY_AFTER_S = 1
MODEL = "seed"  # the name of the model that is asked carries the seed


def drawn(seed: int, question: int, number: int, *, given: argparse.Namespace) -> tuple[float, str]:
    """Latency and outcome of a question's request."""
    rng = random.Random(f"{seed} {question} {number}")
    latency_s = rng.lognormvariate(math.log(given.mean_s) - given.sigma**2 / 2, given.sigma)
    if rng.random() >= given.failures:
        return latency_s, "answered"
    return latency_s, "failed" if rng.random() < 0.5 else "limited"


def least_time(seed: int, given: argparse.Namespace) -> tuple[float, float]:
    """Seconds of a round without any loss, and those in which its places would work without a pause."""
    free = [0.0] * given.max_concurrent  # when each place is free
    heapq.heapify(free)
    ready = [(question, 0) for question in range(given.num_calls)]  # in their order, which is a heap
    pausing: list[tuple[float, int, int]] = []  # until when; question and request
    capacity = max(1.0, given.rate * given.burst_s)
    tokens = capacity
    filled_at = ended = work_s = 0.0
    while ready or pausing:
        now = heapq.heappop(free)
        while pausing and pausing[0][0] <= now:
            heapq.heappush(ready, heapq.heappop(pausing)[1:])
        if not ready:
            heapq.heappush(free, pausing[0][0])
            continue
        if given.rate:
            tokens = min(capacity, tokens + (now - filled_at) * given.rate)
            filled_at = now
            if tokens < 1:
                heapq.heappush(free, now + (1 - tokens) / given.rate + 1e-9)
                continue
            tokens -= 1
        question, number = heapq.heappop(ready)
        latency_s, outcome = drawn(seed, question, number, given=given)
        work_s += latency_s
        ended = max(ended, now + latency_s)
        heapq.heappush(free, now + latency_s)
        if outcome != "answered":
            pause_s = RETRY_AFTER_S if outcome == "limited" else 0.0
            heapq.heappush(pausing, (now + latency_s + pause_s, question, number + 1))
    return ended, work_s / given.max_concurrent


class Endpoint:
    """Answers chat completions after a log-normal time, or fails; keeps a record of each request."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._num_asked: Counter[tuple[int, int]] = Counter()  # by seed and question; admitted requests
        self._records: list[tuple[str, float, float, str]] = []  # question, begin, end, outcome
        self._capacity = max(1.0, given.rate * given.burst_s)
        self._tokens = self._capacity
        self._filled_at = time.monotonic()

    def _is_admitted(self, now: float) -> bool:
        if not self._given.rate:
            return True
        self._tokens = min(self._capacity, self._tokens + (now - self._filled_at) * self._given.rate)
        self._filled_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    async def complete(self, request: web.Request) -> web.Response:
        """One request."""
        body = await request.json()
        content = body["messages"][-1]["content"]
        question = re.search(r"BEGIN RESPONSE \w+\n(\d+)\n", content)
        mark = re.search(r"VERDICT (\w+): VALUE\Z", content)
        assert question is not None
        assert mark is not None
        began = time.monotonic()
        if not self._is_admitted(began):
            self._records.append((question[1], began, began, "refused"))
            return web.Response(status=429, headers={"Retry-After": str(RETRY_AFTER_S)})
        seed = int(body["model"].removeprefix(MODEL))
        key = (seed, int(question[1]))
        self._num_asked[key] += 1
        latency_s, outcome = drawn(seed, key[1], self._num_asked[key] - 1, given=self._given)
        await asyncio.sleep(latency_s)
        if outcome == "answered":
            message = {"role": "assistant", "content": f"VERDICT {mark[1]}: 7"}
            response = web.json_response({"choices": [{"message": message}], "usage": {}})
        elif outcome == "failed":
            response = web.Response(status=500)
        else:
            response = web.Response(status=429, headers={"Retry-After": str(RETRY_AFTER_S)})
        self._records.append((question[1], began, time.monotonic(), outcome))
        return response

    async def records(self, request: web.Request) -> web.Response:
        """The requests since the last call, with times of the machine's monotonic clock, and processor seconds."""
        found = self._records
        self._records = []
        return web.json_response({"records": found, "cpu_s": time.process_time()})


async def serve(endpoint: Endpoint) -> None:
    """Serves until standard input ends; prints the port."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", endpoint.complete)
    app.router.add_get("/records", endpoint.records)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=2048)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await runner.cleanup()


def shares(records: list[tuple[str, float, float, str]], seed: int, given: argparse.Namespace) -> dict[str, float]:
    """Times by their bounds, see the module."""
    first_asked: dict[str, float] = {}
    for question, began, _, _ in records:
        first_asked[question] = min(began, first_asked.get(question, began))
    start = min(first_asked.values())
    until = max(first_asked.values())
    # Seconds of a place within the window; requests that are under way at its end are counted up to there.
    busy_s = sum(min(end, until) - began for _, began, end, _ in records if began < until)
    waiting = busy_s / given.max_concurrent / max(1e-9, until - start)
    if given.rate:
        admitted = sum(outcome != "refused" for _, began, _, outcome in records if began < until)
        waiting = max(waiting, admitted / (given.rate * (given.burst_s + until - start)))
    took_s = max(end for _, _, end, _ in records) - start
    least_s, work_s = least_time(seed, given)
    return {
        "round": least_s / took_s,
        "took_s": took_s,
        "least_s": least_s,
        "work": work_s / least_s,
        "waiting": waiting,
        "requests": len(records),
        "refused": sum(outcome == "refused" for *_, outcome in records),
    }


def measure(url: str, seed: int, given: argparse.Namespace) -> dict[str, float]:
    """One round: all calls at once."""
    limits = rl.JudgeLimits(
        max_concurrent=given.max_concurrent,
        tries=given.tries,
        backoff_s=given.backoff_s,
        timeout_s=300.0,
        request_timeout_s=290.0,
    )
    judge = rl.JudgeReward(f"{MODEL}{seed}", f"{url}/v1", limits=limits, cache=None)
    scorer = Scorer(judge, timeout_s=310.0)
    load = os.getloadavg()[0]
    cpu = time.process_time()
    rewards = score_all(scorer, [(Prompt(text="q"), str(n)) for n in range(given.num_calls)], lambda: None)
    cpu_s = time.process_time() - cpu
    num_threads = threading.active_count()
    scorer.close()
    judge.close()
    assert rewards == [0.7] * given.num_calls, "every completion is scored"
    found: dict[str, Any] = json.loads(urllib.request.urlopen(f"{url}/records").read())
    records = [tuple(one) for one in found["records"]]
    return shares(records, seed, given) | {
        "cpu_ms": 1000 * cpu_s / len(found["records"]),
        "server_cpu_s": found["cpu_s"],
        "threads": num_threads,
        "load": load,
    }


ROWS = (  # of the table: options that differ from the defaults
    {},
    {"rate": 40.0},
    {"num_calls": 2000, "max_concurrent": 500, "mean_s": 5.0, "backoff_s": 1.0, "seeds": 2},
    {"max_concurrent": 1000, "mean_s": 10.0, "backoff_s": 1.0, "seeds": 2},
)
COLUMNS = [
    "calls",
    "places",
    "mean latency",
    "limit of the rate",
    "share of the least time of the round",
    "of the places (or the rate), while questions wait",
    "least time",
    "places at work in the least time",
    "processor time of a request",
    "load of the machine",
]


def rounds_of(given: argparse.Namespace) -> list[dict[str, float]]:
    """One round for each seed, with an endpoint of these settings."""
    names = ("num_calls", "max_concurrent", "mean_s", "sigma", "failures", "rate", "burst_s")
    options = [word for name in names for word in (f"--{name}", str(getattr(given, name)))]
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        rounds = []
        for seed in range(given.seeds):
            rounds.append(measure(url, seed, given))
            print(json.dumps({name: round(value, 3) for name, value in rounds[-1].items()}), flush=True)
        return rounds
    finally:
        server.communicate("")


def row_of(given: argparse.Namespace, rounds: list[dict[str, float]]) -> list[Any]:
    """Of the table of a measurement."""

    def span(name: str, form: str = "{:.2f}") -> str:
        low, high = (form.format(limit(one[name] for one in rounds)) for limit in (min, max))
        return low if low == high else f"{low} to {high}"

    return [
        given.num_calls,
        given.max_concurrent,
        f"{given.mean_s:g} s",
        f"{given.rate:g} a second" if given.rate else "none",
        span("round", "{:.3f}"),
        span("waiting", "{:.3f}") if given.num_calls > given.max_concurrent else "",
        span("least_s", "{:.1f}") + " s",
        span("work"),
        span("cpu_ms", "{:.1f}") + " ms",
        span("load", "{:.1f}"),
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_calls", type=int, default=1000)
    parser.add_argument("--max_concurrent", type=int, default=32)
    parser.add_argument("--mean_s", type=float, default=0.5, help="mean latency of a request")
    parser.add_argument("--sigma", type=float, default=0.5, help="of the logarithm of the latency")
    parser.add_argument("--failures", type=float, default=0.2, help="share of the requests")
    parser.add_argument("--rate", type=float, default=0.0, help="requests admitted a second; 0 is no limit")
    parser.add_argument("--burst_s", type=float, default=2.0, help="seconds of the rate that are admitted at once")
    parser.add_argument("--tries", type=int, default=12)
    parser.add_argument("--backoff_s", type=float, default=0.25)
    parser.add_argument("--seeds", type=int, default=5, help="rounds, each with a seed of its own")
    parser.add_argument("--out", type=Path, help="measurement to write, of several settings")
    parser.add_argument("--serve", action="store_true", help="be the endpoint")
    given = parser.parse_args()
    if given.serve:
        asyncio.run(serve(Endpoint(given)))
        return
    if given.out is None:
        found = [one["round"] for one in rounds_of(given)]
        print(f"share of the least time: mean {statistics.fmean(found):.3f}, least {min(found):.3f}")
        return
    rows = []
    first: list[float] = []
    for changes in ROWS:
        setting = argparse.Namespace(**(vars(given) | changes))
        rounds = rounds_of(setting)
        rows.append(row_of(setting, rounds))
        first = first or [one["round"] for one in rounds]
        print(rows[-1], flush=True)
    half = 2.776 * statistics.stdev(first) / len(first) ** 0.5 if len(first) == 5 else 0.0  # Student's t, 4 degrees
    mean = statistics.fmean(first)
    found = measurement(
        given.out.stem,
        round(mean, 3),
        "share of the least time, 1,000 calls and 32 places",
        columns=COLUMNS,
        rows=rows,
        command=f"python benchmarks/performance/judge_throughput.py --out {given.out}",
        machine="two cores",
        interval=[round(mean - half, 3), round(mean + half, 3)] if half else None,
    )
    write_measurement(given.out, found)


if __name__ == "__main__":
    main()
