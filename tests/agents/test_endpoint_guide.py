"""The guide to the endpoint, word for word: its agents train, and no key is found in what a run writes."""

import pytest
from markdown_blocks import ROOT
from page_runs import TIMEOUT_S, check_that_no_file_has, shown, train

PAGE = ROOT / "docs" / "agents.md"
PLANTED = "sk-planted-4f7c1d9be2a64d0c"
pytestmark = pytest.mark.timeout(500)


@pytest.mark.slow
def test_the_agent_in_python_trains(process, tmp_path):
    runs = train(tmp_path, shown(PAGE, tmp_path, "EndpointClients"), process=process)
    assert len(next(runs.rglob("metrics.csv")).read_text().splitlines()) > 2


@pytest.mark.slow
def test_the_program_trains_and_no_key_is_written_anywhere(process, tmp_path):
    """Each agent notes its key where the run cannot see it, and writes its environment to stderr."""
    config = shown(PAGE, tmp_path, "CommandAgent")
    keys = tmp_path / "elsewhere"
    keys.mkdir()
    script = tmp_path / "my_agent_script.py"
    noted = f"import os, pathlib, sys\nplace = pathlib.Path({str(keys)!r}, str(os.getpid()))\n"
    noted += "place.write_text(os.environ['OPENAI_API_KEY'])\nprint(dict(os.environ), file=sys.stderr)\n"
    script.write_text(noted + script.read_text())
    runs = tmp_path / "runs"
    flags = ["--trainer.callbacks+=RolloutTape", "--trainer.callbacks.folder", str(runs / "tape")]
    flags += ["--data.max_staleness", "0"]  # each episode is a process that imports openai: none ahead
    variables = {"OPENAI_API_KEY": PLANTED, "MY_TOOL_API_KEY": PLANTED, "WANDB_MODE": "offline"}
    train(tmp_path, config, *flags, process=process, **variables)
    secrets = {PLANTED, *(path.read_text() for path in keys.iterdir())}
    assert len(secrets) >= 1 + 2 * 2 * 2
    metrics = next(runs.rglob("metrics.csv"))
    said = process.run(["report", str(metrics.parent)], tmp_path, limit_s=TIMEOUT_S)
    assert said.status == 0, said.said[-2000:]
    assert list(runs.rglob("tape/*"))
    assert list(tmp_path.rglob("*.html"))
    check_that_no_file_has(secrets, tmp_path, but=keys)
