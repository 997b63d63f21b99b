"""How close a judge with failures and rate limits comes to the throughput that its places allow.

    python benchmarks/performance/judge_throughput.py --num_calls 1000 --max_concurrent 32 --repeats 3
    python benchmarks/performance/judge_throughput.py --num_calls 4000 --max_concurrent 1000 --mean_s 10
    python benchmarks/performance/judge_throughput.py --rate 40

All calls are submitted to a `Scorer` at once. The endpoint is a process of its own on loopback, so that it does not share
the client's interpreter lock. Its latencies are log-normal, and a share of the requests fails: half of them by 500, half
by 429 with `Retry-After: 1`. With `--rate` it also admits that many requests a second (a bucket that holds those of
`--burst_s` seconds), and refuses others by 429.

`share` is the throughput while questions wait, by the bound: no client can have more answers a second than

    places / mean latency of a request, failed ones included / requests per answer

and, with a rate, not more than rate (and the full bucket) / admitted requests per answer. The window reaches from the first request until
every question has been asked once; after it there are fewer questions than places, and no client can fill them.

`whole` is the same for the round from end to end, by the shortest time that any client could take: the larger of the
places' (or the rate's) time and that of the slowest question alone, with its failed requests and the pauses that the
endpoint has demanded.
"""

from __future__ import annotations

import argparse
import asyncio
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
from collections import defaultdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from aiohttp import web

import lit_async_rl as rl
from lit_async_rl.rewards.scorer import Scorer, score_all
from lit_async_rl.types import Prompt

RETRY_AFTER_S = 1


class Endpoint:
    """Answers chat completions after a log-normal time, or fails; keeps a record of each request."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._rng = random.Random(0)
        self._mu = math.log(given.mean_s) - given.sigma**2 / 2
        self._given = given
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
        content = (await request.json())["messages"][-1]["content"]
        question = re.search(r"BEGIN RESPONSE \w+\n(\d+)\n", content)
        mark = re.search(r"VERDICT (\w+): VALUE\Z", content)
        assert question is not None
        assert mark is not None
        began = time.monotonic()
        if not self._is_admitted(began):
            self._records.append((question[1], began, began, "refused"))
            return web.Response(status=429, headers={"Retry-After": str(RETRY_AFTER_S)})
        await asyncio.sleep(self._rng.lognormvariate(self._mu, self._given.sigma))
        if self._rng.random() >= self._given.failures:
            outcome = "answered"
            message = {"role": "assistant", "content": f"VERDICT {mark[1]}: 7"}
            response = web.json_response({"choices": [{"message": message}], "usage": {}})
        elif self._rng.random() < 0.5:
            outcome = "failed"
            response = web.Response(status=500)
        else:
            outcome = "limited"
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


def shares(records: list[tuple[str, float, float, str]], places: int, rate: float, burst: float) -> dict[str, float]:
    """Throughput by its bound, see the module."""
    first_asked: dict[str, float] = {}
    alone_s: dict[str, float] = defaultdict(float)
    for question, began, end, outcome in records:
        first_asked[question] = min(began, first_asked.get(question, began))
        alone_s[question] += end - began + RETRY_AFTER_S * (outcome in ("limited", "refused"))
    start = min(first_asked.values())
    until = max(first_asked.values())
    # Seconds of a place within the window; requests that are under way at its end are counted up to there. So the share
    # of the places that work is the throughput by its bound, without the noise of what happens to be answered in it.
    busy_s = sum(min(end, until) - began for _, began, end, _ in records if began < until)
    admitted = sum(outcome != "refused" for _, began, _, outcome in records if began < until)
    share = busy_s / places / (until - start)
    least_s = sum(end - began for _, began, end, _ in records) / places
    if rate:
        share = max(share, admitted / (burst + rate * (until - start)))
        least_s = max(least_s, (sum(outcome != "refused" for *_, outcome in records) - burst) / rate)
    whole_s = max(end for _, _, end, _ in records) - start
    return {
        "share": share,
        "window_s": until - start,
        "whole": max(least_s, max(alone_s.values())) / whole_s,
        "whole_s": whole_s,
        "requests": len(records),
        "refused": sum(outcome == "refused" for *_, outcome in records),
    }


def measure(url: str, given: argparse.Namespace) -> dict[str, float]:
    """One round: all calls at once."""
    limits = rl.JudgeLimits(
        max_concurrent=given.max_concurrent, tries=given.tries, backoff_s=given.backoff_s, timeout_s=300.0, request_timeout_s=290.0
    )
    judge = rl.JudgeReward("m", f"{url}/v1", limits=limits, cache=None)
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
    return shares(records, given.max_concurrent, given.rate, burst=given.rate * given.burst_s) | {
        "cpu_ms": 1000 * cpu_s / len(found["records"]),
        "server_cpu_s": found["cpu_s"],
        "threads": num_threads,
        "load": load,
    }


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
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--serve", action="store_true", help="be the endpoint")
    given = parser.parse_args()
    if given.serve:
        asyncio.run(serve(Endpoint(given)))
        return
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        rounds = []
        for _ in range(given.repeats):
            rounds.append(measure(url, given))
            print(json.dumps({name: round(value, 3) for name, value in rounds[-1].items()}), flush=True)
        for name in ("share", "whole"):
            values = [one[name] for one in rounds]
            print(f"{name} of the bound: mean {statistics.fmean(values):.3f}, least {min(values):.3f}")
    finally:
        server.communicate("")


if __name__ == "__main__":
    main()
