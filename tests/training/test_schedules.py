"""Learning-rate schedules: torch's numbers, one source for rate and length, resumes, refusals."""

import csv
import functools
import logging
import re
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from flow import barrier_engine, fit, make_data, make_module, parameters
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from lit_async_rl import ConstantRate, Cosine, ESSLearningRate, FixedLag, Linear, OneCycle, StableDecay
from lit_async_rl.cli.app import main
from lit_async_rl.training.optimizer import bind_scheduler

ROOT = Path(__file__).parents[2]
QUICK = [
    *("--config", "configs/quickstart.yaml", "--trainer.enable_progress_bar", "false", "--trainer.callbacks", "[]"),
    *("--data.groups_per_step", "2", "--data.group_size", "2", "--data.validation.prompts", "null"),
]


def steps_of(make_scheduler, num_steps, peak=2.5e-4, more=0):
    """Rate and beta1 of each step."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler = make_scheduler(optimizer)
    seen = []
    for _ in range(num_steps + more):
        group = optimizer.param_groups[0]
        seen.append((group["lr"], group["betas"][0]))
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize("num_steps", [20, 37, 200, 1000])
def test_one_cycle_is_number_for_number_torch(num_steps):
    torchs = steps_of(lambda o: OneCycleLR(o, max_lr=2.5e-4, total_steps=num_steps, pct_start=0.1), num_steps)
    assert steps_of(lambda o: bind_scheduler(OneCycle(), o, None, num_steps), num_steps) == torchs


@pytest.mark.slow
def test_five_steps_of_training_are_bit_for_bit_those_of_torchs_one_cycle():
    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.should_stop = trainer.global_step >= 5

    results = []
    for scheduler in (OneCycle(), lambda o: OneCycleLR(o, max_lr=1e-3, total_steps=200, pct_start=0.1)):
        module = make_module(scheduler=scheduler)
        fit(module, make_data(admission=FixedLag(), engine=barrier_engine(), max_staleness=1), 200, [Stop()])
        results.append(parameters(module))
    assert torch.equal(*results)


@pytest.mark.parametrize(
    "schedule", [schedule(warmup=4) for schedule in (ConstantRate, Linear, Cosine, OneCycle, StableDecay)]
)
@pytest.mark.parametrize("num_steps", [1, 2, 4, 5, 40])
def test_rates_stay_between_zero_and_the_peak_and_reach_it(schedule, num_steps):
    rates = [rate for rate, _ in steps_of(lambda o: bind_scheduler(schedule, o, 1e-3, num_steps), num_steps, 1e-3, 3)]
    assert all(0 <= rate <= 1e-3 for rate in rates)
    if num_steps > 4:
        assert max(rates) == rates[3] == pytest.approx(1e-3)
        assert rates[:4] == sorted(rates[:4])
        assert rates[4:] == sorted(rates[4:], reverse=True)


def test_linear_and_cosine_end_at_their_final_share():
    linear = [rate for rate, _ in steps_of(lambda o: bind_scheduler(Linear(final=0.2), o, 1.0, 10), 10, 1.0)]
    assert linear == pytest.approx([1 - 0.08 * n for n in range(10)])
    assert Cosine(final=0.1).rate(1.0, 999, 1000) == pytest.approx(0.1, abs=1e-4)
    assert Cosine(warmup=0.5).rate(1.0, 24, 100) == pytest.approx(0.5)


def test_stable_decay_keeps_the_peak_until_its_last_part():
    rates = [rate for rate, _ in steps_of(lambda o: bind_scheduler(StableDecay(warmup=2), o, 1.0, 10), 10, 1.0)]
    assert rates == pytest.approx([0.5, *[1.0] * 7, 2 / 3, 1 / 3])
    assert StableDecay(decay=0).rate(1.0, 9, 10) == 1.0


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: ConstantRate(warmup=-1), "model.scheduler.warmup must be >= 0, got -1"),
        (lambda: Cosine(final=2.0), "model.scheduler.final must be in [0, 1], got 2.0"),
        (lambda: StableDecay(decay=2), "model.scheduler.decay must be in [0, 1], got 2"),
        (lambda: OneCycle(start=0.0), "model.scheduler.start must be in"),
    ],
)
def test_bad_settings_are_named(make, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        make()


class Rates(pl.Callback):
    def __init__(self):
        self.seen = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"][0]))


@pytest.mark.slow
@pytest.mark.parametrize("before", [OneCycle(), lambda o: OneCycleLR(o, max_lr=1e-3, total_steps=4)])
def test_a_resume_with_more_steps_and_another_rate_follows_the_schedule_of_its_own_settings(tmp_path, before):
    path, rates = str(tmp_path / "4.ckpt"), Rates()
    fit(make_module(scheduler=before), make_data(), 4).save_checkpoint(path)
    fit(make_module(scheduler=OneCycle(), learning_rate=1e-4), make_data(), 10, [rates], ckpt_path=path)
    whole = steps_of(lambda o: bind_scheduler(OneCycle(), o, None, 10), 10, 1e-4)
    assert rates.seen == whole[4:]


def test_betas_are_those_of_adamw_and_follow_the_rate_of_the_command_line():
    rates = Rates()
    fit(make_module(learning_rate=1e-4, betas=(0.8, 0.95)), make_data(), 2, [rates])
    assert rates.seen == [(1e-4, 0.8)] * 2
    with pytest.raises(ValueError, match=re.escape("model.betas[1] must be in [0, 1), got 1.0")):
        make_module(betas=(0.9, 1.0))


@pytest.mark.slow
def test_torch_schedulers_that_state_another_rate_or_length_are_refused(tmp_path):
    def one_cycle(max_lr, total_steps):
        return make_module(scheduler=lambda o: OneCycleLR(o, max_lr=max_lr, total_steps=total_steps))

    with pytest.raises(ValueError, match=re.escape("max_lr=0.002, but model.learning_rate=0.001")):
        fit(one_cycle(2e-3, 2), make_data(), 2)
    with pytest.raises(ValueError, match=re.escape("total_steps=3, but trainer.max_steps=2")):
        fit(one_cycle(1e-3, 3), make_data(), 2)
    with pytest.raises(ValueError, match=re.escape("trainer.max_steps must be set, got -1: model.scheduler=Cosine")):
        fit(make_module(scheduler=Cosine()), make_data(), -1, max_epochs=1)
    with pytest.raises(ValueError, match=re.escape("learning_rate=0.001, but model.optimizer=SGD has lr=0.5")):
        fit(make_module(learning_rate=1e-3, optimizer=lambda p: torch.optim.SGD(p, lr=0.5)), make_data(), 2)
    trainer = fit(one_cycle(1e-3, 2), make_data(), 2)
    trainer.save_checkpoint(tmp_path / "2.ckpt")
    with pytest.raises(
        ValueError, match=re.escape("max_steps=4, but the checkpoint's model.scheduler has total_steps=2")
    ):
        fit(one_cycle(1e-3, 4), make_data(), 4, ckpt_path=str(tmp_path / "2.ckpt"))
    rates = Rates()
    fit(make_module(scheduler=lambda o: StepLR(o, 2, 0.5)), make_data(), 4, [rates])
    assert [rate for rate, _ in rates.seen] == [1e-3, 1e-3, 5e-4, 5e-4]


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the command line; gives the logged rates."""
    monkeypatch.chdir(ROOT)

    def run(*flags):
        folder = tmp_path / "runs"
        main([*QUICK, "--trainer.logger.init_args.save_dir", str(folder), *flags])
        newest = max(folder.rglob("metrics.csv"), key=lambda file: file.stat().st_mtime)
        with newest.open() as rows:
            return [float(row["optim/lr"]) for row in csv.DictReader(rows) if row["optim/lr"]]

    yield run
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@pytest.mark.slow
def test_the_flag_of_the_first_example_sets_the_rate_and_max_steps_the_length(run):
    rates = run("--model.learning_rate", "1e-4", "--trainer.max_steps", "10")
    assert max(rates) == pytest.approx(1e-4)
    assert len(rates) == 10
    assert rates[-1] < 0.5e-4


