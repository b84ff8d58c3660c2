"""Strings that are no text: JSON and Python can spell half of a character, UTF-8 cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from rollout.errors import TemplateError


def is_encodable(text: str) -> bool:
    """Whether UTF-8 can carry `text`."""
    if text.isascii():  # costs nothing, unlike a copy of a long text
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def encodable(text: str) -> str:
    """`text` as UTF-8 can carry it: half a surrogate pair would fail in every tokenizer."""
    if is_encodable(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def check_encodable(text: str) -> None:
    """Let messages' text pass that tokenizers take.

    Raises:
        TemplateError: It holds half of a character.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise TemplateError(f"the messages hold {half!r}: half of a character, no text") from None


def is_name(value: object) -> TypeGuard[str]:
    """Whether it is a text that can be written down: not empty, and UTF-8 can carry it."""
    return isinstance(value, str) and bool(value) and is_encodable(value)


def list_texts(values: list[Any]) -> list[str]:
    """The texts in plain data, names of its objects included."""
    texts: list[str] = []
    waiting: list[Any] = [values]
    for value in waiting:  # which grows meanwhile
        for item in value if isinstance(value, (list, tuple)) else (*value, *value.values()):
            if isinstance(item, str):
                texts.append(item)
            elif item is not None and isinstance(item, (dict, list, tuple, Mapping)):
                waiting.append(item)
    return texts
