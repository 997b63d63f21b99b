"""Episodes without a model: the engine answers at once, the environment as a test says."""

import time

from lit_async_rl.assets import asset
from lit_async_rl.engines.base import Completion, GenerationRequest, RolloutEngine, SamplingParams
from lit_async_rl.environments.base import Environment
from lit_async_rl.environments.episode_engine import EpisodeEngine
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.problem import Prompt

CODEC = TextCodec(asset("calculator_policy"))
PROMPT = Prompt(text="1+2=")


class Instant(RolloutEngine):
    """Its turns are one token long and finished at once; its second `submit` raises `error`, if there is one."""

    in_flight_weight_updates = True
    max_model_len = 1000
    busy_s = 0.0
    num_tokens = 0

    def __init__(self, error=None):
        self.error = error
        self.finished = []
        self.num_submits = 0

    def setup(self, model):
        pass

    def load_weights(self, version, weights):
        pass

    def submit(self, requests):
        self.num_submits += 1
        if self.error is not None and self.num_submits > 1:
            raise self.error
        turn = dict(token_ids=(1,), logprobs=(-1.0,), versions=(0,), finish_reason="stop")
        for request in requests:
            samples = range(request.num_samples)
            self.finished += [Completion(request_id=request.id, sample_index=n, **turn) for n in samples]

    def poll(self, timeout_s):
        time.sleep(min(timeout_s, 0.01))
        finished = self.finished
        self.finished = []
        return finished

    def abort(self, request_ids):
        pass

    def close(self):
        pass


class Tool(Environment):
    """Answers every turn with the result of a coroutine function, and is its own episode."""

    def __init__(self, answer):
        self.answer = answer

    async def start(self, prompt):
        return self

    async def step(self, completion):
        return await self.answer()


def playing(answer, error=None, **settings) -> EpisodeEngine:
    """An engine whose episodes are answered by `answer`."""
    return EpisodeEngine(Instant(), Tool(answer), **settings).around(Instant(error), CODEC)


def request(number: int, num_samples: int = 1) -> GenerationRequest:
    ids = CODEC.encode(PROMPT)
    sampling = SamplingParams(max_tokens=4)
    return GenerationRequest(id=number, prompt_ids=ids, num_samples=num_samples, sampling=sampling, prompt=PROMPT)


def poll_for(engine: EpisodeEngine, seconds: float, until=lambda found: False) -> list[Completion]:
    found = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not until(found):
        found += engine.poll(0.02)
    return found
