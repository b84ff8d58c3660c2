"""Our tool-call parsers against SGLang's own detectors, case by case."""

from __future__ import annotations

import json
from typing import Any

import pytest

from parser_cases import CASES, TOOLS, Case

pytest.importorskip("sglang.srt")  # "sglang" alone is also this directory

from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser

from rollout.chat import get_tool_parser
from rollout.chat.parsers.registry import END_TOKENS, strip_stop
from rollout.types import ToolCall

#: SGLang's engines have run in this process before. What is left of them is collected in any later
#: test, where a child process that had ended was seen, probably Python's resource tracker.
pytestmark = pytest.mark.rollout(allow_leaks=("processes",))

THEIRS = {
    "gemma": "gemma4",
    "gpt_oss": "gpt-oss",
    "hermes": "hermes",
    "kimi_k2": "kimi_k2",
    "llama3": "llama3",
    "minimax_m2": "minimax-m2",
    "mistral": "mistral",
    "pythonic": "pythonic",
    "qwen3_coder": "qwen3_coder",
}


def detector_of(name: str, text: str) -> str:
    """SGLang has a detector for each version where we read all of them."""
    if name == "deepseek_v3":
        return "deepseekv3" if "```json" in text else "deepseekv31"
    if name == "glm4":
        return "glm47" if "<tool_call>weather<" in text else "glm45"
    return THEIRS[name]


def read_by_them(name: str, text: str) -> tuple[str, list[Any]]:
    text = strip_stop(text, END_TOKENS) if name != "gpt_oss" else f"<|start|>assistant{text}"
    tools = [Tool.model_validate(tool) for tool in TOOLS]
    parser = FunctionCallParser(tools, detector_of(name, text))
    content, calls = parser.parse_non_stream(text)
    return content.strip(), [(call.name, json.loads(call.parameters)) for call in calls]


def read_by_us(name: str, text: str) -> tuple[str, list[Any]]:
    turn = get_tool_parser(name).parse(text, TOOLS)
    calls = [call for call in turn.calls if isinstance(call, ToolCall)]
    return turn.content, [(call.name, call.arguments) for call in calls]


