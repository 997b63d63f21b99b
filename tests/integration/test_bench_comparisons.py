"""Comparisons of the staleness benchmark, and what its cells change about engine and gradient."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from flow import fit, make_data, make_module, parameters
from replays import collect, full_logprobs, requests_of
from scipy.stats import ttest_rel
from tiny_models import save, tiny_gemma2, tiny_llama
from transformers import DynamicCache

from benchmarks.performance import router_replay, score_centering
from benchmarks.staleness.comparisons import at_best_rate, compare, comparison_table, robustness
from benchmarks.staleness.mismatch import LEVELS, MismatchedEngine, rounded
from benchmarks.staleness.norm_control import NormControl
from benchmarks.staleness.suite import BEST, load_suite
from lit_async_rl.callbacks import GradientAlignmentControl
from lit_async_rl.cli.app import AsyncRLCLI
from lit_async_rl.models.weights import stream_weights

ROOT = Path(__file__).parents[2]
NEW = ("gac_norm_only", "no_momentum", "engine_", "sat", "pnpo", "minpro", "estr", "score_centering")


def runs_of(finals: dict[tuple[str, float], list[float]], lag: int = 16) -> pd.DataFrame:
    """Runs of one regime, `finals[method, learning-rate scale][seed]`, and synchronous ones of 0.9."""
    rows = [("uncorrected", 0, 1.0, seed, 0.9) for seed in range(5)]
    rows += [(m, lag, s, seed, value) for (m, s), values in finals.items() for seed, value in enumerate(values)]
    table = pd.DataFrame(rows, columns=["method", "lag", "learning_rate_scale", "seed", "final"])
    return table.assign(regime="r", cpu_s=10.0, error=None)


def test_each_seed_has_the_rate_that_is_best_for_the_others() -> None:
    runs = runs_of({("uncorrected", 0.3): [0.5, 0.5, 0.5, 0.5], ("uncorrected", 1.0): [0.9, 0.4, 0.4, 0.4]})
    best = at_best_rate(runs[runs["lag"] == 16]).set_index("seed")
    assert best["learning_rate_scale"].to_dict() == {0: 0.3, 1: 1.0, 2: 1.0, 3: 1.0}
    assert best["final"].mean() < 0.5  # the best rate by all seeds, 1, would have shown 0.525


def test_differences_are_paired_and_corrected_for_their_number() -> None:
    plain, better, same = [0.2, 0.5, 0.8, 0.3, 0.6], [0.31, 0.6, 0.92, 0.4, 0.69], [0.21, 0.48, 0.81, 0.3, 0.59]
    found = compare(runs_of({("uncorrected", 1.0): plain, ("a", 1.0): better, ("b", 1.0): same})).set_index("method")
    assert found.loc["a", "p"] == pytest.approx(ttest_rel(better, plain).pvalue)
    assert found.loc["a", "q"] == pytest.approx(2 * found.loc["a", "p"])  # the smaller of two
    assert found.loc["b", "q"] == pytest.approx(found.loc["b", "p"])
    assert found.loc["a", "difference"] - found.loc["a", "half"] > 0.08  # though the seeds differ by 0.6
    table = comparison_table(runs_of({("uncorrected", 1.0): plain, ("a", 1.0): better}), "r")
    assert "| a | 16 | 5 | 0.584" in table
    assert "| 0.104 ± 0.0" in table


def test_robustness_is_the_mean_over_the_logarithm_of_the_rate() -> None:
    runs = runs_of({("uncorrected", 0.1): [0.8], ("uncorrected", 1.0): [0.4], ("uncorrected", 10.0): [0.0]})
    (row,) = robustness(runs[runs["lag"] == 16]).to_dict("records")
    assert row["robustness"] == pytest.approx(0.4)


@pytest.mark.parametrize(("settings", "low", "high"), [({"int8": True}, 1e-4, 0.02), ({"sigma": 0.02}, 0.019, 0.021)])
def test_the_engine_has_other_weights_than_the_trainer(settings, low, high) -> None:
    module = make_module()
    engine = MismatchedEngine(**settings)
    engine.setup(module.model)
    engine.load_weights(0, module.policy.causal_lm.named_parameters())
    for name, theirs in engine.engine.slots.lm.named_parameters():
        own = dict(module.policy.causal_lm.named_parameters())[name].detach()
        change = float((theirs - own).std() / own.std()) if own.dim() > 1 else 0.0
        assert low < change < high if own.dim() > 1 else torch.equal(theirs, own)
    engine.close()


def test_weights_that_are_frozen_get_new_noise_with_every_update() -> None:
    module = make_module()
    module.policy.requires_grad_(False)
    engine = MismatchedEngine(sigma=0.02)
    engine.setup(module.model)
    known: dict[str, int] | None = {} if engine.takes_changes else None  # as `WeightSync` publishes
    seen = []
    for version in range(2):
        engine.load_weights(version, stream_weights(module.policy, known=known))
        engine.poll(timeout_s=0.0)  # in flight, an update is applied before the next token
        seen.append([p.detach().clone() for p in engine.engine.slots.lm.parameters() if p.dim() > 1])
    engine.close()
    assert not any(torch.equal(first, second) for first, second in zip(*seen, strict=True))


def eight_bits(values: torch.Tensor) -> torch.Tensor:
    """Each row by itself, number by number."""
    rows = []
    for row in values.reshape(-1, values.shape[-1]).numpy():
        step = np.abs(row).max() / np.float32(LEVELS)
        rows.append([np.round(number / step) * step for number in row])
    return torch.tensor(np.array(rows, dtype=np.float32)).reshape(values.shape)


class RoundedKeys(DynamicCache):
    """What a prompt keeps, and what each token after it reads and keeps, in 8 bits."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        kept = super().update(eight_bits(key_states), eight_bits(value_states), layer_idx, *args, **kwargs)
        return kept if key_states.shape[2] == 1 else (key_states, value_states)


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma2], ids=["fast", "of transformers"])
def test_keys_and_values_of_eight_bits_are_those_of_a_cache_rounded_by_hand(make, tmp_path) -> None:
    lm = make()
    engine = MismatchedEngine(int8_cache=True, device="cpu", num_slots=9)  # a prompt that is copied is read rounded
    engine.setup(save(lm, tmp_path))
    engine.load_weights(0, lm.named_parameters())
    requests = requests_of([5, 3, 9], num_samples=3, max_tokens=12)
    engine.submit(requests)
    completions = collect(engine, 9)
    engine.close()
    errors, changes = [], []
    for c in completions:
        prompt, found = requests[c.request_id].prompt_ids, torch.tensor(c.logprobs)
        cache, ids, expected = RoundedKeys(), torch.tensor([prompt]), []
        for token in c.token_ids:
            with torch.no_grad():
                logits = lm(input_ids=ids, past_key_values=cache, use_cache=True).logits[0, -1]
            expected.append(logits.log_softmax(-1)[token])
            ids = torch.tensor([[token]])
        errors.append((found - torch.stack(expected)).abs())
        changes.append((found - full_logprobs(lm, prompt, c.token_ids)).abs())
    # a number in the middle between two of eight bits may be rounded either way
    assert torch.cat(errors).mean() < 0.1 * torch.cat(changes).mean()
    assert torch.cat(changes).max() > 1e-3


