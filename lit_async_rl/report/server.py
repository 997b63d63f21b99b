"""Server of a run's report on the loopback interface, updated during the run."""

from __future__ import annotations

import json
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from lit_async_rl.report.html import embedded, page
from lit_async_rl.report.run_data import RunData

HOST = "127.0.0.1"


class ReportServer(ThreadingHTTPServer):
    """Serves `/` (the page) and `/data` (its changed parts), on the loopback interface only.

    Args:
        run: run folder to serve.
        port: port of the server; 0 chooses a free one.

    Raises:
        OSError: the port is in use.
    """

    def __init__(self, run: RunData, port: int) -> None:
        super().__init__((HOST, port), _Handler)
        self.run = run
        self.lock = threading.Lock()  # each request has a thread, and reading changes the offsets of the run's files

    @property
    def address(self) -> str:
        """Address of the page."""
        return f"http://{HOST}:{self.server_port}/"

    def page(self) -> str:
        """HTML of the whole page with the present data."""
        with self.lock:
            return page([self.run.payload()], live=True)

    def changes(self, known: dict[str, int]) -> str:
        """JSON of the parts that changed since the numbers in `known`, see `RunData.refresh`."""
        with self.lock:
            return embedded(self.run.payload(known))


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    timeout = 30  # seconds without a request on an open connection

    def do_GET(self) -> None:
        # against DNS rebinding: a page of another origin could read this one through a name that resolves to loopback
        host = (self.headers.get("Host") or "").rsplit(":", 1)[0]
        if host not in (HOST, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN)
            return
        url = urlsplit(self.path)
        if url.path == "/":
            self._send(self.server.page(), "text/html; charset=utf-8")
        elif url.path == "/data":
            self._send(self.server.changes(_known(url.query)), "application/json")
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send(self, text: str, kind: str) -> None:
        data = text.encode()
        self.send_response(HTTPStatus.OK)
        headers = {"Content-Type": kind, "Content-Length": str(len(data)), "Cache-Control": "no-store"}
        headers |= {"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Does nothing, so that requests are not printed to the terminal."""


def _known(query: str) -> dict[str, int]:
    try:
        known = json.loads(parse_qs(query).get("known", ["{}"])[0])
    except ValueError:
        return {}
    return known if isinstance(known, dict) else {}
