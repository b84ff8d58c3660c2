"""Gemma 4, FunctionGemma and Gemma 3, from Google's pages on function calling."""

from __future__ import annotations

from parser_cases.case import Bad, Case, Good, invalid


def call(body: str) -> str:
    return f"<|tool_call>call:{body}<tool_call|>"


def small(body: str) -> str:
    return f"<start_function_call>call:{body}<end_function_call>"


PARIS, WEATHER = call('weather{city:<|"|>Paris<|"|>}'), Good("weather", {"city": "Paris"})

CASES = [
    Case(
        "gemma_4", f"{PARIS}<|tool_response>", calls=[Good("weather", {"city": "Paris"}, raw=PARIS)]
    ),
    Case(
        "gemma_4_parallel", f"{PARIS}{call('now{}')}<|tool_response>", calls=[WEATHER, Good("now")]
    ),
    Case(
        "gemma_4_values",
        call('f{a:1,b:-2.5,c:true,d:null,e:[1,<|"|>x,]<|"|>],g:{h:[],i:{}},j:<|"|><|"|>}'),
        calls=[
            Good(
                "f",
                {
                    "a": 1,
                    "b": -2.5,
                    "c": True,
                    "d": None,
                    "e": [1, "x,]"],
                    "g": {"h": [], "i": {}},
                    "j": "",
                },
            )
        ],
    ),
    Case(
        "gemma_4_unmarked_words",
        call("weather{city: New York, time: 10:30}"),
        calls=[Good("weather", {"city": "New York", "time": "10:30"})],
    ),
    Case("gemma_4_marked_keys", call('f{<|"|>a b<|"|>:1}'), calls=[Good("f", {"a b": 1})]),
    Case(
        "gemma_4_thought",
        f"<|channel>thought\nmaybe {PARIS}\n<channel|>{call('now{}')}",
        calls=[Good("now")],
        reasoning=f"maybe {PARIS}",
    ),
    Case(
        "function_gemma",
        f"{small('weather{city:<escape>Paris<escape>}')}<start_function_response>",
        calls=[WEATHER],
    ),
    Case(
        "function_gemma_parallel", small("now{}") + small("now{}"), calls=[Good("now"), Good("now")]
    ),
    Case(
        "fence",
        "Sure.\n```tool_code\nweather(city='Paris')\n```<end_of_turn>",
        content="Sure.",
        calls=[WEATHER],
    ),
    Case(
        "fence_with_print",
        "```tool_code\nprint(weather(city='Paris'))\nnow()\n```",
        calls=[WEATHER, Good("now")],
    ),
    Case(
        "fence_with_a_list",
        "```tool_code\n[now(), weather(city='Paris')]\n```",
        calls=[Good("now"), WEATHER],
    ),
    Case("python_list", "[weather(city='Paris')]<end_of_turn>", calls=[WEATHER]),
    Case("json_object", '{"name": "weather", "parameters": {"city": "Paris"}}', calls=[WEATHER]),
    Case("json_answer", '{"city": "Paris"}<end_of_turn>', content='{"city": "Paris"}'),
    Case("plain_text", "Hello.<turn|>", content="Hello."),
    Case("other_fences_are_content", "```python\nnow()\n```", content="```python\nnow()\n```"),
    invalid("unclosed_call", "<|tool_call>call:now{}", "the call is not closed"),
    Case(
        "unclosed_call_before_another",
        f"<|tool_call>call:now{{}}{PARIS}",
        calls=[Bad("<|tool_call>call:now{}", "the call is not closed"), WEATHER],
    ),
    invalid("truncated_string", '<|tool_call>call:weather{city:<|"|>Par', "expected a value"),
    Case(
        "brace_not_closed",
        f"{call('now{x:1')}{PARIS}",
        calls=[Bad(call("now{x:1"), "expected , or }"), WEATHER],
    ),
    invalid(
        "json_in_place_of_a_call", '<|tool_call>{"name": "now"}<tool_call|>', "expected call:NAME"
    ),
    Case(
        "code_in_the_fence",
        "```tool_code\nimport os\n```Then.",
        content="Then.",
        calls=[Bad("```tool_code\nimport os\n```", "expected a call of a function")],
    ),
    invalid("fence_not_closed", "```tool_code\nnow()", "expected a call of a function"),
]
