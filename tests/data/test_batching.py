"""How a step's groups are laid out in micro-batches changes nothing of what is learnt from them."""

import random

import lightning.pytorch as pl
import pytest
import torch
from flow import fit, make_data, make_module
from groups import collate, group


def gradient_of(batches, module) -> torch.Tensor:
    trainer = pl.Trainer(accelerator="cpu", logger=False, accumulate_grad_batches=len(batches))
    module.trainer = trainer
    module.zero_grad()
    for batch in batches:
        (module.training_step(batch, 0) / len(batches)).backward()
    return torch.cat([p.grad.flatten() for p in module.policy.parameters()])


@pytest.fixture(scope="module")
def groups():
    """Groups of one synchronous step, sampled for real."""
    data, kept = make_data(max_staleness=0, reward=lambda prompt, text: random.Random(text).random()), []

    class Keep(pl.Callback):
        def on_train_batch_end(self, *_):
            kept.extend(data.last_step_groups)

    fit(make_module(), data, 1, [Keep()])
    return kept


@pytest.mark.parametrize("num_micro_batches", [2, 3, 5, 40])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-6)])
def test_the_split_into_micro_batches_changes_no_gradient(groups, num_micro_batches, dtype, tolerance):
    module = make_module().to(dtype)
    whole, split = gradient_of(collate(groups, 1), module), gradient_of(collate(groups, num_micro_batches), module)
    assert (whole - split).norm() <= tolerance * whole.norm()


def test_order_and_padding_and_junk_change_no_gradient(groups):
    module = make_module()
    (batch,) = collate(groups, 1)
    expected = gradient_of([batch], module)
    order = torch.randperm(len(batch))
    shuffled = {k: v[order] for k, v in vars(batch).items() if isinstance(v, torch.Tensor)}
    padded = {k: torch.nn.functional.pad(v, (0, 7)) if v.ndim == 2 else v for k, v in shuffled.items()}
    padded["input_ids"] = padded["input_ids"].masked_fill(~padded["attention_mask"], 17)
    for name, junk in {"behavior_logprobs": float("nan"), "advantages": 1e9, "versions": -50}.items():
        padded[name] = padded[name].masked_fill(~padded["loss_mask"], junk)
    actual = gradient_of([batch.replace(**padded)], module)
    assert (actual - expected).norm() <= 1e-6 * expected.norm()


def test_an_all_padding_micro_batch_trains_nothing_and_reaches_every_parameter(groups):
    module = make_module()
    *_, empty = collate(groups[:1], 5)
    gradient = gradient_of([empty], module)
    assert not empty.loss_mask.any()
    assert empty.group_index.tolist() == [-1]  # of no group: its reward counts nowhere
    assert torch.equal(gradient, torch.zeros_like(gradient))
    assert all(p.grad is not None for p in module.policy.parameters())


def test_token_weights_of_a_step_sum_to_one(groups):
    assert sum(float(batch.token_weights.sum()) for batch in collate(groups, 3)) == pytest.approx(1.0, abs=1e-6)


def test_two_groups_of_one_index_are_not_one_rollout_each():
    """A tape can have a prompt of the replay buffer in two of its steps, which a larger step puts together."""
    (batch,) = collate([group([1.0, 0.0], index=5), group([0.0, 1.0], index=5)], 1)
    assert batch.rollout is None
