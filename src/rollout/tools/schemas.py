"""JSON Schemas of tools: their OpenAI form, without references, and calls checked against them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from typing import Any

import jsonschema_rs

from rollout.errors import ToolError

#: So many faults are named: a model that repeats itself may make thousands.
MAX_FAULTS = 20
#: Keys whose values are data or names, not schemas: copied as they are.
_VERBATIM = frozenset({"const", "default", "enum", "examples", "required"})
#: Keys that are left out; the tags that a discriminator maps stand in the alternatives as well.
_DROPPED = frozenset({"$ref", "$comment", "title", "discriminator", "$defs", "definitions"})


class SchemaCheck:
    """Checks arguments against the `parameters` of a tool, a JSON Schema of draft 2020-12 or None.

    Where these list `properties` and say nothing about further ones, there are none.
    """

    def __init__(self, tool: str, parameters: Mapping[str, Any] | None) -> None:
        self._tool = tool
        self._schema: dict[str, Any] = _allow_null(dict(parameters or {}))
        if "properties" in self._schema:
            self._schema.setdefault("unevaluatedProperties", False)
        try:
            self._validator = jsonschema_rs.Draft202012Validator(
                self._schema, retriever=_refuse_remote
            )
        except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as error:
            path = write_path(["parameters", *getattr(error, "instance_path", ())])
            text = getattr(error, "message", str(error)).partition("\n")[0]
            raise ToolError(
                f"tool {tool!r}: {path} of its schema: {text:.240}; expected a JSON Schema"
            ) from None

    def check(self, arguments: Any, fixed: Collection[str] = ()) -> dict[str, Any]:
        """Return right arguments, but for those that are `fixed`: the prompt has these.

        A `ToolError` names each missing, unknown and wrong one, the first 20 of them.
        """
        if not isinstance(arguments, Mapping):
            text = f"{arguments!r:.80} is no object of arguments"
            raise ToolError(f"invalid arguments for {self._tool!r}: {text}")
        found = {name: value for name, value in arguments.items() if name not in fixed}
        try:
            errors = (
                error
                for error in self._validator.iter_errors(found)
                if error.instance_path or getattr(error.kind, "property", None) not in fixed
            )
            faults = [self._describe(error) for error in islice(errors, MAX_FAULTS)]
            faults += ["and more" for _ in islice(errors, 1)]
        except (TypeError, ValueError) as error:  # what JSON cannot hold
            faults = [f"{type(error).__name__}: {error!s:.200}"]
        if faults:
            text = "; ".join(dict.fromkeys(faults))
            raise ToolError(f"invalid arguments for {self._tool!r}: {text}")
        return found

    def _describe(self, error: Any) -> str:
        keyword, path = error.kind.name, write_path(error.instance_path)
        where = f" in {path}" if path else ""
        if keyword == "required":
            return f"missing {error.kind.property!r}{where}"
        if keyword in ("additionalProperties", "unevaluatedProperties"):
            taken = f" (it takes {quote_all(self._schema.get('properties', ()))})"
            return f"unknown {quote_all(error.kind.unexpected)}{where or taken}"
        # Of anyOf and oneOf, what is wrong with it by each of the schemas.
        nested = (each.message for branch in getattr(error.kind, "context", ()) for each in branch)
        message = "; and ".join(islice(nested, MAX_FAULTS)) or error.message
        return f"{path or 'arguments'}: {message:.240}"


def _allow_null(schema: Any) -> Any:
    """The schema with ``nullable``, which OpenAPI and transformers write, in JSON Schema's way."""
    if isinstance(schema, list):
        return [_allow_null(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: _allow_null(each) for key, each in schema.items()}
    if schema.get("nullable") is not True:  # a property may have that name
        return schema
    del schema["nullable"]
    if isinstance(schema.get("type"), str) and "enum" not in schema:
        return {**schema, "type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def _refuse_remote(uri: str) -> Any:
    raise ValueError(f"{uri} is not fetched; write the schema out")


def write_path(steps: Iterable[Any]) -> str:
    """Where a value is within others, such as ``points[0].x``."""
    texts = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return "".join(texts).removeprefix(".")


def quote_all(names: Iterable[str]) -> str:
    """The names, quoted, with commas between them; "none" of none."""
    return ", ".join(map(repr, names)) or "none"


def as_openai_schema(schema: Any, what: str) -> dict[str, Any]:
    """A tool's schema in OpenAI's form; the function alone gets its envelope."""
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


def inline_references(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema without ``$ref``, ``$defs`` and titles; a `TypeError` where it contains itself."""
    definitions = {**schema.get("definitions", {}), **schema.get("$defs", {})}

    def inline(node: Any, within: tuple[str, ...] = ()) -> Any:
        if isinstance(node, list):
            return [inline(each, within) for each in node]
        if not isinstance(node, dict):
            return node
        inlined: dict[str, Any] = {}
        if isinstance(ref := node.get("$ref"), str):
            name = ref.rpartition("/")[2]
            if name not in definitions:
                raise TypeError(f"{ref} leads nowhere")
            if name in within:
                text = f"{name} contains itself; a tool's parameters must have a finite shape"
                raise TypeError(text)
            inlined = inline(definitions[name], (*within, name))
        for key, value in node.items():
            if key == "properties":  # its keys are names, one of which may be "title" or "default"
                inlined[key] = {name: inline(each, within) for name, each in value.items()}
            elif key not in _DROPPED:
                inlined[key] = value if key in _VERBATIM else inline(value, within)
        return inlined

    return dict(inline(dict(schema)))
