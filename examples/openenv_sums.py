"""Trains on a server of OpenEnv, in which the policy adds numbers and may ask for help.

    pip install "lit-async-rl[openenv]"
    python examples/openenv_sums.py

The server runs in a thread here; elsewhere it is a container or another machine, and only its address is needed.
"""

from __future__ import annotations

import random
import re
import socket
import sys
import threading
import time
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

import lit_async_rl as rl


class Said(Action):
    """A turn of the policy."""

    message: str


class Seen(Observation):
    """Text for the policy."""

    text: str = ""


class Sums(Environment):
    """Asks for a sum; `[371+205]` is answered by `576:`, and any other turn is the answer."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Seen:
        self.numbers = random.Random(seed).choices(range(100, 1000), k=2)
        return Seen(text=f"{self.numbers[0]}+{self.numbers[1]}=")

    def step(self, action: Said, timeout_s: float | None = None, **_: Any) -> Seen:
        call = re.fullmatch(r"\[(\d+)\+(\d+)\]", action.message)
        if call is not None:
            return Seen(text=f"{int(call[1]) + int(call[2])}:")
        return Seen(done=True, reward=float(action.message == str(sum(self.numbers))))

    @property
    def state(self) -> State:
        return State()


def serve(max_concurrent_envs: int) -> str:
    """Starts the server on a free port of loopback; returns its address."""
    listening = socket.create_server(("127.0.0.1", 0))
    app = create_fastapi_app(Sums, Said, Seen, max_concurrent_envs=max_concurrent_envs)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True).start()
    deadline = time.monotonic() + 60.0
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.05)
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


def main(max_steps: int = 2, url: str | None = None) -> dict[str, float]:
    """Trains; returns the last metrics."""
    address = url or serve(max_concurrent_envs=512)
    environment = rl.OpenEnvEnvironment(address)
    trainer = rl.fit(
        rl.asset("calculator_policy"),
        rl.OpenEnvPrompts(address, size=1000),
        recipe=None,
        engine=rl.EpisodeEngine(rl.EmbeddedEngine(), environment, max_turns=3),
        sampling={"max_tokens": 12},
        max_steps=max_steps,
        max_staleness=2,
        groups_per_step=4,
        group_size=4,
        accelerator="cpu",
    )
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


if __name__ == "__main__":
    print(main(max_steps=int(sys.argv[1]) if len(sys.argv) > 1 else 2))
