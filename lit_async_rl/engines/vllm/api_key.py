"""ASGI middleware of a vLLM server: requires the API key on every path.

vLLM itself protects only some paths (/v1, /inference); without this, any client could pause the server or make it load
files. Loaded by name: `--middleware lit_async_rl.engines.vllm.api_key.RequireKey`.
"""

from __future__ import annotations

import os
import secrets
from typing import Any

PATHS_WITHOUT_KEY = ("/health", "/ping")


class RequireKey:
    """ASGI middleware: responds 401 without the key in the environment variable VLLM_API_KEY.

    Raises:
        KeyError: the variable is not set.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        self._expected = b"Bearer " + os.environ["VLLM_API_KEY"].encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Responds 401 to a wrong or missing key; otherwise passes the request on."""
        if scope["type"] == "http" and scope["path"] not in PATHS_WITHOUT_KEY:
            received = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(received, self._expected):  # constant time, which reveals no prefix
                headers = [(b"content-type", b"application/json")]
                await send({"type": "http.response.start", "status": 401, "headers": headers})
                await send({"type": "http.response.body", "body": b'{"error": "wrong or no API key"}'})
                return
        await self.app(scope, receive, send)
