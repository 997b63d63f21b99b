"""What the embedded engine promises of log-probabilities, and that nobody waits for it without end."""

import threading
import time

import pytest
import torch
from replays import assert_exact, full_logprobs, own_engine, requests_of
from tiny_models import ALL, tiny_gpt2, tiny_llama

from lit_async_rl.engines.embedded.engine import EmbeddedEngine

# -- log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("owner", ["own", "borrowed"])
def test_logprobs_are_those_of_a_full_forward(family, owner, tmp_path):
    lm = ALL[family]()
    requests = requests_of([1, 3, 17, 5, 30, 2], max_tokens=40)
    borrowed = owner == "borrowed"
    engine = EmbeddedEngine.from_module(lm, num_slots=7) if borrowed else own_engine(lm, tmp_path, num_slots=7)
    results = engine.run(requests)
    assert_exact(lm, requests, results)
    assert len({c.token_ids for completions in results for c in completions}) > 12
    assert engine.num_tokens == sum(len(c.token_ids) for completions in results for c in completions)
    assert engine.busy_s > 0


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_logprobs_are_those_at_the_temperature_of_the_request(temperature):
    lm = tiny_llama()
    requests = requests_of([4, 9], temperature=temperature)
    assert_exact(lm, requests, EmbeddedEngine.from_module(lm).run(requests), temperature)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_prompts_of_a_single_token_are_prompts_like_others(family):
    """A prefill of one column was taken for a decode step: a crash in a fresh engine, later another row's cache."""
    lm = ALL[family]()
    engine = EmbeddedEngine.from_module(lm, num_slots=8)
    for sizes in ([1], [5, 3], [1, 1]):
        requests = requests_of(sizes, seed=len(sizes))
        assert_exact(lm, requests, engine.run(requests))


def test_greedy_completions_are_those_of_generate():
    lm = tiny_llama()
    (request,) = requests_of([6], max_tokens=20, num_samples=2, temperature=0.0)
    results = EmbeddedEngine.from_module(lm).run([request])
    ids = torch.tensor([request.prompt_ids])
    expected = lm.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20)[0, 6:]
    assert [c.token_ids for c in results[0]] == [tuple(expected.tolist())] * 2
    assert_exact(lm, [request], results)


def test_requests_with_different_settings_share_the_slots():
    lm = tiny_llama()
    kinds = [{"top_k": 3}, {"top_p": 0.4}, {"min_p": 0.3}, {"temperature": 0.0}, {}]
    requests = [requests_of([5], num_samples=4, first_id=n, **kind)[0] for n, kind in enumerate(kinds)]
    for kind, request, completions in zip(kinds, requests, EmbeddedEngine.from_module(lm).run(requests), strict=True):
        for c in completions:
            ids = torch.tensor([request.prompt_ids + c.token_ids])
            with torch.no_grad():
                p = lm(input_ids=ids).logits[0, 4:-1].softmax(-1)
            for row, token, logprob in zip(p, c.token_ids, c.logprobs, strict=True):
                ordered = row.sort(descending=True).values
                kept = {
                    "top_k": row[row >= ordered[2]].sum(),
                    "top_p": ordered[: int((ordered.cumsum(0) < 0.4).sum()) + 1].sum(),
                    "min_p": row[row >= 0.3 * row.max()].sum(),
                }.get(next(iter(kind), ""), torch.tensor(1.0))
                assert logprob == pytest.approx((row[token] / kept).log().item(), abs=1e-4)
                assert logprob <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_borrowed_module_is_sampled_under_autocast_as_it_is(dtype):
    lm = tiny_llama()
    requests = requests_of([3, 8])
    with torch.autocast("cpu", dtype):
        results = EmbeddedEngine.from_module(lm).run(requests)
        for request, completions in zip(requests, results, strict=True):
            for c in completions:
                expected = full_logprobs(lm, request.prompt_ids, c.token_ids)
                torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=0.15, rtol=0)


