"""`truncate_text`: sides, limits and tokens."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.tools import truncate_text


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


class PairTokenizer:
    """Two bytes of UTF-8 make a token, so that tokens end within characters."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[bytes]:
        assert not add_special_tokens
        data = text.encode()
        return [data[at : at + 2] for at in range(0, len(data), 2)]

    def decode(self, ids: list[bytes]) -> str:
        return b"".join(ids).decode(errors="replace")


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
    ],
)
def test_truncate_tokens_side_and_limit_decide_what_is_kept(
    text: str, limit: int, side: Any, expected: str
) -> None:
    result = truncate_text(text, limit, side, unit="tokens", tokenizer=PairTokenizer())
    assert result == expected
