"""The staleness benchmark's machinery: what a suite says is trained, once, and the report says what the table says."""

import json
import math
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common.grid import Grid
from benchmarks.common.process import RESULT, recorded, write_result
from benchmarks.staleness.__main__ import train
from benchmarks.staleness.cell import run_cell
from benchmarks.staleness.dropping import DropLongest
from benchmarks.staleness.price import price_table
from benchmarks.staleness.report import write_report
from benchmarks.staleness.statistics import (
    best_scales,
    gain_share,
    generations,
    has_collapsed,
    interval,
    is_slow,
    per_cell,
    summarize,
    synchronous,
    warning_time,
)
from benchmarks.staleness.suite import Block, Cell, Suite, load_suite
from benchmarks.staleness.table import CELL, COLUMNS, read_cells, read_table, write_table
from lit_async_rl.losses.aggregation import SequenceMean

ROOT = Path(__file__).parents[2]
SMOKE = Cell("smoke", "uncorrected", 2, 1.0, 0)


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def made_up(finals: dict[tuple[str, int], list[float]], fall_at: int | None = None) -> pd.DataFrame:
    """A table whose runs go from 0.4 in a straight line to `finals[method, lag][seed]`, in 10 steps."""
    rows = []
    for (method, lag), values in finals.items():
        for seed, final in enumerate(values):
            for step in range(11):
                row = dict.fromkeys(COLUMNS.values(), 0.1) | dict(
                    zip(CELL, ("heavy_tails", method, lag, 1.0, seed), strict=True)
                )
                row |= {"step": step, "accuracy": 0.4 + (final - 0.4) * min(step, 9) / 9, "staleness_mean": float(lag)}
                row |= {"ess_ratio": 1.0 if step < 2 else 0.2, "error": None, "wall_s": 1.0, "device": "cpu"}
                rows.append(row)
    return pd.DataFrame(rows)


# -- suites --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [p.stem for p in (ROOT / "configs/bench/suites").glob("*.yaml")])
def test_every_suite_loads_and_names_what_exists(name):
    suite = load_suite(name)
    cells = [cell for block in suite.blocks if block.learning_rate_scales != "best" for cell in block.cells({})]
    assert all(Path(a).is_file() for c in cells for a in c.arguments() if a.endswith(".yaml"))


@given(lag=st.integers(0, 999), seed=st.integers(0, 99), scale=st.sampled_from([0.3, 1.0, 3.0]))
def test_a_folder_names_its_cell(lag, seed, scale):
    cell = Cell("heavy_tails", "vcpo+gac_project", lag, scale, seed)
    assert Cell.of(cell.folder) == cell


def test_a_block_uses_the_best_rates_of_the_search():
    block = Block("heavy_tails", ("vcpo", "topr"), (8,), (0, 1), "best")
    cells = block.cells({("heavy_tails", "vcpo", 8): 3.0, ("heavy_tails", "topr", 8): 0.3})
    assert {(c.method, c.learning_rate_scale, c.seed) for c in cells} == {
        ("vcpo", 3.0, 0), ("vcpo", 3.0, 1), ("topr", 0.3, 0), ("topr", 0.3, 1)
    }  # fmt: skip


def test_wrong_names_are_named(monkeypatch, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"'nightly': no such suite.*full.*quick"):
        load_suite("nightly")
    with pytest.raises(FileNotFoundError, match=r"method 'vpco': no vpco\.yaml"):
        Cell("smoke", "vpco", 0, 1.0, 0).arguments()
    suites = tmp_path / "configs/bench/suites"
    suites.mkdir(parents=True)
    (suites / "odd.yaml").write_text("blocks: [{regime: smoke, methods: [vcpo], lags: [0], seeds: [0], lag: 3}]")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"unknown keys \['lag'\]"):
        load_suite("odd")


