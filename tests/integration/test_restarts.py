"""Engines that hang or break: another one takes their place, and nothing is lost."""

import io
import threading
import time
from pathlib import Path
from typing import ClassVar

import lightning.pytorch as pl
import pytest
import torch
from failing_engines import FailingEngine, Watch, failing, said
from flow import MODEL, fit, make_data, make_module
from launch import finish, start
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console

from lit_async_rl.callbacks import RunSummary, SaveOnFailure
from lit_async_rl.engines.base import GenerationRequest, SamplingParams
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.environments.episode_engine import EpisodeEngine
from lit_async_rl.errors import ProducerError, StalledError
from lit_async_rl.models.weights import stream_weights
from lit_async_rl.rollouts.group_book import GroupState
from lit_async_rl.rollouts.intake import GroupFilter
from lit_async_rl.simulation.engine import SimulatedEngine
from lit_async_rl.simulation.latency import Constant
from lit_async_rl.tasks.calculator import Calculator

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]


def groups_in(data, state: GroupState) -> list[int]:
    return [group.index for group in data._source._producer.book.in_state(state)]


@pytest.mark.parametrize(
    ("where", "how", "in_flight"),
    [
        ("step", "hang", True),
        ("poll", "hang", False),
        ("step", "crash", False),
        ("submit", "crash", True),
        ("load_weights", "crash", True),
    ],
)
def test_an_engine_that_fails_is_restarted_and_nothing_is_lost(where, how, in_flight, caplog, monkeypatch):
    monkeypatch.setattr("lit_async_rl.engines.embedded.engine.CLOSE_TIMEOUT_S", 0.2)
    engine = failing(where, how, 1, in_flight_weight_updates=in_flight)
    data, watch = make_data(engine=engine, groups_per_step=2, max_staleness=2, rollout_timeout_s=2.0), Watch()
    module = make_module()
    fit(module, data, 8, [watch])
    assert module.version == 8
    assert len(set(watch.trained)) == len(watch.trained) == 16
    assert set(range(16)) <= set(watch.trained) | set(data._slots.deadlines)
    lines = said(caplog, "(restarts in a row: 1; limit: data.limits.engine_restarts=3)")
    assert len(lines) == 1
    assert ("StalledError" if how == "hang" else "KeyError") in lines[0]
    assert data.engine is not engine
    assert data.stats().num_tokens > 100


@pytest.mark.parametrize("num_before", [3, 7])
def test_completions_that_have_come_are_kept_when_the_engine_is_restarted(num_before):
    class Half(SimulatedEngine):
        """Hands completions out one by one; the first one breaks in the middle of the first or second group."""

        given, breaks = [], [True]

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.waiting = []

        def poll(self, timeout_s):
            if self.breaks and len(self.given) == num_before:
                time.sleep(0.2)  # a finished group is taken
                self.breaks.clear()
                raise RuntimeError("broke")
            self.waiting = self.waiting or super().poll(timeout_s)
            found, self.waiting = self.waiting[:1], self.waiting[1:]
            self.given.extend(found)
            return found

    data, seen = make_data(engine=Half(Constant(0.01), num_slots=1), max_staleness=0, reward=lambda *_: 1.0), {}

    class Keep(pl.Callback):
        def on_train_batch_start(self, trainer, *_):
            assert sorted(groups_in(data, GroupState.TAKEN)) == [0, 1, 2, 3], "what a checkpoint would hold"

        def on_train_batch_end(self, trainer, *_):
            seen.update({group.index: group for group in trainer.datamodule.last_step_groups})

    fit(make_module(), data, 1, [Keep()])
    assert not Half.breaks
    assert sorted(seen) == [0, 1, 2, 3], "those taken already train in the same step"
    assert all(len(group.rollouts) == 4 for group in seen.values())
    assert sum(c.request_id < 4 for c in Half.given) == 16, "only what was lacking is sampled again"


