"""The commands of README and documentation, run page by page as a reader would, with few steps, and looked at."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
from made import link_sources
from markdown_blocks import ROOT, commands
from preloaded import Done, Preloaded

pytestmark = pytest.mark.timeout(300)
SHORT = [
    *("--trainer.max_steps", "3", "--data.groups_per_step", "4", "--data.group_size", "2"),
    *("--data.validation.prompts.init_args.size", "4", "--trainer.val_check_interval", "3"),
]
LONGER = [*SHORT, "--trainer.max_steps", "5"]
PAGES = [
    *("README.md", "docs/command_line.md", "docs/checkpoints.md", "docs/engines.md", "docs/environments.md"),
    *("docs/evaluation.md", "docs/models.md", "docs/stabilizers.md"),
]
ELSEWHERE = {  # commands that another test runs, or that no laptop can
    r"^(make|pip|git|source|cd)\b": "make quickstart and the tests themselves",
    r"--help$": "long on purpose",
    r"gsm8k|torchrun|srun|smollm2": "GPUs, the Hugging Face hub, and a model of 270 MB",
    r"vllm|serve\.py": "tests/with_vllm",
    r"strategies/": "tests/distributed",
    r"RayEngine|RayCluster|configs/ray|cluster": "tests/with_ray",
    r"convert_hf_to_gguf": "llama.cpp's own",
    r"optuna": "tests/product/test_searches.py",
    r"agent_calculator": "tests/agents/test_guide.py, and benchmarks/agents",
    r"benchmarks/|staleness_bench|plot_bench|bench|time_to_accuracy": "tests/integration: benchmarks",
}
UNWANTED = re.compile(r"(?i)\bwarn|deprecat|traceback|\berror\b|not set|instead")
SUBCOMMANDS = {"train", "evaluate", "export", "chat", "tape"}


def is_run_elsewhere(line: str) -> bool:
    return any(re.search(pattern, line) for pattern in ELSEWHERE)


def runnable(page: str) -> list[list[str]]:
    found = [[word.replace("$seed", "0") for word in words] for words in commands(ROOT / page)]
    lines = dict.fromkeys(tuple(words) for words in found if words[0] == "python" or words[:2] == ["lit-async-rl", "x"])
    return [list(words) for words in lines if not is_run_elsewhere(" ".join(words))]


def run(process: Preloaded, words: list[str], folder: Path) -> Done:
    """One documented command, shortened."""
    name = Path(words[1]).stem
    rest = [one for word in words[2:] for one in ([*map(str, _glob(folder, word))] if "*" in word else [word])]
    rest = [re.sub(r"epoch=0-step=\d+", "last", word) for word in rest]
    if name in SUBCOMMANDS:
        short = {"train": LONGER if "--ckpt_path" in rest else SHORT, "evaluate": SHORT, "export": SHORT}.get(name, [])
        return process.run([name, *rest, *short], folder, {"WANDB_MODE": "offline"}, limit_s=120)
    script = str(ROOT / words[1])
    code = f"import runpy, sys; sys.argv = {[name, *rest]!r}; runpy.run_path({script!r}, run_name='__main__')"
    return process.run([], folder, code=code, limit_s=120)


def _glob(folder: Path, pattern: str) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.glob(pattern))


def look_at(done: Done, words: list[str], folder: Path) -> None:
    """What a person would look for in the output."""
    said = done.said
    assert done.status == 0, said
    about_wandb = [line for line in said.splitlines() if line.startswith("wandb:")]
    assert not UNWANTED.search("\n".join(line for line in said.splitlines() if line not in about_wandb)), said
    {"train": trained, "evaluate": evaluated, "export": exported, "chat": answered, "tape": looked_at_tape}.get(
        Path(words[1]).stem, lambda *_: None
    )(said, words, folder)


def trained(said: str, words: list[str], folder: Path) -> None:
    assert "run summary" in said
    assert re.search(rf"optimizer steps\s+│ {2 if '--ckpt_path' in words else 3} ", said)
    run_folder = folder / re.search(r"metrics and samples\s+│ (\S+)", said)[1]
    with (run_folder / "metrics.csv").open(newline="") as file:
        rewards = [float(row["reward/mean"]) for row in csv.DictReader(file) if row["reward/mean"]]
    assert len(rewards) == (5 if "--ckpt_path" in words else 3)
    assert all(0 <= reward <= 1 for reward in rewards)
    assert (folder / re.search(r"checkpoint\s+│ (\S+)", said)[1]).is_file()


def evaluated(said: str, words: list[str], folder: Path) -> None:
    assert 0 <= float(re.search(r"val/pass@1 +([\d.]+)", said)[1]) <= 1
    assert len(re.findall(r"│ \d{8}= ", said)) == 4, "a sample of each prompt"
    if "--data.validation.num_samples" in words:
        assert "val/pass@8" in said


def exported(said: str, words: list[str], folder: Path) -> None:
    assert re.search(r"version \d+ written to runs/sorter", said)
    assert (folder / "runs/sorter/model.safetensors").is_file()


def answered(said: str, words: list[str], folder: Path) -> None:
    assert re.fullmatch(r"\d{8}\n", said), "eight digits, and nothing else"


def looked_at_tape(said: str, words: list[str], folder: Path) -> None:
    expected = {
        "list": "3 steps, 12 groups, 24 rollouts",
        "filter": "groups written to runs/fresh",
        "sample": "-- step",
        "plot": "written to tape.png",
    }
    assert expected[words[2]] in said


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_do_what_it_says(page, process, tmp_path):
    folder = tmp_path / "here"
    link_sources(folder)
    listed = runnable(page)
    assert listed
    first = " ".join(listed[0])
    if "--ckpt_path" not in first and "tape.py" in first:  # the page's configuration records one
        tape = ["--trainer.callbacks+=RolloutTape", "--trainer.callbacks.folder", "runs/tape"]
        look_at(run(process, [*QUICK, *tape], folder), QUICK, folder)
    for words in listed:
        if "lora" in " ".join(words):
            pytest.importorskip("peft")
        look_at(run(process, words, folder), words, folder)


QUICK = ["python", "scripts/train.py", "--config", "configs/quickstart.yaml"]


def test_every_command_is_run_here_or_elsewhere():
    pages = [ROOT / "README.md", ROOT / "configs/README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for page in pages:
        name = str(page.relative_to(ROOT))
        assert name in PAGES or not runnable(name), f"{name}: nobody runs {runnable(name)}"
