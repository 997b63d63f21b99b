"""Decode steps that are recorded and replayed sample what steps sample that run anew.

Without a GPU a recording stands in for CUDA graphs that forbids what they forbid, and repeats operations on the same
memory, so that whatever Python has computed once stays as it was.
"""

import pytest
import torch
from recorded_steps import RecordedSteps
from replays import assert_exact, collect, own_engine, requests_of
from tiny_models import save, tiny_gpt2, tiny_llama, tiny_qwen3

import lit_async_rl as rl
from lit_async_rl.engines.embedded import engine as engine_module
from lit_async_rl.engines.embedded.decode_graphs import BLOCK_ROWS, num_rows


@pytest.fixture
def recorded(monkeypatch):
    """The recorder of the engine that is made next."""
    steps = RecordedSteps()
    monkeypatch.setattr(engine_module, "cuda_graphs", lambda generator: steps)
    return steps


def seeded(lengths, first_id=0, **settings):
    """Requests whose random numbers depend on neither slots nor other requests."""
    return [
        rl.GenerationRequest(
            id=request.id, prompt_ids=request.prompt_ids, num_samples=3, sampling=request.sampling, seed=request.id
        )
        for request in requests_of(lengths, num_samples=3, first_id=first_id, **settings)
    ]


def test_rows_are_rounded_up_to_few_numbers():
    assert [num_rows(used, 1000) for used in (1, 2, 3, 5, 32, 33, 64, 65)] == [1, 2, 4, 8, 32, 64, 64, 96]
    assert num_rows(BLOCK_ROWS + 1, BLOCK_ROWS + 5) == BLOCK_ROWS + 5


@pytest.mark.parametrize("family", [tiny_llama, tiny_qwen3])
@pytest.mark.parametrize("settings", [{}, {"top_p": 0.8, "min_p": 0.02}, {"temperature": 0.0}], ids=str)
def test_replayed_steps_sample_the_same_tokens(family, settings, recorded, tmp_path):
    lm = family()
    sampled = []
    for graphs in (False, True):
        engine = own_engine(lm, tmp_path / str(graphs), num_slots=7, cuda_graphs=graphs)
        requests = seeded([4, 9, 2, 6], max_tokens=150, **settings)  # over a block of positions, and slots used again
        sampled.append(engine.run(requests))
    for alone, together in zip(*sampled, strict=True):
        for expected, found in zip(alone, together, strict=True):
            assert found.token_ids == expected.token_ids
            assert found.versions == expected.versions
            assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert recorded.num_replayed > 100
    assert 2 <= recorded.num_recorded <= 16


def test_random_numbers_of_the_engine_go_on_from_token_to_token(recorded, tmp_path):
    engine = own_engine(lm := tiny_llama(), tmp_path, num_slots=4, cuda_graphs=True)
    requests = requests_of([3], max_tokens=60, num_samples=4)
    (completions,) = engine.run(requests)
    assert_exact(lm, requests, [completions])
    assert len({completion.token_ids for completion in completions}) == 4
    assert recorded.num_replayed


def test_a_replayed_token_has_the_newest_weights_and_their_version(recorded, tmp_path):
    lms = [tiny_llama(seed=seed) for seed in range(3)]
    engine = own_engine(lms[0], tmp_path, num_slots=4, cuda_graphs=True)
    for version, lm in enumerate(lms):
        engine.load_weights(version, lm.named_parameters())
        requests = requests_of([5, 5], max_tokens=20, num_samples=2, first_id=2 * version)
        found = engine.run(requests)
        assert_exact(lm, requests, found)
        assert {v for completions in found for c in completions for v in c.versions} == {version}
    assert recorded.num_recorded <= 3  # of the first weights: later ones are in the same memory


def test_a_stop_string_or_a_sampler_head_that_comes_later_is_seen(recorded, tmp_path):
    engine = own_engine(lm := tiny_llama(), tmp_path, num_slots=4, cuda_graphs=True)
    plain = seeded([4], max_tokens=30)
    engine.submit(plain)
    first = collect(engine, 3)
    recorded_before = recorded.num_recorded
    sampling = rl.SamplingParams(max_tokens=30, head=3)
    (completions,) = engine.run([rl.GenerationRequest(id=9, prompt_ids=(3, 4, 5, 6), num_samples=2, sampling=sampling)])
    for completion in completions:
        entropy = completion.head.entropy
        assert len(entropy) == len(completion.token_ids)
        assert (entropy > 0).all()
    assert recorded_before <= recorded.num_recorded
    assert_exact(lm, plain, [sorted(first, key=lambda c: c.sample_index)])


@pytest.mark.parametrize(
    ("lm", "words"),
    [(tiny_llama, "must be False on the device cpu"), (tiny_gpt2, "with the model type 'gpt2'")],
)
def test_what_cannot_be_recorded_is_refused(lm, words, tmp_path):
    engine = rl.EmbeddedEngine(num_slots=2, device="cpu", cuda_graphs=True)
    with pytest.raises(ValueError, match=f"data.engine.cuda_graphs .*{words}"):
        engine.setup(save(lm(), tmp_path))


def test_what_a_graph_cannot_do_fails_while_it_is_recorded():
    values = torch.arange(3.0)
    with pytest.raises(RuntimeError, match="not permitted"):
        RecordedSteps()(lambda: values * values.sum().item())
