"""Replicas that are slow or stand still: publication waits for nobody, and others continue what they hold."""

import itertools
import logging
import threading
import time
from dataclasses import replace

import pytest
import torch
from quick_engines import Quick
from ray_stand_in import on_stand_in
from replays import assert_replayed, key, requests_of
from tiny_models import save, tiny_llama

from lit_async_rl.engines.base import Completion
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.errors import EngineError
from lit_async_rl.ray import engine as ray_engine
from lit_async_rl.ray import fleet
from lit_async_rl.ray.engine import RayEngine
from lit_async_rl.ray.entries import Assignment, Part, State

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")]
WEIGHTS = [("weight", torch.zeros(2))]


@pytest.fixture(autouse=True)
def _quick():
    Quick.reset()
    yield
    Quick.reset()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tiny_llama(), tmp_path_factory.mktemp("model"))


def until(condition, engine):
    """Turns the engine until something holds; returns what was sampled meanwhile."""
    deadline = time.monotonic() + 60.0
    found = []
    while not condition():
        assert time.monotonic() < deadline
        found += engine.poll(0.02)
    return found


def asked(seed, what):
    return [given for number, name, given in Quick.calls if (number, name) == (seed, what)]


def requests_to(seed):
    return [request.id for request in asked(seed, "submit") if request.id >= 0]


def each_once(requests):
    return sorted((request.id, n) for request in requests for n in range(request.num_samples))


def said(caplog, text):
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


class Slow:
    """Replicas that wait with the weights of a version until it is released.

    Args:
        versions: by replica.
    """

    def __init__(self, **versions):
        self.gates = {(int(seed[1:]), v): threading.Event() for seed, given in versions.items() for v in given}

    def __call__(self, seed, what, given):
        if what == "load_weights" and (seed, given) in self.gates:
            assert self.gates[seed, given].wait(60.0)

    def release(self, seed, version):
        self.gates[seed, version].set()


def slow_pair(stand_in, model, gates, replicas=2, **settings):
    Quick.reset(gates)
    engine = on_stand_in(Quick(update_timeout_s=60.0, **settings), model, replicas=replicas)
    engine.load_weights(0, WEIGHTS)
    return engine


def accepted(engine, seed, version):
    return lambda: engine._fleet.entries[seed].accepted == version


# -- publication ------------------------------------------------------------------------------------------------------


def has_finished(engine):
    return not any(entry.held for entry in engine._fleet.entries) and not engine._fleet.requests.finished


def test_publication_waits_for_no_replica_while_another_is_ready_and_the_late_one_reads_the_newest_only(
    stand_in, model
):
    slow = Slow(r1=[1])
    engine = slow_pair(stand_in, model, slow)
    late = engine._fleet.entries[1]
    for version in range(1, 5):
        engine.load_weights(version, WEIGHTS)  # the second one would wait for a minute
        until(accepted(engine, 0, version), engine)
    assert (late.state, engine.num_ready, late.sent) == (State.LOADING, 1, 1)
    engine.submit(requests_of([4] * 4, max_tokens=3))
    until(lambda: len(requests_to(0)) == 4, engine)
    assert requests_to(1) == []
    num_proofs = len([request for request in asked(1, "submit") if request.id < 0])
    slow.release(1, 1)
    until(lambda: engine.num_ready == 2, engine)
    assert asked(1, "load_weights") == [0, 1, 4]
    assert len([request for request in asked(1, "submit") if request.id < 0]) == num_proofs == 1
    assert late.verified == 4
    assert engine.num_lost == 0
    engine.submit(requests_of([4] * 4, max_tokens=3, first_id=10))
    found = until(lambda: has_finished(engine), engine)
    assert requests_to(1)
    assert {version for c in found if c.request_id >= 10 for version in c.versions} == {4}
    engine.close()


def test_a_replica_has_caught_up_when_it_has_the_weights_before_the_newest(stand_in, model):
    """As any that is ready; else one that is always a little later than another would never be."""
    slow = Slow(r1=[1, 2, 4])
    engine = slow_pair(stand_in, model, slow)
    late = engine._fleet.entries[1]
    for version in (1, 2):
        engine.load_weights(version, WEIGHTS)
        until(accepted(engine, 0, version), engine)
    assert late.state is State.LOADING
    slow.release(1, 1)
    until(lambda: engine.num_ready == 2, engine)
    assert (late.accepted, late.sent) == (1, 2)
    for version in (3, 4):
        engine.load_weights(version, WEIGHTS)
        until(accepted(engine, 0, version), engine)
    slow.release(1, 2)
    until(lambda: late.sent == 4, engine)
    assert (late.accepted, late.state, engine.num_ready) == (2, State.LOADING, 1)
    slow.release(1, 4)
    until(lambda: engine.num_ready == 2, engine)
    assert asked(1, "load_weights") == [0, 1, 2, 4]
    engine.close()


