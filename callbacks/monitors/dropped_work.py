"""Sampled tokens that nothing is trained on, in words: how many, what dropped them, and what to do about it.

`BottleneckVerdict` and `RunSummary` say it, and the progress line has the share.
"""

from __future__ import annotations

from fractions import Fraction

from lit_async_rl.rollouts.intake import FAILED, RESTARTED, ROLLED_BACK
from lit_async_rl.rollouts.totals import ProducerStats
from lit_async_rl.scheduling.admission import Admission, ExpiringAdmission, RingAdmission

MUCH = 1 / 3  # share of the sampled tokens from which a verdict begins with it
FEW = 0.005  # share that is not worth a word
LARGEST = 10  # denominator of a share in words
TOO_EASY = "harder prompts, a curriculum, or stop here"
TOO_HARD = "easier prompts, a curriculum, or a larger data.group_size"
REMEDIES = {
    "OverlongFilter": "a larger data.sampling.max_tokens",
    Admission.drops_as: "fewer data.admission.redundant_groups",
    ExpiringAdmission.drops_as: "a larger data.max_staleness, or --data.admission null, which waits",
    RingAdmission.drops_as: "a larger data.max_staleness or capacity, or --data.admission null, which waits",
    FAILED: "look at data.reward, its warnings are above",
    RESTARTED: "look at the engine, its errors are above",
    ROLLED_BACK: "a lower rate, a correction, or a smaller data.max_staleness",
}


def dropped_row(stats: ProducerStats) -> str | None:
    """`83%: DynamicSampling 80%, redundant_groups 3%`; None if next to nothing was dropped."""
    shares = stats.dropped_share()
    total = sum(shares.values())
    if total < FEW:
        return None
    parts = [f"{cause} {share:.0%}" for cause, share in shares.items() if share >= FEW]
    return parts[0] if len(shares) == 1 else f"{total:.0%}: {', '.join(parts)}"


def dropped_sentence(stats: ProducerStats, before: ProducerStats | None = None) -> str | None:
    """`5 of 6 sampled tokens were dropped by DynamicSampling: harder prompts, a curriculum, or stop here`.

    None if no cause dropped as much as `MUCH` of the tokens sampled since `before`.
    """
    for cause, share in stats.dropped_share(before).items():
        if share < MUCH:
            return None
        return f"{in_words(share)} sampled tokens were dropped by {cause}: {remedy(cause, stats, before)}"
    return None


def remedy(cause: str, stats: ProducerStats, before: ProducerStats | None = None) -> str:
    """Advice for dropping less. Mean rewards tell whether prompts without a signal are too easy or too hard."""
    if cause != "DynamicSampling":
        return REMEDIES.get(cause, "look at data.filters")
    then = before or ProducerStats()
    number = max(1, stats.num_sampled - then.num_sampled)
    return TOO_EASY if (stats.sampled_reward - then.sampled_reward) / number >= stats.threshold else TOO_HARD


def in_words(share: float) -> str:
    """`5 of 6` for a share near it; `all` for 1."""
    near = Fraction(share).limit_denominator(LARGEST)
    if near == 1:
        return "all" if share == 1 else f"{share:.0%} of all"
    return f"{near.numerator} of {near.denominator}"
