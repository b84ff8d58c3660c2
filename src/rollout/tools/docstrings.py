"""Reading Google-style docstrings: what a function does, and what its parameters mean."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

_PARAMETERS = frozenset({"args", "arguments", "parameters", "params"})
_OTHER_SECTIONS = frozenset(
    {
        *("attributes", "example", "examples", "note", "notes", "raises", "references"),
        *("return", "returns", "see also", "todo", "warning", "warnings", "yield", "yields"),
    }
)

_HEADER = re.compile(r"(\w[\w ]*):\s*")
_ENTRY = re.compile(r"\*{0,2}(\w+)\s*(?:\(.*?\))?\s*:(?:\s+(.*))?")


class Docstring(msgspec.Struct, frozen=True):
    """A docstring taken apart.

    Attributes:
        description: Everything before the first section.
        parameters: Description by parameter, line breaks joined.
    """

    description: str
    parameters: dict[str, str]


def parse_docstring(text: str | None) -> Docstring:
    """The description and the documented parameters of a Google-style docstring."""
    lines = inspect.cleandoc(text or "").splitlines()
    description: list[str] = []
    parameters: dict[str, str] = {}
    for section, body in _sections(lines):
        if section is None:
            description = body
        elif section in _PARAMETERS:
            parameters.update(_entries(body))
    return Docstring("\n".join(description).strip(), parameters)


def _sections(lines: list[str]) -> Iterator[tuple[str | None, list[str]]]:
    section: str | None = None
    body: list[str] = []
    for line in lines:
        header = _HEADER.fullmatch(line)
        name = header[1].lower() if header else ""
        if name in _PARAMETERS or name in _OTHER_SECTIONS:
            yield section, body
            section, body = name, []
        else:
            body.append(line)
    yield section, body


def _entries(body: list[str]) -> Iterator[tuple[str, str]]:
    """``name (type): description`` entries; deeper lines continue the one above."""
    lines = [line for line in body if line.strip()]
    margin = min((_indent(line) for line in lines), default=0)
    name, words = "", list[str]()
    for line in lines:
        entry = _ENTRY.fullmatch(line.strip()) if _indent(line) == margin else None
        if entry is None:
            words.append(line.strip())
            continue
        if name:
            yield name, " ".join(words).strip()
        name, words = entry[1], [entry[2] or ""]
    if name:
        yield name, " ".join(words).strip()


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
