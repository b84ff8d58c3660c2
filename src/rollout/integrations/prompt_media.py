"""Images and videos that trainers keep beside their prompts, put where they stand in them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollout.errors import PromptError

if TYPE_CHECKING:
    from collections.abc import Iterator

#: What data sets write where one of them stands; they keep it in a column.
_MARKS = re.compile("<(image|video)>")


def with_media(prompt: Any, images: Sequence[Any], videos: Sequence[Any] = ()) -> Any:
    """A prompt whose messages hold these, in their order.

    They stand where parts such as ``{"type": "image"}`` hold nothing yet, or else where its texts
    say ``<image>`` and ``<video>``, or else before the first words of the user.

    Args:
        prompt: Messages, or a text that a user says.
        images, videos: As parts of messages may hold them.

    Raises:
        PromptError: There are other numbers of places than of media.
    """
    given = {"image": list(images), "video": list(videos)}
    if not any(given.values()):
        return prompt
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    messages = [dict(message) for message in prompt]
    waiting = {kind: iter(media) for kind, media in given.items()}
    found = _places(messages)
    if not any(found.values()):
        first = next((m for m in messages if m.get("role") == "user"), messages[0])
        parts = [_part(kind, each) for kind, media in given.items() for each in media]
        first["content"] = [*parts, *_parts_of(first.get("content") or "")]
        return messages
    for kind, count in found.items():
        if count != len(given[kind]):
            raise PromptError(f"the prompt has {count} places for {len(given[kind])} {kind}s")
    for message in messages:
        message["content"] = _filled(message.get("content"), waiting)
    return messages


def _places(messages: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """How many there are of each kind."""
    parts = [p for m in messages for p in _parts_of(m.get("content") or "")]
    empty = [p["type"] for p in parts if _is_empty(p)]
    if not empty:
        empty = [kind for p in parts for kind in _MARKS.findall(str(p.get("text") or ""))]
    return {kind: empty.count(kind) for kind in ("image", "video")}


def _filled(content: Any, waiting: Mapping[str, Iterator[Any]]) -> Any:
    parts = _parts_of(content or "")
    if any(map(_is_empty, parts)):
        return [_part(p["type"], next(waiting[p["type"]])) if _is_empty(p) else p for p in parts]
    if not any(_MARKS.search(str(p.get("text") or "")) for p in parts):
        return content
    made: list[Any] = []
    for part in parts:
        pieces = _MARKS.split(str(part["text"])) if part.get("type") == "text" else [part]
        for at, piece in enumerate(pieces):
            if at % 2:
                made.append(_part(piece, next(waiting[piece])))
            elif piece:
                made.append(piece if part is piece else {"type": "text", "text": piece})
    return made


def _parts_of(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return [{"type": "text", "text": p} if isinstance(p, str) else p for p in content]


def _is_empty(part: Any) -> bool:
    if not isinstance(part, Mapping) or part.get("type") not in ("image", "video"):
        return False
    return not any(value is not None for key, value in part.items() if key not in ("type", "text"))


def _part(kind: str, value: Any) -> Any:
    return {**value, "type": kind} if isinstance(value, Mapping) else {"type": kind, kind: value}
