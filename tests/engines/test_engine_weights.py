"""Weights of the embedded engine: which version samples which token, wrong updates, barriers, waiting."""

import random
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replays import assert_exact, collect, full_logprobs, key, own_engine, replayed_logprobs, requests_of
from tiny_models import ALL, save, tiny_gpt2, tiny_llama

from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.models.weights import UNCHANGED


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "qwen3-tied", "gpt2"])
def test_in_flight_updates_keep_the_keys_and_values_and_tag_each_token(family, tmp_path):
    lms = [ALL[family](seed=seed) for seed in range(4)]
    engine = own_engine(lms[0], tmp_path, num_slots=6)
    requests = requests_of([4, 11, 2], max_tokens=40, num_samples=4)
    engine.submit(requests)
    found = []
    for version in (1, 2, 3):
        for _ in range(7):
            found += engine.poll(0.0)
        engine.load_weights(version, lms[version].named_parameters())
    found += collect(engine, 12 - len(found))
    assert any(len(set(c.versions)) >= 3 for c in found)
    for c in found:
        assert list(c.versions) == sorted(c.versions)
        expected = replayed_logprobs(lms, requests[c.request_id].prompt_ids, c)
        torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("own_process", [False, True])
@pytest.mark.parametrize("in_flight", [True, False])
def test_what_is_submitted_after_an_update_is_sampled_from_it_or_newer(in_flight, own_process, tmp_path):
    lms = [tiny_llama(seed=seed) for seed in range(6)]
    settings = dict(num_slots=5, in_flight_weight_updates=in_flight, own_process=own_process)
    engine = own_engine(lms[0], tmp_path, **settings)
    stop, found = threading.Event(), []

    def work():
        while not stop.is_set():
            found.extend(engine.poll(0.2))

    thread = threading.Thread(target=work)
    thread.start()
    submitted = {}
    for version in range(6):
        if version:
            engine.load_weights(version, lms[version].named_parameters())
        requests = requests_of([3, 5], first_id=10 * version, seed=version)
        submitted |= {request.id: request for request in requests}
        engine.submit(requests)
        time.sleep(0.02)
    deadline = time.monotonic() + 60
    while len(found) < 36 and time.monotonic() < deadline:
        time.sleep(0.01)
    stop.set()
    thread.join(30)
    assert len(found) == 36
    for c in found:
        assert min(c.versions) >= c.request_id // 10
        expected = replayed_logprobs(lms, submitted[c.request_id].prompt_ids, c)
        torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=1e-5, rtol=0)
        if not in_flight:
            assert set(c.versions) == {c.request_id // 10}
    engine.close()


def barrier_run(folder, lms, pauses, plan) -> dict:
    """Submits and updates in the order of `plan`, with pauses, while another thread polls; all that was sampled."""
    engine = EmbeddedEngine(num_slots=5, in_flight_weight_updates=False, device="cpu", seed=3)
    engine.setup(folder)
    engine.load_weights(0, lms[0].named_parameters())
    stop, found = threading.Event(), {}

    def work():
        while not stop.is_set():
            found.update((key(c), c) for c in engine.poll(next(pauses)))
            time.sleep(next(pauses))

    thread = threading.Thread(target=work)
    thread.start()
    num_requests = version = 0
    for num in plan:
        if num == 0:
            version += 1
            engine.load_weights(version, lms[version % len(lms)].named_parameters())
        else:
            engine.submit(requests_of([2, 6, 3][:num], first_id=num_requests, seed=num_requests))
            num_requests += num
        time.sleep(next(pauses))
    deadline = time.monotonic() + 60
    while len(found) < 3 * num_requests and time.monotonic() < deadline:
        time.sleep(0.002)
    stop.set()
    thread.join(30)
    assert len(found) == 3 * num_requests
    return found


@pytest.mark.slow
@given(st.lists(st.integers(0, 3), min_size=2, max_size=8), st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_without_in_flight_updates_timing_changes_nothing(tmp_path_factory, plan, seed):
    lms = [tiny_llama(layers=1, seed=seed) for seed in range(3)]
    folder = save(lms[0], tmp_path_factory.mktemp("model"))
    rng = random.Random(seed)
    at_once = barrier_run(folder, lms, iter(lambda: 0.0, None), plan)
    assert at_once == barrier_run(folder, lms, iter(lambda: rng.choice([0.0, 0.001, 0.01]), None), plan)


def test_a_seed_gives_the_same_completions_again_and_another_seed_others():
    lm, requests = tiny_llama(), requests_of([3, 9, 4])
    runs = [EmbeddedEngine.from_module(lm, num_slots=4, seed=seed).run(requests) for seed in (7, 7, 8)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_the_same_request_again_gives_other_completions():
    engine, requests = EmbeddedEngine.from_module(tiny_llama()), requests_of([5])
    assert engine.run(requests) != engine.run(requests)


def missing(weights):
    weights.pop("model.norm.weight")


def unknown(weights):
    weights["model.extra.weight"] = torch.zeros(3)


def wrong_shape(weights):
    weights["model.layers.1.mlp.down_proj.weight"] = torch.zeros(32, 65)


@pytest.mark.parametrize("spoil", [missing, unknown, wrong_shape])
@pytest.mark.parametrize("in_flight", [True, False])
def test_a_wrong_update_is_refused_as_a_whole(tmp_path, spoil, in_flight):
    lm, other = tiny_llama(seed=0), tiny_llama(seed=1)
    engine = own_engine(lm, tmp_path, in_flight_weight_updates=in_flight)
    weights = dict(other.named_parameters())
    spoil(weights)
    for _ in range(4):  # more often than updates may wait
        with pytest.raises(ValueError, match=r"model\.(norm|extra|layers\.1\.mlp\.down_proj)\.weight"):
            engine.load_weights(1, weights.items())
    requests = requests_of([4, 6])
    results = engine.run(requests)
    assert_exact(lm, requests, results)
    assert {v for completions in results for c in completions for v in c.versions} == {0}


def test_an_update_that_breaks_off_changes_nothing(tmp_path):
    lm, other = tiny_llama(seed=0), tiny_llama(seed=1)
    engine = own_engine(lm, tmp_path)

    def broken():
        yield next(other.named_parameters())
        raise RuntimeError("the trainer died")

    with pytest.raises(RuntimeError, match="the trainer died"):
        engine.load_weights(1, broken())
    requests = requests_of([4])
    assert_exact(lm, requests, engine.run(requests))


def test_each_tensor_is_read_before_the_next_is_asked_for(tmp_path):
    """Gathered shards are freed, or their memory is used again, as soon as the iterator goes on."""
    lm, other = tiny_llama(seed=0), tiny_llama(seed=1)
    engine = own_engine(lm, tmp_path)

    def streamed():
        for name, parameter in other.named_parameters():
            buffer = parameter.detach().clone()
            yield name, buffer
            buffer.fill_(torch.nan)

    engine.load_weights(1, streamed())
    requests = requests_of([4])
    assert_exact(other, requests, engine.run(requests))


@pytest.mark.parametrize("with_head", [True, False])
def test_a_tied_head_may_be_given_or_left_out(tmp_path, with_head):
    lm, other = tiny_llama(tied=True, seed=0), tiny_llama(tied=True, seed=1)
    engine = own_engine(lm, tmp_path)
    weights = other.state_dict()
    if not with_head:
        del weights["lm_head.weight"]
    engine.load_weights(1, weights.items())
    requests = requests_of([4])
    assert_exact(other, requests, engine.run(requests))


def test_weights_of_another_dtype_are_cast(tmp_path):
    lm = tiny_llama()
    engine = own_engine(lm, tmp_path, dtype="bfloat16")
    (request,) = requests_of([4])
    for c in engine.run([request])[0]:
        expected = full_logprobs(lm.to(torch.bfloat16), request.prompt_ids, c.token_ids)
        torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=0.15, rtol=0)


def test_an_in_flight_update_waits_for_no_token_and_the_next_token_is_of_it(tmp_path):
    """Two updates come while a token is computed; the second leaves out what the first changed."""
    lms = [tiny_gpt2(seed=seed) for seed in range(3)]
    engine = own_engine(lms[0], tmp_path, update_timeout_s=20.0)
    (request,) = requests_of([4], num_samples=1)
    engine.submit([request])
    engine.poll(0.0)  # version 0: the prompt, and one token
    computing, go_on = threading.Event(), threading.Event()

    def wait(*args):
        computing.set()
        go_on.wait(60)

    hook = engine.engine.slots.lm.transformer.ln_f.register_forward_pre_hook(wait)
    loop = threading.Thread(target=engine.poll, args=(0.0,))
    loop.start()
    assert computing.wait(60)
    engine.load_weights(1, lms[1].named_parameters())
    mixed = {name: UNCHANGED if "mlp" in name else weight for name, weight in lms[2].named_parameters()}
    engine.load_weights(2, mixed.items())
    assert loop.is_alive()
    hook.remove()
    go_on.set()
    loop.join(60)
    (completion,) = collect(engine, 1)
    assert completion.versions[:3] == (0, 0, 2)
    with torch.no_grad():
        for name, weight in lms[2].named_parameters():
            if "mlp" in name:
                weight.copy_(lms[1].get_parameter(name))
    expected = replayed_logprobs(lms, request.prompt_ids, completion)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)
