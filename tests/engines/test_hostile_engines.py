"""Whatever an engine returns, and wherever it hangs: nothing wrong is trained on, and nobody waits for ever."""

import gc
import os
import re
import threading
import time

import lightning.pytorch as pl
import pytest
from failing_engines import said
from flow import fit, make_data, make_module
from hostile_engines import COMPLETIONS, REWARDS, hostile, wait_until
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_async_rl.callbacks import ThroughputMonitor
from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.errors import EngineError, ProducerError, StalledError
from lit_async_rl.runtime.guarded_calls import feed
from lit_async_rl.runtime.waiting import Wait
from lit_async_rl.types import Rollout

pytestmark = pytest.mark.timeout(120)
FAMILY = {**COMPLETIONS, **REWARDS}


class Invariants(pl.Callback):
    """What was trained on is what the engine sampled, once, within the bound, with the reward of its own text."""

    def __init__(self, reward):
        self.trained, self.reward = [], reward

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        data = trainer.datamodule
        for group in data.last_step_groups:
            self.trained.append(group.index)
            for rollout in group.rollouts:
                self.check(rollout, group, pl_module.stabilizer_signals["version"], data)

    def check(self, rollout: Rollout, group, version, data):
        assert set(rollout.token_ids) == {group.prompt_ids[-1]}
        assert set(rollout.logprobs) == {-1.0}
        assert version - data.max_staleness <= min(rollout.versions) <= max(rollout.versions) <= version
        assert len(rollout.token_ids) == 5
        assert rollout.text == data.codec.decode(rollout.token_ids)
        assert rollout.reward == (1.0 if self.reward is None else self.reward(group.prompt, rollout.text))


@pytest.fixture(autouse=True)
def _few_objects():
    """Each restart collects garbage, which takes long after everything is imported."""
    gc.freeze()
    yield
    gc.unfreeze()


def text_reward(prompt, completion):
    return float(sum(map(ord, completion)) % 7)


def attack(engine, steps=4, callbacks=(), enable_checkpointing=False, **changes):
    """A run with this engine; the callback that watched it, and the data module."""
    reward = None if engine.scores else text_reward
    settings = dict(groups_per_step=2, group_size=2, max_staleness=1, sampling=SamplingParams(max_tokens=5))
    data, watch = make_data(engine=engine, reward=reward, **(settings | changes)), Invariants(reward)
    module = make_module()
    try:
        fit(module, data, steps, [watch, *callbacks], enable_checkpointing=enable_checkpointing)
    finally:
        engine.released.set()
    assert module.version == steps
    assert len(set(watch.trained)) == len(watch.trained) == 2 * steps
    return watch, data


RUNS = {
    **{f"completions {n}": list(COMPLETIONS)[n::5] for n in range(5)},
    "rewards": list(REWARDS),
}


@pytest.mark.parametrize("run", RUNS)
def test_wrong_completions_are_named_and_another_engine_goes_on_with_right_ones(run, caplog):
    names = RUNS[run]
    engine = hostile([FAMILY[name][0] for name in names], scores=run == "rewards")
    _, data = attack(engine, steps=len(names) + 4, engine_restarts=len(names))
    assert engine.corruptions == [], "it did its worst"
    assert data.engine is not engine
    lines = said(caplog, "the engine was restarted with")
    assert len(lines) == len(names)
    for name, line in zip(names, lines, strict=True):
        assert "\n" not in line
        assert "CompletionError: HostileEngine returned" in line
        assert re.search(FAMILY[name][1], line), f"{name}: {line}"


def test_an_engine_that_is_always_wrong_ends_the_run_with_one_line():
    engine = hostile([COMPLETIONS["logprobs all nan"][0]] * 99)
    type(engine).num_good = 0
    with pytest.raises(ProducerError) as caught:
        attack(engine, engine_restarts=1)
    line = str(caught.value)
    assert "\n" not in line
    assert "HostileEngine returned a wrong completion: request " in line
    assert "logprobs[0]=nan, which is not the log-probability of a sampled token" in line


@pytest.mark.parametrize("result", [None, "text", 7])
def test_a_poll_that_returns_no_list_is_named(result):
    engine = hostile()
    engine.poll = lambda timeout_s: result
    with pytest.raises(ProducerError, match=f"poll returned {result!r} instead of a list of completions"):
        attack(engine, engine_restarts=0)


HANGS = ["load_weights", "submit", "poll", "poll with the lock"]


@pytest.fixture
def limit_s():
    """What works needs as many times longer on a machine that is busy when the test begins."""
    return 2.0 + os.getloadavg()[0] // 2


