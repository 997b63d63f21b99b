"""Every code block of README, docs and CONTRIBUTING runs, parses, or says why it cannot be checked."""

from __future__ import annotations

import ast
import functools
import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from markdown_blocks import PAGES, ROOT, Block, blocks, blocks_of, commands, with_inline_links

from lit_async_rl.cli.app import AsyncRLCLI
from lit_async_rl.cli.console import COMMANDS

sys.path.insert(0, str(ROOT / "docs"))
import measurements

LANGUAGES = {"python", "yaml", "bash", "json", "", "text", "bibtex"}
QUICKSTART = ["--config", "configs/quickstart.yaml"]
EXPORT = {"--out": {}, "--push_to_hub": {}, "--private": {}}
OF_THE_CLI = {"scripts/train.py": {}, "scripts/evaluate.py": {"--num_shown": {}}, "scripts/export.py": EXPORT}
FILE = re.compile(r"^(scripts|benchmarks|examples)/[\w/]+\.py$")


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@functools.cache
def parser(script: str = "scripts/train.py"):
    """The command line's parser, without anything being built from what it parses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(AsyncRLCLI, "instantiate_classes", lambda self: None)
        required = ["--out", "nowhere"] if script == "scripts/export.py" else []
        return AsyncRLCLI([*QUICKSTART, *required], OF_THE_CLI[script]).parser


@pytest.fixture
def _modules_of_the_page(request, tmp_path, monkeypatch):
    """Modules that the page shows (blocks that begin with `# name.py`) can be imported."""
    page = request.getfixturevalue("block").page
    shown = [block for block in blocks_of(page) if block.language == "python" and block.module]
    for block in shown:
        with (tmp_path / f"{block.module}.py").open("a") as file:
            file.write(block.code + "\n\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for block in shown:
        sys.modules.pop(block.module, None)


def test_blocks_name_their_language():
    assert {block.language for page in PAGES for block in blocks_of(page)} <= LANGUAGES


@pytest.mark.parametrize("block", blocks("python"), ids=str)
@pytest.mark.usefixtures("_modules_of_the_page")
def test_a_python_block_runs(block: Block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what a block trains leaves a run's folder
    code = compile(block.code, str(block), "exec")
    if block.reason is None and block.module:
        __import__(block.module)
    elif block.reason is None:
        exec(code, {"__name__": "docs"})


@pytest.mark.parametrize("block", [b for b in blocks("yaml") if b.reason is None], ids=str)
@pytest.mark.usefixtures("_modules_of_the_page")
def test_a_yaml_block_is_a_valid_configuration(block: Block, tmp_path):
    overlay = tmp_path / "overlay.yaml"
    overlay.write_text(block.code)
    top = set(yaml.safe_load(block.code))
    assert top <= {"model", "data", "trainer", "defaults", "seed_everything", "weight_sync", "cluster"}
    parser().parse_args([*QUICKSTART, "--config", str(overlay)])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_name_files_targets_and_flags_that_exist(page: Path):
    for words in commands(page):
        check_command([word.replace("$seed", "0") for word in words])


def check_command(words: list[str]) -> None:
    """Refuses files, make targets, extras and flags that do not exist."""
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert set(words[1:2]) <= set(targets), words
    for extra in re.findall(r"(?:lit-async-rl|\.)\[([\w,-]+)\]", " ".join(words)):
        declared = (ROOT / "pyproject.toml").read_text()
        assert all(f"\n{name} = [" in declared for name in extra.split(",")), words
    for word in words:
        if word.startswith("configs/"):
            assert (ROOT / word).exists(), word
    script = next((word for word in words if FILE.match(word)), None)
    if script is not None:
        assert (ROOT / script).is_file(), script
        flags = [word.rstrip(";)") for word in words[words.index(script) + 1 :]]
        flags = flags[: flags.index("&")] if "&" in flags else flags
        if script in OF_THE_CLI and flags != ["--help"]:
            parser(script).parse_args(flags)
        elif script not in OF_THE_CLI:
            check_flags(script, flags)


def check_flags(script: str, flags: list[str]) -> None:
    """Compares flags with the script's `add_argument` calls, and those of what it imports from here."""
    tree = ast.parse((ROOT / script).read_text())
    sources = [ROOT / script]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = Path(node.module.replace(".", "/")).with_suffix(".py")
            sources += [ROOT / module, (ROOT / script).parent / module]
        elif isinstance(node, ast.Constant) and str(node.value).startswith("benchmarks."):  # for runpy
            module = Path(str(node.value).replace(".", "/"))
            sources += [ROOT / module.with_suffix(".py"), ROOT / module / "__main__.py"]
        elif isinstance(node, ast.Constant) and node.value in COMMANDS:  # scripts that call a command of the console
            sources.append(ROOT / Path(COMMANDS[node.value][0].replace(".", "/")).with_suffix(".py"))
    text = "".join(source.read_text() for source in sources if source.is_file())
    if "parse_known_args" not in text:  # else the rest is another program's
        known = set(re.findall(r"[\"'](--[\w-]+)[\"']", text))
        assert {flag.split("=")[0] for flag in flags if flag.startswith("--")} <= known, (script, flags)


