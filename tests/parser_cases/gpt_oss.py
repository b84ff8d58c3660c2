"""gpt-oss, from OpenAI's description of the harmony response format."""

from __future__ import annotations

from parser_cases.case import Bad, Case, Good, invalid

ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
HEAD = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
PARIS, WEATHER = HEAD + '{"city": "Paris"}', Good("weather", {"city": "Paris"})
ON_ANALYSIS = "a call on the analysis channel is not executed; use the commentary channel"

CASES = [
    Case("final", "<|channel|>final<|message|>Hello.<|return|>", content="Hello."),
    Case(
        "analysis_then_final",
        f"{ANALYSIS}<|channel|>final<|message|>Hello.<|return|>",
        content="Hello.",
        reasoning="Hm.",
    ),
    Case("call", f"{PARIS}<|call|>", calls=[WEATHER]),
    Case("analysis_then_call", f"{ANALYSIS}{PARIS}<|call|>", calls=[WEATHER], reasoning="Hm."),
    Case(
        "recipient_in_the_role",
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>',
        calls=[WEATHER],
    ),
    Case(
        "preamble_then_call",
        f"<|channel|>commentary<|message|>Looking.<|end|><|start|>assistant{PARIS}<|call|>",
        content="Looking.",
        calls=[WEATHER],
    ),
    Case(
        "parallel_calls",
        f"{PARIS}<|call|><|start|>assistant<|channel|>commentary to=functions.now"
        "<|message|>{}<|call|>",
        calls=[WEATHER, Good("now")],
    ),
    Case("call_without_its_end_token", PARIS, calls=[WEATHER]),
    Case(
        "built_in_tool_keeps_its_namespace",
        '<|channel|>commentary to=browser.search<|message|>{"query": "x"}<|call|>',
        calls=[Good("browser.search", {"query": "x"})],
    ),
    Case(
        "call_drafted_in_analysis",
        '<|channel|>analysis<|message|>I call functions.now {"x": 1}<|end|>',
        reasoning='I call functions.now {"x": 1}',
    ),
    Case(
        "call_made_on_the_analysis_channel",
        "<|channel|>analysis to=functions.now<|message|>{}<|call|>",
        calls=[Bad("<|channel|>analysis to=functions.now<|message|>{}", ON_ANALYSIS)],
    ),
    Case(
        "call_drafted_in_open_analysis",
        "<|channel|>analysis<|message|>As in <|channel|>commentary to=functions.now<|message|>{}"
        "<|call|>",
        reasoning="As in <|channel|>commentary to=functions.now<|message|>{}",
    ),
    Case("cut_in_analysis", "<|channel|>analysis<|message|>Let me", reasoning="Let me"),
    Case(
        "analysis_opened_by_the_prompt",
        "Let me.<|end|><|start|>assistant<|channel|>final<|message|>Hi<|return|>",
        content="Hi",
        reasoning="Let me.",
        in_reasoning=True,
    ),
    Case("plain_text", "Hello.", content="Hello."),
    Case("plain_text_with_an_end_token", "Hello.<|return|>", content="Hello."),
    Case("empty", "", content=""),
    Case(
        "malformed_json",
        f"{HEAD}{{city}}<|call|>",
        calls=[Bad(f"{HEAD}{{city}}", "malformed JSON")],
    ),
    invalid("truncated_json", f'{HEAD}{{"city": "Par', "malformed JSON"),
    invalid("truncated_header", "<|channel|>commentary to=functions.weather ", "has no message"),
    Case(
        "nameless_recipient_is_no_tool",
        "<|channel|>commentary to=functions.<|message|>{}<|call|>",
        calls=[Good("functions.")],
    ),
    Case(
        "arguments_that_are_no_object",
        f"{HEAD}[1]<|call|>",
        calls=[Bad(f"{HEAD}[1]", "must be an object")],
    ),
    Case("message_without_a_channel", "<|message|>Hello.<|end|>", content="Hello."),
    Case("header_without_a_message", "<|channel|>final", content=""),
    Case("end_token_twice", f"{PARIS}<|call|><|call|>", calls=[WEATHER]),
]
