"""What a replica proves before it gets requests, first and whenever it comes back. Ray is stood in for."""

import importlib.util
import logging
import math
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
from flow import MODEL
from quick_engines import Quick
from ray_stand_in import on_stand_in
from replays import assert_exact, collect, full_logprobs, key, requests_of
from tiny_models import save, tiny_llama

from lit_async_rl.engines.base import Probe, probe_tokens
from lit_async_rl.engines.completion_check import run_requests
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.environments.base import Environment, Observation
from lit_async_rl.environments.episode_engine import EpisodeEngine
from lit_async_rl.errors import EngineError, StalledError
from lit_async_rl.models.tokenizer import TextCodec
from lit_async_rl.problem import Prompt
from lit_async_rl.ray import fleet
from lit_async_rl.ray.engine import RayEngine
from lit_async_rl.vllm.engine import VLLMEngine
from lit_async_rl.vllm.file_transfer import FileTransfer, SharedMemoryTransfer
from lit_async_rl.vllm.gpu_weight_transfer import IpcTransfer, NcclTransfer

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")]


@pytest.fixture(autouse=True)
def _many_failures(monkeypatch):
    """Of replicas that tests let fail until they have seen enough."""
    Quick.reset()
    monkeypatch.setattr(fleet, "MAX_FAILURES", 10**6)
    yield
    Quick.reset()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tiny_llama(), tmp_path_factory.mktemp("model"))


def until(condition, engine, timeout_s=60.0):
    """Turns the engine until something holds; returns what was sampled meanwhile."""
    deadline = time.monotonic() + timeout_s
    found = []
    while not condition():
        assert time.monotonic() < deadline
        found += engine.poll(0.02)
    return found


def small(**settings):
    return EmbeddedEngine(
        **{"num_slots": 4, "device": "cpu", "update_timeout_s": 30.0, "self_check": False, **settings}
    )


def probe_of(lm, version):
    tokens = probe_tokens(64)
    return Probe(version, tokens, tuple(full_logprobs(lm, tokens[:1], tokens[1:]).tolist()), "float32")


def publish(engine, lm, version):
    engine.probe = probe_of(lm, version)
    engine.load_weights(version, lm.named_parameters())


def kill(stand_in, number):
    next(handle for handle in stand_in.handles if handle.number == number).end(False)


def said(caplog, text):
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


def changed(method, change):
    """Changes the answers of replica 1 to one method."""

    def answer(number, name, found):
        if number == 1 and name == method:
            change(found)
        return found

    return answer


def reported_sums(answer):
    for _, sums in answer["reports"]:
        sums.pop("model.norm.weight", None)


OTHERWISE = {
    "another base of its rotary embedding": (
        changed("start", lambda found: found["model"]["config"]["rope_parameters"].update(rope_theta=500.0)),
        "has another model: its rope_parameters.rope_theta is 500.0, ours 10000.0",
    ),
    "another epsilon": (
        changed("start", lambda found: found["model"]["config"].update(rms_norm_eps=0.01)),
        "has another model: its rms_norm_eps is 0.01, ours 1e-0",
    ),
    "another version of this package": (
        changed("start", lambda found: found["model"].update(package="0.0.1")),
        "runs lit-async-rl 0.0.1, the trainer ",
    ),
    "a shorter context": (
        changed("start", lambda found: found.update(max_model_len=40)),
        "takes only 40 tokens of prompt and completion, and the run needs 256",
    ),
    "an older version": (
        changed("prove", lambda found: found.update(versions=[0])),
        "tags new tokens with versions [0], not 1",
    ),
    "other log-probabilities": (
        changed("prove", lambda found: found.update(logprobs=[p - 0.36 for p in found["logprobs"]])),
        "computes other log-probabilities than the trainer with the weights of version 1: the mean absolute "
        "difference over 47 tokens is 0.36, and float32/float32 explains 0.0001",
    ),
    "no log-probabilities": (
        changed("prove", lambda found: found.update(logprobs=[math.nan] * 47)),
        "difference over 47 tokens is nan",
    ),
    "too few log-probabilities": (
        changed("prove", lambda found: found["logprobs"].pop()),
        "has log-probabilities of 46 tokens, asked for 47",
    ),
    "a weight missing": (changed("take", reported_sums), "weight 'model.norm.weight' was not loaded (version 1)"),
}


@pytest.fixture
def pair(stand_in, model):
    lm = tiny_llama()
    engine = on_stand_in(small(), model, replicas=2)
    publish(engine, lm, 0)
    yield engine, lm
    engine.close()


