"""Benchmark of one algorithm on both sides: recorded latencies, mean curves, the search, and its report."""

import asyncio
import json
import math
import random
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks.time_to_accuracy import latency, recipes
from benchmarks.time_to_accuracy.curves import read_run
from benchmarks.time_to_accuracy.latency import LATENCIES, SlowAnswer, SlowTool, added_s, clock, take_waits
from benchmarks.time_to_accuracy.recipes import Score, Setting, choose, search_cells
from benchmarks.time_to_accuracy.statistics import MeanCurve, mean_speedup, paired_speedup, self_speedup
from benchmarks.time_to_accuracy.suite import Cell
from lit_async_rl.environments import Environment, Episode, Observation
from lit_async_rl.problem import Prompt

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    take_waits()


# -- Latencies --------------------------------------------------------------------------------------------------------


class Turns(Environment):
    """Episodes of as many turns as the prompt says."""

    async def start(self, prompt):
        return Turn(int(prompt.answer))


class Turn(Episode):
    def __init__(self, left):
        self.left = left

    async def step(self, completion):
        self.left -= 1
        return Observation(text="1", done=self.left == 0)


PROMPTS = [Prompt(text=f"prompt {n % 3}", answer=str(1 + n % 3)) for n in range(12)]


async def play(environment, prompt):
    episode = await environment.start(prompt)
    while not (await episode.step("")).done:
        pass
    await episode.close()


@pytest.fixture
def naps(monkeypatch):
    """Seconds that would have been slept."""
    found = []

    async def sleep(seconds):
        found.append(seconds)

    monkeypatch.setattr(latency.asyncio, "sleep", sleep)
    return found


def test_an_environment_that_does_not_sleep_records_what_one_that_sleeps_sleeps_in_whichever_order(naps):
    async def play_all(sleeps, order):
        environment = SlowTool(Turns(), mean_s=0.5, seed=3, sleeps=sleeps)
        for n in order:
            await play(environment, PROMPTS[n])

    asyncio.run(play_all(sleeps=True, order=range(12)))
    slept = sorted((one.prompt, one.latency_s) for one in take_waits())
    assert len(naps) == 4 * (0 + 1 + 2)  # the response that ends an episode is at once
    assert sum(naps) == pytest.approx(sum(seconds for _, seconds in slept))
    naps.clear()
    order = list(range(12))
    random.Random(0).shuffle(order)
    asyncio.run(play_all(sleeps=False, order=order))
    assert not naps
    assert sorted((one.prompt, one.latency_s) for one in take_waits()) == slept
    assert not take_waits()


def test_a_reward_that_does_not_sleep_records_what_one_that_sleeps_sleeps(naps):
    for sleeps in (True, False):
        reward = SlowAnswer(mean_s=2.0, seed=1, sleeps=sleeps)
        assert [asyncio.run(reward(prompt, f"it is {prompt.answer}")) for prompt in PROMPTS] == [1.0] * 12
    waits = [one.latency_s for one in take_waits()]
    assert naps == waits[:12] == waits[12:]


def test_latencies_are_log_normal_and_those_of_another_mean_are_multiples():
    prompts = [Prompt(text=str(n)) for n in range(4000)]
    short, long = (latency.Latencies(mean_s, 1.0, seed=0) for mean_s in (1.0, 8.0))
    drawn = np.array([short.of(prompt).next_s() for prompt in prompts])
    assert drawn.mean() == pytest.approx(1.0, rel=0.1)
    assert np.log(drawn).std() == pytest.approx(1.0, rel=0.05)
    assert [long.of(prompt).next_s() for prompt in prompts] == pytest.approx(8 * drawn)


def waits(*rows):
    return pd.DataFrame([dict(zip(("step", "ended_s", "latency_s"), row, strict=True)) for row in rows])


