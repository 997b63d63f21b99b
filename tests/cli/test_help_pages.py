"""Pages of `train --help` and the file that they are made from."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import lit_async_rl
from lit_async_rl.cli import help_pages
from lit_async_rl.cli.console import main
from lit_async_rl.cli.settings import FILE, all_settings, as_json, from_classes, train_parser

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def parser():
    return train_parser()


def test_the_file_of_settings_is_that_of_the_classes():
    said = "settings have changed: run `python -m lit_async_rl.cli.settings`"
    assert json.loads(FILE.read_text()) == json.loads(as_json(from_classes())), said


def test_the_first_page_has_fifteen_settings_that_exist_within_80_columns(capsys):
    main(["train", "--help"])
    page = capsys.readouterr().out.splitlines()
    assert len(help_pages.OFTEN_CHANGED) == 15
    assert max(map(len, page)) <= 80
    assert len(page) <= 28  # fits a small terminal
    for name in help_pages.OFTEN_CHANGED:
        default = all_settings()[name]["default"]
        line = next(line for line in page if f"--{name} " in line)
        assert default is None or f" {default} " in line


def test_all_settings_have_a_line(parser):
    page = list(help_pages.pages(parser, "all", 80))
    for name in all_settings():
        assert any(line.split()[:1] == [f"--{name}"] for line in page), name
    assert max(map(len, page)) <= 80
    assert len(page) < 500


def test_one_setting_is_shown_with_its_classes(parser):
    page = list(help_pages.pages(parser, "data.engine", 80))
    assert page[0] == "--data.engine"
    for name in ("EmbeddedEngine", "VLLMEngine", "RayEngine", "EpisodeEngine"):
        at = page.index(f"  {name}")
        assert page[at + 1].startswith("      ")
    assert page[-1] == "arguments of one: --data.engine.help AgentEngine"
    group = list(help_pages.pages(parser, "data.sampling", 80))
    assert [line.split()[0] for line in group if line.startswith("--")] == [
        f"--{name}" for name in all_settings() if name.startswith("data.sampling.")
    ]


@pytest.mark.parametrize("words", [["--help", "data.max_stalenes"], ["--config", "x.yaml", "--help=data.max_stalenes"]])
def test_a_setting_that_is_none_is_refused_with_the_one_that_was_meant(words):
    with pytest.raises(SystemExit, match=r"no setting data.max_stalenes; did you mean data.max_staleness\?"):
        main(["train", *words])


def test_help_is_found_among_other_words():
    assert help_pages.asked_for(["--config", "a.yaml"]) is None
    assert help_pages.asked_for(["--config", "a.yaml", "-h"]) == ""
    assert help_pages.asked_for(["--help", "--data.engine"]) == "data.engine"
    assert help_pages.asked_for(["--data.engine.help", "VLLMEngine"]) is None


def test_the_first_sentence_of_a_docstring():
    assert help_pages.first_sentence(lit_async_rl.VLLMEngine).endswith(".")
    assert "\n" not in help_pages.first_sentence(lit_async_rl.EpisodeEngine)


@pytest.mark.parametrize("words", [["train", "--help"], ["--help"]])
def test_these_pages_import_no_library(words):
    code = f"import sys; from lit_async_rl.cli.console import main; main({words!r}); "
    code += "found = {'torch', 'lightning', 'transformers', 'numpy'} & set(sys.modules); assert not found, found"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
