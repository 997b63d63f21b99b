"""The verdict of a run started from the command line: its advice is accepted as arguments, and makes the run faster.

Engines, tools and rewards sleep, so that what limits a run does not depend on the machine.
"""

import csv
import re
from dataclasses import replace
from pathlib import Path

import pytest
from flow import make_data, make_module

from lit_async_rl import Bounded, EpisodeEngine, FixedLag
from lit_async_rl.callbacks.monitors import bottleneck_verdict as advice
from lit_async_rl.callbacks.monitors.bottleneck_verdict import StepLoad, adjustable_settings
from lit_async_rl.cli.app import AsyncRLCLI, main
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.scheduling.bottleneck import Setting
from lit_async_rl.tasks.calculator import Calculator

ROOT = Path(__file__).parents[2]
SMALL = ["--config", "configs/quickstart.yaml", "--model.model", "lit_async_rl/assets/small_sort_policy"]
SMALL += ["--data.validation.prompts", "null", "--data.groups_per_step", "4", "--data.group_size", "2"]
SMALL += ["--trainer.max_steps", "6", "--trainer.val_check_interval", "null", "--trainer.enable_progress_bar", "false"]
SIMULATED = ["--data.engine", "lit_async_rl.simulation.SimulatedEngine", "--data.engine.num_slots", "8"]
LOG_NORMAL = ["--data.engine.latency", "lit_async_rl.simulation.LogNormal", "--data.engine.latency.mean_s"]
CONSTANT = ["--data.engine.latency", "lit_async_rl.simulation.Constant", "--data.engine.latency.mean_s"]
PROVOKED = {
    "staleness bound": [*SIMULATED, *LOG_NORMAL, "{0.15}", "--data.max_staleness", "0"],
    "async ratio": [
        *(*SIMULATED, *LOG_NORMAL, "{0.2}", "--data.max_staleness", "4"),
        *("--data.admission", "Bounded", "--data.admission.async_ratio", "0"),
    ],
    "slots": [*SIMULATED, *CONSTANT, "{0.15}", "--data.engine.num_slots", "2"],
    "reward": [*SIMULATED, *CONSTANT, "0.001", "--data.reward", "hostile_rewards.sleeps_{30}_ms"],
    "weight sync": [*SIMULATED, *CONSTANT, "0.001", "--data.engine.load_s", "{0.3}"],
}
NAMES = {
    "staleness bound": "data.max_staleness",
    "async ratio": "data.admission.async_ratio",
    "slots": "data.engine.num_slots",
    "reward": "data.scoring.workers",
    "weight sync": "data.weight_sync_steps",
}


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def train(folder, arguments):
    """Seconds of the optimizer steps after the first."""
    main([*SMALL, *arguments, "--trainer.logger.init_args.save_dir", str(folder)])
    with (folder / "quickstart/version_0/metrics.csv").open() as file:
        return sum(float(row["perf/step_s"]) for row in list(csv.DictReader(file))[1:] if row["perf/step_s"])


def some(kind):
    """Each is two runs or more; `make test-slow` has two of them."""
    return pytest.param(kind, marks=pytest.mark.slow if kind in ("slots", "reward") else pytest.mark.sweep)


@pytest.mark.parametrize("kind", map(some, PROVOKED))
def test_advice_followed_word_for_word_makes_the_run_faster(kind, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(advice, "MIN_STEPS_FOR_VERDICT", 0)
    for times in (1, 8):  # seconds of sleep that a busy machine's training does not exceed
        provoked = [
            re.sub(r"{(.*)}", lambda s, times=times: f"{times * float(s[1]):g}", word) for word in PROVOKED[kind]
        ]
        before = train(tmp_path / f"before{times}", provoked)
        verdict = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("whole run"))
        change = re.search(r"change (\S+) from (\S+) to ([^\s.;]+)", verdict)
        if change is None or change[1] != NAMES[kind]:
            continue
        after = train(tmp_path / f"after{times}", [*provoked, f"--{change[1]}", change[3]])
        if after < before:
            return
    pytest.fail(verdict)