def test_a_step_waits_for_the_rollout_that_ends_last_with_its_latency():
    table = waits((1, 0.1, 2.0), (1, 0.9, 0.5), (2, 0.2, 0.0), (2, 0.7, 3.0))
    assert list(added_s(table)) == pytest.approx([2.1 - 0.9, 3.0])
    assert list(added_s(table, factor=0.1)) == pytest.approx([0.05, 0.3])  # now the second rollout is the last
    assert list(added_s(table, factor=0.0)) == [0.0, 0.0]


def test_the_clock_is_processor_time_and_what_would_have_been_slept():
    steps = pd.DataFrame({"step": [1, 2, 3], "bench/cpu_s": [1.0, 2.0, 2.5]})
    found = clock(steps, waits((1, 0.0, 4.0), (3, 0.0, 6.0)), factor=0.5)
    assert found.to_dict() == {1: 3.0, 2: 4.0, 3: 7.5}


def test_a_synchronous_step_takes_as_long_asleep_as_the_clock_says():
    async def generate(end_s, seconds):
        await asyncio.sleep(end_s)
        await asyncio.sleep(seconds)

    chance = random.Random(0)
    rows = [(1, 0.02 * n, chance.lognormvariate(-3, 1)) for n in range(16)]

    async def step(factor):
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(generate(end_s, factor * seconds) for _, end_s, seconds in rows))
        return asyncio.get_running_loop().time() - began

    loop = VirtualTime()
    awake, asleep = (loop.run_until_complete(step(factor)) for factor in (0.0, 1.0))
    loop.close()
    assert asleep - awake == pytest.approx(added_s(waits(*rows)).item(), abs=1e-6)


