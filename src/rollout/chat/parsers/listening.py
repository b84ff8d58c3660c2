"""What of a turn is certain while the model still says it.

A listener is fed the decoded text as it comes, in pieces of any size. What it tells is the
beginning of what the parser makes of the whole text, whatever follows: text that may be the
beginning of a mark waits for more, and from the first mark of a call on nothing is told before the
turn is whole.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from rollout.chat.parsers.text import END_TOKENS, without_end

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Tags = tuple[str, str]


class Listener:
    """The certain beginnings of a turn's texts; made by `ToolParser.listen`.

    Attributes:
        content, reasoning: They only grow; `reasoning` is None until it is certain that there is
            some.
        is_over: Nothing more is certain before the turn is whole.
    """

    def __init__(self) -> None:
        self.content = ""
        self.reasoning: str | None = None
        self.is_over = False
        self._space = ""  # told once something follows it
        self._thought_space = self._between_thoughts = ""
        self._is_new_thought = False

    def hear(self, text: str) -> None:
        """More of the turn, decoded with special tokens kept."""
        raise NotImplementedError

    def _say(self, text: str) -> None:
        """Content, with white space around all of it left out."""
        text = self._space + text
        if not self.content:
            text = text.lstrip()
        told = text.rstrip()
        self.content += told
        self._space = text[len(told) :]

    def _begin_thought(self) -> None:
        """Reasoning is opened; after content has been told, it is told with the whole turn."""
        if self.content:
            self.is_over = True
            return
        if self.reasoning is None:
            self.reasoning = ""
        else:
            self._between_thoughts += "\n"
        self._thought_space, self._is_new_thought = "", True

    def _think(self, text: str) -> None:
        """More of the reasoning that is open."""
        if self._is_new_thought:
            text = text.lstrip()
            if not text:
                return
            self._is_new_thought = False
            self._thought_space, self._between_thoughts = self._between_thoughts, ""
            self._add_thought(text)
        else:
            self._add_thought(text)

    def _add_thought(self, text: str) -> None:
        text = self._thought_space + text
        told = text.rstrip()
        self.reasoning = (self.reasoning or "") + told
        self._thought_space = text[len(told) :]


class Marks(NamedTuple):
    """What may open or close something in the text of a turn.

    Attributes:
        whole: Finds a mark.
        begun: Finds, of no length, where what may become one begins, at the end of a text.
        at_start: Matches what may become a call where content begins; None where nothing can.
    """

    whole: re.Pattern[str]
    begun: re.Pattern[str]
    at_start: re.Pattern[str] | None


def marks_of(
    literals: Sequence[str], more: Sequence[Tags] = (), at_start: str | None = None
) -> Marks:
    """The marks of a format.

    Args:
        literals: Tags.
        more: Of marks that are none of these a regular expression, and one of their beginnings,
            which ends with the text.
        at_start: See `Marks.at_start`.
    """
    whole = [*map(re.escape, literals), *(pattern for pattern, _ in more)]
    begun = [*map(_beginning, {*literals, *END_TOKENS}), *(pattern for _, pattern in more)]
    return Marks(
        re.compile("|".join(whole)),
        re.compile(f"(?={'|'.join(begun)})"),
        None if at_start is None else re.compile(at_start),
    )


def _beginning(literal: str) -> str:
    """Matches what a text ends with that may become the literal."""
    rest = r"\Z"
    for sign in reversed(literal[1:-1]):
        rest = rf"(?:\Z|{re.escape(sign)}{rest})"
    return re.escape(literal[0]) + rest


def certain_length(text: str, begun: re.Pattern[str]) -> int:
    """How much of a text is no mark, and no end of the turn, whatever follows."""
    places = [found.start() for found in begun.finditer(text)]  # several may begin, all at the end
    return min(len(without_end(text[:place])) for place in (*places, len(text)))


class TaggedListener(Listener):
    """Listens to a `TaggedParser`'s format.

    Args:
        marks: Of reasoning and calls.
        reasoning_tags: As the parser's.
        in_reasoning: Whether the turn begins inside reasoning.
    """

    def __init__(self, marks: Marks, reasoning_tags: Sequence[Tags], *, in_reasoning: bool) -> None:
        super().__init__()
        self._marks = marks
        self._tags = reasoning_tags
        self._text = ""  # not told yet
        self._open: Sequence[Tags] = ()  # what may close the reasoning
        self._is_at_start = self._may_open_again = True
        if in_reasoning:
            self._begin_thought()
            self._open = reasoning_tags

    def hear(self, text: str) -> None:
        """See `Listener.hear`."""
        self._text += text
        while not self.is_over and (self._read_thought() if self._open else self._read_content()):
            pass
        if self.is_over:
            self._text = ""

    def _read_thought(self) -> bool:
        """Tell reasoning up to its end; whether that has come."""
        if self._may_open_again and not self._skip_opening():
            return False
        places = [(at, tag) for _, tag in self._open if (at := self._text.find(tag)) >= 0]
        if not places:
            self._take(certain_length(self._text, self._marks.begun), self._think)
            return False
        at, closing = min(places)
        self._take(at, self._think)
        self._text = self._text[len(closing) :]
        self._open, self._is_at_start = (), True
        return True

    def _skip_opening(self) -> bool:
        """Leave out a tag that opens the reasoning once more; whether that is decided."""
        body = self._text.lstrip()
        openings = [opening for opening, _ in self._open]
        if any(opening.startswith(body) for opening in openings):
            return False
        again = next((each for each in openings if body.startswith(each)), "")
        self._text = body.removeprefix(again)
        self._may_open_again = False
        return True

    def _read_content(self) -> bool:
        """Tell content up to the next mark; whether there is one to continue after."""
        if self._is_at_start and self._marks.at_start is not None:
            if self._marks.at_start.match(self._text):
                return False
            self._is_at_start = False
        found = self._marks.whole.search(self._text)
        if found is None:
            self._take(certain_length(self._text, self._marks.begun), self._say)
            return False
        self._take(found.start(), self._say)
        mark, self._text = found[0], self._text[len(found[0]) :]
        self._open = [pair for pair in self._tags if pair[0] == mark]
        if self._open:
            self._begin_thought()
            self._may_open_again = True
        elif any(mark == closing for _, closing in self._tags):
            self._say(mark)  # it closes nothing
            self._is_at_start = True
        else:
            self.is_over = True
        return not self.is_over

    def _take(self, count: int, tell: Callable[[str], None]) -> None:
        text, self._text = self._text[:count], self._text[count:]
        if text:
            tell(text)
