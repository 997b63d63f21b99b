"""Cost of agents behind an HTTP endpoint: processor time of a call, and seconds of a step with slow tools.

    OMP_NUM_THREADS=1 python benchmarks/agents/endpoint.py calls --output docs/measurements/endpoint_calls.json
    OMP_NUM_THREADS=1 python benchmarks/agents/endpoint.py steps --output docs/measurements/endpoint_steps.json

`calls` measures the processor time of the server's thread for a call, that of the same call of a client that needs no
connection, and of the same call to `AgentEpisode.complete`; the client over HTTP is another process, and the engine
another thread. `steps` trains the calculator task with 256 concurrent episodes, whose tool takes a log-normal time with
a mean of 0.4 s, as an environment, as an agent in the process, and as the same agent with the official client, in the
trainer's process and in one of its own, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import itertools
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from transformers import AutoModelForCausalLM

import lit_async_rl as rl
from benchmarks.common.measurement import measurement, write_measurement
from benchmarks.common.process import csv_logger
from lit_async_rl.agents import AgentEngine, AgentEpisode, CallSampling, EndpointClients
from lit_async_rl.agents.api.bodies import CHAT
from lit_async_rl.agents.api.exchange import ApiRequest
from lit_async_rl.agents.calculator_agent import ADD, CalculatorAgent
from lit_async_rl.problem import Prompt
from lit_async_rl.tasks.calculator import Calculator, CalculatorEpisode
from lit_async_rl.types import GenerationRequest, SamplingParams

MEAN_TOOL_S = 0.4
SIGMA = 1.0  # of the logarithm of a tool's time
SKIPPED_STEPS = 5  # while the pipeline fills
TIMEOUT_S = 1800.0
MODEL = str(rl.asset("calculator_policy"))
QUESTION = {"role": "user", "content": "371+205="}
TURN = {"role": "assistant", "content": "[371+205]"}
ANSWER = {"role": "tool", "tool_call_id": "a", "content": "576"}
CONVERSATIONS = {
    "a question, with a tool": {"messages": [QUESTION], "tools": [ADD]},
    "8 earlier turns, with a tool": {"messages": [QUESTION, *[TURN, ANSWER] * 4], "tools": [ADD]},
    "a question, log-probabilities": {"messages": [QUESTION], "logprobs": True},
    "a question, as a stream": {"messages": [QUESTION], "stream": True},
}

# sends each body of a list in order, in each of several connections, and reads the answers
CLIENT = """
import http.client, json, sys, threading
host, port, key, bodies, number, threads = json.loads(sys.stdin.readline())
def work():
    connection = http.client.HTTPConnection(host, port)
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    for n in range(number):
        connection.request("POST", "/v1/chat/completions", bodies[n % len(bodies)], headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        response.read()
workers = [threading.Thread(target=work) for _ in range(threads)]
for worker in workers: worker.start()
for worker in workers: worker.join()
"""


# -- processor time of a call -----------------------------------------------------------------------------------------


class Waiting:
    """An agent that waits until it may end."""

    def __init__(self) -> None:
        self.client: Any = None
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    async def __call__(self, prompt: Prompt, client: Any) -> float:
        """Waits."""
        self.client = client
        self.has_begun.set()
        while not self.may_end.is_set():
            await asyncio.sleep(0.05)
        return 0.0


def thread_cpu_s(thread: threading.Thread) -> float:
    """Processor time of a thread so far, in seconds. Linux."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))


def server_cpu_s(client: Any, body: dict[str, Any], num_calls: int, num_connections: int) -> float:
    """Processor time of the server's thread for a call, in seconds."""
    thread = next(one for one in threading.enumerate() if one.name == "agent endpoint")
    content = json.dumps({"model": "policy", "max_tokens": 12} | body)
    at = client.base_url
    sent = json.dumps([at.host, at.port, client.api_key, [content], num_calls // num_connections, num_connections])
    began_s = thread_cpu_s(thread)
    subprocess.run([sys.executable, "-c", CLIENT], input=sent + "\n", text=True, check=True, timeout=TIMEOUT_S)
    return (thread_cpu_s(thread) - began_s) / (num_calls // num_connections * num_connections)


def direct_cpu_s(episode: AgentEpisode, body: dict[str, Any], num_calls: int, num_connections: int) -> float:
    """Processor time of the same calls, without the endpoint, in seconds."""
    numbers = itertools.count()

    async def complete() -> None:
        await episode.complete(
            body["messages"],
            tools=body.get("tools"),
            sampling=CallSampling(max_tokens=12),
            call_id=f"direct-{time.monotonic_ns()}-{next(numbers)}",
        )

    return loop_cpu_s(complete, num_calls, num_connections)


def answered_cpu_s(
    clients: EndpointClients, client: Any, body: dict[str, Any], num_calls: int, num_connections: int
) -> float:
    """Processor time of the same calls of a client that needs no connection, on the endpoint's side, in seconds."""
    content = json.dumps({"model": "policy", "max_tokens": 12} | body).encode()
    call = ApiRequest(path=CHAT, body=content, headers={"authorization": f"Bearer {client.api_key}"})

    async def answer() -> None:
        response = await clients.respond(call)
        assert response.status == 200, response.body

    return loop_cpu_s(answer, num_calls, num_connections)


def loop_cpu_s(call: Callable[[], Awaitable[object]], num_calls: int, num_connections: int) -> float:
    """Processor time of a call in an event loop of its own, several at a time, in seconds."""
    found: list[float] = []

    async def work() -> None:
        for _ in range(num_calls // num_connections):
            await call()

    async def all_connections() -> None:
        began_s = time.thread_time()
        await asyncio.gather(*(work() for _ in range(num_connections)))
        found.append(time.thread_time() - began_s)

    thread = threading.Thread(target=lambda: asyncio.run(all_connections()))
    thread.start()
    thread.join(TIMEOUT_S)
    return found[0] / (num_calls // num_connections * num_connections)


def measure_calls(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of processor time that the endpoint adds to a call."""
    agent = Waiting()
    clients = EndpointClients()
    engine = AgentEngine(
        rl.EmbeddedEngine(num_slots=16),
        agent,
        clients=clients,
        max_calls=10**9,
        timeout_s=TIMEOUT_S,
        parser=rl.CalculatorParser(),
        chat_template="calculator_chat.jinja",
    )
    engine.setup(MODEL)
    engine.load_weights(0, AutoModelForCausalLM.from_pretrained(MODEL).named_parameters())
    is_over = threading.Event()

    def poll() -> None:
        while not is_over.is_set():
            engine.poll(0.05)

    thread = threading.Thread(target=poll)
    thread.start()
    rows: list[list[Any]] = []
    added: list[float] = []
    try:
        sampling = SamplingParams(max_tokens=12)
        for name, body in CONVERSATIONS.items():
            found: list[tuple[float, float, float]] = []
            for number in range(args.rounds):  # an episode each, whose graph is empty
                agent.has_begun.clear()
                agent.may_end.clear()
                request = GenerationRequest(
                    id=len(rows) * args.rounds + number,
                    prompt_ids=(),
                    num_samples=1,
                    sampling=sampling,
                    prompt=Prompt(text="371+205="),
                )
                engine.submit([request])
                agent.has_begun.wait(TIMEOUT_S)
                episode = engine.episode(agent.client.api_key)
                assert episode is not None
                direct_s = direct_cpu_s(episode, body, args.num_calls, num_connections=args.connections)
                served_s = server_cpu_s(agent.client, body, args.num_calls, num_connections=args.connections)
                answered_s = answered_cpu_s(
                    clients, agent.client, body, num_calls=args.num_calls, num_connections=args.connections
                )
                found.append((1e3 * served_s, 1e3 * answered_s, 1e3 * direct_s))
                print(name, *(f"{ms:.2f} ms" for ms in found[-1]), sep=", ", flush=True)
                engine.abort([request.id])
                agent.may_end.set()
            differences = [served - direct for served, _, direct in found]
            added = max(added, differences, key=statistics.median) if added else differences
            medians = [statistics.median(column) for column in zip(*found, strict=True)]
            without = statistics.median(answered - direct for _, answered, direct in found)
            rows.append([name, *(round(ms, 2) for ms in (*medians, statistics.median(differences), without))])
    finally:
        is_over.set()
        thread.join()
        engine.close()
        engine.end()
    return measurement(
        "endpoint_calls",
        round(statistics.median(added), 2),
        "ms of processor time that the endpoint adds to a call over HTTP, the dearest of these",
        columns=[
            *("call", "server's thread, ms", "without a connection, ms", "without the endpoint, ms"),
            *("added over HTTP, ms", "added without a connection, ms"),
        ],
        rows=rows,
        command=f"python benchmarks/agents/endpoint.py calls --rounds {args.rounds} --num_calls {args.num_calls}",
        machine=f"{args.machine}; medians of {args.rounds} rounds of {args.num_calls} calls over {args.connections} "
        "connections, the interval is the range",
        interval=[round(min(added), 2), round(max(added), 2)],
    )


# -- seconds of a step ------------------------------------------------------------------------------------------------


def tool_s() -> float:
    """Seconds that a tool takes this time."""
    return random.lognormvariate(math.log(MEAN_TOOL_S) - SIGMA**2 / 2, SIGMA)


class SlowCalculator(Calculator):
    """The calculator, whose calls take a log-normal time."""

    async def start(self, prompt: Prompt) -> CalculatorEpisode:
        """Starts an episode."""
        return CalculatorEpisode(prompt, tool_s(), self.max_calls)


class SlowAgent(CalculatorAgent):
    """The same as an agent."""

    async def __call__(self, prompt: Prompt, client: Any) -> float:
        """Plays an episode."""
        slow = CalculatorAgent(self.max_calls, latency_s=tool_s())
        return await slow(prompt, client)


THIS = "benchmarks.agents.endpoint"
AGENT = ("--config", "configs/agent_calculator.yaml", "--data.engine.agent", f"{THIS}.SlowAgent")
SERVED = "an agent behind the endpoint"
SYSTEMS = {
    "an environment in the process": (
        *("--config", "configs/calculator.yaml", "--data.engine.environment", f"{THIS}.SlowCalculator"),
    ),
    "an agent in the process": AGENT,
    SERVED: (*AGENT, "--data.engine.clients", "EndpointClients"),
    "the same in a process of its own": (
        *("--config", "configs/agent_calculator.yaml", "--data.engine.agent", "lit_async_rl.ProcessAgent"),
        *("--data.engine.agent.agent", f"{THIS}.SlowAgent"),
    ),
}


def step_s(flags: Sequence[str], args: argparse.Namespace) -> float:
    """Mean seconds of a step."""
    slots = args.episodes // 16  # 8 samples of a group, and twice the groups of a step under way
    quiet = ["--trainer.enable_progress_bar", "false", "--defaults.checkpoint", "null"]
    quiet += ["--trainer.limit_val_batches", "0", "--data.max_staleness", "1", "--data.groups_per_step", str(slots)]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "scripts/train.py", *flags, *quiet, *csv_logger(Path(folder))]
        command += ["--trainer.max_steps", str(args.num_steps)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode:
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-4000:])
        with Path(folder, "metrics.csv").open(newline="") as file:
            found = [float(row["perf/step_s"]) for row in csv.DictReader(file) if row.get("perf/step_s")]
    return statistics.fmean(found[SKIPPED_STEPS:])


def measure_steps(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step, and their ratio to those of an environment."""
    seconds: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    for _ in range(args.rounds):
        for system, flags in SYSTEMS.items():
            seconds[system].append(step_s(flags, args))
            print(f"{system}: {seconds[system][-1]:.3f} s", flush=True)
    return measured_steps(seconds, args)


def measured_steps(seconds: dict[str, list[float]], args: argparse.Namespace) -> dict[str, Any]:
    """The measurement of rounds."""
    environment = next(iter(seconds.values()))
    ratios = {system: [b / a for a, b in zip(environment, found, strict=True)] for system, found in seconds.items()}
    rows: list[list[Any]] = []
    for system, found in seconds.items():
        spread = f"{min(ratios[system]):.2f} to {max(ratios[system]):.2f}"
        rows.append([system, round(statistics.median(found), 3), round(statistics.median(ratios[system]), 2), spread])
    served = ratios[SERVED]
    return measurement(
        "endpoint_steps",
        round(statistics.median(served), 2),
        "times the seconds of a step with the same tools as an environment, for agents behind the endpoint",
        columns=["run", "seconds of a step", "times those of the environment", "in single rounds"],
        rows=rows,
        command=f"python benchmarks/agents/endpoint.py steps --rounds {args.rounds} --num_steps {args.num_steps}",
        machine=f"{args.machine}; {args.episodes} episodes under way, tools of log-normal time with a mean of "
        f"{MEAN_TOOL_S} s, medians of {args.rounds} rounds of {args.num_steps} steps, the interval is the range",
        interval=[round(min(served), 2), round(max(served), 2)],
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["calls", "steps"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num_calls", type=int, default=400)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--num_steps", type=int, default=25)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--machine", default="two cores")
    parser.add_argument("--output", type=Path, default=Path("endpoint.json"))
    args = parser.parse_args()
    write_measurement(args.output, {"calls": measure_calls, "steps": measure_steps}[args.what](args))


if __name__ == "__main__":
    main()
