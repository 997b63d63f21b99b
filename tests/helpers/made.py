"""Tests of misuse: a small configuration, a run with checkpoints and a tape, broken models and checkpoints."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import torch
from every_family import load, model_types, tiny_config
from preloaded import ROOT, Preloaded
from safetensors.torch import load_file, save_file
from tiny_models import EOS, save, tiny_tokenizer

SMALL = """
model:
  model: lit_async_rl/assets/small_sort_policy
  scheduler: null
  loss: PPOClip
  proximal: null
  correction: null
  baseline: null
  betas: [0.9, 0.999]
  learning_rate: 2.5e-4
data:
  aggregation: TokenMean
  groups_per_step: 2
  group_size: 2
  validation: {prompts: {class_path: SortDigits, init_args: {size: 4, split: held_out}}, batch_size: 4}
trainer: {max_steps: 2, val_check_interval: 2, enable_progress_bar: false}
"""
ASSETS = ROOT / "lit_async_rl" / "assets"


def make(folder: Path, process: Preloaded) -> None:
    """Makes everything in `folder`, with one short run of the command."""
    folder.mkdir()
    (folder / "small.yaml").write_text(SMALL)
    (folder / "file").write_text("in the way")
    link_sources(folder.parent / "made_in")
    tape = ["--trainer.callbacks+=RolloutTape", "--trainer.callbacks.folder", str(folder / "tape")]
    where = ["--trainer.logger.save_dir", str(folder / "runs"), "--trainer.logger.version", "0", *tape]
    flags = ["train", "--config", "configs/quickstart.yaml", "--config", str(folder / "small.yaml"), *where]
    done = process.run(flags, folder.parent / "made_in")
    assert done.status == 0, done.said
    (folder / "runs" / "quickstart" / "version_0").rename(folder / "run")
    _models(folder)
    _checkpoints(folder)


def link_sources(folder: Path) -> None:
    """A folder in which paths of the shipped configurations lead somewhere, as in a clone."""
    folder.mkdir()
    for name in ("configs", "lit_async_rl"):
        (folder / name).symlink_to(ROOT / name)


def _models(folder: Path) -> None:
    kinds = ("nan", "truncated", "no_tokenizer", "no_weights", "bad_config", "other_kind")
    for kind in kinds:
        shutil.copytree(ASSETS / "small_sort_policy", folder / f"model_{kind}")
    refused = load(tiny_config(model_types()["bloom"], vocab_size=64, eos_token_id=EOS), folder / "loaded")
    save(refused, folder / "model_bloom", tiny_tokenizer(64))
    (folder / "model_empty").mkdir()
    weights = folder / "model_nan" / "model.safetensors"
    tensors = load_file(weights)
    next(iter(tensors.values()))[0] = torch.nan
    save_file(tensors, weights, {"format": "pt"})
    cut = folder / "model_truncated" / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:5000])
    for file in (folder / "model_no_tokenizer").glob("tokenizer*"):
        file.unlink()
    (folder / "model_no_weights" / "model.safetensors").unlink()
    (folder / "model_bad_config" / "config.json").write_text("{oops")
    other = folder / "model_other_kind" / "config.json"
    other.write_text(json.dumps(json.loads(other.read_text()) | {"model_type": "no_such_type"}))


class _Command:
    def __reduce__(self) -> tuple:
        return print, ("executed",)


def _checkpoints(folder: Path) -> None:
    good = folder / "run" / "checkpoints" / "last.ckpt"
    whole = torch.load(good, weights_only=True)
    (folder / "text.ckpt").write_text("not a checkpoint\n" * 100)
    (folder / "empty.ckpt").write_bytes(b"")
    (folder / "truncated.ckpt").write_bytes(good.read_bytes()[:20_000])
    (folder / "pickled.ckpt").write_bytes(pickle.dumps(_Command()))
    torch.save({"command": _Command()}, folder / "executes.ckpt")
    torch.save(whole["state_dict"], folder / "state_dict.ckpt")
    torch.save(whole | {"state_dict": {"layer.weight": torch.ones(2, 2)}}, folder / "foreign.ckpt")
    broken = {name: tensor * torch.nan for name, tensor in whole["state_dict"].items()}
    torch.save(whole | {"state_dict": broken}, folder / "nan.ckpt")
    torch.save({k: v for k, v in whole.items() if k != "optimizer_states"}, folder / "no_optimizer.ckpt")
