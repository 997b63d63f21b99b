"""Models with recurrent, convolutional or sparse layers: decoded row by row with the caches of transformers."""

import pytest
import torch
from every_family import full_logprobs, load, model_types, tiny_config
from flow import make_data, make_module
from lightning.pytorch import Callback
from replays import collect, own_engine, requests_of
from tiny_models import EOS, save, tiny_tokenizer

import lit_async_rl as rl
from lit_async_rl.engines.base import GenerationRequest
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.engines.embedded.kv_cache import RowCaches
from lit_async_rl.tasks import SortDigits

FAMILIES = ("lfm2", "qwen3_next", "mamba2", "jamba")


def assert_exact(lm, requests, results):
    """Recurrent and parallel forms of a layer round differently: up to 4e-5; a wrong state is off by 0.1 and more."""
    for request, completions in zip(requests, results, strict=True):
        assert [c.sample_index for c in completions] == list(range(request.num_samples))
        for c in completions:
            expected = full_logprobs(lm, request.prompt_ids + c.token_ids)[len(request.prompt_ids) - 1 :]
            torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=1e-4, rtol=0)


def tiny(name, folder):
    return load(tiny_config(model_types()[name], vocab_size=64, eos_token_id=EOS), folder / "loaded")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_rows_that_come_and_go_are_sampled_from_the_models_distribution(name, tmp_path):
    lm = tiny(name, tmp_path)
    engine = own_engine(lm, tmp_path, num_slots=4)
    assert isinstance(engine.engine.slots._cache, RowCaches)
    requests = requests_of([1, 7, 2, 5, 3], num_samples=3)
    assert_exact(lm, requests, engine.run(requests))
    again = requests_of([7, 1], seed=5, first_id=9)  # of slots that held other rows
    assert_exact(lm, again, engine.run(again))
    assert all(cache is None for cache in engine.engine.slots._cache.caches)


def test_the_same_seed_gives_the_same_samples(tmp_path):
    lm = tiny("lfm2", tmp_path)
    found = []
    for num_slots in (2, 5):
        engine = own_engine(lm, tmp_path, num_slots=num_slots)
        requests = [
            GenerationRequest(id=r.id, prompt_ids=r.prompt_ids, num_samples=2, sampling=r.sampling, seed=100 * r.id)
            for r in requests_of([3, 6])
        ]
        found.append(engine.run(requests))
    tokens = [[[c.token_ids for c in row] for row in one] for one in found]
    assert tokens[0] == tokens[1]


def test_aborted_rows_end_and_partial_ones_go_on_as_prompts(tmp_path):
    lm = tiny("qwen3_next", tmp_path)
    engine = own_engine(lm, tmp_path, num_slots=4)
    stays, goes = requests_of([4, 6], max_tokens=10, num_samples=1)
    engine.submit([stays, goes])
    while min((len(c.token_ids) for c in engine.partial_completions()), default=0) < 3:
        assert not engine.poll(0.0), "they end too early for this seed"
    engine.abort([goes.id])
    (partial,) = engine.partial_completions()
    assert partial.request_id == stays.id
    engine.abort([stays.id])
    assert not engine.partial_completions()
    so_far = stays.prompt_ids + partial.token_ids
    engine.submit([GenerationRequest(id=7, prompt_ids=so_far, num_samples=1, sampling=stays.sampling)])
    (rest,) = collect(engine, 1)
    found = torch.tensor(partial.logprobs + rest.logprobs)
    expected = full_logprobs(lm, so_far + rest.token_ids)[len(stays.prompt_ids) - 1 :]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


class Watch(Callback):
    def __init__(self):
        self.errors, self.staleness, self.accuracies = [], [], []

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.staleness.append(int(pl_module.stabilizer_signals["staleness"].max()))
        self.errors += [float(v) for k, v in trainer.callback_metrics.items() if k == "engine/logprob_error"]

    def on_validation_end(self, trainer, pl_module):
        self.accuracies.append(float(trainer.callback_metrics["val/pass@1"]))


@pytest.mark.parametrize(("name", "own_process"), [("lfm2", False), ("qwen3_next", True)])
@pytest.mark.slow
def test_a_run_with_the_default_callbacks(name, own_process, tmp_path, monkeypatch):
    """Asynchronous, two micro-batches, validation; the engine's check compares its samples with the trainer's."""
    monkeypatch.chdir(tmp_path)
    model = save(tiny(name, tmp_path), tmp_path, tiny_tokenizer(64))
    trainer = rl.Trainer(
        accelerator="cpu",
        max_steps=4,
        val_check_interval=2,
        callbacks=[watch := Watch()],
        enable_progress_bar=False,
        log_every_n_steps=1,
        defaults={"engine_check": rl.EngineCheck(every_n_updates=1)},
    )
    data = make_data(
        model=model,
        engine=EmbeddedEngine(num_slots=8, device="cpu", own_process=own_process),
        max_staleness=2,
        micro_batches_per_step=2,
        val_prompts=SortDigits(8, size=4, split="held_out"),
        prompts=SortDigits(8, size=100),
        reward=lambda prompt, completion: len(completion) % 3,
    )
    trainer.fit(make_module(model=model), data)
    assert trainer.global_step == 4
    assert max(watch.staleness) <= 2
    assert max(watch.errors) < 1e-4
    assert len(watch.accuracies) >= 2
