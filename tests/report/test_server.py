"""`lit-async-rl watch`: the page on loopback follows the run's files, and never touches them."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
from made_runs import make_run, rollout, step_events

from lit_async_rl.report.commands import watch
from lit_async_rl.report.run_data import RunData
from lit_async_rl.report.server import ReportServer


@contextmanager
def served(folder):
    server = ReportServer(RunData(folder), 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def get(address: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=20) as answer:
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        return answer.read().decode()


def states(folder):
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


def test_only_what_has_changed_is_sent(tmp_path):
    folder = make_run(tmp_path / "run" / "v0", steps=5)
    before = states(folder)
    with served(folder) as server:
        assert server.server_address[0] == "127.0.0.1"
        page = get(server.address)
        assert "connect-src 'self'" in page
        first = json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page)[1])["runs"][0]
        known = json.dumps(first["parts"])
        changes = json.loads(get(f"{server.address}data?known={urllib.request.quote(known)}"))
        assert changes["parts"] == first["parts"]
        assert not {"curves", "timeline", "rollouts", "held_out"} & changes.keys()
        assert states(folder) == before, "the run's files are not touched"
        with (folder / "samples.jsonl").open("a") as file:
            file.write(json.dumps(rollout(6, 99, 0)) + "\n")
        changes = json.loads(get(f"{server.address}data?known={urllib.request.quote(known)}"))
        assert changes["rollouts"][-1]["step"] == 6
        assert "curves" not in changes
        path = folder / "timeline" / "rank0.json"
        path.write_text(path.read_text().rpartition("\n")[0] + "\n" + "".join(step_events(5, 2)))
        known = json.dumps(changes["parts"])
        changes = json.loads(get(f"{server.address}data?known={urllib.request.quote(known)}"))
        assert changes["timeline"]["num_spans"] > first["timeline"]["num_spans"]
        assert "rollouts" not in changes


def test_other_hosts_and_paths_are_refused(tmp_path):
    with served(make_run(tmp_path / "run" / "v0", steps=2)) as server:
        for path, headers in (("", {"Host": "evil.example"}), ("../etc/passwd", {}), ("data/x", {})):
            with pytest.raises(urllib.error.HTTPError):
                get(server.address + path, **headers)
        assert json.loads(get(f"{server.address}data?known=[nonsense"))["curves"]


def test_a_port_in_use_is_one_line(tmp_path):
    folder = make_run(tmp_path / "run" / "v0", steps=2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as ended:
            watch([str(folder), "--port", str(port)])
        assert str(ended.value).startswith(f"error: --port {port} of 127.0.0.1 is in use")
    with pytest.raises(SystemExit, match="--port must be between 0 and 65535, got 70000"):
        watch([str(folder), "--port", "70000"])
    with pytest.raises(SystemExit, match="is not the folder of a run"):
        watch([str(tmp_path)])


@pytest.mark.slow
def test_the_command_serves_until_it_is_interrupted(tmp_path):
    folder = make_run(tmp_path / "run" / "v0", steps=2)
    before = states(folder)
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "  # a shell's job may ignore it
    code += f"from lit_async_rl.cli.console import main; main(['watch', {str(folder)!r}, '--port', '0'])"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert "run/v0" in get(re.search(r"http://\S+", line)[0])
            process.send_signal(2)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert states(folder) == before
