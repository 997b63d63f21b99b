"""Problems: what the policy is asked, and the score of its answer.

Imports nothing large: rewards and agents in processes of their own start in a tenth of a second, without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Role = Literal["system", "developer", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = get_args(Role)
TOOLS = "tools"  # keys of a prompt's metadata that its chat template gets, named as TRL and verl name these columns
TEMPLATE_KWARGS = "chat_template_kwargs"


def checked_messages(messages: Any) -> tuple[dict[str, Any], ...]:
    """Validates a conversation that a completion can follow, and drops keys that are None (as in tables).

    Content in parts (`[{"type": "text", "text": ...}]`) becomes their joined texts.

    Raises:
        ValueError: it is malformed, or ends with a system or developer message.
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"messages must be a list of at least one message, got {str(messages)[:80]!r}")
    checked = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            raise ValueError(f"message {number} must have a role, one of {', '.join(ROLES)}: {str(message)[:80]!r}")
        content = _joined_parts(message.get("content"), number)
        if not isinstance(content, str):
            raise ValueError(f"message {number} must have text as its content: {str(message)[:80]!r}")
        checked.append({key: value for key, value in message.items() if value is not None} | {"content": content})
    if messages[-1]["role"] in ("system", "developer"):
        raise ValueError(f"the last message must be from the user, a tool or the assistant, not {messages[-1]['role']}")
    return tuple(checked)


def _joined_parts(content: Any, number: int) -> Any:
    """The text of a content that is a list of parts; any other as it is.

    Raises:
        ValueError: a part is no text (an image, say).
    """
    if not isinstance(content, list | tuple) or not content:
        return content
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"message {number} has a part of type {kind}; only text parts can be read")
    return "".join(part["text"] for part in content)


class Score(float):
    """A reward combined from named parts; a float wherever these do not matter.

    Attributes:
        parts: the parts that apply to the completion, by name.
    """

    parts: Mapping[str, float]

    def __new__(cls, value: float, parts: Mapping[str, float]) -> Score:
        score = super().__new__(cls, value)
        score.parts = dict(parts)
        return score


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One problem: the input of the policy (`text` or `messages`), and the data for its reward.

    Example: `Prompt(text="sort 3142=", answer="1234")`, or
    `Prompt(messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}], answer="4")`.

    Attributes:
        text: the prompt; for messages a readable form for logs, one line `role: content` per message.
        messages: conversation for the model's chat template. Each message has a `role` (system, developer, user,
            assistant or tool) and its text, `content`; the template gets other keys, too.
        answer: reference answer.
        metadata: passed to the reward unchanged.
        other_answers: accepted besides `answer`. This library's rewards count the one that fits best.
        answer_value: the record's answer, such as a number or a list, for rewards in TRL's form.

    Raises:
        ValueError: neither text nor messages are given, or both; or a message is malformed.
    """

    text: str = None  # type: ignore[assignment]  # set in __post_init__
    messages: Sequence[Mapping[str, Any]] | None = None
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    other_answers: Sequence[str] = ()
    answer_value: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.messages is not None:
            messages = checked_messages(self.messages)
            rendering = "\n".join(f"{message['role']}: {message['content']}" for message in messages)
            if self.text is not None and self.text != rendering:
                raise ValueError("a prompt is text or messages, not both")
            object.__setattr__(self, "messages", messages)
            object.__setattr__(self, "text", rendering)
        elif self.text is None:
            raise ValueError("a prompt needs text or messages")

    @property
    def answers(self) -> tuple[str, ...]:
        """All accepted answers."""
        return (() if self.answer is None else (self.answer,)) + tuple(self.other_answers)