def test_out_of_memory_halves_the_slots(caplog):
    data = make_data(engine=failing("step", "out of memory", 2, num_slots=32), groups_per_step=2)
    fit(make_module(), data, 6)
    assert data.engine.num_slots == 8
    assert said(caplog, "data.engine.num_slots is now 16 instead of 32")


def test_an_engine_that_fails_again_and_again_ends_the_run_with_a_checkpoint_that_goes_on(tmp_path, caplog):
    engine = failing("step", "crash", 0, after=0)

    class Breaks(Watch):
        def on_train_batch_end(self, trainer, *args):
            super().on_train_batch_end(trainer, *args)
            if trainer.global_step == 2:
                engine.failures[0] = 99

    data, watch = make_data(engine=engine, groups_per_step=2, max_staleness=3), Breaks()
    keep = ModelCheckpoint(tmp_path, every_n_train_steps=1000)
    with pytest.raises(ProducerError, match="broken"):
        fit(make_module(), data, 30, [watch, keep, SaveOnFailure()], enable_checkpointing=True)
    assert said(caplog, "the engine still fails after data.limits.engine_restarts=3 restarts in a row")
    finished, path = set(groups_in(data, GroupState.FINISHED)), tmp_path / "failed.ckpt"
    saved = torch.load(path, weights_only=True)["RolloutDataModule"]["groups"]["groups"]
    assert {int(row[0]) for row in saved if row[4]} == finished
    rest = Watch()
    fit(make_module(), make_data(groups_per_step=2, max_staleness=3), 12, [rest], ckpt_path=str(path))
    everything = watch.trained + rest.trained
    assert len(set(everything)) == len(everything) == 24
    assert finished <= set(everything)


@pytest.mark.slow
def test_with_several_ranks_all_send_their_weights_to_the_new_engine():
    processes = start(Path(__file__).parents[1] / "helpers" / "distributed_faults.py", [], 2)
    first, _ = finish(processes, 100.0)
    assert [process.returncode for process in processes] == [0, 0], first[-3000:]
    assert first.count("the engine was restarted") == 2


def test_with_no_restarts_the_first_failure_ends_the_run():
    data = make_data(engine=failing("step", "crash", 1), groups_per_step=2, engine_restarts=0)
    with pytest.raises(ProducerError, match="broken"):
        fit(make_module(), data, 30)
    with pytest.raises(ValueError, match=r"data\.limits\.engine_restarts must be >= 0, got -1"):
        make_data(engine_restarts=-1)


def test_nobody_waits_for_ever_for_an_engine_that_hangs_in_a_token(monkeypatch):
    monkeypatch.setattr("lit_async_rl.engines.embedded.engine.CLOSE_TIMEOUT_S", 0.2)
    engine = failing("step", "hang", 1, update_timeout_s=0.3)
    engine.setup(MODEL)
    weights = dict(stream_weights(make_module().policy))
    engine.load_weights(0, weights.items())
    request = GenerationRequest(id=0, prompt_ids=(5, 6), num_samples=40, sampling=SamplingParams(max_tokens=30))
    engine.submit([request])
    poll = threading.Thread(target=lambda: [engine.poll(9.0) for _ in range(9)], daemon=True)
    poll.start()
    while engine.num_tokens <= 100:
        time.sleep(0.01)
    time.sleep(0.2)
    engine.submit([request])  # waits for no token: the loop would take it
    for call in (engine.partial_completions, lambda: engine.abort([0])):
        with pytest.raises(StalledError, match=r"data\.engine\.update_timeout_s=0\.3"):
            call()
    engine.load_weights(1, weights.items())  # waits for no token: the loop would take them
    engine.close()
    assert poll.is_alive()


