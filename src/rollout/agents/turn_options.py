"""What one generation is asked for beside its sampling, and where a text ends it."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Protocol

import anyio
import msgspec

from rollout.engine.core import SamplingParams

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from rollout.engine.pool.generation import Generation


class TurnStop(Protocol):
    """Ends a generation by what has been said; entered around it, and one of its readers.

    Attributes:
        kept: How many of its tokens are kept; None: it did not end it.
    """

    kept: int | None

    def __call__(self, generation: Generation) -> None:
        """More tokens have come."""

    def __enter__(self) -> object:
        """It begins."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        """It is over; true where this ended it."""


class TurnOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How one turn is generated.

    Attributes:
        sampling: In place of `Conversation.sampling`.
        seed: In place of that which derives from the conversation and the turn.
        stop: Ends it before the model does.
    """

    sampling: SamplingParams | None = None
    seed: int | None = None
    stop: TurnStop | None = None


AS_EVER = TurnOptions()


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
        kept: See `TurnStop`.
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self.found: str | None = None
        self.kept: int | None = None
        self._strings = tuple(strings)
        self._decode = decode
        #: A string of so many bytes has no more tokens; a few more for those that are in pieces.
        self._window = max(len(each.encode()) for each in self._strings) + 8
        self._seen = 0
        self._scope: anyio.CancelScope | None = None

    def __call__(self, generation: Generation) -> None:
        """Look at what is new."""
        ids = generation.ids
        recent = ids[max(0, min(self._seen, len(ids)) - self._window) :]
        self._seen = len(ids)
        if self.kept is None and self._first(self._decode(recent)) is not None:
            self._end(ids)

    def __enter__(self) -> StopStrings:
        self._scope = anyio.CancelScope()
        self._scope.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        assert self._scope is not None
        scope, self._scope = self._scope, None
        return scope.__exit__(kind, error, traceback)

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
        if self._scope is not None:
            self._scope.cancel()
