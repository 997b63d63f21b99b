"""Errors of the API, in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
from typing import Any

from lit_async_rl.agents.api.exchange import ApiResponse
from lit_async_rl.agents.calls import AgentCallError

MAX_QUOTED_CHARS = 80
TOO_MANY = 429


def response_of(error: AgentCallError) -> ApiResponse:
    """The answer to a call that failed. The official client raises it as the exception of its status.

    It retries 408, 409 and 5xx, but by our header not 429, which would be refused again.
    """
    described = {
        "message": str(error),
        "type": "server_error" if error.status >= 500 else "invalid_request_error",
        "param": error.param,
        "code": error.code,
    }
    return ApiResponse(
        status=error.status,
        body=json.dumps({"error": described}, ensure_ascii=False).encode(errors="replace"),
        headers={"x-should-retry": "false"} if error.status == TOO_MANY else {},
    )


def invalid(param: str, message: str, code: str = "invalid_value") -> AgentCallError:
    """400: a parameter has a value that it cannot have."""
    return AgentCallError(message, code, param=param)


def not_sampled(param: str, message: str) -> AgentCallError:
    """400: the option would change the sampling distribution, which the trainer would not know."""
    return AgentCallError(message, "unsupported_value", param=param)


def quoted(value: Any) -> str:
    """A value for a message, at most `MAX_QUOTED_CHARS` long."""
    text = repr(value)
    return text if len(text) <= MAX_QUOTED_CHARS else text[:MAX_QUOTED_CHARS] + "..."
