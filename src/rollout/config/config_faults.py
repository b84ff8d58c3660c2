"""What is wrong with a configuration: one line for each fault, all in one error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import attrs

from rollout.errors import ConfigError

#: A value is shown up to this many characters: enough to find it in a file.
SHOWN_CHARACTERS = 80

#: In the place of a value that is not there.
ABSENT: Final = object()


@attrs.frozen
class Fault:
    """One value that cannot stay as it is.

    Attributes:
        path: Where it stands, relative to what holds the fault, e.g. ``temperature`` or ``[1]``.
        problem: What was expected, or why the key has no place here.
        value: What was found; `ABSENT` where there is no value to show.
    """

    path: str
    problem: str
    value: object = ABSENT

    def below(self, path: str) -> Fault:
        """The same fault, seen from one level up."""
        return attrs.evolve(self, path=join_path(path, self.path))

    def __str__(self) -> str:
        shown = "" if self.value is ABSENT else f" = {show(self.value)}"
        return f"{self.path}{shown}: {self.problem}"


def join_path(outer: str, inner: str) -> str:
    """``outer.inner``, or ``outer[1]`` where the inner part is an index."""
    dot = "." if outer and inner and not inner.startswith("[") else ""
    return f"{outer}{dot}{inner}"


def show(value: object) -> str:
    """`value` as Python writes it, on one line and cut where it is long; or its type."""
    try:
        text = " ".join(repr(value).split("\n"))
    except Exception:  # of foreign types, and of what is nested too deeply
        text = f"<{type(value).__name__}>"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"


def got(value: object) -> str:
    """``, got a string``: the kind of a value that is not of the kind wanted.

    Empty for None, whose repr says it all.
    """
    match value:
        case None:
            return ""
        case bool():
            return ", got a boolean"
        case int() | float():
            return ", got a number"
        case str():
            return ", got a string"
        case list() | tuple():
            return ", got a list"
        case Mapping():
            return ", got a mapping"
    return f", got a value of type {type(value).__name__}"


def no_hint(_: Fault) -> str:
    """Nothing to add to a fault."""
    return ""


def config_error(
    subject: str, faults: Iterable[Fault], hint: Callable[[Fault], str] = no_hint
) -> ConfigError:
    """The error that lists `faults`, each on a line of its own with what `hint` adds to it."""
    lines = tuple(dict.fromkeys(f"{fault}{hint(fault)}" for fault in faults))
    count = "1 fault" if len(lines) == 1 else f"{len(lines)} faults"
    return ConfigError("\n  ".join((f"{count} in {subject}:", *lines)), lines)
