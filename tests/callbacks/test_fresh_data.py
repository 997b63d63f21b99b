"""Fresh data have importance ratios of mean 1 and a log-ratio that is not negative, whatever the settings."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from flow import fit, make_data, make_module
from hypothesis import given, settings
from hypothesis import strategies as st

import lit_async_rl as rl
from lit_async_rl.callbacks.monitors.fresh_data import (
    HALF_PRECISION_BOUNDS,
    SINGLE_PRECISION_BOUNDS,
    moments,
    statistics,
)
from lit_async_rl.models.policy import CausalPolicy

MODEL = rl.asset("small_sort_policy")
BOUNDS = {"float32": SINGLE_PRECISION_BOUNDS, "bfloat16": HALF_PRECISION_BOUNDS}
OF_MODULE = {"dtype", "loss", "correction", "proximal", "baseline", "packing", "lora", "self_check"}
DIFFERENT = "have different distributions"


def varied(prompt, completion):
    """A reward that differs between nearly all completions."""
    return sum(map(ord, completion)) % 17 / 17


def watched(num_tokens=1500, steps=4, **changes):
    """The monitor of a run; raises where the run's fresh data break the identities."""
    module = {name: changes.pop(name) for name in list(changes) if name in OF_MODULE}
    given = dict(model=MODEL, groups_per_step=8, group_size=16, max_staleness=0, reward=varied)
    data = make_data(**(given | dict(sampling=rl.SamplingParams(max_tokens=9)) | changes))
    monitor = rl.FreshDataMonitor(num_tokens=num_tokens, on_error="stop")
    # single tokens may be as far off as they like: not what is tested here
    fit(make_module(model=MODEL, **module), data, steps, [rl.EngineCheck(bound=100.0), monitor])
    return monitor


class Other(rl.EmbeddedEngine):
    """An engine that samples otherwise than it is told, and says so to nobody."""

    def __init__(self, dtype: str = "float32", **other: float) -> None:
        super().__init__(dtype=dtype)
        self.other = other

    def submit(self, requests):
        super().submit(
            [dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, **self.other)) for r in requests]
        )


COMBINED = {"top_p": 0.9, "top_k": 9, "head": 3}
TRUNCATED = [{"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.05}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampling", "dtype"),
    [
        *((sampling, "float32") for sampling in [{}, *TRUNCATED, COMBINED]),
        *((sampling, "bfloat16") for sampling in [{}, {"top_p": 0.9}, COMBINED]),
    ],
    ids=str,
)
def test_fresh_data_keep_the_identities_under_every_sampling(sampling, dtype):
    params = rl.SamplingParams(max_tokens=9, **sampling)
    monitor = watched(dtype=dtype, engine=rl.EmbeddedEngine(dtype=dtype), sampling=params)
    assert monitor.num_checked_tokens >= 1500
    assert not monitor.broken


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("other", [{"top_p": 0.95}, {"top_k": 2}, {"temperature": 0.8}, {"temperature": 1.2}], ids=str)
def test_a_distribution_that_the_trainer_does_not_know_is_found(other, dtype):
    with pytest.raises(rl.EngineError, match=DIFFERENT):
        watched(dtype=dtype, engine=Other(dtype, **other), steps=8)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_a_soft_cap_that_one_side_drops_is_found(dtype, monkeypatch):
    forward = CausalPolicy.forward

    def capped(self, *inputs, **options):
        """What is left of the sampled token's log-probability where its logit is 3 tanh(x / 3) instead of x."""
        stats = forward(self, *inputs, **options)
        return dataclasses.replace(stats, logprobs=3 * torch.tanh(stats.logprobs / 3))

    monkeypatch.setattr(CausalPolicy, "forward", capped)
    with pytest.raises(rl.EngineError, match=DIFFERENT):
        watched(dtype=dtype, engine=rl.EmbeddedEngine(dtype=dtype), self_check=False, steps=8)


@pytest.mark.slow
def test_stale_data_are_watched_by_the_weights_that_sampled_them():
    lagging = dict(max_staleness=3, schedule="fixed_lag", num_tokens=100, steps=12)
    monitor = watched(engine=rl.EmbeddedEngine(in_flight_weight_updates=False), **lagging)
    assert monitor.num_checked_tokens >= 100
    with pytest.raises(rl.EngineError, match=DIFFERENT):
        watched(max_staleness=3, engine=Other(temperature=0.6), num_tokens=400, steps=40)


