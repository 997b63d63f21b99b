"""State machine of the trainer: transitions, and the invariants checked after each of them.

Transitions: a token is sampled, a completion is scored, the trainer advances to its next hook, a checkpoint is saved
there, the run is killed and resumed from any file, the bound changes, engine or reward fail, the run receives SIGTERM.
A seed determines all of them. `tests.reliability.state_machine.modules` lists the real parts.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

from lit_async_rl.errors import ProducerError, StalledError
from lit_async_rl.prompts.stream import PromptStream
from lit_async_rl.rollouts.group_book import GroupState
from lit_async_rl.types import RolloutBatch
from tests.reliability.state_machine.modules import (
    NumberedPrompts,
    VirtualData,
    VirtualPolicy,
    VirtualSettings,
    gradient_of,
    mix,
    rows_of,
    sample_length,
    sample_token,
)
from tests.reliability.state_machine.trainer import VirtualTrainer

# -- Reference implementation of `FixedLag`: a plain loop without threads, checkpoints or engine ----------------------


class PlainLoop:
    """Weights of `FixedLag` after each step."""

    def __init__(self, settings: VirtualSettings) -> None:
        self.settings = settings
        self.weights = [1]  # before each step
        self._stream = PromptStream(NumberedPrompts(11), seed=3)

    def after(self, num_steps: int) -> int:
        """Weights after `num_steps` steps."""
        while len(self.weights) <= num_steps:
            self._train(len(self.weights) - 1)
        return self.weights[num_steps]

    def _train(self, step: int) -> None:
        size = self.settings.groups_per_step
        per_round = self.settings.groups_per_step * self.settings.sync_steps
        gradient = 0
        for group in range(step * size, (step + 1) * size):
            sampled_in = max(0, group // per_round - self.settings.max_staleness)
            weights = self.weights[sampled_in * self.settings.sync_steps]
            prompt = self._stream.number_at(group)
            for n in range(self.settings.group_size):
                draw = group * self.settings.group_size + n
                tokens = tuple(sample_token(weights, prompt, draw, k) for k in range(sample_length(draw)))
                gradient += gradient_of(group, tokens)
        before = self.weights[step]
        self.weights.append(before if self.settings.skips_step(step) else mix(before, gradient))


class Violation(Exception):
    """An invariant was violated."""


class _Killed(BaseException):
    """The run was killed."""


class StateMachine:
    """Successive runs under the same settings, with kills and resumes in between.

    Args:
        settings: of the runs.
        seed: of the transitions while the trainer waits.

    Attributes:
        num_transitions: transitions so far.
        hook: current hook of the trainer.
        is_over: the run has reached its last step.
    """

    def __init__(self, settings: VirtualSettings, seed: int = 0) -> None:
        self.settings = settings
        self.rng = random.Random(seed)
        self.plain = PlainLoop(settings)
        self.files: dict[str, Any] = {}
        self.num_transitions = self.num_steps = self._num_saves = 0
        self._can_die = False
        self._begin(None)

    def _begin(self, checkpoint: dict[str, Any] | None) -> None:
        note = {"trained": {}, "bounds": {}, "given_up": []} if checkpoint is None else checkpoint["note"]
        self.trained: dict[int, int] = dict(note["trained"])  # group -> step
        self.bounds: dict[int, int] = dict(note["bounds"])  # of each group ever admitted
        self.rows: Counter[int] = Counter()  # of the step that is being trained, by group
        data = VirtualData(self.settings, self.background)
        self.given_up = data.scorer.given_up = list(note["given_up"])  # their rewards failed too often
        self.trainer = VirtualTrainer(
            self.settings, data, VirtualPolicy(self._saw), self._note, self.settings.max_steps, self.files
        )
        self.hook = ""
        self.is_over = False
        self._step_seen = 0 if checkpoint is None else checkpoint["global_step"]
        self._run: Iterator[str] = self.trainer.fit(checkpoint)
        self.advance()

    def _note(self) -> dict[str, Any]:
        done = {group: step for group, step in self.trained.items() if step < self.trainer.global_step}
        return {"trained": done, "bounds": dict(self.bounds), "given_up": list(self.given_up)}

    # -- moves --------------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Advances the trainer to its next hook; background transitions happen while it waits."""
        self.num_transitions += 1
        try:
            self.hook = next(self._run)
        except StopIteration:
            self.is_over = True
        except _Killed:
            self.resume()
        except (ProducerError, StalledError):  # the engine failed too often, or a reward did
            self.trainer.save_checkpoint("failed")  # as `SaveOnFailure` does
            self._begin(self.files["failed"])
        self.check()

    def background(self) -> bool:
        """One background transition while the trainer waits; False if there is none left."""
        if self._can_die and self.rng.random() < 0.01:
            if self.rng.random() < 0.5:
                raise _Killed
            self.trainer.received_sigterm = True
            return True
        return self.move_background(self.rng.randrange(2**30))

    def move_background(self, chosen: int, may_fail: bool = True) -> bool:
        """Samples a token, collects completions, or scores one; False if there is nothing to do."""
        producer = self.producer
        if producer is None:
            return False
        engine = producer.engine
        scorer = self.trainer.datamodule.scorer
        moves = []
        if engine.running and engine.fault is None:
            moves.append("sample")
        if engine.outbox or (engine.fault is not None and producer.listener.engine_error is None):
            moves.append("collect")
        if scorer.jobs:
            moves.append("score")
        if scorer._error is not None:
            moves = ["collect"]
        if not moves or producer.listener.error is not None:
            return False
        self.num_transitions += 1
        move = moves[chosen % len(moves)]
        chosen = chosen // len(moves)
        if move == "sample":
            engine.step(chosen)
        elif move == "collect":
            producer.listener.turn()
        else:
            number = chosen % len(scorer.jobs)
            chosen = chosen // len(scorer.jobs)
            can_fail = not self.settings.is_exact or scorer.jobs[number].num_tries == 0
            scorer.step(number, may_fail and can_fail and chosen % 13 == 0)
        self.check()
        return True

    def save(self) -> None:
        """Saves a checkpoint at the current hook."""
        self.num_transitions += 1
        self._num_saves += 1
        self._can_die, before = False, self._can_die
        try:
            self.trainer_save(f"file {self._num_saves}")
        finally:
            self._can_die = before
        for old in list(self.files)[:-3]:
            del self.files[old]
        self.check()

    def trainer_save(self, path: str) -> None:
        """Calls `trainer.save_checkpoint`, or its replacement."""
        saves = vars(self.trainer).get("save_checkpoint", self.trainer.save_checkpoint)
        saves(path)

    def resume(self, chosen: int = -1) -> None:
        """Kills the run and starts another from a file; from the beginning if there is none."""
        self.num_transitions += 1
        files = list(self.files.values())
        self._begin(files[chosen % len(files)] if files else None)

    def change_bound(self, bound: int) -> None:
        """Changes the staleness bound, as a callback does at the end of a step."""
        if self.producer is None or self.settings.kind in ("fixed_lag", "ratio") or self.hook != "on_train_batch_end":
            return
        self.num_transitions += 1
        self.trainer.datamodule.set_max_staleness(min(bound, self.settings.max_staleness))
        self.check()

    def break_engine(self) -> None:
        """Makes the engine fail from its next call on, until it is replaced."""
        if self.producer is not None and not self.settings.is_exact:
            self.num_transitions += 1
            self.producer.engine.fault = RuntimeError("the engine is broken")

    def stop(self) -> None:
        """Sends SIGTERM: the run ends as soon as the trainer waits."""
        self.num_transitions += 1
        self.trainer.received_sigterm = True

    # -- promises -----------------------------------------------------------------------------------------------------

    @property
    def producer(self) -> Any:
        """The producer, once it has started."""
        return self.trainer.datamodule._source._producer

    def _saw(self, batch: RolloutBatch, version: int) -> None:
        """Checks the rows that reach `training_step`."""
        for group, _, versions in rows_of(batch):
            if group in self.trained:
                raise Violation(f"group {group} is trained on again, after step {self.trained[group]}")
            bound = self.bounds[group]
            if any(not 0 <= version - v <= bound for v in versions):
                raise Violation(f"tokens of versions {versions} reached version {version}, the bound was {bound}")
            self.rows[group] += 1

    def check(self) -> None:
        """Checks all invariants."""
        if self.producer is None:
            return
        admission = self.trainer.datamodule._slots
        reach = admission.max_staleness
        if self.settings.kind == "ratio":
            reach = -(-reach // 2)
        for index in range(len(self.bounds), admission.next_index):
            self.bounds[index] = reach
        if self.trainer.global_step > self._step_seen:
            self._check_step()
        if self.settings.is_lossless:
            self._check_none_is_lost(admission.deadlines, admission.next_index)

    def _check_step(self) -> None:
        step = self._step_seen
        settings = self.settings
        self._step_seen = self.trainer.global_step
        self.num_steps = self.num_steps + 1
        if self._step_seen != step + 1:
            raise Violation(f"{self._step_seen - step} steps at once")
        expected = dict.fromkeys(self.rows, settings.group_size)
        if len(self.rows) != settings.groups_per_step or self.rows != expected:
            raise Violation(f"step {step} was made of {dict(self.rows)}: groups, and how many rollouts of each")
        self.trained.update(dict.fromkeys(self.rows, step))
        self.rows = Counter()
        if settings.is_exact and self.trainer.module.weights != self.plain.after(step + 1):
            raise Violation(f"fixed_lag is not the plain loop after step {step}")

    def _check_none_is_lost(self, deadlines: dict[int, int], next_index: int) -> None:
        taken = {group.index for group in self.producer.book.in_state(GroupState.TAKEN)}
        known = len(self.trained.keys() | deadlines.keys() | taken)
        if known + len(self.given_up) < next_index:
            raise Violation(f"{next_index - known} of {next_index} groups are neither trained on nor under way")
