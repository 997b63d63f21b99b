"""Shipped configurations for GPUs: each is built on a CPU with a tiny model, and what it recommends is accepted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.strategies import Strategy

import lit_async_rl
from lit_async_rl.assets import asset
from lit_async_rl.cli.app import AsyncRLCLI

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
ENGINES = ("gsm8k_grpo_vllm.yaml", "multi_node_vllm.yaml")
BASE = "gsm8k_grpo.yaml"
NEEDS_GPU = [CONFIGS / name for name in (BASE, *ENGINES)] + sorted((CONFIGS / "strategies").glob("*.yaml"))


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("NODE_RANK", "0")  # as a launcher would: one configuration is for several machines


def built(path: Path, folder: Path) -> AsyncRLCLI:
    """All parts of GSM8K with this overlay, on as many processes of a CPU, which are not started."""
    settings = yaml.safe_load(path.read_text())
    ranks = settings.get("cluster", {}).get("init_args", {}).get("trainer_ranks", 2)
    asked = settings["trainer"].get("devices", ranks)
    devices = {list: len, int: int, str: lambda _: 2}[type(asked)](asked)
    model = str(asset("sort_policy"))
    overlay = [] if path.name == BASE else ["--config", str(path.relative_to(ROOT))]
    return AsyncRLCLI(
        [
            *("--config", f"configs/{BASE}", *overlay),
            *("--model.model", model, "--data.prompts", "SortDigits"),
            *("--data.validation.prompts", "null"),
            *("--trainer.accelerator", "cpu", "--trainer.devices", str(devices)),
            *("--trainer.logger.init_args.save_dir", str(folder)),
        ]
    )


def test_every_configuration_that_names_gpus_is_among_those_built_here():
    named = set()
    for path in CONFIGS.rglob("*.yaml"):
        settings = yaml.safe_load(path.read_text()) or {}
        trainer = settings.get("trainer") or {}
        if trainer.get("accelerator") == "gpu" or trainer.get("devices") not in (None, 1, "auto"):
            named.add(path)
    assert named <= set(NEEDS_GPU), named - set(NEEDS_GPU)


@pytest.mark.parametrize("path", NEEDS_GPU, ids=lambda path: path.stem)
def test_all_parts_are_built(path, tmp_path):
    cli = built(path, tmp_path)
    assert isinstance(cli.trainer.strategy, Strategy)
    settings = yaml.safe_load(path.read_text())
    if "strategy" in settings["trainer"]:
        asked = settings["trainer"]["strategy"]["class_path"]
        assert type(cli.trainer.strategy).__name__ == asked.rpartition(".")[2]
    if "engine" in settings.get("data", {}):
        engine = settings["data"]["engine"]
        found = cli.datamodule.engine
        if isinstance(found, lit_async_rl.RayEngine):
            found = found.engine
        assert type(found).__name__ == engine["class_path"]
        if "transfer" in engine["init_args"]:
            assert type(found.transfer).__name__ == engine["init_args"]["transfer"]["class_path"]


@pytest.mark.parametrize("name", ENGINES)
def test_a_transfer_that_a_comment_names_can_be_set(name, tmp_path):
    text = (CONFIGS / name).read_text()
    engine = yaml.safe_load(text)["data"]["engine"]
    kind = getattr(lit_async_rl, engine["class_path"])
    for transfer in set(re.findall(r"#.*?\b(\w+Transfer)\b", text)):
        kind(**{**engine["init_args"], "transfer": getattr(lit_async_rl, transfer)()})


def test_context_parallelism_is_refused_with_what_helps_instead():
    with pytest.raises(
        ValueError, match=r"context_parallel_size=2 is not supported: sequences are not split .*gradient_checkpointing"
    ):
        lit_async_rl.ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1, context_parallel_size=2)
    lit_async_rl.ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1, context_parallel_size=1)
