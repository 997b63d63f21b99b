"""`ServerTeacher` asks a real server of vLLM."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest
import torch
from flow import MODEL, fit, make_data, make_module
from transformers import AutoModelForCausalLM

import lit_async_rl as rl
from lit_async_rl.errors import EngineError
from lit_async_rl.models.policy import CausalPolicy
from lit_async_rl.runtime.ports import free_port, reach

pytest.importorskip("vllm")
pytest.importorskip("openai")


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", MODEL, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--dtype", "float32", "--max-model-len", "64", "--enforce-eager"]
    command += ["--served-model-name", "teacher"]
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GB
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as file, subprocess.Popen(command, env=env, stdout=file, stderr=file) as server:
        try:
            deadline = time.monotonic() + 150
            while True:
                try:
                    reach("127.0.0.1", port, 1.0)
                    break
                except OSError:
                    assert server.poll() is None, log.read_text()[-2000:]
                    assert time.monotonic() < deadline, log.read_text()[-2000:]
                    time.sleep(0.5)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()


@pytest.mark.timeout(240)
def test_log_probabilities_are_the_models(address):
    lm = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    settings = rl.ServerTeacher(base_url=address, model="teacher", tokenizer=MODEL)
    teacher = settings.open(CausalPolicy(lm), torch.device("cpu"))
    sequences = [[3, 5, 4, 9, 7], [3, 3, 4]]
    try:
        for num in (0, 5):
            for ids, found in zip(sequences, teacher.ask(sequences, num), strict=True):
                with torch.no_grad():
                    logprobs = lm(torch.tensor([ids])).logits[0].log_softmax(-1)
                for place, (token, choices) in enumerate(zip(ids[1:], found, strict=True)):
                    assert choices[token] == pytest.approx(float(logprobs[place, token]), abs=1e-4)
                    assert set(logprobs[place].topk(num).indices.tolist()) <= set(choices)
    finally:
        teacher.close()


@pytest.mark.timeout(240)
def test_a_server_with_another_tokenizer_is_refused_by_name(address, tmp_path):
    student = shutil.copytree(MODEL, tmp_path / "student")
    tokenizer = json.loads((student / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    ids |= {str(digit): ids[str((digit + 1) % 10)] for digit in range(10)}
    (student / "tokenizer.json").write_text(json.dumps(tokenizer))
    teacher = rl.ServerTeacher(base_url=address, model="teacher", tokenizer=str(student))
    module = make_module(model=str(student), distillation=rl.Distillation(teacher=teacher, gradient="sampled"))
    with pytest.raises(EngineError, match=r"has a different tokenizer from ServerTeacher\.tokenizer="):
        fit(module, make_data(model=str(student), reward=rl.no_reward), 1)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("settings", [dict(gradient="sampled"), dict(divergence="forward_kl", top_k=5)], ids=str)
def test_a_run_learns_from_it_what_it_learns_from_the_same_model_here(address, settings):
    found = []
    for teacher in (rl.ServerTeacher(base_url=address, model="teacher", tokenizer=MODEL), MODEL):
        torch.manual_seed(0)
        distillation = rl.Distillation(teacher=teacher, **settings)
        module = make_module(random_init=True, distillation=distillation)
        engine = rl.EmbeddedEngine(in_flight_weight_updates=False)
        data = make_data(schedule="fixed_lag", max_staleness=1, engine=engine, reward=rl.no_reward)
        fit(module, data, 3)
        found.append(torch.cat([one.detach().flatten() for one in module.policy.parameters()]))
    assert (found[0] - found[1]).abs().max() < 1e-3
    assert found[0].isfinite().all()
