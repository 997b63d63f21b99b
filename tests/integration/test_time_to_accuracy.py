"""Benchmark of time to accuracy: its statistics on made-up curves, its suites, and a report of them."""

import importlib
import json
import math
import multiprocessing
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from processes import wait_for_the_end_of

from benchmarks.time_to_accuracy import trl_cell
from benchmarks.time_to_accuracy.documents import CURVES, algorithm, compared_in, write_documents
from benchmarks.time_to_accuracy.report import with_interval, write_report
from benchmarks.time_to_accuracy.statistics import difference, final, level_at, speedup, summarize, time_to
from benchmarks.time_to_accuracy.suite import CONFIGS, Cell, load_suite
from lit_async_rl import asset
from lit_async_rl.cli.app import AsyncRLCLI
from lit_async_rl.problem import Prompt
from lit_async_rl.rewards import last_number

ROOT = Path(__file__).parents[2]
QUIET = ["--data.validation.prompts", "null", "--trainer.logger", "false", "--defaults.checkpoint", "null"]


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def curve(step_s, final_accuracy=0.9, rise=20, num_steps=100, system="synchronous", seed=0):
    """From 0.3, in a straight line of `rise` steps, to the final accuracy."""
    steps = np.arange(0, num_steps + 1, 2)
    accuracy = 0.3 + (final_accuracy - 0.3) * np.minimum(1, steps / rise)
    once = dict.fromkeys(("wait_share", "idle_share", "publish_share", "load", "cpu_s"), 0.1)
    once |= dict(staleness=0.0, staleness_max=0.0)
    return pd.DataFrame(dict(step=steps, wall_s=steps * step_s, tokens=steps * 10, accuracy=accuracy)).assign(
        workload="tools_0.4", system=system, seed=seed, **once
    )


def test_the_time_to_a_level_is_where_the_smoothed_curve_crosses_it():
    one = curve(2.0)
    assert time_to(one, 0.6) == pytest.approx(2.0 * 10)
    assert time_to(one, 0.6, "step") == pytest.approx(10)
    assert time_to(one, 0.3) == 0.0
    assert math.isinf(time_to(one, 0.95))


def test_a_level_that_is_lost_again_was_not_reached_before():
    one = curve(1.0)
    one.loc[one["step"].between(50, 60), "accuracy"] = 0.5
    assert time_to(one, 0.85) > 60
    one.loc[one["step"] >= 50, "accuracy"] = 0.5
    assert math.isinf(time_to(one, 0.85))


def test_levels_are_shares_of_the_rise_and_the_end_is_a_mean():
    assert level_at([curve(1.0), curve(1.0, 0.8)], 0.5) == pytest.approx(0.3 + 0.5 * 0.55)
    assert final(curve(1.0)) == pytest.approx(0.9)


def test_the_interval_of_a_ratio_covers_the_truth_and_shrinks_with_less_noise():
    random = np.random.default_rng(0)
    hits, widths = 0, {}
    for noise in (0.3, 0.05):
        for n in range(60):
            sync, other = (np.exp(random.normal(math.log(m), noise, 9)) for m in (60.0, 10.0))
            value, low, high = speedup(sync, other, seed=n)
            assert low <= value <= high
            hits += low <= 6.0 <= high
            widths[noise] = high - low
    assert hits / 120 > 0.85
    assert widths[0.05] < widths[0.3]


def test_a_system_that_does_not_get_there_is_worth_nothing_and_without_a_reference_there_is_no_ratio():
    assert speedup([10.0, 12.0, 11.0], [math.inf] * 3) == (0.0, 0.0, 0.0)
    assert math.isnan(speedup([math.inf] * 3, [3.0] * 3)[0])
    value, low, high = difference([0.9, 0.91], [0.92, 0.93])
    assert value == pytest.approx(0.02)
    assert low <= value <= high


