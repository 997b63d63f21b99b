"""Slots of the embedded engine: any number of completions in any number of rows, prompts read once, bounds."""

import pytest
from replays import assert_exact, collect, own_engine, requests_of
from tiny_models import EOS, save, tiny_gpt2, tiny_llama

from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.engines.embedded.forward import CachedForward


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
    engine = EmbeddedEngine.from_module(lm, num_slots=16)  # which checks itself
    lm.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    engine.run(requests_of([10, 6], num_samples=8, max_tokens=5))
    assert rows[0] == (2, 10)
    assert all(width == 1 for _, width in rows[1:])


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_prompt_that_a_slot_still_holds_is_read_again_only_after_an_update(family, tmp_path, monkeypatch):
    lms = [{"gpt2": tiny_gpt2, "llama": tiny_llama}[family](seed=seed) for seed in range(2)]
    engine = own_engine(lms[0], tmp_path, num_slots=8)
    widths, forward = [], CachedForward.__call__
    monkeypatch.setattr(
        CachedForward, "__call__", lambda self, ids, *args: widths.append(ids.shape[1]) or forward(self, ids, *args)
    )
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
    lm.generation_config.eos_token_id = []
    long, *short = [*requests_of([4], max_tokens=60, num_samples=1), *requests_of([4] * 10, 5, 1, first_id=1)]
    engine = EmbeddedEngine.from_module(lm, num_slots=2)
    engine.submit([long, *short])
    order = [c.request_id for c in collect(engine, 11)]
    assert order == [*range(1, 11), 0]


def test_a_batch_depends_on_nothing_that_was_decoded_before(tmp_path):
    lm = tiny_llama()
    fresh, used = (own_engine(lm, tmp_path, num_slots=5, in_flight_weight_updates=False) for _ in range(2))
    used.run(requests_of([40, 3], max_tokens=90, first_id=50))
    requests = requests_of([3, 9])
    assert used.run(requests) == fresh.run(requests)


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


def test_a_row_that_ends_where_the_cache_ends_does_not_write_into_its_neighbour():
    """In a cache of 32 positions: it stays as a hole among the others, whose next positions still fit, so that nothing
    makes the cache longer.
    """
    lm = tiny_llama()
    for seed in range(4):
        engine = EmbeddedEngine.from_module(lm, num_slots=4, seed=seed)
        (longest,) = requests_of([20], max_tokens=32 - 19, num_samples=1)
        others = requests_of([3, 4, 5], max_tokens=24, num_samples=1, first_id=1)
        assert_exact(lm, [longest, *others], engine.run([longest, *others]))
