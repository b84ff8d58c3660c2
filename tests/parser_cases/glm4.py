"""GLM-4.5, 4.6 and 4.7, from the chat templates of the model repositories."""

from __future__ import annotations

from parser_cases.case import Bad, Case, Good, invalid


def call(name: str, **arguments: str) -> str:
    pairs = [
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        for key, value in arguments.items()
    ]
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


PARIS, WEATHER = call("weather", city="Paris"), Good("weather", {"city": "Paris"})
TIGHT = (
    "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
)

CASES = [
    Case("one_call", f"\n{PARIS}<|observation|>", calls=[WEATHER]),
    Case(
        "tight_call_of_4_7",
        f"{TIGHT}<|observation|>",
        calls=[Good("weather", {"city": "Paris", "days": 3}, raw=TIGHT)],
    ),
    Case(
        "parallel_calls",
        f"Two.\n{PARIS}\n{call('now')}<|observation|>",
        content="Two.",
        calls=[WEATHER, Good("now")],
    ),
    Case(
        "values_by_their_schema",
        call("search", query="42", k="5", ratio="2", tags='["a"]', filters="{'a': True}"),
        calls=[
            Good(
                "search", {"query": "42", "k": 5, "ratio": 2, "tags": ["a"], "filters": {"a": True}}
            )
        ],
    ),
    Case(
        "values_without_a_type_are_read_as_json",
        call("other", a="5", b="true", c="[1]", d="x y", e='"quoted"', f="null"),
        calls=[
            Good("other", {"a": 5, "b": True, "c": [1], "d": "x y", "e": '"quoted"', "f": None})
        ],
    ),
    Case(
        "text_keeps_spaces_and_breaks",
        call("search", query="  a\nb\n"),
        calls=[Good("search", {"query": "  a\nb\n"})],
    ),
    Case("value_on_lines_of_its_own", call("weather", city="\nParis\n"), calls=[WEATHER]),
    Case(
        "reasoning_before",
        f"<think>\nmaybe {PARIS}\n</think>\n{call('now')}",
        calls=[Good("now")],
        reasoning=f"maybe {PARIS}",
    ),
    Case("empty_reasoning", "<think></think>\nHello.<|user|>", content="Hello.", reasoning=""),
    Case("plain_text", "Hello.<|user|>", content="Hello."),
    Case("text_after", f"{PARIS} There.", content="There.", calls=[WEATHER]),
    invalid(
        "key_without_a_value",
        "<tool_call>weather<arg_key>city</arg_key></tool_call>",
        "expected a parameter",
    ),
    invalid(
        "value_not_closed",
        f"<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</tool_call>{PARIS}",
        "the parameter 'city' is not closed",
    ),
    Case(
        "unclosed_call_before_another",
        f"<tool_call>now\n{PARIS}",
        calls=[Bad("<tool_call>now\n", "expected a parameter"), WEATHER],
    ),
    invalid(
        "json_of_another_format",
        '<tool_call>\n{"name": "now",\n"arguments": {}}\n</tool_call>',
        "expected the name of a function",
    ),
    invalid(
        "a_text_twice_may_quote_its_own_tags",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>a</arg_value>"
        "<arg_key>city</arg_key><arg_value>b</arg_value></tool_call>",
        "given twice",
    ),
]
