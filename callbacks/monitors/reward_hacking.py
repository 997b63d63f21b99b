"""Names signs of reward hacking while a run goes on."""

from __future__ import annotations

import logging
import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np

from lit_async_rl.callbacks.monitors.step_monitor import mean_parts
from lit_async_rl.callbacks.parts import rollout_data
from lit_async_rl.data.module import RolloutDataModule
from lit_async_rl.problem import Prompt
from lit_async_rl.rewards.calls import check_reward
from lit_async_rl.rewards.combined import name_answers
from lit_async_rl.rewards.forms import as_reward_function
from lit_async_rl.rewards.hacking import HackingWatch, Seen, repetition
from lit_async_rl.rewards.references import references_of
from lit_async_rl.rewards.scorer import Scorer
from lit_async_rl.rewards.success import Success
from lit_async_rl.runtime.retries import TryPolicy
from lit_async_rl.types import Rollout, RolloutGroup
from lit_async_rl.utils.checks import check_range
from lit_async_rl.utils.lightning_types import AnyModule, AnyTrainer

MAX_COMPLETIONS = 64  # of a step, whose repetition is counted
MAX_WAITING = 256  # completions for the second grader; a slower one gets fewer
CHECK_POLICY = TryPolicy(owner="RewardHackingMonitor.check", timeout_name="", timeout_s=60.0, tries=1, ends_run=False)
log = logging.getLogger(__name__)


