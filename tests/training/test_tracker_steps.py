"""The same step for the same thing in a tracker: metrics, samples, and validations of any interval."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from pathlib import Path

import pytest
from flow import fit, make_data, make_module
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_async_rl.callbacks import RolloutMonitor, SampleLogger
from lit_async_rl.report.run_data import Curves
from lit_async_rl.tasks import SortDigits
from lit_async_rl.training.trackers import CSVLog


@pytest.mark.parametrize(
    ("log_every_n_steps", "micro_batches"),
    [(3, 1), pytest.param(1, 2, marks=pytest.mark.slow), pytest.param(50, 2, marks=pytest.mark.slow)],
)
def test_what_belongs_to_a_step_is_at_the_same_step(log_every_n_steps, micro_batches, tmp_path):
    held_out = SortDigits(8, size=4, split="held_out")
    data = make_data(val_prompts=held_out, micro_batches_per_step=micro_batches, groups_per_step=2)
    loggers = [CSVLog(tmp_path, name="", version=0), TensorBoardLogger(tmp_path, name="tb", version=0)]
    often = dict(val_check_interval=2 * micro_batches, check_val_every_n_epoch=None, num_sanity_val_steps=0)
    callbacks = [SampleLogger(every_n_steps=1), RolloutMonitor()]
    settings = dict(logger=loggers, log_every_n_steps=log_every_n_steps, **often)
    trainer = fit(make_module(), data, 6, callbacks, **settings)
    trainer.validate(trainer.lightning_module, data, verbose=False)

    events = EventAccumulator(str(tmp_path / "tb" / "version_0"))
    events.Reload()
    at = {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert at["val/pass@1"] == [2, 4, 6, 6], "the number of steps before each, in training and after it"
    assert [event.step for event in events.Tensors("samples/text_summary")] == [0, 1, 2, 3, 4, 5]
    logged = [step for step in range(6) if (step + 1) % log_every_n_steps == 0]
    assert at.get("reward/mean", []) == logged

    found = defaultdict(list)
    with (tmp_path / "version_0/metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value:
                    found[name].append(int(row["step"]))
    assert found["val/pass@1"] == at["val/pass@1"]
    curves = Curves(tmp_path / "version_0")
    curves.refresh()
    page = curves.payload()
    axis = {name: page["axes"][one["axis"]] for name, one in page["series"].items()}
    assert axis["val/pass@1"] == [2, 4, 6, 6], "for any interval of the log"
    assert axis.get("reward/mean", []) == [step + 1 for step in logged]
    held = {json.loads(line)["step"] for line in Path(tmp_path / "version_0/held_out.jsonl").read_text().splitlines()}
    assert held == {2, 4, 6}
