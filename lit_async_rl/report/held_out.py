"""Samples of the same held-out prompts at every validation, from `held_out.jsonl`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lit_async_rl.report.samples import evenly, parsed, shortened
from lit_async_rl.report.tail import Tail

MAX_VALIDATIONS, MAX_PROMPTS, MAX_BYTES = 60, 8, 1_000_000


class HeldOut:
    """Incremental reader of `held_out.jsonl`."""

    def __init__(self, folder: Path) -> None:
        self._tail = Tail(folder / "held_out.jsonl")
        self._generation = 0
        self._found: dict[str, dict[int, dict[str, Any]]] = {}

    def refresh(self) -> bool:
        """Reads new rows; whether there were any."""
        if not self._tail.begin():
            return False
        if self._tail.generation != self._generation:
            self._generation = self._tail.generation
            self._found.clear()
        for _, line in self._tail.lines():
            row = parsed(line)
            if row is not None and isinstance(row.get("prompt"), str) and isinstance(row.get("step"), int):
                self._found.setdefault(row["prompt"], {}).setdefault(row["step"], row)
        return True

    def payload(self) -> list[dict[str, Any]]:
        """For each prompt its answer, and a completion at each of evenly spaced validations."""
        prompts, left = [], MAX_BYTES
        for prompt, rows in list(self._found.items())[:MAX_PROMPTS]:
            samples = []
            for step in sorted(evenly(sorted(rows), MAX_VALIDATIONS)):
                text = shortened(rows[step].get("completion"))
                left -= len(text.encode())
                if left > 0:
                    samples.append({"step": step, "text": text, "reward": rows[step].get("reward")})
            if samples:
                answer = next(iter(rows.values())).get("answer")
                prompts.append({"prompt": shortened(prompt), "answer": answer, "samples": samples})
        return prompts
