"""Formats of a reply's content: JSON, by a schema or without."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from typing import Any

from lit_async_rl.agents.api.errors import invalid, quoted
from lit_async_rl.agents.calls import AgentCallError
from lit_async_rl.agents.reply_rules import ContentCheck
from lit_async_rl.agents.strict_json import refuse_constant

MAX_SCHEMA_CHARS = 100_000


def content_check(kind: str, schema: Mapping[str, Any] | None = None, param: str = "") -> ContentCheck | None:
    """The check of a format; None if every content has it.

    Args:
        kind: `text`, `json_object` or `json_schema`.
        schema: JSON schema, for the last of them.
        param: path of the schema in the body.

    Raises:
        AgentCallError: the schema is none, or it cannot be checked.
    """
    if kind == "text":
        return None
    if schema is None:
        return lambda content: _parsed(content)[1]
    return _schema_check(schema, param)


def _schema_check(schema: Mapping[str, Any], param: str) -> ContentCheck:
    try:
        jsonschema = importlib.import_module("jsonschema")
        referencing = importlib.import_module("referencing")
    except ImportError as error:
        raise AgentCallError(
            f'{param} needs the package jsonschema: pip install "lit-async-rl[agents]" ({error})',
            "unsupported_value",
            param=param,
        ) from None
    num_chars = len(json.dumps(schema, ensure_ascii=False))
    if num_chars > MAX_SCHEMA_CHARS:
        raise invalid(param, f"{param} must have at most {MAX_SCHEMA_CHARS} characters, got {num_chars}")
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except (jsonschema.SchemaError, RecursionError) as error:
        message = error.message if isinstance(error, jsonschema.SchemaError) else "it is nested too deeply"
        raise invalid(param, f"{param} is not a JSON schema: {message[:200]}") from None
    validator = kind(schema, registry=referencing.Registry())  # an empty one: nothing is fetched

    def fault(content: str) -> str | None:
        value, problem = _parsed(content)
        if problem is not None:
            return problem
        try:
            error = jsonschema.exceptions.best_match(validator.iter_errors(value))
        except referencing.exceptions.Unresolvable as missing:
            raise invalid(param, f"{param} refers to {quoted(missing.ref)}, which is not in it") from None
        except RecursionError:
            raise invalid(param, f"{param} has references that never end") from None
        return (
            None if error is None else f"its content at {error.json_path[:80]} breaks the schema: {error.message[:200]}"
        )

    return fault


def _parsed(content: str) -> tuple[Any, str | None]:
    """The JSON object of a content, or the fault of one that has none."""
    try:
        value = json.loads(content, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        return None, f"its content is not JSON: {str(error)[:100]}"
    return value, None if isinstance(value, dict) else "its content is JSON, and no object"
