"""Shapes of request bodies: types, ranges and lengths of the fields that the endpoint reads, as models of pydantic.

Fields that no model has are ignored here. What the values mean for the run is checked in `bodies`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from lit_async_rl.agents.api.errors import invalid, quoted
from lit_async_rl.agents.calls import MAX_STOP_CHARS, MAX_STOPS, AgentCallError

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


def _checked_list(value: Any) -> Any:
    """A value that is a list, where a text is allowed as well."""
    if not isinstance(value, list):
        raise PydanticCustomError("list_type", "Input should be text or a list")
    return value


# `fail_fast`: a list of a million wrong items is one error. What the objects contain is checked where it is read, see
# `checked_call_messages` and `checked_tools`
Objects = Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
Tools = Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


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

    messages: Objects
    tools: Tools | None = None
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
    """Body of `/v1/responses`."""

    model: ModelName
    input: Annotated[Objects, BeforeValidator(_listed_input)]
    instructions: str | None = None
    tools: Tools | None = None
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


def shaped(shape: type[AnyShape], body: Mapping[str, Any]) -> AnyShape:
    """The fields of a body.

    Raises:
        AgentCallError: a field has another shape; names its path and its value.
    """
    try:
        return shape.model_validate(body)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_context=False)[0]) from None


def _refusal(error: ErrorDetails) -> AgentCallError:
    keys = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in error["loc"])
    path = keys.removeprefix(".")
    kind = error["type"]
    code = CODES.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value")
    got = "" if kind == "missing" else f", got {quoted(error['input'])}"
    return invalid(path, f"{path}: {WORDS.get(kind, error['msg'])}{got}", code=code)
