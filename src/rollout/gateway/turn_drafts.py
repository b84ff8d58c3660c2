"""What may be told of a turn while the model says it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollout.agents import Conversation
    from rollout.engine.pool.generation import Generation


class TurnDraft:
    """Reads the generations of one turn, and tells the beginning of its texts.

    Once something happens that the engine takes back, no more is told before the turn is whole.

    Args:
        conversation: The turn is about to begin in it.
        stops: Strings that end the turn: what may be the beginning of one waits.

    Attributes:
        text, reasoning: See `AnswerDraft`.
    """

    def __init__(self, conversation: Conversation, stops: Sequence[str]) -> None:
        wording = conversation.wording
        self._listener = wording.reader.listen(in_reasoning=conversation.in_reasoning)
        self._growing = wording.template.growing_text()
        self._stops = stops
        self._waiting = ""  # what may be the beginning of a stop string
        self._before = self._heard = 0
        self._is_over = self._listener is None
        self._tell: Callable[[], object] | None = None

    @property
    def text(self) -> str:
        return "" if self._listener is None else self._listener.content

    @property
    def reasoning(self) -> str | None:
        return None if self._listener is None else self._listener.reasoning

    def begin(self, said: Sequence[int], tell: Callable[[], object]) -> None:
        """A generation begins, or continues the turn after these ids; `tell` it of what is new."""
        self._tell = tell
        self._take(said, 0)
        self._before = len(said)

    def end(self) -> None:
        """The generation is over."""
        self._tell = None

    def __call__(self, generation: Generation) -> None:
        """More of its tokens have come; with the last ones the turn itself is told."""
        if generation.finish_reason is None and not self._is_over:
            if generation.restarts:
                self._is_over = True
            else:
                self._take(generation.ids, self._before)

    def _take(self, ids: Sequence[int], before: int) -> None:
        """Hear what is new of ids that follow so many of the turn."""
        if self._is_over or self._listener is None:
            return
        if before + len(ids) < self._heard:
            self._is_over = True
            return
        new = ids[self._heard - before :]
        self._heard += len(new)
        had = len(self.text), self.reasoning
        self._listener.hear(self._until_stop(self._growing.more(new)))
        self._is_over = self._is_over or self._listener.is_over
        if self._tell is not None and had != (len(self.text), self.reasoning):
            self._tell()

    def _until_stop(self, text: str) -> str:
        """What certainly stands before a stop string."""
        if not self._stops:
            return text
        text = self._waiting + text
        places = [_place_of(stop, text) for stop in self._stops]
        end = min(places)
        self._waiting = text[end:]
        self._is_over = any(stop in text for stop in self._stops)
        return text[:end]


def _place_of(stop: str, text: str) -> int:
    """Where a string, or what may become it, begins in a text; else the end of the text."""
    at = text.find(stop)
    if at < 0:
        at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while at >= 0 and not stop.startswith(text[at:]):
            at = text.find(stop[0], at + 1)
    return len(text) if at < 0 else at