# -- running -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_grid_trains_each_cell_once_and_goes_on_where_it_was_stopped(tmp_path, capsys):
    failing = Cell("smoke", "uncorrected", 2, -1.0, 0)  # a learning rate below 0 is refused
    folder = tmp_path / SMOKE.folder
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("step\n1\n")  # what a killed run leaves
    Grid(run_cell, tmp_path, 2, 120.0).run([SMOKE, failing, SMOKE])
    assert json.loads((folder / RESULT).read_text())["error"] is None
    assert "learning_rate must be positive" in json.loads((tmp_path / failing.folder / RESULT).read_text())["error"]
    assert capsys.readouterr().out.count("\n") == 2
    before = (folder / RESULT).stat().st_mtime_ns
    Grid(run_cell, tmp_path, 2, 120.0).run([SMOKE, failing])
    assert (folder / RESULT).stat().st_mtime_ns == before
    table = read_cells(tmp_path)
    rows = table[table["learning_rate_scale"] == 1.0]
    assert rows.dropna(subset=["accuracy"])["step"].tolist() == [0, 4, 8, 12]
    assert rows["staleness_max"].max() == 2
    assert rows["tokens"].dropna().is_monotonic_increasing


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_that_the_budget_ends_goes_on_to_the_same_end(tmp_path):
    run = partial(run_cell, settings=["--trainer.max_steps=30"], checkpoint_every_n_steps=3)
    grid = Grid(run, tmp_path / "ended", 1, 600.0, budget_s=600.0)
    last = grid.out / SMOKE.folder / "checkpoints" / "last.ckpt"

    def end_after_a_checkpoint():
        while not last.exists():
            time.sleep(0.01)
        grid.ends_at = time.monotonic()

    threading.Thread(target=end_after_a_checkpoint, daemon=True).start()
    with pytest.raises(TimeoutError, match="1 of 1 runs have not finished"):
        grid.run([SMOKE])
    assert not (grid.out / SMOKE.folder / RESULT).exists()
    Grid(run, grid.out, 1, 600.0).run([SMOKE])
    Grid(run, tmp_path / "whole", 1, 600.0).run([SMOKE])
    ended = read_cells(grid.out)
    whole = read_cells(tmp_path / "whole")
    assert not last.exists(), "finished runs need no checkpoint"
    # not what had arrived when a step ended: that depends on the machine
    columns = ["step", "reward", "grad_norm", "ess_ratio", "accuracy", "tokens"]
    pd.testing.assert_frame_equal(ended[columns], whole[columns], check_exact=True)


def test_a_run_that_takes_too_long_is_ended_and_says_so(tmp_path):
    Grid(run_cell, tmp_path, 1, 0.3).run([SMOKE])
    assert json.loads((tmp_path / SMOKE.folder / RESULT).read_text())["error"] == "took more than 0.3 s"


def _needs_the_machine_to_itself(cell, out):
    """Stand-in of a run: it finds no room the first time, or always if its seed is 9."""
    refused = out / f"refused-{cell.seed}"
    with recorded(out / cell.folder, []):
        if cell.seed and (cell.seed == 9 or not refused.exists()):
            refused.touch()
            raise torch.OutOfMemoryError("CUDA out of memory.")


def test_a_run_that_found_no_room_is_tried_again_with_fewer_beside_it(tmp_path, capsys):
    cells = [Cell("smoke", "uncorrected", 0, 1.0, seed) for seed in (1, 0, 9)]
    grid = Grid(_needs_the_machine_to_itself, tmp_path, 3, 120.0)
    grid.run(cells)
    assert grid.num_processes == 1
    errors = [json.loads((tmp_path / cell.folder / RESULT).read_text())["error"] for cell in cells]
    assert errors == [None, None, "OutOfMemoryError: CUDA out of memory."], "alone it is the run's own fault"
    assert "seed=1: out of memory; " in capsys.readouterr().out


