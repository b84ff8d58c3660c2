"""Pydantic models that tools take and give; pydantic is imported by the code that defined them."""

from __future__ import annotations

import types
import typing
from typing import Any

import msgspec

from rollout.lazy import derives_from


def is_model(kind: Any) -> bool:
    """Whether `kind` is a class of pydantic models."""
    return isinstance(kind, type) and derives_from(kind, "pydantic.main", "BaseModel")


def is_field(value: Any) -> bool:
    """Whether `value` is what pydantic's `Field` gives back."""
    return derives_from(type(value), "pydantic.fields", "FieldInfo")


def joined_models(annotation: Any) -> Any:
    """A root model of an annotation with a union of models and others, which msgspec has no way to.

    None where there is no such union; `of_joined` gives back what stands in the root.
    """
    if not _joins_models(annotation):
        return None
    from pydantic import RootModel

    return RootModel[annotation]


def of_joined(value: Any) -> Any:
    """What a root model holds; other values as they are."""
    return value.root if hasattr(value, "root") and is_model(type(value)) else value


def _joins_models(annotation: Any) -> bool:
    args = typing.get_args(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [member for member in args if member is not types.NoneType]
        if len(members) > 1 and any(map(is_model, members)):
            return True
    return any(map(_joins_models, args))


def model_schema(kind: Any) -> dict[str, Any]:
    """The JSON Schema of a model, for msgspec's `schema_hook`.

    Raises:
        NotImplementedError: It is no model; msgspec words the error.
    """
    if not is_model(kind):
        raise NotImplementedError
    schema: dict[str, Any] = kind.model_json_schema()
    return schema


def to_model(kind: Any, value: Any) -> Any:
    """The model that a JSON value stands for, for msgspec's `dec_hook`; strict, as all arguments.

    Raises:
        ValueError: It stands for none; names the first wrong field.
        NotImplementedError: `kind` is no model.
    """
    if isinstance(value, kind):
        return value
    if not is_model(kind):
        raise NotImplementedError(f"{kind!r} cannot be made from JSON")
    try:
        return kind.model_validate_json(
            msgspec.json.encode(value, enc_hook=plain_data), strict=True
        )
    except ValueError as error:
        raise ValueError(_fault(error)) from None


def plain_data(value: Any) -> Any:
    """A model as plain data, for msgspec's `enc_hook`; so are arrays and their scalars.

    Raises:
        NotImplementedError: It is neither.
    """
    if is_model(type(value)):
        return value.model_dump(mode="json")
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    raise NotImplementedError(f"no JSON for {type(value).__name__}")


def _fault(error: Any) -> str:
    first = error.errors()[0]
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
    text = first["msg"][:1].lower() + first["msg"][1:]
    return f"{text} in its {path.removeprefix('.')}" if path else text
