"""Models that begin with a trained adapter of PEFT, as supervised fine-tuning leaves it: merged, or trained further."""

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from every_family import model_types, tiny_config
from flow import fit, make_data, make_module
from tiny_models import save, tiny_qwen2, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import lit_async_rl as rl
from lit_async_rl.errors import SetupError
from lit_async_rl.models.end_tokens import eos_token_ids, sampled_model
from lit_async_rl.models.loading import load_policy
from lit_async_rl.models.lora import add_lora
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.models.weights import LORA_A, LORA_B, stream_weights

IDS = torch.arange(8, 20)[None]


@pytest.fixture
def folders(tmp_path):
    """The base, a folder with an adapter alone, one with both, and the logits of base and fine-tuned model."""
    base = save(tiny_qwen2(vocab=70, hidden=16, layers=1), tmp_path / "base", tiny_tokenizer(64))
    plain = AutoModelForCausalLM.from_pretrained(base).eval()
    before = plain(IDS).logits
    tuned = peft.get_peft_model(plain, peft.LoraConfig(r=3, lora_alpha=6, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.5)
    after = tuned(IDS).logits
    tuned.save_pretrained(tmp_path / "adapter")
    shutil.copytree(base, tmp_path / "both")
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(tmp_path / "adapter" / file, tmp_path / "both")
    assert (before - after).abs().max() > 0.05
    return {"base": base, "adapter": str(tmp_path / "adapter"), "both": str(tmp_path / "both"), "logits": after}


def run(model, steps=2, lora=None, **module):
    seen = []

    class Engine(rl.EmbeddedEngine):
        def load_weights(self, version, weights):
            weights = list(weights)
            seen.append({name: tensor.clone() for name, tensor in weights if isinstance(tensor, torch.Tensor)})
            super().load_weights(version, weights)

    data = make_data(
        model=model,
        prompts=["2A", "3B", "4C"],
        reward=lambda prompt, completion: float(sum(map(ord, completion)) % 7),
        groups_per_step=2,
        group_size=3,
        engine=Engine(),
        max_staleness=0,
        engine_restarts=0,
    )
    module = make_module(model=model, lora=lora, **module)
    check = rl.EngineCheck(on_error="stop")
    fit(module, data, steps, [check])
    assert check.num_checks
    return module, seen


@pytest.mark.parametrize("kind", ["adapter", "both"])
@pytest.mark.parametrize(
    "lora", [None, rl.LoRA(rank=2), rl.LoRA(rank=2, continue_adapter=True)], ids=["full", "new", "continued"]
)
def test_policy_engine_and_reference_begin_as_the_fine_tuned_model(kind, lora, folders):
    module = make_module(model=folders[kind], lora=lora, kl_coefficient=0.1)
    start = module.policy.causal_lm.eval()(IDS).logits
    torch.testing.assert_close(start, folders["logits"], rtol=0, atol=1e-5)
    torch.testing.assert_close(load_policy(folders[kind])(IDS).logits, folders["logits"], rtol=0, atol=1e-5)
    module, seen = run(folders[kind], lora=lora, kl_coefficient=0.1)
    plain = dict(load_policy(folders[kind]).named_parameters())
    sent = seen[0]
    for name in [name.removesuffix(LORA_A) for name in sent if name.endswith(LORA_A)]:
        sent[f"{name}.weight"] = sent[f"{name}.weight"] + sent.pop(f"{name}{LORA_B}") @ sent.pop(f"{name}{LORA_A}")
    assert sent.keys() == plain.keys()
    for name, tensor in sent.items():
        torch.testing.assert_close(tensor, plain[name], rtol=0, atol=1e-5)
    if module.reference is not None:
        torch.testing.assert_close(module.reference.causal_lm(IDS).logits, folders["logits"], rtol=0, atol=1e-5)
    else:
        with module.policy.lm.disable_adapter():
            torch.testing.assert_close(module.policy.lm(IDS).logits, folders["logits"], rtol=0, atol=1e-5)


def test_a_continued_adapter_keeps_its_rank_and_trains(folders):
    module = make_module(model=folders["both"], lora=rl.LoRA(rank=9, continue_adapter=True))
    shapes = {tuple(p.shape) for name, p in module.policy.named_parameters() if p.requires_grad}
    assert shapes == {(3, 16), (16, 3), (8, 3)}
    before = dict(stream_weights(module.policy))
    after = dict(stream_weights(run(folders["both"], lora=rl.LoRA(continue_adapter=True))[0].policy))
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_what_cannot_be_continued_is_refused_by_name(folders, tmp_path):
    with pytest.raises(
        SetupError, match=r"continue_adapter=true needs an adapter, but the folder of model\.model has none"
    ):
        make_module(model=folders["base"], lora=rl.LoRA(continue_adapter=True))
    path = tmp_path / "both" / "adapter_config.json"
    config = json.loads(path.read_text())
    for changed in ({"bias": "all"}, {"use_dora": True}, {"lora_bias": True}, {"modules_to_save": ["lm_head"]}):
        path.write_text(json.dumps(config | changed))
        with pytest.raises(SetupError, match=rf"contains more than low-rank factors \({next(iter(changed))} in"):
            make_module(model=folders["both"], lora=rl.LoRA(continue_adapter=True))
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="holds an adapter beside them"):
        make_module(model=folders["both"], sharding=rl.Sharding(meta_device=True))
    alone = tmp_path / "adapter" / "adapter_config.json"
    alone.write_text(json.dumps(config | {"base_model_name_or_path": None}))
    with pytest.raises(ValueError, match="has no base_model_name_or_path"):
        make_data(model=folders["adapter"])


