"""Long rows in front: the fewest positions are read, and no row reads fewer than it has."""

import dataclasses
import random

import pytest
import torch
from replays import assert_exact, collect, own_engine, requests_of
from tiny_models import tiny_gpt2, tiny_llama

from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.engines.embedded.slots import STEPS_BETWEEN_SORTS, RowOrder, split


def test_no_split_reads_fewer_positions():
    chance = random.Random(0)
    for _ in range(200):
        lengths = [int(chance.paretovariate(0.8) * 20) for _ in range(chance.randrange(8, 40))]
        max_len = max(lengths)
        num_long, short_len = split(lengths, max_len)
        found = num_long * max_len + (len(lengths) - num_long) * short_len
        assert sum(length > short_len for length in lengths) <= num_long
        whole = len(lengths) * max_len
        best = min(sum(max_len if other > length else length for other in lengths) for length in lengths)
        assert found == best or (found == whole and best >= 0.6 * whole)


@pytest.mark.parametrize("lengths", [[450] * 20, [10, 500], []])
def test_rows_of_one_length_and_few_rows_stay_together(lengths):
    assert split(lengths, 500) == (len(lengths), 500)


def test_rows_that_grow_and_end_stay_in_order():
    chance, order = random.Random(0), RowOrder()
    rows: list[int] = []
    for step in range(400):
        if step % 9 == 0:
            rows += [int(chance.paretovariate(0.8) * 20) for _ in range(30 - len(rows))]
            order.invalidate()
        if order.is_due:
            sources, targets = order.sort(rows, max(rows) + STEPS_BETWEEN_SORTS)
            assert sorted(sources) == sorted(targets)
            before = list(rows)
            for source, target in zip(sources, targets, strict=True):
                rows[target] = before[source]
        num_long, short_len = order.step(len(rows))
        rows = [position + 1 for position in rows]
        assert all(position <= short_len for position in rows[num_long:])
        for row in sorted(chance.sample(range(len(rows)), 2), reverse=True):  # the last one takes the place of one
            rows[row] = rows[-1]
            rows.pop()


def mixed_requests(**sampling) -> list[GenerationRequest]:
    """Prompts of 2 to 150 tokens, most of them short, and completions of 3 to 90."""
    chance = random.Random(1)
    tails = [(chance.paretovariate(0.6), chance.paretovariate(0.7)) for _ in range(60)]
    sizes = [(min(150, int(2 * prompt)), min(90, int(3 * answer))) for prompt, answer in tails]
    return [
        requests_of([prompt], length, num_samples=2, seed=n, first_id=n, **sampling)[0]
        for n, (prompt, length) in enumerate(sizes)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
@pytest.mark.parametrize("num_slots", [12, 40])
def test_completions_of_very_different_length_are_exact(make, num_slots, tmp_path):
    lm = make()
    engine = own_engine(lm, tmp_path, num_slots=num_slots)
    cache, ranges, moved = engine.engine.slots._cache, [], []
    begin, sort = cache.begin_decode, engine.engine.slots._order.sort
    cache.begin_decode = lambda *args: (begin(*args), ranges.append(cache.ranges))[0]
    engine.engine.slots._order.sort = lambda *args: moved.append(sort(*args)) or moved[-1]
    requests = mixed_requests(head=3)
    results = engine.run(requests)
    assert_exact(lm, requests, results)
    reads_ranges = make is tiny_llama  # transformers' own attention reads all positions of every row
    assert any(len(parts) == 2 for parts in ranges) == any(sources for sources, _ in moved) == reads_ranges
    for completions in results:  # what is recorded beside the tokens moved with them
        for c in completions:
            listed = torch.isclose(c.head.logprobs, torch.tensor(c.logprobs)[:, None], atol=1e-5).any(-1)
            likely = torch.tensor(c.logprobs) > c.head.logprobs[:, -1] + 1e-5
            assert listed[likely].all()


@pytest.mark.slow
def test_samples_depend_on_the_seed_alone():
    requests = mixed_requests()
    first, second = (EmbeddedEngine.from_module(tiny_llama(), num_slots=20, seed=5).run(requests) for _ in range(2))
    assert first == second


def test_a_long_prompt_whose_completion_ended_is_right_when_it_comes_again(tmp_path):
    """Its slot stays in the arithmetic of short rows, which shorten the cache; what is written over is read again."""
    lm = tiny_llama()
    engine = own_engine(lm, tmp_path, num_slots=12)
    (long,) = requests_of([150], max_tokens=2, num_samples=1)
    short = requests_of([3] * 10, max_tokens=60, num_samples=1, first_id=1, seed=1)
    engine.submit([long, *short])
    completions = [c for _ in range(8) for c in engine.poll(0.0)]
    again = dataclasses.replace(long, id=11, num_samples=2, sampling=SamplingParams(max_tokens=8))
    engine.submit([again])
    completions += collect(engine, 13 - len(completions))
    requests = [long, *short, again]
    results = [[c for c in completions if c.request_id == r.id] for r in requests]
    assert_exact(lm, requests, [sorted(some, key=lambda c: c.sample_index) for some in results])
