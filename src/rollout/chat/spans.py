"""The spans of a transcript: who wrote which tokens, held in a few bytes each."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
_PAIR = struct.Struct("=ii")
_REASONS: tuple[str, ...] = ("stop", "length", "deadline", "abort", "error")


class SpanTable(msgspec.Struct, eq=False, gc=False):
    """Spans that tile the ids without gaps, packed; a `Span` is made when one is asked for.

    Attributes:
        stop: Where the last one stops.
        places: Of each span its author and where it stops, int32.
        runs: Of the generated ones: weight version, number of ids.
        reasons: Why spans ended, where it is none of the usual.
    """

    stop: int = 0
    places: bytes = b""
    runs: bytes = b""
    reasons: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.places) // _PAIR.size

    def __iter__(self) -> Iterator[Span]:
        start, runs = 0, _PAIR.iter_unpack(self.runs)
        for author, stop in _PAIR.iter_unpack(self.places):
            if author < _GENERATED:
                yield Span("prompt" if author == _PROMPT else "observation", start, stop)
            else:
                versions = tuple(_covering(runs, stop - start))
                yield Span("generated", start, stop, self._reason(author), versions)
            start = stop

    @property
    def first_stop(self) -> int:
        """Where the first one stops."""
        return int(_PAIR.unpack_from(self.places)[1]) if self.places else 0

    @property
    def last_answered(self) -> int:
        """Where the last generated id stands, plus one; the end of the prompt without any."""
        return max(
            (stop for start, stop in self.generated() if stop > start), default=self.first_stop
        )

    def covers(self, length: int, log_probs: Sequence[bytes]) -> bool:
        """Whether they are of so many ids, and the generated ones of these packed log-probs."""
        generated = [stop - start for start, stop in self.generated()]
        last = _PAIR.unpack_from(self.places, len(self.places) - _PAIR.size) if self.places else [0]
        return last[-1] == length and generated == [len(each) // 4 for each in log_probs]

    def generated(self) -> Iterator[tuple[int, int]]:
        """Where the generated ones start and stop."""
        start = 0
        for author, stop in _PAIR.iter_unpack(self.places):
            if author >= _GENERATED:
                yield start, stop
            start = stop

    def append(self, kind: SpanKind, stop: int) -> None:
        """A span that nobody generated, up to `stop`."""
        self._append(_PROMPT if kind == "prompt" else _OBSERVATION, stop)

    def append_generated(self, stop: int, finish_reason: str, runs: bytes) -> None:
        """A generated one; of its runs, none empty, weight version and number of ids, int32."""
        self.runs += runs
        self._append(_GENERATED + self._code(finish_reason), stop)

    def _append(self, author: int, stop: int) -> None:
        self.stop = stop
        self.places += _PAIR.pack(author, stop)

    def _code(self, reason: str) -> int:
        if reason in _REASONS:
            return _REASONS.index(reason)
        self.reasons = (*self.reasons, reason)
        return len(_REASONS) + len(self.reasons) - 1

    def _reason(self, author: int) -> str:
        return (*_REASONS, *self.reasons)[author - _GENERATED]


def _covering(runs: Iterator[tuple[int, int]], length: int) -> Iterator[tuple[int, int]]:
    """The next runs, which are of so many ids."""
    while length > 0:
        version, count = next(runs)
        yield version, count
        length -= count