class VirtualTime(asyncio.SelectorEventLoop):
    """Event loop whose clock jumps to the next timer."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def time(self):
        return self.now

    def _run_once(self):
        if not self._ready and self._scheduled:
            self.now = max(self.now, self._scheduled[0].when())
        super()._run_once()


# -- Statistics -------------------------------------------------------------------------------------------------------


def mean_curve(step_s, rise, noise=0.0, seeds=range(5), chance=None, speeds=None):
    """Runs that rise from 0.3 to 0.9 in a straight line of `rise` steps, each by its own factor of `speeds`."""
    steps = np.arange(0, 101, 4)
    speeds = np.ones(len(seeds)) if speeds is None else speeds
    accuracy = np.stack([0.3 + 0.6 * np.minimum(1.0, steps / (rise * speed)) for speed in speeds])
    if noise:
        accuracy = accuracy + chance.normal(0.0, noise, accuracy.shape)
    return MeanCurve(tuple(seeds), steps, np.tile(steps * step_s, (len(seeds), 1)), accuracy)


def test_the_time_to_a_level_is_where_the_monotone_mean_reaches_it():
    one = mean_curve(2.0, 40)
    assert one.level(0.5) == pytest.approx(0.6)
    assert one.time_to(0.6) == pytest.approx(2.0 * 20)
    assert one.time_to(0.6, in_steps=True) == pytest.approx(20)
    assert one.time_to(0.3) == 0.0
    assert math.isinf(one.time_to(0.95))


def test_a_peak_that_is_lost_again_counts_as_the_mean_with_what_follows():
    accuracy = np.array([[0.0, 0.8, 0.4, 0.6, 0.7]])
    one = MeanCurve((0,), np.arange(5), np.arange(5.0)[None], accuracy)
    assert one.monotone == pytest.approx([0.0, 0.6, 0.6, 0.6, 0.7])
    assert one.time_to(0.65) == pytest.approx(3.5)


def test_curves_are_of_the_same_steps_and_pairs_of_the_same_seeds():
    table = pd.DataFrame(dict(step=[4, 0], wall_s=[8.0, 0.0], accuracy=[0.5, 0.3]))
    one = MeanCurve.of({1: table, 0: table})
    assert (one.seeds, list(one.steps), list(one.accuracy[0])) == ((0, 1), [0, 4], [0.3, 0.5])
    with pytest.raises(ValueError, match="evaluated at different steps"):
        MeanCurve.of({0: table, 1: table.assign(step=[5, 0])})
    with pytest.raises(ValueError, match="pairs are of the same seed"):
        paired_speedup(mean_curve(1.0, 20), mean_curve(1.0, 20, seeds=range(1, 6)), 0.8)


def test_the_interval_of_pairs_covers_the_truth_and_what_a_seed_does_to_both_sides_does_not_widen_it():
    chance = np.random.default_rng(0)
    hits = 0
    widths = {"paired": [], "unpaired": []}
    for _ in range(6):
        speeds = np.exp(chance.normal(0.0, 0.2, 5))
        reference, other = (mean_curve(s, 40, 0.01, chance=chance, speeds=speeds) for s in (4.0, 1.0))
        value, low, high = paired_speedup(reference, other, 0.8)
        assert low <= value <= high
        hits += low <= 4.0 <= high
        widths["paired"].append(high - low)
        other = mean_curve(1.0, 40, 0.01, chance=chance, speeds=np.exp(chance.normal(0.0, 0.2, 5)))
        _, low, high = paired_speedup(reference, other, 0.8)
        widths["unpaired"].append(high - low)
    assert hits >= 4
    assert np.mean(widths["paired"]) < 0.6 * np.mean(widths["unpaired"])


def test_a_level_that_is_not_reached_is_worth_nothing_and_one_pair_has_no_interval():
    low = mean_curve(1.0, 400)
    assert paired_speedup(mean_curve(4.0, 40), low, 0.8) == (0.0, 0.0, 0.0)
    value, *interval = paired_speedup(mean_curve(4.0, 40).only([0]), mean_curve(1.0, 40).only([0]), 0.8)
    assert value == pytest.approx(4.0)
    assert all(map(math.isnan, interval))
    assert mean_speedup(mean_curve(4.0, 40), mean_curve(1.0, 80), 0.8, in_steps=True) == pytest.approx(0.5)


def test_a_system_against_itself_is_as_fast_and_its_range_is_that_of_its_seeds():
    assert self_speedup(mean_curve(2.0, 40), 0.8) == pytest.approx((1.0, 1.0, 1.0))
    chance = np.random.default_rng(1)
    value, low, high = self_speedup(mean_curve(2.0, 40, speeds=np.exp(chance.normal(0.0, 0.3, 5))), 0.8)
    assert low < value < high
    assert value == pytest.approx(1.0, abs=0.1)
    assert low == pytest.approx(1 / high)
    assert all(map(math.isnan, self_speedup(mean_curve(2.0, 40).only([0]), 0.8)))


# -- Search -----------------------------------------------------------------------------------------------------------


def test_a_system_at_a_multiple_of_the_rate_has_its_settings_and_that_rate():
    plain = Cell("tools_unslept", "lag8_recipe_linear_twice", 10).arguments()
    half = Cell("tools_unslept", "lag8_recipe_linear_twice@0.5", 10)
    assert [word for word in half.arguments() if word not in plain] == ["--model.learning_rate=0.000125"]
    assert (half.num_steps, Cell.of(half.folder)) == (200, half)
    assert Setting("lag8_recipe", "_linear_twice", 0.5).system == half.system
    assert (
        Setting("lag8_recipe", "_linear_twice", 0.5).trains("tools_unslept") == "VCPO, linear rate 0.00013, 200 steps"
    )
    with pytest.raises(ValueError, match=r"tools_0\.4 has no learning_rate to multiply"):
        Cell("tools_0.4", "synchronous@2", 0).arguments()


@pytest.mark.parametrize("study", list(recipes.STUDIES))
def test_the_search_is_the_same_for_each_side(study):
    cells = search_cells(recipes.STUDIES[study].workload)
    kinds: dict[str, list[str]] = {side: [] for side in recipes.SIDES}
    for cell in cells:
        side = max((side for side in kinds if cell.system.startswith(side)), key=len)
        kinds[side].append(f"{cell.system.removeprefix(side)} {cell.seed}")
    plain, *others = kinds.values()
    assert others == [plain] * 2
    assert len(set(cells)) == len(cells) == 3 * 2 * 9


def setting(rate, schedule="_linear"):
    return Setting("synchronous_recipe", schedule, rate)


@pytest.mark.parametrize(
    ("steps", "rate"),
    [
        ({0.5: (40.0, 44.0), 1.0: (38.0, 43.0), 2.0: (60.0, 61.0)}, 0.5),  # 1.5 apart: less than an error of 3.2
        ({0.5: (50.0, 50.5), 1.0: (38.0, 43.0), 2.0: (60.0, 61.0)}, 1.0),
        ({0.5: (math.inf, 50.0), 1.0: (45.0, 43.0), 2.0: (40.0, 43.9)}, 1.0),
        ({0.5: (math.inf, 50.0), 1.0: (math.inf, math.inf), 2.0: (40.0, 41.0)}, 2.0),
    ],
)
def test_the_best_rate_is_chosen_or_a_lower_one_that_is_as_good(steps, rate):
    assert choose({setting(one): Score(found, 0.9) for one, found in steps.items()}).rate == rate


def test_the_best_schedule_is_chosen_after_the_rates_and_the_end_decides_where_the_level_is_not_reached():
    scores = {setting(1.0): Score((40.0, 41.0), 0.9), setting(1.0, "_twice"): Score((39.0, 41.0), 0.8)}
    assert choose(scores).schedule == "_twice"
    never = (math.inf, math.inf)
    assert choose({setting(1.0): Score(never, 0.7), setting(0.5): Score(never, 0.8)}).rate == 0.5


# -- Report -----------------------------------------------------------------------------------------------------------

STEPS_TO_THE_END = {"synchronous": 80, "synchronous_recipe": 40, "lag8_recipe": 60}  # at the best rate


def write_cell(out, cell):
    """A finished run: 0.2 s of processor time a step, and latencies of at most 10 s."""
    folder = out / cell.folder
    folder.mkdir(parents=True)
    name, _, factor = cell.system.partition("@")
    rate = float(factor or 1)
    side = next(side for side in sorted(STEPS_TO_THE_END, key=len, reverse=True) if name.startswith(side))
    rise = STEPS_TO_THE_END[side] * {0.5: 2.0, 1.0: 1.0, 2.0: 1.5}[rate] * (1.0 if "_twice" in name else 1.2)
    rise *= 1.1 if "linear" in name else 1.0
    steps = np.arange(0, cell.num_steps + 1, 4)
    accuracy = 0.3 + 0.6 * np.minimum(1.0, steps / rise)
    pd.DataFrame(dict(step=steps, wall_s=steps * 99.0, tokens=steps, accuracy=accuracy)).to_csv(
        folder / "accuracy.csv", index=False
    )
    trained = np.arange(1, cell.num_steps + 1)
    numbers = dict.fromkeys(("staleness_mean", "staleness_max"), 0.0)
    metrics = {f"sample/{name}": value for name, value in numbers.items()}
    metrics |= dict.fromkeys(
        ("perf/step_s", "perf/rollout_wait_s", "perf/weight_sync_s", "perf/engine_idle_share"), 1.0
    )
    pd.DataFrame({"step": trained - 1, "bench/cpu_s": 0.2 * trained} | metrics).to_csv(
        folder / "metrics.csv", index=False
    )
    rows = [dict(step=step, prompt="", ended_s=0.1, latency_s=seconds) for step in trained for seconds in (1.0, 10.0)]
    pd.DataFrame(rows).to_csv(folder / LATENCIES, index=False)
    result = dict(error=None, loads=[1.0], final=float(accuracy[-1]), command=[], wall_s=1.0)
    (folder / "result.json").write_text(json.dumps(result))


@pytest.mark.slow
def test_a_study_compares_each_side_at_its_best_with_seconds_that_are_measured_apart(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recipes, "RATES", (1.0, 0.5))
    monkeypatch.setattr("benchmarks.time_to_accuracy.statistics.NUM_RESAMPLED", 30)
    monkeypatch.setattr(sys, "argv", ["recipes", "--study", "tools", "--out", str(tmp_path), "--report_only"])
    for cell in search_cells("tools_unslept"):
        write_cell(tmp_path, cell)
    with pytest.raises(SystemExit, match="15 of 15 runs are missing or failed"):
        recipes.main()
    assert capsys.readouterr().out.count("**chosen**") == 3
    chosen = [Setting(side, "_twice", 1.0) for side in STEPS_TO_THE_END]
    for seed in recipes.SEEDS:
        for one in chosen:
            write_cell(tmp_path, Cell("tools_unslept", one.system, seed))
    recipes.main()
    found = json.loads((tmp_path / "measurement.json").read_text())
    at = {column: n for n, column in enumerate(found["table"]["columns"])}
    rows = {(row[at["workload"]], row[at["system"]]): row for row in found["table"]["rows"]}
    assert len(rows) == 6
    tools = "tools answer after 0.4 s"
    recorded_s = recipes.STUDIES["tools"].recorded[0.4].step_s()
    assert rows[tools, "recipe, synchronous"][at["seconds per step"]] == pytest.approx(0.2 + 0.4 * 10.0)
    assert rows[tools, "recipe, `max_staleness` 8"][at["seconds per step"]] == pytest.approx(recorded_s)
    assert rows[tools, "recipe, synchronous"][at["S(0.95)"]].startswith("1.00 (1.00")
    assert rows[tools, "recipe, synchronous"][at["final accuracy"]] == "0.900"
    expected = 4.2 * 40 / (recorded_s * 60)
    (headline,) = [
        one
        for one in found["comparisons"]
        if (one["workload"], one["share"]) == (tools, 0.95)
        and (one["system"]["name"], one["against"]["name"]) == ("recipe, `max_staleness` 8", "recipe, synchronous")
    ]
    assert headline["value"] == found["value"] == pytest.approx(expected, abs=0.01)
    assert headline["interval"] == found["interval"]
    assert headline["system"]["trains"] == headline["against"]["trains"] == "VCPO, constant rate 0.00025, 200 steps"
    (gain,) = [
        one
        for one in found["comparisons"]
        if (one["workload"], one["share"]) == (tools, 0.95) and one["system"]["name"] == "recipe, synchronous"
    ]
    assert gain["value"] == pytest.approx(2.0, abs=0.01)
    assert gain["against"]["trains"].startswith("PPO-clip GRPO")
    assert "## Search" in (tmp_path / "report.md").read_text()


def test_a_run_that_does_not_sleep_has_no_time_of_its_own(tmp_path):
    for workload, has_time in (("tools_unslept", False), ("tools_slept", True)):
        cell = Cell(workload, "synchronous_recipe", 0)
        write_cell(tmp_path, cell)
        metrics = tmp_path / cell.folder / "metrics.csv"
        pd.read_csv(metrics).to_csv(metrics, index=False)
        assert read_run(tmp_path / cell.folder, cell)["wall_s"].notna().all() == has_time


def test_a_synchronous_run_that_was_awake_counts_as_one_whose_rewards_took_eight_seconds(tmp_path):
    cell = Cell("smollm2_8s_awake", "synchronous_recipe_linear_twice", 0)
    write_cell(tmp_path, cell)
    rows = read_run(tmp_path / cell.folder, cell)
    assert set(rows["workload"]) == {"smollm2_8s"}
    assert rows["wall_s"].tolist() == pytest.approx((rows["step"] * (0.2 + 8 * 10.0)).tolist())
    assert rows["wait_share"].isna().all()
    slept = Cell("smollm2_8s", cell.system, 0)
    assert slept.arguments()[-6:] == cell.arguments()[-6:]  # steps and seeds
