"""Ids to text: the bytes of each token of a byte-level vocabulary are remembered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.chat.tokenizer_parts import byte_letters, parts_of, state_of

if TYPE_CHECKING:
    from collections.abc import Iterable


class TokenText(dict[int, bytes]):
    """The bytes of each token, looked up once; call it with ids for their text.

    Args:
        backend: A `tokenizers.Tokenizer`, to be left as it is.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._bytes = {letter: byte for byte, letter in enumerate(byte_letters())}

    def __call__(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens included; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.__getitem__, ids)).decode(errors="replace")

    def __missing__(self, token_id: int) -> bytes:
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:  # as the library does with ids that no token has
            return b""
        try:
            spelling = bytes([self._bytes[letter] for letter in token])
        except KeyError:  # an added token, which is written as it is
            spelling = token.encode()
        self[token_id] = spelling
        return spelling


def token_text(backend: Any) -> TokenText | None:
    """The texts of ids by this tokenizer; None where it decodes otherwise than byte by byte.

    Args:
        backend: A `tokenizers.Tokenizer`.
    """
    kinds = [part["type"] for part in parts_of(state_of(backend.decoder))]
    return TokenText(backend) if kinds == ["ByteLevel"] else None
