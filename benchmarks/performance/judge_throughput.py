"""How close a judge with failures and rate limits comes to the throughput that its places allow.

    python benchmarks/performance/judge_throughput.py --num_calls 1000 --max_concurrent 32 --repeats 3

All calls are submitted to a `Scorer` at once. The endpoint is a process of its own on loopback: its latencies are
log-normal, a share of the requests fails (half of them by 500, half by 429 with `Retry-After`), and it adds up the
seconds for which it held requests. Divided by the places, that is the shortest time in which any client could have made
the same requests; the share of it in the time that was taken is the result.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from aiohttp import web

import lit_async_rl as rl
from lit_async_rl.rewards.scorer import Scorer, score_all
from lit_async_rl.types import Prompt


class Endpoint:
    """Answers chat completions after a log-normal time, or fails."""

    def __init__(self, mean_s: float, sigma: float, failures: float, seed: int) -> None:
        self._rng = random.Random(seed)
        self._mu = math.log(mean_s) - sigma**2 / 2
        self._sigma = sigma
        self._failures = failures
        self._busy_s = 0.0
        self._num_requests = 0
        self._num_under_way = 0
        self._most = 0

    async def complete(self, request: web.Request) -> web.Response:
        """One request."""
        body = await request.json()
        seconds = self._rng.lognormvariate(self._mu, self._sigma)
        fails = self._rng.random() < self._failures
        self._num_requests += 1
        self._num_under_way += 1
        self._most = max(self._most, self._num_under_way)
        await asyncio.sleep(seconds)
        self._num_under_way -= 1
        self._busy_s += seconds
        if fails and self._rng.random() < 0.5:
            return web.Response(status=500)
        if fails:
            return web.Response(status=429, headers={"Retry-After": "1"})
        mark = re.search(r"VERDICT (\w+): VALUE\Z", body["messages"][-1]["content"])
        assert mark is not None
        message = {"role": "assistant", "content": f"VERDICT {mark[1]}: 7"}
        return web.json_response({"choices": [{"message": message}], "usage": {}})

    async def totals(self, request: web.Request) -> web.Response:
        """What was served since the last call."""
        found = {"busy_s": self._busy_s, "num_requests": self._num_requests, "most": self._most}
        self._busy_s = 0.0
        self._num_requests = 0
        self._most = 0
        return web.json_response(found)


async def serve(endpoint: Endpoint) -> None:
    """Serves until standard input ends; prints the port."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", endpoint.complete)
    app.router.add_get("/totals", endpoint.totals)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=2048)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await runner.cleanup()


def measure(url: str, num_calls: int, max_concurrent: int, tries: int) -> dict[str, float]:
    """One round: all calls at once."""
    limits = rl.JudgeLimits(max_concurrent=max_concurrent, tries=tries, backoff_s=0.25)
    judge = rl.JudgeReward("m", f"{url}/v1", limits=limits, cache=None)
    scorer = Scorer(judge)
    began = time.monotonic()
    cpu = time.process_time()
    rewards = score_all(scorer, [(Prompt(text="q"), str(n)) for n in range(num_calls)], lambda: None)
    wall_s = time.monotonic() - began
    cpu_s = time.process_time() - cpu
    num_threads = threading.active_count()
    scorer.close()
    judge.close()
    assert rewards == [0.7] * num_calls, "every completion is scored"
    totals = json.loads(urllib.request.urlopen(f"{url}/totals").read())
    return {
        "wall_s": wall_s,
        "bound_s": totals["busy_s"] / max_concurrent,
        "share": totals["busy_s"] / max_concurrent / wall_s,
        "requests": totals["num_requests"],
        "most": totals["most"],
        "cpu_ms": 1000 * cpu_s / totals["num_requests"],
        "threads": num_threads,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_calls", type=int, default=1000)
    parser.add_argument("--max_concurrent", type=int, default=32)
    parser.add_argument("--mean_s", type=float, default=0.5, help="mean latency of a request")
    parser.add_argument("--sigma", type=float, default=0.5, help="of the logarithm of the latency")
    parser.add_argument("--failures", type=float, default=0.2, help="share of the requests")
    parser.add_argument("--tries", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--serve", action="store_true", help="be the endpoint")
    given = parser.parse_args()
    if given.serve:
        asyncio.run(serve(Endpoint(given.mean_s, given.sigma, given.failures, seed=0)))
        return
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        rounds = []
        for _ in range(given.repeats):
            rounds.append(measure(url, given.num_calls, given.max_concurrent, tries=given.tries))
            print(json.dumps({name: round(value, 3) for name, value in rounds[-1].items()}), flush=True)
        shares = [one["share"] for one in rounds]
        print(f"share of the bound: mean {statistics.fmean(shares):.3f}, least {min(shares):.3f}")
    finally:
        server.communicate("")


if __name__ == "__main__":
    main()
