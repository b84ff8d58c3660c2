"""Values of users as a journal holds them, and prompts, which are made of such values."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.chat.plain_data import (
    NotPlainError,
    encoder,
    from_plain,
    show_value,
    to_plain,
    to_plain_items,
)
from rollout.chat.trajectory_codec import pack_message, unpack_prompt
from rollout.errors import JournalError
from rollout.medium import Media
from rollout.types import Message, Prompt, ToolCall, format_error

if TYPE_CHECKING:
    from collections.abc import Collection

    from rollout.media.records import KnownContents

logger = logging.getLogger("rollout.journal")

#: What encoding raises for values that msgpack cannot hold.
UNENCODABLE = (NotPlainError, JournalError, TypeError, ValueError, OverflowError, RecursionError)
#: Fields of a prompt that may be written as text: its caller gives it again on resume.
MAY_BE_TEXT = ("extra", "ground_truth", "tools_kwargs")


class Unwritable:
    """What becomes of values that are no plain data.

    Attributes:
        is_text: They are written as text, with a warning; else they are refused.
    """

    def __init__(self, *, is_text: bool) -> None:
        self.is_text = is_text
        self._warned: set[str] = set()

    def pack_items(self, items: Mapping[Any, Any], where: str) -> dict[Any, Any]:
        """Make plain data of the items of a mapping.

        Metrics that cannot be written become floats, where these say the same.

        Raises:
            NotPlainError: One is no plain data, and is refused.
        """
        try:
            return to_plain_items(items, where)
        except NotPlainError:
            pass  # what follows names the item, or writes the others
        kind = float if where == "metrics" else repr
        written: dict[Any, Any] = {}
        for key, value in items.items():
            try:
                to_plain_items({key: None}, where)
                written[key] = to_plain(value, f"{where}[{key!r}]")
            except NotPlainError as error:
                if not self.is_text:
                    raise
                self._warn(value, error)
                written[show_value(key, str)] = show_value(value, kind)
        return written

    def pack_value(self, value: Any, where: str) -> Any:
        """Make plain data of a value; see `pack_items`."""
        if isinstance(value, Mapping):
            return self.pack_items(value, where)
        try:
            return to_plain(value, where)
        except NotPlainError as error:
            if not self.is_text:
                raise
            self._warn(value, error)
            return show_value(value)

    def _warn(self, value: Any, error: NotPlainError) -> None:
        kind = type(value).__qualname__
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s; it is written as text, and so are others of this type", error)


REFUSE = Unwritable(is_text=False)


def pack_prompt(
    prompt: Prompt, where: str, unwritable: Unwritable = REFUSE, texts: Collection[str] = ()
) -> bytes:
    """Encode the fields of a prompt; media in its messages are without contents.

    Args:
        where: Names it in errors.
        unwritable: What becomes of values in the fields that `texts` names.

    Raises:
        JournalError: A field holds what cannot be written; names it.
    """
    fields: dict[str, Any] = {}
    try:
        fields["messages"] = [
            _pack_message(each, f"{where}.messages[{at}]")
            for at, each in enumerate(prompt.messages)
        ]
        for name in Prompt.__struct_fields__:
            if name != "messages":
                policy = unwritable if name in texts else REFUSE
                fields[name] = policy.pack_value(getattr(prompt, name), f"{where}.{name}")
        return encoder.encode(fields)
    except (NotPlainError, JournalError) as error:
        raise JournalError(str(error)) from None
    except UNENCODABLE as error:
        raise JournalError(f"{where}.messages: {format_error(error)}") from None


def _pack_message(message: Any, where: str) -> Any:
    """Pack a `Message`, whose record is a list; a mapping becomes a dict."""
    if type(message) is not Message:
        return REFUSE.pack_value(message, where)
    are_calls = all(type(each) is ToolCall for each in message.tool_calls)
    if not are_calls or not all(isinstance(each, str | Media) for each in message.parts):
        raise JournalError(f"{where}: expected tool_calls of ToolCall, parts of str and Media")
    return pack_message(
        message, lambda value, name: REFUSE.pack_value(value, f"{where}.{name.split('.')[-1]}")
    )


def read_prompt(
    fields: bytes, *, uid: str | None = None, media: KnownContents | None = None
) -> Prompt:
    """Decode a prompt; mappings among its messages are dicts.

    Args:
        uid: The one that it has; None: as it was given.
        media: Gives its images and videos their contents; None: they stay without.
    """
    prompt = unpack_prompt(msgspec.msgpack.decode(fields, ext_hook=from_plain))
    messages = prompt.messages if media is None else media.restore_messages(prompt.messages)
    return msgspec.structs.replace(
        prompt, messages=messages, uid=prompt.uid if uid is None else uid
    )


def compare_prompts(old: bytes, new: bytes) -> list[str]:
    """Name the fields in which two packed prompts differ."""
    if old == new:
        return []
    before, now = (msgspec.msgpack.decode(each, type=dict[str, Any]) for each in (old, new))
    return [name for name in now if before.get(name) != now[name]]


def find_media(prompt: Prompt) -> dict[str, bytes]:
    """Find the contents of images and videos in the messages of a prompt, by digest."""
    parts = [part for message in prompt.messages for part in getattr(message, "parts", ())]
    return {part.digest: part.content for part in parts if getattr(part, "content", None)}
