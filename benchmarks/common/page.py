"""A Markdown report as one self-contained HTML file."""

from __future__ import annotations

import base64
import html
from pathlib import Path

STYLE = """body { font: 15px/1.5 sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; font-size: 13px } td, th { padding: 2px 10px; text-align: right }
td:first-child, th:first-child { text-align: left } tr:nth-child(even) { background: #f4f4f4 }
img { max-width: 100% } code { background: #f4f4f4; padding: 1px 4px }"""


def as_html(title: str, lines: list[str], out: Path) -> str:
    """The report as one self-contained file."""
    body = []
    for line in lines:
        if line.startswith("!["):
            alt = html.escape(line[2:].partition("]")[0])
            path = line.partition("(")[2].rstrip(")")
            data = base64.b64encode((out / path).read_bytes()).decode()
            body.append(f'<p><img alt="{alt}" src="data:image/png;base64,{data}"></p>')
        elif line.startswith("|"):
            rows = [row.strip("| ").split(" | ") for row in line.splitlines() if not row.startswith("|---")]
            cells = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
            body.append("<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>")
        elif line.startswith("#"):
            level = len(line) - len(line.lstrip("#"))
            body.append(f"<h{level}>{html.escape(line.lstrip('# '))}</h{level}>")
        else:
            body.append(f"<p>{html.escape(line)}</p>")
    head = f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
    return head + "".join(body)
