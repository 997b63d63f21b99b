"""What the embedded engine promises: exact log-probabilities, versions, order, bounds, and no wait without end."""

import random
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replays import assert_exact, collect, full_logprobs, key, replayed_logprobs, requests_of
from tiny_models import ALL, EOS, save, tiny_gpt2, tiny_llama, tiny_qwen3

from lit_async_rl.embedded_engine import EmbeddedEngine
from lit_async_rl.engine import GenerationRequest, SamplingParams
from lit_async_rl.errors import StalledError


def own_engine(lm, tmp_path, **kwargs) -> EmbeddedEngine:
    engine = EmbeddedEngine(**{"device": "cpu", **kwargs})
    engine.setup(save(lm, tmp_path))
    engine.load_weights(0, lm.named_parameters())
    return engine


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


# -- slots ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_slots", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("num_samples", [1, 4, 7])
def test_any_number_of_samples_finishes_in_any_number_of_slots(num_slots, num_samples):
    lm = tiny_llama(layers=1)
    requests = requests_of([3, 6, 2], max_tokens=9, num_samples=num_samples)
    assert_exact(lm, requests, EmbeddedEngine.from_module(lm, num_slots=num_slots).run(requests))


def test_completions_of_mixed_lengths_end_for_the_reason_they_name():
    lm = tiny_llama()
    requests = [
        requests_of([4], max_tokens=n, num_samples=5, first_id=n, stop_token_ids=(7, 9))[0] for n in (1, 4, 9, 30)
    ]
    reasons = set()
    for request, completions in zip(requests, EmbeddedEngine.from_module(lm, num_slots=6).run(requests), strict=True):
        for c in completions:
            reasons.add(c.finish_reason)
            assert not {EOS, 7, 9} & set(c.token_ids[:-1])
            if c.finish_reason == "stop":
                assert c.token_ids[-1] in {EOS, 7, 9}
            else:
                assert len(c.token_ids) == request.sampling.max_tokens
                assert c.token_ids[-1] not in {EOS, 7, 9}
    assert reasons == {"stop", "length"}


def test_a_prompt_is_read_once_for_all_its_samples():
    lm = tiny_gpt2()
    rows = []
    lm.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    EmbeddedEngine.from_module(lm, num_slots=16).run(requests_of([10, 6], num_samples=8, max_tokens=5))
    assert rows[0] == (2, 10)
    assert all(width == 1 for _, width in rows[1:])


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_prompt_that_a_slot_still_holds_is_read_again_only_after_an_update(family, tmp_path):
    lms = [{"gpt2": tiny_gpt2, "llama": tiny_llama}[family](seed=seed) for seed in range(2)]
    engine = own_engine(lms[0], tmp_path, num_slots=8)
    widths = []
    forward = engine._slots._forward
    engine._slots._forward = lambda ids, *args: widths.append(ids.shape[1]) or forward(ids, *args)
    first, second = requests_of([10, 6], num_samples=2, max_tokens=9), requests_of([10, 6], num_samples=3, first_id=2)

    def sample(requests, lm):
        engine.submit(requests)
        found = collect(engine, sum(r.num_samples for r in requests))
        results = [sorted((c for c in found if c.request_id == r.id), key=lambda c: c.sample_index) for r in requests]
        assert_exact(lm, requests, results)

    sample(first, lms[0])
    sample(second, lms[0])
    assert [width for width in widths if width > 1] == [10]
    engine.load_weights(1, lms[1].named_parameters())
    sample(first, lms[1])
    assert [width for width in widths if width > 1] == [10, 10]


def test_free_slots_are_filled_before_the_longest_completion_is_done():
    lm = tiny_llama()
    lm.generation_config.eos_token_id = None
    long, *short = [*requests_of([4], max_tokens=60, num_samples=1), *requests_of([4] * 10, 5, 1, first_id=1)]
    engine = EmbeddedEngine.from_module(lm, num_slots=2)
    engine.submit([long, *short])
    order = [c.request_id for c in collect(engine, 11)]
    assert order == [*range(1, 11), 0]