def test_a_borrowed_module_in_training_mode_comes_back_in_training_mode():
    lm = tiny_gpt2()
    for module in lm.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    lm.gradient_checkpointing_enable()
    lm.train()
    lm.transformer.h[0].mlp.eval()
    requests = requests_of([3, 8])
    results = EmbeddedEngine.from_module(lm).run(requests)
    assert lm.training
    assert not lm.transformer.h[0].mlp.training
    assert lm.transformer.h[1].mlp.training
    assert all(parameter.requires_grad for parameter in lm.parameters())
    assert_exact(lm.eval(), requests, results)


def test_a_borrowed_module_is_sampled_with_its_live_weights():
    lm, other = tiny_llama(seed=0), tiny_llama(seed=1)
    engine = EmbeddedEngine.from_module(lm)
    requests = requests_of([3, 8])
    assert_exact(lm, requests, engine.run(requests))
    lm.load_state_dict(other.state_dict())
    assert_exact(other, requests, engine.run(requests))


def test_sampling_leaves_gradients_possible_and_the_default_generator_alone():
    lm = tiny_llama()
    before = torch.random.get_rng_state()
    EmbeddedEngine.from_module(lm).run(requests_of([3]))
    assert torch.equal(before, torch.random.get_rng_state())
    lm(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()


# -- waiting ----------------------------------------------------------------------------------------------------------


def test_poll_sleeps_when_there_is_nothing_to_do_and_wakes_at_once(tmp_path):
    engine = own_engine(tiny_llama(), tmp_path)
    began, cpu = time.monotonic(), time.thread_time()
    assert engine.poll(0.4) == []
    assert 0.35 < time.monotonic() - began < 2.0
    assert time.thread_time() - cpu < 0.1
    threading.Timer(0.1, engine.submit, [requests_of([3], num_samples=1)]).start()
    began = time.monotonic()
    assert len(engine.poll(30.0)) == 1
    assert time.monotonic() - began < 5.0


def test_poll_returns_when_its_time_is_up(tmp_path):
    engine = own_engine(tiny_llama(layers=4, hidden=128), tmp_path)
    engine.engine.slots.lm.generation_config.eos_token_id = []
    engine.submit(requests_of([3], max_tokens=250, num_samples=64, temperature=0.01))
    began = time.monotonic()
    engine.poll(0.02)
    assert time.monotonic() - began < 1.0


def test_close_ends_a_waiting_poll_and_may_be_called_twice(tmp_path):
    engine = own_engine(tiny_llama(), tmp_path)
    threading.Timer(0.1, engine.close).start()
    assert engine.poll(60.0) == []
    engine.close()
    EmbeddedEngine().close()


def test_submit_waits_for_no_token(tmp_path, monkeypatch):
    """Agents and environments submit one after the other, from one thread: each would wait for a whole step."""
    engine = own_engine(tiny_llama(), tmp_path)
    slots = engine.engine.slots
    is_decoding, may_go_on = threading.Event(), threading.Event()
    decode = slots.decode

    def held(version):
        is_decoding.set()
        assert may_go_on.wait(60)
        return decode(version)

    monkeypatch.setattr(slots, "decode", held)
    engine.submit(requests_of([3], max_tokens=4, num_samples=1))
    finished = []
    thread = threading.Thread(
        target=lambda: [finished.extend(engine.poll(0.5)) for _ in range(200) if len(finished) < 9]
    )
    thread.start()
    assert is_decoding.wait(60)
    for number in range(1, 9):
        engine.submit(requests_of([3], max_tokens=4, num_samples=1, first_id=number))
    may_go_on.set()  # nobody would get here
    thread.join(60)
    assert sorted(one.request_id for one in finished) == list(range(9))


def test_submit_and_updates_come_in_between_two_tokens(tmp_path):
    """A loop that takes the lock again and again does not keep others from it."""
    lm = tiny_llama(layers=4)
    engine = own_engine(lm, tmp_path, num_slots=64)
    engine.submit(requests_of([3] * 20, max_tokens=200, num_samples=64))
    stop = threading.Event()

    def work():
        while not stop.is_set():
            engine.poll(0.5)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        waits = []
        for version in range(1, 11):
            began = time.monotonic()
            engine.load_weights(version, lm.named_parameters())
            engine.submit(requests_of([3], num_samples=1, first_id=100 + version))
            waits.append(time.monotonic() - began)
        assert sorted(waits)[5] < 0.5
    finally:
        stop.set()
        thread.join(30)
    assert not thread.is_alive()