@pytest.mark.slow
@pytest.mark.parametrize("where", HANGS)
def test_an_engine_that_hangs_in_a_call_is_replaced_in_time(where, limit_s, caplog, monkeypatch):
    monkeypatch.setattr("lit_async_rl.data.engine_restarts.CLOSE_S", 0.2)
    engine = hostile(hangs=[where])
    began = time.monotonic()
    attack(engine, rollout_timeout_s=limit_s)
    assert time.monotonic() - began < 30 * limit_s
    (line,) = said(caplog, "(restarts in a row: 1; limit: data.limits.engine_restarts=3)")
    assert "StalledError" in line
    assert f"rollout_timeout_s={limit_s:g}" in line
    if where in ("load_weights", "submit"):
        assert f"HostileEngine.{where} did not return within data.limits.rollout_timeout_s={limit_s:g} s" in line


def test_a_run_goes_on_though_its_engine_does_not_say_how_many_tokens_it_has_sampled(monkeypatch):
    engine = hostile(hangs=["num_tokens"])
    attack(engine, callbacks=[ThroughputMonitor()], rollout_timeout_s=5.0)  # which asks for it
    assert engine.hangs == []


@pytest.mark.slow
@pytest.mark.parametrize("where", ["partial_completions", "random_state"])
def test_a_checkpoint_does_not_wait_for_ever_for_an_engine_that_hangs(where, limit_s, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("lit_async_rl.data.engine_restarts.CLOSE_S", 0.2)
    engine, keep = hostile(hangs=[where]), ModelCheckpoint(tmp_path, every_n_train_steps=2)
    attack(engine, 8, callbacks=[keep], enable_checkpointing=True, rollout_timeout_s=limit_s)
    assert engine.hangs == []
    (line,) = said(caplog, "the engine was restarted with")
    assert f"HostileEngine.{where} did not return within data.limits.rollout_timeout_s={limit_s:g} s" in line


def test_a_run_ends_though_its_engine_does_not_close(caplog, monkeypatch):
    monkeypatch.setattr("lit_async_rl.data.engine_restarts.STOP_S", 0.3)
    began = time.monotonic()
    attack(hostile(hangs=["close"]))
    assert time.monotonic() - began < 30
    assert said(caplog, "HostileEngine.close did not return within 0.3 s; the engine is abandoned")


def test_an_engine_that_hangs_before_the_first_step_ends_the_run(monkeypatch):
    engine = hostile(hangs=["load_weights"])
    type(engine).num_good = 0
    with pytest.raises(StalledError, match=r"load_weights did not return within data\.limits\.rollout_timeout_s=0\.5"):
        attack(engine, rollout_timeout_s=0.5)
    engine = hostile()
    type(engine).setup = lambda self, model: self.released.wait(60.0)
    type(engine).startup_timeout_s = 0.5
    with pytest.raises(StalledError, match=r"setup did not return within data\.engine\.startup_timeout_s=0\.5 s"):
        attack(engine)


def test_an_engine_that_was_given_up_reads_no_more_weights():
    """Gathering a shard is a collective: it happens in the trainer's thread, which has gone on."""
    go, seen, errors = threading.Event(), [], []

    def load(items):
        try:
            for item in items:
                seen.append((item, threading.current_thread()))
                assert go.wait(60)
        except EngineError as error:
            errors.append(error)

    reader: list[threading.Thread] = []

    def weights():
        for n in range(3):
            reader.append(threading.current_thread())
            yield n

    with pytest.raises(StalledError, match="too long"):
        feed(load, weights(), Wait(0.2, "too long"))
    go.set()
    wait_until(lambda: errors)
    assert [item for item, _ in seen] == [0]
    assert set(reader) == {threading.current_thread()}
    assert seen[0][1] is not threading.current_thread()
    with pytest.raises(KeyError, match="mine"):  # an error of the weights reaches the engine, and comes back
        feed(list, _broken(), Wait(10.0, "too long"))
    assert feed(list, iter(range(5)), Wait(10.0, "too long")) == [0, 1, 2, 3, 4]


def test_items_that_last_are_handed_over_with_the_next():
    produced, seen = [], []

    def weights():
        for n in range(7):
            produced.append(n)
            yield n

    def load(fed):
        for n in fed:
            seen.append((n, max(produced)))
        return len(seen)

    assert feed(load, weights(), Wait(10.0, "too long"), lambda n: n in (1, 2, 5, 6)) == 7
    assert seen == [(0, 0), (1, 3), (2, 3), (3, 3), (4, 4), (5, 6), (6, 6)]
    with pytest.raises(KeyError, match="mine"):
        feed(list, _broken(), Wait(10.0, "too long"), lambda item: True)


def _broken():
    yield 1
    raise KeyError("mine")
