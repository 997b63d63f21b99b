"""The time in which a process is stopped (Ctrl-Z, a suspended laptop, a paused machine) counts for no limit."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


# all four by the same clock: one of each thread that has a limit, the others in `make test-sweep`
@pytest.mark.parametrize(
    "what",
    [
        pytest.param("agent", marks=pytest.mark.slow),
        pytest.param("reward", marks=pytest.mark.slow),
        pytest.param("endpoint", marks=pytest.mark.sweep),
        pytest.param("environment", marks=pytest.mark.sweep),
    ],
)
def test_episodes_and_rewards_are_not_late_because_the_process_was_stopped(what, tmp_path):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, str(ROOT / "tests/helpers/stopped_run.py"), what]
    with (tmp_path / "errors").open("w+") as errors:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            awaited = f"{'reward' if what == 'reward' else 'episode'} waits\n"
            assert any(line == awaited for line in process.stdout), (tmp_path / "errors").read_text()[-3000:]
            process.send_signal(signal.SIGSTOP)
            time.sleep(8.0)  # longer than their limit
            process.send_signal(signal.SIGCONT)
            said = process.communicate(timeout=120)[0]
        finally:
            process.kill()
        assert process.returncode == 0, said + (tmp_path / "errors").read_text()[-3000:]
    assert "trained 1 step" in said
    assert "this process did not run for" in (tmp_path / "errors").read_text()
