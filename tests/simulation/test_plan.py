"""Predicted splits of devices: against an optimum computed otherwise, and in closed loops with `ReplicaScaling`."""

import inspect
import itertools
from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import lit_async_rl as rl
from benchmarks.common.simulated_run import SimulatedRun
from lit_async_rl.lab import plan as command
from lit_async_rl.ray.replica_scaling import wanted_replicas
from lit_async_rl.simulation.latency import Constant, CutLogNormal
from lit_async_rl.simulation.plan import (
    DEVICES,
    TOLERANCE,
    ModelSize,
    StepCost,
    cost_by_formula,
    fastest,
    lowest_bound,
    predict,
    splits,
)

EVEN = StepCost(train_s=8.0, sample_s=1.0, num_slots=8, groups_per_step=16, group_size=4, spread=0.0, efficiency=1.0)
TAILS = replace(EVEN, spread=1.0)


@given(st.floats(0.1, 2.0), st.floats(1.1, 20.0))
def test_the_cut_keeps_the_mean(sigma, longest):
    latency = CutLogNormal(3.0, sigma, longest_s=3.0 * longest)
    assert latency._mean(latency._mu) == pytest.approx(3.0, rel=1e-6)


@pytest.mark.parametrize(("trainer_devices", "replicas", "bound"), [(1, 1, 1), (4, 2, 2), (2, 8, 3)])
def test_a_prediction_is_the_optimum_of_equal_latencies(trainer_devices, replicas, bound):
    found = predict(EVEN, trainer_devices=trainer_devices, replicas=replicas, max_staleness=bound)
    optimum = SimulatedRun(
        latency=Constant(1.0),
        max_staleness=bound,
        train_s=8.0 / trainer_devices,
        num_slots=8 * replicas,
        groups_per_step=16,
        group_size=4,
        num_steps=40,
    ).ideal()
    assert found.step_s == pytest.approx(optimum.wall_s / 32, rel=0.02)
    assert found.steps.wait_s / found.steps.wall_s == pytest.approx(optimum.wait_s / optimum.wall_s, abs=0.03)
    assert found.staleness <= bound


def test_the_fastest_split_is_where_both_sides_take_as_long():
    found = splits(EVEN, devices=16, max_staleness=2)  # training 8 / n, sampling 8 / (16 - n)
    assert fastest(found).trainer_devices == 8
    assert fastest(found).step_s == pytest.approx(1.0, rel=0.05)
    whole = splits(EVEN, devices=16, replica_devices=4, max_staleness=2)
    assert all(4 * one.replicas + one.trainer_devices <= 16 for one in whole)


def test_no_more_devices_train_than_there_are_groups():
    found = splits(replace(EVEN, groups_per_step=2, train_s=1000.0), devices=64, max_staleness=2)
    assert max(one.trainer_devices for one in found) == 2


def test_tails_need_a_higher_bound():
    even = lowest_bound(EVEN, trainer_devices=4, replicas=4)
    tails = lowest_bound(TAILS, trainer_devices=4, replicas=4)
    assert even.max_staleness <= 2 < tails.max_staleness


@pytest.mark.parametrize("train_s", [16.0, 4.0, 1.5])
def test_the_scaling_of_replicas_reaches_the_number_that_is_predicted_and_keeps_it(train_s):
    cost = replace(TAILS, train_s=train_s, spread=0.5, longest=3.0)
    step_s = [predict(cost, trainer_devices=1, replicas=n, max_staleness=4).step_s for n in range(1, 17)]
    fewest = 1 + next(n for n in range(16) if step_s[n] <= (1 + TOLERANCE) * step_s[-1])
    replicas = 1
    history = []
    for _ in range(16):
        window = predict(cost, trainer_devices=1, replicas=replicas, max_staleness=4)
        replicas = wanted_replicas(window.steps, replicas, 1, 16)
        history.append(replicas)
    assert abs(history[-1] - fewest) <= 1, (history, fewest)
    steady = history[-10:]
    assert sum(before != after for before, after in itertools.pairwise(steady)) <= 1, history


def test_larger_models_and_longer_completions_cost_more():
    def cost(parameters=7 * 10**9, completion_tokens=500) -> StepCost:
        return cost_by_formula(
            ModelSize(parameters=parameters, cache_bytes=57344),
            DEVICES["h100"],
            prompt_tokens=200,
            completion_tokens=completion_tokens,
            max_tokens=2000,
            num_slots=128,
            groups_per_step=64,
            group_size=8,
        )

    assert cost().train_s == pytest.approx(6 * 7e9 * 512 * 700 / (0.4 * 989e12))
    assert cost(parameters=14 * 10**9).sample_s > cost().sample_s
    assert cost(completion_tokens=1000).sample_s > 2 * cost().sample_s
    assert cost().longest == 4.0


