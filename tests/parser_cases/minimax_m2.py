"""MiniMax M2, from the model's guide to tool calls."""

from __future__ import annotations

from parser_cases.case import Bad, Case, Good, invalid

BEGIN, END = "<minimax:tool_call>", "</minimax:tool_call>"


def invoke(name: str, *parameters: str) -> str:
    lines = [f'<invoke name="{name}">', *parameters, "</invoke>"]
    return "\n".join(lines)


def parameter(name: str, value: str) -> str:
    return f'<parameter name="{name}">{value}</parameter>'


PARIS = invoke("weather", parameter("city", "Paris"))
WEATHER = Good("weather", {"city": "Paris"})

CASES = [
    Case("one_call", f"{BEGIN}\n{PARIS}\n{END}[e~[", calls=[WEATHER]),
    Case(
        "parallel_calls_in_one_block",
        f"{BEGIN}\n{PARIS}\n{invoke('now')}\n{END}",
        calls=[
            Good("weather", {"city": "Paris"}, raw=f"{BEGIN}\n{PARIS}"),
            Good("now", raw=f"{invoke('now')}\n{END}"),
        ],
    ),
    Case(
        "values_by_their_schema",
        f"{BEGIN}"
        + invoke(
            "search",
            parameter("query", "42"),
            parameter("k", "5"),
            parameter("ratio", "0.5"),
            parameter("tags", '["a", "b"]'),
            parameter("filters", '{"lang": "de"}'),
        )
        + END,
        calls=[
            Good(
                "search",
                {
                    "query": "42",
                    "k": 5,
                    "ratio": 0.5,
                    "tags": ["a", "b"],
                    "filters": {"lang": "de"},
                },
            )
        ],
    ),
    Case(
        "null_of_a_union",
        f"{BEGIN}{invoke('search', parameter('k', 'null'), parameter('query', 'null'))}{END}",
        calls=[Good("search", {"k": None, "query": "null"})],
    ),
    Case(
        "value_on_lines_of_its_own",
        f"{BEGIN}{invoke('weather', parameter('city', chr(10) + 'Paris' + chr(10)))}{END}",
        calls=[WEATHER],
    ),
    Case(
        "value_keeps_its_last_line_break",
        f"{BEGIN}{invoke('search', parameter('query', 'a' + chr(10) + 'b' + chr(10)))}{END}",
        calls=[Good("search", {"query": "a\nb\n"})],
    ),
    Case(
        "unknown_tool_keeps_text",
        f"{BEGIN}{invoke('other', parameter('x', '5'))}{END}",
        calls=[Good("other", {"x": "5"})],
    ),
    Case(
        "reasoning_from_the_prompt",
        f"maybe {BEGIN}{PARIS}{END}</think>{BEGIN}{invoke('now')}{END}",
        calls=[Good("now")],
        reasoning=f"maybe {BEGIN}{PARIS}{END}",
        in_reasoning=True,
    ),
    Case("plain_text", "Hello.[e~[", content="Hello."),
    Case(
        "whole_invoke_outside_a_block_is_content",
        f"Claude writes {PARIS} so.",
        content=f"Claude writes {PARIS} so.",
    ),
    Case("missing_end_of_block", f"{BEGIN}{PARIS}[e~[", calls=[WEATHER]),
    invalid("unclosed_invoke", f'{BEGIN}<invoke name="now">{END}', "expected a parameter"),
    Case(
        "unclosed_invoke_before_another",
        f'{BEGIN}<invoke name="now">{PARIS}{END}',
        calls=[Bad(f'{BEGIN}<invoke name="now">', "expected a parameter"), WEATHER],
    ),
    invalid(
        "truncated_value",
        f'{BEGIN}<invoke name="weather"><parameter name="city">Par',
        "the parameter 'city' is not closed",
    ),
    invalid("nameless", f"{BEGIN}{invoke('')}{END}", "expected <invoke"),
    Case(
        "a_text_twice_may_quote_its_own_tags",
        f"{BEGIN}{invoke('weather', parameter('city', 'a'), parameter('city', 'b'))}{END}",
        calls=[
            Bad(
                BEGIN + invoke("weather", parameter("city", "a"), parameter("city", "b")) + END,
                "given twice",
            )
        ],
    ),
]
