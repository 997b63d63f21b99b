"""Held-out prompts of the validation loop, in batches, and the rewards of their completions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from lit_async_rl.data.settings import Validation, check_ends
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.problem import Prompt
from lit_async_rl.prompts.sources import PromptSource
from lit_async_rl.prompts.stream import UsableSubset
from lit_async_rl.rewards import hooks
from lit_async_rl.rewards.scorer import Scorer, score_all
from lit_async_rl.rewards.success import CutWatch, Success, SuccessWatch
from lit_async_rl.types import PromptBatch, SamplingParams


class HeldOut:
    """Batches and scores the prompts of `data.validation`, on every rank.

    Args:
        settings: `data.validation`.
        sampling: sampling parameters of their completions.
        make_scorer: scorer of the training reward; called when the first completion is scored.
        grader: the reward, or the environment in its place.

    Attributes:
        success: tells correct completions from others, by `data.validation.success_reward` or its default.
    """

    def __init__(
        self, settings: Validation, sampling: SamplingParams, make_scorer: Callable[[], Scorer], grader: Any
    ) -> None:
        self._settings = settings
        self._sampling = sampling
        self._make_scorer = make_scorer
        self._scorer: Scorer | None = None
        self._grader = grader
        self.success = Success.by(settings.success_reward, grader)
        is_default = settings.success_reward is None
        self._watch = SuccessWatch("data.validation.success_reward", "val/pass@k and eval/pass@k", is_default)
        limit = "data.sampling" if settings.sampling is None else "data.validation.sampling"
        self._cut_watch = CutWatch(f"{limit}.max_tokens", "val/cut_share and eval/cut_share")

    def watch(self, rewards: Iterable[float], cut_share: float) -> None:
        """Warns once if the threshold does not suit a validation's or evaluation's rewards, or most are cut."""
        self._cut_watch.warn_once(cut_share, self._sampling.max_tokens)
        self._watch.add(self.success.value(reward) for reward in rewards)
        self._watch.warn_once(self.success.threshold)

    def batches(
        self, codec: TextCodec, rank: int, num_ranks: int, source: PromptSource | None = None
    ) -> Iterable[PromptBatch]:
        """This rank's batches of usable prompts of a source, by default `data.validation.prompts`; none without any.

        Raises:
            ValueError: see `UsablePrompts` and `lit_async_rl.data.settings.check_ends`.
        """
        source = source or self._settings.source
        if source is None:
            warnings.filterwarnings("ignore", message=r".*Total length of `list` across ranks is zero")  # intended
            return []
        check_ends(codec, self._sampling, source)
        length = codec.context_length  # validation samples from the trained model itself
        max_tokens = self._sampling.max_tokens
        why = f"the model's context of {length} tokens leaves besides validation's sampling.max_tokens={max_tokens}"
        # where no prompt can fit, the setting is wrong and not the prompts: the engine of validation refuses it
        encode = hooks.checking(codec.encode, self._grader)
        usable = UsableSubset(source, encode, length - max_tokens if length > max_tokens else None, why=why)
        return PromptFeed(usable, self._settings.batch_size, rank, num_ranks=num_ranks)

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
        return score_all(self._scorer, completions, on_progress, token_ids=token_ids)

    def close(self) -> None:
        """Ends the scorer's threads. Safe to call twice."""
        if self._scorer is not None:
            self._scorer.close()
            self._scorer = None


class PromptFeed:
    """Batches of held-out prompts in order; rank r of n gets batches r, r + n, r + 2n, ...

    All ranks have equally many batches, some empty: Lightning skips validation on a rank without any. The length keeps
    Lightning from prefetching.

    Args:
        source: of the prompts.
        batch_size: prompts sampled together.
        rank: of this process.
        num_ranks: among which the batches are divided.
    """

    def __init__(self, source: PromptSource, batch_size: int, rank: int = 0, num_ranks: int = 1) -> None:
        self._source = source
        self._batch_size = batch_size
        self._rank = rank
        self._num_ranks = num_ranks

    def __len__(self) -> int:
        return -(-len(self._source) // (self._batch_size * self._num_ranks))

    def __iter__(self) -> Iterator[PromptBatch]:
        for n in range(len(self)):
            index = n * self._num_ranks + self._rank
            begin = min(index * self._batch_size, len(self._source))
            end = min(begin + self._batch_size, len(self._source))
            yield PromptBatch([self._source[k] for k in range(begin, end)], index)