def test_a_fresh_engine_has_the_arguments_of_the_first_also_inside_another():
    inner = EmbeddedEngine(num_slots=7, seed=3)
    outer = EpisodeEngine(inner, environment=Calculator(), max_turns=5)
    again = outer.fresh()
    assert isinstance(again, EpisodeEngine)
    assert (again.max_turns, again.environment, again.engine.seed) == (5, outer.environment, 3)
    assert again.engine is not inner
    halved = outer.fresh(out_of_memory=True)
    slots = [engine.engine.num_slots for engine in (again, halved, halved.fresh(), halved.fresh().fresh(True))]
    assert slots == [7, 3, 3, 1], "what did not fit does not come back with the next restart"


class Reluctant(EmbeddedEngine):
    """Breaks after some tokens, never returns from `close`; notes what was called on it and its successors."""

    calls: ClassVar[list[tuple[int, str, int]]] = []
    num_broken = 1
    starts = True

    def note(self, what, value=0):
        self.calls.append((id(self), what, value))

    def setup(self, model):
        self.note("setup")
        if not self.starts and len(self.calls) > 2:
            raise OSError("does not start")
        super().setup(model)

    def load_weights(self, version, weights):
        self.note("load", version)
        super().load_weights(version, weights)

    def poll(self, timeout_s):
        if self.num_tokens > 100 and self.num_broken:
            type(self).num_broken -= 1
            raise KeyError("broken")
        return super().poll(timeout_s)

    def close(self):
        self.note("close")
        if self.num_tokens > 0 and sum(what == "close" for _, what, _ in self.calls) == 1:
            time.sleep(1e6)
        super().close()


def test_the_old_engine_is_closed_without_waiting_for_it_and_the_new_one_has_the_same_weights(monkeypatch):
    monkeypatch.setattr("lit_async_rl.data.engine_restarts.CLOSE_S", 0.2)
    kind = type("Reluctant", (Reluctant,), {"calls": []})
    data = make_data(engine=(old := kind()), groups_per_step=2, max_staleness=2)
    fit(make_module(), data, 8)
    new = data.engine
    of_old = [what for number, what, _ in kind.calls if number == id(old)]
    assert of_old[-1] == "close"
    versions = [version for _, what, version in kind.calls if what == "load"]
    before = of_old.count("load")
    of_new = versions[before:]
    assert versions[:before] == [*range(before)]
    assert of_new[0] >= before - 1, "what the policy had come to, while the old one was closed"
    assert of_new == [*range(of_new[0], 9)]
    assert data.stats().num_tokens > new.num_tokens, "those of the old engine count"


def test_an_engine_that_does_not_start_counts_as_a_restart(caplog):
    kind = type("Reluctant", (Reluctant,), {"calls": [], "starts": False, "close": EmbeddedEngine.close})
    with pytest.raises(ProducerError, match="does not start"):
        fit(make_module(), make_data(engine=kind(), groups_per_step=2, engine_restarts=2), 30)
    assert len(said(caplog, "and the new engine did not start: ")) == 2


def test_restarts_with_steps_between_them_do_not_add_up(caplog):
    data = make_data(engine=failing("step", "crash", 3), groups_per_step=1, group_size=2, engine_restarts=1)
    fit(make_module(), data, 20)
    assert len(said(caplog, "(restarts in a row: 1; limit: data.limits.engine_restarts=1)")) == 3


def test_the_summary_of_a_run_counts_its_restarts():
    data = make_data(engine=failing("step", "crash", 3), groups_per_step=1, group_size=2, engine_restarts=1)
    summary = RunSummary()
    trainer = fit(make_module(), data, 20, [summary])
    shown = Console(width=200, file=io.StringIO())
    shown.print(summary.table(trainer))
    assert "engine restarts" in shown.file.getvalue()
    assert f"3; last: {data.engine_restarts.partition('last: ')[2]}" in shown.file.getvalue()


