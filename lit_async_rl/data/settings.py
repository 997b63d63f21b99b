"""Settings of `RolloutDataModule` that belong together: `data.scoring`, `data.validation`, `data.limits`."""

from __future__ import annotations

from dataclasses import dataclass

from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.prompts.sources import PromptSource
from lit_async_rl.utils.checks import check_not_negative, check_positive

SECONDS = ("rollout_timeout_s", "rank_timeout_s", "start_timeout_s")


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How completions are scored.

    Args:
        workers: completions scored at the same time, each as soon as it has been sampled.
        timeout_s: seconds that scoring one may take.
        tries: a prompt whose completions cannot be scored (the reward raises, or does not return in time) so often is
            left out, with a line in the log, and another takes its place; ten prompts left out in a row, without a
            reward in between, end the run. None ends it at the first time.

    Raises:
        ValueError: a setting is out of range.
    """

    workers: int = 1
    timeout_s: float = 60.0
    tries: int | None = None

    def __post_init__(self) -> None:
        check_positive("data.scoring", workers=self.workers, timeout_s=self.timeout_s)
        if self.tries is not None:
            check_positive("data.scoring", tries=self.tries)


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Held-out prompts, and how they are sampled and judged.

    Args:
        prompts: held-out prompts; None validates nothing.
        num_samples: completions of each prompt; more than one also gives pass@k.
        batch_size: prompts sampled together.
        sampling: how completions are sampled; None is `data.sampling`.
        success_reward: a completion with at least this reward counts as correct.

    Raises:
        ValueError: a setting is out of range.
    """

    prompts: PromptSource | None = None
    num_samples: int = 1
    batch_size: int = 128
    sampling: SamplingParams | None = None
    success_reward: float = 1.0

    def __post_init__(self) -> None:
        check_positive("data.validation", num_samples=self.num_samples, batch_size=self.batch_size)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long is waited, and how often an engine is restarted, before a run ends with an error.

    Args:
        rollout_timeout_s: seconds without a new token or reward, while the trainer waits, before an engine counts as
            hanging; where several ranks train, also the seconds in which a rank that others wait for may make no
            progress (see docs/scaling.md).
        rank_timeout_s: seconds without a sign of life from a training process before it counts as dead.
        start_timeout_s: seconds in which all training processes must have come together at the start.
        engine_restarts: an engine that hangs or breaks is replaced by a new one with the current weights, so often in a
            row (without a training step in between); then, or with 0 at once, the run ends.

    Raises:
        ValueError: a setting is out of range.
    """

    rollout_timeout_s: float = 600.0
    rank_timeout_s: float = 60.0
    start_timeout_s: float = 300.0
    engine_restarts: int = 3

    def __post_init__(self) -> None:
        check_positive("data.limits", **{name: vars(self)[name] for name in SECONDS})
        check_not_negative("data.limits", engine_restarts=self.engine_restarts)
