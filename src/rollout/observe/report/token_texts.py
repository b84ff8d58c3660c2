"""The texts of single tokens, for the ids that a run has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    Decode = Callable[[Sequence[int]], str]


class TokenTexts:
    """Remembers each id that was seen, and its text.

    Args:
        decode: Ids to text; None: the run's tokenizer cannot be loaded.
    """

    def __init__(self, decode: Decode | None) -> None:
        self._decode = decode
        self._known: dict[int, str] = {}

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

    def _text(self, token: int) -> str:
        assert self._decode is not None
        try:
            return self._decode([token])
        except Exception:  # a foreign tokenizer that lacks the id, whatever it raises
            return f"⟨{token}⟩"

    def table(self) -> dict[str, str]:
        """The text of each id, for JSON."""
        return {str(token): text for token, text in self._known.items()}
