"""A hub that cannot be reached is asked once, however many files are looked for, and the error comes at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lit_async_rl.models import hub
from lit_async_rl.runtime.ports import free_port

ROOT = Path(__file__).parents[2]
COUNT = """
import sys
tries = []
def watch(event, args):
    if event == "socket.connect" and args[1][1] == {port}:
        tries.append(args[1])
sys.addaudithook(watch)
try:
    {load}
except FileNotFoundError as error:
    print(error)
print("tries", len(tries))
"""
LOADS = {
    "model": "from lit_async_rl.models.loading import load_policy; load_policy('someone/no-such-model')",
    "data": "from lit_async_rl.prompts.sources import HuggingFacePrompts; HuggingFacePrompts('someone/no-such-data')",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "data"])
def test_a_hub_that_refuses_connections_is_tried_once(tmp_path, kind):
    port = free_port()
    settings = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    kept = {name: value for name, value in os.environ.items() if "OFFLINE" not in name and "proxy" not in name.lower()}
    command = [sys.executable, "-c", COUNT.format(port=port, load=LOADS[kind])]
    done = subprocess.run(command, env=kept | settings, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert f"someone/no-such-{kind}" in done.stdout
    assert done.stdout.splitlines()[-1] == "tries 1"


def test_a_host_that_is_no_name_counts_as_unreachable(monkeypatch):
    monkeypatch.setattr(hub.constants, "ENDPOINT", "https://hub..org")
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delitem(sys.modules, "datasets.config", raising=False)  # it would be told, for the tests that follow
    for name in hub.PROXIES:
        monkeypatch.delenv(name, raising=False)
    hub.go_offline_if_unreachable.__wrapped__()  # as if no test had asked before
    assert hub.constants.HF_HUB_OFFLINE
