"""`truncate_text`: sides, limits and tokens."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.tools import truncate_text


class PairTokenizer:
    """Two bytes of UTF-8 make a token, so that tokens end within characters."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[bytes]:
        assert not add_special_tokens
        data = text.encode()
        return [data[at : at + 2] for at in range(0, len(data), 2)]

    def decode(self, ids: list[bytes]) -> str:
        return b"".join(ids).decode(errors="replace")


SEED: dict[str, Any] = {"convention": "seed"}
TOKENS: dict[str, Any] = {"unit": "tokens", "tokenizer": PairTokenizer()}


@pytest.mark.parametrize(
    ("limit", "side", "options", "expected"),
    [
        (4, "left", {}, "(truncated)...6789"),
        (4, "right", {}, "0123...(truncated)"),
        (4, "middle", {}, "01...(truncated)...89"),
        (5, "middle", {}, "012...(truncated)...89"),
        (0, "left", {}, "(truncated)..."),
        (10, "left", {}, "0123456789"),
        (4, "left", SEED, "0123...(truncated)"),
        (5, "right", TOKENS, "0123456789"),
        (2, "right", TOKENS, "0123...(truncated)"),
        (2, "left", TOKENS, "(truncated)...6789"),
        (3, "middle", TOKENS, "0123...(truncated)...89"),
    ],
)
def test_truncate_side_and_limit_decide_what_is_kept(
    limit: int, side: Any, options: dict[str, Any], expected: str
) -> None:
    assert truncate_text("0123456789", limit, side, **options) == expected


def test_truncate_character_that_a_token_ends_within_is_left_out() -> None:
    assert truncate_text("xéx", 1, "right", **TOKENS) == "x...(truncated)"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"limit": -1}, "limit = -1: expected 0 or more"),
        ({"side": "top"}, "side = 'top': expected 'left', 'right' or 'middle'"),
        ({"unit": "tokens"}, "unit = 'tokens' needs a tokenizer"),
    ],
)
def test_truncate_wrong_argument_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        truncate_text(**{"text": "text", "limit": 1, "side": "left", **arguments})
    assert str(caught.value) == message