@pytest.mark.slow
def test_a_contradiction_is_one_line_before_anything_runs(run):
    torchs = '{"class_path": "OneCycleLR", "init_args": {"max_lr": 2.5e-4, "total_steps": 10}}'
    with pytest.raises(SystemExit) as error:
        run("--model.scheduler", torchs, "--trainer.max_steps", "10", "--model.learning_rate", "1e-4")
    assert "max_lr=0.00025, but model.learning_rate=0.0001" in str(error.value.code)
    assert "\n" not in str(error.value.code).strip()


def test_the_logged_rate_is_that_of_the_schedule_also_where_a_callback_scales_the_step():
    logged = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            logged.append([float(trainer.callback_metrics[name]) for name in ("optim/lr", "ess/lr_scale")])

    data = make_data(schedule="fixed_lag", max_staleness=2, groups_per_step=2)
    fit(make_module(), data, 5, [ESSLearningRate(), Watch()])
    rates, scales = zip(*logged, strict=True)
    assert min(scales) < 0.99
    assert rates == pytest.approx([1e-3] * 5)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, functools.partial(torch.optim.SGD, momentum=0.5)])
def test_a_class_that_was_given_no_rate_takes_that_of_the_module(optimizer):
    trainer = fit(make_module(learning_rate=3e-4, optimizer=optimizer), make_data(), 1)
    assert trainer.optimizers[0].defaults["lr"] == 3e-4
    own = functools.partial(torch.optim.Adam, lr=1e-2)
    with pytest.raises(ValueError, match=re.escape("learning_rate=0.0003, but model.optimizer=Adam has lr=0.01")):
        fit(make_module(learning_rate=3e-4, optimizer=own), make_data(), 1)
    assert fit(make_module(learning_rate=None, optimizer=own), make_data(), 1).optimizers[0].defaults["lr"] == 1e-2
