"""Constraints and descriptions that annotations carry, in the terms of msgspec.

`Annotated[int, ...]` may hold `msgspec.Meta`, pydantic's `Field`, the types of annotated-types, or
a text that describes the value. What they have in common are the names of their attributes; none
of those packages is imported here.
"""

from __future__ import annotations

import enum
import functools
import operator
import types
import typing
from typing import Annotated, Any, get_args, get_origin

import msgspec

#: Where a schema has the choices as they were written; msgspec sorts those of its ``enum``.
IN_ORDER = "x-in-order"

_UNIONS = (typing.Union, types.UnionType)
_CONSTRAINTS = ("gt", "ge", "lt", "le", "multiple_of", "pattern", "min_length", "max_length")


def with_meta(annotation: Any) -> Any:
    """`annotation` with everything that is said beside its types as one `msgspec.Meta` each.

    Choices carry the order in which they were written under `IN_ORDER`.

    Raises:
        TypeError, ValueError: A constraint is none for its type.
    """
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _described(with_meta(args[0]), _said_in(annotation.__metadata__))
    if origin is typing.Literal:
        return _in_order(annotation, list(args))
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _in_order(annotation, [member.value for member in annotation])
    if not args:
        return annotation
    inner_args = tuple(with_meta(arg) for arg in args)
    if inner_args == args:
        return annotation
    if origin in _UNIONS:
        return functools.reduce(operator.or_, inner_args)
    return (
        annotation.copy_with(inner_args) if hasattr(annotation, "copy_with") else origin[inner_args]
    )


def description_in(annotation: Any) -> str:
    """What an annotation says about its value; empty where it says nothing."""
    return str(_said_in(getattr(annotation, "__metadata__", ())).get("description", ""))


def _in_order(annotation: Any, values: list[Any]) -> Any:
    return Annotated[annotation, msgspec.Meta(extra_json_schema={IN_ORDER: values})]


def _described(annotation: Any, said: dict[str, Any]) -> Any:
    """`annotation` with what is said about it; bounds on a union are bounds on what is not None."""
    if get_origin(annotation) in _UNIONS:
        bounds = {name: said[name] for name in _CONSTRAINTS if name in said}
        said = {name: value for name, value in said.items() if name not in bounds}
        members = [
            member if member is types.NoneType else _described(member, bounds)
            for member in get_args(annotation)
        ]
        annotation = functools.reduce(operator.or_, members)
    return Annotated[annotation, msgspec.Meta(**said)] if said else annotation


def _said_in(metadata: tuple[Any, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in metadata:
        found |= _constraints_in(item)
        for inner in getattr(item, "metadata", ()):  # of a pydantic Field
            found |= _constraints_in(inner)
    return found


def _constraints_in(item: Any) -> dict[str, Any]:
    if isinstance(item, str):
        return {"description": item}
    description = getattr(item, "description", None) or getattr(item, "documentation", None)
    names = (*_CONSTRAINTS, "title", "examples", "extra_json_schema", "tz")
    values = {name: getattr(item, name, None) for name in names}
    found = {name: value for name, value in values.items() if value is not None}
    return {**found, "description": description} if isinstance(description, str) else found
