"""Packaging: one version number, types, a source distribution with the tests, and no import of wandb unless used."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import lit_async_rl

ROOT = Path(__file__).parents[2]
RUN = """
import sys
import lit_async_rl
assert "torch" not in sys.modules and "wandb" not in sys.modules
from lit_async_rl.cli.app import main
assert "wandb" not in sys.modules, "the command line imports wandb"
main(sys.argv[1:])
assert "wandb" not in sys.modules, "a run without its logger imports wandb"
"""


@pytest.mark.slow
def test_wandb_is_imported_only_by_a_run_that_logs_to_it(tmp_path):
    tiny = {"data.groups_per_step": 2, "data.group_size": 2, "trainer.max_steps": 1, "data.validation.prompts": "null"}
    tiny |= {"trainer.logger.init_args.save_dir": str(tmp_path), "trainer.val_check_interval": "null"}
    flags = [word for name, value in tiny.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-c", RUN, "--config", "configs/quickstart.yaml", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]


def test_the_version_stands_in_one_place():
    version = re.escape(lit_async_rl.__version__)
    holders = [ROOT / "pyproject.toml", *(ROOT / "lit_async_rl").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]
    found = [path.name for path in holders if re.search(rf"version.* = \"{version}\"", path.read_text())]
    assert found == ["__init__.py"]
    assert f"version: {lit_async_rl.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {lit_async_rl.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_no_folder_of_tests_stands_in_for_a_package():
    """They are on the path, so that one named `ray` would be found where Ray is not installed."""
    required = re.findall(r'"([\w-]+)(?:\[[^]]*])?[<>=]', (ROOT / "pyproject.toml").read_text())
    assert {"torch", "ray", "vllm"} <= set(required)
    folders = {path.name for path in (ROOT / "tests").iterdir() if any(path.glob("*.py"))}
    assert not folders & {name.replace("-", "_") for name in required}


@pytest.mark.slow
def test_distributions_hold_types_licence_stubs_and_tests(tmp_path):
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (wheel,), (source,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    packed = set(zipfile.ZipFile(wheel).namelist())
    needed = "py.typed", "__init__.pyi", "callbacks/run/weight_sync.py", "assets/sort_policy/model.safetensors"
    for name in (*needed, "configs/defaults.yaml"):
        assert f"lit_async_rl/{name}" in packed
    assert any(name.endswith("licenses/LICENSE") for name in packed)
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()
    folders = ("tests/", "configs/", "scripts/", "benchmarks/", "examples/", "docs/", ".ci/", ".github/")
    missing = {name for name in tracked if name.startswith(folders)} - names
    assert not missing, sorted(missing)[:10]


def shortest_script() -> str:
    """The README's first example."""
    return re.search(r"<!-- python-first -->.*?```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]


@pytest.mark.slow
def test_the_shortest_script_trains_from_a_wheel_in_an_empty_folder(tmp_path):
    script = shortest_script()
    assert sum(bool(line.strip()) for line in script.splitlines()) <= 8
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    site, empty = tmp_path / "site", tmp_path / "empty"
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    (points,) = site.glob("*.dist-info/entry_points.txt")
    assert "lit-async-rl = lit_async_rl.cli.console:main" in points.read_text()
    empty.mkdir()
    (empty / "train.py").write_text(script.replace("max_steps=100", "max_steps=2") + "print(rl.__file__)\n")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(site)}
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert str(site) in done.stdout
    assert "optimizer steps     │ 2 " in done.stdout
    assert {"metrics.csv", "samples.jsonl"} <= {path.name for path in (empty / "runs").rglob("*")}