@pytest.mark.parametrize("page", measurements.PAGES, ids=lambda page: page.name)
def test_tables_of_measurements_are_those_of_their_files(page: Path):
    """`python docs/measurements.py` writes them."""
    assert page.read_text() == measurements.fill(page.read_text())


@pytest.mark.parametrize("path", sorted(measurements.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_a_measurement_is_complete_and_shown(path: Path):
    """A table shows it, or a link beside a number leads to it (in README by its name)."""
    measurements.load(path.stem)
    shown = re.compile(rf"<!-- measurement: {path.stem} (?:-->|\|)|(?:\]\(|\]: docs/)measurements/{path.stem}\.json\b")
    assert any(shown.search(page.read_text()) for page in measurements.PAGES)


def test_a_page_may_show_some_columns_of_a_measurement():
    marker = "<!-- measurement: plan | engines | measured s -->"
    filled = measurements.fill(f"{marker}\nold\n<!-- end -->")
    assert filled.splitlines()[:5] == [marker, "", "| engines | measured s |", "|---|---|", "| 1 | 1.871 |"]
    assert "](measurements/plan.json)" in filled
    assert measurements.fill(filled) == filled
    with pytest.raises(ValueError, match=r"plan\.json has no column \['speed'\]"):
        measurements.fill("<!-- measurement: plan | speed -->\n<!-- end -->")


@pytest.mark.parametrize("block", blocks("json"), ids=str)
def test_a_json_block_parses(block: Block):
    json.loads(block.code)


def test_links_of_pages_outside_the_site_lead_somewhere():
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "configs/README.md"):
        text = with_inline_links((ROOT / name).read_text())
        for link in re.findall(r"\]\((?!https?:)([^)#\s]+)", text):
            assert ((ROOT / name).parent / link).exists(), f"{name}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_modules_that_a_page_names_exist(page: Path):
    text = page.read_text()
    folders = "tests|benchmarks|lit_async_rl|callbacks|scripts|examples|configs|docs"
    for name in re.findall(rf"`((?:{folders})/[\w/.*-]+)`", text):
        assert list(ROOT.glob(name.rstrip("/"))), name
    if page.name != "CHANGELOG.md":  # which names what is gone
        for name in re.findall(r"`(lit_async_rl(?:\.\w+)+)", text):
            module = Path(*name.split("."))
            places = (module, module.parent, module.with_suffix(".py"), module.parent.with_suffix(".py"))
            assert any((ROOT / place).exists() for place in places), name


def test_the_map_names_every_folder_and_files_that_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    listing = text.partition("| folder of `lit_async_rl` | it |")[2].partition("\n\n")[0]
    named = {name for row in listing.splitlines() for name in re.findall(r"`(\w+)`", row.partition(" | ")[0])}
    package = ROOT / "lit_async_rl"
    folders = {path.parent.name for path in package.glob("*/__init__.py")} - {"assets"}
    assert named == folders | {"errors", "problem", "sampler_records", "types", "importance", "rules"}
    rows = re.findall(r"^\| .+ \| `([\w/]+\.py)` \|$", text, re.M)
    assert len(rows) >= 8
    assert all((ROOT / row).is_file() for row in rows)
