"""One request under way at a core whose answers come from elsewhere: how it ends."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from rollout.engine.core import Chunk, FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class AnswerParser(Protocol):
    """Turns the answers to one request into chunks.

    Attributes:
        tokens: How many have left in chunks.
    """

    request_id: str
    tokens: int

    def read(self, answer: Mapping[str, Any]) -> Sequence[Chunk]:
        """The chunks that an answer adds; the last one of all has a finish reason."""


class OpenRequest:
    """A request under way.

    Attributes:
        reader: Reads its answers.
        is_aborted: Its end was asked for and has not been confirmed.
        is_over: Its last chunk has been made.
    """

    __slots__ = ("_end", "_wait", "is_aborted", "is_over", "reader")

    def __init__(self, reader: AnswerParser) -> None:
        self.reader = reader
        self.is_aborted = False
        self.is_over = False
        self._wait: anyio.CancelScope | None = None
        self._end: tuple[FinishReason, str, bool] | None = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the wait for an answer: `give_up` ends it."""
        with anyio.CancelScope() as self._wait:
            if self._end is not None:
                self._wait.cancel()
            yield
        self._wait = None

    def give_up(self, reason: FinishReason, error: str = "", *, is_fatal: bool = False) -> None:
        """No answer will come: `last_chunk` ends the request; what is called first counts."""
        self._end = self._end or (reason, error, is_fatal)
        if self._wait is not None:
            self._wait.cancel()

    def read(self, answer: Mapping[str, Any]) -> Sequence[Chunk]:
        """What an answer adds."""
        chunks = self.reader.read(answer)
        self.is_over = bool(chunks) and chunks[-1].finish_reason is not None
        return chunks

    def last_chunk(self) -> Chunk:
        """The end of a request that has been given up."""
        assert self._end is not None
        self.is_over = True
        reason, error, is_fatal = self._end
        return Chunk(
            request_id=self.reader.request_id,
            offset=self.reader.tokens,
            finish_reason=reason,
            error=error,
            is_fatal=is_fatal,
        )
