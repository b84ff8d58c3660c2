"""Gemma: ``<|tool_call>call:f{x:1}<tool_call|>`` and the ways of earlier versions."""

from __future__ import annotations

import json
import re
from typing import Any

from rollout.chat.parsers.json_calls import MAX_DEPTH, FaultyCall, read_json_text, skip_space
from rollout.chat.parsers.json_formats import OBJECT, read_objects
from rollout.chat.parsers.pythonic import (
    CALL_LIST,
    MAX_VALUES,
    STRING,
    PythonCall,
    add_call_list,
    find_code_end,
    make_fault,
    read_bare,
    read_statement,
    unescape,
)
from rollout.chat.parsers.registry import register_tool_parser
from rollout.chat.parsers.scan import MAX_CALLS, TaggedParser, TurnScan

_FENCE = "```"
#: What opens and closes calls.
_ENDS = {"<|tool_call>": "<tool_call|>", "<start_function_call>": "<end_function_call>"}
_NESTED = {
    opening: re.compile(rf"(?P<opens>{re.escape(opening)}\s*call:)|(?P<closes>{re.escape(end)})")
    for opening, end in _ENDS.items()
}

_HEAD = re.compile(r"\s*call:\s*([\w.\-]+)\s*(?=\{)")
_MARKED = re.compile(r'\s*(?:<\|"\|>(.*?)<\|"\|>|<escape>(.*?)<escape>)', re.DOTALL)
_QUOTED = re.compile(rf"\s*(?P<bad>[bBfF]?){STRING}".replace(r"\\\n]", r"\\]"), re.DOTALL)
_BARE_KEY = re.compile(r"""\s*([^,:{}\[\]<"'\s][^,:{}\[\]<"]*)""")
_BARE = re.compile(r"""\s*([^,{}\[\]<"'\s](?:[^,{}\[\]<]*[^,{}\[\]<\s])?)(?P<goes_on>\s*,)?""")
#: What a bare word may hold beside quotes that it leaves open; "it's" and "dogs'" open none.
_CLOSED = re.compile(r"""[^"']++|"[^"]*"|(?<!\w)'[^']*'|(?<=\w)'""")
_CLOSING = {"{": "}", "[": "]"}
_OPEN = re.compile(r"[rRuU]?\"|'|<\|\"\|>|<escape>")
_STRINGS = json.JSONDecoder(strict=False)


@register_tool_parser("gemma")
class GemmaParser(TaggedParser):
    r"""Reads the formats of Gemma 4, of FunctionGemma and of prompted Gemma 3.

    ``<|tool_call>call:NAME{key:<|"|>text<|"|>,n:1}<tool_call|>``; the same between
    ``<start_function_call>`` and ``<end_function_call>`` with ``<escape>`` around strings; in
    both, strings in the quotes of JSON and Python;
    Python calls in a fence of ``tool_code``; ``[f(x=1)]`` or ``{"name": …, "parameters": {…}}``
    as the start of the turn.
    """

    stop_tokens = ("<end_of_turn>", "<turn|>", "<|tool_response>", "<start_function_response>")
    reasoning_tags = (("<|channel>thought", "<channel|>"), ("<think>", "</think>"))
    opening = (
        r"<\|tool_call>|<start_function_call>|(?P<fence>```tool_code[ \t]*\n)"
        rf"|(?:\A|(?<=<channel\|>)|(?<=</think>))\s*(?:(?P<json>(?={OBJECT}))|{CALL_LIST})"
    )

    def is_meant(self, scan: TurnScan, opening: re.Match[str]) -> bool:
        if opening[0] not in _ENDS:
            return True
        is_begun = scan.text.startswith("call:", scan.skip_space(opening.end()))
        return is_begun or scan.is_meant(opening.end(), _ENDS[opening[0]])

    def read_call(self, scan: TurnScan, opening: re.Match[str]) -> int:
        if opening["name"] is not None:
            return add_call_list(scan, opening)
        if opening["json"] is not None:
            return read_objects(scan, opening.end(), opening.end(), is_marked=False)
        if opening["fence"] is not None:
            return _read_fence(scan, opening.end())
        head, end = _HEAD.match(scan.text, opening.end()), _ENDS[opening[0]]
        if head is None:
            at = scan.skip_space(opening.end())
            raise make_fault("expected call:NAME{", scan.text, at)
        arguments, stop = _read_arguments(scan.text, head.end())
        at = scan.skip_space(stop)
        if not scan.text.startswith(end, at):
            fault = make_fault(f"the call is not closed by {end}", scan.text, at)
            fault.is_open = not scan.text.startswith(opening[0], at)
            raise fault
        return scan.add_call(opening.start(), at + len(end), head[1], arguments)

    def find_end(self, scan: TurnScan, opening: re.Match[str], fault: FaultyCall) -> int:
        if opening["fence"] is not None:
            return find_code_end(scan.text, opening.end(), _FENCE)
        if opening[0] not in _ENDS:
            return len(scan.text)
        if not fault.is_open:
            return fault.at
        nesting, end = scan.nesting(_NESTED[opening[0]]), len(scan.text)
        stops = [nesting.find_stop(at) or end for at in (opening.end(), fault.at)]
        return end if fault.is_cut else max(stops)