class RewardHackingMonitor(pl.Callback):
    """Warns of signs that the policy earns rewards in a way that was not meant, and logs their numbers.

    Longer completions that are not more accurate; repetition; special tokens within completions; a part of the reward
    that is full while the answer's part falls; groups whose rewards have become equal although they are not right; and
    a second grader that calls right completions wrong. See `HackingWatch` for the thresholds. It logs a warning when a
    sign begins, and shows it in the progress line, verdict and summary while it holds. It does not change training.

    Logs `hacking/{length_growth,repetition,special_tokens,group_std,disagreement,num_signs}`.

    Example:
        ```yaml
        defaults:
          reward_hacking: {init_args: {check: lit_async_rl.exact_match, num_checked: 4}}
        ```

    Attributes:
        signs: signs that hold, with the words for them.
        begun: signs that ever held, with the step in which they last began.

    Args:
        check: second grader, such as a stricter one or a judge: `check(prompt, completion) -> float`, called in its own
            thread on completions that the reward calls right. Failed calls (60 s each) are left out; if none can
            succeed, it is no longer called.
        num_checked: completions of a step that it is called on.
        check_success: reward from which it calls a completion right; None is a grader's full marks, else 0.5.
        length_growth: see `HackingWatch`; likewise the other thresholds, `window` and `patience`. None disables a sign.

    Raises:
        ValueError: a setting is out of range, or `check` cannot be called.
    """

    def __init__(
        self,
        check: Callable[[Prompt, str], Any] | None = None,
        num_checked: int = 4,
        check_success: float | None = None,
        length_growth: float | None = 1.5,
        repetition: float | None = 0.5,
        special_tokens: float | None = 0.2,
        answer_drop: float | None = 0.1,
        group_std: float | None = 0.1,
        disagreement: float | None = 0.2,
        window: int = 20,
        patience: int = 3,
    ) -> None:
        check_range("RewardHackingMonitor", "integer >= 1", num_checked=num_checked)
        check_range("RewardHackingMonitor", "finite", check_success=check_success)
        if check is not None:
            try:
                check_reward(check)
            except ValueError as error:
                raise ValueError(str(error).replace("data.reward", "RewardHackingMonitor.check", 1)) from None
        self.check = check
        self.num_checked = num_checked
        self.watch = HackingWatch(
            length_growth=length_growth,
            repetition=repetition,
            special_tokens=special_tokens,
            answer_drop=answer_drop,
            group_std=group_std,
            disagreement=disagreement,
            window=window,
            patience=patience,
        )
        self.begun: dict[str, int] = {}
        self._success = Success.by(check_success, check)
        self._scorer: Scorer | None = None
        self._verdicts: deque[bool | None] = deque()  # of the second grader, from its threads; None if a call failed
        self._num_waiting = 0  # of the trainer's thread
        self._step = -1

    @property
    def signs(self) -> dict[str, str]:
        return self.watch.found

    def on_train_start(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        data = rollout_data(trainer, "RewardHackingMonitor")
        self._step = trainer.global_step
        if not trainer.ckpt_path:
            self.watch.reset()
            self.begun = {}
        self._verdicts.clear()
        self._num_waiting = 0
        if self.check is not None and trainer.is_global_zero:
            check = as_reward_function(self.check)
            name_answers(check, getattr(data.prompts, "answer_field", None))
            self._scorer = Scorer(check, records_spans=False, policy=CHECK_POLICY)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        data = rollout_data(trainer, "RewardHackingMonitor")
        groups = data.last_step_groups
        if not groups:  # a rank without the producer
            return
        self._compare(data, groups)
        seen = observed(groups, data)
        for name in self.watch.observe(seen):
            self.begun[name] = self._step
            log.warning("a sign of reward hacking at step %d: %s", self._step, self.signs[name])
        numbers = {
            "length_growth": self.watch.growth(),
            "repetition": seen.repetition,
            "special_tokens": seen.special_tokens,
            "group_std": seen.group_std,
            "disagreement": self.watch.disagreement,
            "num_signs": float(len(self.signs)),
        }
        for name, value in numbers.items():
            if value is not None:
                pl_module.log(f"hacking/{name}", value)

    def _compare(self, data: RolloutDataModule, groups: Sequence[RolloutGroup]) -> None:
        """Collects verdicts of the second grader, and submits more completions."""
        if self._scorer is None:
            return
        try:
            self._scorer.check()
        except Exception as error:  # such as a judge whose key is refused
            log.warning("RewardHackingMonitor.check failed and will not be called again in this run: %s", error)
            self._close()
            return
        while self._verdicts:
            self._num_waiting -= 1
            if (verdict := self._verdicts.popleft()) is not None:
                self.watch.compare(verdict)
        success = data.held_out.success
        right = [(group.prompt, one) for group in groups for one in group.rollouts if success.is_reached(one.score)]
        chosen = random.Random(self._step).sample(right, min(self.num_checked, len(right)))
        for prompt, rollout in chosen[: max(0, MAX_WAITING - self._num_waiting)]:
            self._num_waiting += 1
            self._scorer.submit(prompt, rollout.text, done=self._file, give_up=self._fail, token_ids=rollout.token_ids)

    def _file(self, reward: float) -> None:
        self._verdicts.append(self._success.is_reached(reward))

    def _fail(self) -> None:
        self._verdicts.append(None)

    def on_train_end(self, trainer: AnyTrainer, pl_module: AnyModule) -> None:
        self._close()

    def on_exception(self, trainer: AnyTrainer, pl_module: AnyModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self._scorer is not None:
            self._scorer.close()
            self._scorer = None

    def state_dict(self) -> dict[str, Any]:
        return {"watch": self.watch.state_dict(), "begun": dict(self.begun)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.watch.load_state_dict(state_dict["watch"])
        self.begun = dict(state_dict["begun"])


def observed(groups: Sequence[RolloutGroup], data: RolloutDataModule) -> Seen:
    """Means over the groups of a step, for `HackingWatch`."""
    is_grader = references_of(data.reward) is not None or data.held_out.success.part is not None
    special = frozenset(data.codec.tokenizer.all_special_ids)
    return means_of(groups, data.held_out.success, is_grader, special=special)


def means_of(groups: Sequence[RolloutGroup], success: Success, is_grader: bool, special: frozenset[int]) -> Seen:
    """Means over groups.

    Args:
        groups: of a step.
        success: tells right completions from others.
        is_grader: whether the reward compares with references, so that `success` means something.
        special: token ids.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    part = success.part
    shares = [share for one in rollouts[:MAX_COMPLETIONS] if (share := repetition(_own_ids(one))) is not None]
    rewards = _within([group.rollouts for group in groups], "reward")
    means = mean_parts(rollouts)
    answer = means.pop(part, None) if part is not None else None
    return Seen(
        length=statistics.fmean(one.num_policy_tokens for one in rollouts),
        reward=statistics.fmean(one.reward for one in rollouts),
        accuracy=success.number(one.score for one in rollouts) / len(rollouts) if is_grader else None,
        length_pay=length_pay(groups),
        repetition=statistics.fmean(shares) if shares else None,
        special_tokens=statistics.fmean(float(_has_special(one, special)) for one in rollouts),
        group_std=statistics.fmean(math.sqrt(float(row @ row) / len(row)) for row in rewards),
        answer=answer,
        parts=means if answer is not None else {},
    )


def length_pay(groups: Sequence[RolloutGroup]) -> float | None:
    """Correlation of reward and length among rollouts of a group with as many replies; None if one does not vary.

    An agent that has learned to call its tool is paid for one more reply, and not for longer ones.
    """
    alike = [same for group in groups for same in _by_replies(group.rollouts)]
    return _correlation(_within(alike, "reward"), _within(alike, "num_policy_tokens"))


def _by_replies(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Rollouts with the same number of replies together."""
    found: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        found.setdefault(sum(_num_replies(row.loss_mask) for row in rollout.rows), []).append(rollout)
    return list(found.values())


def _num_replies(loss_mask: Sequence[bool] | None) -> int:
    """Stretches of tokens that the policy wrote."""
    if loss_mask is None:
        return 1
    own = np.asarray(loss_mask, dtype=np.int8)
    return int(own[:1].sum() + (np.diff(own) == 1).sum())


def _within(alike: Sequence[Sequence[Rollout]], name: str) -> list[Any]:
    """A number of each rollout less the mean of those that it is compared with."""
    values = [np.array([getattr(one, name) for one in rollouts], dtype=np.float64) for rollouts in alike]
    return [row - row.sum() / len(row) for row in values]


def _correlation(one: Sequence[Any], other: Sequence[Any]) -> float | None:
    first = np.concatenate(one)
    second = np.concatenate(other)
    norm = float(np.sqrt((first @ first) * (second @ second)))
    return float(first @ second) / norm if norm > 0 and math.isfinite(norm) else None


def _own_ids(rollout: Rollout) -> Sequence[int]:
    """Tokens that the policy wrote."""
    if rollout.loss_mask is None or not any(rollout.loss_mask):
        return rollout.token_ids
    return [token for token, is_own in zip(rollout.token_ids, rollout.loss_mask, strict=True) if is_own]


def _has_special(rollout: Rollout, special: frozenset[int]) -> bool:
    """Whether a special token stands before the last one of a turn."""
    ids = _own_ids(rollout)
    if rollout.turns is None:
        return not special.isdisjoint(ids[:-1])
    ends = len(rollout.turns)
    return sum(token in special for token in ids) > (ends if ids and ids[-1] in special else ends - 1)
