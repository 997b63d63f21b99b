"""Rollouts of a run for the viewer, selected from `samples.jsonl` within a budget of bytes."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from lit_async_rl.report.tail import Tail

MAX_ROLLOUT_BYTES = 3_500_000  # on the whole page
MAX_TEXT_CHARS = 120_000  # per completion or prompt
ROW_START = re.compile(rb'\{"step": (\d+), "group": (-?\d+), ')
Key = tuple[int, int]  # step and group
PER_TOKEN = ("versions", "log_ratios", "advantages", "entropies", "mask")


class Samples:
    """Incremental index of a table of rollouts; `payload` reads the rows."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self._clear()

    def _clear(self) -> None:
        self._rows: defaultdict[Key, list[tuple[int, int]]] = defaultdict(list)  # offset and size of each rollout

    def refresh(self) -> bool:
        """Indexes new rows; returns whether there were any."""
        return self._tail.refresh(self._clear, self._add)

    def _add(self, offset: int, line: bytes) -> None:
        if (key := _step_and_group(line)) is not None:
            self._rows[key].append((offset, len(line)))

    def steps(self) -> set[int]:
        """Steps with rows."""
        return {step for step, _ in self._rows}

    def payload(self, max_bytes: int = MAX_ROLLOUT_BYTES) -> list[dict[str, Any]]:
        """Groups of evenly spaced steps, with all rollouts, in order of steps."""
        chosen = sorted(choose({key: sum(size for _, size in rows) for key, rows in self._rows.items()}, max_bytes))
        try:
            with self._tail.path.open("rb") as file:
                contents = [[_row(file, *place) for place in self._rows[key]] for key in chosen]
        except OSError:  # removed meanwhile
            return []
        return [group for rows in contents if (group := as_group(row for row in rows if row is not None))]


def _row(file: BinaryIO, offset: int, size: int) -> dict[str, Any] | None:
    file.seek(offset)
    return parsed(file.read(size))


def choose(sizes: dict[Key, int], max_bytes: int) -> Iterator[Key]:
    """Selects groups within a budget: one group of evenly spaced steps, the last step first, then a second of each.

    Args:
        sizes: bytes of each group, by step and group.
        max_bytes: largest total size.
    """
    if not sizes:
        return
    by_step: defaultdict[int, list[Key]] = defaultdict(list)
    for key in sizes:
        by_step[key[0]].append(key)
    steps = sorted(by_step)
    mean = sum(sizes.values()) / len(sizes)
    num_groups = int(max_bytes / max(mean, 1))  # that fit
    most_per_step = max(map(len, by_step.values()))
    per_step = max(1, min(most_per_step, num_groups // max(1, min(len(steps), 100))))
    remaining = max_bytes
    for number in range(per_step):
        for step in evenly(steps, max(1, num_groups // per_step)):
            if number >= len(by_step[step]):
                continue
            key = by_step[step][number]
            if sizes[key] <= remaining:
                remaining -= sizes[key]
                yield key


def evenly(values: Sequence[int], max_values: int) -> list[int]:
    """At most `max_values` evenly spaced values: the last one, the first, then the others."""
    if len(values) <= max_values:
        kept = list(values)
    elif max_values < 2:
        kept = [values[-1]]
    else:
        kept = [values[round(n * (len(values) - 1) / (max_values - 1))] for n in range(max_values)]
    return [kept[-1], *kept[:-1]]


def as_group(rows: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """A group for the page, with common fields and its rollouts; None without rows."""
    rollouts = list(rows)
    if not rollouts:
        return None
    head = rollouts[0]
    group = {name: head.get(name) for name in ("step", "group", "prompt", "messages", "answer", "policy_version")}
    group["prompt"] = shortened(group["prompt"])
    group["rollouts"] = [_rollout(row, number) for number, row in enumerate(rollouts)]
    return {name: value for name, value in group.items() if value is not None}


def _rollout(row: dict[str, Any], number: int) -> dict[str, Any]:
    tokens = row.get("tokens")
    kept: dict[str, Any] = {
        "sample": row.get("sample", number),
        "reward": row.get("reward"),
        "parts": row.get("reward_parts"),
        "length": row.get("num_tokens", len(tokens) if tokens else None),
        "oldest": row.get("oldest_version"),
        "newest": row.get("newest_version"),
        "finish": row.get("finish_reason"),
        "turns": row.get("turns"),
    }
    if isinstance(tokens, list) and all(isinstance(token, str) for token in tokens):
        kept["tokens"] = tokens
        for name in PER_TOKEN:
            values = row.get(name)
            if isinstance(values, list | tuple) and len(values) == len(tokens):
                kept[name] = values
        kept["cut"] = row.get("cut")
    if not tokens or row.get("cut"):
        kept["text"] = shortened(row.get("completion"))
    return {name: value for name, value in kept.items() if value is not None}


def shortened(text: Any) -> str:
    """The text; of a text longer than `MAX_TEXT_CHARS` its beginning and end."""
    text = text if isinstance(text, str) else ""
    if len(text) <= MAX_TEXT_CHARS:
        return text
    half = MAX_TEXT_CHARS // 2
    return f"{text[:half]}\n[{len(text) - 2 * half:,} characters left out]\n{text[-half:]}"


def parsed(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None for any other line."""
    try:
        row = json.loads(line, parse_constant=lambda _: None)  # NaN and Infinity, which browsers refuse, become None
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _step_and_group(line: bytes) -> Key | None:
    """Step and group of a row."""
    if (match := ROW_START.match(line)) is not None:  # much faster than parsing the whole line
        return int(match[1]), int(match[2])
    row = parsed(line)
    if row is None or not isinstance(row.get("step"), int):
        return None
    group = row.get("group", 0)
    return row["step"], group if isinstance(group, int) else 0
