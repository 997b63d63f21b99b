"""ESSLearningRate: the right factor, for exactly one step, whatever else touches the learning rate."""

import math

import pytest
import torch
from foreign_modules import ROWS, Probe, Regression, Rows, fit, weights
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader

from lit_async_rl.callbacks import ESSLearningRate
from lit_async_rl.stabilizers.signals import SignalCollector
from lit_async_rl.stabilizers.step_lr import OneStepLearningRate

log_weights = st.lists(st.floats(-700, 700), min_size=1, max_size=8)


def slow_ess_ratio(log_ws):
    top = max(log_ws)
    ws = [math.exp(v - top) for v in log_ws]
    return sum(ws) ** 2 / (len(ws) * sum(w * w for w in ws))


def reduce(*micro_batches):
    collector = SignalCollector()
    for signals in micro_batches:
        collector.add(signals)
    return collector.reduce("cpu")


# -- the number -------------------------------------------------------------------------------------------------------


@given(log_weights, st.integers(0, 8), st.floats(-50, 50))
def test_ess_is_kishs_over_all_micro_batches_and_blind_to_a_common_factor(values, split, shift):
    parts = [part for part in (values[:split], values[split:]) if part]
    tensor = [{"log_ratio": torch.tensor(part, dtype=torch.float64)} for part in parts]
    shifted = [{"log_ratio": part["log_ratio"] + shift} for part in tensor]
    ratio = reduce(*tensor).ess_ratio
    assert ratio == pytest.approx(slow_ess_ratio(values), rel=1e-9)
    assert reduce(*shifted).ess_ratio == pytest.approx(ratio, rel=1e-6)
    assert 1 / len(values) - 1e-12 <= ratio <= 1


def test_tokens_add_up_to_whole_completions_masked_ones_and_empty_rows_do_not_count():
    log_ratio = torch.tensor([[1.0, 2.0, 9.0], [0.5, torch.nan, 9.0], [7.0, 7.0, 7.0]])
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    signals = reduce({"log_ratio": log_ratio, "mask": mask})
    assert signals.num_samples == 2
    assert signals.num_broken == 0
    assert signals.ess_ratio == pytest.approx(slow_ess_ratio([3.0, 0.5]))


def test_tails_of_80_per_token_stay_finite():
    signals = reduce({"log_ratio": torch.tensor([[80.0] * 100, [-80.0] * 100])})
    assert signals.ess_ratio == 0.5
    assert math.isfinite(signals.kl)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([math.nan, 0.0, 0.0, 0.0], 3 / 4),  # a sample without weight
        ([math.inf, 0.0, 0.0, 0.0], 1 / 4),  # a sample that outweighs all others
        ([math.nan] * 4, 1 / 4),
        ([-math.inf] * 4, 1 / 4),
    ],
)
def test_broken_weights_lower_the_ratio_and_are_counted(row, expected):
    signals = reduce({"log_ratio": torch.tensor(row)})
    assert signals.ess_ratio == pytest.approx(expected)
    assert signals.num_broken == sum(not math.isfinite(v) for v in row)


def test_other_signals_are_means_over_tokens_or_completions():
    mask = torch.tensor([[True, False], [True, True]])
    signals = reduce(
        {
            "log_ratio": torch.zeros(2, 2),
            "mask": mask,
            "entropy": torch.tensor([[1.0, 99.0], [2.0, 3.0]]),
            "staleness": torch.tensor([[4, 99], [1, 1]]),
            "rewards": torch.tensor([0.0, 1.0]),
        }
    )
    assert (signals.kl, signals.entropy, signals.staleness, signals.reward) == (0.0, 2.0, 2.0, 0.5)


@pytest.mark.parametrize("changes", [{"mask": torch.ones(2, 2)}, {"log_ratio": torch.zeros(2, 2, 2)}])
def test_misshapen_signals_are_refused_by_name(changes):
    with pytest.raises(ValueError, match="stabilizer_signals"):
        reduce({"log_ratio": torch.zeros(2, 3)} | changes)


# -- the factor -------------------------------------------------------------------------------------------------------


@given(st.floats(0.01, 1), st.floats(0.01, 1), st.sampled_from([0.5, 1.0]), st.floats(0, 1))
def test_the_papers_rule(ratio, base, power, floor):
    scale = ESSLearningRate(power=power, base_ess_ratio=base, floor=floor).lr_scale(ratio)
    assert scale == pytest.approx(max(floor, min(1, ratio / base) ** power))


def test_a_measured_base_is_the_mean_of_the_first_steps_which_keep_their_rate():
    param = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    ess = ESSLearningRate(power=1.0, measure_steps=2)
    scales = []
    for values in ([0.0, 0.0], [0.0, -math.inf], [0.0, -math.inf]):
        ess.add({"log_ratio": torch.tensor(values)})
        with_warning = ess.apply(optimizer)
        scales.append(with_warning["ess/lr_scale"])
    assert scales == [1.0, 1.0, pytest.approx(0.5 / 0.75)]
    resumed = ESSLearningRate(power=1.0, measure_steps=2)
    resumed.load_state_dict(ess.state_dict())
    assert resumed.lr_scale(0.5) == pytest.approx(0.5 / 0.75)


