"""Qwen3-Coder and Seed-OSS, from the chat templates of the model repositories."""

from __future__ import annotations

from parser_cases.case import Bad, Case, Good, invalid


def cases(block: str, think: str, end: str) -> list[Case]:
    begin, end_block, think_end = f"<{block}>", f"</{block}>", think.replace("<", "</")

    def function(name: str, **parameters: str) -> str:
        lines = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items()]
        return f"<function={name}>\n{''.join(lines)}</function>"

    def call(name: str, **parameters: str) -> str:
        return f"{begin}\n{function(name, **parameters)}\n{end_block}"

    paris, weather = call("weather", city="Paris"), Good("weather", {"city": "Paris"})
    return [
        Case("one_call", f"{paris}{end}", calls=[Good("weather", {"city": "Paris"}, raw=paris)]),
        Case(
            "parallel_calls",
            f"Two:\n{paris}\n{call('now')}{end}",
            content="Two:",
            calls=[weather, Good("now")],
        ),
        Case(
            "values_by_their_schema",
            call(
                "search",
                query="42",
                k="5",
                ratio="1e-3",
                tags="['a', \"b\"]",
                filters='{"lang": "de", "n": [1, null]}',
                level="2",
                anything="7",
            ),
            calls=[
                Good(
                    "search",
                    {
                        "query": "42",
                        "k": 5,
                        "ratio": 0.001,
                        "tags": ["a", "b"],
                        "filters": {"lang": "de", "n": [1, None]},
                        "level": 2,
                        "anything": "7",
                    },
                )
            ],
        ),
        Case(
            "booleans_enums_and_null",
            call("weather", precise="True", unit="kelvin", days="3.0")
            + call("search", k="null", query="null"),
            calls=[
                Good("weather", {"precise": True, "unit": "kelvin", "days": 3}),
                Good("search", {"k": None, "query": "null"}),
            ],
        ),
        Case(
            "what_does_not_fit_its_type_stays_text",
            call("weather", days="soon", precise="maybe") + call("search", ratio="1e999", tags="a"),
            calls=[
                Good("weather", {"days": "soon", "precise": "maybe"}),
                Good("search", {"ratio": "1e999", "tags": "a"}),
            ],
        ),
        Case(
            "nothing_is_evaluated",
            call("search", tags="[__import__('os').system('true')]", filters="{x: 2}"),
            calls=[
                Good("search", {"tags": "[__import__('os').system('true')]", "filters": "{x: 2}"})
            ],
        ),
        Case(
            "text_of_several_lines_keeps_its_inner_breaks",
            call("search", query="\n  def f():\n    pass\n"),
            calls=[Good("search", {"query": "\n  def f():\n    pass\n"})],
        ),
        Case(
            "value_on_one_line",
            f"{begin}<function=weather><parameter=city>Paris</parameter></function>{end_block}",
            calls=[weather],
        ),
        Case("block_tags_missing", function("weather", city="Paris"), calls=[weather]),
        Case(
            "block_not_closed",
            f"{begin}\n{function('weather', city='Paris')}{end}",
            calls=[weather],
        ),
        Case(
            "two_functions_in_a_block",
            f"{begin}{function('now')}{function('weather', city='Paris')}{end_block}",
            calls=[Good("now"), weather],
        ),
        Case(
            "reasoning_before",
            f"{think}I draft {paris}{think_end}\n\nOk.{call('now')}",
            content="Ok.",
            calls=[Good("now")],
            reasoning=f"I draft {paris}",
        ),
        Case("plain_text", f"Hello. 1 < 2{end}", content="Hello. 1 < 2"),
        Case(
            "function_not_closed",
            f"{begin}<function=now>{end_block} Then.",
            content="Then.",
            calls=[Bad(f"{begin}<function=now>{end_block}", "expected a parameter")],
        ),
        invalid(
            "parameter_not_closed",
            f"{begin}<function=weather><parameter=city>Paris</function>{end_block}{paris}",
            "the parameter 'city' is not closed",
        ),
        invalid(
            "truncated_value",
            f"{begin}<function=weather><parameter=city>Par",
            "the parameter 'city' is not closed",
        ),
        Case(
            "truncated_after_a_parameter",
            f"{begin}<function=weather><parameter=city>Paris</parameter>{end}",
            calls=[
                Bad(
                    f"{begin}<function=weather><parameter=city>Paris</parameter>",
                    "the call is not closed",
                )
            ],
        ),
        invalid(
            "nameless", f"{begin}<function=></function>{end_block}", "expected <function=NAME>"
        ),
        Case(
            "nested_block",
            f"{begin}<function=now>{paris}{end_block}",
            content=end_block,
            calls=[Bad(f"{begin}<function=now>", "expected a parameter"), weather],
        ),
        invalid(
            "a_text_twice_may_quote_its_own_tags",
            f"{begin}<function=weather><parameter=city>a</parameter><parameter=city>b</parameter>"
            f"</function>{end_block}",
            "given twice",
        ),
    ]


QWEN3_CODER = cases("tool_call", "<think>", "<|im_end|>")
SEED_OSS = cases("seed:tool_call", "<seed:think>", "<seed:eos>")
