"""Runs inside a vLLM server: the API key guards everything that it can be asked.

vLLM itself guards only some paths (/v1, /inference); whoever reaches the port could pause it, or make it load files.
Found by its name: `--middleware lit_async_rl.engines.vllm.api_key.RequireKey`.
"""

from __future__ import annotations

import os
import secrets
from typing import Any

OPEN = ("/health", "/ping")


class RequireKey:
    """ASGI middleware: 401 without the key in the environment variable VLLM_API_KEY.

    Raises:
        KeyError: there is no such variable.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        self._expected = b"Bearer " + os.environ["VLLM_API_KEY"].encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers itself where the key is wrong."""
        if scope["type"] == "http" and scope["path"] not in OPEN:
            found = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(found, self._expected):
                headers = [(b"content-type", b"application/json")]
                await send({"type": "http.response.start", "status": 401, "headers": headers})
                await send({"type": "http.response.body", "body": b'{"error": "wrong or no API key"}'})
                return
        await self.app(scope, receive, send)
