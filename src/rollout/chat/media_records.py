"""Images and videos on disk: each content once, by its hash; records refer to it.

A record of a trajectory has media without their contents; these stand in a file of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

import msgspec

from rollout.errors import RolloutError
from rollout.medium import Media, PlacedMedia

if TYPE_CHECKING:
    from rollout.chat.trajectory import Trajectory
    from rollout.chat.transcript import Transcript
    from rollout.types import Message

#: Longest text in a prompt's content that is kept where it may be a picture.
_MOST_CHARACTERS = 1024


def contents_of(trajectories: Iterable[Trajectory]) -> dict[str, bytes]:
    """The content of each medium in them, by its digest."""
    media = {medium.digest: medium.content for medium in _all_media(trajectories)}
    return {digest: content for digest, content in media.items() if content}


def _all_media(trajectories: Iterable[Trajectory]) -> Iterable[Media]:
    for trajectory in trajectories:
        for segment in trajectory.segments:
            yield from (each.medium for each in segment.transcript.media)
            yield from _shown(segment.messages)
        yield from _shown(trajectory.messages)


def _shown(messages: Iterable[Message]) -> Iterable[Media]:
    for message in messages:
        yield from (part for part in message.parts if isinstance(part, Media))


def without_content(medium: Media) -> Media:
    """What a record has of it."""
    return msgspec.structs.replace(medium, content=b"")


def message_record(message: Message) -> Message:
    """A message whose media have no contents."""
    if not message.parts:
        return message
    parts = [without_content(p) if isinstance(p, Media) else p for p in message.parts]
    return msgspec.structs.replace(message, parts=parts)


def placed_records(media: Sequence[PlacedMedia], start: int, stop: int) -> list[PlacedMedia]:
    """Those of a span, as its record has them: counted from its beginning."""
    return [
        PlacedMedia(without_content(each.medium), each.start - start, each.count)
        for each in media
        if start <= each.start < stop
    ]


def prompt_messages(trajectory: Trajectory, messages: Any) -> Any:
    """The messages of a prompt without contents of media.

    A trajectory that began has them as it read them; of another one no more than their kinds stay.
    """
    own = trajectory.messages[: len(messages)] if isinstance(messages, list | tuple) else []
    if any(message.parts for message in own):
        return [message_record(message) for message in own]
    return _without_bytes(messages)


def _without_bytes(value: Any) -> Any:
    """`value` with a few words in the place of what may be a picture."""
    if isinstance(value, Media):
        return repr(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    if isinstance(value, msgspec.Struct):
        own = {name: getattr(value, name) for name in value.__struct_fields__}
        return {name: _without_bytes(item) for name, item in own.items()}
    if isinstance(value, Mapping):
        return {str(key): _without_bytes(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_bytes(item) for item in value]
    if isinstance(value, str) and value.startswith("data:") and len(value) > _MOST_CHARACTERS:
        return f"{value[:64]}… ({len(value)} characters)"
    is_array = hasattr(value, "dtype") and getattr(value, "ndim", 0) > 1
    if is_array or type(value).__module__.startswith("PIL."):
        return f"<{type(value).__name__}>"
    return value


def shows_more_than_text(messages: Any) -> bool:
    """Whether a content among these messages of a prompt is no text."""
    for message in messages if isinstance(messages, list | tuple) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        if content is None:
            content = getattr(message, "parts", None) or getattr(message, "content", None)
        if not isinstance(content, str | None):
            return True
    return False


class Contents(Protocol):
    """Contents of media by their digests."""

    def get(self, digest: str, /) -> bytes | None:
        """One of them; None where there is none."""


class KnownContents:
    """Puts contents back into media that were read from records, one object for each.

    Args:
        contents: By digest.
        where: Names their file in errors.
    """

    def __init__(self, contents: Contents, where: str) -> None:
        self._contents = contents
        self._where = where
        self._known: WeakValueDictionary[str, Media] = WeakValueDictionary()

    def restore(self, trajectories: Iterable[Trajectory]) -> None:
        """In all of them.

        Raises:
            RolloutError: The file lacks a content, or has another one.
        """
        for trajectory in trajectories:
            trajectory.messages = self.restore_messages(trajectory.messages)
            for segment in trajectory.segments:
                segment.messages = self.restore_messages(segment.messages)
                self._transcript(segment.transcript)
            self._transcript(trajectory.transcript)
            if trajectory.prompt is not None:
                own = self.restore_messages(trajectory.prompt.messages)
                trajectory.prompt = msgspec.structs.replace(trajectory.prompt, messages=own)

    def _transcript(self, transcript: Transcript) -> None:
        transcript.media = tuple(
            PlacedMedia(self.whole(each.medium), each.start, each.count)
            for each in transcript.media
        )

    def restore_messages(self, messages: Sequence[Any]) -> Sequence[Any]:
        """Messages, or mappings, which prompts may have too."""
        if not any(getattr(message, "parts", ()) for message in messages):
            return messages
        return [
            msgspec.structs.replace(
                message,
                parts=tuple(self.whole(p) if isinstance(p, Media) else p for p in message.parts),
            )
            if getattr(message, "parts", ())
            else message
            for message in messages
        ]

    def whole(self, medium: Media) -> Media:
        """It with its content.

        Raises:
            RolloutError: As `restore`.
        """
        if medium.content:
            return medium
        known = self._known.get(medium.digest)
        if known is not None:
            return known
        content = self._contents.get(medium.digest)
        if content is None:
            raise RolloutError(f"{self._where} lacks {medium!r}")
        whole = msgspec.structs.replace(medium, content=content)
        if not whole.is_intact:
            raise RolloutError(f"{self._where}: the content of {medium!r} has another hash")
        self._known[medium.digest] = whole
        return whole