def test_the_report_says_what_the_curves_say(tmp_path):
    runs = [curve(4.0, seed=seed) for seed in range(3)]
    runs += [curve(0.5, 0.92, rise=25, system="vcpo_8", seed=seed) for seed in range(3)]
    runs += [curve(0.5, 0.5, system="plain_8", seed=seed) for seed in range(3)]
    table = pd.concat(runs, ignore_index=True)
    rows = summarize(table, "tools_0.4", "synchronous").set_index("system")
    assert rows.loc["synchronous", "time_speedup_0.8"] == (1.0, 1.0, 1.0)
    value, low, high = rows.loc["vcpo_8", "time_speedup_0.8"]
    assert 6 < value < 8
    assert low == high == value
    assert rows.loc["plain_8", "time_speedup_0.8"][0] == 0
    assert rows.loc["vcpo_8", "difference"][0] == pytest.approx(0.02)
    said = write_report(table, tmp_path, "the command")
    assert "| vcpo_8 | 3 | 0.50 |" in said
    assert "the command" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "pictures/tools_0.4.png").stat().st_size > 1000


def test_the_documentation_shows_what_the_curves_say(tmp_path):
    runs = [curve(4.0, seed=seed) for seed in range(2)]
    runs += [curve(0.5, 0.92, rise=25, system="redundant_8", seed=seed) for seed in range(2)]
    runs = [run.assign(workload="tools_1.6") for run in runs]
    runs += [curve(0.5, 0.5, system="plain_8", seed=0)]  # of another workload, without a reference
    for folder in ("assets", "measurements"):
        (tmp_path / "docs" / folder).mkdir(parents=True)
    write_documents(pd.concat(runs, ignore_index=True), "tools", "the command", "abc", "the machine", tmp_path)
    found = json.loads((tmp_path / "docs/measurements/time_to_accuracy.json").read_text())
    assert 6 < found["value"] < 8
    assert found["interval"] == [found["value"]] * 2
    assert [row[1] for row in found["table"]["rows"]] == [
        "synchronous",
        "recipe, 4 of 20 groups redundant, `max_staleness` 8",
    ]
    assert {len(row) for row in found["table"]["rows"]} == {len(found["table"]["columns"])}
    assert "against synchronous" in found["unit"]
    trained = {row[1]: row[2] for row in found["table"]["rows"]}
    assert trained["synchronous"] == "PPO-clip GRPO, constant rate, 100 steps"
    assert {one["system"]["trains"] for one in found["comparisons"]} == {"VCPO, linear rate, 200 steps"}
    assert {one["against"]["name"] for one in found["comparisons"]} == {"synchronous"}
    assert (tmp_path / "docs/assets/time_to_accuracy_curves.png").stat().st_size > 1000
    assert len(pd.read_parquet(tmp_path / CURVES / "time_to_accuracy.parquet")) == sum(map(len, runs))


def test_a_system_with_spare_prompts_is_compared_with_a_synchronous_one_that_has_them_too():
    runs = [curve(4.0, seed=seed) for seed in range(2)]
    runs += [curve(2.0, system="synchronous_redundant", seed=seed) for seed in range(2)]
    runs += [curve(0.5, system="redundant_8", seed=seed) for seed in range(2)]
    found = compared_in(pd.concat(runs, ignore_index=True), "tools_0.4")
    ratios = {
        (one["system"]["name"], one["against"]["name"]): (one["value"], one["interval"])
        for one in found
        if one["share"] == 0.8
    }
    assert ratios == {
        ("synchronous, 4 of 20 groups redundant", "synchronous"): (2.0, [2.0, 2.0]),
        ("recipe, 4 of 20 groups redundant, `max_staleness` 8", "synchronous"): (8.0, [8.0, 8.0]),
        ("recipe, 4 of 20 groups redundant, `max_staleness` 8", "synchronous, 4 of 20 groups redundant"): (
            4.0,
            [4.0, 4.0],
        ),
    }


