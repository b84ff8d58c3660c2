"""`truncate_text`: sides, limits, whole characters, tokens, and a cost apart from the length."""

from __future__ import annotations

import time  # noqa: TID251  (the cost is what is tested)
from collections.abc import Sequence
from typing import Any

import pytest
import regex  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.tools import truncate_text
from rollout.tools.truncate import MARKER_LEFT, MARKER_MIDDLE, MARKER_RIGHT

FAMILY = "👨‍👩‍👧‍👦"
FLAG = "🇫🇷"


@pytest.mark.parametrize(
    ("limit", "side", "expected"),
    [
        (4, "left", "(truncated)...6789"),
        (4, "right", "0123...(truncated)"),
        (4, "middle", "01...(truncated)...89"),
        (5, "middle", "012...(truncated)...89"),
        (1, "left", "(truncated)...9"),
        (1, "right", "0...(truncated)"),
        (1, "middle", "0...(truncated)..."),
        (0, "left", "(truncated)..."),
        (0, "right", "...(truncated)"),
        (0, "middle", "...(truncated)..."),
        (9, "middle", "01234...(truncated)...6789"),
        (10, "left", "0123456789"),
        (11, "middle", "0123456789"),
    ],
)
def test_truncate_side_and_limit_decide_what_is_kept(limit: int, side: Any, expected: str) -> None:
    assert truncate_text("0123456789", limit, side) == expected


def test_truncate_seed_convention_swaps_left_and_right() -> None:
    text = "0123456789"
    assert truncate_text(text, 4, "left", convention="seed") == "0123...(truncated)"
    assert truncate_text(text, 4, "right", convention="seed") == "(truncated)...6789"
    assert truncate_text(text, 4, "middle", convention="seed") == "01...(truncated)...89"


def test_truncate_empty_text_is_left_alone() -> None:
    assert truncate_text("", 0, "middle") == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"limit": -1}, "limit = -1: expected 0 or more"),
        ({"side": "top"}, "side = 'top': expected 'left', 'right' or 'middle'"),
        ({"convention": "verl"}, "convention = 'verl': expected 'rollout' or 'seed'"),
        ({"unit": "words"}, "unit = 'words': expected 'characters' or 'tokens'"),
        ({"unit": "tokens"}, "unit = 'tokens' needs a tokenizer"),
    ],
)
def test_truncate_wrong_argument_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        truncate_text(**{"text": "text", "limit": 1, "side": "left", **arguments})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "limit", "side", "expected"),
    [
        ("ae\u0301x", 2, "right", "a...(truncated)"),
        ("ae\u0301x", 3, "right", "ae\u0301...(truncated)"),
        ("ae\u0301x", 2, "left", "(truncated)...x"),
        (f"{FAMILY}{FAMILY}", 7, "right", f"{FAMILY}...(truncated)"),
        (f"{FAMILY}{FAMILY}", 13, "right", f"{FAMILY}...(truncated)"),
        (f"{FAMILY}{FAMILY}", 6, "right", "...(truncated)"),
        (f"{FAMILY}{FAMILY}", 13, "left", f"(truncated)...{FAMILY}"),
        (FLAG * 3, 3, "right", f"{FLAG}...(truncated)"),
        (FLAG * 3, 3, "left", f"(truncated)...{FLAG}"),
        (FLAG * 3, 3, "middle", f"{FLAG}...(truncated)..."),
        ("ab\r\ncd", 3, "right", "ab...(truncated)"),
        ("ab\r\ncd", 3, "left", "(truncated)...cd"),
        ("\u1112\u1161\u11ab" * 2, 4, "right", "\u1112\u1161\u11ab...(truncated)"),
    ],
)
def test_truncate_grapheme_cluster_is_never_split(
    text: str, limit: int, side: Any, expected: str
) -> None:
    assert truncate_text(text, limit, side) == expected


def test_truncate_cluster_far_into_a_long_text_is_never_split() -> None:
    text = "x" * 1000 + FAMILY * 1000 + "y" * 1000
    assert truncate_text(text, 1010, "right") == "x" * 1000 + FAMILY + MARKER_RIGHT
    assert truncate_text(text, 1010, "left") == MARKER_LEFT + FAMILY + "y" * 1000


def test_truncate_endless_cluster_is_cut_at_the_limit() -> None:
    text = "a" + "\u0301" * 5000
    assert truncate_text(text, 1000, "right") == text[:1000] + MARKER_RIGHT
    assert truncate_text(text, 1000, "left") == MARKER_LEFT + text[-1000:]


HANGUL = "\u1112\u1161\u11ab"
CLUSTERS = ["a", "b ", "\n", "\r\n", "é", "e\u0301", FAMILY, FLAG, HANGUL, "क्षि", "👍🏽"]

texts = st.lists(st.sampled_from(CLUSTERS) | st.text(max_size=3), max_size=30).map("".join)
sides = st.sampled_from(["left", "right", "middle"])


def kept(result: str, text: str, side: str) -> tuple[str, str]:
    """Head and tail of a truncated result."""
    if side == "left":
        assert result.startswith(MARKER_LEFT)
        return "", result.removeprefix(MARKER_LEFT)
    if side == "right":
        assert result.endswith(MARKER_RIGHT)
        return result.removesuffix(MARKER_RIGHT), ""
    head, marker, tail = result.partition(MARKER_MIDDLE)
    assert marker == MARKER_MIDDLE
    return head, tail


