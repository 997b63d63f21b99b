"""Shares of a run's time, read from its timeline: what a verdict on the same run must say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lit_async_rl.scheduling.bottleneck import NO_TIME, Intervals

MICRO = 1e-6
GENERATING = ("prefill", "decode")


def intervals(events: Sequence[Mapping[str, Any]], rank: int = 0) -> Intervals:
    """Intervals of a whole run from its timeline, as `BottleneckVerdict` counts them.

    They begin with the first micro-batch and end with the last span of the trainer; validation is left out.

    Args:
        events: of the file of the rank that has the engine.
        rank: its number.
    """
    mine = [event for event in events if event["ph"] == "X" and event["pid"] == rank]
    trained = [event for event in mine if event["name"] == "forward_backward"]
    if not trained:
        return NO_TIME
    end = max(_end(event) for event in mine if event["cat"] == "trainer" and event["name"] != "validation")
    window = (min(float(event["ts"]) for event in trained), end)
    left_out = [(float(event["ts"]), _end(event)) for event in mine if event["name"] == "validation"]

    def seconds(spans: Iterable[Mapping[str, Any]]) -> float:
        total = 0.0
        for event in spans:
            inside = _overlap((float(event["ts"]), _end(event)), window)
            total += _length(inside) - sum(_length(_overlap(inside, hole)) for hole in left_out)
        return MICRO * total

    workers = {event["tid"] for event in mine if event["cat"] == "reward"}
    return Intervals(
        wall_s=MICRO * (_length(window) - sum(_length(_overlap(window, hole)) for hole in left_out)),
        wait_s=seconds(event for event in mine if event["name"] == "wait"),
        sync_s=seconds(event for event in mine if event["name"] == "publish"),
        engine_busy_s=seconds(event for event in mine if event["cat"] == "engine" and event["name"] in GENERATING),
        scoring_s=seconds(event for event in mine if event["cat"] == "reward") / max(1, len(workers)),
    )


def _end(event: Mapping[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return max(one[0], other[0]), min(one[1], other[1])


def _length(interval: tuple[float, float]) -> float:
    return max(0.0, interval[1] - interval[0])