@pytest.mark.slow
def test_by_default_a_run_goes_on_and_its_summary_says_so(caplog):
    monitor = rl.FreshDataMonitor(num_tokens=1500)
    data = make_data(
        model=MODEL,
        groups_per_step=8,
        group_size=16,
        max_staleness=0,
        reward=varied,
        engine=Other(top_k=2),
        sampling=rl.SamplingParams(max_tokens=9),
    )
    summary = rl.RunSummary()
    trainer = fit(make_module(model=MODEL), data, 8, [monitor, summary])
    assert [DIFFERENT in record.getMessage() for record in caplog.records].count(True) == 1
    rows = [str(cell) for column in summary.table(trainer).columns for cell in column.cells]
    assert any("mean importance ratio" in row for row in rows)


def test_engines_that_record_no_support_refuse_truncated_sampling():
    class Plain(rl.EmbeddedEngine):
        records_heads = False

    with pytest.raises(ValueError, match=r"data\.sampling\.top_p=0\.9 with data\.engine=Plain"):
        make_data(engine=Plain(), sampling=rl.SamplingParams(top_p=0.9))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([0.0, 0.02, 0.1]))
def test_rounding_moves_no_identity_and_a_truncation_does(seed, noise):
    """Two softmaxes of logits that differ by noise, and one that is restricted to its likeliest tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(20_000, 30, generator=generator) * 2
    q = torch.log_softmax(logits, -1)
    p = torch.log_softmax(logits + noise * torch.randn(logits.shape, generator=generator), -1)
    bounds = SINGLE_PRECISION_BOUNDS if noise == 0 else HALF_PRECISION_BOUNDS

    def faults(sampler):
        tokens = torch.multinomial(sampler.exp(), 1, generator=generator)
        behavior = sampler.gather(1, tokens)[:, 0]
        return statistics(moments(p.gather(1, tokens)[:, 0] - behavior, behavior)).faults(bounds)

    # three standard errors are exceeded by chance, once in 370 samples of this size
    assert not faults(q) or not faults(q)
    likely = q.masked_fill(q < q.topk(5).values[:, -1:], -torch.inf).log_softmax(-1)
    assert any("mean importance ratio" in fault for fault in faults(likely))
    cooler = torch.log_softmax(logits / 0.8, -1)
    assert any("log-ratio" in fault for fault in faults(cooler))


def combinations(number, seed=0):
    """Random settings of sampling, loss, correction, packing, micro-batches, dtype and engine."""
    chance = random.Random(seed)
    for _ in range(number):
        yield {
            "sampling": dict(
                temperature=chance.choice([1.0, 1.0, 0.6, 1.3]),
                top_p=chance.choice([1.0, 1.0, 0.9]),
                top_k=chance.choice([0, 0, 4]),
                min_p=chance.choice([0.0, 0.0, 0.02]),
                head=chance.choice([None, None, 0, 3]),
                stop=chance.choice([(), ("9",)]),
            ),
            "loss": chance.choice(["PPOClip", "Reinforce", "GSPO", "CISPO", "TOPR", "ScoreCentering"]),
            "correction": chance.choice([*[None] * 6, "TokenTruncatedIS", "SequenceTruncatedIS", "IcePop"]),
            "packing": chance.choice([*[None] * 3, "SharedPromptPacking"]),
            "micro_batches_per_step": chance.choice([1, 2, 3]),
            "dtype": chance.choice(["float32", "float32", "bfloat16"]),
            "own_process": chance.random() < 0.2,
            "in_flight": chance.random() < 0.5,
            "max_staleness": chance.choice([0, 0, 2]),
        }


def try_combination(chosen, num_tokens=1500, steps=4):
    """`held`, or `refused` if the run was refused at the start by the name of a setting; else raises."""
    engine = rl.EmbeddedEngine(
        dtype=chosen["dtype"], own_process=chosen["own_process"], in_flight_weight_updates=chosen["in_flight"]
    )
    try:
        monitor = watched(
            num_tokens=num_tokens if chosen["max_staleness"] == 0 else num_tokens // 5,
            steps=steps if chosen["max_staleness"] == 0 else 2 * steps,
            sampling=rl.SamplingParams(max_tokens=9, **chosen["sampling"]),
            engine=engine,
            dtype=chosen["dtype"],
            max_staleness=chosen["max_staleness"],
            micro_batches_per_step=chosen["micro_batches_per_step"],
            **{name: getattr(rl, chosen[name])() for name in ("loss", "correction", "packing") if chosen[name]},
        )
    except ValueError as refused:
        if "model." in str(refused) or "data." in str(refused):
            return "refused"
        raise
    return "held" if monitor.num_checked_tokens else "too few fresh tokens"


@pytest.mark.slow
def test_the_identities_hold_in_random_combinations_or_the_run_is_refused():
    results = [try_combination(chosen) for chosen in combinations(9)]
    assert results.count("held") >= 4, results
    assert set(results) <= {"held", "refused", "too few fresh tokens"}