@pytest.mark.parametrize("setting", [{"power": -1.0}, {"base_ess_ratio": 0.0}, {"floor": 2.0}, {"measure_steps": -1}])
def test_senseless_settings_are_refused_by_name(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        ESSLearningRate(**setting)


# -- exactly one step -------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "AdamW fused, tensor": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01), fused=True),
    "SGD fused": lambda params: torch.optim.SGD(params, lr=0.01, fused=True),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "Muon": lambda params: torch.optim.Muon([p for p in params if p.ndim == 2], lr=0.01),
}
SCHEDULERS = {
    "exponential": lambda o: ExponentialLR(o, 0.9),
    "lambda": lambda o: LambdaLR(o, lambda n: 1 / (n + 1)),
    "cosine": lambda o: CosineAnnealingLR(o, 10),
    "linear": lambda o: LinearLR(o, 0.1, total_iters=4),
    "sequential": lambda o: SequentialLR(o, [LinearLR(o, 0.1, total_iters=2), ExponentialLR(o, 0.5)], [2]),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_scales_every_step_and_never_disturbs_the_schedule(optimizer, scheduler):
    plain, scaled = Probe(), Probe()
    make = OPTIMIZERS[optimizer], SCHEDULERS[scheduler]
    fit(Regression(*make), plain, max_steps=5)
    module = Regression(*make)
    fit(module, scaled, ESSLearningRate(), max_steps=5)
    assert scaled.scheduled_lr == plain.scheduled_lr
    factors = [m["ess/lr_scale"] for m in scaled.metrics]
    assert all(0 < f < 1 for f in factors)
    assert scaled.used_lr == pytest.approx([lr * f for lr, f in zip(plain.used_lr, factors, strict=True)], rel=1e-6)
    assert weights(module).isfinite().all()


class Overflow(Regression):
    """Its gradient overflows in the third step."""

    def loss(self, batch):
        return super().loss(batch) * (torch.inf if self.global_step == 2 else 1.0)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_loss_scaler_skips_changes_nothing(fused):
    def run(*callbacks):
        probe = Probe()
        module = Overflow(lambda p: torch.optim.AdamW(p, lr=0.01, fused=fused), lambda o: ExponentialLR(o, 0.9))
        precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))
        fit(module, probe, *callbacks, max_steps=5, plugins=[precision])
        assert weights(module).isfinite().all()
        return probe

    plain, scaled = run(), run(ESSLearningRate())
    assert scaled.scheduled_lr == plain.scheduled_lr
    factors = [m["ess/lr_scale"] for m in scaled.metrics]
    if not fused:  # whose step is called even then, and looks at the overflow itself
        del factors[2]
    assert scaled.used_lr == pytest.approx([lr * f for lr, f in zip(plain.used_lr, factors, strict=True)])


def test_power_zero_is_a_bitwise_no_op():
    plain, neutral = Regression(), Regression()
    fit(plain)
    fit(neutral, ESSLearningRate(power=0.0))
    assert torch.equal(weights(plain), weights(neutral))


def test_all_micro_batches_of_a_step_count_together():
    one, two = Probe(), Probe()
    fit(Regression(), one, ESSLearningRate(), max_steps=3)
    batches = DataLoader(Rows(), batch_size=ROWS // 2)
    fit(Regression(), two, ESSLearningRate(), max_steps=3, accumulate_grad_batches=2, data=batches)
    assert [m["ess/ratio"] for m in one.metrics] == pytest.approx([m["ess/ratio"] for m in two.metrics[1::2]])


def test_a_module_without_signals_keeps_its_rate_and_says_so():
    class Silent(Regression):
        def signals(self, batch):
            return {}

    probe = Probe()
    says = (
        r"ESSLearningRate: a step had no log_ratio signals .* keeps its learning rate. To provide these "
        r"signals, set self.stabilizer_signals = \{'log_ratio'"
    )
    with pytest.warns(UserWarning, match=says) as warned:
        fit(Silent(), probe, ESSLearningRate())
    assert sum("no log_ratio signals" in str(one.message) for one in warned) == 1
    assert set(probe.used_lr) == {0.01}


def test_an_all_masked_batch_keeps_its_rate():
    rows = Rows()
    rows.mask[:] = False
    probe = Probe()
    with pytest.warns(UserWarning, match="masked"):
        fit(Regression(), probe, ESSLearningRate(), data=DataLoader(rows, batch_size=ROWS))
    assert set(probe.used_lr) == {0.01}


def test_a_step_that_raised_leaves_no_trace():
    param = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    rate = OneStepLearningRate(optimizer)

    def closure():
        rate.scale(0.5)
        raise RuntimeError("in the closure")

    with pytest.raises(RuntimeError):
        optimizer.step(closure)
    param.grad = torch.ones(1)
    rate.scale(1.0)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert param.item() == 0.0
