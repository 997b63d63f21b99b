"""Builds the API reference from the public names, fills in measurements, and points links to files at GitHub."""

from __future__ import annotations

import ast
import posixpath
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import measurements
import model_types
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://github.com/lit-async-rl/lit-async-rl/blob/main/"
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
ARXIV = re.compile(r"\b(\d{4}\.\d{5})\b")
MEASUREMENT = re.compile(r"docs/measurements/(?P<name>\w+)\.json")
LINK = re.compile(r"(?:(?<=\]\()|(?<=\]: ))(?P<path>(?!https?:)[^)#\s]+)")


def public_names() -> dict[str, list[str]]:
    """Public names by package: `{"losses": ["lit_async_rl.losses.ASPO", ...]}`."""
    names = defaultdict(list)
    for node in ast.parse((ROOT / "lit_async_rl/__init__.pyi").read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            module = node.module or ""
            names[module.partition(".")[0]] += [f"lit_async_rl.{module}.{alias.name}" for alias in node.names]
    return dict(names)


def page(package: str, names: list[str]) -> str:
    """One page of the reference."""
    folder = ROOT / "lit_async_rl" / package
    source = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    docstring = ast.get_docstring(ast.parse(source.read_text())) or ""
    summary = docstring.partition("\n\n")[0].replace("\n", " ")
    entries = "\n".join(f"::: {name}" for name in names)
    return f"# lit_async_rl.{package}\n\n{summary}\n\n{entries}\n"


def index(packages: dict[str, list[str]]) -> str:
    """The reference's table of contents."""
    rows = []
    for package, names in sorted(packages.items()):
        links = ", ".join(f"[`{name.rpartition('.')[2]}`][{name}]" for name in names)
        rows.append(f"| [`{package}`]({package}.md) | {links} |")
    head = "Every name below is an attribute of `lit_async_rl`, and works as a `class_path` in a configuration."
    return "\n".join(["# API reference", "", head, "", "| package | names |", "|---|---|", *rows, ""])


def papers() -> str:
    """The page of papers: each that a public docstring cites, the newest first, with the names that cite it."""
    cited: dict[str, list[str]] = defaultdict(list)
    for names in public_names().values():
        for name in names:
            for paper in dict.fromkeys(ARXIV.findall(_docstring(name))):
                cited[paper].append(f"[`{name.rpartition('.')[2]}`][{name}]")
    rows = [f"| [{paper}](https://arxiv.org/abs/{paper}) | {', '.join(cited[paper])} |" for paper in sorted(cited)[::-1]]
    head = "Papers whose methods or results are in the code, with the classes that implement or cite them."
    note = "Each class's page has the formula, and says where it differs from the paper or its released code."
    return "\n".join(["# Papers", "", head, note, "", "| arXiv | here |", "|---|---|", *rows, ""])


def _docstring(name: str) -> str:
    """Docstring of a public name, from the module that defines it."""
    module, _, attribute = name.rpartition(".")
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == attribute:
            return ast.get_docstring(node) or ""
        if isinstance(node, ast.ImportFrom) and any(alias.name == attribute for alias in node.names):
            return _docstring(f"{node.module}.{attribute}")
    return ""


def tables() -> str:
    """The page of all measurements: each file's table, and the command that made it."""
    names = sorted(path.stem for path in measurements.FOLDER.glob("*.json"))
    head = "Each with its command, commit, date and machine. The files are in `docs/measurements/`."
    parts = [f"## {name} {{ #{name} }}\n{measurements.render(measurements.load(name))}" for name in names]
    return "\n".join(["# All measurements", "", head, "", *parts])


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages of the reference, and those made of files outside of `docs/`."""
    packages = public_names()
    pages = {made: (ROOT / source).read_text() for source, made in PAGES.items()}
    pages["reference/index.md"] = index(packages)
    pages["papers.md"] = papers()
    pages["measurements.md"] = tables()
    pages |= {f"reference/{package}.md": page(package, names) for package, names in packages.items()}
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_config(config: Any) -> Any:
    """Lists the reference's pages in the navigation."""
    for section in config.nav:
        if "API" in section:
            section["API"] = ["reference/index.md", *(f"reference/{name}.md" for name in sorted(public_names()))]
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Fills in measurements, and points links to files outside of `docs/`, and to measurements, at their page."""
    name = page.file.src_uri
    origin = next((source for source, made in PAGES.items() if made == name), f"docs/{name}")

    def target(match: re.Match[str]) -> str:
        found = posixpath.normpath(posixpath.join(posixpath.dirname(origin), match["path"]))
        if measured := MEASUREMENT.fullmatch(found):
            return posixpath.relpath("measurements.md", posixpath.dirname(name) or ".") + "#" + measured["name"]
        if found in PAGES or found.startswith("docs/"):
            inside = PAGES.get(found, found.removeprefix("docs/"))
            return posixpath.relpath(inside, posixpath.dirname(name) or ".")
        return REPOSITORY + found if (ROOT / found).exists() else match["path"]

    return LINK.sub(target, model_types.fill(measurements.fill(markdown)))
