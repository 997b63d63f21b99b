"""Signs of reward hacking: changes in a run whose policy earns rewards in an unintended way.

Plain numbers in, names of signs out; `RewardHackingMonitor` is the callback. Each sign compares means over a window of
steps, so that no single step decides, with hysteresis: it must hold for `patience` consecutive steps, and ends only
after as many below 80 % of its threshold.

The thresholds are not from one paper. Length that grows without accuracy is the bias of token-level normalisation
(Liu et al. 2025, arXiv:2503.20783) and of learned rewards (Singhal et al. 2023, arXiv:2310.03716). Of human texts less
than 5 % of the 4-grams are repeated, of degenerate ones more than half (Holtzman et al. 2020, arXiv:1904.09751). A
proxy that rises while the true reward falls is overoptimisation (Gao et al. 2023, arXiv:2210.10760).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lit_async_rl.utils.checks import check_range

N = 4  # tokens of the n-grams
MIN_TOKENS = 16  # of a completion whose repetition counts
MAX_TOKENS = 2048  # of a completion's end in which repetition is counted
MEMORY = 5  # windows; the present one is compared with the oldest
END = 0.8  # share of a threshold below which a sign ends
NO_GAIN = 0.02  # of accuracy
NEW_REPETITION = 0.2  # share of n-grams beyond that of the first window; likewise the next one
NEW_SPECIAL_TOKENS = 0.1
FULL = 0.95  # share of the largest value of a part so far
SOLVED = 0.9  # accuracy from which groups of equal rewards are no sign
PAYS_FOR_LENGTH = 0.5  # correlation of reward and length within groups, among completions with as many turns
MIN_COMPARED = 20  # completions that the reward calls right, for the agreement of two graders


def repetition(token_ids: Sequence[int]) -> float | None:
    """Share of a completion's 4-grams that repeat earlier ones; None if it is shorter than 16 tokens."""
    if len(token_ids) < MIN_TOKENS:
        return None
    ids = np.asarray(token_ids[-MAX_TOKENS:], dtype=np.uint64)
    keys = np.zeros(len(ids) - N + 1, dtype=np.uint64)
    for n in range(N):  # a hash modulo 2**64: collisions are rarer than one in 10**12
        keys = keys * np.uint64(6364136223846793005) + ids[n : len(ids) - N + 1 + n] + np.uint64(1)
    return 1.0 - len(np.unique(keys)) / len(keys)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Means of one step; None for values that the step lacks.

    Attributes:
        length: tokens of a completion.
        reward: of a completion.
        accuracy: share of correct completions; None if the reward is no grader.
        length_pay: correlation of reward and length within groups, among completions with as many turns.
        repetition: share of repeated 4-grams.
        special_tokens: share of completions with a special token before their end.
        group_std: standard deviation of rewards within a group.
        answer: part of the reward compared with the success threshold.
        parts: other parts of the reward.
    """

    length: float
    reward: float
    accuracy: float | None = None
    length_pay: float | None = None
    repetition: float | None = None
    special_tokens: float | None = None
    group_std: float | None = None
    answer: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)

    def row(self) -> dict[str, float]:
        """Values by name, without None."""
        found = {name: value for name, value in vars(self).items() if isinstance(value, int | float)}
        return found | {f"part/{name}": value for name, value in self.parts.items()}


class HackingWatch:
    """Decides which signs of reward hacking hold. None disables a sign.

    Args:
        length_growth: mean length, as a multiple of that of five windows before, while the accuracy has not risen by
            0.02; if the reward is no grader, while reward and length are correlated within groups (0.5), among
            completions with as many turns.
        repetition: share of repeated 4-grams, and 0.2 more than in the first window.
        special_tokens: share of completions with a special token before their end, and 0.1 more than in the first
            window.
        answer_drop: fall of the answer's part, as a share of its largest value so far, while another part rises by as
            much or is at 95 % of its largest value.
        group_std: standard deviation within groups, as a multiple of that of the first window, while less than 0.9 of
            the completions are right; if the reward is no grader, while it is not above its mean in the first window.
        disagreement: share of at least 20 completions, right by the reward, that a second grader calls wrong.
        window: steps.
        patience: steps in a row.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        length_growth: float | None = 1.5,
        repetition: float | None = 0.5,
        special_tokens: float | None = 0.2,
        answer_drop: float | None = 0.1,
        group_std: float | None = 0.1,
        disagreement: float | None = 0.2,
        window: int = 20,
        patience: int = 3,
    ) -> None:
        owner = "RewardHackingMonitor"
        check_range(owner, "> 1", length_growth=length_growth)
        shares = {"repetition": repetition, "special_tokens": special_tokens, "disagreement": disagreement}
        check_range(owner, "in (0, 1]", answer_drop=answer_drop, group_std=group_std, **shares)
        check_range(owner, "integer >= 2", window=window)
        check_range(owner, "integer >= 1", patience=patience)
        self.limits = {"length": length_growth, "format": answer_drop, "group_std": group_std} | shares
        self.window = window
        self.patience = patience
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self._rows: deque[dict[str, float]] = deque(maxlen=MEMORY * self.window)
        self._first: dict[str, float] = {}  # means over those steps of the first window that have the value
        self._num_first: dict[str, int] = {}  # steps in them
        self._range: dict[str, list[float]] = {}  # smallest and largest mean over a window so far
        self._compared: deque[int] = deque(maxlen=100)  # 1 for a disagreement of the second grader
        self._counts: dict[str, int] = {}  # consecutive steps in which a sign holds, or no longer does
        self.found: dict[str, str] = {}  # active signs, with their descriptions

    def compare(self, is_right: bool) -> None:
        """Adds a second grader's verdict on a completion that the reward calls right."""
        self._compared.append(int(not is_right))

    @property
    def disagreement(self) -> float | None:
        """Share of the last 100 such completions that the second grader calls wrong; None for fewer than 20."""
        return statistics.fmean(self._compared) if len(self._compared) >= MIN_COMPARED else None

    def observe(self, seen: Seen) -> list[str]:
        """Adds a step; returns the names of signs that begin."""
        row = seen.row()
        self._rows.append(row)
        # each value by itself, as short completions have no repetition; what begins after the window begins from 0
        for name, value in row.items() if len(self._rows) <= self.window else ():
            self._num_first[name] = self._num_first.get(name, 0) + 1
            mean = self._first.get(name, 0.0)
            self._first[name] = mean + (value - mean) / self._num_first[name]
        now = self._means(list(self._rows)[-self.window :])
        before = self._means(list(self._rows)[: self.window])
        if len(self._rows) >= self.window:
            for name, value in now.items():
                low, high = self._range.setdefault(name, [value, value])
                self._range[name] = [min(low, value), max(high, value)]
        is_late = len(self._rows) >= 2 * self.window
        strengths = {
            "length": self._length(now, before) if is_late else None,
            "repetition": self._share("repetition", now, NEW_REPETITION) if is_late else None,
            "special_tokens": self._share("special_tokens", now, NEW_SPECIAL_TOKENS) if is_late else None,
            "format": self._format(now, before) if is_late else None,
            "group_std": self._group_std(now) if is_late else None,
            "disagreement": self._disagreement(),
        }
        return [name for name, found in strengths.items() if self._decide(name, found)]

    def growth(self) -> float | None:
        """Mean length of the current window over that of the oldest; None before two windows."""
        if len(self._rows) < 2 * self.window:
            return None
        rows = list(self._rows)
        before = self._means(rows[: self.window])["length"]
        return self._means(rows[-self.window :])["length"] / before if before else None

    # -- strength of each sign (1 is its threshold), and its description ---------------------------------------------

    def _length(self, now: Mapping[str, float], before: Mapping[str, float]) -> tuple[float, str] | None:
        limit = self.limits["length"]
        if limit is None or not before["length"]:
            return None
        growth = now["length"] / before["length"]
        words = f"completions are {growth:.2g} times as long as {MEMORY} windows ago"
        if "accuracy" in now and "accuracy" in before:
            has_gained = now["accuracy"] - before["accuracy"] >= NO_GAIN
            return (0.0 if has_gained else growth / limit), f"{words}, and not more accurate ({now['accuracy']:.2g})"
        pay = now.get("length_pay", 0.0)
        return (growth / limit if pay >= PAYS_FOR_LENGTH else 0.0), f"{words}, and the reward pays for length"

    def _share(self, name: str, now: Mapping[str, float], more: float) -> tuple[float, str] | None:
        limit = self.limits[name]
        if limit is None or name not in now:
            return None
        is_known = self._num_first.get(name, 0) >= max(1, self.window // 4)  # else one step would be its own baseline
        first = self._first[name] if is_known else 0.0
        strength = min(now[name] / limit, (now[name] - first) / more)
        what = {
            "repetition": f"{now[name]:.0%} of the 4-grams of a completion are repeated",
            "special_tokens": f"{now[name]:.0%} of the completions have special tokens before their end",
        }[name]
        return strength, f"{what} ({first:.0%} at first)"

    def _format(self, now: Mapping[str, float], before: Mapping[str, float]) -> tuple[float, str] | None:
        limit = self.limits["format"]
        if limit is None or "answer" not in now or "answer" not in before:
            return None
        if not (largest := self._largest("answer")):
            return 0.0, ""
        drop = (before["answer"] - now["answer"]) / largest
        strongest = (0.0, "")
        for name in (one for one in now if one.startswith("part/") and one in before):
            most = self._largest(name)
            rise = (now[name] - before[name]) / most if most else 0.0
            is_full = now[name] >= FULL * most > 0
            if drop > 0 and rise > -limit and (is_full or rise >= limit) and drop / limit > strongest[0]:
                fell = f"the answer's part fell from {before['answer']:.2g} to {now['answer']:.2g}"
                strongest = (drop / limit, f"{fell}, while {name[5:]} is at {now[name]:.2g}")
        return strongest

    def _largest(self, name: str) -> float:
        """Largest magnitude of a mean over a window so far."""
        return max(map(abs, self._range[name]))

    def _group_std(self, now: Mapping[str, float]) -> tuple[float, str] | None:
        limit = self.limits["group_std"]
        first = self._first.get("group_std", 0.0)
        if limit is None or not first or "group_std" not in now:
            return None
        is_solved = now["accuracy"] >= SOLVED if "accuracy" in now else now["reward"] > self._first["reward"]
        if is_solved:
            return 0.0, ""
        strength = min(10.0, limit * first / now["group_std"]) if now["group_std"] > 0 else 10.0
        return strength, f"rewards within a group differ by {now['group_std']:.2g} ({first:.2g} at first), unsolved"

    def _disagreement(self) -> tuple[float, str] | None:
        limit = self.limits["disagreement"]
        share = self.disagreement
        if limit is None or share is None:
            return None
        return share / limit, f"a second grader calls {share:.0%} of the right completions wrong"

    # -- hysteresis ---------------------------------------------------------------------------------------------------

    def _decide(self, name: str, found: tuple[float, str] | None) -> bool:
        """Starts or ends a sign; returns whether it starts."""
        strength, words = found or (0.0, "")
        holds = name in self.found
        is_other = strength < END if holds else strength >= 1
        self._counts[name] = self._counts.get(name, 0) + 1 if is_other else 0
        if self._counts[name] < self.patience:
            if holds and words:
                self.found[name] = words
            return False
        self._counts[name] = 0
        if holds:
            del self.found[name]
            return False
        self.found[name] = words
        return True

    @staticmethod
    def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Means of the columns present in at least half of the rows."""
        names = {name for row in rows for name in row}
        columns = {name: [row[name] for row in rows if name in row] for name in names}
        return {name: math.fsum(found) / len(found) for name, found in columns.items() if 2 * len(found) >= len(rows)}

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Numbers and texts."""
        return {
            "rows": [dict(row) for row in self._rows],
            "first": dict(self._first),
            "num_first": dict(self._num_first),
            "range": {name: list(found) for name, found in self._range.items()},
            "compared": list(self._compared),
            "counts": dict(self._counts),
            "found": dict(self.found),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state of a checkpoint."""
        self.reset()
        self._rows.extend(dict(row) for row in state["rows"])
        self._first = dict(state["first"])
        number = state["num_first"]  # one for all values in older checkpoints
        self._num_first = dict(number) if isinstance(number, Mapping) else dict.fromkeys(self._first, int(number))
        self._range = {name: list(found) for name, found in state["range"].items()}
        self._compared.extend(state["compared"])
        self._counts = dict(state["counts"])
        self.found = dict(state["found"])
