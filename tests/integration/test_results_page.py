"""The page of results: its tables are those of the runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from scipy.stats import ttest_rel

from benchmarks.common.process import RESULT
from benchmarks.staleness import __main__ as staleness_bench
from benchmarks.staleness import first_grid, page, shown_runs, table
from benchmarks.staleness.report import write_report
from benchmarks.staleness.suite import Cell

PLAIN, GAC = [0.5, 0.4, 0.8], [0.7, 0.65, 0.75]


@pytest.mark.slow
def test_the_pages_tables_are_those_of_its_runs() -> None:
    """`python -m benchmarks.staleness.page` writes them; its `--help` lists the others, to be printed."""
    text = page.PAGE.read_text()
    assert text == page.fill(text)
    shown = set(re.findall(r"<!-- results: (\w+) -->", text))
    assert shown <= set(page.BLOCKS)


def finished(
    out: Path, method: str, seed: int, final: float, done: bool = True, lag: int = 16, scale: float = 1.0
) -> None:
    """What a cell leaves behind."""
    folder = out / Cell("quickstart_constant", method, lag, scale, seed).folder
    folder.mkdir(parents=True)
    signals = {"sample/staleness_mean": 16.0, "importance/ess_ratio": 0.5, "grad/cosine": 0.1, "bench/cpu_s": 1.0}
    rows = [{"step": n, **signals} for n in range(3)] + [
        {"step": n, "val/pass@1": final if n else 0.1} for n in range(4)
    ]
    pd.DataFrame(rows).to_csv(folder / "metrics.csv", index=False)
    if done:
        (folder / RESULT).write_text(json.dumps({"error": None, "wall_s": 1.0}))


def test_shares_of_the_language_model_are_of_one_kind_of_device(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its synchronous runs ended at 0.54 on a CPU, and the same seed and rate at 0.68 on a GPU."""
    monkeypatch.setattr(first_grid, "FOLDER", own_folder)
    rows = [("uncorrected", 0, seed, 0.5, "cpu") for seed in (0, 1)]
    rows += [("uncorrected", 0, 100, 0.9, "cuda"), ("uncorrected+drift", 0, 0, 0.9, "cuda")]
    rows += [("vcpo", 16, 0, 0.3, "cpu"), ("vcpo", 16, 1, 0.3, "cuda"), ("vcpo", 16, 2, 0.3, "cuda")]
    steps = [
        dict.fromkeys(table.COLUMNS.values(), 0.1)
        | dict(regime="smollm2", method=method, lag=lag, learning_rate_scale=1.0, seed=seed, step=step, device=device)
        | {"accuracy": final if step else 0.1, "staleness_mean": float(lag), "error": None}
        for method, lag, seed, final, device in rows
        for step in range(3)
    ]
    for name in ("smollm2", "gac_map"):
        of_it = [row for row in steps if (name == "gac_map") is row["method"].endswith("drift")]
        table.write_table(pd.DataFrame(of_it), own_folder / f"{name}.parquet")
    assert first_grid.kept_by_language_model("vcpo", 16) == {"cpu": "0.50 (1 seed)", "cuda": "0.25 ± 0.00 (2 seeds)"}


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(shown_runs, "FOLDER", tmp_path)
    shown_runs.runs_of.cache_clear()
    yield tmp_path
    shown_runs.runs_of.cache_clear()


def test_what_a_grid_has_finished_is_shown_in_pairs(own_folder: Path) -> None:
    assert page.BLOCKS["gac"]().startswith("Not run yet: `python scripts/staleness_bench.py --suite gac")
    shown_runs.runs_of.cache_clear()
    out = own_folder / "grid"
    for seed in range(3):
        finished(out, "ppo_clip", seed, PLAIN[seed])
        finished(out, "ppo_clip+gac", seed, GAC[seed])
    finished(out, "ppo_clip", 3, 0.1)  # its partner is not finished
    finished(out, "ppo_clip+gac", 3, 0.9, done=False)
    page.collect("gac", out, own_folder)
    (row,) = [line for line in page.BLOCKS["gac"]().splitlines() if line.startswith("| ppo_clip+gac ")]
    p = ttest_rel(GAC, PLAIN).pvalue
    assert "| 16 | 0.2 † | 3 | 0.700 ± " in row
    assert "| 0.133 ± " in row
    assert "(3 pairs)" in row
    assert row.endswith(f"| {p:.3f} | {p:.3f} |")
    assert "| [`gac.parquet`](results/gac.parquet) | 7 |" in page.BLOCKS["sources"]()


