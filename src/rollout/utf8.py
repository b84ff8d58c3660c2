"""Strings that are no text: JSON and Python can spell half of a character, UTF-8 cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

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
    if not is_encodable(text):
        half = next(character for character in text if not is_encodable(character))
        raise TemplateError(f"the messages hold {half!r}: half of a character, no text")


def is_name(value: object) -> TypeGuard[str]:
    """Whether it is a text that can be written down: not empty, and UTF-8 can carry it."""
    return isinstance(value, str) and bool(value) and is_encodable(value)


def unencodable_text(value: object) -> str | None:
    """The first text in plain data that UTF-8 cannot carry, names of its objects included."""
    if isinstance(value, str):
        return None if is_encodable(value) else value
    inner: list[object] = []
    if isinstance(value, Mapping):
        inner = [*value, *value.values()]
    elif isinstance(value, list | tuple):
        inner = list(value)
    return next((text for item in inner if (text := unencodable_text(item)) is not None), None)
