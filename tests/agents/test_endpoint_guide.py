"""The guide to the endpoint, word for word: its agents train, and no key is found in what a run writes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from markdown_blocks import ROOT, blocks_of

PAGE = ROOT / "docs" / "agent_endpoint.md"
PLANTED = "sk-planted-4f7c1d9be2a64d0c"
TIMEOUT_S = 240.0
pytestmark = pytest.mark.timeout(300)


def shown(folder: Path, number: int) -> Path:
    """The page's Python as files, and one of its configurations."""
    for block in blocks_of(PAGE):
        if block.language == "python" and block.module:
            (folder / f"{block.module}.py").write_text(block.code)
    path = folder / "shown.yaml"
    path.write_text([block.code for block in blocks_of(PAGE) if block.language == "yaml"][number])
    return path


def train(folder: Path, config: Path, *flags: str, **variables: str) -> Path:
    """Two steps of the quick start with a configuration of the page, by the command; the folder of its runs."""
    small = folder / "small.yaml"
    data = {"groups_per_step": 2, "group_size": 2, "aggregation": "TokenMean"}
    data["validation"] = {"prompts": {"class_path": "SortDigits", "init_args": {"size": 2, "split": "held_out"}}}
    model = {"loss": "PPOClip", "proximal": None, "correction": None, "baseline": None, "scheduler": None}
    model["model"] = str(ROOT / "lit_async_rl" / "assets" / "sort_policy")
    trainer = {"max_steps": 2, "val_check_interval": 2, "enable_progress_bar": False}
    small.write_text(yaml.safe_dump({"data": data, "model": model, "trainer": trainer}))
    configs = [ROOT / "configs" / "quickstart.yaml", small, config]
    command = [sys.executable, str(ROOT / "scripts" / "train.py")]
    command += [word for path in configs for word in ("--config", str(path))]
    command += ["--trainer.logger.save_dir", str(folder / "runs"), "--trainer.logger.version", "0", *flags]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    paths["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | paths | variables
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    (folder / "said.txt").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder / "runs"


@pytest.mark.slow
def test_the_agent_in_python_trains(tmp_path):
    runs = train(tmp_path, shown(tmp_path, 0))
    assert len(next(runs.rglob("metrics.csv")).read_text().splitlines()) > 2


@pytest.mark.slow
def test_the_program_trains_and_no_key_is_written_anywhere(tmp_path):
    """Each agent notes its key where the run cannot see it, and writes its environment to stderr."""
    config = shown(tmp_path, 1)
    keys = tmp_path / "elsewhere"
    keys.mkdir()
    script = tmp_path / "my_agent_script.py"
    noted = f"import os, pathlib, sys\nplace = pathlib.Path({str(keys)!r}, str(os.getpid()))\n"
    noted += "place.write_text(os.environ['OPENAI_API_KEY'])\nprint(dict(os.environ), file=sys.stderr)\n"
    script.write_text(noted + script.read_text())
    runs = tmp_path / "runs"
    flags = ["--trainer.callbacks+=RolloutTape", "--trainer.callbacks.folder", str(runs / "tape")]
    variables = {"OPENAI_API_KEY": PLANTED, "MY_TOOL_API_KEY": PLANTED, "WANDB_MODE": "offline"}
    train(tmp_path, config, *flags, **variables)
    secrets = {PLANTED, *(path.read_text() for path in keys.iterdir())}
    assert len(secrets) >= 1 + 2 * 2 * 2
    metrics = next(runs.rglob("metrics.csv"))
    report = [sys.executable, "-c", "from lit_async_rl.cli.console import main; main()", "report", str(metrics.parent)]
    said = subprocess.run(
        report, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=TIMEOUT_S
    )
    assert said.returncode == 0, said.stderr[-2000:]
    written = [path for path in tmp_path.rglob("*") if path.is_file() and keys not in path.parents]
    assert {path.suffix for path in written} >= {".yaml", ".ckpt", ".csv", ".html"}
    assert list(runs.rglob("tape/*"))
    for path in written:
        data = path.read_bytes()
        assert not any(secret.encode() in data for secret in secrets), f"{path} has a key"
