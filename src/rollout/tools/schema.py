"""JSON Schemas from type annotations: self-contained, without ``$ref``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from rollout.errors import ToolError
from rollout.tools.annotations import IN_ORDER
from rollout.tools.pydantic_types import model_schema

#: Keys whose values are data or names, not schemas: copied as they are.
_VERBATIM = frozenset({"const", "default", "enum", "examples", "required"})

_ENUM_TYPES = {str: "string", int: "integer"}


def schema_of(annotation: Any) -> dict[str, Any]:
    """The JSON Schema of values of this type, as msgspec checks them.

    Raises:
        TypeError: The type, or one within it, is none that JSON can carry, or contains itself.
    """
    (schema,), definitions = msgspec.json.schema_components([annotation], schema_hook=model_schema)
    inlined: dict[str, Any] = _inlined(schema, definitions, ())
    return inlined


def inline_references(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without ``$ref`` and ``$defs``; titles are left out.

    Raises:
        TypeError: A type within it contains itself, or a reference leads nowhere.
    """
    inlined: dict[str, Any] = _inlined(schema, {}, ())
    return inlined


def _inlined(schema: Any, definitions: dict[str, Any], within: tuple[str, ...]) -> Any:
    """`schema` with every reference replaced by what it names; titles are noise to a model."""
    if isinstance(schema, list):
        return [_inlined(item, definitions, within) for item in schema]
    if not isinstance(schema, dict):
        return schema
    definitions = {**definitions, **schema.get("$defs", {}), **schema.get("definitions", {})}
    if isinstance(schema.get("$ref"), str):
        name = schema["$ref"].rpartition("/")[2]
        if name not in definitions:
            raise TypeError(f"{schema['$ref']} leads nowhere")
        if name in within:
            raise TypeError(f"{name} contains itself; a tool's parameters must have a finite shape")
        siblings = {key: value for key, value in schema.items() if key != "$ref"}
        return _ordered({**_inlined(definitions[name], definitions, (*within, name)), **siblings})
    inlined = {
        key: _inlined_value(key, value, definitions, within)
        for key, value in schema.items()
        # A discriminator maps tags to references; the tags stand in the alternatives as well.
        if key not in ("title", "discriminator", "$defs", "definitions")
    }
    return _ordered(_type_of_enum(inlined) | inlined)


def _ordered(schema: dict[str, Any]) -> dict[str, Any]:
    choices = schema.pop(IN_ORDER, None)
    return schema if choices is None else {**schema, "enum": choices}


def _type_of_enum(schema: dict[str, Any]) -> dict[str, Any]:
    """The type that msgspec leaves out beside an enum, and that chat templates read."""
    kinds = {type(value) for value in schema.get("enum", ())}
    if "type" in schema or len(kinds) != 1:
        return {}
    name = _ENUM_TYPES.get(kinds.pop())
    return {"type": name} if name else {}


def _inlined_value(
    key: str, value: Any, definitions: dict[str, Any], within: tuple[str, ...]
) -> Any:
    if key in _VERBATIM:
        return value
    if key == "properties":  # its keys are names, one of which may be "title" or "default"
        return {name: _inlined(item, definitions, within) for name, item in value.items()}
    return _inlined(value, definitions, within)


def as_openai_schema(schema: Any, what: str) -> dict[str, Any]:
    """A tool's schema in OpenAI's form; the function alone gets its envelope.

    Raises:
        ToolError: It is neither; the text begins with `what`.
    """
    if isinstance(schema, Mapping) and "function" not in schema and "name" in schema:
        # The function alone, or in the form of OpenAI's Responses API.
        inner = {key: value for key, value in schema.items() if key != "type"}
        schema = {"type": "function", "function": inner}
    function = schema.get("function") if isinstance(schema, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ToolError(
            f"{what} = {schema!r:.200}: expected "
            "{'type': 'function', 'function': {'name': ..., 'parameters': {...}}}"
        )
    return schema if isinstance(schema, dict) else dict(schema)
