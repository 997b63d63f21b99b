"""What a folder with a trained adapter of PEFT, or a repository on the hub with one, is used for beside training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import lightning.pytorch as pl
import peft
import pytest
import torch
from flow import barrier_engine, fit, make_data, make_module, parameters
from transformers import AutoModelForCausalLM, AutoTokenizer

import lit_async_rl as rl
from lit_async_rl.assets import asset
from lit_async_rl.callbacks import EngineCheck, WeightSync
from lit_async_rl.cli import chat
from lit_async_rl.cli.app import export
from lit_async_rl.models.loading import adapter_snapshot, has_adapter, load_policy
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.models.weights import stream_weights
from lit_async_rl.tasks import SortDigits

ROOT = Path(__file__).parents[2]
BASE = asset("small_sort_policy")
IDS = torch.arange(3, 12)[None]
KINDS = {"lora": {}, "dora": {"use_dora": True}}


@pytest.fixture(scope="module", params=KINDS)
def folders(request, tmp_path_factory) -> dict[str, str]:
    """The adapter alone, and the model that PEFT makes of it."""
    folder = tmp_path_factory.mktemp(request.param)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tuned = peft.get_peft_model(
            AutoModelForCausalLM.from_pretrained(BASE).eval(),
            peft.LoraConfig(r=3, lora_alpha=6, task_type="CAUSAL_LM", **KINDS[request.param]),
        )
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    tuned.save_pretrained(folder / "adapter")
    tuned.merge_and_unload().save_pretrained(folder / "merged")
    AutoTokenizer.from_pretrained(BASE).save_pretrained(folder / "merged")
    return {"adapter": str(folder / "adapter"), "merged": str(folder / "merged"), "kind": request.param}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.slow
def test_chat_answers_as_the_merged_model(folders, capsys):
    answers = {}
    for model in (folders["adapter"], folders["merged"], BASE):
        for prompt in ("314242=", "990011=", "555123=", "102030="):
            chat.main(["--model", model, "--prompt", prompt, "--max_tokens", "8"])
        answers[model] = capsys.readouterr().out
    assert answers[folders["adapter"]] == answers[folders["merged"]] != answers[BASE]


def test_an_evaluation_samples_what_the_merged_model_samples(folders):
    samples = {}
    for model in (folders["adapter"], folders["merged"], BASE):
        held_out = dict(val_prompts=SortDigits(6, size=8, split="held_out"), num_val_samples=2)
        data = make_data(model=model, prompts=SortDigits(6, size=8), reward=rl.share_correct, **held_out)
        trainer = pl.Trainer(
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            callbacks=WeightSync(),
        )
        module = make_module(model=model)
        trainer.validate(module, data, verbose=False)
        samples[model] = [(one.prompt.text, one.completion, one.reward) for one in module.validator.samples]
    assert len(samples[BASE]) == 16
    assert samples[folders["adapter"]] == samples[folders["merged"]] != samples[BASE]


CHOICES = {"full": None, "new": {"rank": 2}, "continued": {"continue_adapter": True}}


@pytest.mark.parametrize(
    "choice", ["continued", pytest.param("new", marks=pytest.mark.slow), pytest.param("full", marks=pytest.mark.slow)]
)
def test_a_run_from_an_adapter_is_resumed_to_the_bit_and_exported_as_a_plain_model(
    choice, folders, tmp_path, monkeypatch
):
    model, lora = folders["adapter"], CHOICES[choice]
    if choice == "continued" and folders["kind"] != "lora":
        choice, lora = "new", CHOICES["new"]  # DoRA cannot be continued

    def run(steps, callbacks=(), **trainer):
        module = make_module(model=model, lora=lora and rl.LoRA(**lora))
        data = make_data(
            model=model,
            prompts=SortDigits(6, size=64),
            reward=rl.share_correct,
            engine=barrier_engine(seed=3),
            schedule="fixed_lag",
            max_staleness=1,
        )
        fit(module, data, steps, list(callbacks), **trainer)
        return module

    saved = pl.callbacks.ModelCheckpoint(dirpath=tmp_path, filename="two", every_n_train_steps=2)
    whole = run(3, [EngineCheck(on_error="stop"), saved], enable_checkpointing=True)
    last = str(tmp_path / "two.ckpt")
    assert torch.equal(parameters(run(3, ckpt_path=last)), parameters(whole))

    monkeypatch.chdir(ROOT)
    flags = [] if lora is None else [f"--model.lora.{name}={json.dumps(value)}" for name, value in lora.items()]
    arguments = ["--config", "configs/quickstart.yaml", "--model.model", model, *flags]
    export([*arguments, "--ckpt_path", last, "--out", str(tmp_path / "out")])
    expected = make_module(model=model, lora=lora and rl.LoRA(**lora))
    expected.load_state_dict(torch.load(last, weights_only=True)["state_dict"], strict=lora is None)
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    exported, about = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not about["missing_keys"]
    assert not about["unexpected_keys"]
    torch.testing.assert_close(logits(exported), logits(expected.policy.lm), rtol=0, atol=1e-5)
    assert (logits(exported) - logits(load_policy(model))).abs().max() > 1e-4, "nothing was trained"


@pytest.fixture
def hub(folders, tmp_path, monkeypatch) -> str:
    """A cache as `huggingface_hub` keeps it, with no network behind it: a base, an adapter of it, and both in one."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    adapter_snapshot.cache_clear()
    commit = "0123456789abcdef0123456789abcdef01234567"
    for name in ("base", "adapter", "both", "lost"):
        snapshot = tmp_path / f"models--team--{name}" / "snapshots" / commit
        if name in ("base", "both"):
            shutil.copytree(BASE, snapshot)
        if name != "base":
            shutil.copytree(folders["adapter"], snapshot, dirs_exist_ok=True)
            path = snapshot / "adapter_config.json"
            wanted = "team/nowhere" if name == "lost" else "team/base"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": wanted}))
        refs = tmp_path / f"models--team--{name}" / "refs"
        refs.mkdir()
        (refs / "main").write_text(commit)
    yield "team"
    adapter_snapshot.cache_clear()


