"""What a template writes around the contents of messages, found once for each pattern of messages.

Where a template writes contents in a known way, the text around them is the same every time. It is
found by rendering markers in the place of contents, and trusted once awkward contents come out as
foretold.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import msgspec

from rollout.chat.encoding import Place, WrittenText
from rollout.chat.traced_text import Looked, Trace

if TYPE_CHECKING:
    from rollout.chat.encoding import TextEncoder
    from rollout.chat.messages import TemplateMessage

#: `write(messages)`: what the template writes; None where that is of no use here.
Write = Callable[[Sequence["TemplateMessage"]], str | None]

#: Put around a marker, all that templates are known to treat specially: white space in either
#: order, quotes, escapes, markup, other alphabets.
PROBES = (("\n \t", " \\n\"'{}<>&\\ é漢\n\n  x\t\n "), (" \n", "\r\n"))
#: Stand for contents, names and ids: nine letters or digits, which Mistral's templates ask of ids.
SLOT = re.compile("(zqSlot[0-9]{3})")
NAME_PROBE = "zqName{:03d}"
#: Names and ids that nobody writes otherwise than they are: trimmed, in JSON, or cut short.
_USUAL = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
#: What of a message other than its content may be written down, and all that may be known of one.
_NAMES = ("name", "tool_call_id")
_KNOWN = frozenset(("role", "content", *_NAMES))

#: How templates write a content down.
WAYS: Mapping[str, Callable[[str], str]] = MappingProxyType(
    {
        "verbatim": lambda text: text,
        "stripped": str.strip,
        "json": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    }
)


class SlottedText(msgspec.Struct, frozen=True):
    """The text that a template makes of messages of one pattern.

    Attributes:
        literals: The text around the slots, one more than there are of them.
        slots: What stands between the literals: position and key of a message.
        way: How contents are written.
        looked: What the template learns of what stands at a position and key: of what it is to be
            known, it learns the same.
    """

    literals: tuple[str, ...]
    slots: tuple[tuple[int, str], ...]
    way: str = "verbatim"
    looked: tuple[tuple[int, str, Looked], ...] = ()

    def contents(
        self, messages: Sequence[TemplateMessage], tests: Sequence[str], way: str = ""
    ) -> list[str] | None:
        """What stands in the slots; None where the template might treat one specially.

        Args:
            messages: Of the pattern.
            tests: What the template looks for in contents.
            way: How contents are taken to be written, where it is not their own.
        """
        if not all(look.holds(str(messages[at][key])) for at, key, look in self.looked):
            return None
        contents, write = [], WAYS[way or self.way]
        for at, key in self.slots:
            text = str(messages[at][key])
            if not text.strip() or any(test in text for test in tests):
                return None
            if key != "content" and not _is_usual(messages[at][key]):
                return None
            contents.append(write(text) if key == "content" else text)
        return contents

    def written(
        self, contents: Sequence[str], encoder: TextEncoder, most: int | None
    ) -> WrittenText:
        """The text with these contents.

        Raises:
            TooManyTokens: It certainly has more than `most`.
        """
        joined = self.join(contents)
        encoder.refuse_beyond(most, joined)
        if all(map(encoder.is_plain, contents)):
            return WrittenText(joined, (), self.literals, contents)
        plain, length = list[Place](), len(self.literals[0])
        for text, literal in zip(contents, self.literals[1:], strict=True):
            plain += encoder.special_token_spellings(text, length)
            length += len(text) + len(literal)
        return WrittenText(joined, tuple(plain))

    def join(self, contents: Sequence[str]) -> str:
        """The text with these contents."""
        pieces = itertools.chain.from_iterable(zip(self.literals, contents, strict=False))
        return "".join([*pieces, self.literals[-1]])


def _is_usual(name: object) -> bool:
    return type(name) is str and _USUAL.fullmatch(name) is not None


def pattern_of(messages: Sequence[TemplateMessage]) -> tuple[object, ...]:
    """What messages have in common that a template writes alike, but for their contents."""
    return tuple([(message["role"], *sorted(message)) for message in messages])


def find_slots(write: Write, messages: Sequence[TemplateMessage]) -> SlottedText | None:
    """What is written of messages like these; None where the template must be asked every time.

    Raises:
        TemplateError: As `write` does.
    """
    if any(not _KNOWN.issuperset(message) for message in messages):
        return None
    slots = [
        (at, key)
        for at, message in enumerate(messages)
        for key in ("content", *_NAMES)
        if key in message
    ]
    markers = {f"zqSlot{at:03d}": slot for at, slot in enumerate(slots)}
    marked = [dict(message) for message in messages]
    for marker, (at, key) in markers.items():
        marked[at][key] = marker
    text = write(marked)
    if text is None:
        return None
    pieces = SLOT.split(text)
    if not set(pieces[1::2]) <= set(markers):
        return None
    found = tuple(markers[marker] for marker in pieces[1::2])
    for way in WAYS:
        known = SlottedText(tuple(pieces[::2]), found, way)
        if all(_is_foretold(known, write, messages, probe) for probe in PROBES):
            return _looked_at(known, write, messages, markers)
    return None


def _looked_at(
    known: SlottedText,
    write: Write,
    messages: Sequence[TemplateMessage],
    markers: Mapping[str, tuple[int, str]],
) -> SlottedText | None:
    """The same with what the template learns of contents; None where that cannot be known."""
    traces = {slot: Trace() for slot in markers.values()}
    texts = {slot: traces[slot].text(marker) for marker, slot in markers.items()}
    traced = [dict(message) for message in messages]
    for (at, key), text in texts.items():
        traced[at][key] = text
    if write(traced) != known.join([texts[slot] for slot in known.slots]):
        return None
    for slot, trace in traces.items():
        # What writes JSON reads a text in another way than this one notes.
        is_unseen = slot in known.slots and not trace.is_seen and known.way != "json"
        if trace.is_lost or is_unseen:
            return None
    looked = [(at, key, each) for (at, key), trace in traces.items() for each in trace.looked]
    unique = [each for place, each in enumerate(looked) if each not in looked[:place]]
    return msgspec.structs.replace(known, looked=tuple(unique))


def _is_foretold(
    known: SlottedText,
    write: Write,
    messages: Sequence[TemplateMessage],
    probe: tuple[str, str],
) -> bool:
    """Whether the literals give what the template writes of awkward contents."""
    probed = [
        {
            **message,
            "content": f"{probe[0]}rolloutProbe{at}{probe[1]}",
            **{key: NAME_PROBE.format(at) for key in _NAMES if key in message},
        }
        for at, message in enumerate(messages)
    ]
    way = WAYS[known.way]
    texts = [
        way(probed[at][key]) if key == "content" else probed[at][key] for at, key in known.slots
    ]
    return write(probed) == known.join(texts)
