"""Admission policies, the setting `data.admission`: how far sampling may run ahead of training, and at which price.

| policy | engine at the staleness bound | groups thrown away | repeatable to the bit |
|---|---|---|---|
| `Bounded` (default) | waits | none, or the slowest of a round | no |
| `FixedLag` | waits | none | yes |
| `Drop`, `Retry` | never waits | those that are too old | no |
| `Ring` | never waits | the oldest in the buffer | no |
| `FromTape` | there is none | none | yes |

All of them keep the bound: no token older than `data.max_staleness` versions is trained on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from lit_async_rl.scheduling.admission import Admission
from lit_async_rl.scheduling.expiry import ExpiringAdmission
from lit_async_rl.scheduling.ring import RingAdmission
from lit_async_rl.utils.checks import check_range


@dataclass(frozen=True)
class AdmissionPolicy(ABC):
    """Factory of a run's `Admission`.

    Attributes:
        in_order: whether groups train strictly in the order of admission, which makes a run repeatable; needs an engine
            without in-flight weight updates, and filters that drop no group.
    """

    in_order: ClassVar[bool] = False

    @abstractmethod
    def make(self, groups_per_round: int, max_staleness: int) -> Admission:
        """Admission for this many groups between two publications and this staleness bound in versions."""


@dataclass(frozen=True)
class Bounded(AdmissionPolicy):
    """Admits a group only if it can be trained on within the bound; trains on any finished group in time.

    Args:
        async_ratio: at most (1 + `async_ratio`) rounds of groups are sampled or queued (ROLL Flash, arXiv:2510.11345);
            at most `max_staleness`, which is also the meaning of None.
        redundant_groups: samples that many more groups in a round than are trained on and aborts the slowest (ROLL
            Flash).

    Raises:
        ValueError: a setting is out of range.
    """

    async_ratio: float | None = None
    redundant_groups: int = 0

    def __post_init__(self) -> None:
        check_range("data.admission", ">= 0", async_ratio=self.async_ratio)
        check_range("data.admission", "integer >= 0", redundant_groups=self.redundant_groups)

    def make(self, groups_per_round: int, max_staleness: int) -> Admission:
        limits = self.async_ratio, self.redundant_groups
        return Admission(groups_per_round, max_staleness, False, *limits)


@dataclass(frozen=True)
class FixedLag(AdmissionPolicy):
    """Trains step n on rollouts of version n - `max_staleness`: runs are bitwise reproducible."""

    in_order: ClassVar[bool] = True

    def make(self, groups_per_round: int, max_staleness: int) -> Admission:
        return Admission(groups_per_round, max_staleness, in_order=True)


@dataclass(frozen=True)
class Drop(AdmissionPolicy):
    """Keeps the engine busy; drops groups that are too old at the start of a round. Their prompts are skipped.

    With `max_staleness: 0` a step takes the first groups to finish, and those started at older weights do not count:
    the aggregation of Rennala SGD and Rennala NIGT, arXiv:2509.24305. Long completions are dropped more often;
    `LengthBiasMonitor` measures by how much.

    Args:
        ahead: rounds of groups sampled or queued beyond the one that trains; above `max_staleness` some are always
            dropped.

    Raises:
        ValueError: a setting is out of range.
    """

    ahead: float = 1.0

    def __post_init__(self) -> None:
        check_range("data.admission", ">= 0", ahead=self.ahead)

    def make(self, groups_per_round: int, max_staleness: int) -> Admission:
        return ExpiringAdmission(groups_per_round, max_staleness, self.ahead)


@dataclass(frozen=True)
class Retry(Drop):
    """Like `Drop`, but samples the prompt again, with the newest weights and before new prompts.

    No prompt is lost, but its long completions are underrepresented.

    Args:
        max_tries: a prompt is given up after its group was dropped that many times in a row.
    """

    max_tries: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("data.admission", "integer >= 1", max_tries=self.max_tries)

    def make(self, groups_per_round: int, max_staleness: int) -> Admission:
        return ExpiringAdmission(groups_per_round, max_staleness, self.ahead, self.max_tries)


@dataclass(frozen=True)
class Ring(AdmissionPolicy):
    """Sampling never pauses; a ring buffer between sampling and training drops its oldest group when full.

    As in PipelineRL (arXiv:2509.19128), whose code counts lag in samples and drops single samples; here lag is in
    versions and whole groups are dropped. PipelineRL's other mode, a maximum lag that pauses sampling, is `Bounded`
    with `async_ratio` = lag / samples of a step.

    Args:
        num_sampling: groups sampled at any time.
        capacity: finished groups in the buffer.

    Raises:
        ValueError: a setting is out of range.
    """

    num_sampling: int
    capacity: int

    def __post_init__(self) -> None:
        check_range("data.admission", "integer >= 1", num_sampling=self.num_sampling, capacity=self.capacity)

    def make(self, groups_per_round: int, max_staleness: int) -> Admission:
        return RingAdmission(groups_per_round, max_staleness, self.num_sampling, self.capacity)


@dataclass(frozen=True)
class FromTape(AdmissionPolicy):
    """Trains on a recorded tape, in its order and without an engine; the bound is that of the recorded run.

    Args:
        folder: written by the `RolloutTape` callback.
    """

    folder: str
    in_order: ClassVar[bool] = True

    def make(self, groups_per_round: int, max_staleness: int) -> Admission:
        return Admission(groups_per_round, max_staleness)
