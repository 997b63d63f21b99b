"""The cosine of consecutive gradients, from a random projection that costs no copy of the gradient."""

import csv
import math

import pytest
import torch

import lit_async_rl as rl
from lit_async_rl.assets import asset
from lit_async_rl.stabilizers.gradients import MAX_ROWS_PER_KERNEL, SKETCH_SIZE, Sketch

N = 3_000_000


def vectors(kind: str, c: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Two vectors of cosine c (about)."""
    torch.manual_seed(1)
    if kind == "dense":
        a, noise = torch.randn(N), torch.randn(N)
    elif kind == "low rank":
        left, right = torch.randn(2, N // 1000), torch.rand(2, 1000) + 0.5
        a, noise = (torch.outer(x, y).flatten() for x, y in zip(left, right, strict=True))
    else:  # a few dimensions of a layer of 576 dominate
        scale = torch.ones(576)
        scale[::97] = 100.0
        a, noise = (torch.randn(N).mul_(scale.repeat(N // 576 + 1)[:N]) for _ in range(2))
    noise -= a * (a @ noise) / (a @ a)
    return a, c * a / a.norm() + math.sqrt(1 - c * c) * noise / noise.norm()


@pytest.mark.parametrize("kind", ["dense", "low rank", "outliers"])
@pytest.mark.parametrize("c", [0.0, -0.3, 0.9])
@pytest.mark.parametrize("rows", [1, MAX_ROWS_PER_KERNEL])
def test_the_estimate_is_within_a_few_standard_errors(kind, c, rows):
    a, b = vectors(kind, c)
    sketch = Sketch(torch.device("cpu"))
    sketch._rows_per_kernel = rows
    estimate = torch.dot(sketch(a.split(700_001)), sketch(b.split(700_001))) / a.norm() / b.norm()
    assert abs(float(estimate) - c) < 4 * math.sqrt((1 + c * c) / SKETCH_SIZE)


def cosines(tmp_path, **settings) -> list[float]:
    torch.manual_seed(0)
    trainer = rl.fit(
        asset("small_sort_policy"),
        rl.SortDigits(6, size=64),
        rl.share_correct,
        **dict(groups_per_step=4, group_size=4, max_steps=4, max_staleness=0, learning_rate=1e-3),
        engine=rl.EmbeddedEngine(in_flight_weight_updates=False, seed=0),
        sampling=rl.SamplingParams(max_tokens=6),
        logger=rl.CSVLog(str(tmp_path), name=str(len(settings))),
        defaults={"gradients": rl.GradientMonitor(**settings)},
        **dict(accelerator="cpu", enable_progress_bar=False, enable_checkpointing=False),
    )
    with open(f"{trainer.log_dir}/metrics.csv", newline="") as file:
        found = [float(row["grad/cosine"]) for row in csv.DictReader(file) if row.get("grad/cosine")]
    monitor = next(c for c in trainer.callbacks if isinstance(c, rl.GradientMonitor))
    kept = [p for _, pieces in monitor._previous._known.values() for p in pieces if p is not None]
    assert bool(kept) == (not settings)
    return found


@pytest.mark.slow
def test_a_run_logs_the_same_cosine_without_a_copy(tmp_path):
    exact, estimated = cosines(tmp_path), cosines(tmp_path, max_copied=0)
    assert len(exact) == 3
    assert estimated == pytest.approx(exact, abs=0.03)