@pytest.mark.parametrize("name", ["adapter", "both"])
def test_an_adapter_on_the_hub_is_part_of_the_model_as_one_in_a_folder_is(name, hub, folders):
    model = f"{hub}/{name}"
    assert has_adapter(model)
    plain = AutoModelForCausalLM.from_pretrained(folders["merged"])
    loaded = load_policy(model)
    assert loaded.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(logits(loaded), logits(plain), rtol=0, atol=1e-5)
    assert TextCodec(model).tokenizer.get_vocab() == AutoTokenizer.from_pretrained(BASE).get_vocab()
    lora = rl.LoRA(continue_adapter=True) if folders["kind"] == "lora" else rl.LoRA(rank=2)
    module = make_module(model=model, lora=lora)
    for key, weight in stream_weights(module.policy):
        torch.testing.assert_close(weight, plain.state_dict()[key], rtol=0, atol=1e-5)
    if name == "adapter":
        data = make_data(model=model, prompts=SortDigits(6, size=8), max_staleness=0, engine_restarts=0)
        check = EngineCheck(on_error="stop")
        fit(module, data, 1, [check])
        assert check.num_checks


def test_a_base_on_the_hub_has_no_adapter_and_what_is_not_there_is_named(hub):
    assert not has_adapter(f"{hub}/base")
    torch.testing.assert_close(logits(load_policy(f"{hub}/base")), logits(load_policy(BASE)), rtol=0, atol=0)
    with pytest.raises(
        FileNotFoundError,
        match=r"model='team/lost' holds an adapter, but .* base model 'team/nowhere' .*cannot be load",
    ):
        load_policy(f"{hub}/lost")
    for missing in (f"{hub}/missing", "no such name", "a/b/c"):
        assert not has_adapter(missing)
        with pytest.raises(FileNotFoundError, match=rf"model\.model='{missing}'"):
            load_policy(missing)
