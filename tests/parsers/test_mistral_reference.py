"""The Mistral parser against mistral-common: its encodings of tool calls, and its way back."""

from __future__ import annotations

import base64
import itertools
import json
import warnings
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mistral_common.experimental import tools as reference
from mistral_common.protocol.instruct.messages import AssistantMessage
from mistral_common.protocol.instruct.tool_calls import FunctionCall
from mistral_common.protocol.instruct.tool_calls import ToolCall as MistralCall
from mistral_common.tokens.tokenizers import instruct
from mistral_common.tokens.tokenizers.base import (
    SpecialTokenPolicy,
    SpecialTokens,
    TokenizerVersion,
)
from mistral_common.tokens.tokenizers.tekken import SpecialTokenInfo, Tekkenizer, TokenInfo

from parser_cases import CASES
from rollout.chat import get_tool_parser
from rollout.types import ToolCall
from slow_cases import slow_after, slow_but

ENCODERS = {
    TokenizerVersion.v3: instruct.InstructTokenizerV3,
    TokenizerVersion.v7: instruct.InstructTokenizerV7,
    TokenizerVersion.v11: instruct.InstructTokenizerV11,
    TokenizerVersion.v13: instruct.InstructTokenizerV13,
}

#: Cases that we read otherwise than mistral-common, and why.
DIFFERENCES = {
    "text_after": "theirs refuses text after an array; it is content",
    "arguments_as_a_string": "theirs refuses arguments as a string; they are parsed once",
    "call_without_arguments": "theirs refuses a call without arguments; it has none",
    "reasoning_of_magistral": "theirs leaves reasoning to another function",
    "reasoning_in_tags_of_text": "theirs knows no reasoning in tags of text",
    "faulty_element_keeps_its_place": "theirs refuses the whole array",
    "malformed_json_ends_the_array": "theirs refuses the whole array",
    "malformed_call_reaches_to_the_end": "theirs refuses the whole turn",
    "truncated_array": "theirs refuses the whole array",
    "array_not_closed": "theirs refuses it; the calls in it are complete",
    "text_in_place_of_a_call": "theirs refuses the turn; the model must hear of it",
}


def tokenizer(version: TokenizerVersion) -> Tekkenizer:
    """A tokenizer of bytes with all special tokens of mistral-common."""
    names = [token.value for token in SpecialTokens]
    return Tekkenizer(
        vocab=[
            TokenInfo(rank=at, token_bytes=base64.b64encode(bytes([at])).decode(), token_str=None)
            for at in range(256)
        ],
        special_tokens=[
            SpecialTokenInfo(rank=at, token_str=name, is_control=True)
            for at, name in enumerate(names)
        ],
        pattern=r"[\s\S]",
        vocab_size=256 + len(names),
        num_special_tokens=len(names),
        version=version,
    )


TOKENIZERS = {version: tokenizer(version) for version in ENCODERS}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
CALL = st.tuples(
    st.from_regex(r"[a-z][a-z_0-9]{0,12}", fullmatch=True),
    st.dictionaries(st.text(), JSON),
    st.from_regex(r"[a-zA-Z0-9]{9}", fullmatch=True),
)


@pytest.mark.parametrize("version", slow_but(ENCODERS, TokenizerVersion.v3, TokenizerVersion.v13))
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(calls=st.lists(CALL, min_size=1, max_size=3, unique_by=lambda call: call[2]))
def test_mistral_calls_that_mistral_common_encodes_come_back(
    version: TokenizerVersion, calls: list[tuple[str, Any, str]]
) -> None:
    message = AssistantMessage(
        tool_calls=[
            MistralCall(id=uid, function=FunctionCall(name=name, arguments=json.dumps(arguments)))
            for name, arguments, uid in calls
        ]
    )
    encoder = ENCODERS[version](TOKENIZERS[version])
    ids = encoder.encode_assistant_message(
        message, is_before_last_user_message=False, continue_message=False
    )
    text = TOKENIZERS[version].decode(ids, special_token_policy=SpecialTokenPolicy.KEEP)
    turn = get_tool_parser("mistral").parse(text)
    assert turn.content == ""
    parsed = [call for call in turn.calls if isinstance(call, ToolCall)]
    assert [(call.name, call.arguments) for call in parsed] == [call[:2] for call in calls]
    if version in (TokenizerVersion.v7, TokenizerVersion.v11):  # the others write no ids
        assert [call.id for call in parsed] == [call[2] for call in calls]


def version_of(text: str) -> TokenizerVersion:
    if "[CALL_ID]" in text:
        return TokenizerVersion.v11
    return TokenizerVersion.v13 if "[ARGS]" in text else TokenizerVersion.v7


def read_by_them(text: str) -> tuple[str, list[Any]]:
    used = TOKENIZERS[version_of(text)]
    body = text.removesuffix("</s>")
    marks = [token.value for token in SpecialTokens]
    ids: list[int] = []
    while body:
        mark = next((mark for mark in marks if body.startswith(mark)), None)
        if mark is None:
            ids += used.encode(body[0], bos=False, eos=False)
            body = body[1:]
        else:
            ids.append(used.get_special_token(mark))
            body = body[len(mark) :]
    mark = used.get_special_token("[TOOL_CALLS]")
    starts = [at for at, token in enumerate(ids) if token == mark] + [len(ids)]
    parts = [ids[start:stop] for start, stop in itertools.pairwise(starts)]
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of their own code
        calls = reference._decode_tool_calls(parts, used)
    return (
        used.decode(ids[: starts[0]], special_token_policy=SpecialTokenPolicy.KEEP).strip(),
        [(call.function.name.strip(), json.loads(call.function.arguments)) for call in calls],
    )


@pytest.mark.parametrize("case", slow_after(6, CASES["mistral"]), ids=lambda case: case.name)
def test_mistral_case_is_read_as_mistral_common_reads_it(case: Any) -> None:
    turn = get_tool_parser("mistral").parse(case.text, in_reasoning=case.in_reasoning)
    ours = (
        turn.content,
        [
            (call.name, call.arguments) if isinstance(call, ToolCall) else None
            for call in turn.calls
        ],
    )
    try:
        is_same = ours == read_by_them(case.text)
    except ValueError:
        is_same = False
    assert is_same == (case.name not in DIFFERENCES)
