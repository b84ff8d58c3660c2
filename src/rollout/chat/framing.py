"""The ids of what a template writes around contents: made once, not with each message."""

from __future__ import annotations

import re
from array import array
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from rollout.chat.word_ids import WordIds


class _Piece(msgspec.Struct, frozen=True):
    """Ids, and a text after them that messages have a part in: places of contents, and words."""

    before: bytes
    text: tuple[int | str, ...]


class Framing(msgspec.Struct, frozen=True):
    """What stands around contents between two of which no special token can begin unnoticed.

    Attributes:
        pieces: In order; each is followed by a special token or the end.
        end: The ids after them.
        specials: Finds special tokens.
    """

    pieces: tuple[_Piece, ...]
    end: bytes
    specials: re.Pattern[str]

    def packed(self, contents: Sequence[str], encode: Callable[[str], bytes]) -> bytes | None:
        """The ids of the whole text, int32; None where what is written makes a special token."""
        found: list[bytes] = []
        for piece in self.pieces:
            text = "".join([contents[at] if type(at) is int else at for at in piece.text])  # type: ignore[misc]
            if self.specials.search(text) is not None:
                return None
            found += (piece.before, encode(text))
        found.append(self.end)
        return b"".join(found)


def framing_of(
    literals: Sequence[str],
    specials: Mapping[str, int],
    pattern: re.Pattern[str],
    simple: Collection[str],
    words: WordIds,
) -> Framing | None:
    """The framing of contents by these literals; None where it cannot be told from them alone.

    Args:
        literals: The text around contents, one more than there are of them.
        specials: Spelling and id of each special token, which `pattern` finds.
        simple: Those that take no white space with them, and are found in any text.
        words: The ids of what stands between them.
    """
    pieces: list[_Piece] = []
    before, text = b"", list[int | str]()

    def end_piece() -> None:
        nonlocal before
        if any(type(part) is int for part in text):
            pieces.append(_Piece(before, tuple(text)))
            before = b""
        else:
            before += _ids(words("".join(map(str, text))))
        text.clear()

    for at, literal in enumerate(literals):
        text += [at - 1] if at else []
        start = 0
        for match in pattern.finditer(literal):
            if match[0] not in simple or _may_begin_before(match[0], specials):
                return None
            text.append(literal[start : match.start()])
            end_piece()
            before += _ids([specials[match[0]]])
            start = match.end()
        text.append(literal[start:])
    end_piece()
    return Framing(tuple(pieces), before, pattern)


def _may_begin_before(token: str, specials: Collection[str]) -> bool:
    """Whether text before this token could make another one that ends within it."""
    return any(
        token.startswith(special[at:]) for special in specials for at in range(1, len(special))
    )


def _ids(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()
