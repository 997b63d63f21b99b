"""Real vLLM servers for tests: started by scripts/serve.py, killed, stopped, continued."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from lit_async_rl.utils.ports import free_port

ROOT = Path(__file__).parents[2]
START_S = 400.0  # of which a busy machine takes most

# A server on a busy machine is slow to answer, which is no failure; only tests of failures are impatient.
PATIENT = dict(probe_interval_s=0.3, health_timeout_s=30.0, startup_timeout_s=60.0, update_timeout_s=120.0)
IMPATIENT = PATIENT | dict(health_timeout_s=3.0)


class Server:
    """A server in a session of its own; it ends with the test process, however that ends."""

    def __init__(self, model: str, log: Path, port: int | None = None, plain: bool = False, key: str = "") -> None:
        self.port = port or free_port()
        self.model = model
        self.log = log
        self.plain = plain
        self.key = key
        self.address = f"127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        own = ["--model", self.model, "--port", str(self.port), "--dtype", "float32"]
        small = ["--max-num-seqs", "64"]
        command = [sys.executable, str(ROOT / "scripts" / "serve.py"), *own, "--die_with_parent", *small]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_API_KEY": self.key, "HF_HUB_OFFLINE": "1"}
        if self.plain:  # as a user would who does not know what we need
            command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *own, *small]
            command += ["--enforce-eager", "--skip-tokenizer-init", "--load-format", "dummy"]
            environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
            environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, cwd=ROOT, start_new_session=True
            )

    def wait(self) -> Server:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://{self.address}/health", timeout=5):
                    return self
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise AssertionError(f"no server at {self.address}: {self.log.read_text()[-2000:]}")

    def signal(self, number: int) -> None:
        """To the server and its engine."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait(30)

    def make_ready(self) -> None:
        """Whatever a test has done to it."""
        if self.process.poll() is not None:
            self.start()
        self.signal(signal.SIGCONT)
