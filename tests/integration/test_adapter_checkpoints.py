"""LoRA checkpoints hold adapters only, and every command works with them."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lit_async_rl.assets import asset
from lit_async_rl.cli import chat
from lit_async_rl.cli.app import evaluate, export, main
from lit_async_rl.engines.embedded.engine import EmbeddedEngine

ROOT = Path(__file__).parents[2]
SETTINGS = [
    *("--config", "configs/quickstart.yaml", "--config", "configs/lora.yaml"),
    *("--data.groups_per_step", "4", "--data.group_size", "4", "--data.validation.prompts.init_args.size", "16"),
    *("--trainer.enable_progress_bar", "false", "--model.lora.rank", "2"),
    *("--model.lora.modules_to_save", "null"),
    *("--defaults.checkpoint.init_args.every_n_train_steps", "1"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Folder of a short run."""
    folder = tmp_path_factory.mktemp("lora")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        main([*SETTINGS, *logs(folder), "--trainer.max_steps", "2"])
    return folder / "quickstart" / "version_0"


def logs(folder) -> list[str]:
    return ["--trainer.logger.init_args.save_dir", str(folder)]


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.slow
def test_the_base_is_not_in_it(run):
    last = run / "checkpoints" / "last.ckpt"
    assert last.is_symlink()
    checkpoint = torch.load(last, weights_only=True)
    assert all("lora_" in name for name in checkpoint["state_dict"])
    assert checkpoint["base"]["model"].endswith("sort_policy")
    base = (Path(asset("sort_policy")) / "model.safetensors").stat().st_size
    assert last.stat().st_size < base / 4


@pytest.mark.slow
def test_it_resumes_and_the_link_moves_on(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "quickstart" / "version_0", symlinks=True)
    last = tmp_path / "quickstart/version_0/checkpoints/last.ckpt"
    main([*SETTINGS, *logs(tmp_path), "--trainer.max_steps", "3", "--ckpt_path", str(last)])
    assert torch.load(last, weights_only=True)["global_step"] == 3
    assert not list(last.parent.glob("last-v*"))


@pytest.mark.slow
def test_layers_that_train_beside_adapters_are_in_it_and_are_resumed_and_exported(tmp_path, capsys):
    trained = [*SETTINGS, "--model.lora.modules_to_save", "[embed_tokens]", *logs(tmp_path)]
    main([*trained, "--trainer.max_steps", "2"])
    (last,) = tmp_path.rglob("last.ckpt")
    names = {name for name in torch.load(last, weights_only=True)["state_dict"] if "lora_" not in name}
    assert {name.rpartition("model.")[-1] for name in names} == {"embed_tokens.weight", "lm_head.weight"}  # tied
    main([*trained, "--trainer.max_steps", "3", "--ckpt_path", str(last)])
    export([*trained, "--ckpt_path", str(last), "--out", str(tmp_path / "out")])
    base, exported = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (asset("sort_policy"), tmp_path / "out")
    )
    saved = torch.load(last, weights_only=True)["state_dict"]
    assert torch.equal(exported["model.embed_tokens.weight"], saved[next(name for name in names if "embed" in name)])
    assert not torch.equal(exported["model.embed_tokens.weight"], base["model.embed_tokens.weight"])
    with pytest.raises(SystemExit) as end:
        evaluate([*SETTINGS, *logs(tmp_path), "--ckpt_path", str(last)])
    assert "model.lora.modules_to_save change the digest, too" in str(end.value.code)


@pytest.mark.slow
def test_it_is_evaluated_exported_and_talked_to(run, tmp_path, capsys):
    at = ["--ckpt_path", str(run / "checkpoints" / "last.ckpt")]
    evaluate([*SETTINGS, *logs(tmp_path), *at])
    assert "val/pass@1" in capsys.readouterr().out
    export([*SETTINGS, *logs(tmp_path), *at, "--out", str(tmp_path / "out")])
    base, exported = (
        AutoModelForCausalLM.from_pretrained(folder) for folder in (asset("sort_policy"), tmp_path / "out")
    )
    changed = [n for n, p in exported.named_parameters() if not torch.equal(p, base.get_parameter(n))]
    assert changed
    assert all("_proj" in name for name in changed)
    chat.main(["--model", str(tmp_path / "out"), "--prompt", "31424210=", "--max_tokens", "9"])


@pytest.mark.slow
def test_another_base_is_refused_in_a_line(run, tmp_path):
    lm = AutoModelForCausalLM.from_pretrained(asset("sort_policy"))
    shutil.copytree(asset("sort_policy"), tmp_path / "other")
    with torch.no_grad():
        lm.get_parameter("model.norm.weight")[0] += 1
    lm.save_pretrained(tmp_path / "other")
    at = ["--ckpt_path", str(run / "checkpoints" / "last.ckpt")]
    with pytest.raises(SystemExit) as end:
        evaluate([*SETTINGS, *logs(tmp_path), *at, "--model.model", str(tmp_path / "other")])
    assert "checkpoint's adapters belong to another model: model.model='lit_async_rl/assets/sort_policy'" in str(
        end.value.code
    )


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("32-true", torch.float32)])
def test_validation_decodes_merged_weights(tmp_path, monkeypatch, precision, dtype):
    sampled, make = [], EmbeddedEngine.from_module

    def from_module(lm, *args, **kwargs):
        sampled.append({name: parameter.clone() for name, parameter in lm.named_parameters()})
        return make(lm, *args, **kwargs)

    monkeypatch.setattr(EmbeddedEngine, "from_module", from_module)
    main([*SETTINGS, *logs(tmp_path), "--trainer.max_steps", "1", "--trainer.precision", precision])
    base = AutoModelForCausalLM.from_pretrained(asset("sort_policy")).state_dict()
    before, after = sampled[0], sampled[-1]
    assert {weight.dtype for weight in after.values()} == {dtype}
    assert all(torch.equal(weight, base[name].to(dtype)) for name, weight in before.items())  # lora_B is zero
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed
    assert all(name.endswith("_proj.weight") for name in changed)


def test_a_kernel_for_training_does_not_hinder_validation(tmp_path, capsys):
    flex = ["--model.attn_implementation", "flex_attention"]
    evaluate([*SETTINGS[:2], *SETTINGS[4:-4], *logs(tmp_path), *flex])
    assert "val/pass@1" in capsys.readouterr().out
