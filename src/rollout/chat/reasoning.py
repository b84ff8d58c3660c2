"""How templates and models mark reasoning."""

from __future__ import annotations

import re

THINK, END_THINK = "<think>", "</think>"
#: What opens and closes reasoning, in the formats that are read here.
TAGS = (
    (THINK, END_THINK),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),
)
#: Matches reasoning that is closed.
CLOSED = re.compile(
    "|".join(rf"{re.escape(opening)}.*?{re.escape(closing)}" for opening, closing in TAGS),
    re.DOTALL,
)


def opens_reasoning(text: str) -> bool:
    """Whether a text that the template wrote ends inside reasoning, e.g. inside ``<think>``."""
    return any(text.rfind(opening) > text.rfind(closing) for opening, closing in TAGS)


def ends_with_opening(text: str) -> bool:
    """Whether a tag that opens reasoning ends a text; a user may have written those before it."""
    return text.rstrip().endswith(tuple(opening for opening, _ in TAGS))


def lacks_reasoning(text: str, other: str) -> bool:
    """Whether `other` marks reasoning, open or closed, where `text` marks none."""
    return any(opening in other and opening not in text for opening, _ in TAGS)
