"""Calls written as markup, such as ``<parameter=x>1</parameter></function>``.

Values have no types of their own; the tool's schema gives them (see `argument_types`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from rollout.chat.parsers.argument_types import ArgumentTypes
from rollout.chat.parsers.json_calls import FaultyCall, value_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollout.chat.parsers.scan import TurnScan


class CallMarkup:
    """How a format writes the parameters of a call.

    A value that may be text ends at the last end tag before the next parameter of the schema, or
    before the end of the call: what it quotes, calls of its own format included, is part of it.

    Args:
        call: Regular expression of what opens a call.
        parameter: Of what opens a parameter; group 1 is its name.
        end_parameter: Closes a parameter.
        end_call: Closes the call.
        block: What opens and closes a block of calls, which may be missing; or nothing.
        tag: Of every tag of a call: a value that is no text must reach `end_parameter` before
            another.
        trimmed: A value without the line breaks that are layout.
        untyped_as_json: See `ArgumentTypes`.
    """

    def __init__(
        self,
        *,
        call: str,
        parameter: str,
        end_parameter: str,
        end_call: str,
        tag: str,
        trimmed: Callable[[str], str],
        block: tuple[str, str] = ("", ""),
        untyped_as_json: bool = False,
    ) -> None:
        self.parameter = re.compile(parameter)
        self.end_parameter = end_parameter
        self.end_call = end_call
        self.tag = re.compile(tag)
        self._trimmed = trimmed
        self._untyped_as_json = untyped_as_json
        begin, end = map(re.escape, block)
        end_value, end_of_call = re.escape(end_parameter), re.escape(end_call)
        nameless = parameter.replace("(", "(?:", 1)
        calls = rf"(?:{begin}\s*)?{call}\s*(?:{nameless}|{end_of_call})"
        self.nested = re.compile(
            rf"(?P<empty>{call}\s*{end_of_call})|(?P<opens>{call}\s*{nameless})"
            rf"|(?P<closes>{end_value}\s*{end_of_call})|(?P<splits>{end_value}\s*{nameless})"
        )
        self._call = re.compile(call)
        self._layout = re.compile(rf"(?:\s|{begin}|{end})*+")
        #: The end of a call whose last value was never closed, and of its block, before another
        #: call or the end. Within a block, what follows may be quoted in that value: it never runs.
        bare = rf"{end_of_call}\s*{end}" if end else end_of_call
        self._bare_end = re.compile(
            rf"{end_value}\s*{end_of_call}|{call}\s*{end_of_call}"
            rf"|(?P<bare>{bare})(?=\s*(?:{calls}|\Z))"
        )

    def read(self, scan: TurnScan, at: int, function: str) -> tuple[dict[str, Any], int]:
        """The arguments that start at `at`, and the end of the call.

        Of numbers and the like with equal names the last one counts; a text that is given twice may
        as well be one that quotes its own tags.

        Raises:
            FaultyCall: Something else stands there, or the text ends.
        """
        types = ArgumentTypes(scan.tools, function, untyped_as_json=self._untyped_as_json)
        arguments: dict[str, Any] = {}
        while not scan.text.startswith(self.end_call, at := scan.skip_space(at)):
            opening = self.parameter.match(scan.text, at)
            if opening is None:
                raise FaultyCall(self._expected(scan, at), at)
            name, body = opening[1].strip(), opening.end()
            if types.may_be_text(name):
                if name in arguments:
                    reason = f"the parameter {name!r} is given twice"
                    raise FaultyCall(reason, body, is_in_value=True)
                stop = self._end_of_text(scan, name, body, types)
            else:
                stop = self._end_of_value(scan, name, body)
            arguments[name] = types.value(name, self._trimmed(scan.text[body:stop]))
            at = stop + len(self.end_parameter)
        return arguments, at + len(self.end_call)

    def find_closing(self, scan: TurnScan, fault: FaultyCall) -> int | None:
        """Where a call with a fault ends, with all that its value quotes; None: at the next tag."""
        stop = scan.nesting(self.nested).stop(fault.at)
        if stop is not None or not fault.is_in_value:
            return stop
        for end in self._bare_end.finditer(scan.text, fault.at):
            if end["bare"] is not None:
                return end.end()
        stop = scan.nesting(self.nested).before_calls(fault.at, self._call, self._layout)
        return len(scan.text) if stop is None else stop

    def _expected(self, scan: TurnScan, at: int) -> str:
        if at == len(scan.text):
            return f"the call is not closed by {self.end_call}"
        return f"expected a parameter or {self.end_call}: {scan.text[at : at + 20]!r}"

    def _end_of_value(self, scan: TurnScan, name: str, body: int) -> int:
        tag = self.tag.search(scan.text, body)
        if tag is None or tag[0] != self.end_parameter:
            reason = f"the parameter {name!r} is not closed by {self.end_parameter}"
            raise FaultyCall(reason, len(scan.text) if tag is None else tag.start())
        return tag.start()

    def _end_of_text(self, scan: TurnScan, name: str, body: int, types: ArgumentTypes) -> int:
        nesting = scan.nesting(self.nested)
        before, end = nesting.index(body), nesting.end(body)
        if end is None:
            tag = self.tag.search(scan.text, body)
            reason = f"the parameter {name!r} is not closed by {self.end_parameter}"
            if tag is not None and tag[0] == self.end_parameter:
                reason = f"the call is not closed by {self.end_call}"
            raise FaultyCall(reason, body, is_in_value=True)
        first, depth = before + 1, nesting.depths[before]
        while nesting.depths[first] >= depth:
            if nesting.kinds[first] == "splits" and nesting.depths[first] == depth:
                start, _ = nesting.span(first)
                following = self.parameter.match(
                    scan.text, scan.skip_space(start + len(self.end_parameter))
                )
                if following is not None and types.declares(following[1].strip()):
                    return start
            first += 1
        if any(kind != "closes" for kind in nesting.kinds[first:end]):
            reason = f"{self.end_call} stands in the parameter {name!r}, or several calls are mixed"
            raise FaultyCall(reason, body, is_in_value=True)
        return nesting.span(end)[0]


def end_of_json(scan: TurnScan, at: int) -> int:
    """After the JSON that begins at `at`, which may quote tags; `at` where there is none."""
    try:
        return value_at(scan.text, scan.skip_space(at))[1]
    except FaultyCall:
        return at


def without_layout(value: str) -> str:
    """`value` without the line break that opens it and the one that closes it."""
    return value.removeprefix("\n").removesuffix("\n")


def without_own_lines(value: str) -> str:
    """`value` without its outer line breaks where it stands on lines of its own."""
    on_own_lines = len(value) > 1 and value[0] == value[-1] == "\n"
    return value[1:-1] if on_own_lines else value