def test_a_model_with_code_of_its_own_is_refused_at_once_and_nothing_is_executed(folders, tmp_path):
    path = tmp_path / "base" / "config.json"
    own = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    (tmp_path / "base" / "mine.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    with pytest.raises(ValueError, match=r"needs Python code of its own \(trust_remote_code\)"):
        make_module(model=folders["base"])
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("kind", ["adapter", "both"])
@pytest.mark.parametrize(
    "settings",
    [{"use_dora": True}, {"lora_bias": True}, {"modules_to_save": ["lm_head"]}, {"bias": "all"}, {"use_rslora": True}],
    ids=str,
)
def test_adapters_of_every_kind_are_merged_as_peft_computes_them(kind, settings, tmp_path):
    base = save(tiny_qwen2(vocab=70, hidden=16, layers=1), tmp_path / "base", tiny_tokenizer(64))
    plain = AutoModelForCausalLM.from_pretrained(base).eval()
    tuned = peft.get_peft_model(plain, peft.LoraConfig(r=3, lora_alpha=6, task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    expected = tuned(IDS).logits
    folder = tmp_path / "adapter"
    tuned.save_pretrained(folder)
    if kind == "both":
        shutil.copytree(base, folder, dirs_exist_ok=True)
    torch.testing.assert_close(load_policy(str(folder))(IDS).logits, expected, rtol=0, atol=1e-4)
    _, seen = run(str(folder), steps=1)
    reference = load_policy(str(folder))
    assert seen[0].keys() == dict(reference.named_parameters()).keys()


def test_fused_experts_are_refused_by_name(tmp_path):
    lm = AutoModelForCausalLM.from_config(tiny_config(model_types()["qwen3_moe"], vocab_size=64))
    with pytest.raises(ValueError, match=r"model\.lora\.target_modules='all-linear' adapts Qwen3MoeExperts"):
        add_lora(lm, rl.LoRA(rank=2, target_modules="all-linear"))


@pytest.mark.parametrize("kind", ["adapter", "both"])
def test_completions_end_where_the_tokenizer_in_the_folder_says(kind, folders):
    """For engines, validation and rewards alike: the chat template of an adapter may end turns with another token."""
    assert sampled_model(folders["adapter"]) == folders["base"]
    tokenizer = AutoTokenizer.from_pretrained(folders["base"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|x|>"]})
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}<|x|>{% endfor %}"
    tokenizer.save_pretrained(folders[kind])
    end = tokenizer.convert_tokens_to_ids("<|x|>")
    assert end in TextCodec(folders[kind]).ends.ids
    lm = load_policy(folders[kind])
    assert set(eos_token_ids(lm)) == set(TextCodec(folders[kind]).ends.ids)
    assert Path(lm.name_or_path).is_dir()
    engine = rl.EmbeddedEngine()
    engine.setup(sampled_model(folders[kind]))
    assert end in engine.engine.slots._eos_token_ids


@pytest.mark.parametrize("settings", [{}, {"random_init": True}, {"device": "meta"}])
def test_end_tokens_of_the_generation_configuration_count_however_the_model_is_made(settings, folders):
    path = Path(folders["base"], "generation_config.json")
    path.write_text(json.dumps({"eos_token_id": [1, 7]}))
    assert {1, 7} <= set(eos_token_ids(load_policy(folders["base"], **settings)))
    path.write_text(json.dumps({"eos_token_id": []}))
    assert eos_token_ids(load_policy(folders["base"], **settings)) == ()