def test_no_run_that_had_others_beside_it_is_to_blame_for_full_memory(tmp_path):
    cells = [Cell("smoke", "uncorrected", 0, 1.0, seed) for seed in (1, 2)]
    Grid(_needs_the_machine_to_itself, tmp_path, 2, 120.0).run(cells)
    errors = [json.loads((tmp_path / cell.folder / RESULT).read_text())["error"] for cell in cells]
    assert errors == [None, None], "both were refused while both ran, the second when one at a time was the rule"


def _is_overtaken(cell, out):
    """Stand-in of a run, during which another grid finishes that of the next seed."""
    with recorded(out / cell.folder, []):
        other = out / Cell("smoke", "uncorrected", 0, 1.0, cell.seed + 1).folder
        other.mkdir(parents=True)
        write_result(other, {"error": "of another grid", "wall_s": 0.0})


def test_what_another_grid_has_finished_meanwhile_is_not_trained_again(tmp_path):
    cells = [Cell("smoke", "uncorrected", 0, 1.0, seed) for seed in (0, 1)]
    Grid(_is_overtaken, tmp_path, 1, 120.0).run(cells)
    assert json.loads((tmp_path / cells[1].folder / RESULT).read_text())["error"] == "of another grid"


# -- statistics ----------------------------------------------------------------------------------------------------