def every_setting(monkeypatch) -> list[tuple[str, Setting]]:
    """All settings that a verdict can name, with the configuration of their run."""
    monkeypatch.setattr(advice, "num_cores", lambda: 64)
    module, checkpointed = make_module(), make_module(gradient_checkpointing=True)
    episodes = EpisodeEngine(EmbeddedEngine(num_slots=2), Calculator())
    loads = [
        dict(num_tokens=95, num_positions=100),
        dict(num_tokens=50, num_positions=100),
        dict(num_tokens=80, num_positions=100, num_unfinished=1000, min_queued=16),
    ]
    datas = [
        ("quickstart", make_data(max_staleness=6)),
        ("quickstart", make_data(micro_batches_per_step=2)),
        ("quickstart", make_data(admission=FixedLag())),
        ("quickstart", make_data(admission=Bounded(async_ratio=1.0))),
        ("calculator", make_data(engine=episodes, reward=None)),
    ]
    found = []
    for config, data in datas:
        for load in loads:
            for one in (module, checkpointed):
                settings = adjustable_settings(data, one, StepLoad(num_steps=1, **load))
                found += [(config, setting) for setting in vars(settings).values() if setting is not None]
    return found


@pytest.mark.slow
def test_the_command_line_accepts_every_setting_that_a_verdict_names(monkeypatch):
    found = {(config, setting.name): setting for config, setting in every_setting(monkeypatch)}
    assert {name.rpartition(".")[2] for _, name in found} == {
        *("num_slots", "num_threads", "micro_batches_per_step", "gradient_checkpointing", "workers"),
        *("weight_sync_steps", "admission", "max_staleness", "async_ratio"),
    }
    for config in ("quickstart", "calculator"):
        arguments = [part for (where, _), s in found.items() if where == config for part in s.arguments]
        arguments += ["--data.max_staleness", "8"]  # advices of different runs: their bounds would not go together
        cli = AsyncRLCLI(["--config", f"configs/{config}.yaml", *arguments])  # one start for all: each must be accepted
        engine = cli.datamodule.engine
        slots = (engine.engine if isinstance(engine, EpisodeEngine) else engine).num_slots
        assert slots == next(s.suggested for (c, n), s in found.items() if c == config and n.endswith("num_slots"))


@pytest.mark.slow
def test_settings_of_the_default_engine_are_named_with_the_engine():
    setting = adjustable_settings(make_data(), make_module(), StepLoad(num_steps=1, num_unfinished=1000)).engine
    assert setting is not None
    assert str(setting).endswith("(--data.engine EmbeddedEngine --data.engine.num_slots 128)")
    data = make_data(admission=FixedLag())
    setting = adjustable_settings(data, make_module(), StepLoad(num_steps=1, num_unfinished=1000)).engine
    arguments = ["--data.admission", "FixedLag", *setting.arguments]
    engine = AsyncRLCLI(["--config", "configs/quickstart.yaml", *arguments]).datamodule.engine
    assert (engine.num_slots, engine.in_flight_weight_updates) == (128, False)


def test_no_more_workers_for_a_reward_that_computes():
    load = StepLoad(num_steps=1, num_tokens=1, num_positions=1)
    assert adjustable_settings(make_data(), make_module(), load).reward is not None
    assert adjustable_settings(make_data(), make_module(), replace(load, scoring_cpu_share=0.9)).reward is None


def test_a_containers_quota_counts_as_its_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(advice.os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    for text, cores in (("200000 100000\n", 2), ("50000 100000\n", 1), ("max 100000\n", 64), ("", 64)):
        monkeypatch.setattr(advice, "CPU_QUOTA", tmp_path / "cpu.max")
        (tmp_path / "cpu.max").write_text(text)
        assert advice.num_cores() == cores
