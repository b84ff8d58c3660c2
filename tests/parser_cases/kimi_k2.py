"""Kimi K2, from the model's guide to tool calls."""

from __future__ import annotations

from parser_cases.case import Bad, Case, Good

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, END_CALL, SEP = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"


def call(head: str, arguments: str) -> str:
    return f"{CALL}{head}{SEP}{arguments}{END_CALL}"


PARIS = call("functions.weather:0", '{"city": "Paris"}')
WEATHER = Good("weather", {"city": "Paris"}, id="functions.weather:0")
NOW = Good("now", id="functions.now:1")

CASES = [
    Case("one_call", f"{BEGIN}{PARIS}{END}<|im_end|>", calls=[WEATHER]),
    Case(
        "parallel_calls_keep_their_ids",
        f"{BEGIN}{PARIS}{call('functions.now:1', '{}')}{END}<|im_end|>",
        calls=[WEATHER, NOW],
    ),
    Case("text_after", f"{BEGIN}{PARIS}{END} There.", content="There.", calls=[WEATHER]),
    Case(
        "reasoning_before",
        f"<think>maybe {PARIS}</think>{BEGIN}{PARIS}{END}",
        calls=[WEATHER],
        reasoning=f"maybe {PARIS}",
    ),
    Case("plain_text", "Hello.<|im_end|>", content="Hello."),
    Case(
        "id_without_index",
        f"{BEGIN}{call('functions.now', '{}')}{END}",
        calls=[Good("now", id="functions.now")],
    ),
    Case(
        "name_with_dots_and_dashes",
        f"{BEGIN}{call('functions.a.b-c:7', '{}')}{END}",
        calls=[Good("a.b-c", id="functions.a.b-c:7")],
    ),
    Case(
        "an_id_used_twice_counts_once",
        f"{BEGIN}{PARIS}{PARIS}{END}",
        calls=[WEATHER, Good("weather", {"city": "Paris"})],
    ),
    Case(
        "bare_counter_names_no_function",
        f"{BEGIN}{call('3', '{}')}{END}",
        calls=[Bad(call("3", "{}"), "expected functions.NAME:INDEX")],
    ),
    Case(
        "nameless",
        f"{BEGIN}{call('functions.:0', '{}')}{END}",
        calls=[Bad(call("functions.:0", "{}"), "expected functions.NAME:INDEX")],
    ),
    Case(
        "malformed_json",
        f"{BEGIN}{call('functions.now:1', '{,}')}{PARIS}{END}",
        calls=[Bad(call("functions.now:1", "{,}"), "malformed JSON"), WEATHER],
    ),
    Case(
        "unclosed_call",
        f"{BEGIN}{CALL}functions.now:1{SEP}{{}}<|im_end|>",
        calls=[Bad(f"{CALL}functions.now:1{SEP}{{}}", "the call is not closed")],
    ),
    Case(
        "truncated_before_arguments",
        f"{BEGIN}{CALL}functions.now",
        calls=[Bad(f"{CALL}functions.now", "expected functions.NAME:INDEX")],
    ),
    Case("call_without_a_section", PARIS, calls=[WEATHER]),
    Case("section_without_calls", f"{BEGIN}\n{END}", content=f"{BEGIN}\n{END}"),
    Case(
        "more_text_after_the_json",
        f"{BEGIN}{call('functions.now:1', '{} {}')}{END}",
        calls=[Bad(call("functions.now:1", "{} {}"), "the call is not closed")],
    ),
]
