"""Calls and answers of the API, however they travel: over HTTP, or from a client in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

ATTEMPT = "x-stainless-retry-count"
IDEMPOTENCY_KEY = "idempotency-key"


@dataclass(frozen=True, kw_only=True)
class ApiRequest:
    """A request, however it came.

    Attributes:
        path: of the URL.
        body: JSON.
        headers: by their names in lower case.
        method: of HTTP.
    """

    path: str
    body: bytes
    headers: Mapping[str, str]
    method: str = "POST"


@dataclass(frozen=True, kw_only=True)
class ApiResponse:
    """An answer as it is sent.

    Attributes:
        body: its bytes.
        status: HTTP status.
        media_type: of the body.
        headers: further headers.
        lose: call it if the client has gone without reading the answer; None if that need not be known.
    """

    body: bytes
    status: int = 200
    media_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    lose: Callable[[], None] | None = field(default=None, compare=False, repr=False)
