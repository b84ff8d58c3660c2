"""The gpt-oss parser against OpenAI's own reader of harmony messages."""

from __future__ import annotations

import gzip
import json
import os
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai_harmony import (
    Author,
    HarmonyEncoding,
    HarmonyEncodingName,
    HarmonyError,
    Message,
    Role,
    load_harmony_encoding,
)

from parser_cases import CASES
from rollout.chat import ParsedTurn, get_tool_parser
from rollout.types import ToolCall
from slow_cases import slow_after

#: Cases that we read otherwise than OpenAI's reader, and why.
DIFFERENCES = {
    "plain_text": "theirs refuses a text without a header; a model may answer without one",
    "empty": "theirs refuses an empty text, which is an empty turn",
    "truncated_header": "theirs refuses a header without a message; the model must hear of it",
    "header_without_a_message": "theirs refuses a header without a message; it says nothing",
    "call_made_on_the_analysis_channel": "theirs is a message; calls in reasoning are not executed",
    "end_token_twice": "theirs refuses the second end token; nothing is lost without it",
    "nameless_recipient_is_no_tool": "theirs calls nothing; the model must hear of it",
    "analysis_opened_by_the_prompt": "theirs is told nothing of the prompt's analysis",
}


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> HarmonyEncoding:
    """The encoding, with the vocabulary of another package: nothing is downloaded."""
    folder = tmp_path_factory.mktemp("vocabulary")
    packed = distribution("bpe-openai").locate_file("bpe_openai/data/o200k_base.tiktoken.gz")
    vocabulary = gzip.decompress(Path(str(packed)).read_bytes())
    (folder / "o200k_base.tiktoken").write_bytes(vocabulary)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TIKTOKEN_ENCODINGS_BASE", str(folder))
        return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


def arguments_of(text: str) -> Any:
    """What the body of a call means; None where it is no object."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def read_by_them(harmony: HarmonyEncoding, ids: list[int]) -> tuple[Any, ...]:
    said, thought, calls = [], [], []
    for message in harmony.parse_messages_from_completion_tokens(ids, Role.ASSISTANT, strict=False):
        text = "".join(part.text for part in message.content)
        if message.recipient is not None and message.recipient != "all":
            name = message.recipient.removeprefix("functions.")
            calls.append((name, arguments_of(text)) if name else (None, None))
        else:
            (thought if message.channel == "analysis" else said).append(text)
    reasoning = "\n".join(piece.strip() for piece in thought) if thought else None
    return "\n".join(filter(None, said)).strip(), reasoning, calls


def read_by_us(turn: ParsedTurn) -> tuple[Any, ...]:
    calls = [
        (call.name, call.arguments) if isinstance(call, ToolCall) else None for call in turn.calls
    ]
    return turn.content, turn.reasoning, calls


def same(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> bool:
    """Theirs keeps the name of a faulty call, ours only its text."""
    calls = [call if call[1] is not None else None for call in theirs[2]]
    return ours == (*theirs[:2], calls)


@pytest.mark.parametrize("case", slow_after(6, CASES["gpt_oss"]), ids=lambda case: case.name)
def test_gpt_oss_case_is_read_as_openai_reads_it(harmony: HarmonyEncoding, case: Any) -> None:
    ours = read_by_us(get_tool_parser("gpt_oss").parse(case.text, in_reasoning=case.in_reasoning))
    ids = harmony.encode(case.text, allowed_special="all")
    try:
        is_same = same(ours, read_by_them(harmony, ids))
    except HarmonyError:
        is_same = False
    assert is_same == (case.name not in DIFFERENCES)


TEXT = st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: "<|" not in text)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
CALL = st.tuples(
    st.from_regex(r"[a-z][a-z_0-9]{0,12}", fullmatch=True), st.dictionaries(TEXT, JSON)
)
MESSAGES = st.lists(
    st.tuples(st.just("analysis"), TEXT)
    | st.tuples(st.just("commentary"), TEXT)
    | st.tuples(st.just("final"), TEXT)
    | st.tuples(st.just("call"), CALL),
    min_size=1,
    max_size=4,
)


def message(kind: str, what: Any) -> Message:
    author = Author(role=Role.ASSISTANT)
    if kind != "call":
        return Message.from_author_and_content(author, what).with_channel(kind)
    body = json.dumps(what[1], ensure_ascii=False)
    called = Message.from_author_and_content(author, body).with_channel("commentary")
    return called.with_recipient(f"functions.{what[0]}").with_content_type("<|constrain|>json")


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(written=MESSAGES)
def test_gpt_oss_messages_that_openai_renders_are_read_as_openai_reads_them(
    harmony: HarmonyEncoding, written: list[tuple[str, Any]]
) -> None:
    ids = [token for item in written for token in harmony.render(message(*item))]
    opening = harmony.encode("<|start|>assistant", allowed_special="all")
    assert ids[: len(opening)] == opening  # it stands in the prompt
    ids = ids[len(opening) :]
    ours = read_by_us(get_tool_parser("gpt_oss").parse(harmony.decode_utf8(ids)))
    assert same(ours, read_by_them(harmony, ids))
    assert ours[2] == [what for kind, what in written if kind == "call"]
