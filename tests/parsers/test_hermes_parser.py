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


def test_hermes_call_with_text_around_it_is_read() -> None:
    raw = block('{"name": "search", "arguments": {"query": "Zürich", "k": 3}}')
    turn = parse(f"Let me look.\n{raw}<|im_end|>\n")
    assert turn == ParsedTurn(
        content="Let me look.",
        reasoning=None,
        calls=(
            ToolCall(name="search", arguments={"query": "Zürich", "k": 3}, id="call_0", raw=raw),
        ),
    )


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


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(alphabet='<>/|{}[]":,\\ \n' + "atcho_lknim", max_size=60), st.booleans())
def test_hermes_any_text_is_parsed_without_an_error(text: str, in_reasoning: bool) -> None:
    noise = text.replace("a", "<tool_call>").replace("c", "</tool_call>").replace("h", "<think>")
    turn = parse(noise.replace("k", "</think>"), in_reasoning=in_reasoning)
    assert all(isinstance(call, ToolCall | InvalidToolCall) for call in turn.calls)
    assert turn.content == turn.content.strip()


def test_hermes_faulty_call_stays_in_its_place_among_good_ones() -> None:
    good = '{"name": "f", "arguments": {}}'
    turn = parse(block(good) + block('{"name": "g", "arguments": {"x": 1,}}') + block(good))
    assert [type(call) for call in turn.calls] == [ToolCall, InvalidToolCall, ToolCall]
    assert turn.calls[2] == ToolCall(name="f", arguments={}, id="call_2", raw=block(good))


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
        ('{"name": "f"} {}', "malformed JSON: more text follows the call"),
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
        ('{"name": "f", "arguments": {"x": NaN}}', "malformed JSON: NaN is not JSON"),
        ("__import__('os')", "malformed JSON: Expecting value: line 1 column 1 (char 0)"),
    ],
)
def test_hermes_faulty_call_says_what_is_wrong(body: str, reason: str) -> None:
    assert only_reason(body) == reason


def test_hermes_huge_integer_is_a_faulty_call() -> None:
    reason = only_reason('{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}")
    assert reason.startswith("malformed JSON: Exceeds the limit")


def test_hermes_arguments_written_as_a_string_are_parsed_once() -> None:
    inner = json.dumps({"x": 1, "text": json.dumps({"y": 2})})
    (call,) = parse(block(json.dumps({"name": "f", "arguments": inner}))).calls
    assert isinstance(call, ToolCall)
    assert call.arguments == {"x": 1, "text": '{"y": 2}'}


def test_hermes_call_without_arguments_has_none() -> None:
    (call,) = parse(block('{"name": "now"}')).calls
    assert call == ToolCall(name="now", arguments={}, id="call_0", raw=block('{"name": "now"}'))


def test_hermes_equal_keys_take_the_last_value() -> None:
    (call,) = parse(block('{"name": "f", "arguments": {"x": 1, "x": 2}, "name": "g"}')).calls
    assert isinstance(call, ToolCall)
    assert (call.name, call.arguments) == ("g", {"x": 2})


def test_hermes_arguments_that_hold_tags_do_not_end_the_call() -> None:
    text = "</tool_call><think><tool_call>{}</tool_call>"
    raw = block(json.dumps({"name": "write", "arguments": {"text": text}}))
    turn = parse(f"{raw} done")
    assert turn == ParsedTurn(
        content="done",
        calls=(ToolCall(name="write", arguments={"text": text}, id="call_0", raw=raw),),
    )


@pytest.mark.parametrize("body", ['{"name": "f", "arguments": {}}', '{"name": "f", "argum'])
def test_hermes_unclosed_call_is_invalid_up_to_the_end(body: str) -> None:
    turn = parse(f"so <tool_call>\n{body}<|im_end|>")
    assert turn.content == "so"
    assert turn.calls == (
        InvalidToolCall(
            raw=f"<tool_call>\n{body}", reason="the call is not closed by </tool_call>"
        ),
    )


def test_hermes_unclosed_call_before_another_leaves_the_other_alone() -> None:
    raw = '<tool_call>{"name": "a", "arguments": {}}'
    other = block('{"name": "b"}')
    turn = parse(f"{raw}\n{other}")
    assert turn.calls[0] == InvalidToolCall(
        raw=raw, reason="the call is not closed by </tool_call>"
    )
    assert isinstance(turn.calls[1], ToolCall)
    assert (turn.calls[1].name, turn.calls[1].id) == ("b", "call_1")


def test_hermes_call_inside_reasoning_is_never_a_call() -> None:
    call = block('{"name": "rm", "arguments": {}}')
    turn = parse(f"<think>\nmaybe {call}\n</think>\n\nNo.<|im_end|>")
    assert turn == ParsedTurn(content="No.", reasoning=f"maybe {call}")


def test_hermes_reasoning_between_calls_is_separated() -> None:
    call = block('{"name": "f"}')
    turn = parse(f"<think>one</think>a{call}<think>two {call}</think>b")
    assert (turn.content, turn.reasoning) == ("ab", "one\ntwo " + call)
    assert [call.raw for call in turn.calls] == [call]


@pytest.mark.parametrize("opening", ["<think>", "  \n<think>"])
def test_hermes_unclosed_reasoning_takes_everything(opening: str) -> None:
    call = block('{"name": "f"}')
    assert parse(f"{opening}hm {call}<|im_end|>") == ParsedTurn(content="", reasoning=f"hm {call}")


def test_hermes_text_that_starts_in_reasoning_is_reasoning_until_closed() -> None:
    call = block('{"name": "f"}')
    closed = parse(f"hm {call}</think>\n{call}", in_reasoning=True)
    assert closed.reasoning == f"hm {call}"
    assert [call.id for call in closed.calls if isinstance(call, ToolCall)] == ["call_0"]
    assert parse(f"hm {call}", in_reasoning=True) == ParsedTurn(content="", reasoning=f"hm {call}")
    again = parse("<think>\nhm</think>yes", in_reasoning=True)
    assert again == ParsedTurn(content="yes", reasoning="hm")


def test_hermes_empty_reasoning_is_told_apart_from_none() -> None:
    assert parse("<think>\n\n</think>\n\nhi") == ParsedTurn(content="hi", reasoning="")
    assert parse("hi") == ParsedTurn(content="hi", reasoning=None)
    assert parse("") == ParsedTurn(content="")


@pytest.mark.parametrize("said", ["a </s> b", "<s>old price</s>", "It is <|eot_id|>", "<|im_end|>"])
@pytest.mark.parametrize("end", ["", "<|im_end|>", "<|im_end|>\n", " <|im_end|>"])
def test_hermes_the_one_end_token_is_no_content_and_other_spellings_are(
    said: str, end: str
) -> None:
    if end or said != "<|im_end|>":
        assert parse(f"{said}{end}") == ParsedTurn(content=said)


def test_hermes_string_that_is_never_closed_holds_all_that_follows() -> None:
    raw = '<tool_call>{"name": "f</tool_call> and more </tool_call> text'
    turn = parse(raw)
    reason = "malformed JSON: Unterminated string starting at: line 1 column 10 (char 9)"
    assert turn == ParsedTurn(
        content="", calls=(InvalidToolCall(raw=raw, reason=reason),), written=raw
    )


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
