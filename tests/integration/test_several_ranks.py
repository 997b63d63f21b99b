"""What the command line promises for several ranks, in whole runs of two processes on the CPU."""

import csv
import shutil
import time
from pathlib import Path

import pytest
import torch
from launch import finish, launch, start
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "scripts/train.py"
EVERY = "--defaults.checkpoint.init_args.every_n_train_steps"
STRATEGIES = {
    "ddp": [],
    "fsdp1": ["--trainer.precision", "32-true"],
    "fsdp2": ["--trainer.strategy.init_args.data_parallel_size", "2"],
}
FOLDERS = ["--trainer.strategy.init_args.save_distributed_checkpoint", "true"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def command(folder, strategy, *more, base="quickstart"):
    """A run of two steps on two ranks with the default callbacks."""
    overlay = ["--config", f"configs/{base}.yaml", "--config", f"configs/strategies/{strategy}.yaml"]
    sizes = ["--data.groups_per_step", "2", "--data.group_size", "4", "--data.validation.prompts.init_args.size", "4"]
    where = ["--trainer.accelerator", "cpu", "--trainer.devices", "2", "--trainer.logger.init_args.save_dir", folder]
    every = ["--trainer.val_check_interval", "100", EVERY, "1", "--trainer.enable_progress_bar", "false"]
    words = [*overlay, *STRATEGIES[strategy], *sizes, *where, *every, "--trainer.max_steps", "2", *more]
    return list(map(str, words))


def train(folder, strategy, *more, **base):
    launch(TRAIN, command(folder, strategy, *more, **base), 2, timeout_s=300)


def start_until(step, folder, strategy, *more, **base):
    """Two ranks, as under torchrun, of a run that has saved this step and goes on."""
    ranks = start(TRAIN, command(folder, strategy, *more, "--trainer.max_steps", "10000", **base), 2)
    deadline = time.monotonic() + 200
    while not list(folder.rglob(f"*step={step}.ckpt")) and time.monotonic() < deadline:
        time.sleep(0.05)
    return ranks


MONITOR = ["--defaults.checkpoint.init_args.monitor", "val/pass@1", "--defaults.checkpoint.init_args.mode", "max"]
SAVING = {"ddp": ("ddp", []), "fsdp1": ("fsdp1", []), "fsdp2": ("fsdp2", []), "fsdp2_folders": ("fsdp2", FOLDERS)}


@pytest.mark.parametrize(
    ("kind", "monitor"),
    [
        pytest.param("ddp", MONITOR, id="ddp-the_best_kept"),
        pytest.param("fsdp1", [], marks=pytest.mark.sweep, id="fsdp1"),
        pytest.param("fsdp2", [], marks=pytest.mark.sweep, id="fsdp2"),
        pytest.param("fsdp2_folders", MONITOR, id="fsdp2_folders-the_best_kept"),
    ],
)
def test_the_last_step_is_saved_and_resumed(kind, monitor, tmp_path):
    strategy, more = SAVING[kind]
    for steps in (3, 5):
        found = [word for path in tmp_path.rglob("last.ckpt") for word in ("--ckpt_path", path)]
        often = ["--trainer.val_check_interval", "2", EVERY, "2", "--trainer.max_steps", steps]
        train(tmp_path, strategy, *more, *monitor, *found, *often)
        (last,) = tmp_path.rglob("last*.ckpt")
        assert last.is_dir() == (kind in ("fsdp1", "fsdp2_folders"))
        meta = last / "meta.pt" if last.is_dir() else last
        assert torch.load(meta, weights_only=True)["global_step"] == steps


def test_agents_in_processes_of_their_own_train_and_resume_after_a_kill(tmp_path):
    agent = ["--data.engine.agent", "lit_async_rl.ProcessAgent"]
    agent += ["--data.engine.agent.agent", "lit_async_rl.tasks.CalculatorAgent"]
    agent += ["--data.groups_per_step", "4", "--data.micro_batches_per_step", "2"]
    ranks = start_until(2, tmp_path, "fsdp2", *agent, base="agent_calculator")
    for rank in ranks:
        rank.kill()
    finish(ranks, 100)
    (last,) = tmp_path.rglob("last.ckpt")
    steps = torch.load(last, weights_only=True)["global_step"] + 2
    more = ["--ckpt_path", last, "--trainer.max_steps", steps]
    train(tmp_path, "fsdp2", *agent, *more, base="agent_calculator")
    (last,) = tmp_path.rglob("last.ckpt")
    assert steps >= 3  # the file of a step comes before `last`, and the kill may come between
    assert torch.load(last, weights_only=True)["global_step"] == steps
    (metrics,) = {path.resolve() for path in tmp_path.rglob("metrics.csv")}
    with metrics.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("agent/num_calls")]
    assert float(rows[-1]["agent/num_calls"]) > 0
    assert all(float(row["agent/num_lost"]) == 0 for row in rows)
    assert all(float(row["sample/staleness_max"]) <= 4 for row in rows if row.get("sample/staleness_max"))


