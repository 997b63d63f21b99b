"""Stabilizers and monitors of modules with two optimizers: what belongs to one does not count for the other."""

import lightning.pytorch as pl
import pytest
import torch
from foreign_modules import fit
from test_all_callbacks import BoundedRows
from test_foreign import Two
from test_foreign_battery import Ours, train

from lit_async_rl.callbacks import AdaptiveStaleness, CollapseAlarm, ESSLearningRate

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]


class Alternating(Two):
    """Odd batches train the critic only, on data of its own."""

    def training_step(self, batch, batch_idx):
        if batch_idx % 2:
            batch = batch | {"log_ratio": batch["log_ratio"] * 50}
        self.stabilizer_signals, self.batch = self.signals(batch), batch
        optimizer, net = self.optimizers()[batch_idx % 2], (self.actor, self.critic)[batch_idx % 2]
        optimizer.zero_grad()
        self.manual_backward((net(batch["x"]).squeeze(-1) - batch["rewards"]).square().mean())
        optimizer.step()


class ActorOnly(Alternating):
    """The same without the critic."""

    def training_step(self, batch, batch_idx):
        if batch_idx % 2 == 0:
            super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.actor.parameters(), lr=0.1)

    def optimizers(self):
        return [super().optimizers()]


@pytest.mark.parametrize("extractor", [None, lambda trainer, module, batch, output: module.signals(module.batch)])
@pytest.mark.parametrize("kind", [ESSLearningRate, CollapseAlarm, AdaptiveStaleness])
def test_signals_of_another_optimizers_batches_do_not_count(kind, extractor):
    seen = {"ESSLearningRate": "ess/ratio", "CollapseAlarm": "collapse/ess_ratio"}
    name = seen.get(kind.__name__, "staleness/smoothed_ess_ratio")
    values = []
    for module in (Alternating(), ActorOnly()):
        watch = Ours()
        fit(module, kind(optimizer=0, extract=extractor), watch, data=BoundedRows(), max_steps=-1, max_epochs=1)
        values.append([metrics[name] for metrics in watch.metrics[::2]])
    assert values[0] == values[1]
    assert 0 < values[0][0] < 1


class Accumulating(Two):
    """The actor steps at every third batch; the critic, first or last, at each, on the same data or on its own."""

    def __init__(self, order="actor first"):
        super().__init__()
        self.order = order

    def training_step(self, batch, batch_idx):
        for part in ("critic", "actor") if self.order == "critic first" else ("actor", "critic"):
            own = batch
            if part == "critic" and self.order == "own data":
                own = batch | {"log_ratio": batch["log_ratio"] * 50}
            self.stabilizer_signals, self.batch = self.signals(own), own
            self._learn(part, own, batch_idx)

    def _learn(self, part, batch, batch_idx):
        optimizer, net = self.optimizers()[part == "critic"], getattr(self, part)
        self.manual_backward((net(batch["x"]).squeeze(-1) - batch["rewards"]).square().mean())
        if part == "critic" or batch_idx % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


class AccumulatingAlone(Accumulating):
    """The same without the critic."""

    def training_step(self, batch, batch_idx):
        self.stabilizer_signals, self.batch = self.signals(batch), batch
        self._learn("actor", batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.actor.parameters(), lr=0.1)

    def optimizers(self):
        return [super().optimizers()]


@pytest.mark.parametrize("order", ["actor first", "critic first", "own data"])
@pytest.mark.parametrize("kind", [ESSLearningRate, CollapseAlarm])
def test_micro_batches_add_up_while_another_optimizer_steps_at_each(kind, order):
    name = {"ESSLearningRate": "ess/ratio", "CollapseAlarm": "collapse/ess_ratio"}[kind.__name__]
    values = []
    for module in (Accumulating(order), AccumulatingAlone()):
        watch = Ours()
        fit(module, kind(optimizer=0), watch, data=BoundedRows(), max_steps=-1, max_epochs=1)
        values.append([metrics[name] for metrics in watch.metrics[2::3]])
    assert values[0] == values[1]
    assert 0 < values[0][0] < 1


def test_gradients_of_two_optimizers_have_a_norm_each(tmp_path):
    watch, _ = train(Two(), "GradientMonitor", tmp_path)
    assert {"grad/norm/0", "grad/norm/1", "grad/cosine/0", "grad/cosine/1"} <= set(watch.metrics[-1])
    assert "grad/norm" not in watch.metrics[-1]


def test_nans_of_one_optimizer_are_counted_by_themselves(tmp_path):
    class ActorNaN(pl.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            if optimizer.param_groups[0]["params"][0] is pl_module.actor.weight:
                pl_module.actor.weight.grad.fill_(torch.nan)

    _, guard = train(Two(), "SkipNonFinite", tmp_path, others=[ActorNaN()])
    assert (guard.dropped.total, guard.dropped.num_in_a_row) == (6, 6)
