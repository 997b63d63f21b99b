"""`rl.fit` chooses the learning rate that fits the staleness bound where none is given, and says so."""

from functools import partial

import numpy as np
import pytest
import torch

import lit_async_rl as rl
from lit_async_rl.api.run import with_rate
from lit_async_rl.training.optimizer import DEFAULT_LEARNING_RATE

VCPO = dict(loss=rl.Reinforce(), correction=rl.SequenceTruncatedIS(cap=8.0), baseline=rl.OptimalBaseline())


@pytest.mark.parametrize(
    ("settings", "factor", "says"),
    [
        ({"max_staleness": 16}, 0.3, "0.3 times the default fits max_staleness=16 with importance weights or a clip"),
        ({"max_staleness": 8}, 0.5, "0.5 times the default fits max_staleness=8"),
        ({"max_staleness": 8, "loss": rl.Reinforce()}, 0.3, "max_staleness=8 with nothing that corrects stale data"),
        ({"max_staleness": 16, "scheduler": rl.Linear()}, 0.3, "0.3 times the default"),
        ({"max_staleness": 1, "weight_sync_steps": 5}, 4 / 9, "max_staleness=1, weight_sync_steps=5 with importance"),
        ({"max_staleness": np.int64(8)}, 0.5, "0.5 times the default fits max_staleness=8 with"),
        ({}, 1.0, "the default also fits max_staleness=4 with importance weights or a clip"),
        ({"max_staleness": 64, **VCPO}, 1.0, "the default also fits max_staleness=64 with the optimal baseline"),
        ({"max_staleness": 0}, 1.0, "the default also fits max_staleness=0"),
        ({"max_staleness": 64, "loss": rl.OPMD()}, 1.0, "was not measured for OPMD"),
        ({"max_staleness": 16, "lora": {"rank": 4}}, 0.3, "adapters usually learn at 1e-5 to 1e-4"),
    ],
)
def test_the_rate_is_the_default_times_what_fits_the_bound(settings, factor, says):
    found, line = with_rate(settings)
    rate = factor * DEFAULT_LEARNING_RATE
    assert says in line
    assert line.startswith(f"learning_rate={rate:.3g}, since none was given")
    assert line.endswith("fit(..., learning_rate=...) sets another")
    assert found == (settings | {"learning_rate": pytest.approx(rate)} if factor < 1 else settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"learning_rate": 1e-4},
        {"optimizer": partial(torch.optim.SGD, lr=0.1)},
        {"scheduler": partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1e-3, total_steps=10)},
        {"max_staleness": "sixteen"},  # refused by its own name afterwards
        {"max_staleness": None},
        {"max_staleness": -1},
        {"weight_sync_steps": 0},
    ],
)
def test_nothing_is_chosen_where_a_rate_is_given_or_a_bound_is_wrong(settings):
    given = {"max_staleness": 16} | settings
    assert with_rate(given) == (given, "")


ROWS = [{"prompt": f"{n}=", "answer": str(n)} for n in range(10, 30)]


@pytest.mark.parametrize(
    ("settings", "rate", "lines"),
    [
        ({"recipe": None, "max_staleness": 16}, 0.3 * DEFAULT_LEARNING_RATE, 1),
        ({}, DEFAULT_LEARNING_RATE, 1),
        ({"learning_rate": 2e-6, "max_staleness": 16, "recipe": None}, 2e-6, 0),
    ],
)
def test_a_run_trains_at_it_and_says_it_once(settings, rate, lines, capsys):
    trainer = rl.fit(
        rl.asset("small_sort_policy"), ROWS, lambda prompt, completion: float(len(completion) % 2),
        max_steps=1, groups_per_step=2, group_size=2, sampling={"max_tokens": 4}, logger=False,
        accelerator="cpu", devices=1, enable_progress_bar=False, enable_checkpointing=False, **settings,
    )  # fmt: skip
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(rate)
    assert capsys.readouterr().out.count("since none was given") == lines