@pytest.mark.parametrize(
    ("workload", "system", "said"),
    [
        ("tools_0.4", "synchronous_recipe", "VCPO, constant rate, 100 steps"),
        ("smollm2_2s", "synchronous_recipe_linear_twice", "VCPO, linear rate, 80 steps"),
        ("smollm2_8s", "plain_8", "PPO-clip GRPO, linear rate, 120 steps"),
        ("quickstart", "quickstart_sync", "VCPO, stable and decaying rate, 225 steps"),
        ("quickstart", "quickstart_trl", "PPO-clip GRPO, one-cycle rate, 225 steps"),
    ],
)
def test_what_a_system_trains_is_what_its_settings_say(workload, system, said):
    assert algorithm(workload, system) == said
    if "trl" in system:
        return
    name, rate, _ = said.split(", ")
    small = ["--model.model", asset("sort_policy")] if workload.startswith("smollm2") else []
    adapters = ["--model.lora.target_modules", r".*layers\.0\..*_proj"] if small else []
    module = AsyncRLCLI([*Cell(workload, system, 0).arguments(), *QUIET, *small, *adapters]).model
    assert (module.objective.baseline is not None) == (name == "VCPO")
    schedules = {"constant rate": "ConstantRate", "linear rate": "Linear", "stable and decaying rate": "StableDecay"}
    assert type(module.scheduler).__name__ == schedules[rate]


@pytest.mark.parametrize("name", [path.stem for path in (ROOT / CONFIGS / "suites").glob("*.yaml")])
def test_every_suite_loads_and_its_files_exist(name):
    for cell in load_suite(name).cells:
        assert Cell.of(cell.folder) == cell
        assert all(Path(word).is_file() for word in cell.arguments() if word.endswith(".yaml"))
        assert "SEED" not in " ".join(cell.arguments())


def test_wrong_names_are_named(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"'nightly': no such suite.*smoke"):
        load_suite("nightly")
    monkeypatch.setattr("benchmarks.time_to_accuracy.suite.CONFIGS", tmp_path)
    (tmp_path / "suites").mkdir()
    (tmp_path / "workloads.yaml").write_text("a: {configs: [x.yaml], num_steps: 1, snapshot_steps: 1}")
    (tmp_path / "systems.yaml").write_text("b: {}")
    (tmp_path / "suites/odd.yaml").write_text("blocks: [{workload: a, systems: [c], seeds: [0]}]")
    with pytest.raises(ValueError, match=r"unknown \['c'\]; there are \['b'\]"):
        load_suite("odd")


@pytest.mark.slow
def test_trl_is_given_the_settings_of_the_synchronous_run():
    cell = Cell("quickstart", "quickstart_trl", 3)
    assert cell.arguments() == Cell("quickstart", "quickstart_plain_sync", 3).arguments()
    cli = AsyncRLCLI([*cell.arguments(), *QUIET])
    found = trl_cell.settings_of(cli, 9, 3)
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2.5e-4, 225, pct_start=0.1)
    for rate, momentum in zip(found["rates"], found["momenta"], strict=True):
        assert schedule.get_last_lr()[0] == pytest.approx(rate)
        assert optimizer.param_groups[0]["betas"][0] == pytest.approx(momentum)
        optimizer.step()
        if schedule.last_epoch < 224:
            schedule.step()
    assert (found["groups_per_step"], found["group_size"], found["max_tokens"]) == (32, 8, 12)
    assert (found["clip"], found["max_grad_norm"], found["seed"]) == ([0.2, 0.28], 0.5, 3)
    assert all(sorted(text[:-1]) == list(right) for text, right in zip(found["prompts"], found["answers"], strict=True))


@pytest.mark.slow
def test_trl_has_the_synchronous_runs_batch_where_that_is_split_by_length():
    cell = Cell("lengths", "lengths_trl", 1)
    assert cell.arguments() == Cell("lengths", "synchronous", 1).arguments()
    cli = AsyncRLCLI([*cell.arguments(), *QUIET, "--model.model", asset("sort_policy")])  # its own is made by hand
    found = trl_cell.settings_of(cli, 4, 1)
    assert (found["groups_per_step"], found["group_size"], found["max_tokens"]) == (32, 4, 123)
    assert (found["momenta"], set(found["rates"]), len(found["rates"])) == (None, {3e-5}, 100)
    assert max(map(len, found["prompts"])) == 121


