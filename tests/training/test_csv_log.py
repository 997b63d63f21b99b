"""The table of metrics: the file that Lightning writes, whole at any time, and complete after a full disk."""

import csv
import logging
from pathlib import Path

import hypothesis.strategies as st
from disk import full_disk
from hypothesis import given, settings
from lightning.pytorch.loggers import CSVLogger

from lit_async_rl.training.trackers import CSVLog

ROWS = st.lists(
    st.tuples(st.dictionaries(st.sampled_from("abcde"), st.integers(0, 999), min_size=1), st.booleans()), max_size=12
)


def table(logger):
    logger.save()
    with (Path(logger.log_dir) / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@settings(max_examples=30, deadline=None)
@given(rows=ROWS, most=st.integers(0, 60))
def test_after_a_full_disk_it_is_lightnings_file(rows, most, tmp_path_factory):
    folder = tmp_path_factory.mktemp("csv")
    ours = CSVLog(folder, name="ours", flush_logs_every_n_steps=1)
    theirs = CSVLogger(folder, name="theirs", flush_logs_every_n_steps=1)
    for step, (row, is_full) in enumerate(rows):
        theirs.log_metrics(dict(row), step)
        if is_full:
            with full_disk(most):
                ours.log_metrics(dict(row), step)
        else:
            ours.log_metrics(dict(row), step)
            assert len(table(ours)) == step + 1, "what waited was written"
    if rows:
        assert table(ours) == table(theirs)
        assert not list(Path(ours.log_dir).glob("*.part"))


def test_it_says_what_was_not_written(tmp_path, caplog):
    logger = CSVLog(tmp_path, flush_logs_every_n_steps=1)
    with full_disk(0), caplog.at_level(logging.WARNING):
        logger.log_metrics({"reward": 0.5}, 1)
    assert "metrics.csv was not written: the disk is full" in caplog.text
    assert table(logger) == [{"reward": "0.5", "step": "1"}]
