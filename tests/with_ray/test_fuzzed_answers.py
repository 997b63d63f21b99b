"""Replicas that answer nonsense, or late, or twice: each sample comes once, and the others do the work."""

import copy
import random
import time

import numpy as np
import pytest
import torch
from quick_engines import Quick
from ray_stand_in import on_stand_in
from replays import key, requests_of
from tiny_models import save, tiny_llama

from lit_async_rl.ray import fleet

pytestmark = pytest.mark.timeout(240)
ODD = [None, True, -1, 0, 1, 2, 63, 64, 10**30, -0.5, 0.5, 1e308, float("nan"), float("-inf"), "", "8", "stop", "abort"]
ODD += [[], [[]], {}, {"error": 3}, [None] * 3, [5, 5, 5], {"version": 0}, b"x", np.zeros(3), torch.zeros(2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tiny_llama(), tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _forgiven(monkeypatch):
    Quick.reset()
    monkeypatch.setattr(fleet, "MAX_FAILURES", 10**6)


def places(value, path=()):
    """Paths of all parts of an answer."""
    yield path
    if isinstance(value, dict | list):
        for name in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[name], (*path, name))


def as_lists(value):
    """With lists for tuples, so that all parts can be changed."""
    if isinstance(value, dict):
        return {name: as_lists(part) for name, part in value.items()}
    return [as_lists(part) for part in value] if isinstance(value, list | tuple) else value


def fuzzed(right, rng):
    """An answer of which parts were replaced, changed a little, removed or repeated."""
    if rng.random() < 0.1:
        return copy.deepcopy(rng.choice(ODD))
    answer = as_lists(right)
    for _ in range(rng.randint(1, 3)):
        chosen = [path for path in places(answer) if path]
        if not chosen:
            break
        *way, last = rng.choice(chosen)
        holder = answer
        for name in way:
            holder = holder[name]
        action = rng.choice(["replace", "remove", "repeat", "near"])
        if action == "remove":
            del holder[last]
        elif action == "repeat" and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[last]))
        elif action == "near" and isinstance(holder[last], int | float):
            holder[last] += rng.choice([-1, 1, 0.5, 10**6])
        else:
            holder[last] = copy.deepcopy(rng.choice(ODD))
    return answer


def sampled(engine, num_rounds, before):
    """Samples of ten requests a round, over as many updates."""
    found = []
    for number in range(num_rounds):
        engine.load_weights(number, [("weight", torch.full((2,), float(number)))])
        before(number)
        until = time.monotonic() + 1.0
        while engine.num_ready < 2 and time.monotonic() < until:  # that one is out is no reason to wait for ever
            found += engine.poll(0.02)
        engine.submit(requests_of([4] * 10, num_samples=2, max_tokens=3, first_id=10 * number))
        wanted = 20 * (number + 1)
        deadline = time.monotonic() + 120
        while len(found) < wanted:
            assert time.monotonic() < deadline, f"{len(found)} of {wanted}"
            found += engine.poll(0.05)
    return found + engine.poll(0.05)


def assert_each_once(found, num_rounds):
    assert sorted(map(key, found)) == [(n, i) for n in range(10 * num_rounds) for i in range(2)]
    for completion in found:
        assert len(completion.token_ids) == len(completion.logprobs) == len(completion.versions) == 3
        assert min(completion.versions) >= completion.request_id // 10  # the weights before it was submitted
        assert all(type(token) is int and 0 <= token < 64 for token in completion.token_ids)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in (1, 2))])
def test_of_groups_sent_to_a_replica_that_answers_nonsense_none_is_lost_or_comes_twice(stand_in, model, seed):
    rng = random.Random(seed)
    num_fuzzed = 0

    def change(number, name, answer):
        nonlocal num_fuzzed
        if number != 1 or not is_on or rng.random() > 0.2:
            return answer
        num_fuzzed += 1
        return fuzzed(answer, rng)

    is_on = False
    engine = on_stand_in(Quick(update_timeout_s=1.0), model, replicas=2)
    stand_in.change = change

    def begin(number):
        nonlocal is_on
        is_on = True  # the first weights are all loaded, or nothing would be

    found = sampled(engine, 25, begin)
    engine.close()
    assert_each_once(found, 25)
    assert engine.num_lost > 3
    assert num_fuzzed > 10


def test_only_the_answer_to_the_latest_assignment_counts(stand_in, model):
    """Each answer with samples comes once more, behind later ones; and one that was held back while others went on."""
    kept = []

    def change(number, name, answer):
        if number != 1 or name != "take" or "error" in answer:
            return answer
        if answer["completions"]:
            kept.append(copy.deepcopy(answer))
        elif kept and len(kept) % 2:
            old = kept.pop(0)
            return answer | {part: old[part] for part in ("completions", "assignments", "tensors")}
        return answer

    engine = on_stand_in(Quick(), model, replicas=2)
    stand_in.change = change

    def again(number):
        if number % 5 == 4:
            next(handle for handle in stand_in.handles if handle.number == 1).end(False)

    found = sampled(engine, 25, again)
    engine.close()
    assert_each_once(found, 25)