@pytest.mark.parametrize("kind", OTHERWISE)
def test_a_replica_that_comes_back_as_another_gets_no_request_until_it_is_right(pair, stand_in, kind, caplog):
    caplog.set_level(logging.WARNING)
    engine, lm = pair
    publish(engine, lm, 1)
    until(lambda: engine.num_ready == 2, engine)
    stand_in.change, message = OTHERWISE[kind]
    kill(stand_in, 1)
    until(lambda: said(caplog, message), engine)
    assert all(text.startswith("replica 1 (pid ") for text in said(caplog, message))
    requests = requests_of([4, 6, 3], max_tokens=6)
    assert_exact(lm, requests, run_requests(engine, requests))
    assert engine.num_ready == 1
    stand_in.change = None
    until(lambda: engine.num_ready == 2, engine)
    assert said(caplog, "is back, with the weights of version 1")


def test_at_the_first_weights_other_log_probabilities_end_the_run(stand_in, model):
    engine = on_stand_in(small(), model, replicas=1)
    lm = tiny_llama()
    right = probe_of(lm, 0)
    engine.probe = replace(right, logprobs=tuple(p - 0.01 for p in right.logprobs))
    with pytest.raises(EngineError, match=r"replica 0 \(pid .* computes other log-probabilities than the trainer"):
        engine.load_weights(0, lm.named_parameters())
    engine.close()


def test_one_that_comes_back_has_the_newest_weights_before_any_request(stand_in, model):
    lms = {version: tiny_llama(seed=version) for version in range(3)}
    engine = on_stand_in(small(), model, replicas=2)
    publish(engine, lms[0], 0)
    kill(stand_in, 1)
    publish(engine, lms[1], 1)
    publish(engine, lms[2], 2)
    until(lambda: engine.num_ready == 2, engine)
    requests = requests_of([4, 6, 3, 8], max_tokens=6)
    results = run_requests(engine, requests)
    assert_exact(lms[2], requests, results)
    assert {v for completions in results for c in completions for v in c.versions} == {2}
    engine.close()


def test_log_probabilities_are_asked_for_when_a_replica_has_to_prove_what_it_computes(stand_in, model):
    lms = {version: tiny_llama(seed=version) for version in range(3)}
    engine = on_stand_in(small(), model, replicas=2)
    publish(engine, lms[0], 0)
    until(lambda: engine.num_ready == 2, engine)
    engine.load_weights(1, lms[1].named_parameters())
    assert not engine.needs_probe
    kill(stand_in, 1)
    until(lambda: engine.needs_probe, engine)
    engine.load_weights(2, lms[2].named_parameters())
    until(lambda: engine.needs_probe and engine._fleet.entries[1].verified == 2, engine)
    engine.take_probe(probe_of(lms[1], 1))
    assert engine.needs_probe, "of the weights before"
    assert engine.num_ready == 1
    engine.take_probe(probe_of(lms[2], 2))
    until(lambda: engine.num_ready == 2, engine)
    assert not engine.needs_probe
    engine.close()


def test_one_that_computes_otherwise_is_found_with_log_probabilities_that_come_later(stand_in, model, caplog):
    lm = tiny_llama()
    engine = on_stand_in(small(), model, replicas=2)
    publish(engine, lm, 0)
    until(lambda: engine.num_ready == 2, engine)
    engine.load_weights(1, lm.named_parameters())
    kill(stand_in, 1)
    until(lambda: engine.needs_probe, engine)
    right = probe_of(lm, 1)
    engine.take_probe(replace(right, logprobs=tuple(p - 0.01 for p in right.logprobs)))
    until(lambda: said(caplog, "replica 1 (pid"), engine)
    until(lambda: said(caplog, "computes other log-probabilities than the trainer"), engine)
    engine.close()


def test_the_proof_leaves_random_numbers_alone(stand_in, model):
    lm = tiny_llama()
    requests = requests_of([4, 6], max_tokens=20)
    found = []
    for engine in (small(seed=3), on_stand_in(small(seed=3), model, replicas=1)):
        if not isinstance(engine, RayEngine):
            engine.setup(model)
        publish(engine, lm, 0)
        found.append([sorted(map(key, run)) and [c.token_ids for c in run] for run in run_requests(engine, requests)])
        engine.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("slow_s", [0.0, 0.1])
