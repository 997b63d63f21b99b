"""A run whose episodes and rewards are within their limits, unless the time counts in which the process is stopped.

Prints a line when both of them wait; an argument says what plays: an agent, an agent behind the endpoint, or an
environment.
"""

import asyncio
import sys

import lit_async_rl as rl

LIMIT_S = 6.0
waiting = set()


async def wait(what):
    """Takes a third of the limit, in parts: one alone would end as soon as the process goes on."""
    if what not in waiting:
        waiting.add(what)
        print(f"{what} waits", flush=True)
    for _ in range(5):
        await asyncio.sleep(LIMIT_S / 15)


async def agent(prompt, client):
    await client.completions.create(model="policy", prompt=prompt.text)
    await wait("episode")
    return 1.0


class Slow(rl.Environment):
    async def start(self, prompt):
        return self

    async def step(self, text):
        await wait("episode")
        return rl.Observation(text="", reward=1.0, done=True)


async def reward(prompt, completion):
    await wait("reward")
    return float(len(completion) % 2)


if __name__ == "__main__":
    inner = rl.EmbeddedEngine(num_slots=8)
    clients = rl.EndpointClients() if sys.argv[1] == "endpoint" else None
    engines = {
        "agent": lambda: rl.AgentEngine(inner, agent, timeout_s=LIMIT_S),
        "endpoint": lambda: rl.AgentEngine(inner, agent, clients=clients, timeout_s=LIMIT_S),
        "environment": lambda: rl.EpisodeEngine(inner, Slow(), step_timeout_s=LIMIT_S),
        "reward": lambda: inner,
    }
    trainer = rl.fit(
        rl.asset("small_sort_policy"),
        rl.SortDigits(8, size=100),
        reward if sys.argv[1] == "reward" else None,
        engine=engines[sys.argv[1]](),
        scoring=rl.Scoring(timeout_s=LIMIT_S),
        max_steps=1,
        max_staleness=0,
        groups_per_step=1,
        group_size=2,
        sampling={"max_tokens": 4},
        recipe=None,
        accelerator="cpu",
        enable_progress_bar=False,
        logger=False,
        enable_checkpointing=False,
    )
    print(f"trained {trainer.global_step} step", flush=True)
