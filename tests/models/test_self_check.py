"""The self-check at set-up: it ends runs of models that are computed wrongly, and changes nothing else."""

import pytest
import torch
from every_family import load, model_types, tiny_config
from flow import MODEL, fit, make_data, make_module
from replays import own_engine, requests_of
from tiny_models import EOS, save, tiny_llama, tiny_tokenizer
from transformers import LlamaForCausalLM, RobertaConfig, RobertaForCausalLM

from lit_async_rl import SharedPromptPacking
from lit_async_rl.engines.embedded import decoding_check
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.environments.episode_engine import EpisodeEngine
from lit_async_rl.errors import UnsupportedModelError
from lit_async_rl.models.architecture import context_length
from lit_async_rl.models.loading import load_policy
from lit_async_rl.models.lora import LoRA, add_lora
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.models.self_check import check_policy, random_tokens
from lit_async_rl.simulation.engine import SimulatedEngine
from lit_async_rl.simulation.latency import Constant
from lit_async_rl.tasks import SortDigits
from lit_async_rl.tasks.calculator import Calculator

HELD_OUT = SortDigits(8, size=2, split="held_out")


class OtherHead(LlamaForCausalLM):
    """A family with a scaling of logits that nothing here knows of."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 1.01
        return output


def other_head():
    lm = tiny_llama()
    other = OtherHead(lm.config).eval()
    other.load_state_dict(lm.state_dict())
    return other


def test_a_head_that_is_not_known_is_refused_by_both_sides():
    lm = other_head()
    with pytest.raises(UnsupportedModelError, match=r"model type 'llama' \(OtherHead\): the trainer's .* padded rows"):
        check_policy(CausalPolicy(lm), 1e-4)
    with pytest.raises(UnsupportedModelError, match=r"embedded engine's log-probabilities differ .*nats") as error:
        EmbeddedEngine.from_module(lm)
    assert "\n" not in str(error.value)
    assert "data.engine.self_check=false" in str(error.value)
    assert EmbeddedEngine.from_module(lm, self_check=False).run(requests_of([3]))


def test_a_full_gpu_is_no_fault_of_the_model(monkeypatch):
    lm = tiny_llama()

    def fails(*args, **kwargs):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    monkeypatch.setattr(lm.model, "forward", fails)
    for check in (lambda: check_policy(CausalPolicy(lm), 1e-4), lambda: EmbeddedEngine.from_module(lm)):
        with pytest.raises(RuntimeError, match="CUBLAS_STATUS_ALLOC_FAILED") as error:
            check()
        assert not isinstance(error.value, UnsupportedModelError)


def test_packed_rows_are_checked_where_rows_are_packed():
    lm = tiny_llama()
    lm.config.layer_types = None
    check_policy(CausalPolicy(lm, packing=SharedPromptPacking()), 1e-4)

    class Wrong(SharedPromptPacking):
        def features(self, lm, input_ids, needed, group_index):
            features, rows = super().features(lm, input_ids, needed, group_index)
            return features.roll(1, 0), rows

    with pytest.raises(UnsupportedModelError, match="packed rows"):
        check_policy(CausalPolicy(lm, packing=Wrong()), 1e-4)


def test_a_model_that_sees_what_comes_later_is_refused():
    config = RobertaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, is_decoder=False)
    with pytest.raises(UnsupportedModelError, match="model type 'roberta'"):
        check_policy(CausalPolicy(RobertaForCausalLM(config).eval()), 1e-4)


@pytest.mark.parametrize(("name", "says"), [("bloom", "embedded engine"), ("rwkv", "recurrent layers")])
def test_a_run_ends_before_training_with_one_line(name, says, tmp_path):
    lm = load(tiny_config(model_types()[name], vocab_size=64, eos_token_id=EOS), tmp_path)
    model = save(lm, tmp_path, tiny_tokenizer(64))
    with pytest.raises(UnsupportedModelError, match=rf"model type '{name}'.*{says}") as error:
        fit(make_module(model=model), make_data(model=model), 1)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_validation_of_another_engines_model_says_so_and_how_to_go_on(tmp_path):
    """vLLM may know a family that validation's embedded engine does not."""
    lm = load(tiny_config(model_types()["bloom"], vocab_size=64, eos_token_id=EOS), tmp_path)
    model = save(lm, tmp_path, tiny_tokenizer(64))
    data = make_data(model=model, engine=SimulatedEngine(Constant(0.001)), val_prompts=HELD_OUT)
    with pytest.raises(UnsupportedModelError, match=r"'bloom'.*leave data.validation.prompts out; model.self_check=f"):
        fit(make_module(model=model), data, 2, val_check_interval=1)


