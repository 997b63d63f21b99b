"""`lit-async-rl env` names versions and machine, and prints no key."""

import torch

from lit_async_rl import __version__
from lit_async_rl.cli.console import main


def test_it_says_what_runs_here_and_hides_keys(monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdef")
    monkeypatch.setenv("WANDB_BASE_URL", "https://me:open-sesame@tracker.example/api")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("MY_OWN_VARIABLE", "private")
    main(["env"])
    out = capsys.readouterr().out
    found = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert found["lit-async-rl"].startswith(__version__)
    assert found["torch"] == torch.__version__
    assert found["OMP_NUM_THREADS"] == "3"
    assert found["WANDB_API_KEY"] == found["HF_TOKEN"] == "(set)"
    assert found["WANDB_BASE_URL"] == "https://(set)@tracker.example/api"
    assert not {"0123456789abcdef", "hf_abcdef", "private"} & set(out.split())