@settings(max_examples=300, deadline=None)
@given(texts, st.integers(0, 40), sides)
def test_truncate_any_text_keeps_whole_clusters_within_the_limit(
    text: str, limit: int, side: Any
) -> None:
    result = truncate_text(text, limit, side)
    if len(text) <= limit:
        assert result == text
        return
    head, tail = kept(result, text, side)
    assert len(head) + len(tail) <= limit
    assert text.startswith(head)
    assert text.endswith(tail)
    boundaries = {0} | {match.end() for match in regex.finditer(r"\X", text)}
    assert len(head) in boundaries
    assert len(text) - len(tail) in boundaries
    longest = max((len(match[0]) for match in regex.finditer(r"\X", text)), default=0)
    parts = 2 if side == "middle" else 1
    assert len(head) + len(tail) > limit - parts * longest


@pytest.mark.parametrize(
    "text",
    ["x" * 10_000_000, FAMILY * 1_500_000, "a" + "\u0301" * 9_999_999],
    ids=["letters", "families", "accents"],  # else the texts themselves
)
@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_truncate_ten_megabytes_cost_less_than_fifty_milliseconds(text: str, side: Any) -> None:
    started = time.process_time()
    result = truncate_text(text, 4096, side)
    assert time.process_time() - started < 0.05
    assert 3000 < len(result) < 4096 + 20


class PairTokenizer:
    """Two bytes of UTF-8 make a token, so that tokens end within characters."""

    def __init__(self) -> None:
        self.read = 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        self.read += len(text)
        data = text.encode()
        pairs = [data[at : at + 2] for at in range(0, len(data), 2)]
        return [int.from_bytes(b"\1" + pair, "big") for pair in pairs]

    def decode(self, ids: Sequence[int]) -> str:
        data = b"".join(n.to_bytes((n.bit_length() + 7) // 8, "big")[1:] for n in ids)
        return data.decode(errors="replace")


class SpacelessTokenizer(PairTokenizer):
    """Decoding loses leading spaces, as with some SentencePiece models."""

    def decode(self, ids: Sequence[int]) -> str:
        return super().decode(ids).lstrip()


@pytest.mark.parametrize(
    ("text", "limit", "side", "expected"),
    [
        ("0123456789", 5, "right", "0123456789"),
        ("0123456789", 2, "right", "0123...(truncated)"),
        ("0123456789", 2, "left", "(truncated)...6789"),
        ("0123456789", 3, "middle", "0123...(truncated)...89"),
        ("0123456789", 1, "middle", "01...(truncated)..."),
        ("0123456789", 0, "middle", "...(truncated)..."),
        ("xéx", 1, "right", "x...(truncated)"),  # the token ends within é
        ("xxe\u0301xx", 2, "right", "xx...(truncated)"),  # and here before its accent
    ],
)
def test_truncate_tokens_side_and_limit_decide_what_is_kept(
    text: str, limit: int, side: Any, expected: str
) -> None:
    result = truncate_text(text, limit, side, unit="tokens", tokenizer=PairTokenizer())
    assert result == expected


def test_truncate_tokens_unfaithful_tokenizer_keeps_what_it_says() -> None:
    tokenizer = SpacelessTokenizer()
    assert truncate_text("  0123", 2, "right", unit="tokens", tokenizer=tokenizer) == (
        "01...(truncated)"
    )


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_truncate_tokens_of_a_huge_text_are_not_all_read(side: Any) -> None:
    tokenizer = PairTokenizer()
    text = "0123456789" * 1_000_000
    result = truncate_text(text, 100, side, unit="tokens", tokenizer=tokenizer)
    head, tail = kept(result, text, side)
    assert len(head) + len(tail) == 200
    assert text.startswith(head)
    assert text.endswith(tail)
    assert tokenizer.read < 2000


class RunTokenizer:
    """A run of one character is one token, however long."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(run[0][0]) << 20 | len(run[0]) for run in regex.finditer(r"(.)\1*", text)]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(run >> 20) * (run & 0xFFFFF) for run in ids)


def test_truncate_tokens_longer_than_usual_are_read_as_far_as_needed() -> None:
    tokenizer = RunTokenizer()
    text = "a" * 1000 + "b" * 1000 + "c" * 1000
    assert truncate_text(text, 3, "left", unit="tokens", tokenizer=tokenizer) == text
    assert truncate_text(text, 2, "left", unit="tokens", tokenizer=tokenizer) == (
        MARKER_LEFT + "b" * 1000 + "c" * 1000
    )
    assert truncate_text(text, 2, "middle", unit="tokens", tokenizer=tokenizer) == (
        "a" * 1000 + MARKER_MIDDLE + "c" * 1000
    )


@settings(max_examples=150, deadline=None)
@given(texts, st.integers(0, 40), sides)
def test_truncate_tokens_any_text_keeps_whole_clusters_within_the_limit(
    text: str, limit: int, side: Any
) -> None:
    tokenizer = PairTokenizer()
    result = truncate_text(text, limit, side, unit="tokens", tokenizer=tokenizer)
    if len(tokenizer.encode(text, add_special_tokens=False)) <= limit:
        assert result == text
        return
    head, tail = kept(result, text, side)
    assert len((head + tail).encode()) <= 2 * limit
    assert text.startswith(head)
    assert text.endswith(tail)
    boundaries = {0} | {match.end() for match in regex.finditer(r"\X", text)}
    assert len(head) in boundaries
    assert len(text) - len(tail) in boundaries
