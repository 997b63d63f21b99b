"""How far weights move: against distances of whole copies, by the formula of what is left, and from a sample."""

import csv
import math

import lightning.pytorch as pl
import pytest
import torch

import lit_async_rl as rl
from lit_async_rl.assets import asset
from lit_async_rl.callbacks.monitors.weight_drift import half_lag
from lit_async_rl.stabilizers.gradients import GradSpace

LAG = 2


class Copies(pl.Callback):
    """All weights before each step."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.found.append(torch.cat([p.detach().double().flatten() for p in pl_module.parameters()]))


def run(tmp_path, **settings):
    """Rows of a run's metrics, and its weights."""
    copies = Copies()
    trainer = rl.fit(
        asset("small_sort_policy"),
        rl.SortDigits(6, size=64),
        rl.share_correct,
        **dict(groups_per_step=4, group_size=4, max_steps=8, max_staleness=LAG, admission=rl.FixedLag()),
        learning_rate=1e-3,
        engine=rl.EmbeddedEngine(in_flight_weight_updates=False, seed=0),
        sampling=rl.SamplingParams(max_tokens=6),
        micro_batches_per_step=2,
        logger=rl.CSVLog(str(tmp_path), name="run"),
        callbacks=[rl.WeightDriftMonitor(**settings), copies],
        **dict(accelerator="cpu", enable_progress_bar=False, enable_checkpointing=False),
    )
    with open(f"{trainer.log_dir}/metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["reward/mean"]]
    return rows, copies.found


@pytest.mark.slow
def test_distances_are_those_of_the_weights(tmp_path):
    rows, weights = run(tmp_path, num_entries=10**7)
    assert len(rows) == len(weights) == 8
    path = 0.0
    for n, row in enumerate(rows):
        expected = {"drift/stale": weights[n] - weights[max(0, n - LAG)]}
        if n > 0:
            expected |= {"drift/step": weights[n] - weights[n - 1], "drift/total": weights[n] - weights[0]}
            path += expected["drift/step"].norm().item()
            assert float(row["drift/path"]) == pytest.approx(path, rel=1e-6)
        for name, difference in expected.items():
            assert float(row[name]) == pytest.approx(difference.norm().item(), rel=1e-6), (n, name)
    last = {name: float(value) for name, value in rows[-1].items() if value}
    assert last["drift/stale"] < LAG * last["drift/step"] * 1.5
    assert last["drift/path"] > last["drift/total"] > 0
    lag = half_lag(LAG, step=last["drift/step"], stale=last["drift/stale"], radius=last["drift/radius"])
    assert last["drift/half_lag"] == pytest.approx(lag, rel=1e-5)


@pytest.mark.slow
def test_a_sample_of_the_weights_is_close_and_older_versions_are_forgotten(tmp_path):
    rows, weights = run(tmp_path, num_entries=8_192, max_lag=1)
    assert weights[0].numel() > 10 * 8_192
    for n, row in enumerate(rows[1:], start=1):
        difference = (weights[n] - weights[n - 1]).norm().item()
        assert float(row["drift/step"]) == pytest.approx(difference, rel=0.1)
    assert all(not row["drift/stale"] for row in rows[LAG:])


def test_the_radius_is_where_half_is_left():
    monitor = rl.WeightDriftMonitor()
    for distance in (0.5, 2.0, 1.0):
        monitor._fit(distance, math.exp(-0.3 * distance**2))
    assert monitor.radius == pytest.approx(math.sqrt(math.log(2) / 0.3))
    monitor.reset()
    monitor._fit(1.0, 1.0)
    assert monitor.radius is None, "nothing was lost yet"


@pytest.mark.parametrize(
    ("lag", "step", "stale", "expected"),
    [(4, 1.0, 4.0, 8.0), (4, 1.0, 2.0, 64.0), (4, 1.0, 1.0, 256.0), (1, 1.0, 1.0, 8.0), (4, 1.0, 8.0, 4.0)],
)
def test_the_distance_grows_between_a_random_walk_and_a_line(lag, step, stale, expected):
    """At radius 8; slower than a walk counts as one, faster than a line as a line."""
    assert half_lag(lag, step=step, stale=stale, radius=8.0) == pytest.approx(expected)


@pytest.mark.parametrize("settings", [{"num_entries": 0}, {"max_lag": 0}])
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match="WeightDriftMonitor"):
        rl.WeightDriftMonitor(**settings)


class EveryFourth(pl.LightningModule):
    """Each step moves its weight by 1, and every fourth one is published; from the second version on data are stale."""

    version = 0

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch, batch_idx):
        self.version, _ = divmod(self.trainer.global_step, 4)
        staleness = torch.full((8, 3), min(self.version, 1))
        self.stabilizer_signals = {"log_ratio": torch.randn(8, 3), "staleness": staleness}
        return -self.weight.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Seen(pl.Callback):
    def __init__(self):
        self.found = []

    def on_train_batch_end(self, trainer, *_):
        self.found.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def test_where_a_version_trains_several_steps_distances_are_from_the_weights_that_sampled():
    seen = Seen()
    rows = torch.utils.data.DataLoader(torch.zeros(64, 1), batch_size=4)
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    monitor = rl.WeightDriftMonitor()
    pl.Trainer(max_steps=12, accelerator="cpu", callbacks=[monitor, seen], **quiet).fit(EveryFourth(), rows)
    moved = [step - 4 * max(0, step // 4 - 1) for step in range(12)]
    assert [row["drift/stale"] for row in seen.found] == moved
    last = seen.found[-1]  # on a straight line the radius is as many steps away as it is long
    assert last["drift/half_lag"] == pytest.approx(last["drift/radius"] / 4)


def test_no_entry_is_spent_on_frozen_weights():
    net = torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.Linear(1000, 1))
    net[0].requires_grad_(False)
    monitor = rl.WeightDriftMonitor(num_entries=500)
    monitor._sample(GradSpace(net, net.parameters()))
    assert [len(places) for places in monitor._places] == [0, 0, 500, 1]
    assert monitor._factors[2] == pytest.approx(math.sqrt(2))
