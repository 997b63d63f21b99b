"""The default optimizer is fused; updates that the dtype rounds away are warned of."""

import logging
import re
from functools import partial

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

import lit_async_rl as rl
from lit_async_rl.assets import asset
from lit_async_rl.stabilizers.step_lr import group_settings
from lit_async_rl.training.optimizer import check_constants, check_saved_groups, lost_share, make_adamw

MODEL = asset("small_sort_policy")
QUICK = dict(max_steps=1, groups_per_step=2, group_size=2, accelerator="cpu", logger=False, enable_checkpointing=False)


def trained(**settings) -> rl.Trainer:
    prompts = rl.SortDigits(4, size=64)
    sampling = rl.SamplingParams(max_tokens=4)
    return rl.fit(MODEL, prompts, rl.share_correct, sampling=sampling, enable_progress_bar=False, **QUICK, **settings)


def test_adamw_is_fused():
    assert trained().optimizers[0].defaults["fused"] is True


def test_not_where_lightning_could_not_clip():
    trainer = rl.Trainer(accelerator="cpu", logger=False)
    trainer.strategy.precision_plugin.scaler = object()
    parameters = [torch.nn.Parameter(torch.ones(2))]
    assert make_adamw(parameters, trainer, lr=1e-3).defaults["fused"] is None


@pytest.mark.parametrize(("dtype", "rate", "warns"), [("bfloat16", 1e-6, True), ("bfloat16", 1e-2, False)])
def test_updates_that_are_rounded_away_are_warned_of(dtype, rate, warns, caplog):
    with caplog.at_level(logging.WARNING):
        trained(dtype=dtype, learning_rate=rate)
    lines = [r.getMessage() for r in caplog.records if "of the weights do not change" in r.getMessage()]
    assert len(lines) == warns
    assert not warns or ("model.dtype=bfloat16 with the learning rate 1e-06" in lines[0] and "float32" in lines[0])


def test_the_share_of_lost_updates():
    weights = torch.nn.Parameter(torch.cat([torch.full((300,), 1.0), torch.full((100,), 1e-6)]).bfloat16())
    assert lost_share([weights], 1e-6) == pytest.approx(0.75, abs=0.02)
    assert lost_share([torch.nn.Parameter(weights.float())], 1e-6) == 0
    moved = torch.optim.Adam([weights], lr=1e-6)
    before = weights.detach().clone()
    weights.grad = torch.ones_like(weights)
    moved.step()
    assert (before == weights).float().mean() == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize("dtype", ["float16", "half"])
def test_weights_in_float16_are_refused_with_a_remedy(dtype):
    """AdamW's eps was 0 in it, and weights moved by 24 in two steps."""
    with pytest.raises(ValueError, match=r"dtype must be float32 or bfloat16 to train, got float16.*16-mixed"):
        trained(dtype=dtype)


def test_sgd_and_layers_beside_adapters_in_float16_are_refused_too():
    sgd = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
    for settings in (dict(optimizer=sgd), dict(lora=rl.LoRA(rank=2)), dict(lora=rl.LoRA(modules_to_save=["lm_head"]))):
        with pytest.raises(ValueError, match=r"dtype must be float32 or bfloat16 to train"):
            trained(dtype="float16", **settings)


def scaled() -> MixedPrecision:
    """`precision: 16-mixed`, which on a CPU is bfloat16 without a scaler unless it is asked for by its plugin."""
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))


def test_a_frozen_model_in_float16_trains_with_a_loss_scaler():
    lora = rl.LoRA(rank=2, target_modules=["q_proj"])
    weights = policy_of(trained(dtype="float16", lora=lora, plugins=[scaled()], learning_rate=1e-3))
    assert {p.dtype for p in weights if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in weights if not p.requires_grad} == {torch.float16}
    assert all(p.isfinite().all() for p in weights)


@pytest.mark.slow
def test_products_in_float16_move_weights_as_those_in_float32_do():
    """The remedy that the refusal names."""
    runs = [dict(plugins=[scaled()]), {}]
    ends = [policy_of(trained(learning_rate=1e-3, **run)) for run in runs]
    start = policy_of(trained(learning_rate=1e-9))
    moved = [max(float((a - b).abs().max().detach()) for a, b in zip(end, start, strict=True)) for end in ends]
    assert moved == pytest.approx([1e-3, 1e-3], rel=0.1)


def policy_of(trainer: rl.Trainer) -> list[torch.nn.Parameter]:
    return list(trainer.lightning_module.policy.parameters())


def weights(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(8, dtype=dtype))]


@pytest.mark.parametrize(
    ("make", "dtype", "setting"),
    [
        (
            partial(torch.optim.AdamW, eps=1e-50),
            torch.float32,
            "eps=1e-50 rounds to 0 in float32",
        ),
        (partial(torch.optim.Adam, eps=1e-60), torch.bfloat16, "eps=1e-60 rounds to 0 in bfloat16"),
        (torch.optim.RMSprop, torch.float16, "eps=1e-08 rounds to 0 in float16"),
        (partial(torch.optim.Adafactor, eps=(1e-50, 1e-3)), torch.float32, r"eps\[0\]=1e-50 rounds to 0"),
    ],
)
def test_an_eps_that_is_0_in_the_dtype_is_refused(make, dtype, setting):
    with pytest.raises(ValueError, match=setting):
        check_constants(make(weights(dtype)))