@pytest.fixture
def run_folder(tmp_path):
    """Of a run with two ranks and two engines that are busy 80 % of the time; its first step compiled."""
    folder = tmp_path / "run"
    folder.mkdir()
    config = {
        "data": {
            "groups_per_step": 16,
            "group_size": 4,
            "max_staleness": 8,
            "sampling": {"max_tokens": 30},
            "engine": {"class_path": "lit_async_rl.EmbeddedEngine", "init_args": {"num_slots": 8}},
        },
        "cluster": {"class_path": "RayCluster", "init_args": {"trainer_ranks": 2, "engines": {"replicas": 2}}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [",".join(command.COLUMNS), "100,0,50,0.9,10", *["10,1,1,0.2,10"] * 7]
    (folder / "metrics.csv").write_text("\n".join(rows) + "\n")
    return folder


def test_costs_of_a_run_are_those_of_one_device(run_folder):
    settings = command._settings(run_folder / "config.yaml")
    cost = command.measured_cost(run_folder, settings, spread=1.0, efficiency=0.9)
    assert cost.training_s(2) == pytest.approx(9.0), "8 s of training, 1 s of publishing"
    assert cost.sync_s == 1.0
    assert cost.sampling_s(2) == pytest.approx(8.0), "two engines were busy 80 % of 10 s"
    assert cost.longest == 3.0


def test_what_a_source_does_not_say_is_as_in_a_run(tmp_path):
    (tmp_path / "config.yaml").write_text("data: {engine: {class_path: RayEngine, init_args: {engine: VLLMEngine}}}\n")
    settings = command._settings(tmp_path / "config.yaml")
    data = inspect.signature(rl.RolloutDataModule).parameters
    assert command._count(settings, "data.groups_per_step") == data["groups_per_step"].default > 1
    assert command._count(settings, "data.group_size") == data["group_size"].default > 1
    assert command._count(settings, "data.max_staleness") == data["max_staleness"].default > 1
    assert command._count(settings, "data.sampling.max_tokens") == rl.SamplingParams().max_tokens
    assert command._num_slots(settings) == inspect.signature(rl.VLLMEngine).parameters["max_num_seqs"].default
    assert command._num_slots({}) == inspect.signature(rl.EmbeddedEngine).parameters["num_slots"].default
    with pytest.raises(
        ValueError, match=r"data\.engine=my\.Engine: .* the engine has none of the settings num_slots, max_num_seqs"
    ):
        command._num_slots({"data": {"engine": "my.Engine"}})


def test_the_command_prints_a_table_that_fits_a_terminal_and_what_to_type(run_folder, capsys, monkeypatch):
    monkeypatch.chdir(run_folder.parent)
    command.main(["run", "--devices", "8"])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert sum("<- fastest" in line for line in lines) == 1
    (row,) = [line.split() for line in lines if "<- fastest" in line]
    assert lines[-1].endswith(f"--cluster.trainer_ranks {row[0]} --cluster.engines.replicas {row[1]}")
    assert int(row[0]) + int(row[1]) == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "--devices", "4"], "error: nowhere: there is no such file"),
        (["RUN", "--devices", "1"], "devices must be >= 2, got 1"),
        (["RUN", "--devices", "4", "--replica_devices", "4"], "devices must be >= 5, got 4"),
        (["RUN", "--devices", "4", "--efficiency", "0"], "efficiency must be in (0, 1], got 0"),
        (["RUN", "--devices", "4", "--max_staleness", "-1"], "--max_staleness must be >= 0, got -1"),
        (["RUN", "--devices", "4", "--ranks", "0"], "--ranks must be >= 1, got 0"),
        (["RUN/config.yaml", "--devices", "4"], "add --device (one of a100"),
        (["RUN/config.yaml", "--devices", "4", "--device", "h100"], "model.model is not set"),
    ],
)
def test_misuses_are_one_line(run_folder, words, message):
    with pytest.raises(SystemExit) as ended:
        command.main([word.replace("RUN", str(run_folder)) for word in words])
    assert message in str(ended.value)
    assert "\n" not in str(ended.value)


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [({"devices": 3}, 3), ({"devices": [0, 2], "num_nodes": 2}, 4), ({"devices": "auto", "accelerator": "cpu"}, 1)],
)
def test_devices_that_trained(trainer, expected):
    assert command._num_ranks({"trainer": trainer}) == expected


@pytest.mark.parametrize("devices", ["auto", -1, None])
def test_where_a_run_does_not_say_how_many_devices_trained_it_is_asked(devices):
    with pytest.raises(ValueError, match=r"trainer\.devices=(auto|-1) does not say how many .*: add --ranks"):
        command._num_ranks({"trainer": {"devices": devices, "accelerator": "gpu"}})


def test_a_run_that_has_hardly_begun_is_refused(run_folder):
    text = (run_folder / "metrics.csv").read_text().splitlines()[:4]
    (run_folder / "metrics.csv").write_text("\n".join(text) + "\n")
    with pytest.raises(SystemExit, match=r"only 3 steps have .*, but at least 4"):
        command.main([str(run_folder), "--devices", "4"])


def test_the_size_of_a_model_is_that_of_its_configuration():
    size = command.model_size("lit_async_rl/assets/sort_policy")
    assert size.parameters == 504_960
    assert size.cache_bytes == 2 * 2 * 3 * 4 * 32
