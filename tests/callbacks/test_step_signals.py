"""Signals of a step, where some of its micro-batches are empty."""

import lightning.pytorch as pl
import pytest
import torch
from flow import fit, make_data, make_module

from lit_async_rl import SharedPromptPacking
from lit_async_rl.callbacks import CollapseAlarm, ESSLearningRate, ImportanceMonitor, RolloutMonitor
from lit_async_rl.stabilizers.signals import SignalCollector
from lit_async_rl.types import RolloutBatch


@pytest.mark.slow
def test_the_mean_reward_is_that_of_the_completions_where_micro_batches_are_empty():
    seen = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.fit_loop._should_accumulate():
                return
            seen.append([float(trainer.callback_metrics[name]) for name in ("collapse/reward", "reward/mean")])

    data = make_data(micro_batches_per_step=6, reward=lambda prompt, completion: 1.0 + len(completion) % 3)
    module = make_module(packing=SharedPromptPacking())  # keeps groups whole: two of six parts are empty
    fit(module, data, 3, [CollapseAlarm(max_reward_drop=0.9), RolloutMonitor(), Watch()])
    assert len(seen) == 3
    for alarm, monitor in seen:
        assert alarm == pytest.approx(monitor)


def test_monitor_and_stabilizers_have_one_effective_sample_size_where_completions_are_masked():
    mask = torch.zeros(4, 6, dtype=torch.bool)
    mask[:2, 2:] = True  # as `OverlongFilter` leaves them
    zeros = torch.zeros(4, 6)
    log_ratio = torch.where(mask, torch.tensor([[-0.5], [-0.1], [0.0], [0.0]]), 0.0)
    batch = RolloutBatch(
        input_ids=zeros.long(),
        attention_mask=torch.ones_like(mask),
        loss_mask=mask,
        behavior_logprobs=zeros,
        versions=zeros.long(),
        advantages=zeros,
        token_weights=zeros,
        rewards=torch.zeros(4),
        group_index=torch.zeros(4, dtype=torch.long),
    )
    signals = {"log_ratio": log_ratio, "mask": mask, "clipped": torch.zeros_like(mask)}
    trainer, module = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False), pl.LightningModule()
    module.stabilizer_signals = signals
    monitor = ImportanceMonitor()
    monitor.update(trainer, module, batch)
    collector = SignalCollector()
    collector.add(signals)
    step = collector.reduce("cpu")
    assert step.num_samples == 2
    assert float(monitor.compute(trainer, module)["importance/ess_ratio"]) == pytest.approx(step.ess_ratio)


def test_ranks_that_see_the_same_data_count_once():
    collector = SignalCollector()
    collector.add({"log_ratio": torch.tensor([0.0, 1.0, torch.nan])})
    alone = collector.reduce("cpu")
    collector.num_copies = 2
    for _ in range(2):
        collector.add({"log_ratio": torch.tensor([0.0, 1.0, torch.nan])})
    together = collector.reduce("cpu")
    assert (together.num_samples, together.num_broken) == (alone.num_samples, alone.num_broken) == (3, 1)
    assert together.ess_ratio == pytest.approx(alone.ess_ratio)


@pytest.mark.parametrize("name", ["rewards", "entropy", "staleness"])
def test_signals_may_be_on_another_device_than_the_ratios_or_missing(name):
    collector = SignalCollector()
    shape = (4,) if name == "rewards" else (4, 3)
    collector.add({"log_ratio": torch.zeros(4, 3, device="meta"), name: torch.zeros(shape)})
    collector.add({"log_ratio": torch.zeros(4, 3, device="meta"), name: None})


def test_the_first_parameter_group_may_be_empty():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW([{"params": []}, {"params": list(model.parameters())}])
    stabilizer = ESSLearningRate()
    model(torch.randn(2, 4)).sum().backward()
    stabilizer.add({"log_ratio": torch.zeros(2)})
    stabilizer.apply(optimizer)
    optimizer.step()