@pytest.mark.parametrize(
    ("make", "dtype", "says"),
    [
        (torch.optim.AdamW, torch.bfloat16, r"betas\[1\]=0.999 rounds to 1 in bfloat16"),
        (partial(torch.optim.AdamW, betas=(0.9, 0.99)), torch.bfloat16, None),
        (torch.optim.AdamW, torch.float32, None),
        (partial(torch.optim.AdamW, betas=(0.9, 1 - 1e-9)), torch.float32, r"betas\[1\]=1 rounds to 1 in float32"),
        (partial(torch.optim.SGD, lr=1e-3, momentum=0.999), torch.bfloat16, "momentum=0.999 rounds to 1"),
        (partial(torch.optim.SGD, lr=1e-3, momentum=0.9), torch.bfloat16, None),
        (partial(torch.optim.RMSprop, alpha=0.999), torch.bfloat16, "alpha=0.999 rounds to 1"),
        (partial(torch.optim.AdamW, lr=1e-6, weight_decay=0.01), torch.float32, "weight_decay=0.01 has no effect"),
        (partial(torch.optim.AdamW, lr=1e-4, weight_decay=0.01), torch.float32, None),
        (partial(torch.optim.SGD, lr=1e-6, weight_decay=0.01), torch.float32, None),
    ],
)
def test_constants_that_round_away_are_warned_of(make, dtype, says, caplog):
    settings = {} if "weight_decay" in getattr(make, "keywords", {}) else dict(weight_decay=0.0)
    with caplog.at_level(logging.WARNING):
        check_constants(make(weights(dtype), **settings))
    assert len(caplog.records) == (says is not None)
    assert says is None or re.search(says, caplog.records[0].getMessage())


def test_what_is_warned_of_is_so():
    """Second moments in bfloat16 stay where they were, and float32 weights do not decay."""
    for beta, decays in ((0.999, False), (0.99, True)):
        (weight,) = weights(torch.bfloat16)
        adamw = torch.optim.AdamW([weight], lr=1e-3, betas=(0.9, beta), weight_decay=0.0, fused=True)
        for size in (1.0, *[1e-3] * 900):
            weight.grad = torch.full_like(weight, size)
            adamw.step()
        after_first = 1 - beta  # of the gradient 1
        assert (adamw.state[weight]["exp_avg_sq"] < after_first / 2).all() == decays
    for rate, decays in ((1e-6, False), (1e-4, True)):
        (weight,) = weights(torch.float32)
        adamw = torch.optim.AdamW([weight], lr=rate, weight_decay=0.01, fused=True)
        for _ in range(10):
            weight.grad = torch.zeros_like(weight)
            adamw.step()
        assert (weight < 1).all() == decays


def test_a_run_says_that_moments_do_not_decay(caplog):
    with caplog.at_level(logging.WARNING):
        trained(dtype="bfloat16", learning_rate=1e-2)
    assert sum("betas[1]=0.999 rounds to 1 in bfloat16" in r.getMessage() for r in caplog.records) == 1


def groups_of(make, num_groups=1, **of_groups):
    weights = [{"params": [torch.nn.Parameter(torch.zeros(2, 2))], **of_groups} for _ in range(num_groups)]
    return make(weights)


@pytest.mark.parametrize(
    ("own", "saved", "message"),
    [
        (groups_of(partial(torch.optim.SGD, lr=1.0)), groups_of(torch.optim.AdamW), "=SGD has dampening.*amsgrad"),
        (groups_of(torch.optim.AdamW), groups_of(partial(torch.optim.SGD, lr=1.0)), "=AdamW has amsgrad.*dampening"),
        (groups_of(torch.optim.AdamW), groups_of(torch.optim.AdamW, 2), "has 1 parameter groups, .* optimizer has 2"),
        (groups_of(partial(torch.optim.AdamW, amsgrad=True)), groups_of(torch.optim.AdamW), "option amsgrad=True of"),
        (groups_of(torch.optim.AdamW, amsgrad=True), groups_of(torch.optim.AdamW), "option amsgrad=True of"),
    ],
)
def test_groups_of_another_optimizer_are_refused(own, saved, message):
    with pytest.raises(ValueError, match=message):
        check_saved_groups(own, saved.state_dict()["param_groups"], group_settings(own))


def test_groups_of_the_same_optimizer_pass_with_what_a_schedule_and_later_versions_add():
    saved = groups_of(torch.optim.AdamW)
    torch.optim.lr_scheduler.OneCycleLR(saved, max_lr=1.0, total_steps=3)
    (group,) = saved.state_dict()["param_groups"]
    own = groups_of(torch.optim.AdamW)
    check_saved_groups(own, [group], group_settings(own))
    del group["decoupled_weight_decay"]  # of an earlier torch
    check_saved_groups(own, [group], group_settings(own))
