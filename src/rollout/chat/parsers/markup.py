"""Calls written as markup, such as ``<parameter=x>1</parameter></function>``.

Values have no types of their own; the tool's schema gives them (see `argument_types`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import re
    from collections.abc import Callable

    from rollout.chat.parsers.scan import TurnScan


class FaultyCall(ValueError):
    """A call is not what its format wants; `at` is where."""

    def __init__(self, reason: str, at: int) -> None:
        super().__init__(reason)
        self.at = at


class CallMarkup(NamedTuple):
    """How a format writes the parameters of a call.

    Attributes:
        parameter: Matches the tag that opens a parameter; group 1 is its name.
        end_parameter: Closes a parameter.
        end_call: Closes the call.
        tag: Matches every tag of a call: a value must reach `end_parameter` before another.
        trimmed: A value without the line breaks that are layout.
        untyped_as_json: See `ArgumentTypes`.
    """

    parameter: re.Pattern[str]
    end_parameter: str
    end_call: str
    tag: re.Pattern[str]
    trimmed: Callable[[str], str]
    untyped_as_json: bool = False

    def read(self, scan: TurnScan, at: int, function: str) -> tuple[dict[str, Any], int]:
        """The arguments that start at `at`, and the end of the call.

        Of parameters with equal names the last one counts.

        Raises:
            FaultyCall: Something else stands there, or the text ends.
        """
        types = scan.types_of(function, untyped_as_json=self.untyped_as_json)
        arguments: dict[str, Any] = {}
        while not scan.text.startswith(self.end_call, at := scan.skip_space(at)):
            opening = self.parameter.match(scan.text, at)
            if opening is None:
                raise FaultyCall(self._expected(scan, at), at)
            name, stop = opening[1].strip(), self._end_of_value(scan, opening)
            text = self.trimmed(scan.text[opening.end() : stop])
            arguments[name] = types.value(name, text)
            at = stop + len(self.end_parameter)
        return arguments, at + len(self.end_call)

    def _expected(self, scan: TurnScan, at: int) -> str:
        if at == len(scan.text):
            return f"the call is not closed by {self.end_call}"
        return f"expected a parameter or {self.end_call}: {scan.text[at : at + 20]!r}"

    def _end_of_value(self, scan: TurnScan, opening: re.Match[str]) -> int:
        tag = self.tag.search(scan.text, opening.end())
        if tag is None or tag[0] != self.end_parameter:
            reason = f"the parameter {opening[1].strip()!r} is not closed by {self.end_parameter}"
            raise FaultyCall(reason, len(scan.text) if tag is None else tag.start())
        return tag.start()


def without_layout(value: str) -> str:
    """`value` without the line break that opens it and the one that closes it."""
    return value.removeprefix("\n").removesuffix("\n")


def without_own_lines(value: str) -> str:
    """`value` without its outer line breaks where it stands on lines of its own."""
    on_own_lines = len(value) > 1 and value[0] == value[-1] == "\n"
    return value[1:-1] if on_own_lines else value
