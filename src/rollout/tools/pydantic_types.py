"""Parameters of tools that are pydantic models; pydantic is imported by whoever defined them."""

from __future__ import annotations

import sys
from typing import Any

import msgspec


def is_model(kind: Any) -> bool:
    """Whether `kind` is a class of pydantic models."""
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)


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
        return kind.model_validate_json(msgspec.json.encode(value), strict=True)
    except ValueError as error:
        raise ValueError(_fault(error)) from None


def default_of(value: Any) -> Any:
    """A model as plain data, for msgspec's `enc_hook`.

    Raises:
        NotImplementedError: It is no model.
    """
    if not is_model(type(value)):
        raise NotImplementedError(f"{type(value).__name__} is not JSON")
    return value.model_dump(mode="json")


def _fault(error: Any) -> str:
    first = error.errors()[0]
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
    text = first["msg"][:1].lower() + first["msg"][1:]
    return f"{text} in its {path.removeprefix('.')}" if path else text
