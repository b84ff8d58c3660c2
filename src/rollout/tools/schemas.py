"""JSON Schemas of Python types: self-contained, without ``$ref``, as transformers writes them."""

from __future__ import annotations

import enum
import functools
import operator
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, get_args, get_origin

import attrs
import msgspec
import pydantic
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from rollout.errors import ToolError

#: Keys whose values are data or names, not schemas: copied as they are.
_VERBATIM = frozenset({"const", "default", "enum", "examples", "required"})
_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
_UNIONS = (typing.Union, types.UnionType)
#: What `msgspec.Meta` and pydantic's `Field` call alike.
_CONSTRAINTS = ("gt", "ge", "lt", "le", "multiple_of", "pattern", "min_length", "max_length")


class _SchemaWriter(GenerateJsonSchema):
    """Writes types as `transformers.utils.get_json_schema` does, where that knows them."""

    def nullable_schema(self, schema: Any) -> dict[str, Any]:
        return {**self.generate_inner(schema["schema"]), "nullable": True}

    def union_schema(self, schema: Any) -> dict[str, Any]:
        written = super().union_schema(schema)
        parts = written.get("anyOf", [])
        if not parts or any(part.keys() != {"type"} for part in parts):
            return written
        names = sorted({part["type"] for part in parts})
        return {"type": names[0] if len(names) == 1 else names}

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
    return {"type": names[0] if len(names) == 1 else names, "enum": values}


def _drop(schema: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """The schema without keys that say what goes without saying."""
    return {k: v for k, v in schema.items() if not (k in defaults and v == defaults[k])}


def write_schema(adapter: pydantic.TypeAdapter[Any]) -> dict[str, Any]:
    """The JSON Schema of values of this type.

    Raises:
        TypeError: The type, or one within it, contains itself.
        pydantic.PydanticUserError: JSON has no word for it.
    """
    return inline_references(adapter.json_schema(schema_generator=_SchemaWriter))


def adapt_type(annotation: Any) -> Any:
    """The annotation as pydantic reads it.

    Structs, attrs classes and TypedDicts within it are left to msgspec; the constraints and texts
    of ``Annotated`` become pydantic's.
    """
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        items = [_adapt_metadata(item) for item in annotation.__metadata__]
        return functools.reduce(
            lambda kind, item: Annotated[kind, item], items, adapt_type(args[0])
        )
    if isinstance(annotation, type) and (
        issubclass(annotation, msgspec.Struct)
        or attrs.has(annotation)
        or typing.is_typeddict(annotation)
    ):
        return Annotated[annotation, _ByMsgspec(annotation)]
    if not args or origin is typing.Literal:
        return annotation
    inner = tuple(adapt_type(arg) for arg in args)
    if inner == args:
        return annotation
    if origin in _UNIONS:
        return functools.reduce(operator.or_, inner)
    copy = getattr(annotation, "copy_with", None)
    return origin[inner] if copy is None else copy(inner)


def _adapt_metadata(item: Any) -> Any:
    if isinstance(item, str):
        return pydantic.Field(description=item)
    if not isinstance(item, msgspec.Meta):
        return item
    names = (*_CONSTRAINTS, "description", "examples")
    values = {name: getattr(item, name) for name in names}
    return pydantic.Field(**{name: each for name, each in values.items() if each is not None})


class _ByMsgspec:
    """Tells pydantic how to read a class that msgspec knows, and it does not."""

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def _read(self, value: Any) -> Any:
        try:
            return msgspec.convert(value, self.kind, str_keys=True)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return core_schema.no_info_plain_validator_function(
            self._read,
            serialization=core_schema.plain_serializer_function_ser_schema(msgspec.to_builtins),
        )

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        (written,), definitions = msgspec.json.schema_components([self.kind])
        return inline_references({**written, "$defs": definitions})


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
    if isinstance(schema.get("$ref"), str):
        name = schema["$ref"].rpartition("/")[2]
        if name not in definitions:
            raise TypeError(f"{schema['$ref']} leads nowhere")
        if name in within:
            raise TypeError(f"{name} contains itself; a tool's parameters must have a finite shape")
        siblings = {k: v for k, v in schema.items() if k not in ("$ref", "$defs", "definitions")}
        return {**_inline(definitions[name], definitions, (*within, name)), **siblings}
    return {
        key: _inline_value(key, value, definitions, within)
        for key, value in schema.items()
        # A discriminator maps tags to references; the tags stand in the alternatives as well.
        if key not in ("title", "discriminator", "$defs", "definitions")
    }


def _inline_value(
    key: str, value: Any, definitions: dict[str, Any], within: tuple[str, ...]
) -> Any:
    if key in _VERBATIM:
        return value
    if key == "properties":  # its keys are names, one of which may be "title" or "default"
        return {name: _inline(item, definitions, within) for name, item in value.items()}
    return _inline(value, definitions, within)


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
