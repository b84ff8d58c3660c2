"""The Hermes parser: calls in order, faults in place, reasoning apart, linear time."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.chat import ParsedTurn, get_tool_parser
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
        ('{"name": "f", "arguments": {"x": 1]}', "malformed JSON: Expecting ',' delimiter"),
        ('{"name": "f"} {}', "the call is not closed"),
        ('{"arguments": {}}', 'the call has no "name"'),
        ('{"name": " ", "arguments": {}}', "\"name\" must be a non-empty string, not ' '"),
        ('{"name": "f", "arguments": null}', '"arguments" must be an object, not null'),
        ('{"name": "f", "arguments": "3"}', '"arguments" must be an object, not a number'),
        ('{"name": "f", "arguments": "{oops"}', '"arguments" is a string of malformed JSON'),
        ('{"name": "f", "parameters": {}}', 'the call has no "arguments", but "parameters"'),
        ('["f", {}]', "a call must be an object with name and arguments, not an array"),
        ('{"name": "f", "arguments": {"x": NaN}}', "NaN is not a finite number"),
    ],
)
def test_hermes_faulty_call_says_what_is_wrong(body: str, reason: str) -> None:
    turn = parse(f"before {block(body)} after")
    (call,) = turn.calls
    assert isinstance(call, InvalidToolCall)
    assert call.raw == block(body)
    assert reason in call.reason
    assert turn.content == "before  after"


@pytest.mark.parametrize(
    ("name", "end"),
    [("hermes", "<|im_end|>\n"), ("llama3", "<|eot_id|>"), ("pythonic", "<|eot|>")],
)
@pytest.mark.parametrize("said", ["a </s> b", "<s>old price</s>", "It is <|eot_id|>"])
def test_end_token_is_no_content_and_other_spellings_are(name: str, end: str, said: str) -> None:
    assert get_tool_parser(name).parse(f"{said}{end}") == ParsedTurn(content=said)


@pytest.mark.parametrize(("depth", "is_call"), [(98, True), (99, False), (900, False)])
def test_hermes_nesting_is_bounded(depth: int, is_call: bool) -> None:
    nested = "[" * depth + "1" + "]" * depth
    (call,) = parse(block(f'{{"name": "f", "arguments": {{"x": {nested}}}}}')).calls
    assert isinstance(call, ToolCall) == is_call
    if isinstance(call, InvalidToolCall):
        assert call.reason == "malformed JSON: nested too deeply"


def test_hermes_brackets_in_strings_are_no_nesting() -> None:
    text = "[{" * 500
    for arguments in ({"x": text}, json.dumps({"x": text})):
        turn = parse(block(json.dumps({"name": "f", "arguments": arguments})))
        assert [(made.name, made.arguments) for made in turn.calls] == [("f", {"x": text})]
