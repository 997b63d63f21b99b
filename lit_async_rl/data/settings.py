"""Grouped settings of `RolloutDataModule`, settings that follow from several of its own, and those of its tokenizer."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import Literal

from lit_async_rl import rules
from lit_async_rl.engines.base import RolloutEngine, SamplingParams
from lit_async_rl.models.tokenizer import SPECIAL_TOKENS, SpecialTokens, TextCodec
from lit_async_rl.prompts.records import Records
from lit_async_rl.prompts.sources import PromptSource, as_source
from lit_async_rl.replay.tape import Tape
from lit_async_rl.rewards.calls import Reward
from lit_async_rl.rewards.hooks import num_threads
from lit_async_rl.rewards.scorer import Scorer
from lit_async_rl.runtime.retries import TryPolicy
from lit_async_rl.scheduling.admission import FromTape
from lit_async_rl.utils.checks import MANY, check_choice, check_range

log = logging.getLogger(__name__)
ASYNC_CALLS = 64  # an `async` reward waits for something else, mostly: one call at a time would waste that

# -- data.scoring, data.validation and data.limits --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Scoring of training completions.

    Args:
        workers: completions scored concurrently, each as soon as it is sampled: threads, or calls under way of an
            `async` reward. None is one thread, or 64 such calls. Rewards that know their own number, such as a judge,
            use that instead.
        timeout_s: timeout of one reward.
        tries: a prompt whose scoring fails (the reward raises or times out) this often is replaced by another, with a
            warning; ten in a row, without a reward in between, end the run. None ends it at the first failure.
        backoff_s: seconds before the second try; each further pause is twice as long.
        success_reward: least reward, before filters, of a success in the pass rates of prompts; None is full marks of a
            reward that declares itself a grader, and 0.5 for any other.
        special_tokens: special tokens in the text that rewards, environments, validation and samples get. `tags`: those
            that structure an answer, such as `<think>`, and none that end, begin or pad a text. `none`: none. `all`:
            all, the end token included.
        resume_rewards: what a resume does with saved rewards if the reward, its settings, the environment or the
            prompts' answers have changed: `anew` samples these groups again, and begins the replay buffer and pass
            rates anew; `keep` keeps all of them.

    Raises:
        ValueError: a setting is out of range.
    """

    workers: int | None = None
    timeout_s: float = 60.0
    tries: int | None = None
    backoff_s: float = 0.0
    success_reward: float | None = None
    special_tokens: SpecialTokens = "tags"
    resume_rewards: Literal["anew", "keep"] = "anew"

    def __post_init__(self) -> None:
        check_range("data.scoring", "integer positive", workers=self.workers)
        check_range("data.scoring", f"<= {MANY}", workers=self.workers)
        check_range("data.scoring", "finite", success_reward=self.success_reward)
        TryPolicy(owner="data.scoring", timeout_s=self.timeout_s, tries=self.tries, backoff_s=self.backoff_s)
        check_choice("data.scoring", SPECIAL_TOKENS, special_tokens=self.special_tokens)
        check_choice("data.scoring", ("anew", "keep"), resume_rewards=self.resume_rewards)

    @property
    def threads(self) -> int:
        """Completions that plain rewards score concurrently."""
        return self.workers or 1

    @property
    def calls(self) -> int:
        """Calls under way of an `async` reward."""
        return self.workers or ASYNC_CALLS

    def make_scorer(self, reward: Reward | None, records_spans: bool = True) -> Scorer:
        """A scorer with these settings; None where the engine scores."""
        scorer = Scorer(
            reward,
            num_threads(reward, self.threads),
            self.timeout_s,
            num_calls=self.calls,
            max_tries=self.tries,
            backoff_s=self.backoff_s,
            records_spans=records_spans,
        )
        scorer.keeps_rewards = self.resume_rewards == "keep"
        return scorer


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Held-out prompts, and how they are sampled and scored.

    Args:
        prompts: held-out prompts; None disables validation.
        num_samples: completions per prompt; more than one adds pass@k.
        batch_size: prompts sampled together.
        sampling: sampling parameters; None is `data.sampling`.
        success_reward: minimum reward of a correct completion; None is full marks of a reward that declares itself a
            grader (1 for those of this library), and 0.5 for any other.

    Raises:
        ValueError: a setting is out of range.
    """

    prompts: Records | None = None
    num_samples: int = 1
    batch_size: int = 128
    sampling: SamplingParams | None = None
    success_reward: float | None = None

    def __post_init__(self) -> None:
        check_range("data.validation", "integer positive", num_samples=self.num_samples, batch_size=self.batch_size)
        check_range("data.validation", f"<= {MANY}", num_samples=self.num_samples, batch_size=self.batch_size)
        check_range("data.validation", "finite", success_reward=self.success_reward)
        object.__setattr__(self, "prompts", self.source)

    @property
    def source(self) -> PromptSource | None:
        """The held-out prompts."""
        return None if self.prompts is None else as_source(self.prompts, "data.validation.prompts")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Timeouts, and engine restarts before a run ends with an error.

    Args:
        rollout_timeout_s: seconds without a new token or reward, while the trainer waits and no reward or environment
            works within a limit of its own, before an engine counts as hanging; with several ranks also the seconds
            that a rank awaited by others may go without progress (see docs/hardware.md).
        rank_timeout_s: seconds without a sign of life from a training process before it counts as dead.
        start_timeout_s: seconds in which all training processes must come together at the start.
        engine_restarts: how often in a row, without a training step in between, an engine that hangs or breaks is
            replaced by a new one with the current weights; then, or with 0 at once, the run ends.

    Raises:
        ValueError: a setting is out of range.
    """

    rollout_timeout_s: float = 600.0
    rank_timeout_s: float = 60.0
    start_timeout_s: float = 300.0
    engine_restarts: int = 3

    def __post_init__(self) -> None:
        check_range("data.limits", "positive", rollout_timeout_s=self.rollout_timeout_s)
        check_range("data.limits", "positive", rank_timeout_s=self.rank_timeout_s)
        check_range("data.limits", "positive", start_timeout_s=self.start_timeout_s)
        check_range("data.limits", "integer >= 0", engine_restarts=self.engine_restarts)


