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
from lit_async_rl.engines.embedded.decode_graphs import BLOCK_ROWS, MIN_USES, STEPS_AHEAD, DecodeGraphs, num_rows
from lit_async_rl.models.loading import load_policy


@pytest.fixture
def recorded(monkeypatch):
    """The recorder of the engine that is made next."""
    steps = RecordedSteps()
    monkeypatch.setattr(engine_module, "cuda_graphs", lambda generator: lambda: steps)
    return steps


def recording_engine(lm, folder, **settings):
    """An engine that records in this process, where nothing else uses the device."""
    engine = rl.EmbeddedEngine(device="cpu", self_check=False, **settings)
    engine.engine.settings.cuda_graphs = True
    engine.setup(save(lm, folder))
    engine.load_weights(0, lm.named_parameters())
    return engine


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings"),
    [(tiny_llama, {}), (tiny_qwen3, {"top_p": 0.8, "min_p": 0.02}), (tiny_llama, {"temperature": 0.0})],
    ids=["plain", "filtered", "greedy"],
)
def test_replayed_steps_sample_the_same_tokens(family, settings, recorded, tmp_path):
    lm = family()
    sampled = []
    for graphs in (False, True):
        engine = (recording_engine if graphs else own_engine)(lm, tmp_path / str(graphs), num_slots=7)
        requests = seeded([4, 9, 2, 6], max_tokens=150, **settings)  # over a block of positions, and slots used again
        sampled.append(engine.run(requests))
        assert engine.num_tokens == sum(len(one.token_ids) for samples in sampled[-1] for one in samples)
        assert engine.num_running == 0
    for alone, together in zip(*sampled, strict=True):
        for expected, found in zip(alone, together, strict=True):
            assert found.token_ids == expected.token_ids
            assert found.versions == expected.versions
            assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert recorded.num_replayed > 100
    lengths = {len(one.token_ids) % STEPS_AHEAD for samples in sampled[0] for one in samples}
    assert lengths > {0} or settings, "rows ended within steps that were not waited for"
    assert 2 <= recorded.num_recorded <= 16


def test_random_numbers_of_the_engine_go_on_from_token_to_token(recorded, tmp_path):
    engine = recording_engine(lm := tiny_llama(), tmp_path, num_slots=4)
    requests = requests_of([3], max_tokens=60, num_samples=4)
    (completions,) = engine.run(requests)
    assert_exact(lm, requests, [completions])
    assert len({completion.token_ids for completion in completions}) == 4
    assert recorded.num_replayed


def test_a_replayed_token_has_the_newest_weights_and_their_version(recorded, tmp_path):
    lms = [tiny_llama(seed=seed) for seed in range(3)]
    engine = recording_engine(lms[0], tmp_path, num_slots=4)
    for version, lm in enumerate(lms):
        engine.load_weights(version, lm.named_parameters())
        requests = requests_of([5, 5], max_tokens=20, num_samples=2, first_id=2 * version)
        found = engine.run(requests)
        assert_exact(lm, requests, found)
        assert {v for completions in found for c in completions for v in c.versions} == {version}
    assert recorded.num_recorded <= 3  # of the first weights: later ones are in the same memory


def test_a_sampler_head_that_comes_later_is_recorded(recorded, tmp_path):
    engine = recording_engine(lm := tiny_llama(), tmp_path, num_slots=4)
    plain = seeded([4], max_tokens=30)
    engine.submit(plain)
    first = collect(engine, 3)
    before = recorded.num_replayed
    assert before
    sampling = rl.SamplingParams(max_tokens=30, head=3)
    (completions,) = engine.run([rl.GenerationRequest(id=9, prompt_ids=(3, 4, 5, 6), num_samples=2, sampling=sampling)])
    for completion in completions:
        assert len(completion.head.entropy) == len(completion.token_ids)
        assert (completion.head.entropy > 0).all()
    assert recorded.num_replayed == before  # such steps run anew
    assert_exact(lm, plain, [sorted(first, key=lambda c: c.sample_index)])


def test_stop_strings_that_come_and_go_are_seen_and_drop_no_graph(recorded):
    """The table of tokens that may end a stop string is written in place."""
    lm = load_policy(str(rl.asset("sort_policy")))
    sampled = []
    for graphs in (False, True):
        engine = rl.EmbeddedEngine(device="cpu", self_check=False, num_slots=4)
        engine.engine.settings.cuda_graphs = graphs
        engine.setup(str(rl.asset("sort_policy")))
        engine.load_weights(0, lm.named_parameters())
        found = []
        for number, stop in enumerate(((), ("7",), ("4", "9"), ("7",), (), ("5",), ())):
            sampling = rl.SamplingParams(max_tokens=12, stop=stop, temperature=3.0)
            request = rl.GenerationRequest(
                id=number, prompt_ids=(20, 21, 22, 23), num_samples=4, sampling=sampling, seed=5
            )
            found.append([(c.token_ids, c.finish_reason) for c in engine.run([request])[0]])
        sampled.append(found)
    assert sampled[0] == sampled[1]
    kept = len(engine.engine.slots._graphs._steps)
    assert recorded.num_recorded == kept + 1 > 2  # dropped once, when the table was made


def test_graphs_of_fewer_rows_come_after_those_of_more(tmp_path):
    graphs = DecodeGraphs(lambda: made.append([]) or (lambda step: made[-1].append(step) or step), memory=list)
    made = []
    for rows in (2, 4, 2):
        for _ in range(MIN_USES + 1):
            assert graphs.run(lambda rows=rows: torch.tensor(rows), rows, "key") == rows
    assert [len(steps) for steps in made] == [1, 2]  # the memory of the first was dropped with it


@pytest.mark.parametrize(
    ("lm", "words"),
    [(tiny_llama, "must be False on the device cpu"), (tiny_gpt2, "with the model type 'gpt2'")],
)
def test_what_cannot_be_recorded_is_refused(lm, words, tmp_path):
    engine = rl.EmbeddedEngine(num_slots=2, device="cpu")
    engine.engine.settings.cuda_graphs = True
    with pytest.raises(ValueError, match=f"data.engine.cuda_graphs .*{words}"):
        engine.setup(save(lm(), tmp_path))


@pytest.mark.slow
def test_a_process_of_its_own_is_needed_and_says_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match=r"data.engine.own_process must be True with data.engine.cuda_graphs"):
        rl.EmbeddedEngine(cuda_graphs=True)
    engine = rl.EmbeddedEngine(num_slots=2, device="cpu", cuda_graphs=True, own_process=True)
    with pytest.raises(ValueError, match="must be False on the device cpu"):
        engine.setup(save(tiny_llama(), tmp_path))
    engine.close()


def test_what_a_graph_cannot_do_fails_while_it_is_recorded():
    values = torch.arange(3.0)
    with pytest.raises(RuntimeError, match="not permitted"):
        RecordedSteps()(lambda: values * values.sum().item())