def test_submit_refuses_what_does_not_fit(tmp_path):
    engine = own_engine(tiny_llama(), tmp_path, max_model_len=20)
    assert engine.max_model_len == 20
    engine.submit(requests_of([8], max_tokens=12, num_samples=1))
    with pytest.raises(ValueError, match=r"max_tokens=12.*max_model_len=20"):
        engine.submit(requests_of([9], max_tokens=12))
    with pytest.raises(ValueError, match="prompt"):
        engine.submit(requests_of([0], max_tokens=5))
    with pytest.raises(ValueError, match="64"):
        engine.submit([GenerationRequest(id=5, prompt_ids=(64,), num_samples=1, sampling=SamplingParams())])
    assert len(collect(engine, 1)) == 1


def test_a_refused_batch_is_refused_as_a_whole(tmp_path):
    engine = own_engine(tiny_llama(), tmp_path, max_model_len=20)
    with pytest.raises(ValueError, match="max_model_len"):
        engine.submit(requests_of([3, 19], max_tokens=10))
    assert engine.poll(0.05) == []
    assert engine.num_tokens == 0


@pytest.mark.parametrize(
    ("setting", "value"),
    [("num_slots", 0), ("max_model_len", 1), ("max_model_len", 257), ("num_threads", 0), ("dtype", "float31")],
)
def test_a_wrong_setting_is_named(setting, value, tmp_path):
    with pytest.raises(ValueError, match=rf"{setting}.*{value}"):
        EmbeddedEngine(**{"device": "cpu", setting: value}).setup(save(tiny_llama(), tmp_path))


def test_an_aborted_request_is_gone_and_its_slots_are_used_again():
    lm = tiny_llama()
    engine = EmbeddedEngine.from_module(lm, num_slots=4)
    requests = requests_of([4] * 5, max_tokens=40, num_samples=2)
    engine.submit(requests)
    engine.poll(0.0)
    engine.abort([0, 3])
    found = collect(engine, 6)
    assert {c.request_id for c in found} == {1, 2, 4}
    assert engine.poll(0.02) == []


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
    engine._slots.lm.generation_config.eos_token_id = None
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


# -- weights ----------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("in_flight", [True, False])
def test_what_is_submitted_after_an_update_is_sampled_from_it_or_newer(in_flight, tmp_path):
    lms = [tiny_llama(seed=seed) for seed in range(6)]
    engine = own_engine(lms[0], tmp_path, num_slots=5, in_flight_weight_updates=in_flight)
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


def test_updates_that_nobody_uses_do_not_pile_up(tmp_path):
    lm = tiny_qwen3()
    engine = own_engine(lm, tmp_path, in_flight_weight_updates=False, update_timeout_s=0.2)
    engine.submit(requests_of([4]))
    engine.load_weights(1, lm.named_parameters())
    engine.load_weights(2, lm.named_parameters())
    with pytest.raises(StalledError, match=r"update_timeout_s=0\.2"):
        engine.load_weights(3, lm.named_parameters())
    collect(engine, 3)
    engine.poll(0.0)
    engine.load_weights(3, lm.named_parameters())


def test_an_update_waits_for_room_and_goes_on_when_there_is(tmp_path):
    lm = tiny_qwen3()
    engine = own_engine(lm, tmp_path, in_flight_weight_updates=False)
    engine.submit(requests_of([4]))
    engine.load_weights(1, lm.named_parameters())
    engine.load_weights(2, lm.named_parameters())
    thread = threading.Thread(target=engine.load_weights, args=(3, lm.named_parameters()))
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive()
    collect(engine, 3)
    engine.poll(0.0)
    thread.join(10)
    assert not thread.is_alive()


def test_an_engine_that_broke_lets_nobody_wait(tmp_path):
    lm = tiny_gpt2()
    engine = own_engine(lm, tmp_path, in_flight_weight_updates=False)
    engine.submit(requests_of([4]))
    engine.load_weights(1, lm.named_parameters())
    engine.load_weights(2, lm.named_parameters())

    def out_of_memory(*args):
        raise MemoryError("no memory left")

    engine._slots.lm.transformer.register_forward_pre_hook(out_of_memory)
    with pytest.raises(MemoryError, match="no memory left"):
        engine.poll(1.0)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="no memory left"):
        engine.load_weights(3, lm.named_parameters())
    assert time.monotonic() - began < 5.0
