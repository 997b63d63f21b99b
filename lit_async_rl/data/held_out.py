"""Held-out prompts of the validation loop, and their rewards."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence

from lit_async_rl.data.dataloaders import PromptFeed
from lit_async_rl.data.settings import Validation
from lit_async_rl.prompts.usable import UsableSubset
from lit_async_rl.rewards.scorer import Scorer, score_all
from lit_async_rl.types import Prompt, PromptBatch


class HeldOut:
    """Batches and scores the prompts of `data.validation`, on every rank.

    Args:
        settings: `data.validation`.
        encode: token ids of a prompt.
        make_scorer: scorer of the training reward; called when the first completion is scored.
    """

    def __init__(
        self, settings: Validation, encode: Callable[[Prompt], tuple[int, ...]], make_scorer: Callable[[], Scorer]
    ) -> None:
        self._settings, self._encode, self._make_scorer = settings, encode, make_scorer
        self._scorer: Scorer | None = None

    def batches(self, rank: int, num_ranks: int) -> Iterable[PromptBatch]:
        """This rank's batches of the usable prompts; none without `data.validation.prompts`."""
        if (source := self._settings.source) is None:
            warnings.filterwarnings("ignore", message=r".*Total length of `list` across ranks is zero")  # intended
            return []
        usable = UsableSubset(source, self._encode)
        return PromptFeed(usable, self._settings.batch_size, rank, num_ranks)

    def score(self, completions: Sequence[tuple[Prompt, str]], on_progress: Callable[[], None]) -> list[float | None]:
        """Rewards of the completions; None for those that failed `data.scoring.tries` times.

        Args:
            completions: prompts and completion texts.
            on_progress: called after each reward.
        """
        if self._scorer is None:  # kept, because isolated rewards have a process for each of its threads
            self._scorer = self._make_scorer()
        return score_all(self._scorer, completions, on_progress)

    def close(self) -> None:
        """Ends the scorer's threads. Safe to call twice."""
        if self._scorer is not None:
            self._scorer.close()
            self._scorer = None