def test_rounding_to_eight_bits_has_255_values_for_each_row() -> None:
    matrix = torch.randn(3, 4000, generator=torch.Generator().manual_seed(0))
    found = rounded(matrix)
    step = matrix.abs().amax(-1, keepdim=True) / LEVELS
    assert ((found - matrix).abs() <= step / 2 + 1e-6).all()
    assert all(150 < len(row.unique()) <= 2 * LEVELS + 1 for row in found)
    torch.testing.assert_close(found.abs().amax(-1), matrix.abs().amax(-1))


def test_the_control_shortens_gradients_as_much_as_the_projection_and_keeps_their_direction() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 50, generator=generator)
    second += first
    found = {}
    for control in (GradientAlignmentControl(0.05, 1.0), NormControl(0.05, 1.0)):
        layer = torch.nn.Linear(50, 1, bias=False)
        optimizer = torch.optim.SGD(layer.parameters())
        for gradient in (first, second):
            layer.weight.grad = gradient[None].clone()
            metrics = control.apply(layer, optimizer)
        assert metrics["gac/regime"] == 1
        found[type(control)] = layer.weight.grad[0]
    projected, shortened = found.values()
    assert shortened.norm() == pytest.approx(float(projected.norm()), rel=1e-5)
    assert torch.nn.functional.cosine_similarity(shortened, second, dim=0) == pytest.approx(1.0, abs=1e-6)
    assert torch.nn.functional.cosine_similarity(projected, second, dim=0) < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["gac", "mismatch", "equal_tuning"])
def test_every_method_of_the_suite_can_be_set_up(suite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    blocks = [block for block in load_suite(suite).blocks if block.learning_rate_scales != BEST]
    cells = {cell.method: cell for block in blocks for cell in block.cells({})}
    shown = {part: cell for name, cell in cells.items() for part in name.split("+") if part.startswith(NEW)}
    assert shown
    for cell in shown.values():
        cli = AsyncRLCLI([*cell.arguments(), "--trainer.logger", "false"])
        cli.model.trainer = cli.trainer
        cli.model.configure_optimizers()


def test_a_mismatched_engine_trains() -> None:
    module = make_module()
    before = parameters(module).clone()
    engine = MismatchedEngine(int8=True, in_flight_weight_updates=False)
    fit(module, make_data(engine=engine, schedule="fixed_lag", max_staleness=1, groups_per_step=2), 2)
    assert not torch.equal(before, parameters(module))


@pytest.mark.slow
def test_replayed_experts_take_the_mismatch_away(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {name: values for name, *values in router_replay.main(["--seeds", "0", "--num_tokens", "8"])}
    same, bfloat16 = rows["the same weights"], rows["engine in bfloat16"]
    assert same[0] < 1e-5
    assert same[2] < 1e-5
    assert bfloat16[2] < 0.7 * bfloat16[0]


@pytest.mark.slow
def test_the_cost_of_score_centering_is_measured() -> None:
    found = score_centering.main(["--num_layers", "1", "--num_tokens", "3", "--repetitions", "1", "--head", "4"])
    assert all(math.isfinite(value) for value in found.values())
    assert found["step_reinforce"] > 0