def test_without_in_flight_updates_a_completion_is_from_the_version_it_was_submitted_under(
    stand_in, model, slow_s, monkeypatch
):
    submit = EmbeddedEngine.submit

    def slowly(self, requests):
        time.sleep(slow_s)
        submit(self, requests)

    monkeypatch.setattr(EmbeddedEngine, "submit", slowly)
    lms = {version: tiny_llama(seed=version) for version in range(3)}
    engine = on_stand_in(small(in_flight_weight_updates=False), model, replicas=2)
    for version, lm in lms.items():
        publish(engine, lm, version)
        engine.submit(requests_of([5, 8, 4], max_tokens=20, first_id=10 * version))
    found = collect(engine, 3 * 9)
    assert all(set(c.versions) == {c.request_id // 10} for c in found)
    engine.close()


# -- partial completions ----------------------------------------------------------------------------------------------


def test_partial_completions_are_beginnings_of_what_comes_and_finished_ones_are_among_them(pair):
    engine, lm = pair
    lm.generation_config.eos_token_id = []
    requests = requests_of([4, 6, 9, 5], max_tokens=200, num_samples=2)
    engine.submit([*requests, *requests_of([3], max_tokens=1, first_id=50)])
    until(lambda: False or engine.num_tokens > 60, engine)
    publish(engine, lm, 1)
    partial = {key(c): c for c in engine.partial_completions()}
    found = {key(c): c for c in until(lambda: engine.num_running == 0 and not engine._fleet.requests.finished, engine)}
    assert len(partial) >= 4
    assert any(c.finish_reason == "abort" and c.token_ids for c in partial.values())
    for which, begun in partial.items():
        if which in found:
            whole = found[which]
            length = len(begun.token_ids)
            assert (whole.token_ids[:length], whole.versions[:length]) == (begun.token_ids, begun.versions)
            assert whole.logprobs[:length] == begun.logprobs


# -- faults -----------------------------------------------------------------------------------------------------------


def quick(stand_in, model, replicas=2, act=None, **settings):
    if act is not None:
        Quick.reset(act)
    engine = on_stand_in(Quick(**settings), model, replicas=replicas)
    engine.load_weights(0, [("weight", torch.zeros(2))])
    return engine


def each_once(requests):
    return sorted((request.id, n) for request in requests for n in range(request.num_samples))


def served_by(number, method="submit"):
    return [request.id for seed, what, request in Quick.calls if (seed, what) == (number, method) and request.id >= 0]


def test_a_slow_replica_gets_less_and_holds_nobody_up(stand_in, model):
    engine = quick(stand_in, model, act=lambda seed, what, given: time.sleep(0.05 * (seed == 1 and what == "poll")))
    found = []
    for number in range(0, 40, 4):
        engine.submit(requests_of([4] * 4, max_tokens=3, first_id=number))
        found += engine.poll(0.02)
    found += collect(engine, 120 - len(found))
    assert sorted(map(key, found)) == [(n, k) for n in range(40) for k in range(3)]
    assert 0 < len(served_by(1)) < len(served_by(0))
    assert engine.num_lost == 0
    engine.close()


def test_a_request_that_no_replica_survives_is_named(stand_in, model):
    def act(seed, what, given):
        if what == "submit" and given.id == 3:
            raise RuntimeError("the scheduler is broken")

    engine = quick(stand_in, model, replicas=3, act=act)
    engine.submit(requests_of([4] * 6, max_tokens=3))
    with pytest.raises(EngineError, match=r"request \d was with 5 replicas .*the scheduler is broken"):
        until(lambda: False, engine)
    assert engine.num_lost == 5
    engine.close()


@pytest.mark.parametrize("call", ["poll", "load_weights"])
def test_one_that_hangs_loses_its_requests_in_time(stand_in, model, caplog, call):
    hangs = threading.Event()

    def act(seed, what, given):
        is_due = given == 1 if what == "load_weights" else what == "poll" and given.id >= 0
        if seed == 1 and what == call and is_due and not hangs.is_set():
            hangs.wait(60.0)

    engine = quick(stand_in, model, act=act, update_timeout_s=1.0)
    engine.load_weights(1, [("weight", torch.ones(2))])
    requests = requests_of([4] * 6, max_tokens=3)
    engine.submit(requests)
    assert sorted(map(key, collect(engine, 18))) == each_once(requests)
    found = until(
        lambda: said(caplog, "gave no token and no answer within data.engine.engine.update_timeout_s=1"), engine
    )
    assert found == []
    hangs.set()
    until(lambda: engine.num_ready == 2, engine)
    engine.close()


def test_one_that_fails_too_often_is_given_up_and_the_other_goes_on(stand_in, model, caplog, monkeypatch):
    monkeypatch.setattr(fleet, "MAX_FAILURES", 1)

    def act(seed, what, given):
        if seed == 1 and what == "submit" and given.id >= 0:
            raise RuntimeError("the scheduler is broken")

    engine = quick(stand_in, model, act=act)
    for first_id in (0, 6):
        requests = requests_of([4] * 6, max_tokens=3, first_id=first_id)
        engine.submit(requests)
        assert sorted(map(key, collect(engine, 18))) == each_once(requests)
    (line,) = said(caplog, "it is not restarted again after 1 failures")
    assert "the scheduler is broken" in line
    assert (engine.num_ready, engine.num_lost) == (1, 1)
    engine.close()


def test_a_replica_that_others_wait_for_is_named_long_before_it_counts_as_hung(stand_in, model, caplog, monkeypatch):
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(fleet, "SILENT_S", 1.0)
    thaws = threading.Event()
    engine = quick(stand_in, model, replicas=1, update_timeout_s=60.0)

    def freeze(number, name, answer):
        if not thaws.is_set():
            thaws.wait(60.0)
        return answer

    stand_in.change = freeze
    weights = [("weight", torch.zeros(2))]
    engine.load_weights(1, weights)
    before = engine.held_s
    publishing = threading.Thread(target=engine.load_weights, args=(2, weights))  # waits for those before
    publishing.start()
    until(lambda: said(caplog, "has sent no answer for 1 s") and engine.held_s > before + 0.5, engine)
    assert said(caplog, "has sent no answer")[0].startswith("the engine's replica 0 (pid ")
    thaws.set()
    publishing.join(60.0)
    until(lambda: said(caplog, "responds again"), engine)
    assert len(said(caplog, "has sent no answer")) == 1
    assert engine.num_lost == 0
    engine.close()


def test_a_replica_without_a_token_is_named_too(stand_in, model, caplog, monkeypatch):
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(fleet, "IDLE_S", 0.5)
    hangs = threading.Event()
    act = lambda seed, what, given: seed == 1 and what == "poll" and given.id >= 0 and hangs.wait(60.0)  # noqa: E731
    engine = quick(stand_in, model, act=act, update_timeout_s=60.0)
    engine.submit(requests_of([4] * 6, max_tokens=3))
    until(lambda: said(caplog, "has sent no token for "), engine)
    hangs.set()
    until(lambda: said(caplog, "responds again"), engine)
    assert engine.num_lost == 0
    engine.close()


@pytest.mark.parametrize("module", ["logs", "coordinator", "process"])
def test_a_process_that_reads_a_log_on_another_node_or_owns_replicas_imports_nothing_large(module):
    code = f"import sys, lit_async_rl.ray.{module}; sys.exit(bool({{'torch', 'ray', 'numpy'}} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_when_none_comes_back_the_run_ends_and_says_why_of_each(stand_in, model):
    engine = quick(stand_in, model)
    engine.engine.startup_timeout_s = 0.5

    def act(seed, what, given):
        if what == "setup":
            raise MemoryError(f"no room on device {seed}")

    Quick.reset(act)
    kill(stand_in, 0)
    kill(stand_in, 1)
    with pytest.raises(StalledError, match=r"no replica was ready .*: replica 0.*device 0; replica 1.*device 1"):
        until(lambda: False, engine)
    engine.close()


def test_replicas_join_and_leave_while_they_sample_and_each_sample_comes_once(stand_in, model):
    engine = quick(stand_in, model, act=lambda seed, what, given: time.sleep(0.002))
    received, number = [], 0
    for version, replicas in enumerate((3, 1, 4, 2), start=1):
        engine.submit(requests_of([4] * 30, max_tokens=3, first_id=number))
        number += 30
        engine.resize(replicas)
        engine.load_weights(version, [("weight", torch.full((2,), float(version)))])
        received += until(lambda: engine.num_ready == len(engine._fleet.entries) == replicas, engine)  # noqa: B023
    received += collect(engine, 3 * number - len(received))
    assert sorted(map(key, received)) == [(n, k) for n in range(number) for k in range(3)]
    assert engine.poll(0.1) == []
    assert len(served_by(0) + served_by(1) + served_by(2) + served_by(3)) == number, "a request was sampled twice"
    engine.close()


def test_close_lets_a_waiting_thread_go(stand_in, model):
    engine = quick(stand_in, model, act=lambda seed, what, given: what == "poll" and given.id >= 0 and time.sleep(5.0))
    engine.submit(requests_of([4], max_tokens=3))
    found = []
    waiting = threading.Thread(target=lambda: found.append(engine.poll(60.0)))
    waiting.start()
    engine.close()
    waiting.join(30.0)
    assert found == [[]]
    with pytest.raises(EngineError, match="closed"):
        engine.submit(requests_of([3]))


class Counting(Environment):
    """Says the number of the turn, three times."""

    async def start(self, prompt):
        episode = Counting()
        episode.turns = 0
        return episode

    async def step(self, completion):
        self.turns += 1
        return Observation(text=str(self.turns), reward=1.0, done=self.turns == 3)


def test_turns_of_an_episode_go_to_the_replica_that_has_its_beginning(stand_in):
    engine = quick(stand_in, MODEL, replicas=3)
    engine._fleet.requests.placement.session_margin = 1e9  # however much it has to do
    Quick.last_id = 1  # of the policy
    asked = [replace(r, prompt=Prompt(text="x"), session=r.id) for r in requests_of([1] * 12, max_tokens=3)]
    episodes = EpisodeEngine(engine, Counting()).around(engine, TextCodec(MODEL))
    for completions in run_requests(episodes, asked):
        assert [len(c.turns) for c in completions] == [3, 3, 3]
    places = {}
    for number in range(3):
        mine = [r for seed, what, r in Quick.calls if (seed, what) == (number, "submit") and r.id >= 0]
        assert mine, "a replica began no episode"
        for request in mine:
            places.setdefault(request.session, set()).add(number)
    assert all(len(where) == 1 for where in places.values())
    engine.close()


# -- sleep ------------------------------------------------------------------------------------------------------------


def slept():
    return sorted(seed for seed, what, _ in Quick.calls if what == "sleep")


@pytest.mark.parametrize("level", [1, 2])
def test_replicas_sleep_until_the_next_weights_unless_they_have_requests(stand_in, model, level):
    busy = threading.Event()

    def act(seed, what, given):
        if what == "poll" and given.id >= 0:
            busy.wait(30.0)

    engine = quick(stand_in, model, act=act, sleep_level=level, update_timeout_s=60.0)
    assert engine.sleep_level == level
    engine.submit(requests_of([3, 4]))
    engine.sleep()
    assert not slept(), "it has requests"
    busy.set()
    collect(engine, 6)
    engine.sleep()
    engine.sleep()
    assert slept() == [0, 1]
    assert engine.needs_weights == (level == 2)
    engine.load_weights(1, [("weight", torch.ones(2))])
    assert not engine.needs_weights
    engine.sleep()
    assert slept() == [0, 0, 1, 1]
    engine.submit(requests_of([3], first_id=7))  # the engine itself wakes up, or waits
    assert engine.needs_weights == (level == 2)
    engine.close()


def test_one_that_is_lost_while_they_sleep_starts_again_when_they_wake_up(stand_in, model):
    engine = quick(stand_in, model, sleep_level=1, update_timeout_s=0.6)
    engine.sleep()
    before = len(Quick.calls)
    kill(stand_in, 1)
    until(lambda: engine.num_lost == 1, engine)
    for _ in range(30):  # longer than a replica may be silent
        engine.poll(0.05)
    assert Quick.calls[before:] == []
    assert engine.num_lost == 1
    engine.load_weights(1, [("weight", torch.ones(2))])
    until(lambda: engine.num_ready == 2, engine)
    engine.close()


# -- a trainer without vLLM -------------------------------------------------------------------------------------------


TRANSFERS = [None, SharedMemoryTransfer(delta=True, preload=False), FileTransfer("/tmp/weights", dtype="bfloat16")]
TRANSFERS += [IpcTransfer(), NcclTransfer()]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
@pytest.mark.parametrize("transfer", TRANSFERS, ids=lambda transfer: type(transfer).__name__)
def test_a_trainer_needs_no_vllm_and_a_replica_without_it_says_so(stand_in, model, transfer):
    engine = RayEngine(VLLMEngine(transfer=transfer), replicas=2, num_gpus=1.0)
    moves_here = not isinstance(transfer, IpcTransfer | NcclTransfer)
    error, says = (
        (ModuleNotFoundError, "needs vLLM, which is not") if moves_here else (ValueError, "the trainer has no GPU")
    )
    with pytest.raises(error, match=rf"replica \d .*{says}"):
        engine.setup(model)
    engine.close()
