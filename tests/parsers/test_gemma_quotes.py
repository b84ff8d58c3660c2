"""Values that Gemma writes in quotes of other languages: read as what they say, or told."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.chat import get_tool_parser
from rollout.types import InvalidToolCall, ToolCall

TAGS = {
    "gemma": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "function_gemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
}
FAMILIES = pytest.mark.parametrize("family", TAGS)


def parsed(family: str, body: str) -> Any:
    """Arguments of the one call, with `<m>` in its body as the family's mark of strings."""
    opening, end, mark = TAGS[family]
    text = f"{opening}call:f{body.replace('<m>', mark)}{end}"
    turn = get_tool_parser("gemma").parse(text)
    (call,) = turn.calls
    assert turn.content == ""
    if isinstance(call, InvalidToolCall):
        assert (call.raw, bool(call.reason)) == (text, True)
        return InvalidToolCall
    assert isinstance(call, ToolCall)
    return call.arguments


@FAMILIES
@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("{data_refs:['a,b']}", {"data_refs": ["a,b"]}),
        ("{'city':'Paris'}", {"city": "Paris"}),
        ("{opts:{\"mode\": 'fast', n: 1}}", {"opts": {"mode": "fast", "n": 1}}),
        ("{a:'x}, b:[1]: {',b:2}", {"a": "x}, b:[1]: {", "b": 2}),
        (r"""{a:"it\'s",b:"\d+",c:'\d+',d:<m>\n\d<m>}""",
         {"a": "it's", "b": r"\d+", "c": r"\d+", "d": r"\n\d"}),
        (r"""{a:r'\d+\n',b:r"\d",c:u'x'}""", {"a": r"\d+\n", "b": r"\d", "c": "x"}),
        ('{a:"""one\n"two" \'three\'\n""",b:\'\'\'it\'s\'\'\'}',
         {"a": "one\n\"two\" 'three'\n", "b": "it's"}),
        ("{city:it's,b:[don't, O'Brien, dogs'],c:'x'}",
         {"city": "it's", "b": ["don't", "O'Brien", "dogs'"], "c": "x"}),
        ("{a:echo \"hi\" 'you', b:the '90s}", {"a": "echo \"hi\" 'you'", "b": "the '90s"}),
    ],
)  # fmt: skip
def test_gemma_value_in_any_quotes_is_what_it_says(
    family: str, body: str, arguments: dict[str, Any]
) -> None:
    assert parsed(family, body) == arguments


@FAMILIES
@pytest.mark.parametrize(
    "body",
    [
        "{city:'Paris}",
        "{city:<m>Paris}",
        "{city:'it's'}",
        "{city:'a' 'b'}",
        "{'city' 'Paris'}",
        "{city:say 'a, b: c'}",
        "{data_refs:[f'a,b']}",
        "{data_refs:[('a','b')]}",
        r"""{city:"\ud83d"}""",
    ],
)  # fmt: skip
def test_gemma_value_without_a_sound_reading_is_told(family: str, body: str) -> None:
    assert parsed(family, body) is InvalidToolCall


def test_gemma_call_that_the_other_family_closes_is_told_whole() -> None:
    for text in (
        "<|tool_call>call:f{a:'b'}<end_function_call>",
        "<start_function_call>call:f{a:'b'}<tool_call|>",
    ):
        turn = get_tool_parser("gemma").parse(text)
        assert turn.content == ""
        assert [(type(call), call.raw) for call in turn.calls] == [(InvalidToolCall, text)]


TEXTS = st.text(max_size=8) | st.text("ab'\"\\,:{}[]()<|> \n/", max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
GAPS = st.sampled_from(["", "", "", " ", "\n", "\t "])
CONSTANTS = {True: ("true", "True"), False: ("false", "False"), None: ("null", "None")}


def quotings(text: str, mark: str) -> list[str]:
    """Every way in which a model may write a string."""
    named = text.encode("unicode_escape").decode().replace("'", r"\'")
    written = [json.dumps(text), json.dumps(text, ensure_ascii=False), repr(text), f"'{named}'"]
    # What holds (a part of) its mark cannot stand between marks.
    if mark not in f"{text}{mark}"[:-1]:
        written.append(f"{mark}{text}{mark}")
    return written


@st.composite
def spellings(draw: st.DrawFn, value: Any, mark: str) -> str:
    """`value` in any mix of quotings."""

    def gap() -> str:
        return draw(GAPS)

    def flip() -> bool:
        return draw(st.booleans())

    def write(value: Any) -> str:
        if value is None or isinstance(value, bool):
            return draw(st.sampled_from(CONSTANTS[value]))
        if isinstance(value, str):
            return draw(st.sampled_from(quotings(value, mark)))
        if isinstance(value, list):
            return enclose("[", [write(item) for item in value], "]")
        if isinstance(value, dict):
            pairs = [f"{write_key(k)}{gap()}:{gap()}{write(v)}" for k, v in value.items()]
            return enclose("{", pairs, "}")
        return json.dumps(value)

    def write_key(key: str) -> str:
        is_plain = key.isascii() and key.isalpha()
        return key if is_plain and flip() else write(key)

    def enclose(opening: str, items: list[str], end: str) -> str:
        comma = "," if items and flip() else ""
        body = ",".join(f"{gap()}{item}{gap()}" for item in items)
        return f"{opening}{body}{comma}{gap()}{end}"

    return write(value)


@FAMILIES
@given(arguments=st.dictionaries(TEXTS, VALUES, max_size=4), data=st.data())
def test_gemma_arguments_in_any_mix_of_quotings_come_back_equal(
    family: str, arguments: dict[str, Any], data: st.DataObject
) -> None:
    opening, end, mark = TAGS[family]
    body = data.draw(spellings(arguments, mark))
    (call,) = get_tool_parser("gemma").parse(f"{opening}call:f{body}{end}").calls
    assert isinstance(call, ToolCall), call
    assert json.dumps(call.arguments) == json.dumps(arguments)
