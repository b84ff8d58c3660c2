"""Python lists of calls, from Meta's pages on Llama 3.2 and 4."""

from __future__ import annotations

from parser_cases.case import Bad, Case, Good, invalid

PARIS, WEATHER = 'weather(city="Paris")', Good("weather", {"city": "Paris"})

CASES = [
    Case("one_call", f"[{PARIS}]<|eot_id|>", calls=[Good("weather", {"city": "Paris"}, raw=PARIS)]),
    Case("parallel_calls", f"[{PARIS}, now()]<|eot|>", calls=[WEATHER, Good("now")]),
    Case("marks_of_llama_4", f"<|python_start|>[{PARIS}]<|python_end|><|eom|>", calls=[WEATHER]),
    Case(
        "all_kinds_of_literals",
        "[search(query='it\\'s', k=5, ratio=-1.5e-3, tags=['a', \"b\",], "
        "filters={'x': [True, None], 'y': {}}, pair=(1, 2), one=(1))]",
        calls=[
            Good(
                "search",
                {
                    "query": "it's",
                    "k": 5,
                    "ratio": -0.0015,
                    "tags": ["a", "b"],
                    "filters": {"x": [True, None], "y": {}},
                    "pair": [1, 2],
                    "one": 1,
                },
            )
        ],
    ),
    Case(
        "json_constants",
        "[f(a=true, b=false, c=null, d=[null, true])]",
        calls=[Good("f", {"a": True, "b": False, "c": None, "d": [None, True]})],
    ),
    Case(
        "escapes",
        r'[f(a="\x41é\n\\d \d", b=r"\n", c="a" "b")]',
        calls=[Good("f", {"a": "Aé\n\\d \\d", "b": r"\n", "c": "ab"})],
    ),
    Case("text_over_lines", '[f(a="""x\n"y"\n""")]', calls=[Good("f", {"a": 'x\n"y"\n'})]),
    Case("white_space", "[\n  weather( city = 'Paris' ,\n ) ,\n]", calls=[WEATHER]),
    Case("dotted_name", "[a.b(x=1)]", calls=[Good("a.b", {"x": 1})]),
    Case("text_around", f"Looking: [{PARIS}] done", content="Looking:  done", calls=[WEATHER]),
    Case("two_lists", f"[{PARIS}]\n[now()]", calls=[WEATHER, Good("now")]),
    Case(
        "string_that_holds_a_call",
        "[f(a='[now()]', b=\")]\")]",
        calls=[Good("f", {"a": "[now()]", "b": ")]"})],
    ),
    Case(
        "reasoning_before",
        f"<think>[{PARIS}]</think>[now()]",
        calls=[Good("now")],
        reasoning=f"[{PARIS}]",
    ),
    Case("plain_text", "Hello [1] [a] [b](c).", content="Hello [1] [a] [b](c)."),
    Case(
        "mathematics_is_content", "On [f(a), f(b)] it grows.", content="On [f(a), f(b)] it grows."
    ),
    invalid("positional_argument", "[weather('Paris')]", "expected name=value"),
    Case(
        "malformed_call_of_an_offered_tool_in_a_line",
        "So [weather('Paris')]",
        content="So",
        calls=[Bad("[weather('Paris')]", "expected name=value")],
    ),
    invalid("expression_as_an_argument", "[f(x=1 + 1)]", "expected a literal"),
    invalid("nested_call", "[f(x=g(y=1))]", "expected a literal"),
    invalid("truncated_list", f"[{PARIS}, now()", "expected a value"),
    invalid("truncated_string", "[weather(city='Par", "expected a value"),
    invalid("one_faulty_call_makes_the_list_invalid", f"[{PARIS}, now(1)]", "expected name=value"),
]
