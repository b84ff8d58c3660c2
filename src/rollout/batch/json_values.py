"""Values that JSON may not hold, written so that nothing is lost.

Floats that JSON cannot write (infinities, NaN) are strings; other values are texts.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from rollout.chat.plain_data import show_value

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger("rollout.batch")

#: A float, or the name of one that JSON has no number for.
Number = float | str


def number(value: float) -> Number:
    """`value` as JSON can hold it."""
    value = float(value)
    return value if math.isfinite(value) else repr(value)


def numbers(values: np.ndarray[Any, np.dtype[np.float32]]) -> list[Number]:
    """Floats as JSON can hold them."""
    listed: list[Number] = values.tolist()
    return listed if np.isfinite(values).all() else [number(value) for value in values]


def json_items(items: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """`items` with a text in the place of each value that JSON cannot hold: nothing is lost."""
    return {str(key): json_value(value, f"{where}[{key!r}]") for key, value in items.items()}


def json_value(value: Any, where: str) -> Any:
    """`value` itself where `encoded` can write it, or else a text, which a warning tells."""
    try:
        msgspec.json.encode(value, enc_hook=_listed)
    except UnicodeEncodeError:
        return value  # `encoded` writes half a surrogate pair as an escape
    except Exception as error:  # whatever a foreign object raises
        logger.warning("%s is saved as text: %s", where, error)
        return show_value(value)
    return value


def encoded(record: msgspec.Struct) -> bytes:
    """A record of such values as JSON."""
    try:
        return msgspec.json.encode(record, enc_hook=_listed)
    except UnicodeEncodeError:
        plain = msgspec.to_builtins(record, enc_hook=_listed, str_keys=True)
        return msgspec.json.encode(_escaped(plain))


def _listed(value: Any) -> Any:
    """Arrays and tensors as nested lists, their scalars as numbers."""
    tolist = getattr(value, "tolist", None)
    if tolist is None:
        raise TypeError(f"JSON cannot hold a {type(value).__qualname__}")
    return tolist()


def _escaped(value: Any) -> Any:
    """Builtins without halves of surrogate pairs, which UTF-8 cannot hold."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_escaped(key): _escaped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(item) for item in value]
    return value
