"""Mistral, from mistral-common's encodings of tool calls (v3, v7, v11, v13)."""

from __future__ import annotations

from parser_cases.case import Bad, Case, Good, invalid

MARK = "[TOOL_CALLS]"
PARIS, WEATHER = (
    '{"name": "weather", "arguments": {"city": "Paris"}}',
    Good("weather", {"city": "Paris"}),
)
NOW = '{"name": "now", "arguments": {}}'

CASES = [
    Case("v3_array", f"{MARK} [{PARIS}]</s>", calls=[WEATHER]),
    Case("v7_array_without_space", f"{MARK}[{PARIS}]</s>", calls=[WEATHER]),
    Case("array_of_two", f"{MARK} [{PARIS}, {NOW}]</s>", calls=[WEATHER, Good("now", raw=NOW)]),
    Case(
        "array_with_an_id",
        f'{MARK}[{{"name": "now", "arguments": {{}}, "id": "abcdefghi"}}]</s>',
        calls=[Good("now", id="abcdefghi")],
    ),
    Case(
        "v11_with_an_id",
        f'{MARK}weather[CALL_ID]abcdefghi[ARGS]{{"city": "Paris"}}</s>',
        calls=[Good("weather", {"city": "Paris"}, id="abcdefghi")],
    ),
    Case("v13", f'{MARK}weather[ARGS]{{"city": "Paris"}}</s>', calls=[WEATHER]),
    Case(
        "v13_parallel",
        f'{MARK}weather[ARGS]{{"city": "Paris"}}{MARK}now[ARGS]{{}}</s>',
        calls=[WEATHER, Good("now", raw=f"{MARK}now[ARGS]{{}}")],
    ),
    Case("text_after", f"{MARK}[{NOW}] Done.", content="Done.", calls=[Good("now")]),
    Case(
        "arguments_as_a_string",
        f'{MARK}[{{"name": "now", "arguments": "{{}}"}}]',
        calls=[Good("now")],
    ),
    Case("call_without_arguments", f'{MARK}[{{"name": "now"}}]', calls=[Good("now")]),
    Case(
        "reasoning_of_magistral",
        f"[THINK]I draft {MARK}now[ARGS]{{}}[/THINK]Ok.{MARK}[{PARIS}]",
        content="Ok.",
        calls=[WEATHER],
        reasoning=f"I draft {MARK}now[ARGS]{{}}",
    ),
    Case(
        "reasoning_in_tags_of_text",
        f"<think>x</think>{MARK}[{NOW}]",
        calls=[Good("now")],
        reasoning="x",
    ),
    Case("plain_text", "Hello [1].</s>", content="Hello [1]."),
    Case(
        "string_that_holds_brackets",
        f'{MARK}[{{"name": "f", "arguments": {{"a": "]}}["}}}}]',
        calls=[Good("f", {"a": "]}["})],
    ),
    Case(
        "faulty_element_keeps_its_place",
        f'{MARK}[{NOW}, {{"name": "now", "arguments": []}}, {NOW}]',
        calls=[
            Good("now"),
            Bad('{"name": "now", "arguments": []}', "must be an object"),
            Good("now"),
        ],
    ),
    Case(
        "malformed_json_ends_the_array",
        f"{MARK}[{NOW}, {{oops}}, {PARIS}] x",
        calls=[Good("now"), Bad(f"{{oops}}, {PARIS}] x", "malformed JSON")],
    ),
    Case(
        "malformed_call_reaches_to_the_end",
        f"{MARK}now[ARGS]{{}}{MARK}weather[ARGS]{{{MARK}now[ARGS]{{}}",
        calls=[Good("now"), Bad(f"{MARK}weather[ARGS]{{{MARK}now[ARGS]{{}}", "malformed JSON")],
    ),
    Case(
        "truncated_array",
        f'{MARK}[{NOW}, {{"name": "wea',
        calls=[Good("now"), Bad('{"name": "wea', "malformed JSON")],
    ),
    Case("array_not_closed", f"{MARK}[{NOW}</s>", calls=[Good("now")]),
    invalid("text_in_place_of_a_call", f"{MARK} now please", "expected an array of calls"),
]
