"""Every shipped YAML is a test: it parses, and what it names can be built."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launch import consolidate, finish, start
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_async_rl.cli.app import AsyncRLCLI, evaluate, export, main
from lit_async_rl.utils.config_files import load_config, with_bases

ROOT = Path(__file__).parents[2]
BASE = ["--config", "configs/quickstart.yaml"]
NEEDS_HUB = {name: ["gsm8k_grpo.yaml"] for name in ("gsm8k_grpo_vllm.yaml", "multi_node_vllm.yaml")}  # behind others
NEEDS_HUB |= {"gsm8k_grpo.yaml": [], "code_reward.yaml": []}
OTHERS = {"quickstart.yaml", "warm_start.yaml", "smollm2_sft.yaml", "distill.yaml", *NEEDS_HUB}
NO_OVERLAYS = {"strategies", "time_to_accuracy", "sweeps", "clusters", "suites"}  # parts
STRATEGIES = {p.stem for p in (ROOT / "configs/strategies").iterdir()}


def names_a_folder(path: Path) -> bool:
    """Whether its model is one that `lit-async-rl fetch` makes, which a fresh clone has not."""
    return str(load_config(path).get("model", {}).get("model", "")).startswith("models/")


OVERLAYS = sorted(
    p for p in (ROOT / "configs").rglob("*.yaml") if p.name not in OTHERS and p.parent.name not in NO_OVERLAYS
)
FETCHED = [p for p in OVERLAYS if names_a_folder(p)]
ADDED = [p for p in OVERLAYS if p not in FETCHED]
TINY = [
    *("--data.groups_per_step", "4", "--data.group_size", "4", "--trainer.max_steps", "2", "--num_threads", "1"),
    *("--trainer.val_check_interval", "2", "--data.validation.prompts.init_args.size", "8"),
]


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("WANDB_MODE", "offline")


def logs(tmp_path) -> list[str]:
    return ["--trainer.logger.init_args.save_dir", str(tmp_path)]


@pytest.mark.parametrize("path", ADDED, ids=lambda p: str(p.relative_to(ROOT / "configs")))
@pytest.mark.slow
def test_added_behind_its_base_it_builds(path, tmp_path, monkeypatch):
    base = ["--config", "configs/bench/base.yaml"] if path.parent.name in ("methods", "regimes") else BASE
    base = ["--config", "configs/calculator.yaml"] if path.name == "sampo.yaml" else base
    database = f"--trainer.logger.init_args.tracking_uri=sqlite:///{tmp_path}/mlflow.db"
    cli = AsyncRLCLI([*base, "--config", str(path), *logs(tmp_path), *([database] if path.stem == "mlflow" else [])])
    assert cli.datamodule.model == cli.config["model"]["model"]
    if path.parent.name in ("stabilizers", "systems"):
        check_arguments(cli.config, base, path, tmp_path, monkeypatch)


def check_arguments(over, base, path, tmp_path, monkeypatch):
    """Each class that an overlay names has the overlay's arguments, whatever the base gave it.

    Where both name the same class, arguments that the overlay leaves out would be those of the base.
    """
    named = {
        (part, name)
        for file in with_bases(path)
        for part, settings in load_config(file).items()
        if part in ("model", "data")
        for name, value in settings.items()
        if isinstance(value, str) or (isinstance(value, dict) and "class_path" in value)
    }
    cleared = tmp_path / "cleared.yaml"
    lines = [
        f"{part}: {{{', '.join(f'{name}: null' for of, name in named if of == part)}}}" for part in ("model", "data")
    ]
    cleared.write_text("\n".join(lines) + "\n")
    alone = parsed(monkeypatch, *base, "--config", str(cleared), "--config", str(path))
    assert {key: over[".".join(key)] for key in named} == {key: alone[".".join(key)] for key in named}


@pytest.mark.slow
def test_bar_and_checkpoints_can_be_switched_off(tmp_path):
    off = ["--trainer.enable_checkpointing", "false"]
    cli = AsyncRLCLI([*BASE, *logs(tmp_path), *off, "--trainer.enable_progress_bar", "false"])
    assert not {"Progress", "SaveOnSigterm", "LinkedCheckpoint"} & {type(c).__name__ for c in cli.trainer.callbacks}


def parsed(monkeypatch, *words):
    """All settings of a command line, of which nothing is made."""
    monkeypatch.setattr(AsyncRLCLI, "instantiate_classes", lambda self: None)
    return AsyncRLCLI(words).config


@pytest.mark.parametrize(
    "files", [["--config", "{}"], ["--config={}"], ["-c", "{}"], ["-c={}"], ["-c{}"]], ids=" ".join
)
def test_a_flag_wins_wherever_it_stands_and_files_keep_their_order(files, tmp_path, monkeypatch):
    mine = tmp_path / "mine.yaml"
    mine.write_text("data: {max_staleness: 3, group_size: 6}\ntrainer: {callbacks: [LengthBiasMonitor]}\n")
    first, last = ([word.format(path) for word in files] for path in (BASE[1], mine))
    added = ["--trainer.callbacks+", "SampleLogger", "--trainer.callbacks.every_n_steps", "7"]
    more = ["--trainer.callbacks+", "RolloutMonitor", "--data.max_staleness", "8"]
    config = parsed(monkeypatch, "--data.max_staleness", "7", *first, *added, *last, *more)
    assert (config.data.max_staleness, config.data.group_size, config.data.groups_per_step) == (8, 6, 32)
    names = [callback.class_path.rpartition(".")[2] for callback in config.trainer.callbacks]
    assert names == ["LengthBiasMonitor", "SampleLogger", "RolloutMonitor"]
    assert config.trainer.callbacks[1].init_args.every_n_steps == 7
    assert parsed(monkeypatch, "--data.group_size", "7", *first, *last).data.group_size == 7


@pytest.mark.slow
def test_a_file_builds_on_others_which_it_overrides(tmp_path, monkeypatch):
    (tmp_path / "task.yaml").write_text("data: {max_staleness: 3, group_size: 6}\nmodel: {loss: PPOClip}\n")
    (tmp_path / "mine").mkdir()
    mine = tmp_path / "mine" / "mine.yaml"
    quickstart = ROOT / "configs/quickstart.yaml"
    mine.write_text(f"# mine\nbase:\n  - {quickstart}\n  - ../task.yaml\ndata:\n  group_size: 4\n")
    config = parsed(monkeypatch, "--config", str(mine), "--data.groups_per_step", "2")
    written = parsed(
        monkeypatch,
        *("--config", str(quickstart), "--config", str(tmp_path / "task.yaml")),
        *("--data.group_size", "4", "--data.groups_per_step", "2"),
    )
    assert config.model.loss.class_path.endswith("PPOClip")
    assert "base" not in config
    assert {**vars(config), "config": None} == {**vars(written), "config": None}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("base: none.yaml\n", r"mine\.yaml': its base .*none\.yaml does not exist"),
        ("base: 3\n", r"base must be a path or a list of paths, got \[3\]"),
        ("base: mine.yaml\n", r"base='.*mine\.yaml' builds on itself"),
        ("base: [other.yaml, {}]\n", r"base must be a path or a list of paths, got \['other.yaml', {}\]"),
    ],
)
def test_a_base_that_cannot_be_read_is_named(text, said, tmp_path):
    (tmp_path / "other.yaml").write_text("data: {group_size: 4}\n")
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(SystemExit, match=said):
        main([*BASE, "--config", str(tmp_path / "mine.yaml")])


@pytest.mark.slow
def test_what_a_run_prints_as_its_configuration_trains_without_its_bases(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        AsyncRLCLI([*BASE, "--config", "configs/systems/areal.yaml", "--print_config"])
    (tmp_path / "all.yaml").write_text(capsys.readouterr().out)
    areal = parsed(monkeypatch, *BASE, "--config", "configs/systems/areal.yaml")
    printed = parsed(monkeypatch, "--config", str(tmp_path / "all.yaml"))
    assert {**vars(printed), "config": None} == {**vars(areal), "config": None}


def test_options_of_a_command_keep_their_values_in_front_of_files(monkeypatch):
    monkeypatch.setattr(AsyncRLCLI, "instantiate_classes", lambda self: None)
    extra = {"--out": {"type": str, "required": True}}
    config = AsyncRLCLI(["--out", "here", *BASE, "--data.group_size", "5"], extra).config
    assert (config.out, config.data.group_size) == ("here", 5)


@pytest.mark.parametrize("name", sorted(NEEDS_HUB))
def test_a_configuration_that_needs_the_hub_parses(name, monkeypatch):
    files = [f"configs/{one}" for one in [*NEEDS_HUB[name], name]]
    config = parsed(monkeypatch, *(word for file in files for word in ("--config", file)))
    assert config.model.model == config.data.model


@pytest.mark.parametrize("path", FETCHED, ids=lambda p: str(p.relative_to(ROOT / "configs")))
def test_a_configuration_whose_model_is_fetched_parses(path, monkeypatch):
    base = ["--config", "configs/bench/base.yaml"] if path.parent.name == "regimes" else []
    config = parsed(monkeypatch, *base, "--config", str(path))
    assert config.model.model == config.data.model == "models/smollm2"


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_a_strategy_builds(name):
    flags = ["--trainer.accelerator", "cpu", "--trainer.devices", "8"]
    cli = AsyncRLCLI([*BASE, "--config", f"configs/strategies/{name}.yaml", *flags])
    assert cli.trainer.world_size == 8


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_two_processes_train_from_the_command_line(name, tmp_path):
    """Validation before and after, monitors, a checkpoint that one process resumes from and exports."""
    flags = ["--trainer.accelerator", "cpu", "--trainer.devices", "2"]
    sizes = {"fsdp2": (2, 1), "fsdp2_tp": (1, 2)}.get(name, ())
    for dimension, size in zip(("data_parallel_size", "tensor_parallel_size"), sizes, strict=False):
        flags += [f"--trainer.strategy.init_args.{dimension}", str(size)]
    strategy = ["--config", f"configs/strategies/{name}.yaml", *TINY, *flags, *logs(tmp_path)]
    often = ["--defaults.checkpoint.init_args.every_n_train_steps", "2"]
    words = [*BASE, *often, *strategy]
    if name == "ddp":  # by Lightning's own launcher
        command, environment = [sys.executable, "scripts/train.py", *words], {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=350, env=environment)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        said = done.stdout
    else:
        ranks = start(ROOT / "scripts/train.py", words, 2)
        said = "".join(finish(ranks, 350))
        assert [rank.returncode for rank in ranks] == [0, 0], said[-3000:]
    assert said.count("held-out accuracy before, after") == 1
    timelines = {path.name: path.read_text() for path in tmp_path.rglob("timeline/*.json")}
    assert set(timelines) == {"rank0.json", "rank1.json"}
    assert all('"forward_backward"' in text and '"wait"' in text for text in timelines.values())
    assert '"decode"' in timelines["rank0.json"]
    assert '"pid":1,' in timelines["rank1.json"]
    (checkpoint,) = tmp_path.rglob("last.ckpt")
    if checkpoint.is_dir():  # FSDP1's
        consolidate(str(checkpoint))
        checkpoint = Path(f"{checkpoint}.consolidated")
    main([*BASE, *TINY, *logs(tmp_path), "--trainer.max_steps", "3", "--ckpt_path", str(checkpoint)])
    export([*BASE, "--ckpt_path", str(checkpoint), "--out", str(tmp_path / "exported")])
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "exported")


@pytest.mark.slow
def test_train_evaluate_export_and_chat(process, tmp_path, capsys):
    main([*BASE, *TINY, *logs(tmp_path), "--defaults.checkpoint.init_args.every_n_train_steps", "2"])
    printed = capsys.readouterr().out
    for line in (
        "held-out accuracy before, after",
        "staleness mean, max",
        "trainer waited",
        "engine idle",
        "wall time",
    ):
        assert line in printed
    (run,) = (tmp_path / "quickstart").iterdir()
    assert {"metrics.csv", "samples.jsonl", "config.yaml", "checkpoints"} <= {p.name for p in run.iterdir()}
    header = (run / "metrics.csv").read_text().splitlines()[0]
    for name in ("sample/staleness_max", "importance/ess_ratio", "grad/cosine", "perf/weight_sync_s", "val/pass@1"):
        assert name in header
    checkpoint = str(run / "checkpoints" / "last.ckpt")
    evaluate([*BASE, *TINY, *logs(tmp_path), "--ckpt_path", checkpoint, "--data.validation.num_samples", "3"])
    printed = capsys.readouterr().out
    assert "val/pass@1" in printed
    assert "val/pass@3" in printed
    out = tmp_path / "exported"
    export([*BASE, "--ckpt_path", checkpoint, "--out", str(out)])
    lm, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    saved = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert all(torch.equal(p, saved[f"policy.lm.{name}"]) for name, p in lm.named_parameters())
    assert tokenizer("12=")["input_ids"]
    with pytest.raises(SystemExit, match="not empty"):
        export([*BASE, "--ckpt_path", checkpoint, "--out", str(out)])
    words = ["--model", str(out), "--prompt", "31424210="]
    done = process.script("scripts/chat.py", words, tmp_path, limit_s=100)
    assert done.status == 0, done.said
    assert done.said.strip()


@pytest.mark.slow
def test_a_lora_run_trains_and_exports_merged_weights(tmp_path):
    lora = ["--config", "configs/lora.yaml"]
    main([*BASE, *lora, *TINY, *logs(tmp_path), "--defaults.checkpoint.init_args.every_n_train_steps", "2"])
    (checkpoint,) = tmp_path.rglob("last.ckpt")
    out = tmp_path / "merged"
    export([*BASE, *lora, "--ckpt_path", str(checkpoint), "--out", str(out)])
    merged = AutoModelForCausalLM.from_pretrained(out).state_dict()
    base = AutoModelForCausalLM.from_pretrained("lit_async_rl/assets/sort_policy").state_dict()
    assert merged.keys() == base.keys()
    assert not torch.equal(
        merged["model.layers.0.self_attn.q_proj.weight"], base["model.layers.0.self_attn.q_proj.weight"]
    )
    assert torch.equal(merged["model.norm.weight"], base["model.norm.weight"])
