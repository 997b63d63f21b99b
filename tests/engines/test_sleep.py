"""Engines that free their memory while the trainer trains: when they sleep, what wakes them. Without vLLM."""

import pytest
from flow import fit, make_data, make_module
from replays import requests_of

from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.vllm import sleep as sleeping
from lit_async_rl.vllm.engine import VLLMEngine
from lit_async_rl.vllm.file_transfer import SharedMemoryTransfer
from lit_async_rl.vllm.sleep import Gate

pytestmark = pytest.mark.timeout(120)


def test_settings_that_cannot_work_are_refused_by_name(monkeypatch):
    with pytest.raises(ValueError, match=r"data\.engine\.sleep_level must be in \[0, 2\], got 3"):
        VLLMEngine(sleep_level=3)
    delta = SharedMemoryTransfer(delta=True)
    with pytest.raises(ValueError, match=r"sleep_level=2 discards the weights, .* use sleep_level=1, or delta=false"):
        VLLMEngine(sleep_level=2, transfer=delta)
    VLLMEngine(sleep_level=1, transfer=delta)
    monkeypatch.setattr(sleeping, "is_cpu_build", lambda: True)
    with pytest.raises(ValueError, match=r"sleep_level=1 needs a GPU: vLLM's CPU build has no sleep mode"):
        sleeping.check_can_sleep(1)
    sleeping.check_can_sleep(0)
    with pytest.raises(ValueError, match=r"engine_args\.enable_sleep_mode=True cannot be set: see data.engine.sleep"):
        VLLMEngine(engine_args={"enable_sleep_mode": True})
    with pytest.raises(ValueError, match=r"sleep_level=1 with data\.max_staleness=2: the engine samples while"):
        make_data(engine=Drowsy(), max_staleness=2)
    with pytest.raises(ValueError, match=r"sleep_level=1 with data\.stream_groups"):
        make_data(engine=Drowsy(), max_staleness=0, stream_groups=True)


def test_the_share_of_memory_leaves_room_for_a_trainer_on_the_same_gpu():
    shares = {
        VLLMEngine(device_ids=ids, sleep_level=n)._arguments["gpu_memory_utilization"]: (ids, n)
        for ids, n in (([0], 0), ([1], 1), (None, 0), (None, 1))
    }
    assert shares == {0.9: ([1], 1), 0.4: (None, 0), 0.6: (None, 1)}
    assert VLLMEngine(gpu_memory_utilization=0.3, sleep_level=1)._arguments["gpu_memory_utilization"] == 0.3


class Drowsy(EmbeddedEngine):
    """Notes when it was put to sleep; loses its weights then, at level 2."""

    def __init__(self, sleep_level=1):
        super().__init__()
        self.sleep_level, self.events, self.is_asleep = sleep_level, [], False

    @property
    def needs_weights(self):
        return self.is_asleep and self.sleep_level == 2

    def sleep(self):
        self.events.append("sleep")
        self.is_asleep = True

    def load_weights(self, version, weights):
        self.events.append(f"load {version}")
        self.is_asleep = False
        super().load_weights(version, weights)

    def submit(self, requests):
        assert not self.needs_weights, "it has no weights"
        self.events.append("submit")
        super().submit(requests)


def test_the_engine_sleeps_between_the_last_group_of_a_round_and_the_next_weights():
    engine = Drowsy()
    fit(make_module(), make_data(engine=engine, max_staleness=0), max_steps=3)
    step = ["submit", "sleep"]
    assert engine.events[:9] == ["load 0", *step, "load 1", *step, "load 2", *step]


def test_groups_of_several_steps_are_sampled_before_it_sleeps():
    engine = Drowsy()
    fit(make_module(), make_data(engine=engine, max_staleness=0, weight_sync_steps=2), max_steps=4)
    assert engine.events.index("submit") < engine.events.index("sleep")
    assert [event for event in engine.events if event != "sleep"][:4] == ["load 0", "submit", "load 1", "submit"]


@pytest.mark.slow
def test_weights_that_did_not_change_are_loaded_again_if_the_engine_has_dropped_them():
    engine = Drowsy(sleep_level=2)
    module = make_module()
    module.take_updated = lambda: False
    fit(module, make_data(engine=engine, max_staleness=0), max_steps=3)
    assert engine.events[:6] == ["load 0", "submit", "sleep", "load 0", "submit", "sleep"]
    assert module.version == 0


def test_a_gate_that_is_shut_for_two_reasons_opens_when_both_are_gone():
    started = []
    gate = Gate(lambda found, version: started.extend((r.id, version) for r in found))
    gate.submit(requests_of([4]))
    gate.shut("sleep")
    gate.shut("update")
    gate.submit(requests_of([4] * 3, first_id=1))
    gate.drop({2})
    gate.open("sleep")
    assert started == [(0, 0)]
    gate.open("update", version=5)
    assert started == [(0, 0), (1, 5), (3, 5)]
    gate.submit(requests_of([4], first_id=9))
    assert started[-1] == (9, 5)