# -- Settings that follow from several others -------------------------------------------------------------------------


def with_support(sampling: SamplingParams, engine: RolloutEngine | None) -> SamplingParams:
    """Adds recording of the tokens that a truncated sampler could choose; logs what was set.

    Without it importance ratios would compare a distribution over few tokens with one over all. Engines without a model
    are left alone.

    Raises:
        ValueError: see `lit_async_rl.rules.of_truncation`.
    """
    if not sampling.truncates or (engine is not None and not engine.has_model):
        return sampling
    rules.refuse(rules.of_truncation(sampling, engine))
    recorded = sampling.recorded
    if recorded != sampling:
        log.warning(
            "%s: the %s likeliest tokens at each position are recorded (data.sampling.head=%s)%s",
            rules.truncations(sampling),
            recorded.head,
            recorded.head,
            ""
            if sampling.top_k
            else ", and only these tokens can be sampled (to change their number, set data.sampling.top_k or head)",
        )
    return recorded


def open_tape(admission: FromTape, sampling: SamplingParams, max_staleness: int) -> Tape:
    """The tape that is replayed.

    Raises:
        FileNotFoundError: there is none; names the setting.
        ValueError: its first step was sampled with other settings, or lacks a record that they ask for.
    """
    try:
        tape = Tape(admission.folder, sampling.distribution, max_staleness)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"data.admission.folder={admission.folder!r}: {error}") from error
    rollouts = [
        r for step in tape.evenly_spaced_steps(1) for group in step.groups for r in group.rollouts if r.token_ids
    ]
    rules.refuse(rules.of_tape(admission.folder, sampling, rollouts))
    return tape


# -- data.sampling and the model's tokenizer --------------------------------------------------------------------------


NUM_INSPECTED = 100  # prompts that are looked at for messages


def check_ends(codec: TextCodec, sampling: SamplingParams, source: PromptSource) -> None:
    """Refuses what cannot end a completion: stop strings absent from texts, a chat template without an end.

    Raises:
        ValueError: see `TextCodec.check_stop` and `TextCodec.check_turn_end`.
    """
    codec.check_stop(sampling.stop, (*sampling.stop_token_ids, *(sampling.end_token_ids or ())))
    can_stop = bool(sampling.stop or sampling.stop_token_ids) or sampling.end_token_ids is not None
    codec.check_turn_end(_holds_messages(source), can_stop)


def _holds_messages(source: PromptSource) -> bool:
    """Whether one of the first usable prompts is messages."""
    for number in range(min(len(source), NUM_INSPECTED)):
        with contextlib.suppress(ValueError):  # a bad prompt, which is refused or left out elsewhere
            if source[number].messages is not None:
                return True
    return False