def test_a_wrapped_engine_has_the_switch_of_its_own():
    for inner, expected in ((EmbeddedEngine(self_check=False), False), (SimulatedEngine(Constant(0.001)), None)):
        assert EpisodeEngine(inner, Calculator()).self_check is expected


def test_the_engines_samples_are_the_same_with_and_without_check(tmp_path):
    found = []
    for self_check in (True, False):
        engine = own_engine(tiny_llama(), tmp_path, num_slots=1, seed=3, self_check=self_check)
        found.append(engine.run(requests_of([2, 5])))
        assert engine.num_tokens == sum(len(c.token_ids) for completions in found[-1] for c in completions)
    assert found[0] == found[1]


@pytest.mark.slow
def test_training_is_the_same_with_and_without_check():
    ends = []
    for self_check in (True, False):
        module = make_module(self_check=self_check)
        fit(module, make_data(max_staleness=0), 1)
        ends.append(torch.cat([p.detach().flatten() for p in module.policy.parameters()]))
    assert torch.equal(*ends)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_lower_precision_is_no_reason_to_refuse(dtype, tmp_path):
    lm = load_policy(MODEL, dtype=dtype)
    check_policy(CausalPolicy(lm, packing=SharedPromptPacking()), 0.1)
    EmbeddedEngine.from_module(lm)


@pytest.mark.parametrize("seed", range(3))
def test_large_logits_of_a_sharp_model_are_no_reason_to_refuse(seed):
    """SmolLM2 after 15 steps of training: 0.12 nats in bfloat16, and the run ended at its second validation."""
    lm = tiny_llama(seed=seed)
    with torch.no_grad():
        lm.lm_head.weight.mul_(100)
    lm.to(torch.bfloat16)
    check_policy(CausalPolicy(lm, packing=SharedPromptPacking()), 0.1)
    EmbeddedEngine.from_module(lm)


@pytest.mark.slow
def test_validation_checks_a_model_once_and_not_where_the_check_is_off(monkeypatch):
    checked = []
    target = "lit_async_rl.engines.embedded.engine.check_decoding"
    monkeypatch.setattr(target, lambda slots, side="engine": checked.append(slots.lm))
    for self_check, times in ((True, 2), (False, 0)):
        checked.clear()
        module = make_module(lora=LoRA(rank=2, target_modules=["q_proj"]))
        data = make_data(engine=EmbeddedEngine(device="cpu", self_check=self_check), val_prompts=HELD_OUT)
        fit(module, data, 2, val_check_interval=1)
        assert len(checked) == times  # the engine's model, and the policy's


def test_a_model_is_decoded_for_its_check_once(monkeypatch):
    decoded = []
    whole = decoding_check.plain_pass
    monkeypatch.setattr(decoding_check, "plain_pass", lambda lm, rows: decoded.append(lm) or whole(lm, rows))
    lm = tiny_llama()
    for _ in range(2):
        EmbeddedEngine.from_module(lm)
    assert decoded == [lm]


def test_random_tokens_are_no_special_ones():
    lm = tiny_llama(vocab=8)
    lm.config.image_token_id = 7
    assert set(random_tokens(lm, 50)) == {4, 5, 6}


def test_the_window_of_gpt_neo_limits_the_context(tmp_path):
    config = tiny_config(model_types()["gpt_neo"])
    assert context_length(load(config, tmp_path)) == config.window_size
    config = tiny_config(model_types()["gpt_neo"], attention_types=[[["global"], 4]])
    assert context_length(load(config, tmp_path)) == config.max_position_embeddings


NOISY = {
    "opt": dict(dropout=0.3, attention_dropout=0.3, layerdrop=0.5),
    "bloom": dict(hidden_dropout=0.3, attention_dropout=0.3),
    "falcon": dict(hidden_dropout=0.3, attention_dropout=0.3),
    "persimmon": dict(hidden_dropout=0.3, attention_dropout=0.3),
    "mixtral": dict(router_jitter_noise=0.3, attention_dropout=0.3),
    "mistral": dict(attention_dropout=0.3),
}


@pytest.mark.parametrize("name", NOISY)
def test_nothing_random_is_left_in_the_mode_that_recomputes_activations(name, tmp_path):
    lm = load(tiny_config(model_types()[name], **NOISY[name]), tmp_path)
    ids = torch.tensor([random_tokens(lm, 7)])
    assert torch.equal(lm.train()(ids).logits, lm.eval()(ids).logits)


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_adapters_of_a_tied_weight_are_refused(target):
    with pytest.raises(ValueError, match=rf"model.lora.target_modules=\['{target}'\] adapts a layer .*lm_head out of"):
        add_lora(tiny_llama(tied=True), LoRA(rank=2, target_modules=[target]))
    add_lora(tiny_llama(), LoRA(rank=2, target_modules=[target]))