def test_one_that_catches_up_while_newer_weights_are_stored_is_behind_those(stand_in, model):
    slow = Slow(r1=[1, 2])
    engine = slow_pair(stand_in, model, slow)
    late = engine._fleet.entries[1]
    for version in (1, 2):
        engine.load_weights(version, WEIGHTS)
        until(accepted(engine, 0, version), engine)
    assert late.state is State.LOADING

    def weights():
        slow.release(1, 1)
        until(lambda: late.state is State.READY, engine)  # with the weights before the newest that are published
        yield from WEIGHTS

    engine.load_weights(3, weights())
    assert (late.accepted, late.sent, late.state, engine.num_ready) == (1, 2, State.LOADING, 1)
    slow.release(1, 2)
    until(lambda: engine.num_ready == 2, engine)
    assert asked(1, "load_weights") == [0, 1, 2, 3]
    engine.close()


def published(engine, version):
    """A thread that publishes; ends when the trainer would go on."""
    thread = threading.Thread(target=engine.load_weights, args=(version, WEIGHTS), daemon=True)
    thread.start()
    return thread


def test_if_none_has_the_weights_before_publication_waits_for_the_first(stand_in, model):
    slow = Slow(r0=[1], r1=[1])
    engine = slow_pair(stand_in, model, slow)
    engine.load_weights(1, WEIGHTS)
    thread = published(engine, 2)
    until(lambda: len(asked(0, "load_weights")) == len(asked(1, "load_weights")) == 2, engine)
    assert engine.num_ready == 2
    assert engine._fleet.weights.version == 1
    slow.release(1, 1)
    until(lambda: not thread.is_alive(), engine)
    assert (engine._fleet.weights.version, engine.num_ready) == (2, 1)
    assert engine._fleet.entries[0].state is State.LOADING
    slow.release(0, 1)
    until(lambda: engine.num_ready == 2, engine)
    engine.close()


def test_replicas_that_take_equally_long_for_weights_are_equally_used(stand_in, model):
    """The one that is a little later has a tenth of the time in which publication waited anyway."""
    ready = []
    engine = slow_pair(stand_in, model, lambda seed, what, given: time.sleep(0.2 * (what == "load_weights")))
    for version in range(1, 8):
        engine.load_weights(version, WEIGHTS)
        ready.append(engine.num_ready)
        engine.submit(requests_of([4] * 2, max_tokens=3, first_id=10 * version))
    until(lambda: not any(entry.held for entry in engine._fleet.entries), engine)
    assert min(len(requests_to(0)), len(requests_to(1))) >= 3, ready
    engine.close()


@pytest.mark.parametrize("what", ["first", "later"])
def test_others_have_a_limited_time_where_weights_must_be_waited_for(stand_in, model, what, monkeypatch):
    """For the first weights, and for all where a completion is of one version."""
    monkeypatch.setattr(ray_engine, "OTHERS_S", 0.2)
    monkeypatch.setattr(Quick, "in_flight_weight_updates", what == "first")
    version = 0 if what == "first" else 1
    slow = Slow(r1=[version])
    engine = slow_pair(stand_in, model, slow)
    if what == "later":
        engine.load_weights(1, WEIGHTS)
    late = engine._fleet.entries[1]
    assert (engine.num_ready, engine._fleet.entries[0].accepted, late.state) == (1, version, State.LOADING)
    slow.release(1, version)
    until(lambda: engine.num_ready == 2, engine)
    assert engine.num_lost == 0
    engine.close()


def test_the_time_without_a_replica_counts_from_the_loss_of_the_last_one(stand_in, model):
    engine = slow_pair(stand_in, model, Slow())
    for version in range(1, 4):
        engine.load_weights(version, WEIGHTS)
    assert engine._fleet.none_since is None
    engine.close()


