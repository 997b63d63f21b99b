"""Held-out prompts of the validation loop, and their rewards."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lit_async_rl.data.compatibility import check_ends
from lit_async_rl.data.dataloaders import PromptFeed
from lit_async_rl.data.settings import Validation
from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.prompts.usable import UsableSubset
from lit_async_rl.rewards.scorer import Scorer, score_all
from lit_async_rl.rewards.success import SuccessWatch, success_threshold
from lit_async_rl.types import Prompt, PromptBatch


class HeldOut:
    """Batches and scores the prompts of `data.validation`, on every rank.

    Args:
        settings: `data.validation`.
        sampling: sampling parameters of their completions.
        make_scorer: scorer of the training reward; called when the first completion is scored.
        grader: the reward, or the environment in its place.

    Attributes:
        threshold: reward of a correct completion, `data.validation.success_reward` or its default.
    """

    def __init__(
        self, settings: Validation, sampling: SamplingParams, make_scorer: Callable[[], Scorer], grader: Any
    ) -> None:
        self._settings, self._sampling, self._make_scorer = settings, sampling, make_scorer
        self._scorer: Scorer | None = None
        self.threshold = success_threshold(settings.success_reward, grader)
        is_default = settings.success_reward is None
        self._watch = SuccessWatch("data.validation.success_reward", "val/pass@k and eval/pass@k", is_default)

    def watch(self, rewards: Iterable[float]) -> None:
        """Says once if the rewards of a validation or evaluation do not fit the threshold."""
        self._watch.add(rewards)
        self._watch.speak(self.threshold)

    def batches(self, codec: TextCodec, rank: int, num_ranks: int) -> Iterable[PromptBatch]:
        """This rank's batches of the usable prompts; none without `data.validation.prompts`.

        Raises:
            ValueError: see `UsablePrompts` and `check_ends`.
        """
        if (source := self._settings.source) is None:
            warnings.filterwarnings("ignore", message=r".*Total length of `list` across ranks is zero")  # intended
            return []
        check_ends(codec, self._sampling, source)
        length = codec.context_length  # validation samples from the trained model itself
        max_tokens = self._sampling.max_tokens
        why = f"the model's context of {length} tokens leaves besides validation's sampling.max_tokens={max_tokens}"
        # where no prompt can fit, the setting is wrong and not the prompts: the engine of validation says so
        usable = UsableSubset(source, codec.encode, length - max_tokens if length > max_tokens else None, why)
        return PromptFeed(usable, self._settings.batch_size, rank, num_ranks)

    def score(
        self,
        completions: Sequence[tuple[Prompt, str]],
        on_progress: Callable[[], None],
        token_ids: Sequence[Sequence[int]] | None = None,
    ) -> list[float | None]:
        """Rewards of the completions; None for those that failed `data.scoring.tries` times.

        Args:
            completions: prompts and completion texts.
            on_progress: called after each reward.
            token_ids: of each completion, for rewards that want them.
        """
        if self._scorer is None:  # kept, because isolated rewards have a process for each of its threads
            self._scorer = self._make_scorer()
        return score_all(self._scorer, completions, on_progress, token_ids)

    def close(self) -> None:
        """Ends the scorer's threads. Safe to call twice."""
        if self._scorer is not None:
            self._scorer.close()
            self._scorer = None
