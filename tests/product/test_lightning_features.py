"""Which features of Lightning work: each row of docs/lightning.md is run, and does what it says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch import callbacks as lightning_callbacks
from markdown_blocks import ROOT

import lit_async_rl as rl

sys.path.insert(0, str(ROOT / "docs"))
import lightning_table

ROWS_OF_TABLE = yaml.safe_load(lightning_table.SOURCE.read_text())
MODEL = rl.asset("small_sort_policy")
ROWS = [{"prompt": f"{n}=", "answer": str(n)} for n in range(10, 30)]
DATA_SETTINGS = ("micro_batches_per_step", "held_out")


def reward(prompt, completion):
    return float(len(completion) % 2)


def module(**changes):
    return rl.PolicyModule(MODEL, **({"learning_rate": 1e-4} | changes))


def data(held_out=False, **changes):
    held = rl.Validation(prompts=rl.SortDigits(4, size=2, split="held_out")) if held_out else rl.Validation()
    small = dict(groups_per_step=2, group_size=2, sampling=rl.SamplingParams(max_tokens=4), validation=held)
    return rl.RolloutDataModule(prompts=ROWS, reward=reward, **(small | changes))


def trainer(**changes):
    quiet = dict(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_checkpointing=False)
    return rl.Trainer(**(dict(max_steps=1) | quiet | changes))


class Stops(pl.Callback):
    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = True


class Other(pl.LightningModule):
    def training_step(self, batch, batch_idx):
        return None

    def configure_optimizers(self):
        return None


class OwnOptimizer(rl.PolicyModule):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TwoOptimizers(rl.PolicyModule):
    def configure_optimizers(self):
        parameters = list(self.parameters())
        return [torch.optim.SGD(parameters[:1], lr=0.1), torch.optim.SGD(parameters[1:], lr=0.1)]


class Manual(rl.PolicyModule):
    automatic_optimization = False


class OwnClipping(rl.PolicyModule):
    was_clipped = False

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.was_clipped = True
        self.clip_gradients(optimizer, gradient_clip_val=gradient_clip_val)


class OwnCallbacks(rl.PolicyModule):
    def configure_callbacks(self):
        return [Stops()]


class Logs(rl.PolicyModule):
    def training_step(self, batch, batch_idx):
        self.log("mine", 3.0)
        return super().training_step(batch, batch_idx)


class SavesHyperparameters(rl.PolicyModule):
    def __init__(self, model, mine=3):
        super().__init__(model)
        self.save_hyperparameters()


def cases():
    """Rows with code. Of those that train, every second one is slow, and the others are in the sweep."""
    for number, row in enumerate(row for row in ROWS_OF_TABLE if "code" in row):
        marks = [] if row["is"] == "refused" else [pytest.mark.sweep if number % 2 else pytest.mark.slow]
        yield pytest.param(row, id=row["feature"], marks=marks)


@pytest.fixture
def names(tmp_path, monkeypatch):
    """What the code of a row may use; `now` is the Trainer of the last `fit`."""
    monkeypatch.chdir(tmp_path)
    found = {name: value for name, value in globals().items() if not name.startswith("test_")}
    found |= {name: getattr(lightning_callbacks, name) for name in lightning_callbacks.__all__}

    def fit(model=None, ckpt_path=None, **settings):
        of_data = {name: settings.pop(name) for name in DATA_SETTINGS if name in settings}
        found["now"] = trainer(**settings)
        found["now"].fit(module() if model is None else model, data(**of_data), ckpt_path=ckpt_path)
        return found["now"]

    def now_written():
        found["now"].strategy.checkpoint_io.teardown()  # waits for the files that are being written

    return found | {"fit": fit, "now": None, "now_written": now_written, "__found": found}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row", cases())
def test_a_feature_does_what_the_table_says(row, names):
    if row["is"] == "refused":
        with pytest.raises(Exception, match=re.escape(row["says"])):
            exec(row["code"], names)
        return
    exec(row["code"], names)
    names["now"] = names["__found"].get("now")
    assert eval(row.get("check", "True"), names)


def test_rows_without_code_name_their_test():
    for row in ROWS_OF_TABLE:
        assert row["is"] in ("works", "refused", "ignored"), row
        assert "code" in row or (ROOT / row["tested"]).is_file(), row
    assert len(ROWS_OF_TABLE) >= 75
    assert len({row["feature"] for row in ROWS_OF_TABLE}) == len(ROWS_OF_TABLE)


def test_the_page_has_the_table():
    assert Path(lightning_table.PAGE).read_text() == lightning_table.filled(lightning_table.PAGE.read_text())
