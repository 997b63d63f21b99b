"""A Markdown report as one self-contained HTML file."""

from __future__ import annotations

import base64
import html
import re
from pathlib import Path

VIEWPORT = '<meta name=viewport content="width=device-width, initial-scale=1">'
STYLE = """body { font: 15px/1.5 sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; font-size: 13px } td, th { padding: 2px 10px; text-align: right }
td:first-child, th:first-child { text-align: left } tr:nth-child(even) { background: #f4f4f4 }
img { max-width: 100% } code { background: #f4f4f4; padding: 1px 4px }"""


def as_html(title: str, lines: list[str], out: Path) -> str:
    """The report as one self-contained file."""
    body = []
    for line in lines:
        if line.startswith("!["):
            alt, _, path = line.removeprefix("![").removesuffix(")").partition("](")
            data = base64.b64encode((out / path).read_bytes()).decode()
            body.append(f'<p><img alt="{html.escape(alt)}" src="data:image/png;base64,{data}"></p>')
        elif line.startswith("|"):
            rows = [row.strip("| ").split(" | ") for row in line.splitlines() if not row.startswith("|---")]
            cells = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
            body.append("<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>")
        elif line.startswith("#"):
            level = len(line) - len(line.lstrip("#"))
            body.append(f"<h{level}>{html.escape(line.lstrip('# '))}</h{level}>")
        elif line.startswith("* "):
            body.append(f"<ul><li>{_inline(line[2:])}</li></ul>")
        else:
            body.append(f"<p>{_inline(line)}</p>")
    text = "".join(body).replace("</ul><ul>", "")
    head = f"<meta charset=utf-8><title>{html.escape(title)}</title>{VIEWPORT}<style>{STYLE}</style>"
    return f"<!doctype html><html lang=en>{head}{text}</html>"


def _inline(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
