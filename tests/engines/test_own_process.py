"""The embedded engine in a process of its own: the same samples, and what happens when one of both processes ends."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import wait_for_the_end_of
from replays import assert_replayed, collect, full_logprobs, key, own_engine, requests_of
from tiny_models import save, tiny_llama, tiny_qwen3_moe

from lit_async_rl.engines.base import Completion
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.engines.embedded.kv_cache import SlotCache
from lit_async_rl.engines.embedded.own_process import (
    FILE_BYTES,
    DecodeProcess,
    from_json,
    pack_completions,
    pack_requests,
    unpack_completions,
    unpack_requests,
)
from lit_async_rl.engines.weight_files import PREFIX
from lit_async_rl.errors import EngineError, SetupError, StalledError
from lit_async_rl.models.weights import UNCHANGED
from lit_async_rl.runtime.spans import start_recording, stop_recording


def endless(seed=0):
    lm = tiny_llama(seed=seed)
    lm.generation_config.eos_token_id = []
    return lm


@pytest.mark.parametrize(("make", "in_flight"), [(tiny_llama, False), (tiny_qwen3_moe, True)])
@pytest.mark.slow
def test_its_samples_are_those_of_an_engine_in_this_process(make, in_flight, tmp_path):
    lm = make()
    sampling = dict(head=3, experts=make is tiny_qwen3_moe, top_p=0.9, stop_token_ids=(5,))
    requests = requests_of([4, 9, 1], max_tokens=20, **sampling)
    runs, states = [], []
    for own_process in (False, True):
        spans = start_recording()
        engine = own_engine(lm, tmp_path, num_slots=4, in_flight_weight_updates=in_flight, own_process=own_process)
        engine.submit(requests)
        found = sorted(collect(engine, 9), key=key)
        states.append(engine.random_state())
        engine.set_random_state(states[0])
        fixed = torch.tensor(engine.prompt_logprobs((3, 9, 1, 5)))
        torch.testing.assert_close(fixed, full_logprobs(lm, (3,), (9, 1, 5)), rtol=0, atol=1e-5)
        weights = ((name, UNCHANGED if "norm" in name else weight) for name, weight in lm.named_parameters())
        engine.load_weights(1, weights)
        again = requests_of([7], first_id=10, max_tokens=20, **sampling)
        engine.submit(again)
        more = sorted(collect(engine, 3), key=key)
        engine.load_weights(2, ((name, UNCHANGED) for name, _ in lm.named_parameters()))
        engine.submit(requests_of([5], first_id=20, max_tokens=20, **sampling))
        runs.append(found + more + sorted(collect(engine, 3), key=key))
        assert engine.num_tokens >= sum(len(c.token_ids) for c in runs[-1])
        assert engine.busy_s > 0
        assert engine.partial_completions() == []
        engine.close()
        stop_recording(spans)
        assert any(event["name"] == "decode" for event in spans.take(include_open=True))
    assert runs[0] == runs[1]
    assert [{v for c in part for v in c.versions} for part in (runs[1][9:12], runs[1][12:])] == [{1}, {2}]
    assert torch.equal(*states)


@pytest.mark.slow
def test_updates_arrive_while_it_generates_and_every_token_knows_its_version(tmp_path, monkeypatch):
    """In one file, and in many."""
    lms = {0: endless()}
    engine = own_engine(lms[0], tmp_path, num_slots=4, own_process=True)
    requests, completions = [], []
    for file_bytes in (FILE_BYTES, 3000):
        monkeypatch.setattr("lit_async_rl.engines.embedded.own_process.FILE_BYTES", file_bytes)
        found = []
        while not any(len(set(c.versions)) > 1 for c in found):  # on a busy machine an update may come too late
            assert len(lms) < 200
            asked = requests_of([20, 9], max_tokens=100, num_samples=4, first_id=len(requests))
            engine.submit(asked)
            requests += asked
            version = len(lms)
            lms[version] = endless(version % 4)
            engine.load_weights(version, lms[version].named_parameters())
            found += collect(engine, 8)
        completions += found
    assert_replayed(lms, requests, completions, num_tokens=100, cache_cleared=False)
    engine.close()


@pytest.mark.slow
def test_what_was_aborted_does_not_come_also_if_it_was_finished(tmp_path):
    engine = own_engine(endless(), tmp_path, num_slots=6, own_process=True)
    engine.submit(requests_of([3, 4], max_tokens=5))  # finished, but not asked for
    engine.submit(requests_of([5], first_id=2, max_tokens=60))
    while engine.num_tokens < 60:
        time.sleep(0.001)
    engine.abort([0, 2])
    engine.submit(requests_of([6], first_id=0, max_tokens=7))  # the number is free again
    found = collect(engine, 6)
    time.sleep(0.3)
    found += engine.poll(0.0)
    assert sorted((c.request_id, len(c.token_ids)) for c in found) == [*[(0, 7)] * 3, *[(1, 5)] * 3]
    for number in range(9, 500):
        engine.submit(requests_of([2], first_id=number, max_tokens=63, num_samples=1))
        if partial := engine.partial_completions():
            break
    assert partial[0].finish_reason == "abort"
    assert partial[0].request_id >= 9
    engine.close()
    assert engine.poll(0.1) == []
    engine.close()


@pytest.mark.slow
def test_mistakes_are_refused_as_in_this_process(tmp_path):
    special = type("Special", (EmbeddedEngine,), {"cache_class": type("OtherCache", (SlotCache,), {})})
    with pytest.raises(
        ValueError, match=r"own_process must be False with Special, .* does not know the cache class OtherCache"
    ):
        special(own_process=True)
    engine = EmbeddedEngine(device="cpu", own_process=True)
    assert type(engine) is type(engine.fresh()) is EmbeddedEngine
    assert type(engine.fresh().engine) is DecodeProcess
    with pytest.raises(SetupError):
        engine.submit(requests_of([2]))
    with pytest.raises(OSError, match="nowhere"):
        engine.setup(str(tmp_path / "nowhere"))
    engine.close()
    engine = engine.fresh()
    lm = tiny_llama()
    engine.setup(save(lm, tmp_path))
    with pytest.raises(SetupError, match="before load_weights"):
        engine.submit(requests_of([2]))
    with pytest.raises(ValueError, match="lack what the engine's model has"):
        engine.load_weights(0, list(lm.named_parameters())[1:])
    engine.load_weights(0, lm.named_parameters())
    with pytest.raises(ValueError, match="vocabulary has only 64"):
        engine.submit([*requests_of([2]), replace(requests_of([2], first_id=1)[0], prompt_ids=(64,))])
    with pytest.raises(ValueError, match="max_model_len"):
        engine.submit(requests_of([2], max_tokens=10**6))
    engine.load_weights(1, list(lm.named_parameters())[1:])  # in flight the trainer does not wait
    with pytest.raises(ValueError, match="lack what the engine's model has"):
        engine.poll(30.0)
    with pytest.raises(ValueError, match="lack what the engine's model has"):
        engine.load_weights(2, lm.named_parameters())
    engine.close()


def wait_until_stopped(pid):
    """Until all threads stand still: on a busy machine some go on for a while after the signal."""
    threads = list(Path(f"/proc/{pid}/task").glob("*/stat"))
    deadline = time.monotonic() + 30
    while any(thread.read_text().rpartition(")")[2].split()[0] != "T" for thread in threads):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_a_process_that_is_killed_or_stands_still_is_an_error_that_says_so(tmp_path):
    engine = own_engine(endless(), tmp_path, num_slots=4, own_process=True, update_timeout_s=0.5)
    engine.submit(requests_of([4], max_tokens=60))
    os.kill(engine.engine.connection.pid, signal.SIGSTOP)
    wait_until_stopped(engine.engine.connection.pid)
    setting = r"\(set by data\.engine\.update_timeout_s=0\.5\)"
    with pytest.raises(StalledError, match=rf"abort: .*did not answer within 0\.5 s {setting}"):
        engine.abort([0])
    engine.load_weights(1, endless().named_parameters())  # in flight only the next one waits
    with pytest.raises(StalledError, match=rf"load_weights: .*did not answer within 1 s {setting}"):
        engine.load_weights(2, endless().named_parameters())
    began = time.monotonic()
    os.kill(engine.engine.connection.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"process ended \(SIGKILL"):
        collect(engine, 99)
    for call in (lambda: engine.abort([0]), lambda: engine.submit(requests_of([2], first_id=5)), engine.random_state):
        with pytest.raises(EngineError, match="process"):
            call()
    assert time.monotonic() - began < 20
    engine.close()


TRAINER = """
import sys, time
from replays import own_engine, requests_of
from tiny_models import tiny_llama
lm = tiny_llama()
lm.generation_config.eos_token_id = []
engine = own_engine(lm, sys.argv[1], num_slots=4, own_process=True)
engine.submit(requests_of([4] * 200, max_tokens=60))
print(engine.engine.connection.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_it_ends_with_the_trainer_whatever_ends_that(tmp_path):
    paths = os.pathsep.join([os.getcwd(), "tests/helpers"])
    environment = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, "-c", TRAINER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as trainer:
        child = int(trainer.stdout.readline())
        trainer.send_signal(signal.SIGKILL)
        trainer.wait(30)
    wait_for_the_end_of(child)


@pytest.mark.slow
def test_no_files_stay_behind_also_of_weights_that_its_process_did_not_live_to_read(tmp_path, monkeypatch):
    monkeypatch.setattr("lit_async_rl.engines.weight_files.SHARED_MEMORY", str(tmp_path / "shm"))
    (tmp_path / "shm").mkdir()
    lm = tiny_llama()
    engine = own_engine(lm, tmp_path, own_process=True)
    engine.load_weights(1, lm.named_parameters())
    (last,) = [path for path in (tmp_path / "shm").iterdir() if path.is_dir()]
    assert last.name.startswith(PREFIX)

    def ended(*args, **fields):
        raise EngineError("the process has ended")

    monkeypatch.setattr(engine.engine.connection, "begin", ended)
    with pytest.raises(EngineError, match="has ended"):
        engine.load_weights(2, lm.named_parameters())
    assert not [path for path in (tmp_path / "shm").iterdir() if path.is_dir()]
    left = engine.engine._folders.make()
    (left / "weights").write_bytes(b"1")
    engine.close()
    assert list((tmp_path / "shm").iterdir()) == []


class Interrupted(deque):
    """Its first `popleft` waits, as in a thread that the system has stopped there."""

    entered = threading.Event()
    goes_on = threading.Event()

    def popleft(self):
        if not self.entered.is_set():
            self.entered.set()
            assert self.goes_on.wait(20)
        return super().popleft()


def test_a_poll_and_an_abort_at_once_take_each_completion_once():
    (samples,) = EmbeddedEngine.from_module(tiny_llama()).run(requests_of([4]))
    engine = EmbeddedEngine(own_process=True).engine
    engine._connection = SimpleNamespace(wait_for=lambda *_: True, ask=lambda *_, **__: ({}, {}))
    engine._finished = Interrupted(samples)
    with ThreadPoolExecutor(2) as threads:
        polled = threads.submit(engine.poll, 0.0)
        assert engine._finished.entered.wait(20)
        aborted = threads.submit(engine.abort, [samples[0].request_id])
        wait([aborted], timeout=0.3)  # it would take all in this time
        engine._finished.goes_on.set()
        aborted.result(20)
        found = polled.result(20) + list(engine._finished)
    assert found == samples


@pytest.mark.slow
def test_without_room_in_memory_weights_go_through_other_files_and_the_remedy_is_named(tmp_path, monkeypatch, caplog):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))
    none = shutil._ntuple_diskusage(64 << 20, 64 << 20, 0)  # what a container has without --shm-size
    monkeypatch.setattr(shutil, "disk_usage", lambda path: none)
    lm = tiny_llama()
    engine = own_engine(lm, tmp_path, in_flight_weight_updates=True, own_process=True)
    engine.load_weights(1, lm.named_parameters())
    assert any((tmp_path / "elsewhere").glob(f"{PREFIX}*/*.safetensors"))
    assert "--shm-size=1g" in caplog.text
    engine.submit(requests_of([4]))
    assert {version for c in collect(engine, 3) for version in c.versions} == {1}
    engine.close()
    assert list((tmp_path / "elsewhere").iterdir()) == []


@given(st.lists(st.floats(width=32), min_size=1, max_size=5))
def test_numbers_arrive_as_they_were_sent(logprobs):
    ids = tuple(range(len(logprobs)))
    sent = Completion(
        request_id=3, sample_index=1, token_ids=ids, logprobs=tuple(logprobs), versions=ids, finish_reason="stop"
    )
    packed, tensors = pack_completions([sent])
    (found,) = unpack_completions(json.loads(json.dumps(packed)), tensors)
    assert repr(found) == repr(sent)  # NaN is not equal to itself


def test_requests_and_errors_arrive_as_they_were_sent():
    requests = requests_of([3], stop_token_ids=(4, 5), stop=("a", "b"), head=2, min_p=0.1)
    assert unpack_requests(json.loads(json.dumps(pack_requests(requests)))) == requests
    of_torch = {"OutOfMemoryError": torch.OutOfMemoryError, "AcceleratorError": torch.AcceleratorError}
    for name, kind in {**of_torch, "StalledError": StalledError}.items():
        assert type(from_json({"type": name, "message": "m", "traceback": ""})) is kind
    assert str(from_json({"type": "Odd", "message": "m", "traceback": ""})) == "Odd: m"
