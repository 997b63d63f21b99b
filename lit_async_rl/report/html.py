"""The page: one self-contained HTML file with styles, scripts and data; no other script can run in it."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from lit_async_rl.report.run_data import RunData

SCRIPTS = (  # in the order in which they depend on each other
    "vendor/echarts.min.js",
    "vendor/htm-preact.umd.js",
    "colors.js",
    "charts.js",
    "pipeline.js",
    "tokens.js",
    "rollouts.js",
    "compare.js",
    "app.js",
)
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<div id="app"><noscript>This report needs JavaScript.</noscript></div>
<script id="data" type="application/json">{data}</script>
{scripts}
</body>
</html>
"""


def write_report(
    run: str | Path, other: str | Path | None = None, out: str | Path | None = None, tape: str | Path | None = None
) -> Path:
    """Writes the report of a run, or the comparison of two, to one HTML file that opens without a network.

    Args:
        run: folder of the run.
        other: folder of a second run to compare with.
        out: file to write; None is `report.html` in the run's folder.
        tape: folder of the first run's rollout tape; None is `tape` in its folder.

    Raises:
        ValueError: a folder is not a run's folder.
        OSError: the file cannot be written.
    """
    share = 1.0 if other is None else 0.5
    runs = [RunData(run, tape, share)] + ([] if other is None else [RunData(other, share=share)])
    path = Path(run, "report.html") if out is None else Path(out)
    text = page([data.payload() for data in runs])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise OSError(f"out={str(path)!r} cannot be written: {error.strerror}") from error
    return path


def page(runs: Sequence[dict[str, Any]], live: bool = False) -> str:
    """The HTML of one or several runs; with `live` the page polls its server for changes."""
    folder = files("lit_async_rl.report") / "page"
    scripts = [folder.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS]
    style = folder.joinpath("style.css").read_text(encoding="utf-8")
    content = {"live": live, "made_at": time.time(), "runs": list(runs)}
    return PAGE.format(
        policy=security_policy(scripts, style, live),
        title="lit-async-rl: " + escape(" and ".join(run["name"] for run in runs), quote=False),
        style=style,
        data=embedded(content),
        scripts="\n".join(f"<script>{script}</script>" for script in scripts),
    )


def embedded(content: Any) -> str:
    """JSON for a script element: no text in it can end the element or begin a comment."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def security_policy(scripts: Sequence[str], style: str, live: bool) -> str:
    """Content security policy: only these scripts run, by digest, and nothing is loaded from elsewhere."""
    sources = {
        "default-src": "'none'",
        "script-src": " ".join(_digest(script) for script in scripts),
        "style-src": _digest(style),
        "img-src": "data:",
        "connect-src": "'self'" if live else "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in sources.items())


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