@pytest.mark.slow
def test_of_a_grid_that_is_not_finished_every_method_has_the_same_search_and_seeds(own_folder: Path) -> None:
    out = own_folder / "grid"
    for seed in (0, 1):
        finished(out, "ppo_clip", seed, 0.9, lag=0)
    for scale, clip, vcpo in ((0.3, 0.4, 0.2), (1.0, 0.3, 0.8)):
        finished(out, "ppo_clip", 100, clip, scale=scale)
        finished(out, "vcpo", 100, vcpo, scale=scale)
    page.collect("equal_tuning", out, own_folder)
    lines = page.BLOCKS["equal_tuning"]().splitlines()
    assert lines[0] == "Lag 16 (`quickstart_constant`, 0.2 † generations), the search alone:"
    assert lines[4] == "| quickstart_constant | vcpo | 16 | 0.200 | 0.800 |"  # the best is the first
    for seed in (0, 1):
        finished(out, "ppo_clip", seed, 0.5, scale=0.3)
        finished(out, "vcpo", seed, 0.7)
    finished(out, "ppo_clip", 2, 0.6, scale=0.3)  # the other method has not got this seed
    finished(out, "vcpo", 0, 1.0, scale=3.0)  # nor this one the rate
    shown_runs.runs_of.cache_clear()
    page.collect("equal_tuning", out, own_folder)
    lines = page.BLOCKS["equal_tuning"]().splitlines()
    assert lines[0] == "Lag 16 (`quickstart_constant`, 0.2 † generations):"
    first, second = lines[4:]
    assert first == "| vcpo | 1 | 0.75 ± 0.00 | 0.200 ± 0.000 |  |"
    assert second == "| ppo_clip | 0.3 | 0.50 ± 0.00 |  |  |"
    for seed in (0, 1):  # now both have
        finished(out, "ppo_clip", seed, 0.55)
    shown_runs.runs_of.cache_clear()
    page.collect("equal_tuning", out, own_folder)
    assert "| ppo_clip | 1 | 0.56 ± 0.00 |" in page.BLOCKS["equal_tuning"]()


def test_a_grid_may_be_collected_in_parts_from_several_machines(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for machine, (commit, final) in enumerate({"abc": 0.5, "def": 0.6}.items()):
        monkeypatch.setattr(table, "checked_out", lambda commit=commit: commit)
        finished(own_folder / f"{machine}", "gac", machine, final)
        finished(own_folder / f"{machine}", "vcpo", 7, final)  # trained again on the second
        page.collect("gac", own_folder / f"{machine}", own_folder)
    runs = shown_runs.runs_of("gac")
    assert runs is not None
    assert runs.set_index(["method", "seed"])["final"].round(3).to_dict() == {
        ("gac", 0): 0.5,
        ("gac", 1): 0.6,
        ("vcpo", 7): 0.6,
    }
    assert json.loads((own_folder / "sources.json").read_text())["gac"]["commit"] == "abc, def"
    page.collect("gac", own_folder / "1", own_folder)
    assert json.loads((own_folder / "sources.json").read_text())["gac"]["commit"] == "abc, def"


def test_what_is_known_is_reported_without_a_run_also_of_a_suite_without_a_synchronous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    words = ["--suite", "gac_half", "--known", "docs/results/gac_half.parquet", "--out", str(tmp_path / "new" / "out")]
    monkeypatch.setattr("sys.argv", ["staleness_bench.py", *words])
    staleness_bench.main()
    assert "| ppo_clip+gac_two_sided | 16 | 10 | 0.808 ± " in capsys.readouterr().out
    assert "Without a synchronous run" in (tmp_path / "new" / "out" / "report.html").read_text()
    assert not (tmp_path / "new" / "out" / "cells").exists()


def test_a_suite_that_only_searches_has_a_report(tmp_path: Path) -> None:
    said = write_report(table.read_table(Path("docs/results/gac_search.parquet")), tmp_path, command="")
    assert "| quickstart_constant | ppo_clip | 16 | 0.757 | 0.555 |" in said
    assert "Nothing but the search" in (tmp_path / "report.html").read_text()
