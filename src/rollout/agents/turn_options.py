"""What is particular to one turn: its sampling, its seed, and where a text ends it."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import anyio
import msgspec

from rollout.engine.core import SamplingParams

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Sequence

    from rollout.engine.pool.generation import Generation


class TurnOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How one turn is generated.

    Attributes:
        sampling: In place of `Conversation.sampling`.
        seed: In place of that which derives from the conversation and the turn.
        stop: Ends it before the model does.
    """

    sampling: SamplingParams | None = None
    seed: int | None = None
    stop: StopStrings | None = None


DEFAULT_OPTIONS = TurnOptions()


class StopStrings:
    """Ends a turn where its decoded text first contains one of several strings.

    What is kept are the tokens up to and with the one that completes the string; the engine is
    told to abort, and what it sampled beyond is dropped.

    Args:
        strings: At least one, none empty.
        decode: Ids to text, special tokens included.

    Attributes:
        found: The string that ended it; of several that end in the same token the one that begins
            first. None where the model ended it.
        kept: How many tokens of the turn are kept; None: it did not end it.
        scope: Of the generation, which it cancels.
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self.found: str | None = None
        self.kept: int | None = None
        self._strings = tuple(strings)
        self._decode = decode
        #: A string of so many bytes has no more tokens; a few more for those that are in pieces.
        self._window = max(len(each.encode()) for each in self._strings) + 8
        self._seen = 0
        self.scope = anyio.CancelScope()

    def __call__(self, generation: Generation) -> None:
        """Look at what is new."""
        ids = generation.ids
        recent = ids[max(0, min(self._seen, len(ids)) - self._window) :]
        self._seen = len(ids)
        if self.kept is None and self._first(self._decode(recent)) is not None:
            self._end(ids)

    def before(self, text: str) -> str:
        """What of a text stands before the string that ended it; all where none did."""
        return text if self.found is None else text[: text.find(self.found)]

    def _first(self, text: str) -> str | None:
        places = [(at, each) for each in self._strings if (at := text.find(each)) >= 0]
        return min(places)[1] if places else None

    def _end(self, ids: array[int]) -> None:
        """Find the token, and have the engine stop."""
        if self._first(self._decode(ids)) is None:
            return  # the window began within a character
        counts = range(1, len(ids) + 1)
        at = bisect_left(counts, True, key=lambda n: self._first(self._decode(ids[:n])) is not None)
        self.kept = counts[at]
        self.found = self._first(self._decode(ids[: self.kept]))
        self.scope.cancel()
