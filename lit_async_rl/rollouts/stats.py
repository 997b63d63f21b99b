"""Totals of sampling and scoring, for monitors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lit_async_rl.rewards.scorer import Scorer
from lit_async_rl.rollouts.engine_in_use import EngineInUse
from lit_async_rl.rollouts.group_book import GroupBook
from lit_async_rl.rollouts.intake import FateTotals, Intake
from lit_async_rl.rollouts.wait_timer import WaitTimer


@dataclass(frozen=True, kw_only=True)
class ProducerStats:
    """Totals since the start.

    Attributes:
        wait_s: seconds the trainer waited for groups; `run_s`: seconds since the start.
        engine_busy_s: seconds of generation; `num_tokens`: tokens generated.
        scoring_s: seconds of scoring, the mean over workers; `scoring_cpu_share`: share of it spent computing.
        num_finished: groups finished and scored; `num_queued`: those not yet taken; `num_unfinished`: being sampled.
        num_lost: groups that were dropped unasked-for: redundant, fallen out of a ring buffer, too old.
        fates: what became of the groups, and how long they were.
        num_sampled: groups that got their rewards; `num_dropped`: those of them that filters dropped.
        sampled_reward: sum over all of them of a group's mean reward, before filters.
    """

    wait_s: float
    run_s: float
    engine_busy_s: float
    scoring_s: float
    num_tokens: int
    num_finished: int
    num_queued: int
    num_unfinished: int
    num_lost: int
    fates: Mapping[str, FateTotals] = field(default_factory=dict)
    num_sampled: int = 0
    num_dropped: int = 0
    sampled_reward: float = 0.0
    scoring_cpu_share: float = 0.0

    @classmethod
    def of(
        cls,
        timer: WaitTimer,
        engine: EngineInUse,
        scorer: Scorer,
        book: GroupBook,
        intake: Intake,
        num_lost: int,
    ) -> ProducerStats:
        """Totals of the parts of a producer, whose lock is held."""
        return cls(
            wait_s=timer.wait_s,
            run_s=timer.run_s,
            engine_busy_s=engine.busy_s,
            scoring_s=scorer.busy_s,
            num_tokens=engine.num_tokens,
            num_finished=intake.num_sampled,
            num_queued=len(book.finished),
            num_unfinished=len(book.unfinished),
            num_lost=num_lost,
            fates=intake.fates,
            num_sampled=intake.num_sampled,
            num_dropped=intake.num_dropped,
            sampled_reward=intake.sampled_reward,
            scoring_cpu_share=scorer.cpu_share,
        )

    @classmethod
    def zero(cls) -> ProducerStats:
        """Totals before the start."""
        return cls(
            wait_s=0.0,
            run_s=0.0,
            engine_busy_s=0.0,
            scoring_s=0.0,
            num_tokens=0,
            num_finished=0,
            num_queued=0,
            num_unfinished=0,
            num_lost=0,
        )