#: Cases of which SGLang makes something else, by the reason why we do not. Cases with reasoning are
#: not compared: there a parser of its own takes it away before the detector sees the text.
DIFFERENCES = {
    "theirs drops what is malformed, or gives the whole turn back as text; the model must hear of "
    "it and the other calls stay": """
        deepseek_v3/malformed_json_among_good_calls deepseek_v3/array_in_place_of_arguments
        deepseek_v3/no_name deepseek_v3/text_in_the_section deepseek_v3/empty_section
        gemma/truncated_string gemma/json_in_place_of_a_call glm4/json_of_another_format
        gpt_oss/arguments_that_are_no_object gpt_oss/call_made_on_the_analysis_channel
        gpt_oss/nameless_recipient_is_no_tool kimi_k2/section_without_calls
        hermes/single_quotes hermes/tag_twice hermes/cut_in_a_key
        hermes/cut_in_a_string_that_quotes_tags kimi_k2/malformed_json kimi_k2/nameless
        llama3/truncated llama3/code_is_no_call llama3/function_tag_not_closed
        llama3/name_is_no_string llama3/unknown_keys llama3/built_in_tool_with_an_expression
        minimax_m2/nameless minimax_m2/truncated_value mistral/faulty_element_keeps_its_place
        mistral/malformed_json_ends_the_array mistral/malformed_call_reaches_to_the_end
        llama3/malformed_call_reaches_to_the_end
        mistral/truncated_array pythonic/positional_argument pythonic/truncated_list
        pythonic/malformed_call_of_an_offered_tool_in_a_line pythonic/truncated_string
        qwen3_coder/nameless
    """,
    "theirs runs a call that was cut, not closed or mixed with the next one": """
        deepseek_v3/unclosed_call_before_another gemma/brace_not_closed gemma/unclosed_call
        gemma/unclosed_call_before_another glm4/key_without_a_value glm4/value_not_closed
        glm4/unclosed_call_before_another hermes/unclosed hermes/unclosed_before_another
        kimi_k2/more_text_after_the_json minimax_m2/unclosed_invoke
        minimax_m2/unclosed_invoke_before_another pythonic/one_faulty_call_makes_the_list_invalid
        qwen3_coder/function_not_closed qwen3_coder/parameter_not_closed
        qwen3_coder/truncated_value qwen3_coder/truncated_after_a_parameter
        qwen3_coder/nested_block
    """,
    "theirs wants a mark that models leave out, though the calls are complete": """
        deepseek_v3/missing_begin_of_section kimi_k2/call_without_a_section
        kimi_k2/id_without_index minimax_m2/missing_end_of_block mistral/array_not_closed
        mistral/call_without_arguments qwen3_coder/block_tags_missing
        gpt_oss/call_without_its_end_token
    """,
    "theirs does not read this way of the same family": """
        gemma/function_gemma gemma/function_gemma_parallel gemma/fence gemma/fence_with_print
        gemma/fence_with_a_list gemma/python_list gemma/json_object gemma/gemma_4_marked_keys
        gemma/code_in_the_fence gemma/fence_not_closed llama3/built_in_tool llama3/function_tag
        mistral/v7_array_without_space mistral/array_with_an_id mistral/v11_with_an_id
        gpt_oss/recipient_in_the_role gpt_oss/built_in_tool_keeps_its_namespace
        gpt_oss/parallel_calls pythonic/dotted_name pythonic/white_space pythonic/two_lists
        pythonic/all_kinds_of_literals pythonic/json_constants mistral/string_that_holds_brackets
        deepseek_v3/string_that_holds_tags hermes/tags_in_a_string
    """,
    "theirs encodes arguments that are a string once more, or refuses them": """
        deepseek_v3/arguments_as_a_string_are_parsed_once hermes/string_arguments
        llama3/parameters_as_a_string mistral/arguments_as_a_string
    """,
    "theirs drops text after a call, or keeps tags as text": """
        deepseek_v3/text_between_calls glm4/text_after hermes/text_after hermes/duplicated_closing
        kimi_k2/text_after mistral/text_after
        deepseek_v3/end_of_reasoning_that_nothing_opened hermes/end_of_reasoning_that_nothing_opened
    """,
    "theirs takes the last of a text that is given twice, which a value may have quoted": """
        glm4/a_text_twice_may_quote_its_own_tags minimax_m2/a_text_twice_may_quote_its_own_tags
        qwen3_coder/a_text_twice_may_quote_its_own_tags
    """,
    "theirs gives a text without a call back with its tokens; another parser reads it there": """
        gpt_oss/final gpt_oss/plain_text gpt_oss/plain_text_with_an_end_token gpt_oss/empty
        gpt_oss/message_without_a_channel gpt_oss/header_without_a_message
    """,
    "theirs takes an answer that is an object for a call": """
        llama3/object_that_is_an_answer llama3/name_alone_is_an_answer
    """,
    "theirs guesses the function from the arguments": "kimi_k2/bare_counter_names_no_function",
    "theirs makes null of the text null, text of null or null of every value that may be null": """
        gemma/gemma_4_values minimax_m2/null_of_a_union minimax_m2/values_by_their_schema
        qwen3_coder/booleans_enums_and_null
    """,
    "theirs has infinity, or False of any word: not what was written": """
        hermes/overflowing_number qwen3_coder/what_does_not_fit_its_type_stays_text
    """,
    "theirs trims, keeps or unquotes a value otherwise than the model's template writes it": """
        glm4/values_without_a_type_are_read_as_json glm4/value_on_lines_of_its_own
        minimax_m2/value_keeps_its_last_line_break
    """,
}
DIFFERENT = {name for names in DIFFERENCES.values() for name in names.split()}

COMPARED = [
    (name, case)
    for name, cases in CASES.items()
    if name in THEIRS or name in ("deepseek_v3", "glm4")  # SGLang has no detector of Seed-OSS
    for case in cases
    if case.reasoning is None and not case.in_reasoning
]


@pytest.fixture(autouse=True)
def _unknown_tools_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_FORWARD_UNKNOWN_TOOLS", "1")


@pytest.mark.parametrize(
    ("name", "case"), COMPARED, ids=[f"{name}/{case.name}" for name, case in COMPARED]
)
def test_case_is_read_as_sglang_reads_it_unless_listed(name: str, case: Case) -> None:
    try:
        is_same = read_by_us(name, case.text) == read_by_them(name, case.text)
    except ValueError:  # theirs raises on some malformed texts
        is_same = False
    assert is_same == (f"{name}/{case.name}" not in DIFFERENT)


def test_differences_name_cases_that_there_are() -> None:
    assert {f"{name}/{case.name}" for name, case in COMPARED} >= DIFFERENT
