"""Constraints and descriptions that annotations carry, in the terms of msgspec.

`Annotated[int, ...]` may hold `msgspec.Meta`, pydantic's `Field`, the types of annotated-types, or
a text that describes the value. What they have in common are the names of their attributes; none
of those packages is imported here.
"""

from __future__ import annotations

import functools
import operator
import types
import typing
from typing import Annotated, Any, get_args, get_origin

import msgspec

_CONSTRAINTS = ("gt", "ge", "lt", "le", "multiple_of", "pattern", "min_length", "max_length")


def with_meta(annotation: Any) -> Any:
    """`annotation` with everything that is said beside its types as one `msgspec.Meta` each.

    Raises:
        TypeError, ValueError: A constraint is none for its type.
    """
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = with_meta(args[0])
        meta = _meta(annotation.__metadata__)
        return inner if meta is None else Annotated[inner, meta]
    if not args or origin is typing.Literal:
        return annotation
    inner_args = tuple(with_meta(arg) for arg in args)
    if inner_args == args:
        return annotation
    if origin in (typing.Union, types.UnionType):
        return functools.reduce(operator.or_, inner_args)
    return (
        annotation.copy_with(inner_args) if hasattr(annotation, "copy_with") else origin[inner_args]
    )


def description_in(annotation: Any) -> str:
    """What an annotation says about its value; empty where it says nothing."""
    meta = _meta(getattr(annotation, "__metadata__", ()))
    return "" if meta is None or meta.description is None else meta.description


def _meta(metadata: tuple[Any, ...]) -> msgspec.Meta | None:
    found: dict[str, Any] = {}
    for item in metadata:
        found |= _constraints_in(item)
        for inner in getattr(item, "metadata", ()):  # of a pydantic Field
            found |= _constraints_in(inner)
    return msgspec.Meta(**found) if found else None


def _constraints_in(item: Any) -> dict[str, Any]:
    if isinstance(item, str):
        return {"description": item}
    description = getattr(item, "description", None) or getattr(item, "documentation", None)
    names = (*_CONSTRAINTS, "title", "examples", "extra_json_schema", "tz")
    values = {name: getattr(item, name, None) for name in names}
    found = {name: value for name, value in values.items() if value is not None}
    return {**found, "description": description} if isinstance(description, str) else found
