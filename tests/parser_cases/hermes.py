"""Hermes, from NousResearch's page on function calling and Qwen's chat templates."""

from __future__ import annotations

from parser_cases.case import Bad, Case, Good, invalid


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


PARIS = call('{"name": "weather", "arguments": {"city": "Paris"}}')
NOW = call('{"name": "now", "arguments": {}}')
WEATHER = Good("weather", {"city": "Paris"}, raw=PARIS)
UNCLOSED = "the call is not closed by </tool_call>"

CASES = [
    Case("one_call", f"{PARIS}<|im_end|>", calls=[WEATHER]),
    Case("parallel_calls", f"Two.\n{PARIS}\n{NOW}<|im_end|>", "Two.", [WEATHER, Good("now")]),
    Case("no_arguments", call('{"name": "now"}'), "", [Good("now")]),
    Case(
        "string_arguments",
        call('{"name": "f", "arguments": "{\\"x\\": \\"{}\\"}"}'),
        "",
        [Good("f", {"x": "{}"})],
    ),
    Case(
        "tags_in_a_string",
        call('{"name": "f", "arguments": {"x": "</tool_call><think>"}}'),
        "",
        [Good("f", {"x": "</tool_call><think>"})],
    ),
    Case("reasoning_before", f"<think>{NOW}</think>{PARIS}", "", [WEATHER], NOW),
    Case(
        "reasoning_between", f"<think>a</think>b{NOW}<think>c</think>d", "bd", [Good("now")], "a\nc"
    ),
    Case("cut_in_reasoning", f"<think>{NOW}", reasoning=NOW),
    Case("cut_in_reasoning_from_the_prompt", NOW, reasoning=NOW, in_reasoning=True),
    Case("reasoning_opened_again", "<think>\nhm</think>yes", "yes", (), "hm", True),
    Case("empty_reasoning", "<think>\n\n</think>\n\nhi", "hi", reasoning=""),
    Case("reasoning_from_the_prompt", f"{NOW}</think>Ok {PARIS}", "Ok", [WEATHER], NOW, True),
    Case("end_of_reasoning_that_nothing_opened", f"{NOW}</think>Ok", "</think>Ok", [Good("now")]),
    Case("plain_text", "Hello.<|im_end|>\n", "Hello."),
    Case("text_after", f"{PARIS}Done.", "Done.", [WEATHER]),
    Case("unclosed", PARIS[:-12], "", [Bad(PARIS[:-12].strip(), UNCLOSED)]),
    Case("cut_in_a_key", f"so {PARIS[:38]}<|im_end|>", "so", [Bad(PARIS[:38], "malformed JSON")]),
    invalid(
        "cut_in_a_string_that_quotes_tags",
        '<tool_call>{"name": "f</tool_call> and </tool_call> text',
        "malformed JSON",
    ),
    Case(
        "unclosed_before_another",
        f'<tool_call>{{"name": "now"}}{PARIS}',
        "",
        [Bad('<tool_call>{"name": "now"}', UNCLOSED), WEATHER],
    ),
    Case("tag_twice", f"<tool_call>{PARIS}", "<tool_call>", [WEATHER]),
    Case(
        "single_quotes",
        NOW + call("{'name': 'now'}") + NOW,
        "",
        [Good("now"), Bad(call("{'name': 'now'}"), "malformed JSON"), Good("now")],
    ),
    Case("duplicated_closing", f"{NOW}</tool_call>", "</tool_call>", [Good("now")]),
    invalid(
        "overflowing_number", call('{"name": "f", "arguments": {"x": 1e999}}'), "malformed JSON"
    ),
]
