"""A machine that attacks the trainer: random moves of all that can happen, and promises that are checked after each.

Moves: a token is sampled, a completion scored, the trainer goes on to its next hook, a checkpoint is saved there, the
run is killed and resumed from any file, the bound changes, engine or reward fail, the run is asked to stop. One seed
decides all of it. `benchmarks.state_machine.trainer` says what is real.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

from benchmarks.state_machine.parts import (
    NumberedPrompts,
    mix,
    sample_length,
    sample_token,
)
from benchmarks.state_machine.trainer import (
    VirtualData,
    VirtualPolicy,
    VirtualSettings,
    VirtualTrainer,
    gradient_of,
    rows_of,
)
from lit_async_rl.errors import ProducerError, StalledError
from lit_async_rl.prompts.stream import PromptStream
from lit_async_rl.types import RolloutBatch

KINDS = ("fixed_lag", "fixed_lag", "free", "free", "ratio", "redundant", "ring", "drop", "retry")


class Violation(Exception):
    """A promise was broken."""


class _Killed(BaseException):
    """The run is gone."""


def random_settings(rng: random.Random) -> VirtualSettings:
    """Any that go together."""
    kind, groups = rng.choice(KINDS), rng.randint(1, 3)
    streams = rng.random() < 0.3
    return VirtualSettings(
        kind=kind,
        max_staleness=rng.randint(0, 3),
        groups_per_step=groups,
        group_size=rng.randint(1, 3),
        micro_batches=rng.randint(1, groups if streams else 4),
        sync_steps=rng.choice((1, 1, 2, 3)),
        streams=streams,
        in_flight=kind != "fixed_lag" and rng.random() < 0.5,
        replicates=rng.random() < 0.3,
        max_steps=rng.randint(4, 14),
        skips=rng.random() < 0.3,
        reward_tries=rng.choice((2, 3, 4)),
    )


class PlainLoop:
    """`fixed_lag` without any of the machinery: what step n must make of the weights."""

    def __init__(self, settings: VirtualSettings) -> None:
        self.settings = settings
        self.weights = [1]  # before each step
        self._stream = PromptStream(NumberedPrompts(11), seed=3)

    def after(self, num_steps: int) -> int:
        """The weights."""
        while len(self.weights) <= num_steps:
            self._train(len(self.weights) - 1)
        return self.weights[num_steps]

    def _train(self, step: int) -> None:
        size, per_round = self.settings.groups_per_step, self.settings.groups_per_step * self.settings.sync_steps
        gradient = 0
        for group in range(step * size, (step + 1) * size):
            sampled_in = max(0, group // per_round - self.settings.max_staleness)
            weights, prompt = self.weights[sampled_in * self.settings.sync_steps], self._stream.number_at(group)
            for n in range(self.settings.group_size):
                draw = group * self.settings.group_size + n
                tokens = tuple(sample_token(weights, prompt, draw, k) for k in range(sample_length(draw)))
                gradient += gradient_of(group, tokens)
        before = self.weights[step]
        self.weights.append(before if self.settings.skips_step(step) else mix(before, gradient))


class StateMachine:
    """One run after another under the same settings, as kills and resumes have it.

    Args:
        settings: of the run.
        seed: decides what happens while the trainer waits.

    Attributes:
        num_transitions: moves so far.
        hook: where the trainer is.
        is_over: the run has reached its last step.
    """

    def __init__(self, settings: VirtualSettings, seed: int = 0) -> None:
        self.settings, self.rng = settings, random.Random(seed)
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
        self.hook, self.is_over, self._step_seen = "", False, 0 if checkpoint is None else checkpoint["global_step"]
        self._run: Iterator[str] = self.trainer.fit(checkpoint)
        self.advance()

    def _note(self) -> dict[str, Any]:
        done = {group: step for group, step in self.trained.items() if step < self.trainer.global_step}
        return {"trained": done, "bounds": dict(self.bounds), "given_up": list(self.given_up)}

    # -- moves --------------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """The trainer goes on to its next hook; while it waits there the background makes its moves."""
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
        """One move of the background side while the trainer waits; False if there is none left."""
        if self._can_die and self.rng.random() < 0.01:
            if self.rng.random() < 0.5:
                raise _Killed
            self.trainer.received_sigterm = True
            return True
        return self.move_background(self.rng.randrange(2**30))

    def move_background(self, chosen: int, may_fail: bool = True) -> bool:
        """A token is sampled, completions are collected, or one is scored; False if there is nothing to do."""
        producer = self.producer
        if producer is None:
            return False
        engine, scorer = producer.engine, self.trainer.datamodule.scorer
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
        move, chosen = moves[chosen % len(moves)], chosen // len(moves)
        if move == "sample":
            engine.step(chosen)
        elif move == "collect":
            producer.listener.turn()
        else:
            number, chosen = chosen % len(scorer.jobs), chosen // len(scorer.jobs)
            can_fail = not self.settings.is_exact or scorer.jobs[number].num_tries == 0
            scorer.step(number, may_fail and can_fail and chosen % 13 == 0)
        self.check()
        return True

    def save(self) -> None:
        """A checkpoint, wherever the trainer is."""
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
        """Through what stands in for `trainer.save_checkpoint`, if anything does."""
        saves = vars(self.trainer).get("save_checkpoint", self.trainer.save_checkpoint)
        saves(path)

    def resume(self, chosen: int = -1) -> None:
        """The run is killed, and another begins from a file; from the start if there is none."""
        self.num_transitions += 1
        files = list(self.files.values())
        self._begin(files[chosen % len(files)] if files else None)

    def change_bound(self, bound: int) -> None:
        """As a callback does at the end of a step."""
        if self.producer is None or self.settings.kind in ("fixed_lag", "ratio") or self.hook != "on_train_batch_end":
            return
        self.num_transitions += 1
        self.trainer.datamodule.set_max_staleness(min(bound, self.settings.max_staleness))
        self.check()

    def break_engine(self) -> None:
        """From its next call on the engine fails, until it is replaced."""
        if self.producer is not None and not self.settings.is_exact:
            self.num_transitions += 1
            self.producer.engine.fault = RuntimeError("the engine is broken")

    def stop(self) -> None:
        """SIGTERM: the run ends as soon as the trainer waits."""
        self.num_transitions += 1
        self.trainer.received_sigterm = True

    # -- promises -----------------------------------------------------------------------------------------------------

    @property
    def producer(self) -> Any:
        """The background side, once it has started."""
        return self.trainer.datamodule._source._producer

    def _saw(self, batch: RolloutBatch, version: int) -> None:
        """What reaches `training_step`."""
        for group, _, versions in rows_of(batch):
            if group in self.trained:
                raise Violation(f"group {group} is trained on again, after step {self.trained[group]}")
            bound = self.bounds[group]
            if any(not 0 <= version - v <= bound for v in versions):
                raise Violation(f"tokens of versions {versions} reached version {version}, the bound was {bound}")
            self.rows[group] += 1

    def check(self) -> None:
        """All that must hold after every move."""
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
        step, settings = self._step_seen, self.settings
        self._step_seen, self.num_steps = self.trainer.global_step, self.num_steps + 1
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
        known = len(self.trained.keys() | deadlines.keys() | self.producer.book.in_step.keys())
        if known + len(self.given_up) < next_index:
            raise Violation(f"{next_index - known} of {next_index} groups are neither trained on nor under way")


class Driver:
    """Chooses moves at random, and begins a new machine when a run is over.

    Args:
        seed: of everything.
        most_transitions: of one machine.
    """

    def __init__(self, seed: int, most_transitions: int = 600) -> None:
        self.rng, self.most_transitions = random.Random(seed), most_transitions
        self.num_transitions = self.num_steps = self.num_machines = 0

    def run(self, num_transitions: int) -> None:
        """At least so many moves.

        Raises:
            Violation: see `run_one`.
        """
        while self.num_transitions < num_transitions:
            seed = self.rng.randrange(2**60)
            machine = run_one(seed, self.most_transitions)
            self.num_transitions += machine.num_transitions
            self.num_steps += machine.num_steps
            self.num_machines += 1


def run_one(seed: int, most_transitions: int) -> StateMachine:
    """One machine from its seed.

    Raises:
        Violation: a promise was broken, or anything else went wrong; says under which settings.
    """
    rng = random.Random(seed)
    settings = random_settings(rng)
    try:
        machine = StateMachine(settings, rng.randrange(2**30))
        machine._can_die = True
        while machine.num_transitions < most_transitions:
            _move(machine, rng)
            if machine.is_over and (machine.trainer.global_step >= settings.max_steps or not machine.files):
                break
    except Exception as error:
        raise Violation(f"{type(error).__name__}: {error}; seed {seed}, {settings}") from error
    return machine


def _move(machine: StateMachine, rng: random.Random) -> None:
    dice = rng.random()
    if machine.is_over or dice < 0.012:
        machine.resume(rng.randrange(8))
    elif dice < 0.6:
        machine.advance()
    elif dice < 0.94:
        machine.move_background(rng.randrange(2**30))
    elif dice < 0.975:
        machine.save()
    elif dice < 0.99:
        machine.change_bound(rng.randint(0, 4))
    elif dice < 0.995:
        machine.stop()
    else:
        machine.break_engine()