def test_a_run_that_an_engine_stalls_leaves_a_checkpoint_and_one_with_a_mistake_in_a_step_does_not(tmp_path):
    class Mistake(pl.Callback):
        def on_before_backward(self, *_):
            raise KeyError("mine")

    settings = dict(groups_per_step=2, rollout_timeout_s=5.0, engine_restarts=0)  # a busy machine is slow, and no more
    hanging = failing("poll", "hang", 1, after=300)  # when some rollouts are finished: without any nothing is saved
    for engine, callbacks, error in ((EmbeddedEngine(), [Mistake()], KeyError), (hanging, [], StalledError)):
        assert not (tmp_path / "failed.ckpt").exists()
        callbacks += [ModelCheckpoint(tmp_path, every_n_train_steps=1000), SaveOnFailure()]
        with pytest.raises(error):
            fit(make_module(), make_data(engine=engine, **settings), 30, callbacks, enable_checkpointing=True)
    assert (tmp_path / "failed.ckpt").exists()


class Proved(FailingEngine):
    """Asks for log-probabilities of some versions, and is replaced once."""

    uses_probe = True
    where = "poll"
    asks_for: ClassVar[set[int]] = set()

    def __init__(self, **settings):
        super().__init__(**settings)
        self.loaded = []  # versions, each with that of the log-probabilities at hand
        self.taken = []

    def load_weights(self, version, weights):
        self.loaded.append((version, self.probe.version, len(self.probe.logprobs)))
        super().load_weights(version, weights)

    @property
    def needs_probe(self):
        newest = self.loaded[-1][0] if self.loaded else -1
        return newest in self.asks_for and newest not in [probe.version for probe in self.taken]

    def take_probe(self, probe):
        self.taken.append(probe)


def test_each_engine_gets_the_log_probabilities_of_its_first_weights_and_those_that_it_asks_for(monkeypatch):
    monkeypatch.setattr(Proved, "failures", [1])
    monkeypatch.setattr(Proved, "asks_for", {0, 3, 4})
    engine = Proved(update_timeout_s=20.0)
    data = make_data(engine=engine, max_staleness=1)
    fit(make_module(), data, 6)
    assert data.engine is not engine, "it was restarted"
    for one in (engine, data.engine):
        version, of_probe, length = one.loaded[0]
        assert (version, length) == (of_probe, 47)
    taken = engine.taken + data.engine.taken
    assert {probe.version for probe in taken} == {0, 3, 4}
    assert len({probe.logprobs[0] for probe in taken if probe.version}) == 2, "each is of its version's weights"


def test_where_several_steps_share_a_version_each_comes_with_its_log_probabilities():
    """They cannot be computed later: the trainer's weights are newer than the engine's by then."""
    engine = Proved(update_timeout_s=20.0)
    fit(make_module(), make_data(engine=engine, max_staleness=1, weight_sync_steps=2), 4)
    assert [(version, of_probe) for version, of_probe, _ in engine.loaded] == [(0, 0), (1, 1), (2, 2)]


class RaisesOnce(GroupFilter):
    """Raises for the ninth group; what it has seen is in a file, because a filter with other values is another one."""

    def __init__(self, path):
        self.path = path

    def __call__(self, group):
        with open(self.path, "a") as file:
            print(group.index, file=file)
        if len(self.seen()) == 9:
            raise OSError("a disk was away")
        return group

    def seen(self):
        return Path(self.path).read_text().split()


def test_a_group_whose_filter_raised_is_filtered_after_a_resume(tmp_path):
    found = RaisesOnce(str(tmp_path / "seen.txt"))
    callbacks = [ModelCheckpoint(tmp_path, every_n_train_steps=1000), SaveOnFailure()]
    with pytest.raises(ProducerError, match="a disk was away"):
        fit(make_module(), make_data(filters=[found]), 30, callbacks, enable_checkpointing=True)
    before = found.seen()
    fit(make_module(), make_data(filters=[found]), 5, ckpt_path=str(tmp_path / "failed.ckpt"))
    after = found.seen()[9:]
    assert before[8] in after
    assert not set(before[:8]) & set(after), "finished groups are kept as they were filtered"
