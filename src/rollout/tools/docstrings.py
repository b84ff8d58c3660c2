"""Reading docstrings: what a function does, and what its parameters mean."""

from __future__ import annotations

import inspect

import docstring_parser
import msgspec


class Docstring(msgspec.Struct, frozen=True):
    """A docstring taken apart.

    Attributes:
        description: Everything before the first section.
        parameters: Description by parameter, line breaks joined.
    """

    description: str
    parameters: dict[str, str]


def parse_docstring(text: str | None) -> Docstring:
    """The description and the documented parameters, in Google, NumPy or reST style."""
    clean = inspect.cleandoc(text or "")
    try:
        # It takes a section in the first line for prose.
        parsed = docstring_parser.parse(f"\n{clean}")
    except docstring_parser.ParseError:  # prose that looks like a section and is none
        return Docstring(clean, {})
    parameters = {
        name.strip().lstrip("*"): " ".join((item.description or "").split())
        for item in parsed.params
        for name in item.arg_name.split(",")  # NumPy documents several in one entry
    }
    return Docstring((parsed.description or "").strip(), parameters)
