"""A call's arguments against a JSON Schema, and faults in words that a model can act on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jsonschema_rs
import msgspec

from rollout.errors import ToolError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

#: Characters of a wrong argument shown to the model.
MAX_SHOWN = 80
#: Characters of what it should have been.
MAX_EXPECTED = 240
#: Faults of one call that are listed.
MAX_FAULTS = 8

#: Keywords beside which a missing `additionalProperties` does not mean that all are listed.
_OPEN = frozenset(
    {
        *("$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties", "unevaluatedProperties"),
        *("additionalProperties", "propertyNames"),
    }
)

_WORDS = {
    "const": "{}",
    "enum": "one of {}",
    "exclusiveMaximum": "a number < {}",
    "exclusiveMinimum": "a number > {}",
    "maxItems": "at most {} items",
    "maxLength": "at most {} characters",
    "maximum": "a number <= {}",
    "minItems": "at least {} items",
    "minLength": "at least {} characters",
    "minimum": "a number >= {}",
    "multipleOf": "a multiple of {}",
    "pattern": "text that matches {}",
}


class ArgumentsError(ToolError):
    """A call's arguments are not what the tool takes; the text lists every fault."""

    def __init__(self, tool: str, faults: Iterable[str]) -> None:
        super().__init__(f"invalid arguments for {tool!r}: {'; '.join(faults)}")


class SchemaCheck:
    """Checks arguments against the `parameters` of a tool's schema.

    Where these list `properties` and say nothing about further ones, there are none.

    Args:
        tool: Its name, for messages.
        parameters: A JSON Schema, draft 2020-12; None takes any arguments.

    Raises:
        ToolError: It is no JSON Schema.
    """

    def __init__(self, tool: str, parameters: Mapping[str, Any] | None) -> None:
        self._tool = tool
        self._parameters: dict[str, Any] = _allow_null(dict(parameters or {}))
        if "properties" in self._parameters and not _OPEN & self._parameters.keys():
            self._parameters["additionalProperties"] = False
        self.names = tuple(self._parameters.get("properties", ()))
        try:
            self._validator = jsonschema_rs.Draft202012Validator(
                self._parameters, retriever=_refuse_remote
            )
        except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as error:
            place = _path(getattr(error, "instance_path", ()))
            text = getattr(error, "message", str(error)).partition("\n")[0]
            raise ToolError(
                f"tool {tool!r}: parameters{place} of its schema: {text:.{MAX_EXPECTED}}; expected "
                f"a JSON Schema"
            ) from None

    def check(self, arguments: Any) -> dict[str, Any]:
        """Return right arguments as they are.

        Raises:
            ArgumentsError: It names each missing, unknown and wrong one, and what was expected.
        """
        if not isinstance(arguments, Mapping):
            fault = (
                f"arguments = {show(arguments)}: expected an object, got {_name_kind(arguments)}"
            )
            raise ArgumentsError(self._tool, [fault])
        found = dict(arguments)
        try:
            errors = list(self._validator.iter_errors(found))
        except ValueError:  # tools_kwargs may hold what JSON has no word for
            plain = msgspec.to_builtins(found, enc_hook=lambda value: f"<{type(value).__name__}>")
            errors = list(self._validator.iter_errors(plain))
        if errors:
            raise ArgumentsError(self._tool, self._describe(errors))
        return found

    def _describe(self, errors: Sequence[Any]) -> list[str]:
        faults = list(dict.fromkeys(self._describe_each(errors)))
        more = len(faults) - MAX_FAULTS
        return [*faults[:MAX_FAULTS], f"and {more} more"] if more > 0 else faults

    def _describe_each(self, errors: Sequence[Any]) -> Iterator[str]:
        missing = [e for e in errors if _keyword(e) == "required"]
        unknown = [e for e in errors if _keyword(e) == "additionalProperties"]
        for error in errors:
            if _keyword(error) not in ("required", "additionalProperties"):
                yield self._describe_value(error)
        for place, names in _group_by_place(missing, lambda kind: [kind.property]).items():
            yield f"missing {quote_all(names)}{place}"
        for place, names in _group_by_place(unknown, lambda kind: kind.unexpected).items():
            taken = "" if place else f" (it takes {quote_all(self.names) or 'none'})"
            yield f"unknown {quote_all(names)}{place}{taken}"

    def _describe_value(self, error: Any) -> str:
        place = _path(error.instance_path).removeprefix(".") or "arguments"
        return f"{place} = {show(error.instance)}: expected {self._describe_expected(error)}"

    def _describe_expected(self, error: Any) -> str:
        keyword = _keyword(error)
        schema: Any = self._parameters
        try:
            for step in error.schema_path[:-1]:
                schema = schema[step]
        except (KeyError, IndexError, TypeError):  # the path leads through a reference
            schema = error.message
        if keyword == "type":
            types = schema["type"] if isinstance(schema, Mapping) else error.kind.types
            types = [types] if isinstance(types, str) else types
            return f"{' or '.join(types)}, got {_name_kind(error.instance)}"
        if keyword in _WORDS and isinstance(schema, Mapping) and keyword in schema:
            return _WORDS[keyword].format(show(schema[keyword], MAX_EXPECTED))
        return show(schema, MAX_EXPECTED)


def _allow_null(schema: Any) -> Any:
    """The schema with ``nullable``, which OpenAPI and transformers write, in JSON Schema's way."""
    if isinstance(schema, list):
        return [_allow_null(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: _allow_null(each) for key, each in schema.items()}
    if schema.get("nullable") is not True:
        return schema
    if "type" not in schema:
        return {"anyOf": [schema, {"type": "null"}]}
    types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    choices = {"enum": [*schema["enum"], None]} if "enum" in schema else {}
    return {**schema, **choices, "type": [*types, "null"]}


def _refuse_remote(uri: str) -> Any:
    raise ValueError(f"{uri} is not fetched; write the schema out")


def _keyword(error: Any) -> str:
    return str(error.kind.name)


def _group_by_place(errors: Iterable[Any], find_names: Any) -> dict[str, list[str]]:
    places: dict[str, list[str]] = {}
    for error in errors:
        path = _path(error.instance_path).removeprefix(".")
        place = f" in {path}" if path else ""
        places.setdefault(place, []).extend(find_names(error.kind))
    return places


def _path(steps: Iterable[Any]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)


def _name_kind(value: Any) -> str:
    names = {dict: "object", list: "array", tuple: "array", str: "string", bool: "boolean"}
    if value is None:
        return "null"
    return names.get(type(value), "number" if isinstance(value, int | float) else "object")


def quote_all(names: Iterable[str]) -> str:
    """The names, quoted, with commas between them."""
    return ", ".join(repr(name) for name in names)


def show(value: Any, limit: int = MAX_SHOWN) -> str:
    """`value` as JSON, or the name of its type, cut to `limit` characters."""
    try:
        text = msgspec.json.encode(value).decode()
    except Exception:  # it came from tools_kwargs and may be any object
        text = f"<{type(value).__name__}>"
    return text if len(text) <= limit else f"{text[:limit]}…"
