"""The Hermes parser: calls in order, faults in place, reasoning apart, linear time."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.chat import ParsedTurn, get_tool_parser, register_tool_parser, tool_parser_names
from rollout.errors import ConfigError
from rollout.types import InvalidToolCall, ToolCall

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
).filter(lambda value: "Infinity" not in json.dumps(value))
ARGUMENTS = st.dictionaries(st.text(), JSON, max_size=3)
NAMES = st.text(min_size=1).filter(lambda name: name == name.strip())


def parse(text: str, *, in_reasoning: bool = False) -> ParsedTurn:
    return get_tool_parser("hermes").parse(text, in_reasoning=in_reasoning)


def block(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def only_reason(body: str) -> str:
    raw = block(body)
    turn = parse(f"before {raw} after")
    (call,) = turn.calls
    assert isinstance(call, InvalidToolCall)
    assert call.raw == raw
    assert turn.content == "before  after"
    return call.reason


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=4))
def test_hermes_any_calls_come_back_in_order_with_their_raw_text(
    written: list[tuple[str, dict[str, object]]],
) -> None:
    raws = [
        block(json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False))
        for name, arguments in written
    ]
    turn = parse("\n".join(raws) + "<|im_end|>")
    assert turn.calls == tuple(
        ToolCall(name=name, arguments=arguments, id=f"call_{at}", raw=raws[at])
        for at, (name, arguments) in enumerate(written)
    )
    assert turn.content == ""


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            '{"name": "f", "arguments": {"x": 1]}',
            "malformed JSON: Expecting ',' delimiter: line 1 column 35 (char 34)",
        ),
        (
            "{'name': 'f'}",
            "malformed JSON: Expecting property name enclosed in double quotes: "
            "line 1 column 2 (char 1)",
        ),
        (
            '{"name": "f", "arguments": {"x": "1}}',
            "malformed JSON: Invalid control character at: line 1 column 38 (char 37)",
        ),
        ('{"name": "f"} {}', "the call is not closed by </tool_call>"),
        ("", "malformed JSON: Expecting value: line 1 column 1 (char 0)"),
        ('{"arguments": {}}', 'the call has no "name"'),
        ('{"name": null, "arguments": {}}', 'the call has no "name"'),
        ('{"name": 3, "arguments": {}}', '"name" must be a non-empty string, not 3'),
        ('{"name": " ", "arguments": {}}', "\"name\" must be a non-empty string, not ' '"),
        ('{"name": "f", "arguments": [1]}', '"arguments" must be an object, not an array'),
        ('{"name": "f", "arguments": null}', '"arguments" must be an object, not null'),
        ('{"name": "f", "arguments": "3"}', '"arguments" must be an object, not a number'),
        (
            '{"name": "f", "arguments": "{oops"}',
            '"arguments" is a string of malformed JSON: Expecting property name enclosed in '
            "double quotes: line 1 column 2 (char 1)",
        ),
        (
            '{"name": "f", "arguments": "{} {}"}',
            '"arguments" is a string of malformed JSON: more text follows the value',
        ),
        (
            '{"name": "f", "parameters": {"x": 1}}',
            'the call has no "arguments", but "parameters"',
        ),
        ('["f", {}]', "a call must be an object with name and arguments, not an array"),
        ("true", "a call must be an object with name and arguments, not a boolean"),
        ('{"name": "f", "arguments": {"x": NaN}}', "malformed JSON: NaN is not a finite number"),
        ("__import__('os')", "malformed JSON: Expecting value: line 1 column 1 (char 0)"),
    ],
)
def test_hermes_faulty_call_says_what_is_wrong(body: str, reason: str) -> None:
    assert only_reason(body) == reason


def test_hermes_huge_integer_is_a_faulty_call() -> None:
    reason = only_reason('{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}")
    assert reason.startswith("malformed JSON: Exceeds the limit")


def test_hermes_equal_keys_take_the_last_value() -> None:
    (call,) = parse(block('{"name": "f", "arguments": {"x": 1, "x": 2}, "name": "g"}')).calls
    assert isinstance(call, ToolCall)
    assert (call.name, call.arguments) == ("g", {"x": 2})


@pytest.mark.parametrize("said", ["a </s> b", "<s>old price</s>", "It is <|eot_id|>", "<|im_end|>"])
@pytest.mark.parametrize("end", ["", "<|im_end|>", "<|im_end|>\n", " <|im_end|>"])
def test_hermes_the_one_end_token_is_no_content_and_other_spellings_are(
    said: str, end: str
) -> None:
    if end or said != "<|im_end|>":
        assert parse(f"{said}{end}") == ParsedTurn(content=said)


def test_hermes_deep_nesting_is_a_faulty_call() -> None:
    raw = "<tool_call>" + "[" * 1_000_000 + "</tool_call>"
    (call,) = parse(raw).calls
    assert call == InvalidToolCall(raw=raw, reason="malformed JSON: nested too deeply")


@pytest.mark.parametrize(("depth", "is_call"), [(98, True), (99, False), (900, False)])
def test_hermes_nesting_is_bounded(depth: int, is_call: bool) -> None:
    nested = "[" * depth + "1" + "]" * depth
    (call,) = parse(block(f'{{"name": "f", "arguments": {{"x": {nested}}}}}')).calls
    assert isinstance(call, ToolCall) == is_call
    if isinstance(call, InvalidToolCall):
        assert call.reason == "malformed JSON: nested too deeply"


def test_registry_unknown_format_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        get_tool_parser("hermess")
    known = ", ".join(tool_parser_names())
    assert str(caught.value) == f"unknown tool-call format 'hermess'; expected one of: {known}"
    assert "hermes" in tool_parser_names()


def test_registry_taken_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="'hermes' is registered already"):
        register_tool_parser("hermes")(type(get_tool_parser("hermes")))


def test_hermes_brackets_in_strings_are_no_nesting() -> None:
    text = "[{" * 500
    for arguments in ({"x": text}, json.dumps({"x": text})):
        turn = parse(block(json.dumps({"name": "f", "arguments": arguments})))
        assert [(made.name, made.arguments) for made in turn.calls] == [("f", {"x": text})]