def test_a_replica_that_is_taken_back_gets_the_requests_that_wait(stand_in, model):
    engine = slow_pair(stand_in, model, Slow())
    replicas = engine._fleet
    until(lambda: len(replicas.ready) == 2, engine)
    engine.resize(1)
    (draining,) = [entry for entry in replicas.entries if entry.is_draining]
    (other,) = [entry for entry in replicas.entries if not entry.is_draining]
    with replicas.lock:
        replicas.lose(other, "is gone", is_running=False)
    requests = requests_of([4])
    engine.submit(requests)
    engine.resize(2)
    assert replicas.none_since is None
    assert [one.part.submitted_id for one in draining.held.values()] == [request.id for request in requests]
    engine.close()


def test_the_time_in_which_nobody_looked_is_no_time_without_a_replica(stand_in, model):
    engine = slow_pair(stand_in, model, Slow())
    replicas = engine._fleet
    replicas.engine.startup_timeout_s = 30.0
    until(lambda: len(replicas.ready) == 2, engine)
    with replicas.lock:
        for entry in replicas.entries:
            replicas.lose(entry, "is gone", is_running=False)
        now = time.monotonic()
        since = replicas.none_since
        replicas._looked = now - 1000.0  # as if the whole process had been stopped meanwhile
        replicas._look_after(now)
        assert replicas.none_since >= since + 1000.0 - 1.0
    replicas.check()
    engine.close()


def test_replicas_are_not_made_after_the_end(stand_in, model):
    engine = RayEngine(Quick(), replicas=2)
    engine.close()
    with pytest.raises(EngineError, match="was closed"):
        engine.setup(model)
    assert not stand_in.handles


def test_with_log_lines_for_a_replica_that_stays_behind(stand_in, model, caplog, monkeypatch):
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(fleet, "BEHIND_S", 0.1)
    slow = Slow(r1=[1])
    engine = slow_pair(stand_in, model, slow)
    for version in (1, 2):
        engine.load_weights(version, WEIGHTS)
        until(accepted(engine, 0, version), engine)
    until(
        lambda: said(caplog, "gets no requests until it has newer weights: it has been behind for 0 s, and is loading"),
        engine,
    )
    assert said(caplog, "it has been behind")[0].startswith("the engine's replica 1 (pid ")
    slow.release(1, 1)
    until(lambda: said(caplog, "is back, with the weights of version "), engine)
    assert len(said(caplog, "it has been behind")) == 1
    engine.close()


# -- requests that others continue ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_others_continue_what_a_late_replica_has_begun_and_each_token_keeps_its_version(stand_in, model, monkeypatch):
    monkeypatch.setattr(fleet, "BEHIND_S", 0.0)
    load, poll = EmbeddedEngine.load_weights, EmbeddedEngine.poll
    gate = threading.Event()

    def late_load(self, version, weights):
        assert self.seed != 1 or version == 0 or gate.wait(60.0)
        load(self, version, weights)

    def few_tokens(self, timeout_s):
        if self.seed != 1:
            return poll(self, timeout_s)
        time.sleep(0.001)
        return [] if self.num_tokens > 8 else poll(self, 0.0)  # a step; the first token is the proof's

    monkeypatch.setattr(EmbeddedEngine, "load_weights", late_load)
    monkeypatch.setattr(EmbeddedEngine, "poll", few_tokens)
    lms = {version: tiny_llama(seed=version) for version in range(3)}
    for lm in lms.values():
        lm.generation_config.eos_token_id = []
    save(lms[0], model)
    inner = EmbeddedEngine(num_slots=16, device="cpu", update_timeout_s=60.0, self_check=False)
    engine = on_stand_in(inner, model, replicas=2)
    handed = {}

    def note(number, name, answer):
        if name == "hand_back":
            assert number == 1
            handed.update({(one[0], one[1]): len(one[2]) for one in answer["begun"]["completions"]})
        return answer

    stand_in.change = note
    engine.load_weights(0, lms[0].named_parameters())
    requests = requests_of([4, 6, 9, 5], max_tokens=100, num_samples=2)
    engine.submit(requests)
    held = list(engine._fleet.entries[1].held)
    assert len(held) == 2
    found = until(lambda: engine._fleet.entries[1].num_tokens > 8, engine)
    for version in (1, 2):
        engine.load_weights(version, lms[version].named_parameters())
        found += until(accepted(engine, 0, version), engine)
    found += until(lambda: handed, engine)
    partial = {key(c): c for c in engine.partial_completions()}
    found += until(lambda: has_finished(engine), engine)
    assert sorted(map(key, found)) == each_once(requests)
    moved = [c for c in found if c.request_id in held]
    assert {key(c) for c in moved} == handed.keys()
    for c in moved:
        begun = handed[key(c)]
        assert 0 < begun < 100
        assert set(c.versions[:begun]) == {0}
        assert set(c.versions[begun:]) == {2}
        if (known := partial.get(key(c))) is not None:  # a checkpoint has its tokens, too
            assert len(known.token_ids) >= begun
            assert c.token_ids[: len(known.token_ids)] == known.token_ids
    assert_replayed(lms, requests, moved, num_tokens=100, cache_cleared=True)
    others = [c for c in found if c.request_id not in held]
    assert_replayed(lms, requests, others, num_tokens=100, cache_cleared=False)
    assert engine.num_lost == 0
    gate.set()
    until(lambda: engine.num_ready == 2, engine)
    engine.close()


