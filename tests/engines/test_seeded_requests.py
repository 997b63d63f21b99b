"""Requests with a seed: random numbers that depend on the sample and the position alone."""

import itertools

import pytest
import torch
from replays import requests_of
from tiny_models import tiny_gpt2, tiny_llama

from lit_async_rl.assets import asset
from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.engines.completion_check import run_requests
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.engines.embedded.own_process import pack_requests, unpack_requests
from lit_async_rl.engines.embedded.sampling import stream_uniform
from lit_async_rl.environments.episode_engine import EpisodeEngine
from lit_async_rl.models.loading import load_policy
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.tasks import Addition
from lit_async_rl.tasks.calculator import Calculator, CalculatorEpisode


def split_mix(state, count):
    """SplitMix64 as published, in Python's integers: `count` numbers that follow a state."""
    found = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        found.append(z ^ (z >> 31))
    return found


@pytest.mark.parametrize("stream", [0, 1, 12_345, 2**45 + 7])
def test_a_stream_is_split_mix_64(stream):
    begin = split_mix((stream - 1) * 0x9E3779B97F4A7C15 % 2**64, 1)[0]
    expected = [(bits >> 11) * 2.0**-53 for bits in split_mix(begin, 50)]
    assert stream_uniform(torch.full((50,), stream), torch.arange(1, 51)).tolist() == expected


def test_streams_and_their_positions_are_uniform_and_independent():
    stream, position = (grid.flatten() for grid in torch.meshgrid(torch.arange(400), torch.arange(500), indexing="ij"))
    table = stream_uniform(stream, position).reshape(400, 500)
    assert 0 <= table.min() < 1e-4 < 1 - 1e-4 < table.max() < 1
    distance = (table.flatten().sort().values - torch.linspace(0, 1, table.numel(), dtype=torch.float64)).abs().max()
    assert distance < 1.95 / table.numel() ** 0.5, "Kolmogorov-Smirnov, 0.1 %"
    bound = 4 / table.numel() ** 0.5
    for one, other in ((table[1:], table[:-1]), (table[:, 1:], table[:, :-1]), (table[1:, :-1], table[:-1, 1:])):
        assert abs(float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])) < bound


def seeded(first_id=0):
    """Requests of prompts of several lengths, two of them alike, for samples of several lengths."""
    lengths, sampling = (3, 6, 2, 6, 9), {"top_p": 0.95}
    plain = [requests_of([n], max_tokens=3 + n, num_samples=3, **sampling)[0] for n in lengths]
    plain[3] = plain[1]
    return [GenerationRequest(**vars(r) | {"id": first_id + n, "seed": 100 * n}) for n, r in enumerate(plain)]


def tokens(found):
    return [[completion.token_ids for completion in row] for row in found]


@pytest.mark.parametrize("family", [tiny_gpt2, tiny_llama])
def test_samples_do_not_depend_on_what_else_is_sampled(family):
    lm, requests = family(), seeded()
    at_once = tokens(EmbeddedEngine.from_module(lm, num_slots=64).run(requests))
    assert at_once[1] != at_once[3], "equal prompts with other seeds"
    assert len({ids for row in at_once for ids in row}) > 10, "nor are the samples of one request equal"
    for num_slots in (1, 4):
        assert tokens(EmbeddedEngine.from_module(lm, num_slots=num_slots, seed=5).run(requests)) == at_once
    engine = EmbeddedEngine.from_module(lm, num_slots=5, seed=1)
    others = requests_of([4, 8], max_tokens=7, num_samples=2, first_id=50)
    order = [4, 2, 0, 3, 1]
    found = tokens(engine.run([others[0], *(requests[n] for n in order), others[1]]))[1:-1]
    assert [found[order.index(n)] for n in range(5)] == at_once


def test_another_seed_gives_other_samples_and_none_those_of_the_engine():
    lm = tiny_llama()
    request = requests_of([6], max_tokens=12, num_samples=4)[0]
    runs = [
        tokens(EmbeddedEngine.from_module(lm, seed=seed).run([GenerationRequest(**vars(request) | {"seed": own})]))
        for seed, own in ((0, 7), (1, 7), (0, 8), (0, None), (1, None))
    ]
    assert runs[0] == runs[1]
    assert runs[0][0][1:] == runs[2][0][:-1], "sample n has the stream seed + n"
    assert runs[0] != runs[3] != runs[4]


def test_a_seed_arrives_in_a_process_of_its_own():
    assert unpack_requests(pack_requests(seeded())) == seeded()


class Slow(Calculator):
    """A calculator that answers the first episodes first, or last."""

    def __init__(self, last_first):
        super().__init__()
        self.delays = itertools.count(96, -1) if last_first else itertools.count()

    async def start(self, prompt):
        return CalculatorEpisode(prompt, next(self.delays) / 200, self.max_calls)


def test_episodes_do_not_depend_on_the_time_that_environments_take():
    model = asset("calculator_policy")
    lm, codec, problems = load_policy(model), TextCodec(model), Addition(num_digits=3, size=48)
    requests = [
        GenerationRequest(
            id=n,
            prompt_ids=codec.encode(problems[n]),
            num_samples=2,
            sampling=SamplingParams(temperature=1.8, max_tokens=12),
            prompt=problems[n],
            seed=2 * n,
        )
        for n in range(48)
    ]
    found = []
    for last_first in (False, True):
        engine = EpisodeEngine(EmbeddedEngine(), environment=Slow(last_first))
        around = engine.around(EmbeddedEngine.from_module(lm), codec)
        found.append(tokens(run_requests(around, requests, codec.vocab_size, 60.0)))
    assert any(len(ids) > 12 for row in found[0] for ids in row), "nobody calls the calculator"
    assert found[0] == found[1]
