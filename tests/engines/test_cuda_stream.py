"""The decode loop's CUDA stream: what is queued where, and how often a token waits for the device.

There is no GPU: streams and events are a stand-in that records the calls, and `has_streams` is forced. What the calls
do on a GPU is shown by `benchmarks/gpu_acceptance`.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter

import pytest
import torch
from device_waits import DeviceWaits
from replays import own_engine, requests_of
from tiny_models import tiny_gpt2, tiny_llama

from lit_async_rl.engines.embedded import cuda_stream
from lit_async_rl.engines.embedded.engine import EmbeddedEngine
from lit_async_rl.engines.embedded.forward import CachedForward
from lit_async_rl.models import weights as weights_module
from lit_async_rl.models.weights import LowRankSum


def on_cpu(values, device):
    return torch.tensor(values)


class Streams:
    """Stand-in of `torch.cuda`: current stream of each thread, and a log of (thread, what, stream)."""

    def __init__(self, monkeypatch) -> None:
        self.log: list[tuple[int, str, str]] = []
        self.streams = 0
        self.local = threading.local()
        owner = self

        class Stream:
            def __init__(self, device=None, priority=0):
                owner.streams += 1
                self.name = f"own{owner.streams} priority {priority}"
                self.device = torch.device("cpu")

            def wait_event(self, event):
                owner.note(f"wait {event.name}", self.name)

        class Event:
            def record(self, stream):
                self.name = f"event of {stream.name}"
                owner.note("record", stream.name)

        @contextlib.contextmanager
        def stream(chosen):
            before = self.current
            self.local.name = chosen.name
            yield
            self.local.name = before

        class Current:
            name = property(lambda _: self.current)

        monkeypatch.setattr(cuda_stream, "has_streams", lambda device: True)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Current())
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, chosen: self.note("keep", chosen.name))
        for module in ("slots", "sampling"):  # pinned memory needs a GPU
            monkeypatch.setattr(f"lit_async_rl.engines.embedded.{module}.to_device", on_cpu)

    @property
    def current(self) -> str:
        return getattr(self.local, "name", "default")

    def note(self, what: str, stream: str | None = None) -> None:
        self.log.append((threading.get_ident(), what, stream or self.current))


OWN = "own1 priority -1"


@pytest.fixture
def streams(monkeypatch):
    found = Streams(monkeypatch)
    forward = CachedForward.__call__
    monkeypatch.setattr(CachedForward, "__call__", lambda self, *args: found.note("forward") or forward(self, *args))
    return found


@pytest.mark.parametrize("in_flight", [True, False])
def test_all_of_the_loops_work_is_on_its_stream_in_every_thread(streams, tmp_path, in_flight):
    lm = tiny_llama()
    engine = own_engine(lm, tmp_path, num_slots=4, in_flight_weight_updates=in_flight)  # loads weights, checks itself
    engine.submit(requests_of([4, 6], max_tokens=40, num_samples=2))

    def produce():
        for _ in range(3):
            engine.poll(0.0)

    producer = threading.Thread(target=produce)
    producer.start()
    producer.join(60)
    assert engine.partial_completions()
    engine.abort([0])
    engine.poll(0.0)
    forwards = [stream for _, what, stream in streams.log if what == "forward"]
    assert len(forwards) > 3
    assert set(forwards) == {OWN}
    assert streams.current == "default"


def test_new_weights_are_used_behind_their_copies_and_their_memory_is_kept(streams, tmp_path):
    lm = tiny_llama()
    engine = own_engine(lm, tmp_path, num_slots=4)
    engine.submit(requests_of([4], max_tokens=40, num_samples=2))
    engine.poll(0.0)
    streams.log.clear()
    engine.load_weights(1, lm.named_parameters())
    assert [(what, stream) for _, what, stream in streams.log] == [("record", "default")]  # queued; nobody waits
    streams.log.clear()
    engine.poll(0.0)
    found = [(what, stream) for _, what, stream in streams.log]
    kept = [("keep", OWN)] * len(list(lm.parameters()))
    assert found == [("wait event of default", OWN), *kept, ("forward", OWN)]


def test_tensors_of_a_device_without_a_number_are_kept(streams):
    """`auto` is `cuda`, and a tensor's device `cuda:0`: they are not equal."""
    stream = cuda_stream.EngineStream(torch.device("cuda"))
    stream.receive(stream.mark(), [torch.zeros(2), torch.zeros(2, device="meta")])
    assert [what for _, what, _ in streams.log] == ["record", "wait event of default", "keep"]


def test_the_parts_of_a_low_rank_sum_are_kept():
    parts = [torch.zeros(2, 2), torch.zeros(1, 2), torch.zeros(2, 1)]
    received = {"a": torch.zeros(3), "b": LowRankSum(*parts)}
    assert [id(t) for t in weights_module.tensors_of(received)] == [id(received["a"]), *map(id, parts)]


def test_an_engine_that_borrows_a_model_shares_its_callers_stream(streams):
    EmbeddedEngine.from_module(tiny_llama(), num_slots=2).run(requests_of([4], max_tokens=3, num_samples=2))
    assert {stream for _, what, stream in streams.log if what == "forward"} == {"default"}


def test_vllm_is_recommended_for_large_models_on_a_gpu(streams, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("lit_async_rl.engines.embedded.engine.has_streams", lambda device: True)
    own_engine(tiny_llama(), tmp_path, num_slots=2)
    assert "VLLMEngine" not in caplog.text
    monkeypatch.setattr("lit_async_rl.engines.embedded.engine.VLLM_PARAMETERS", 100)
    own_engine(tiny_llama(), tmp_path, num_slots=2)
    assert [m for m in caplog.messages if "data.engine=VLLMEngine" in m]


# -- Waits ------------------------------------------------------------------------------------------------------------


def waits(lm, tmp_path, monkeypatch, num_polls=12, **sampling) -> tuple[Counter[str], int]:
    """Waits of some decode steps in which no completion ends, and the number of forward passes."""
    monkeypatch.setattr("lit_async_rl.engines.embedded.slots.to_device", on_cpu)
    lm.generation_config.eos_token_id = []
    engine = own_engine(lm, tmp_path, num_slots=8)
    engine.submit(requests_of([6, 3], max_tokens=60, num_samples=4, **sampling))
    engine.poll(0.0)  # prefill
    forwards = []
    forward = CachedForward.__call__
    monkeypatch.setattr(CachedForward, "__call__", lambda self, *args: forwards.append(1) or forward(self, *args))
    with DeviceWaits() as counted:
        for _ in range(num_polls):
            engine.poll(0.0)
    return counted.found, len(forwards)


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2], ids=["llama", "gpt2"])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"top_k": 5, "top_p": 0.9}, {"temperature": 0.0}, {"head": 4}],
    ids=["plain", "truncated", "greedy", "head"],
)
def test_a_token_waits_for_the_device_once(make, sampling, tmp_path, monkeypatch):
    found, steps = waits(make(), tmp_path, monkeypatch, **sampling)
    assert found == {"tolist": steps}


def test_the_counter_sees_what_waits():
    with DeviceWaits() as counted:
        values = torch.arange(4)
        assert values.any()
        values[values > 1].tolist()
        values.max().item()
        torch.tensor([1], device="cpu")
        values.nonzero()
        values + 1
    found = counted.found
    assert found["__bool__"] == found["tolist"] == found["item"] == found["tensor"] == found["nonzero"] == 1
    assert found["aten.index.Tensor"] == 1
    assert sum(found.values()) == 6
