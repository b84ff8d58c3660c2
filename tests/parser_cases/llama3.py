"""Llama 3.1 to 3.3, from Meta's pages on prompt formats."""

from __future__ import annotations

from parser_cases.case import Bad, Case, Good, invalid

TAG = "<|python_tag|>"
PARIS, WEATHER = (
    '{"name": "weather", "parameters": {"city": "Paris"}}',
    Good("weather", {"city": "Paris"}),
)
NOW = '{"name": "now", "parameters": {}}'

CASES = [
    Case(
        "bare_object", f"{PARIS}<|eot_id|>", calls=[Good("weather", {"city": "Paris"}, raw=PARIS)]
    ),
    Case(
        "tagged_object",
        f"{TAG}{PARIS}<|eom_id|>",
        calls=[Good("weather", {"city": "Paris"}, raw=TAG + PARIS)],
    ),
    Case(
        "arguments_in_place_of_parameters",
        '{"name": "now", "arguments": {"x": 1}}',
        calls=[Good("now", {"x": 1})],
    ),
    Case(
        "type_function",
        '{"type": "function", "name": "now", "parameters": {}}<|eot_id|>',
        calls=[Good("now")],
    ),
    Case("parallel_calls", f"{PARIS}; {NOW}<|eom_id|>", calls=[WEATHER, Good("now")]),
    Case("text_before_the_tag", f"Looking.{TAG}{PARIS}", content="Looking.", calls=[WEATHER]),
    Case(
        "built_in_tool",
        f'{TAG}brave_search.call(query="a \\"b\\" c")<|eom_id|>',
        calls=[Good("brave_search", {"query": 'a "b" c'})],
    ),
    Case(
        "function_tag",
        'So <function=weather>{"city": "Paris"}</function><|eom_id|>',
        content="So",
        calls=[WEATHER],
    ),
    Case(
        "parameters_as_a_string",
        '{"name": "now", "parameters": "{\\"x\\": \\"1\\"}"}',
        calls=[Good("now", {"x": "1"})],
    ),
    Case("object_that_is_an_answer", '{"answer": 5}<|eot_id|>', content='{"answer": 5}'),
    Case("name_alone_is_an_answer", '{"name": "Ada"}<|eot_id|>', content='{"name": "Ada"}'),
    Case("object_in_the_middle_is_content", f"Say {PARIS}", content=f"Say {PARIS}"),
    Case("broken_object_that_is_an_answer", '{"answer": 5', content='{"answer": 5'),
    Case("plain_text", "Hello.<|eot_id|>", content="Hello."),
    Case(
        "reasoning_before", f"<think>{PARIS}</think>\n{NOW}", calls=[Good("now")], reasoning=PARIS
    ),
    Case(
        "malformed_call_reaches_to_the_end",
        f'{PARIS}; {{"name": "weather", "parameters": {{city}}}}; {NOW}',
        calls=[
            WEATHER,
            Bad(f'{{"name": "weather", "parameters": {{city}}}}; {NOW}', "malformed JSON"),
        ],
    ),
    invalid("truncated", '{"name": "weather", "parameters": {"city": "Par', "malformed JSON"),
    Case(
        "code_is_no_call",
        f"{TAG}import os\nos.remove('x')<|eom_id|>",
        calls=[Bad(f"{TAG}import os\nos.remove('x')", "expected a JSON call")],
    ),
    invalid(
        "built_in_tool_with_an_expression",
        f"{TAG}brave_search.call(query=name)",
        "expected a literal",
    ),
    Case(
        "function_tag_not_closed",
        "<function=now>{}<|eot_id|>",
        calls=[Bad("<function=now>{}", "the call is not closed")],
    ),
    invalid(
        "name_is_no_string", f'{TAG}{{"name": 3, "parameters": {{}}}}', "must be a non-empty string"
    ),
    invalid("unknown_keys", f'{TAG}{{"name": "now", "args": {{}}}}', 'has no "parameters"'),
]
