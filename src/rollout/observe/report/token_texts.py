"""The texts of single tokens, for the ids that a run has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    Decode = Callable[[Sequence[int]], str]


#: Stands for bytes that are no text.
NO_TEXT = "\ufffd"


class TokenTexts:
    """Remembers each id that was seen, and its text.

    Args:
        decode: Ids to text; None: the run's tokenizer cannot be loaded.
    """

    def __init__(self, decode: Decode | None) -> None:
        self._decode = decode
        self._known: dict[int, str] = {}
        self._anchor: tuple[int, str] | None = None
        self._has_parts = False

    @property
    def are_known(self) -> bool:
        """Whether there is a tokenizer."""
        return self._decode is not None

    def see(self, ids: npt.NDArray[np.uint32]) -> None:
        """Ids that the report shows."""
        if self._decode is None:
            return
        for token in np.unique(ids).tolist():
            if token not in self._known:
                self._known[token] = self._text(token)

    def runs(self, ids: Sequence[int]) -> list[tuple[int, int, str]]:
        """Places where ids are texts only together: start, number of ids, text.

        A character may be several tokens of bytes; none of them has a text of its own.
        """
        found: list[tuple[int, int, str]] = []
        if self._decode is None or not self._has_parts:
            return found
        at = 0
        while at < len(ids):
            stop = at
            while stop < len(ids) and NO_TEXT in self._known.get(ids[stop], ""):
                stop += 1
            if stop - at > 1:
                found.append((at, stop - at, self._decode(ids[at:stop])))
            at = max(stop, at + 1)
        return found

    def _text(self, token: int) -> str:
        """What it adds to a text: by itself, some tokenizers leave out the space before it."""
        assert self._decode is not None
        try:
            text = self._decode([token])
            if self._anchor is None and text.isalpha() and text.isascii():
                self._anchor = token, text
            if self._anchor is not None:
                before, own = self._anchor
                both = self._decode([before, token])
                text = both.removeprefix(own) if both.startswith(own) else text
        except Exception:  # a foreign tokenizer that lacks the id, whatever it raises
            return f"⟨{token}⟩"
        self._has_parts = self._has_parts or NO_TEXT in text
        return text

    def table(self) -> dict[str, str]:
        """The text of each id, for JSON."""
        return {str(token): text for token, text in self._known.items()}
