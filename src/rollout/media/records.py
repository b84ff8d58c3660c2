"""Images and videos on disk: each content once, by its hash; records refer to it.

A record has media without their contents; these stand in a file of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import msgspec

from rollout.errors import RolloutError
from rollout.media.parts import kind_of_media
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
    changed: Message = _change_media(message, drop_content)
    return changed


def _change_media(message: Any, change: Callable[[Media], Media]) -> Any:
    """A message; itself where it shows no media, as a mapping among a prompt's messages does."""
    if not getattr(message, "parts", ()):
        return message
    parts = tuple(change(part) if isinstance(part, Media) else part for part in message.parts)
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
    if not isinstance(messages, list | tuple) or not any(map(_shows_more_than_text, messages)):
        return messages
    own = read[: len(messages)]
    if any(message.parts for message in own):
        return [drop_contents(message) for message in own]
    try:
        return _describe_media(messages)
    except RecursionError:  # nested too deeply, or holding itself
        return [f"<{type(each).__name__}>" for each in messages]


def _shows_more_than_text(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    if content is None:
        content = getattr(message, "parts", None) or getattr(message, "content", None)
    return not isinstance(content, str | None)


def _describe_media(value: Any) -> Any:
    """`value` with a few words in the place of what may be a picture."""
    if isinstance(value, Media):
        return repr(value)
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, Mapping):
        return {str(key): _describe_media(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_describe_media(item) for item in value]
    if isinstance(value, str) and value.startswith("data:") and len(value) > _MAX_DATA_URL:
        return f"{value[:64]}… ({len(value)} characters)"
    is_array = hasattr(value, "dtype") and getattr(value, "ndim", 0) > 1
    if is_array or kind_of_media(value) is not None:
        return f"<{type(value).__name__}>"
    return value


class KnownContents:
    """Puts contents back into media that were read from records, one object for each.

    Args:
        find: The content of a digest; None where there is none.
        where: Names their file in errors.
    """

    def __init__(self, find: Callable[[str], bytes | None], where: str) -> None:
        self._find = find
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
        content = self._find(medium.digest)
        if content is None:
            raise RolloutError(f"{self._where} lacks {medium!r}")
        restored = msgspec.structs.replace(medium, content=content)
        if not restored.is_intact:
            raise RolloutError(f"{self._where}: the content of {medium!r} has another hash")
        self._known[medium.digest] = restored
        return restored

    def restore_messages(self, messages: Sequence[Any]) -> Sequence[Any]:
        """Messages; mappings among them, which prompts may have, stay as they are.

        Raises:
            RolloutError: As `restore`.
        """
        if not any(getattr(message, "parts", ()) for message in messages):
            return messages
        return [_change_media(message, self.restore) for message in messages]
