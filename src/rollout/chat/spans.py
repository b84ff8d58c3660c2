"""The spans of a transcript: who wrote which tokens, held in a few bytes each."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

SpanKind = Literal["prompt", "generated", "observation"]


class Span(msgspec.Struct, frozen=True, array_like=True):
    """One piece of a transcript: ids ``[start, stop)`` from one author.

    Attributes:
        finish_reason: Of a generated span: "stop", or what cut it: "length", "deadline", "abort"
            or "error".
        versions: Of a generated span: runs ``(weight version, number of ids)`` in order.
    """

    kind: SpanKind
    start: int
    stop: int
    finish_reason: str | None = None
    versions: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return self.stop - self.start


#: A span's author is a number below these; of a generated one the number says why it ended.
_PROMPT, _OBSERVATION, _GENERATED = 0, 1, 2
_REASONS: tuple[str, ...] = ("stop", "length", "deadline", "abort", "error")


class SpanTable:
    """Spans that tile the ids without gaps, packed; a `Span` is made when one is asked for."""

    __slots__ = ("_places", "_reasons", "_runs")

    def __init__(self) -> None:
        self._places = array("i")  # of each span its author and where it stops
        self._runs = array("i")  # of the generated ones: weight version, number of ids
        self._reasons: list[str] | None = None  # why spans ended, where it is none of the usual

    def __len__(self) -> int:
        return len(self._places) // 2

    def __iter__(self) -> Iterator[Span]:
        places, start, run = self._places, 0, 0
        for at in range(0, len(places), 2):
            author, stop = places[at], places[at + 1]
            if author < _GENERATED:
                yield Span("prompt" if author == _PROMPT else "observation", start, stop)
            else:
                versions = tuple(self._runs_of(run, stop - start))
                run += 2 * len(versions)
                yield Span("generated", start, stop, self._reason(author), versions)
            start = stop

    @property
    def stop(self) -> int:
        """Where the last one stops."""
        return self._places[-1] if self._places else 0

    @property
    def first_stop(self) -> int:
        """Where the first one stops."""
        return self._places[1] if self._places else 0

    @property
    def last_answered(self) -> int:
        """Where the last generated id stands, plus one; the end of the prompt without any."""
        places = self._places
        for at in range(len(places) - 2, 0, -2):
            if places[at] >= _GENERATED and places[at + 1] > places[at - 1]:
                return places[at + 1]
        return self.first_stop

    def generated(self) -> Iterator[tuple[int, int]]:
        """Where the generated ones start and stop."""
        places = self._places
        for at in range(2, len(places), 2):
            if places[at] >= _GENERATED:
                yield places[at - 1], places[at + 1]

    def append(self, kind: SpanKind, length: int) -> None:
        """A span that nobody generated."""
        author = _PROMPT if kind == "prompt" else _OBSERVATION
        self._places.extend((author, self.stop + length))

    def append_generated(self, length: int, finish_reason: str, runs: array[int]) -> None:
        """A generated one; of its runs, none empty, weight version and number of ids."""
        self._runs.extend(runs)
        self._places.extend((_GENERATED + self._code(finish_reason), self.stop + length))

    def _runs_of(self, run: int, length: int) -> Iterator[tuple[int, int]]:
        while length > 0:
            version, count = self._runs[run : run + 2]
            yield version, count
            length, run = length - count, run + 2

    def _code(self, reason: str) -> int:
        if reason in _REASONS:
            return _REASONS.index(reason)
        self._reasons = [*(self._reasons or ()), reason]
        return len(_REASONS) + len(self._reasons) - 1

    def _reason(self, author: int) -> str:
        known: list[str] = [*_REASONS, *(self._reasons or ())]
        return known[author - _GENERATED]
