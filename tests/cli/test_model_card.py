"""The model card of an export, and its upload by the hub's own library, to a server on this machine."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from flow import fit, make_data, make_module
from test_configs import ROOT

import lit_async_rl as rl
from lit_async_rl.cli.app import export
from lit_async_rl.cli.model_card import _of_rollouts, write_card
from lit_async_rl.training.trackers import CSVLog

MODEL = rl.asset("small_sort_policy")


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's API as an upload of small files needs; keeps the files in `server.files`."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        if self.path == "/api/repos/create":
            self.server.created = json.loads(body)
            self.answer({"url": f"{self.server.address}/someone/sorter", "id": "someone/sorter"})
        elif self.path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            self.answer({"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]})
        elif self.path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"{self.server.address}/someone/sorter/commit/{'0' * 40}"
            self.answer({"commitUrl": url, "commitOid": "0" * 40, "hookOutput": ""})
        else:
            self.answer({})

    def do_GET(self) -> None:
        self.answer({"id": "someone/sorter", "sha": "0" * 40, "siblings": []})

    def answer(self, content) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.address = f"http://127.0.0.1:{server.server_port}"
    server.files, server.asked, server.created = {}, [], {}
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_nothing")
    yield server
    server.shutdown()
    server.server_close()
    thread.join(timeout=10)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint of a run with a table, in the folders that a run has."""
    log = CSVLog(tmp_path_factory.mktemp("runs"), name="run")
    monitors = [rl.StalenessMonitor(), rl.ImportanceMonitor()]
    data = make_data(model=MODEL, max_staleness=1)
    trainer = fit(make_module(model=MODEL), data, 3, monitors, logger=log, log_every_n_steps=1)
    path = f"{log.log_dir}/checkpoints/last.ckpt"
    trainer.save_checkpoint(path)
    return path


def exported(checkpoint, tmp_path, monkeypatch, *flags):
    monkeypatch.chdir(ROOT)
    settings = ["--config", "configs/quickstart.yaml", "--model.model", MODEL, "--model.scheduler", "null"]
    export([*settings, "--ckpt_path", checkpoint, "--out", str(tmp_path / "sorter"), *flags])
    return tmp_path / "sorter"


@pytest.mark.slow
def test_the_card_says_method_ages_and_version(checkpoint, tmp_path, monkeypatch):
    card = (exported(checkpoint, tmp_path, monkeypatch) / "README.md").read_text()
    _, head, text = card.split("---\n", 2)
    metadata = yaml.safe_load(head)
    assert metadata["library_name"] == "transformers"
    assert "grpo" in metadata["tags"]
    assert "base_model" not in metadata, "a folder of this machine is no name on the hub"
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    rows = dict(pair for pair in cells if len(pair) == 2)
    assert rows["base model"] == "small_sort_policy"
    assert rows["loss"] == "Reinforce"
    assert rows["correction of stale data"] == "SequenceTruncatedIS"
    assert rows["baseline or advantage"] == "OptimalBaseline"
    assert rows["stabilizers"] == "ESSLearningRate, SkipNonFinite"
    assert rows["version (number of weight updates)"] == "3"
    assert rows["bound on the age of a trained token"] == "4 versions"
    mean, oldest = rows["age of the trained tokens, mean and maximum"].removesuffix(" versions").split(", ")
    assert 0 < float(mean) <= float(oldest) == 1


def test_the_bound_on_the_card_is_that_of_replayed_groups_too():
    data = make_data(max_staleness=2, replay=rl.ReplayBuffer(max_staleness=30))
    assert _of_rollouts(make_module(), data)["bound on the age of a trained token"] == "30 versions"


@pytest.mark.slow
def test_an_export_is_uploaded_with_its_card(checkpoint, tmp_path, monkeypatch, hub, capsys):
    flags = ("--push_to_hub", "someone/sorter", "--private", "true")
    folder = exported(checkpoint, tmp_path, monkeypatch, *flags)
    assert f"uploaded to {hub.address}/someone/sorter" in capsys.readouterr().out
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(hub.files)
    assert all(hub.files[name] == (folder / name).read_bytes() for name in ("README.md", "model.safetensors"))
    assert hub.created.get("visibility", hub.created.get("private")) in ("private", True), hub.created
    assert {key for _, key in hub.asked} == {"Bearer hf_nothing"}


@pytest.mark.slow
def test_a_name_that_is_none_is_refused_before_anything_is_written(checkpoint, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        exported(checkpoint, tmp_path, monkeypatch, "--push_to_hub", "sorter")
    assert "push_to_hub must be user/name, got 'sorter': nothing was written" in str(ended.value.code)
    assert not (tmp_path / "sorter").exists()


def test_the_card_has_the_numbers_up_to_its_checkpoint_wherever_one_stands(tmp_path, monkeypatch):
    columns = "importance/ess_ratio,sample/staleness_max,sample/staleness_mean,step,val/loss,val/pass@1"
    rows = [",,,0,2,0.1", "1,0,0,0,,", "0.5,2,1,1,,", ",,,2,1,0.2", "0.1,9,8,2,,", ",,,3,3,0.9", "0.1,9,8"]
    (tmp_path / "metrics.csv").write_text("\n".join([columns, *rows]))
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.chdir(tmp_path / "checkpoints")
    module = make_module(model=MODEL)
    module.configure_model()
    write_card(tmp_path, module, make_data(model=MODEL), callbacks=[], checkpoint=Path("epoch=0-step=2.ckpt"), step=2)
    card = (tmp_path / "README.md").read_text()
    assert "| age of the trained tokens, mean and maximum | 0.50, 2 versions |" in card
    assert "| effective sample size over rollouts, mean | 0.75 |" in card
    assert "| held-out loss, first and last | 2.000, 1.000 |" in card
    assert "| held-out accuracy, first and last | 0.100, 0.200 |" in card