@pytest.mark.parametrize(("strategy", "more"), [("fsdp1", []), ("fsdp2", FOLDERS)], ids=["fsdp1", "fsdp2"])
def test_of_sharded_checkpoints_as_many_stay_as_were_asked_for(strategy, more, tmp_path):
    train(tmp_path, strategy, *more, "--trainer.max_steps", "3", "--defaults.checkpoint.init_args.save_top_k", "1")
    (last,) = tmp_path.rglob("last.ckpt")
    assert {path.name for path in last.parent.iterdir()} == {"last.ckpt", last.resolve().name}
    assert "step=3" in last.resolve().name


def refused(folder, strategy, *more):
    ranks = start(TRAIN, command(folder, strategy, *more), 2)
    said = finish(ranks, 300)
    assert ranks[0].returncode == 1, said[0][-3000:]
    assert "Traceback" not in said[0] + said[1]
    return said[0]


LORA = ["--config", "configs/lora.yaml", "--model.sharding.meta_device", "false"]


def test_shards_of_another_strategy_or_model_are_refused_in_a_line(tmp_path):
    train(tmp_path, "fsdp2", *FOLDERS)
    (last,) = tmp_path.rglob("last.ckpt")
    for strategy, more in (("fsdp1", []), ("fsdp2", [*FOLDERS, *LORA])):
        said = refused(tmp_path, strategy, *more, "--ckpt_path", last)
        assert f"error: ckpt_path='{last}' cannot be loaded: " in said


def test_a_file_of_another_model_is_refused_by_sharded_ones(tmp_path):
    train(tmp_path, "ddp", *LORA[:2])
    (last,) = tmp_path.rglob("last.ckpt")
    assert "error: the checkpoint belongs to another model: " in refused(tmp_path, "fsdp2", "--ckpt_path", last)
    other = shutil.copytree(ROOT / "lit_async_rl/assets/sort_policy", tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"].add_(0.01)  # neither adapted nor trained
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    said = refused(tmp_path, "fsdp2", *LORA, "--model.model", other, "--ckpt_path", last)
    assert "error: the checkpoint's adapters belong to another model: " in said


def test_after_a_rank_was_killed_the_other_one_ends_with_one_line(tmp_path):
    ranks = start_until(3, tmp_path, "ddp")
    ranks[1].kill()
    said = finish(ranks, 100)[0]
    assert ranks[0].returncode == 1
    assert said.count("\nerror: ") == 1, said[-3000:]
    assert "the connection to another rank broke: " in said or "rank 1" in said, said[-3000:]
    assert "Traceback" not in said, said[-3000:]


def test_an_evaluation_is_printed_once(tmp_path):
    ranks = start(ROOT / "scripts/evaluate.py", command(tmp_path, "ddp"), 2)
    said = finish(ranks, 200)
    assert [text.count("val/pass@1") for text in said] == [1, 0]


def test_both_ranks_end_in_order_when_one_is_asked_to_and_one_says_so(tmp_path):
    ranks = start_until(2, tmp_path, "fsdp1")
    ranks[1].terminate()
    said = finish(ranks, 100)
    assert [rank.returncode for rank in ranks] == [0, 0], said[0][-3000:] + said[1][-3000:]
    assert [text.count("SIGTERM: saved") for text in said] == [1, 0]
    assert (next(tmp_path.rglob("last.ckpt")) / "manifest.json").is_file()
