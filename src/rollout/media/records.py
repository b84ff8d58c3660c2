"""Images and videos on disk: each content once, by its hash; records refer to it.

A record has media without their contents; these stand in a file of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

import msgspec

from rollout.errors import RolloutError
from rollout.medium import Media

if TYPE_CHECKING:
    from rollout.types import Message

#: Longest data URL of a prompt that is recorded.
_MAX_DATA_URL = 1024


def drop_content(medium: Media) -> Media:
    """What a record has of a medium."""
    return msgspec.structs.replace(medium, content=b"")


def drop_contents(message: Message) -> Message:
    """A message whose media have no contents."""
    if not message.parts:
        return message
    parts = [drop_content(p) if isinstance(p, Media) else p for p in message.parts]
    return msgspec.structs.replace(message, parts=parts)


def find_shown(messages: Iterable[Message]) -> Iterable[Media]:
    """The media in messages."""
    for message in messages:
        yield from (part for part in message.parts if isinstance(part, Media))


def record_prompt_messages(messages: Any, read: Sequence[Message]) -> Any:
    """The messages of a prompt without contents of media.

    Args:
        messages: As the prompt has them.
        read: As its trajectory read them; of one that never began there are none, and no more than
            the kinds of its media stay.
    """
    if not _shows_more_than_text(messages):
        return messages
    own = read[: len(messages)] if isinstance(messages, list | tuple) else []
    if any(message.parts for message in own):
        return [drop_contents(message) for message in own]
    return _describe_media(messages)


def _shows_more_than_text(messages: Any) -> bool:
    for message in messages if isinstance(messages, list | tuple) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        if content is None:
            content = getattr(message, "parts", None) or getattr(message, "content", None)
        if not isinstance(content, str | None):
            return True
    return False


def _describe_media(value: Any) -> Any:
    """`value` with a few words in the place of what may be a picture."""
    if isinstance(value, Media):
        return repr(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _describe_media(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_describe_media(item) for item in value]
    if isinstance(value, str) and value.startswith("data:") and len(value) > _MAX_DATA_URL:
        return f"{value[:64]}… ({len(value)} characters)"
    is_array = hasattr(value, "dtype") and getattr(value, "ndim", 0) > 1
    if is_array or type(value).__module__.startswith("PIL."):
        return f"<{type(value).__name__}>"
    return value


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

    def restore(self, medium: Media) -> Media:
        """A medium with its content.

        Raises:
            RolloutError: The file lacks it, or has another one.
        """
        if medium.content:
            return medium
        known = self._known.get(medium.digest)
        if known is not None:
            return known
        content = self._contents.get(medium.digest)
        if content is None:
            raise RolloutError(f"{self._where} lacks {medium!r}")
        restored = msgspec.structs.replace(medium, content=content)
        if not restored.is_intact:
            raise RolloutError(f"{self._where}: the content of {medium!r} has another hash")
        self._known[medium.digest] = restored
        return restored

    def restore_messages(self, messages: Sequence[Any]) -> Sequence[Any]:
        """Messages, or mappings, which prompts may have too; the same list where none shows media.

        Raises:
            RolloutError: As `restore`.
        """
        if not any(getattr(message, "parts", ()) for message in messages):
            return messages
        return [self._restore_message(message) for message in messages]

    def _restore_message(self, message: Any) -> Any:
        if not getattr(message, "parts", ()):
            return message
        parts = (self.restore(p) if isinstance(p, Media) else p for p in message.parts)
        return msgspec.structs.replace(message, parts=tuple(parts))