def test_trl_is_given_the_chats_adapters_and_slow_rewards_of_a_language_model():
    cell = Cell("smollm2_2s", "smollm2_trl", 1)
    assert cell.arguments() == Cell("smollm2_2s", "synchronous", 1).arguments()
    small = ["--model.model", asset("sort_policy"), "--model.lora.target_modules", r".*layers\.0\..*_proj"]
    found = trl_cell.settings_of(AsyncRLCLI([*cell.arguments(), *QUIET, *small]), 4, 1)
    (message,) = found["prompts"][0]
    assert message["role"] == "user"
    assert message["content"].startswith("What is")
    assert found["lora"]["r"] == 16
    assert (found["bf16"], found["use_cpu"], found["reward"]) == (True, True, "last_number")
    assert found["latency"] == {"mu": pytest.approx(math.log(2) - 0.5), "sigma": 1.0, "seed": 1}
    assert set(found["rates"]) == {4e-4}


def test_trl_grades_as_this_trainer_does_and_waits_for_the_slowest(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl_trainer", SimpleNamespace(TimedTrainer=object, make_trainer=None))
    worker = importlib.import_module("benchmarks.time_to_accuracy.trl_worker")
    monkeypatch.delitem(sys.modules, "benchmarks.time_to_accuracy.trl_worker")
    slept = []
    monkeypatch.setattr(worker.time, "sleep", slept.append)
    texts = ["5 + 3 = 8", "8.", "the answer is 1,008", "-8", "5-8", "8.0", "none", "8 apples, 9 pears", ""]
    grade = worker.LastNumber({"mu": 0.0, "sigma": 1.0, "seed": 3})
    found = grade([[{"role": "assistant", "content": text}] for text in texts], ["8"] * len(texts))
    assert found == [last_number(Prompt(text="?", answer="8"), text) for text in texts]
    chance = random.Random(3)
    assert slept == [max(chance.lognormvariate(0.0, 1.0) for _ in texts)]


def test_trl_refuses_what_it_cannot_do_and_names_a_missing_environment(tmp_path, monkeypatch):
    recipe = AsyncRLCLI([*Cell("quickstart", "quickstart_sync", 0).arguments(), *QUIET])
    with pytest.raises(ValueError, match="PPOClip, TokenMean, exact_match"):
        trl_cell.settings_of(recipe, 9, 0)
    monkeypatch.setattr(trl_cell, "PYTHON", str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError, match="TRL_PYTHON="):
        trl_cell.run(recipe, 9, 0, tmp_path)


def test_trl_ends_with_its_cell_whatever_ends_that(tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text(
        f"#!/bin/sh\necho $$ > {tmp_path}/pid.part\nmv {tmp_path}/pid.part {tmp_path}/pid\nexec sleep 100"
    )
    program.chmod(0o755)
    monkeypatch.setattr(trl_cell, "PYTHON", str(program))
    monkeypatch.setattr(trl_cell, "settings_of", lambda *_: {})
    cell = multiprocessing.get_context("fork").Process(target=trl_cell.run, args=(None, 1, 0, tmp_path))
    cell.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    cell.kill()
    wait_for_the_end_of(int((tmp_path / "pid").read_text()))


def test_trls_steps_have_the_names_of_this_trainers_metrics():
    steps = dict(step=[1, 2], wall_s=[2.0, 3.0], cpu_s=[3.0, 5.0], tokens=[7, 9], generation_s=[0.5, 1.0])
    found = trl_cell.as_metrics(pd.DataFrame(steps | dict(reward_s=[0.0, 0.25])))
    assert list(found["perf/step_s"]) == [2.0, 1.0]
    assert list(found["perf/rollout_wait_s"]) == [0.5, 0.75]  # a step waits for rewards, too
    assert list(found["perf/engine_idle_share"]) == [0.75, 0.5]


def test_one_run_has_no_interval():
    for found in (speedup([10.0, 12.0], [5.0]), difference([0.9, 0.91], [0.95])):
        assert math.isfinite(found[0])
        assert all(map(math.isnan, found[1:]))
    assert with_interval(speedup([10.0, 12.0], [5.0])) == "2.20"
