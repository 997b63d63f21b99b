"""The report of real runs of the quick start, from the command line, in a real browser."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import numpy as np
import pytest
from launch import launch, start

browser = pytest.importorskip("browser", reason="selenium is not installed")
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

from lit_async_rl.report import write_report  # noqa: E402
from lit_async_rl.report.trace_files import Spans  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not browser.is_there and not browser.IS_NEEDED, reason=browser.MISSING),
    pytest.mark.slow,
    pytest.mark.timeout(1500),
]
ROOT = Path(__file__).parents[2]
STEPS = 20
OVERLAYS = {"asynchronous": [], "synchronous": ["--config", "configs/quickstart_sync.yaml"]}
TABS = ("overview", "curves", "pipeline", "rollouts", "compare")


def flags_of(folder: Path, name: str, steps: int) -> list[str]:
    flags = ["--config", "configs/quickstart.yaml", *OVERLAYS[name], "--trainer.max_steps", str(steps)]
    flags += ["--trainer.val_check_interval", "10", "--data.validation.prompts.init_args.size", "64"]
    flags += ["--defaults.samples.init_args.every_n_steps", "5", "--trainer.enable_progress_bar", "false"]
    return [*flags, "--trainer.logger.init_args.save_dir", str(folder), "--trainer.logger.init_args.name", name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    for name in OVERLAYS:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(ROOT)
            launch(ROOT / "scripts/train.py", flags_of(folder, name, STEPS), 1, timeout_s=600)
    return {name: folder / name / "version_0" for name in OVERLAYS}


@pytest.fixture(scope="module")
def driver():
    with browser.chromium() as found:
        yield found


def look_at_all(driver, page: Path) -> None:
    """Opens every view, and waits until each chart has colours."""
    browser.resize(driver, 1440, 6000)  # charts are drawn when they are seen
    browser.errors(driver)
    for tab in TABS:
        browser.show(driver, page, tab)
        WebDriverWait(driver, 60, 0.1).until(
            lambda d: d.execute_script(
                "const boxes = [...document.querySelectorAll('#view .chart')];"
                "return document.querySelector('#view').children.length > 0"
                " && boxes.every(box => box.querySelector('canvas'))"
            )
        )
    assert browser.errors(driver) == []


def on_page(driver, number: int) -> dict:
    """What the page has of a run."""
    return json.loads(driver.execute_script("return document.querySelector('#data').textContent"))["runs"][number]


def drawn(driver, number: int) -> list[list[float]]:
    """Lane, begin and end of each bar of a run's Gantt chart, from the chart itself."""
    return driver.execute_script(
        "return echarts.getInstanceByDom(document.querySelectorAll('.gantt .chart')[arguments[0]])"
        ".getOption().series[0].data",
        number,
    )


def seconds_of(run: dict, chart: list[list[float]], kind: str) -> float:
    """Seconds that bars of a kind take in the window of the verdict, validation left out."""
    timeline, verdict = run["timeline"], run["verdict"]
    (window,) = timeline["windows"]  # all spans of the run
    assert len(chart) == len(window["spans"]) == timeline["num_spans"]

    def bars(kind: str) -> Spans:
        chosen = [bar for bar, span in zip(chart, window["spans"], strict=True) if window["kinds"][span[1]] == kind]
        begin, end = np.array([bar[1:] for bar in chosen]).reshape(-1, 2).T + timeline["origin"]
        return Spans(begin, end)

    return bars(kind).outside(bars("trainer/validation"), verdict["began_at"], verdict["ended_at"])


@pytest.mark.sweep  # two whole runs; test_idle_agrees has the property without a browser
def test_idle_time_read_from_the_chart_is_that_of_the_verdict(driver, runs, tmp_path):
    page = write_report(*runs.values(), out=tmp_path / "report.html")
    look_at_all(driver, page)
    browser.show(driver, page, "pipeline")
    WebDriverWait(driver, 60, 0.1).until(lambda d: len(d.find_elements("css selector", ".gantt canvas")) == 2)
    shares = {}
    for number, name in enumerate(runs):
        run, chart = on_page(driver, number), drawn(driver, number)
        said = run["verdict"]
        kinds = {"wait_s": "trainer/wait", "sync_s": "trainer/publish", "idle_s": "engine/idle"}
        read = {key: seconds_of(run, chart, kind) for key, kind in kinds.items()}
        said = {**said, "idle_s": said["wall_s"] - said["engine_busy_s"]}
        shares[name] = {key: read[key] / said["wall_s"] for key in read}
        for key, share in shares[name].items():
            assert share == pytest.approx(said[key] / said["wall_s"], abs=0.01), (name, key)
            if key != "idle_s":
                assert run["idle"][key] == pytest.approx(said[key], abs=0.01 * said["wall_s"]), (name, key)
    assert shares["synchronous"]["wait_s"] > shares["asynchronous"]["wait_s"] + 0.1
    assert shares["synchronous"]["idle_s"] > shares["asynchronous"]["idle_s"] + 0.1
    print({name: {key: round(share, 4) for key, share in of.items()} for name, of in shares.items()})


def test_a_run_killed_at_any_moment_leaves_a_report_that_opens(driver, tmp_path, monkeypatch):
    name = "asynchronous"
    rng = random.Random(int(time.time()))
    monkeypatch.chdir(ROOT)
    (process,) = start(ROOT / "scripts/train.py", flags_of(tmp_path, name, 10_000), 1)
    folder, deadline = tmp_path / name / "version_0", time.monotonic() + 300
    while not (folder / "timeline/rank0.json").exists() and time.monotonic() < deadline:
        assert process.returncode is None, process.communicate(1.0)
        time.sleep(0.05)
    for moment in range(4):  # a report of the run as it is now, and one of what the kill leaves
        time.sleep(rng.uniform(0.2, 4.0))
        if moment == 3:
            process.kill()
            process.communicate(30.0)
        page = write_report(folder, out=tmp_path / f"{moment}.html")
        look_at_all(driver, page)
    assert on_page(driver, 0)["timeline"]["num_spans"] > 0
