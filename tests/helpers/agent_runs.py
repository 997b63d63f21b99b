"""Shared by the tests of agents: engines around the shipped policy, agents that branch, groups with branches."""

from __future__ import annotations

import random
from dataclasses import replace

from transformers import AutoModelForCausalLM

from lit_async_rl.agents.engine import AgentEngine
from lit_async_rl.assets import asset
from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.problem import Prompt
from lit_async_rl.types import Branch, Rollout, RolloutGroup, Turn

MODEL = asset("calculator_policy")
TEMPLATE = asset("calculator_chat.jinja")
CODEC = TextCodec(MODEL)


def lm():
    return AutoModelForCausalLM.from_pretrained(MODEL).eval()


def playing(agent, inner=None, **settings) -> AgentEngine:
    """An engine that plays this agent, with the template of the calculator."""
    settings = dict(chat_template=TEMPLATE, timeout_s=20.0) | settings
    engine = AgentEngine(EmbeddedEngine(), agent, **settings)
    return engine.around(EmbeddedEngine.from_module(lm(), num_slots=16) if inner is None else inner, CODEC)


def request(number=0, num_samples=1, text="1+2=", **sampling) -> GenerationRequest:
    prompt = Prompt(text=text, answer="3")
    params = SamplingParams(**(dict(max_tokens=6) | sampling))
    ids = CODEC.encode(prompt)
    return GenerationRequest(id=number, prompt_ids=ids, num_samples=num_samples, sampling=params, prompt=prompt)


def user(text):
    return {"role": "user", "content": text}


class Branching:
    """Asks twice in one conversation, once in a branch of it, once as a sub-agent, and once on the side."""

    async def __call__(self, prompt, client):
        episode = client.episode
        messages = [user(prompt.text)]
        (reply,) = await episode.complete(messages)
        messages.append(reply.message.as_message())
        await episode.complete([*messages, user("1:")])
        await episode.complete([*messages, user("2:")])
        await episode.complete([user("3+4=")])
        await episode.complete([{"role": "system", "content": "title"}, user("5")])
        return float(len(reply.token_ids) % 2) + 0.25 * (reply.token_ids[0] % 3)


def branch(chance: random.Random, versions=(0,), **changes) -> Branch:
    """Random tokens of a branch, in one turn or two; the first of them is not the policy's."""
    length = chance.randrange(2, 7)
    mask = tuple(n > 0 for n in range(length))
    prompt_ids = tuple(chance.randrange(2, 90) for _ in range(chance.randrange(1, 9)))
    token_ids = tuple(chance.randrange(2, 90) for _ in range(length))
    ends = (length,) if length < 4 else (length // 2, length)
    return replace(
        Branch(
            prompt_ids=prompt_ids,
            token_ids=token_ids,
            logprobs=tuple(-chance.random() if on else 0.0 for on in mask),
            versions=tuple(chance.choice(versions) for _ in mask),
            loss_mask=mask,
            credit=chance.choice((1.0, 0.5, 0.25)),
            turns=tuple(Turn(end, 0.0, token_ids[0] % 3, call=prompt_ids[0] % 5 + end) for end in ends),
        ),
        **changes,
    )


def groups(seed=0, num_groups=3, size=4) -> list[RolloutGroup]:
    """Groups of which most rollouts have branches, and some a prompt of their own."""
    chance = random.Random(seed)
    found = []
    for index in range(num_groups):
        rollouts = []
        for sample in range(size):
            own = branch(chance)
            rollouts.append(
                Rollout(
                    request_id=index,
                    sample_index=sample,
                    token_ids=own.token_ids,
                    logprobs=own.logprobs,
                    versions=own.versions,
                    finish_reason="stop",
                    loss_mask=own.loss_mask,
                    reward=float(chance.randrange(4)),
                    prompt_ids=own.prompt_ids if chance.random() < 0.5 else None,
                    credit=own.credit,
                    turns=own.turns,
                    branches=tuple(branch(chance) for _ in range(chance.randrange(3))),
                )
            )
            rollouts[-1] = rollouts[-1].rewarded(rollouts[-1].reward)
        found.append(
            RolloutGroup(
                index=index,
                prompt=Prompt(text="1+1="),
                prompt_ids=(3, 4, 5),
                rollouts=tuple(rollouts),
                admitted_version=0,
            )
        )
    return found
