"""The training step's options: reference KL, entropy bonus, schedules, LoRA."""

import lightning.pytorch as pl
import pytest
import torch
from flow import MODEL, fit, make_data, make_module, parameters
from lightning.pytorch.callbacks import LambdaCallback

from lit_async_rl.models.loading import load_policy
from lit_async_rl.models.lora import LoRA
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.training.module import PolicyModule


class Watch(pl.Callback):
    def __init__(self) -> None:
        self.kl = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        log_ratio = pl_module.stabilizer_signals["ref_log_ratio"][batch.loss_mask]
        self.kl.append(float(log_ratio.abs().mean()))


@pytest.mark.slow
def test_reference_kl_starts_at_zero_holds_the_policy_back_and_is_not_checkpointed(tmp_path):
    free, held, watch = make_module(), make_module(kl_coefficient=50.0), Watch()
    start = parameters(free).clone()
    fit(free, make_data(max_staleness=0), 5)
    trainer = fit(held, make_data(max_staleness=0), 5, [watch])
    assert watch.kl[0] < 1e-5 < watch.kl[-1]
    untouched = torch.cat([p.flatten() for p in load_policy(MODEL).parameters()])
    assert torch.equal(torch.cat([p.flatten() for p in held.reference.parameters()]), untouched)
    assert not torch.equal(parameters(held), parameters(free))
    trainer.save_checkpoint(tmp_path / "kl.ckpt")
    keys = torch.load(tmp_path / "kl.ckpt", weights_only=True)["state_dict"]
    assert not any(key.startswith("reference.") for key in keys)
    resumed = make_module(kl_coefficient=50.0)
    fit(resumed, make_data(max_staleness=0), 6, ckpt_path=str(tmp_path / "kl.ckpt"))
    assert resumed.version == 6
    assert not torch.equal(start, parameters(resumed))


@pytest.mark.slow
def test_an_entropy_bonus_raises_entropy_and_a_negative_one_lowers_it():
    entropies = {}
    for coefficient in (-1.0, 0.0, 1.0):

        class Entropy(pl.Callback):
            def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, key=coefficient):
                entropies[key] = float(pl_module.stabilizer_signals["entropy"][batch.loss_mask].mean())

        fit(
            make_module(entropy_coefficient=coefficient, learning_rate=3e-4), make_data(max_staleness=0), 8, [Entropy()]
        )
    assert entropies[1.0] > entropies[0.0] + 0.05
    assert entropies[-1.0] < entropies[0.0] - 0.05


def test_gradients_are_freed_with_the_step():
    """Publication and the next activations need their memory."""

    held = []
    count = LambdaCallback(
        on_train_batch_end=lambda trainer, module, *_: held.append(sum(p.grad is not None for p in module.parameters()))
    )
    fit(make_module(), make_data(max_staleness=0), 2, [count])
    assert held == [0, 0]


def test_gradient_checkpointing_changes_no_result():
    plain, checkpointed = make_module(), make_module(gradient_checkpointing=True)
    for module in (plain, checkpointed):
        fit(module, make_data(max_staleness=0), 2)
    torch.testing.assert_close(parameters(plain), parameters(checkpointed), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("learning_rate", 0.0),
        ("learning_rate", -1.0),
        ("weight_decay", -0.1),
        ("kl_coefficient", -1.0),
        ("kl_coefficient", float("inf")),
        ("entropy_coefficient", float("nan")),
        ("weight_decay", float("inf")),
        ("dtype", "float33"),
    ],
)
def test_bad_settings_are_named(setting, value):
    with pytest.raises(ValueError, match=setting):
        PolicyModule(MODEL, **{setting: value})


def test_where_layers_train_beside_adapters_the_reference_is_a_copy():
    lora = LoRA(rank=2, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    module, watch = make_module(lora=lora, kl_coefficient=1.0), Watch()
    fit(module, make_data(max_staleness=0), 5, [watch])
    whole = torch.cat([parameter.flatten() for parameter in module.reference.parameters()])
    assert torch.equal(whole, parameters(make_module()))
    assert watch.kl[0] < 1e-5 < watch.kl[-1]


@pytest.mark.slow
def test_with_lora_the_reference_is_the_policy_without_its_adapters():
    copied, watches = make_module(lora=LoRA(rank=2), kl_coefficient=1.0), [Watch(), Watch()]
    torch.manual_seed(3)
    shared = make_module(lora=LoRA(rank=2), kl_coefficient=1.0)
    copied.policy.load_state_dict(shared.policy.state_dict())
    copied.reference = CausalPolicy(load_policy(MODEL)).requires_grad_(False)
    for module, watch in zip((copied, shared), watches, strict=True):
        fit(module, make_data(max_staleness=0), 5, [watch])
    assert shared.reference is None
    assert sum(p.numel() for p in shared.parameters()) < 0.6 * sum(p.numel() for p in copied.parameters())
    assert watches[0].kl == pytest.approx(watches[1].kl, abs=1e-6)
    assert watches[1].kl[0] < 1e-5 < watches[1].kl[-1]
    torch.testing.assert_close(parameters(shared), parameters(copied), atol=1e-6, rtol=0)


def test_a_reference_in_the_file_of_a_sharded_run_is_left_out_where_none_is_needed(tmp_path):
    path = tmp_path / "sharded.ckpt"
    fit(make_module(), make_data(max_staleness=0), 1).save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    reference = make_module(kl_coefficient=1.0).reference.state_dict()
    checkpoint["state_dict"] |= {f"reference.{name}": tensor for name, tensor in reference.items()}
    torch.save(checkpoint, path)
    module = make_module()
    fit(module, make_data(max_staleness=0), 2, ckpt_path=str(path))
    assert module.version == 2


def test_adapters_are_refused_under_another_alpha():
    """Their weights have the same shapes, and would have another effect."""
    trained, same, other = (make_module(lora=LoRA(rank=2, alpha=alpha)) for alpha in (4, 4, 8))
    checkpoint = {"state_dict": trained.state_dict()}
    trained.saved_weights.reduce(checkpoint, trained.policy)
    same.saved_weights.check(checkpoint, same.policy)
    with pytest.raises(ValueError, match=r"model\.lora\.alpha is 8, but was 4 when the checkpoint was saved"):
        other.saved_weights.check(checkpoint, other.policy)
