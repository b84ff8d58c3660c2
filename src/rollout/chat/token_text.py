"""Ids to text: the bytes of each token of a byte-level vocabulary are remembered."""

from __future__ import annotations

import re
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.chat.tokenizer_parts import BYTE_LETTERS, read_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

#: How tokenizers that spell what they do not know byte by byte name these tokens.
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_UNSIGNED = np.dtype(np.uint32)


class TokenText:
    """The bytes of each token, looked up once; call it with ids for their text.

    Args:
        backend: A `tokenizers.Tokenizer`, to be left as it is.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._letters = {letter: byte for byte, letter in enumerate(BYTE_LETTERS)}
        # By id; None where they are not known yet, or of no token. Looked up without a Python
        # number for each id: a dict takes twice as long.
        self._known = np.full(backend.get_vocab_size(), None, object)

    def __call__(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens included; bytes that are no UTF-8 become U+FFFD."""
        return self.joined(ids).decode(errors="replace")

    def joined(self, ids: Iterable[int]) -> bytes:
        """The bytes of `ids`; none of those that no token has."""
        packed = ids if isinstance(ids, array) and ids.typecode == "i" else array("i", ids)
        try:  # a negative one is beyond the table too
            return b"".join(self._known.take(np.frombuffer(packed, _UNSIGNED)).tolist())
        except (IndexError, TypeError):
            return b"".join(map(self.spelling, packed))

    def spelling(self, token_id: int) -> bytes:
        """The bytes of one."""
        table = self._known
        known: bytes | None = table[token_id] if 0 <= token_id < len(table) else None
        if known is None:
            token: str | None = self._backend.id_to_token(token_id)
            if token is None:  # as the library does with ids that no token has
                return b""
            try:
                known = bytes([self._letters[letter] for letter in token])
            except KeyError:  # an added token, which is written as it is
                known = token.encode()
            self._keep(token_id, known)
        return known

    def _keep(self, token_id: int, spelling: bytes) -> None:
        table = self._known  # another thread may put a larger one in its place
        if token_id >= len(table):  # ids of a vocabulary may leave some out
            more = np.full(token_id + 1, None, object)
            more[: len(table)] = table
            self._known = table = more
        table[token_id] = spelling


def token_text(backend: Any) -> TokenText | None:
    """The texts of ids by this tokenizer; None where it decodes otherwise than byte by byte.

    Args:
        backend: A `tokenizers.Tokenizer`.
    """
    kinds = [part["type"] for part in read_parts(backend.decoder)]
    return TokenText(backend) if kinds == ["ByteLevel"] else None


def spell_token(backend: Any, decode: Callable[[Sequence[int]], str], token_id: int) -> bytes:
    """The bytes that one token adds to a text where `TokenText` does not know them.

    Args:
        backend: A `tokenizers.Tokenizer`; None where there is none.
        decode: Ids to text.
    """
    name = "" if backend is None else backend.id_to_token(token_id) or ""
    if _BYTE.fullmatch(name):
        return bytes.fromhex(name[3:5])
    return decode((token_id,)).encode(errors="replace")
