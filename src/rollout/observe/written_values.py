"""What traces keep of whatever users' code takes, gives and raises."""

from __future__ import annotations

from typing import Any

import msgspec

from rollout.utf8 import encodable

#: Characters of an input or an output that a trace keeps.
MOST_CHARACTERS = 16_384


def plain(value: Any) -> Any:
    """What JSON can hold, of other objects their `repr`; of long ones the beginning. It shares
    nothing with the value that changes with it, and raises nothing.
    """
    if isinstance(value, str):
        return beginning(value)
    try:
        text = msgspec.json.encode(value, enc_hook=_described)
        return (
            msgspec.json.decode(text) if len(text) <= MOST_CHARACTERS else beginning(text.decode())
        )
    except Exception:  # whatever a user's function takes and returns
        return _described(value)


def text_of(value: Any) -> str:
    """A text, or something else as JSON; of long ones the beginning."""
    if isinstance(value, str):
        return beginning(value)
    try:
        return beginning(msgspec.json.encode(value, enc_hook=_described).decode())
    except Exception:  # as above
        return _described(value)


def _described(value: Any) -> str:
    try:
        return beginning(repr(value))
    except Exception:  # the user's own
        return object.__repr__(value)


def beginning(text: str) -> str:
    """As much of a text as is kept, in characters that UTF-8 has."""
    return encodable(text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…")
