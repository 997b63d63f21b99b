"""Messages of libraries that say nothing to the user."""

from __future__ import annotations

import functools
import logging
import warnings

from transformers.utils import logging as transformers_logging

IRRELEVANT = (
    ".*treespec.*",
    ".*does not have many workers.*",
    ".*in eval mode at the start of training.*",
    ".*Total length of `list` across ranks is zero.*",  # there are no held-out prompts
    ".*The dirpath has changed.*",
    ".*Checkpoint directory .* exists and is not empty.*",  # said of the run's folder, `api.run_folders`
    ".*your dataloader is not resumable.*",
    ".*sync_dist=True.*",  # held-out accuracy is reduced over ranks already
    ".*method of metric .* was called before the ``update`` method.*",  # a rank without held-out prompts
    ".*`weights_only`.*",
    ".*MLFlow only allows.*",  # the @ of pass@1
    ".*weights_only=.*",
)


TIPS = ("💡", "`weights_only` was not set")


def quiet() -> None:
    """Keeps messages about internals out of the user's terminal."""
    _filter_log()
    transformers_logging.disable_progress_bar()
    for message in IRRELEVANT:
        warnings.filterwarnings("ignore", message=message)


@functools.cache
def _filter_log() -> None:
    """Once: filters add up."""
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).addFilter(lambda record: not any(part in record.getMessage() for part in TIPS))
