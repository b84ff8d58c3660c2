"""DeepSeek V3, R1 and V3.1, from the chat templates of the model repositories."""

from __future__ import annotations

from parser_cases.case import Bad, Case, Good

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, END_CALL, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
EOS = "<｜end▁of▁sentence｜>"


def v3(name: str, arguments: str) -> str:
    return f"{CALL}function{SEP}{name}\n```json\n{arguments}\n```{END_CALL}"


def v31(name: str, arguments: str) -> str:
    return f"{CALL}{name}{SEP}{arguments}{END_CALL}"


PARIS = '{"city": "Paris"}'
PARIS_AS_TEXT = '"{\\"city\\": \\"[1]\\"}"'
TAGS = f'{{"query": "{END_CALL}{BEGIN}"}}'
WEATHER = Good("weather", {"city": "Paris"})

CASES = [
    Case("v3_call", f"{BEGIN}{v3('weather', PARIS)}{END}{EOS}", calls=[WEATHER]),
    Case("v31_call", f"{BEGIN}{v31('weather', PARIS)}{END}{EOS}", calls=[WEATHER]),
    Case(
        "text_before",
        f"Let me look.\n{BEGIN}{v31('weather', PARIS)}{END}{EOS}",
        content="Let me look.",
        calls=[Good("weather", {"city": "Paris"}, raw=v31("weather", PARIS))],
    ),
    Case(
        "v3_parallel_calls_with_line_breaks",
        f"{BEGIN}{v3('weather', PARIS)}\n{v3('now', '{}')}{END}{EOS}",
        calls=[WEATHER, Good("now")],
    ),
    Case(
        "v31_parallel_calls",
        f"{BEGIN}{v31('weather', PARIS)}{v31('now', '{}')}{END}{EOS}",
        calls=[WEATHER, Good("now")],
    ),
    Case(
        "r1_reasoning_from_the_prompt",
        f"I could call {v31('now', '{}')}\n</think>\n\n{BEGIN}{v3('weather', PARIS)}{END}",
        calls=[WEATHER],
        reasoning=f"I could call {v31('now', '{}')}",
        in_reasoning=True,
    ),
    Case(
        "end_of_reasoning_that_nothing_opened",
        f"Hm, {BEGIN}{v31('now', '{}')}{END}</think>Hello.{EOS}",
        content="Hm, </think>Hello.",
        calls=[Good("now")],
    ),
    Case("plain_text", f"Hello.{EOS}", content="Hello."),
    Case(
        "string_that_holds_tags",
        f"{BEGIN}{v31('search', TAGS)}{END}",
        calls=[Good("search", {"query": END_CALL + BEGIN})],
    ),
    Case(
        "arguments_as_a_string_are_parsed_once",
        f"{BEGIN}{v31('weather', PARIS_AS_TEXT)}{END}",
        calls=[Good("weather", {"city": "[1]"})],
    ),
    Case("missing_end_of_section", f"{BEGIN}{v31('weather', PARIS)}", calls=[WEATHER]),
    Case("missing_begin_of_section", f"{v31('weather', PARIS)}{END}", calls=[WEATHER]),
    Case(
        "malformed_json_among_good_calls",
        f"{BEGIN}{v31('now', '{}')}{v31('weather', '{city}')}{v31('now', '{}')}{END}",
        calls=[Good("now"), Bad(v31("weather", "{city}"), "malformed JSON"), Good("now")],
    ),
    Case(
        "unclosed_call_before_another",
        f"{BEGIN}{CALL}now{SEP}{{}}{v31('weather', PARIS)}{END}",
        calls=[Bad(f"{CALL}now{SEP}{{}}", "the call is not closed"), WEATHER],
    ),
    Case(
        "truncated_arguments",
        f"{BEGIN}{CALL}weather{SEP}" + '{"city": "Par',
        calls=[Bad(f"{CALL}weather{SEP}" + '{"city": "Par', "malformed JSON")],
    ),
    Case("text_in_the_section", f"{BEGIN}oops{END}Done.", content=f"{BEGIN}oops{END}Done."),
    Case("empty_section", f"{BEGIN}{END}Done.", content=f"{BEGIN}{END}Done."),
    Case(
        "array_in_place_of_arguments",
        f"{BEGIN}{v31('now', '[]')}{END}",
        calls=[Bad(v31("now", "[]"), "must be an object")],
    ),
    Case(
        "no_name",
        f"{BEGIN}{v31('', '{}')}{END}",
        calls=[Bad(v31("", "{}"), "expected the name of a function")],
    ),
    Case(
        "text_between_calls",
        f"{BEGIN}{v31('now', '{}')}and{v31('weather', PARIS)}{END}",
        content="and",
        calls=[Good("now"), WEATHER],
    ),
]
