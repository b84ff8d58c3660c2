"""JSON Schemas of Python types: self-contained, without ``$ref``, as transformers writes them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic.json_schema import GenerateJsonSchema

from rollout.errors import ToolError

if TYPE_CHECKING:
    import pydantic

#: Keys whose values are data or names, not schemas: copied as they are.
_VERBATIM = frozenset({"const", "default", "enum", "examples", "required"})
#: Keys that are left out. A discriminator maps tags to references; the tags stand in the
#: alternatives as well.
_DROPPED = frozenset({"title", "discriminator", "$defs", "definitions"})
_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}


class _SchemaWriter(GenerateJsonSchema):
    """Writes types as `transformers.utils.get_json_schema` does, where that knows them."""

    def nullable_schema(self, schema: Any) -> dict[str, Any]:
        return {**self.generate_inner(schema["schema"]), "nullable": True}

    def union_schema(self, schema: Any) -> dict[str, Any]:
        written = super().union_schema(schema)
        parts = written.get("anyOf", [])
        if not parts or any(part.keys() != {"type"} for part in parts):
            return written
        return {"type": _one_or_all(sorted({part["type"] for part in parts}))}

    def literal_schema(self, schema: Any) -> dict[str, Any]:
        values = [v.value if isinstance(v, enum.Enum) else v for v in schema["expected"]]
        return _write_choices(values) or super().literal_schema(schema)

    def enum_schema(self, schema: Any) -> dict[str, Any]:
        values = [member.value for member in schema["members"]]
        return _write_choices(values) or super().enum_schema(schema)

    def list_schema(self, schema: Any) -> dict[str, Any]:
        return _drop(super().list_schema(schema), items={})

    def tuple_schema(self, schema: Any) -> dict[str, Any]:
        written = _drop(super().tuple_schema(schema), items={})
        size = len(written.get("prefixItems", ()))
        return _drop(written, minItems=size, maxItems=size) if size else written

    def dict_schema(self, schema: Any) -> dict[str, Any]:
        return _drop(super().dict_schema(schema), additionalProperties=True)


def _write_choices(values: list[Any]) -> dict[str, Any]:
    """The schema of these values; empty where they are no JSON scalars."""
    if not all(type(value) in _TYPES for value in values):
        return {}
    names = list(dict.fromkeys(_TYPES[type(value)] for value in values))
    return {"type": _one_or_all(names), "enum": values}


def _one_or_all(names: list[str]) -> str | list[str]:
    return names[0] if len(names) == 1 else names


def _drop(schema: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """The schema without keys that only write down what counts anyway."""
    return {k: v for k, v in schema.items() if not (k in defaults and v == defaults[k])}


def write_schema(adapter: pydantic.TypeAdapter[Any]) -> dict[str, Any]:
    """The JSON Schema of values of this type.

    Raises:
        TypeError: The type, or one within it, contains itself.
        pydantic.PydanticUserError: JSON has no word for it.
    """
    return inline_references(adapter.json_schema(schema_generator=_SchemaWriter))


def inline_references(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema without ``$ref`` and ``$defs``; titles are left out.

    Raises:
        TypeError: A type within it contains itself, or a reference leads nowhere.
    """
    inlined: dict[str, Any] = _inline(dict(schema), {}, ())
    return inlined


def _inline(schema: Any, definitions: dict[str, Any], within: tuple[str, ...]) -> Any:
    if isinstance(schema, list):
        return [_inline(item, definitions, within) for item in schema]
    if not isinstance(schema, dict):
        return schema
    definitions = {**definitions, **schema.get("$defs", {}), **schema.get("definitions", {})}
    inlined: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str):
            name = value.rpartition("/")[2]
            if name not in definitions:
                raise TypeError(f"{value} leads nowhere")
            if name in within:
                text = f"{name} contains itself; a tool's parameters must have a finite shape"
                raise TypeError(text)
            inlined = {**_inline(definitions[name], definitions, (*within, name)), **inlined}
        elif key == "properties":  # its keys are names, one of which may be "title" or "default"
            inlined[key] = {n: _inline(each, definitions, within) for n, each in value.items()}
        elif key not in _DROPPED:
            is_data = key in _VERBATIM
            inlined[key] = value if is_data else _inline(value, definitions, within)
    return inlined


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
