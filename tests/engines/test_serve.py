"""How servers are started and guarded; none is started here, see test_vllm_servers.py."""

import asyncio
import importlib.util
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lit_async_rl.engines.vllm import serve
from lit_async_rl.engines.vllm.api_key import RequireKey
from lit_async_rl.utils.ports import free_port

ROOT = Path(__file__).parents[2]


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"--port {port} cannot be used: Address already in use"):
            serve.check_address("127.0.0.1", port, has_key=False)
    serve.check_address("127.0.0.1", port, has_key=False)


def test_others_may_only_reach_it_with_a_key():
    with pytest.raises(ValueError, match=r"--host 0\.0\.0\.0 can be reached by others.*VLLM_API_KEY"):
        serve.check_address("0.0.0.0", free_port(), has_key=False)
    serve.check_address("0.0.0.0", free_port(), has_key=True)


def test_the_model_of_a_training_configuration(tmp_path):
    assert serve.model_of(str(ROOT / "configs/quickstart.yaml")) == "lit_async_rl/assets/sort_policy"
    (tmp_path / "a.yaml").write_text("data: {seed: 1}\n")
    with pytest.raises(ValueError, match=r"model\.model is not set"):
        serve.model_of(str(tmp_path / "a.yaml"))


def test_what_the_user_has_set_stays_and_what_is_needed_is_set():
    found = serve.server_environment({"OMP_NUM_THREADS": "8", "VLLM_SERVER_DEV_MODE": "0"}, is_cpu=True)
    assert (found["OMP_NUM_THREADS"], found["VLLM_SERVER_DEV_MODE"]) == ("8", "1")
    assert "TORCH_COMPILE_DISABLE" not in serve.server_environment({}, is_cpu=False)


def test_with_a_key_every_path_is_guarded():
    arguments = serve.server_arguments("m", "0.0.0.0", 1, "auto", has_key=True)
    assert "lit_async_rl.engines.vllm.api_key.RequireKey" in arguments
    assert "--middleware" not in serve.server_arguments("m", "127.0.0.1", 1, "auto", has_key=False)


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/collective_rpc", b"Bearer right", 200),
        ("/collective_rpc", b"Bearer wrong", 401),
        ("/collective_rpc", b"", 401),
        ("/pause", b"right", 401),
        ("/health", b"", 200),
    ],
)
def test_the_guard_lets_only_the_key_pass(monkeypatch, path, key, status):
    monkeypatch.setenv("VLLM_API_KEY", "right")
    sent = []

    async def send(message):
        sent.append(message)

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    scope = {"type": "http", "path": path, "headers": [(b"authorization", key)]}
    asyncio.run(RequireKey(app)(scope, None, send))
    assert sent[0]["status"] == status


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_it_says_how_to_install_it():
    command = [sys.executable, str(ROOT / "scripts/serve.py"), "--model", "m"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("error: scripts/serve.py needs vLLM, which is not installed: pip")
    assert done.stderr.count("\n") == 1
