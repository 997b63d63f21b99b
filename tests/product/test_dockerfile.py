"""The image's recipe, as far as it can be read without Docker: files, extras and command exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
PROJECT = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())["project"]


def test_what_it_copies_is_there_and_not_ignored():
    ignored = set((ROOT / ".dockerignore").read_text().split())
    copied = [word for line in re.findall(r"^COPY (.+) \S+$", TEXT, re.MULTILINE) for word in line.split()]
    assert {"lit_async_rl", "callbacks", "configs", "pyproject.toml", PROJECT["readme"]} <= set(copied)
    assert set(PROJECT["license-files"]) <= set(copied)
    for name in copied:
        assert (ROOT / name).exists(), name
        assert name not in ignored, name


@pytest.mark.parametrize("where", ["Dockerfile", ".github/workflows/ci.yml"])
def test_extras_are_those_of_the_package(where):
    named = re.findall(r"EXTRAS=\"?([\w,]+)", (ROOT / where).read_text())
    assert named
    assert {extra for extras in named for extra in extras.split(",")} <= set(PROJECT["optional-dependencies"])


def test_it_installs_the_torch_of_the_makefile():
    pattern = r'pip install (?:--quiet )?"(torch[^"]+)"'
    assert set(re.findall(pattern, TEXT)) <= set(re.findall(pattern, (ROOT / "Makefile").read_text()))
    assert 'ENTRYPOINT ["lit-async-rl"]' in TEXT
    assert "lit-async-rl" in PROJECT["scripts"]
