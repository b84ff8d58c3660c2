"""Text to values by the JSON schema of a tool: for formats that write arguments without types.

A schema says which types a value may have: ``type`` (one or several), ``enum``, ``const``,
``nullable``, ``anyOf``, ``oneOf``, ``allOf``, ``$ref`` within the schema. Where the text writes a
value of an allowed type other than a string, it is that value; else the text stays the string it
is, and the check of arguments tells the model where that is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rollout.chat.parsers.pythonic import read_bare
from rollout.chat.parsers.registry import read_function

_ALL = {"null", "boolean", "integer", "number", "object", "array", "string"}
#: Types whose values no text stands in.
_PLAIN = {"null", "boolean", "integer", "number"}
_TYPES = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string"}
_TYPES |= {dict: "object", list: "array"}
#: Names that tool authors use in place of JSON schema's.
_ALIASES = {"int": "integer", "float": "number", "double": "number", "bool": "boolean"}
_ALIASES |= {"str": "string", "text": "string", "dict": "object", "list": "array"}
_ALIASES |= {"tuple": "array", "none": "null"}
#: Schemas may refer to themselves; no type hides deeper than this.
_MAX_STEPS = 5


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
        functions = (read_function(tool) for tool in tools)
        found = (each for each in functions if each.get("name") == function)
        self._root = _mapping(next(found, {}).get("parameters"))
        self._properties = _mapping(_resolve(self._root, self._root).get("properties"))
        self._untyped = _ALL if untyped_as_json else {"string"}

    def declares(self, name: str) -> bool:
        """Whether the function has a parameter `name`; any, where its schema names none."""
        is_open = not self._properties or bool(self._root.get("additionalProperties"))
        return is_open or name in self._properties

    def may_be_text(self, name: str) -> bool:
        """Whether the parameter `name` may have a value in which any text may stand."""
        return not self._list_types(name) <= _PLAIN

    def convert(self, name: str, text: str) -> Any:
        """What `text` means as the parameter `name`."""
        schema, body = _resolve(self._properties.get(name), self._root), text.strip()
        types = self._list_types(name)
        for choice in _items(schema, "enum"):
            with suppress(ValueError, TypeError, RecursionError):  # what a tool's author may write
                if body == (choice if isinstance(choice, str) else json.dumps(choice)):
                    return choice
        if types == {"string"}:
            return text
        with suppress(ValueError):
            value = read_bare(body)
            kind = _TYPES[type(value)]
            if kind == "number" and "integer" in types and value.is_integer():
                return int(value)
            if kind in types or (kind == "integer" and "number" in types):
                return value
        return text

    def _list_types(self, name: str) -> set[str]:
        return _list_types(self._properties.get(name), self._root) or self._untyped


def _resolve(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """`schema`, or what its ``$ref`` points to within `root`."""
    for _ in range(_MAX_STEPS):
        reference = _mapping(schema).get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            break
        schema = root
        for step in reference[1:].split("/")[1:]:
            schema = _mapping(schema).get(step.replace("~1", "/").replace("~0", "~"))
    return _mapping(schema)


def _list_types(schema: Any, root: Mapping[str, Any], steps: int = _MAX_STEPS) -> set[str]:
    """The types that `schema` allows; none where it says nothing of them."""
    schema = _resolve(schema, root)
    names = schema.get("type")
    names = [names] if isinstance(names, str) else names if isinstance(names, Sequence) else []
    types = {_ALIASES.get(name.lower(), name.lower()) for name in names if isinstance(name, str)}
    types &= _ALL
    if not types:  # the first of these that says something
        choices = _items(schema, "enum") or ([schema["const"]] if "const" in schema else [])
        types = {_TYPES.get(type(choice), "string") for choice in choices}
    if not types and steps:
        parts = [_list_types(part, root, steps - 1) for part in _items(schema, "anyOf", "oneOf")]
        parts = parts if all(parts) else []
        parts += [_list_types(part, root, steps - 1) for part in _items(schema, "allOf")]
        types = set().union(*parts)
    if not types:
        keys = {"properties": "object", "items": "array"}
        types = {kind for key, kind in keys.items() if key in schema}
    if types and schema.get("nullable") is True:  # as OpenAPI and transformers write it
        types.add("null")
    return types


def _items(schema: Mapping[str, Any], *keys: str) -> list[Any]:
    lists = (schema.get(key) for key in keys)
    return [item for items in lists if isinstance(items, list | tuple) for item in items]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
