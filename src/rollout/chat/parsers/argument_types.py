"""Text to values by the JSON schema of a tool: for formats that write arguments without types.

A schema says which types a value may have: ``type`` (one or several), ``enum``, ``const``,
``nullable``, ``anyOf``, ``oneOf``, ``allOf``, ``$ref`` within the schema. The first of null,
boolean, integer, number, object, array that is allowed and that the text writes is taken; else the
text stays the string it is, and the check of arguments tells the model where that is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rollout.chat.parsers.json_calls import read_number
from rollout.chat.parsers.python_calls import read_literal

_ORDER = ("null", "boolean", "integer", "number", "object", "array")
_ALL = frozenset((*_ORDER, "string"))
#: Types whose values no text stands in.
_PLAIN = frozenset(("null", "boolean", "integer", "number"))
_TYPES = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string"}
#: Names that tool authors use in place of JSON schema's.
_ALIASES = {
    "int": "integer",
    "float": "number",
    "double": "number",
    "bool": "boolean",
    "str": "string",
    "text": "string",
    "dict": "object",
    "list": "array",
    "tuple": "array",
    "none": "null",
}
#: Schemas may refer to themselves; no type hides deeper than this.
_MAX_STEPS = 32

_INTEGER = re.compile(r"[+-]?[0-9]+(?:\.0*)?")


class ArgumentTypes:
    """The declared parameters of one function.

    Args:
        tools: OpenAI-style function dicts; malformed ones declare nothing.
        function: Its name.
        untyped_as_json: What a parameter without a declared type is: whatever JSON other than a
            string the text writes, or always the text.
    """

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]],
        function: str,
        *,
        untyped_as_json: bool = False,
    ) -> None:
        self._root = _parameters(tools, function)
        self._properties = _properties(self._root, self._root)
        self._untyped = _ALL if untyped_as_json else frozenset(("string",))
        self._known: dict[str, tuple[list[Any], frozenset[str]]] = {}

    def declares(self, name: str) -> bool:
        """Whether the function has a parameter `name`; any, where its schema names none."""
        is_open = not self._properties or bool(self._root.get("additionalProperties"))
        return is_open or name in self._properties

    def may_be_text(self, name: str) -> bool:
        """Whether the parameter `name` may have a value in which any text may stand."""
        return not self._of(name)[1] <= _PLAIN

    def value(self, name: str, text: str) -> Any:
        """What `text` means as the parameter `name`."""
        choices, types = self._of(name)
        for choice in choices:
            if _is_written(choice, text.strip()):
                return choice
        for kind in _ORDER:
            if kind in types:
                with suppress(ValueError):
                    return _read(kind, text.strip())
        return text

    def _of(self, name: str) -> tuple[list[Any], frozenset[str]]:
        """The choices and the types of a parameter."""
        if name not in self._known:
            schema = _resolved(self._properties.get(name), self._root)
            types = _types(schema, self._root, _MAX_STEPS)
            self._known[name] = (_parts(schema, "enum"), self._untyped if types is None else types)
        return self._known[name]


def function_name(tool: Mapping[str, Any]) -> str | None:
    """The name that an OpenAI-style function dict declares; None where it is malformed."""
    name = _function(tool).get("name")
    return name if isinstance(name, str) else None


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return _mapping(_mapping(tool).get("function", tool))


def _parameters(tools: Sequence[Mapping[str, Any]], function: str) -> Mapping[str, Any]:
    declared = (_function(tool) for tool in tools if function_name(tool) == function)
    return next((_mapping(tool.get("parameters")) for tool in declared), {})


def _properties(schema: Any, root: Mapping[str, Any], steps: int = 8) -> dict[str, Any]:
    """The properties by name; those of alternatives too, where the first to name one counts."""
    schema = _resolved(schema, root)
    found = dict(_mapping(schema.get("properties")))
    if steps:
        for part in _parts(schema, "anyOf", "oneOf", "allOf"):
            found = {**_properties(part, root, steps - 1), **found}
    return found


def _resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """`schema`, or what its ``$ref`` points to within `root`."""
    for _ in range(_MAX_STEPS):
        reference = _mapping(schema).get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            break
        schema = root
        for step in reference[1:].split("/")[1:]:
            schema = _mapping(schema).get(step.replace("~1", "/").replace("~0", "~"))
    return _mapping(schema)


def _types(schema: Any, root: Mapping[str, Any], steps: int) -> frozenset[str] | None:
    """The types that `schema` allows; None where it says nothing of them."""
    schema = _resolved(schema, root)
    if not steps or not schema:
        return None
    if schema.get("nullable") is True:  # as OpenAPI and transformers write it
        types = _types({**schema, "nullable": False}, root, steps - 1)
        return None if types is None else types | {"null"}
    allowed = [_declared(schema)]
    choices = _parts(schema, "enum") or ([schema["const"]] if "const" in schema else [])
    if choices:
        allowed.append(frozenset(map(_find_type, choices)))
    for key in ("anyOf", "oneOf"):
        parts = [_types(part, root, steps // 2) for part in _parts(schema, key)]
        if parts:
            allowed.append(None if None in parts else frozenset().union(*filter(None, parts)))
    allowed += [_types(part, root, steps // 2) for part in _parts(schema, "allOf")]
    known = [types for types in allowed if types is not None]
    if known:
        return frozenset.intersection(*known) or known[0]
    if "properties" in schema:
        return frozenset(("object",))
    return frozenset(("array",)) if "items" in schema else None


def _declared(schema: Mapping[str, Any]) -> frozenset[str] | None:
    named = schema.get("type")
    names = [named] if isinstance(named, str) else named if isinstance(named, Sequence) else []
    types = {_ALIASES.get(name.lower(), name.lower()) for name in names if isinstance(name, str)}
    return frozenset(types & _ALL) or None


def _is_written(choice: Any, text: str) -> bool:
    if isinstance(choice, str):
        return choice == text
    try:
        return json.dumps(choice) == text
    except (TypeError, ValueError, RecursionError):
        return False


def _read(name: str, body: str) -> Any:
    """`body` as a value of this type; a ValueError where it writes none."""
    match name:
        case "null" if body in ("null", "None"):
            return None
        case "boolean" if body.lower() in ("true", "false"):
            return body.lower() == "true"
        case "integer" if _INTEGER.fullmatch(body):
            return int(body.partition(".")[0])
        case "number":
            return read_number(body)
        case "object" if body.startswith("{"):
            if isinstance(value := read_literal(body), dict):
                return value
        case "array" if body.startswith(("[", "(")):
            if isinstance(value := read_literal(body), list):
                return value
    raise ValueError(f"no {name}")


def _find_type(value: Any) -> str:
    name = _TYPES.get(type(value))
    return name or ("object" if isinstance(value, Mapping) else "array")


def _parts(schema: Mapping[str, Any], *keys: str) -> list[Any]:
    lists = (schema.get(key) for key in keys)
    return [part for parts in lists if isinstance(parts, list | tuple) for part in parts]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