def silent_soon(monkeypatch):
    monkeypatch.setattr(fleet, "SILENT_S", 1.0)
    monkeypatch.setattr(fleet, "BEHIND_S", 1.0)
    monkeypatch.setattr(fleet, "TAKE_TIMEOUT_S", 0.05)


class Freezer:
    """No answer of replica 1 comes from `freeze` to `thaw`."""

    def __init__(self, stand_in):
        self.is_frozen = False
        self.thaws = threading.Event()
        stand_in.change = self

    def __call__(self, number, name, answer):
        if number == 1 and self.is_frozen:
            self.thaws.wait(60.0)
        return answer

    def freeze(self):
        self.is_frozen = True

    def thaw(self):
        self.is_frozen = False
        self.thaws.set()


def test_others_do_once_what_a_silent_replica_holds_without_counting_a_loss(stand_in, model, monkeypatch):
    silent_soon(monkeypatch)
    freezer = Freezer(stand_in)
    engine = slow_pair(stand_in, model, Slow())
    freezer.freeze()
    requests = requests_of([4] * 6, max_tokens=3, num_samples=2)
    engine.submit(requests)
    found = until(lambda: has_finished(engine), engine)
    assert sorted(map(key, found)) == each_once(requests)
    assert engine.num_lost == 0
    assert engine.num_ready == 1
    engine.submit(requests_of([4] * 3, max_tokens=3, first_id=10))
    until(lambda: not any(entry.held for entry in engine._fleet.entries), engine)
    assert {10, 11, 12} <= set(requests_to(0))
    freezer.thaw()
    until(lambda: engine.num_ready == 2, engine)
    assert engine.poll(0.1) == [], "what the silent one had finished came twice"
    engine.close()


def test_only_as_much_moves_as_others_have_room_for_and_nothing_twice(stand_in, model, monkeypatch):
    monkeypatch.setattr(fleet, "BEHIND_S", 0.0)
    gate = threading.Event()
    slow = Slow(r1=[1])

    def act(seed, what, given):
        slow(seed, what, given)
        if what == "poll" and given.id >= 0:
            assert gate.wait(60.0)

    engine = slow_pair(stand_in, model, act)
    requests = requests_of([4] * 8, max_tokens=3, num_samples=4)  # twice the slots of both
    engine.submit(requests)
    first, late = engine._fleet.entries
    assert len(first.held) == len(late.held) == 4
    for version in (1, 2):
        engine.load_weights(version, WEIGHTS)
        until(accepted(engine, 0, version), engine)
    assert late.state is State.LOADING
    for _ in range(3):
        engine._fleet._looked = 0.0
        engine._fleet._look_after(time.monotonic())
    assert (len(first.held), len(late.held)) == (4, 4), "the other one has no room"
    gate.set()
    found = until(lambda: has_finished(engine), engine)
    assert sorted(map(key, found)) == each_once(requests)
    assert engine.num_lost == 0
    slow.release(1, 1)
    engine.close()


