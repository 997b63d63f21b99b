"""Agents whose policy says given texts at once."""

from __future__ import annotations

import json

from instant_episodes import Instant

from lit_async_rl.agents import AgentEngine, InProcessClients
from lit_async_rl.engines.completion_check import run_requests
from lit_async_rl.problem import Prompt
from lit_async_rl.types import Completion, GenerationRequest, SamplingParams


class Scripted(Instant):
    """Its completions are these texts, in turn, each ended by the end token; keeps requests and completions.

    Of what it is asked for when there are no more texts it says nothing.
    """

    max_model_len = 4000

    def __init__(self, codec, texts):
        super().__init__()
        self.codec = codec
        self.texts = list(texts)
        self.requests = []
        self.said = []
        self.aborted = []

    def submit(self, requests):
        for request in requests:
            self.requests.append(request)
            for sample in range(request.num_samples if self.texts else 0):
                ids = (*self.codec.encode_continuation(self.texts.pop(0)), self.codec.tokenizer.eos_token_id)
                one = Completion(
                    request_id=request.id,
                    sample_index=sample,
                    token_ids=ids,
                    logprobs=tuple(-0.5 - 0.01 * len(self.said) for _ in ids),
                    versions=(len(self.said),) * len(ids),
                    finish_reason="stop",
                )
                self.said.append(one)
                self.finished.append(one)

    def abort(self, request_ids):
        self.aborted += request_ids


def call_text(name="add", **arguments):
    """A tool call as the policy writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def play(agent, codec, texts, *, ignored=(), max_tokens=400, inner=None, **settings):
    """The sample of an agent that is answered by these texts, its engine, and the inner one."""
    inner = inner or Scripted(codec, texts)
    settings = {"timeout_s": 20.0, "tries": None} | settings
    engine = AgentEngine(Instant(), agent, clients=InProcessClients(ignored), **settings).around(inner, codec)
    request = GenerationRequest(
        id=0,
        prompt_ids=(3,),
        num_samples=1,
        sampling=SamplingParams(max_tokens=max_tokens),
        prompt=Prompt(text="question"),
    )
    try:
        ((sample,),) = run_requests(engine, [request], timeout_s=20.0)
    finally:
        engine.close()
        engine.end()
    return sample, engine, inner
