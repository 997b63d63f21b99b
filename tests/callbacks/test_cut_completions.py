"""Completions that are cut at `max_tokens`: a share in training, validation and evaluation, and one line."""

import logging

import pytest
from flow import fit, make_data, make_module

from lit_async_rl import Evaluation, OverlongFilter, RolloutMonitor, SamplingParams, SortDigits

HELD_OUT = SortDigits(8, size=4, seed=1)


def shares_of(caplog, max_tokens, **changes):
    """The last shares of a run that validates and evaluates, and the lines about completions that are cut."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.1)  # seldom longer than the sorted digits
    data = make_data(sampling=sampling, max_staleness=0, val_prompts=HELD_OUT, **changes)
    evaluation = Evaluation({"held": HELD_OUT}, every_n_steps=1, max_block_s=60.0)
    settings = dict(val_check_interval=1, check_val_every_n_epoch=None)
    with caplog.at_level(logging.WARNING, logger="lit_async_rl"):
        trainer = fit(make_module(), data, 2, callbacks=[RolloutMonitor(), evaluation], **settings)
    lines = [record.getMessage() for record in caplog.records if "were cut off at" in record.getMessage()]
    (of_all, of_one) = (evaluation.results[-1].metrics[name] for name in ("cut_share", "held/cut_share"))
    shares = [float(trainer.callback_metrics[f"{name}/cut_share"]) for name in ("rollout", "val")]
    return [*shares, of_all, of_one], lines


@pytest.mark.parametrize("filters", [None, [OverlongFilter()]])
def test_completions_that_are_all_cut_are_said_once_for_each_limit(caplog, filters):
    shares, lines = shares_of(caplog, max_tokens=4, filters=filters)
    assert shares == [1.0] * 4
    assert len(lines) == 2
    assert all(
        "100 % of the completions were cut off at the limit data.sampling.max_tokens=4" in line for line in lines
    )


def test_completions_that_end_by_themselves_are_not(caplog):
    shares, lines = shares_of(caplog, max_tokens=16)
    assert shares == [0.0] * 4
    assert not lines