def _read_fence(scan: TurnScan, at: int) -> int:
    """The calls of a fence, one or several, bare, printed or in a list."""
    calls: list[PythonCall] = []
    while not calls or not scan.text.startswith(_FENCE, at := scan.skip_space(at)):
        more, at = read_statement(scan.text, at)
        calls += more
        if len(calls) > MAX_CALLS:  # `add_call` refuses them
            break
    for call in calls:
        scan.add_call(*call)
    return at + len(_FENCE)


def _read_arguments(text: str, at: int) -> tuple[dict[str, Any], int]:
    """The object that begins at `at`, and where it ends: its tokens are those of JSON, rewritten.

    Raises:
        FaultyCall: Something else stands there.
    """
    start, tokens = at, [""]
    brackets: list[str] = []
    while not tokens[-1] or brackets:
        at = skip_space(text, at)
        if len(tokens) > 2 * MAX_VALUES:
            raise make_fault(f"more than {MAX_VALUES:,} values in a call", text, at)
        token, stop = text[at : at + 1], at + 1
        if token in (",", ":"):
            pass
        elif token in ("}", "]"):
            brackets.pop()
            if tokens[-1] == ",":
                tokens.pop()
        elif tokens[-1] not in ("", "{", "[", ",", ":"):
            raise make_fault(f"expected , or {brackets[-1]}", text, at)
        elif token in _CLOSING:
            if len(brackets) > MAX_DEPTH:
                raise make_fault("nested too deeply", text, at)
            brackets.append(_CLOSING[token])
        else:
            is_key = brackets[-1] == "}" and tokens[-1] in ("{", ",")
            value, stop = _read_value(text, at, is_key=is_key)
            if stop == at:
                raise make_fault("expected a value", text, at)
            token = json.dumps(value)
        tokens.append(token)
        at = stop
    try:
        value = read_json_text("".join(tokens))
    except FaultyCall:
        raise make_fault("expected key:value pairs", text, start) from None
    return value, at


def _read_value(text: str, at: int, *, is_key: bool) -> tuple[Any, int]:
    """The text or bare word at `at`, and where it ends; at `at` where there is none."""
    marked = _MARKED.match(text, at)
    if marked is not None:
        return marked[marked.lastindex or 0], marked.end()
    quoted = _QUOTED.match(text, at)
    if quoted is not None:
        if quoted["bad"]:
            raise make_fault("bytes and formatted strings are no values", text, at)
        body = quoted[quoted.lastindex or 0]
        if quoted[2] not in ("r", "R"):
            body = _read_json_string(body) if quoted[5] is not None else unescape(body)
        return body, quoted.end()
    if _OPEN.match(text, at):  # what follows may all be quoted in it
        raise make_fault("expected a value", text, at, is_cut=True)
    word = (_BARE_KEY if is_key else _BARE).match(text, at)
    if word is None:
        return None, at
    if is_key:
        return word[1].strip(), word.end()
    if word["goes_on"] is not None and _is_open(word[1]):
        reason = "expected the end of a quote or parenthesis before the comma"
        raise make_fault(reason, text, at)
    try:
        return read_bare(word[1]), word.end(1)
    except ValueError:  # a text, as models at times forget the marks
        return word[1], word.end(1)


def _read_json_string(body: str) -> str:
    """What stands between double quotes in JSON, or else, by its escapes, in Python."""
    try:
        return str(_STRINGS.decode(f'"{body}"'))
    except ValueError:
        return unescape(body)


def _is_open(word: str) -> bool:
    """Whether a quote or a parenthesis of a bare word is not closed in it."""
    return word.count("(") > word.count(")") or _CLOSED.sub("", word) != ""
