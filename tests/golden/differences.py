"""Where a run departs from its record: the run, the row, the field and both values."""

from __future__ import annotations

import base64
from array import array
from typing import Any

#: Packed float32 as base64.
FLOATS = ("log_probs", "token_rewards")
_CONTEXT = 30


def first_difference(name: str, recorded: Any, played: Any) -> str | None:
    """The first one, spelled out; None where both are equal."""
    if recorded == played:
        return None
    if recorded is None or played is None:
        return f"{name}: {'not recorded' if recorded is None else 'recorded, and no run any more'}"
    return f"{name}{_difference(recorded, played, '')}"


def _rank(key: str) -> tuple[int, str]:
    """Causes before their effects: tokens first, shapes and checksums last."""
    first = ("error", "row", "seeds", "prompt", "response", "mask", "versions", "log_probs")
    return (first.index(key) if key in first else 99 if key == "tensors" else 50), key


def _difference(recorded: Any, played: Any, field: str) -> str:
    if isinstance(recorded, dict) and isinstance(played, dict):
        for key in sorted(recorded.keys() | played.keys(), key=_rank):
            old, new = recorded.get(key, "nothing"), played.get(key, "nothing")
            if old != new:
                return f", {key}{_difference(old, new, key)}"
    if isinstance(recorded, list) and isinstance(played, list) and field in ("calls", "rows"):
        for at, (old, new) in enumerate(zip(recorded, played, strict=False)):
            if old != new:
                label = old.get("row", old.get("call", at)) if isinstance(old, dict) else at
                return f" {at} ({label}){_difference(old, new, field.rstrip('s'))}"
        return f": {len(recorded)} of them recorded, now {len(played)}"
    if field in FLOATS and isinstance(recorded, str) and isinstance(played, str):
        recorded, played = _floats(recorded), _floats(played)
        field = "tokens"
    if field in ("prompt", "response", "tokens"):
        return _difference_at(recorded, played)
    return f": recorded {recorded!r}, now {played!r}"


def _difference_at(recorded: Any, played: Any) -> str:
    pairs = enumerate(zip(recorded, played, strict=False))
    lengths = f"; {len(recorded)} of them recorded, now {len(played)}"
    at = next((at for at, (old, new) in pairs if old != new), min(len(recorded), len(played)))
    if isinstance(recorded, str):
        old, new = (text[max(0, at - _CONTEXT) : at + _CONTEXT] for text in (recorded, played))
    else:
        old, new = recorded[at : at + 3], played[at : at + 3]
    note = lengths if len(recorded) != len(played) else ""
    return f", from token {at}: recorded {old!r}, now {new!r}{note}"


def _floats(text: str) -> list[str]:
    values = array("f")
    values.frombytes(base64.b64decode(text))
    return [float(value).hex() if value == value else "nan" for value in values]