def test_the_interval_is_students():
    mean, half = interval(pd.Series([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert mean == 3
    assert half == pytest.approx(2.7764 * math.sqrt(2.5) / math.sqrt(5), rel=1e-4)
    assert math.isnan(interval(pd.Series([1.0]))[1])


def test_intervals_cover_the_truth_as_often_as_they_say():
    random = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        finals, reference = (pd.Series(random.normal(m, 0.03, 5)) for m in (0.8, 0.9))
        share, half = gain_share(finals, 0.4, reference)
        hits += abs(share - 0.8) < half
    assert 0.92 < hits / 400 <= 1


def test_runs_are_summed_up_as_they_were():
    table = made_up({("uncorrected", 0): [0.9, 0.9], ("uncorrected", 8): [0.1, 0.7], ("vcpo", 8): [0.85, 0.85]})
    table.loc[(table["method"] == "vcpo") & (table["seed"] == 1), "error"] = "ValueError: loss is nan"
    runs = per_cell(table)
    rows = summarize(runs).set_index(["method", "lag"])
    assert rows.loc[("uncorrected", 8), ["collapsed", "slow", "steps"]].tolist() == [1, 0, 10]
    assert rows.loc[("uncorrected", 8), "gain_share"] == pytest.approx(0.0)
    assert rows.loc[("vcpo", 8), "failed"] == 1
    assert rows.loc[("vcpo", 8), "final"] == pytest.approx(0.425)  # a run that broke ends with nothing
    assert best_scales(runs)["heavy_tails", "vcpo", 8] == 1.0
    searched = table.assign(seed=table["seed"].where(table["method"] != "vcpo", 100))
    assert set(summarize(per_cell(searched))["method"]) == {"uncorrected"}  # a search is not a result
    # 0.4 -> 0.1 is below half of 0.4 after step 6, the mean ESS of five steps below one half at step 5
    found = warning_time(runs[runs["lag"] == 8])
    assert (found.fallen, found.warned, found.others, found.warned_others) == (1, 1, 3, 3)
    assert found.lead in (1, 2)
    assert "in 3 of the 3 runs that" in str(found)


@pytest.mark.parametrize(
    ("best", "final", "collapsed", "slow"),
    [
        (0.9, 0.85, False, False),
        (0.9, 0.5, True, False),
        (0.45, 0.42, False, True),
        (0.45, 0.15, True, False),
        (0.6, 0.55, False, True),
        (0.6, 0.45, True, False),
    ],
    ids=["keeps", "falls", "never rises", "falls below its start", "rises a little", "rises a little and falls"],
)
def test_a_run_that_falls_has_collapsed_and_one_that_never_rose_is_slow(best, final, collapsed, slow):
    assert has_collapsed(0.4, best, final) is collapsed
    run = pd.DataFrame({"start": [0.4], "final": [final], "collapsed": [collapsed]})
    assert is_slow(run, gain=0.5).tolist() == [slow]


def test_synchronous_runs_are_those_at_the_rate_that_their_search_chose_without_the_search():
    table = made_up({("uncorrected", 0): [0.9, 0.9], ("vcpo", 8): [0.8]})
    lower = made_up({("uncorrected", 0): [0.6, 0.6]}).assign(learning_rate_scale=0.3)
    search = pd.concat(
        made_up({("uncorrected", 0): [final]}).assign(seed=100, learning_rate_scale=scale)
        for scale, final in ((0.3, 0.8), (1.0, 0.5))
    )
    without = per_cell(pd.concat([table, lower]))
    assert synchronous(without, "heavy_tails")["final"].tolist() == pytest.approx([0.9, 0.9])
    searched = per_cell(pd.concat([table, lower, search]))
    assert synchronous(searched, "heavy_tails")["final"].tolist() == pytest.approx([0.6, 0.6])


def test_generations_are_steps_over_the_lag():
    assert [generations(240, lag) for lag in (0, 16, 64)] == ["", "15.0", "3.8 †"]


@pytest.mark.slow
def test_the_report_says_what_the_table_says(tmp_path):
    naive = {("uncorrected", lag): [0.9 if lag == 0 else 0.3] * 3 for lag in (0, 8)}
    table = made_up(naive | {("vcpo", 8): [0.88, 0.9, 0.9], ("topr", 8): [0.5, 0.5, 0.6]})
    write_table(table, tmp_path / "results.parquet")
    said = write_report(read_table(tmp_path / "results.parquet"), tmp_path, "the command")
    assert "uncorrected keeps -0.20 ± 0.00 of the gain, of 3 runs 0 collapse and 3 are slow" in said
    assert said.index("vcpo 0.99") < said.index("topr 0.27")
    page = (tmp_path / "report.html").read_text()
    assert "the command" in page
    assert page.count("<img") == page.count('<img alt="') == 6 == len(list((tmp_path / "pictures").glob("*.png")))
    assert "<li>Synchronous training goes from" in page
    assert "Made by <code>the command</code>." in page
    assert "name=viewport" in page


@pytest.mark.parametrize(
    ("methods", "against"),
    [
        ([("vcpo", 8)], None),
        ([("vcpo", 0), ("topr", 0)], "topr"),
        ([("uncorrected+gac", 8), ("uncorrected", 8)], "uncorrected"),
        ([("vcpo+steps_300", 8), ("uncorrected+steps_300", 8)], "uncorrected+steps_300"),
    ],
)
def test_a_grid_of_any_methods_ends_with_a_report(tmp_path, methods, against):
    """Also one of the middle of a suite, which has nothing to compare with, or no synchronous run."""
    table = made_up({method: [0.8, 0.9] for method in methods})
    said = write_report(table, tmp_path, "the command")
    assert all(f"| {method} |" in said for method, _ in methods)
    compared = [line for line in said.splitlines() if "0.000 ± 0.000" in line]  # the differences: the finals are alike
    assert [line.split(" | ")[0].removeprefix("| ") for line in compared] == [
        method for method, _ in sorted(methods) if against not in (None, method)
    ]


@pytest.mark.slow
def test_tables_that_are_none_are_refused(process, tmp_path):
    words = ["--out", str(tmp_path), "--table", str(tmp_path / "no.parquet")]
    done = process.script("scripts/plot_bench.py", words, tmp_path, limit_s=100)
    assert done.status == 1
    assert "there is no such table" in done.said
    assert "Traceback" not in done.said
    pd.DataFrame({"step": [1]}).to_parquet(tmp_path / "other.parquet")
    with pytest.raises(ValueError, match="not a table of the staleness benchmark"):
        read_table(tmp_path / "other.parquet")
    with pytest.raises(FileNotFoundError, match="no finished run"):
        read_cells(tmp_path)


def test_nothing_is_trained_when_the_suite_is_unknown(process, tmp_path):
    words = ["--suite", "nightly", "--out", str(tmp_path / "out")]
    done = process.script("scripts/staleness_bench.py", words, tmp_path, limit_s=100)
    assert done.status == 1
    assert "nightly" in done.said
    assert not (tmp_path / "out").exists()


def test_runs_of_an_earlier_table_are_not_repeated(tmp_path):
    search = pd.concat(
        made_up({("vcpo", 16): [final]}).assign(seed=100, learning_rate_scale=scale)
        for scale, final in ((0.3, 0.9), (1.0, 0.5))
    )
    chosen = made_up({("vcpo", 16): [0.8, 0.8]}).assign(learning_rate_scale=0.3)
    write_table(pd.concat([search, chosen]), tmp_path / "known.parquet")
    known = read_table(tmp_path / "known.parquet")
    blocks = [
        Block("heavy_tails", ("vcpo",), (16,), (100,), (0.3, 1.0)),
        Block("heavy_tails", ("vcpo",), (16,), (0, 1), "best"),
    ]
    pd.testing.assert_frame_equal(train(Suite("all known", tuple(blocks)), tmp_path, 1, known=known), known)
    blocks.append(Block("smoke", ("uncorrected",), (2,), (0,), (-1.0,)))  # a learning rate that is refused
    found = train(Suite("one is not", tuple(blocks)), tmp_path, 1, known=known)
    assert len(found) == len(known)  # that run has no steps
    assert [Cell.of(path.parent) for path in tmp_path.rglob(RESULT)] == [Cell("smoke", "uncorrected", 2, -1.0, 0)]


def test_only_a_block_that_uses_a_search_waits_for_the_blocks_before_it(tmp_path, monkeypatch):
    """Each block waited for the last run of the one before it: on a GPU seven of twelve processes were idle."""
    started: list[list[Cell]] = []
    monkeypatch.setattr(Grid, "run", lambda self, cells: started.append(list(cells)))
    search = made_up({("vcpo", 16): [0.9]}).assign(seed=100, learning_rate_scale=0.3)
    fixed = [Block("heavy_tails", (method,), (16,), (0,)) for method in ("uncorrected", "ppo_clip")]
    tried = Block("heavy_tails", ("vcpo",), (16,), (100,), (0.3, 1.0))
    chosen = [Block("heavy_tails", ("vcpo",), (16,), (seed,), "best") for seed in (0, 1)]
    train(Suite("many blocks", (*fixed, tried, *chosen, fixed[0])), tmp_path, 1, known=search)
    assert [[cell.method for cell in cells] for cells in started] == [
        ["uncorrected", "ppo_clip", "vcpo"],  # of the search, the rate that is not known
        ["vcpo", "vcpo"],
        ["uncorrected"],
    ]


def test_a_run_that_is_ended_from_outside_has_no_result(process, tmp_path):
    """Its half of a run counted as one that collapsed."""
    code = (
        "import sys; from pathlib import Path; from benchmarks.common.process import recorded\n"
        "from lightning.pytorch.utilities.exceptions import SIGTERMException\n"
        "with recorded(Path(sys.argv[1]), []):\n    raise SIGTERMException  # as Lightning does after the signal"
    )
    process.run([str(tmp_path / "cell")], tmp_path, code=code, limit_s=100)
    assert (tmp_path / "cell/log.txt").is_file()
    assert not (tmp_path / "cell" / RESULT).exists()


@pytest.mark.slow
def test_runs_end_with_their_grid(tmp_path):
    code = "import sys; from pathlib import Path; from benchmarks.common.grid import Grid; "
    code += "from benchmarks.staleness.cell import Cell, run_cell; "
    code += "Grid(run_cell, Path(sys.argv[1]), 1, 99.0).run([Cell('very_stale', 'uncorrected', 0, 1.0, 0)])"
    grid = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    until = time.monotonic() + 60
    while not (children := psutil.Process(grid.pid).children()):
        assert time.monotonic() < until
        time.sleep(0.1)
    grid.kill()
    grid.wait()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.floats(0, 0.99))
def test_the_longest_rollouts_are_dropped_and_the_others_averaged(lengths, share):
    weights = DropLongest(share)(lengths, [len(lengths)])
    kept = [length for length, weight in zip(lengths, weights, strict=True) if weight > 0]
    dropped = [length for length, weight in zip(lengths, weights, strict=True) if weight == 0 and length]
    assert len(dropped) <= share * len(lengths)
    assert not kept or not dropped or max(kept) < min(dropped)
    assert sum(w * n for w, n in zip(weights, lengths, strict=True)) == pytest.approx(1.0 if kept else 0.0)


def test_without_a_share_nothing_is_dropped():
    assert DropLongest(0.0)([3, 1, 2], [3]) == SequenceMean()([3, 1, 2], [3])
    with pytest.raises(ValueError, match=r"share must be in \[0, 1\), got 1"):
        DropLongest(1.0)


def test_the_price_of_a_lag_is_counted_from_its_first_stale_step_and_only_where_the_level_is_reached():
    """The synchronous curve rises for 20 steps, another for 40 after step 8, and a third stops at half of the gain.

    A fourth is there before its lag, and one run of a fifth breaks.
    """
    rows = []
    curves = (("sync", 0, 20, 1.0), ("slow", 8, 40, 1.0), ("half", 8, 20, 0.5), ("broken", 8, 20, 1.0))
    for method, lag, length, top in (*curves, ("early", 64, 4, 1.0)):
        for seed in (0, 1):
            for step in range(0, 101 if (method, seed) != ("broken", 0) else 20, 4):
                risen = (step - (8 if method == "early" else lag)) / length
                accuracy = top * min(1.0, max(0.0, risen))
                rows.append({"method": method, "lag": lag, "seed": seed, "step": step, "accuracy": accuracy})
    steps = pd.DataFrame(rows).assign(learning_rate_scale=1.0)
    ends = (
        steps.groupby(["method", "seed"])
        .tail(1)
        .rename(columns={"accuracy": "final", "step": "steps"})
        .assign(start=0.0)
    )
    cells = [[cell.strip() for cell in line.split("|")] for line in price_table(steps, ends).splitlines()[2:]]
    prices = {row[1]: row[-3:-1] for row in cells}
    assert prices["sync"] == ["", ""]
    assert prices["slow"] == ["2.0 (2.0 to 2.0)"] * 2
    assert prices["half"] == ["not reached"] * 2
    assert prices["broken"] == ["not reached"] * 2
    assert prices["early"] == ["before step `lag`"] * 2


def test_signals_of_a_run_whose_age_varies_are_medians_over_all_steps_from_the_lag_on():
    ages = [0, 1, 2, 2, 1, 1, 1]
    rows = [
        {
            **dict.fromkeys(CELL, "x"),
            "lag": 2,
            "seed": 0,
            "learning_rate_scale": 1.0,
            "step": step,
            "staleness_mean": age,
        }
        for step, age in enumerate(ages)
    ]
    values = dict.fromkeys(("error", "device", "accuracy", "controller_changes", "blend_share", "tokens", "cpu_s"))
    table = pd.DataFrame(rows).assign(**values).astype({"accuracy": float})
    signals = {name: [0.0, 0.0, 9.0, 9.0, 1.0, 1.0, 1.0] for name in ("cosine", "ess_ratio", "kl", "grad_norm")}
    (run,) = per_cell(table.assign(**signals)).to_dict("records")
    assert (run["ess_ratio"], run["staleness"]) == (1.0, pytest.approx(7 / 5))
