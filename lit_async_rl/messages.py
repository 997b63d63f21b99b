"""Conversations, the input of chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")


def checked_messages(messages: Any) -> tuple[dict[str, Any], ...]:
    """Validates a conversation that a completion can follow, and drops keys that are None (as tables have them).

    Raises:
        ValueError: it is malformed, or ends with a system or developer message.
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages must be a list of at least one message, got {str(messages)[:80]!r}")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            raise ValueError(f"message {number} must have a role, one of {', '.join(ROLES)}: {str(message)[:80]!r}")
        if not isinstance(message.get("content"), str):
            raise ValueError(f"message {number} must have text as its content: {str(message)[:80]!r}")
    if messages[-1]["role"] in ("system", "developer"):
        raise ValueError(f"the last message must be from the user, a tool or the assistant, not {messages[-1]['role']}")
    return tuple({key: value for key, value in message.items() if value is not None} for message in messages)
