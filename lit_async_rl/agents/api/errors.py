"""Errors of the API, in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
from typing import Any

from lit_async_rl.agents.api.exchange import ApiResponse

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
MAX_QUOTED_CHARS = 80
TOO_MANY = 429


class ApiError(Exception):
    """An answer other than 200. The official client raises it as the exception of its status.

    Attributes:
        status: HTTP status; the official client tries 408, 409, 429 and 5xx again, and no other.
        message: what is wrong, with the value.
        param: path of the parameter, such as `messages[2].role`; None if it is none.
        code: short name, which programs compare; None if there is none.
        kind: `type` of the error.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = INVALID_REQUEST,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind

    @property
    def response(self) -> ApiResponse:
        """The answer as it is sent."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return ApiResponse(
            status=self.status,
            body=json.dumps({"error": error}, ensure_ascii=False).encode(errors="replace"),
            # the official client tries 429 again, which would be refused again
            headers={"x-should-retry": "false"} if self.status == TOO_MANY else {},
        )


def invalid(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """400: a parameter has a value that it cannot have."""
    return ApiError(400, message, param=param, code=code)


def not_sampled(param: str, message: str) -> ApiError:
    """400: the option would change the distribution that tokens are sampled from, which the trainer would not know."""
    return ApiError(400, message, param=param, code="unsupported_value")


def quoted(value: Any) -> str:
    """A value for a message, at most `MAX_QUOTED_CHARS` long."""
    text = repr(value)
    return text if len(text) <= MAX_QUOTED_CHARS else text[:MAX_QUOTED_CHARS] + "..."
