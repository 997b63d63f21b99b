"""Shapes of request bodies: types, ranges and lengths of the fields that the endpoint reads, as models of pydantic.

Fields that no model has are ignored here. What the values mean for the run is checked in `bodies`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from lit_async_rl.agents.api.errors import invalid, quoted
from lit_async_rl.agents.calls import MAX_STOP_CHARS, MAX_STOPS, AgentCallError
from lit_async_rl.problem import Role

MAX_CHOICES = 128
MAX_TOOLS = 128
MAX_TOP_LOGPROBS = 20
MAX_NAME_CHARS = 500  # of the model
CODES = {  # OpenAI's, by the type of pydantic's error
    "missing": "missing_required_parameter",
    "greater_than_equal": "integer_below_min_value",
    "less_than_equal": "integer_above_max_value",
    "too_long": "array_above_max_length",
    "string_too_long": "string_above_max_length",
}
AN_OBJECT = "Input should be an object"
WORDS = {"model_type": AN_OBJECT, "dict_type": AN_OBJECT}  # pydantic's name the classes of Python


class Shape(BaseModel):
    """An object of a body: no value is converted, and keys without a field are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)


# -- Messages and tools. `fail_fast`: a list of a million wrong items is one error -------------------------------------


class ContentPart(Shape):
    """Part of a content."""

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None

    @property
    def said(self) -> str | None:
        """Its text; None if it has none."""
        return self.refusal if self.type == "refusal" else self.text


def _check_said(part: ContentPart) -> ContentPart:
    if part.said is None:
        raise PydanticCustomError("missing_text", "A part of text needs its text")
    return part


def _checked_list(value: Any) -> Any:
    """A value that is a list, where a text is allowed as well."""
    if not isinstance(value, list):
        raise PydanticCustomError("list_type", "Input should be text or a list")
    return value


def _listed_content(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else _checked_list(content)


Content = Annotated[
    list[Annotated[ContentPart, AfterValidator(_check_said)]],
    Field(min_length=1, fail_fast=True),
    BeforeValidator(_listed_content),
]


def text_of(content: Sequence[ContentPart]) -> str:
    """Texts of a content, joined."""
    return "".join(part.said or "" for part in content)


class CalledFunction(Shape):
    """Function of a tool call."""

    name: str
    arguments: str


class MessageToolCall(Shape):
    """Tool call in a message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def as_message(self) -> dict[str, Any]:
        """The call without keys that nobody reads."""
        named = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": "function", "function": named}


class ChatMessage(Shape):
    """Message of a conversation."""

    role: Role
    content: Content | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None  # clients send other things than texts under these names: texts only are read
    thinking: Any = None
    function_call: Any = None
    audio: Any = None

    @property
    def text(self) -> str | None:
        """Texts of the content, joined; None without one."""
        return None if self.content is None else text_of(self.content)


def _check_properties(properties: dict[str, Any]) -> dict[str, Any]:
    """Refuses properties that are no schemas; one error, however many there are."""
    wrong = next((name for name, schema in properties.items() if not isinstance(schema, dict | bool)), None)
    if wrong is not None:
        raise PydanticCustomError("no_schema", "Each property should be a JSON schema")
    return properties


class Parameters(Shape):
    """JSON schema of an object; keywords within it are the model's to read, and are not checked."""

    type: Literal["object"] = "object"
    properties: Annotated[dict[str, Any], AfterValidator(_check_properties)] = {}
    required: list[Any] = []


FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Function(Shape):
    """Function of a tool."""

    name: FunctionName
    description: str | None = None
    parameters: Parameters | None = None


class Tool(Shape):
    """Tool that the policy may call."""

    type: Literal["function"]
    function: Function


class NamedSchema(Shape):
    """JSON schema of a content."""

    name: FunctionName
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class ContentFormat(Shape):
    """Format of a content."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: NamedSchema | None = None


# -- Bodies -----------------------------------------------------------------------------------------------------------


def _listed_stops(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else _checked_list(stop)


class StreamOptions(Shape):
    """Options of a stream."""

    include_usage: bool = False


ModelName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class Body(Shape):
    """Fields of all completions."""

    model: ModelName
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]],
        Field(max_length=MAX_STOPS, fail_fast=True),
        BeforeValidator(_listed_stops),
    ] = []
    seed: Seed | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False


class ChatBody(Body):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    response_format: ContentFormat | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    chat_template_kwargs: dict[str, Any] | None = None


class TextBody(Body):
    """Body of `/v1/completions`; `prompt` is a text, token ids, or a list of either."""

    prompt: Any
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


# -- Responses --------------------------------------------------------------------------------------------------------


class ItemPart(ContentPart):
    """Part of the content of an item."""

    type: Literal["text", "input_text", "output_text", "refusal"]  # type: ignore[assignment]


ItemContent = Annotated[
    list[Annotated[ItemPart, AfterValidator(_check_said)]],
    Field(fail_fast=True),
    BeforeValidator(_listed_content),
]


class MessageItem(Shape):
    """Message of a conversation."""

    role: Literal["user", "assistant", "system", "developer"]
    content: ItemContent


class FunctionCallItem(Shape):
    """Tool call of the policy."""

    call_id: str
    name: str
    arguments: str

    def as_message(self) -> dict[str, Any]:
        """The call in the form of a chat message."""
        return {"id": self.call_id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class FunctionOutputItem(Shape):
    """Answer to a tool call."""

    call_id: str
    output: ItemContent


class ReasoningText(Shape):
    """Part of a reasoning."""

    text: str


class ReasoningItem(Shape):
    """Reasoning of the policy; without its text (a summary, or an encrypted text) it says nothing."""

    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None


class FunctionTool(Shape):
    """Tool that the policy may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: Parameters | None = None


class TextFormat(Shape):
    """Format of a content."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class TextOptions(Shape):
    """Options of the text of a response."""

    format: TextFormat | None = None
    verbosity: str | None = None


def _listed_input(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else _checked_list(given)


class ResponseBody(Shape):
    """Body of `/v1/responses`; items of the input are shaped one by one."""

    model: ModelName
    input: Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True), BeforeValidator(_listed_input)]
    instructions: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextOptions | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = []
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    seed: Seed | None = None
    stream: bool = False
    stream_options: Any = None  # accepted, and not read
    return_token_ids: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


AnyShape = TypeVar("AnyShape", bound=Shape)


def shaped(shape: type[AnyShape], value: Any, where: str = "") -> AnyShape:
    """The fields of a body, or of the object at a path in one.

    Raises:
        AgentCallError: a field has another shape; names its path and its value.
    """
    try:
        return shape.model_validate(value)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_context=False)[0], where) from None


def _refusal(error: ErrorDetails, where: str) -> AgentCallError:
    keys = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in error["loc"])
    path = f"{where}{keys}".removeprefix(".")
    kind = error["type"]
    code = CODES.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value")
    if "parameters" in error["loc"]:
        code = "invalid_function_parameters"
    got = "" if kind == "missing" else f", got {quoted(error['input'])}"
    return invalid(path, f"{path}: {WORDS.get(kind, error['msg'])}{got}", code=code)