def test_one_that_answers_and_gives_no_token_is_replaced_all_the_same(stand_in, model, caplog, monkeypatch):
    """Though it holds nothing any more: the others have continued it."""
    monkeypatch.setattr(fleet, "IDLE_S", 0.2)
    monkeypatch.setattr(fleet, "BEHIND_S", 0.2)
    poll = Quick.poll
    is_broken = threading.Event()

    def poll_nothing(self, timeout_s):
        if self.seed == 1 and is_broken.is_set():
            time.sleep(0.01)
            return []
        return poll(self, timeout_s)

    monkeypatch.setattr(Quick, "poll", poll_nothing)
    engine = slow_pair(stand_in, model, Slow())
    engine.engine.update_timeout_s = 2.0
    until(lambda: engine._fleet.entries[1].num_tokens == 1, engine)  # the proof's
    is_broken.set()
    found = []
    requests = []
    for first_id in itertools.count(0, 10):
        requests += requests_of([4] * 4, max_tokens=3, first_id=first_id)
        engine.submit(requests[-4:])
        end = time.monotonic() + 0.2
        found += until(lambda: time.monotonic() > end, engine)  # noqa: B023
        if engine.num_lost:
            break
    is_broken.clear()
    assert said(caplog, "has sent no token for ")
    assert said(caplog, "gave no token and no answer within data.engine.engine.update_timeout_s=2")
    found += until(lambda: engine.num_ready == 2 and not any(entry.held for entry in engine._fleet.entries), engine)
    found += engine.poll(0.0)
    assert sorted(map(key, found)) == each_once(requests)
    engine.close()


def test_aborted_requests_end_also_where_others_continue_them(stand_in, model, monkeypatch):
    silent_soon(monkeypatch)
    gate = threading.Event()
    freezer = Freezer(stand_in)
    engine = slow_pair(
        stand_in, model, lambda seed, what, given: what == "poll" and given.id >= 0 and gate.wait(60.0), replicas=2
    )
    freezer.freeze()
    engine.submit(requests_of([4] * 2, max_tokens=3, num_samples=2))
    first, late = engine._fleet.entries
    until(lambda: not late.held, engine)
    assert len(first.held) == 2
    engine.abort([0, 1])
    assert not first.held
    assert set(engine._fleet.requests.placement.load.values()) == {0}
    gate.set()
    assert engine.poll(0.2) == []
    freezer.thaw()
    engine.close()


# -- assignments ------------------------------------------------------------------------------------------------------


def begun(sample, *versions):
    return Completion(
        request_id=7,
        sample_index=sample,
        token_ids=(5,) * len(versions),
        logprobs=(-1.0,) * len(versions),
        versions=versions,
        finish_reason="abort",
    )


def test_what_is_continued_has_ids_of_its_own_and_comes_whole_under_those_that_were_submitted():
    (request,) = requests_of([4], max_tokens=9, num_samples=4, first_id=7)
    one = Assignment(1, Part(request, (0, 1, 2, 3), num_lost=3), oldest=2, received={1})
    fresh, rest = one.move({2: begun(2, 2, 3, 3)}, itertools.count(100))
    assert one.num_missing == 0
    assert fresh == Part(fresh.request, (2,), num_lost=3, origin=7, begun=begun(2, 2, 3, 3))
    assert fresh.request.id == 100
    assert fresh.request.prompt_ids == (*request.prompt_ids, 5, 5, 5)
    assert (fresh.request.num_samples, fresh.request.sampling.max_tokens, fresh.request.num_resumed) == (1, 6, 3)
    assert fresh.request.resumed_ids == (5, 5, 5)
    assert rest == Part(replace(request, id=101), (0, 3), num_lost=3, origin=7)
    again = Assignment(2, fresh, oldest=4)
    whole = again.whole(replace(begun(0, 4, 5), request_id=100, finish_reason="stop"))
    assert key(whole) == (7, 2)
    assert (whole.versions, whole.finish_reason, len(whole.token_ids), len(whole.logprobs)) == (
        (2, 3, 3, 4, 5),
        "stop",
        5,
        5,
    )
    assert again.again() == replace(fresh, num_lost=4)


def test_samples_with_seeds_are_continued_as_a_whole_under_the_same_numbers():
    (request,) = requests_of([4], max_tokens=9, num_samples=3, first_id=7)
    request = replace(request, seed=11)
    one = Assignment(1, Part(request, (0, 1, 2)), oldest=2, received={1})
    (part,) = one.move({2: begun(2, 2, 3)}, itertools.count(100))
    assert part == Part(replace(request, id=100), (0, 1, 2), frozenset({1}), origin=7)


def test_a_sample_whose_weights_were_wrong_is_sampled_again_alone_though_the_others_went_on_elsewhere():
    (request,) = requests_of([4], max_tokens=9, num_samples=3, first_id=7)
    one = Assignment(1, Part(request, (0, 1, 2)), oldest=2, received={1})
    one.move({}, itertools.count(100))
    one.received.discard(1)
    assert one.again() == Part(request, (1,), num_lost=1)
