"""What users hand over, as records hold it: values, prompts, and finished trajectories."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.chat.messages import Messages
from rollout.chat.plain_data import NotPlainError, encoder, from_plain, show_value, to_plain
from rollout.chat.trajectory_codec import (
    PackedTrajectory,
    pack_message,
    pack_trajectory,
    unpack_message,
    unpack_prompt,
    unpack_trajectory,
)
from rollout.errors import JournalError, PromptError
from rollout.medium import Media
from rollout.types import Cause, Message, Outcome, Prompt, ToolCall, format_error

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from rollout.chat.trajectory import Trajectory
    from rollout.media.records import KnownContents

logger = logging.getLogger("rollout.journal")

#: What encoding raises for values that msgpack cannot hold.
UNENCODABLE = (NotPlainError, JournalError, TypeError, ValueError, OverflowError, RecursionError)
#: Fields of a prompt that may be written as text: its caller passes it again on resume.
MAY_BE_TEXT = ("extra", "ground_truth", "tools_kwargs")

_trajectory_decoder = msgspec.msgpack.Decoder(PackedTrajectory, ext_hook=from_plain)


class ValueWriter:
    """Makes plain data of values.

    Args:
        as_text: What is no plain data is written as text, with a warning; else it is refused.
    """

    def __init__(self, *, as_text: bool) -> None:
        self._as_text = as_text
        self._warned: set[str] = set()

    def write(self, value: Any, where: str) -> Any:
        """Make plain data of a value, or of the items of any mapping.

        Metrics that cannot be written become floats, where these say the same.

        Raises:
            NotPlainError: It is no plain data, and is refused.
        """
        is_mapping = isinstance(value, Mapping)
        try:
            return to_plain(dict(value) if is_mapping else value, where)
        except NotPlainError as error:
            if not is_mapping:
                self._refuse_or_warn(value, error)
                return show_value(value)
        kind = float if where == "metrics" else repr
        written: dict[Any, Any] = {}
        for key, each in value.items():
            try:
                to_plain({key: None}, where)
                written[key] = to_plain(each, f"{where}[{key!r}]")
            except NotPlainError as error:
                self._refuse_or_warn(each, error)
                written[show_value(key, str)] = show_value(each, kind)
        return written

    def _refuse_or_warn(self, value: Any, error: NotPlainError) -> None:
        if not self._as_text:
            raise error
        kind = type(value).__qualname__
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s; it is written as text, and so are others of this type", error)


REFUSE = ValueWriter(as_text=False)


# Prompts.


def pack_prompt(
    prompt: Prompt, where: str, values: ValueWriter = REFUSE, texts: Collection[str] = ()
) -> bytes:
    """Encode the fields of a prompt; media in its messages are without contents.

    Args:
        where: Names it in errors.
        values: Writes the fields that `texts` names.

    Raises:
        PromptError: A field holds what cannot be written; names it.
    """
    try:
        fields: dict[str, Any] = {
            "messages": [
                _pack_message(each, f"{where}.messages[{at}]")
                for at, each in enumerate(prompt.messages)
            ]
        }
        for name in Prompt.__struct_fields__[1:]:  # after the messages
            writer = values if name in texts else REFUSE
            fields[name] = writer.write(getattr(prompt, name), f"{where}.{name}")
        return encoder.encode(fields)
    except UNENCODABLE as error:
        is_named = isinstance(error, NotPlainError | JournalError)
        what = error if is_named else f"{where}.messages: {format_error(error)}"
        raise PromptError(f"{what} (journal.path is set)") from None


def _pack_message(message: Any, where: str) -> Any:
    """Pack a `Message`, whose record is a list; a mapping becomes a dict."""
    if type(message) is not Message:
        return REFUSE.write(message, where)
    are_calls = all(type(each) is ToolCall for each in message.tool_calls)
    if not are_calls or not all(isinstance(each, str | Media) for each in message.parts):
        raise JournalError(f"{where}: expected tool_calls of ToolCall, parts of str and Media")
    return pack_message(
        message, lambda value, name: REFUSE.write(value, f"{where}.{name.split('.')[-1]}")
    )


def hash_prompt(fields: bytes) -> bytes:
    """Digest a packed prompt: pulled again, it is the same."""
    return hashlib.blake2b(fields, digest_size=16).digest()


def read_prompt(
    fields: bytes, *, uid: str | None = None, media: KnownContents | None = None
) -> Prompt:
    """Decode a prompt; mappings among its messages are dicts.

    Args:
        uid: The one that it has; None: as it was packed.
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


# Finished trajectories.


def pack_end(trajectory: Trajectory, values: ValueWriter) -> bytes:
    """Pack a finished trajectory, without its prompt.

    One that holds what cannot be written fails by that, and loses it: what is no plain data in its
    `extra` and `metrics`; where that is not enough, all of these, its messages and scores.
    """
    try:
        return _encode(trajectory, values)
    except UNENCODABLE as error:
        _fail(trajectory, error)
    trajectory.extra = _keep_plain(trajectory.extra)
    trajectory.metrics = _keep_plain(trajectory.metrics)
    with suppress(*UNENCODABLE):
        return _encode(trajectory, values)
    trajectory.extra, trajectory.metrics, trajectory.messages = {}, {}, []
    trajectory.turn_scores, trajectory.tool_rewards = [], []
    for segment in trajectory.segments:
        segment.messages = []
    return _encode(trajectory, values)


def _fail(trajectory: Trajectory, error: Exception) -> None:
    why = str(error) if isinstance(error, NotPlainError) else format_error(error)
    trajectory.outcome, trajectory.reason = Outcome.FAILED, "journal"
    trajectory.limit_source, trajectory.cause = None, Cause.of(JournalError(why))
    trajectory.trainable, trajectory.reward = False, None
    for segment in trajectory.segments:
        segment.reward = segment.token_rewards = None


def _keep_plain(items: Mapping[Any, Any]) -> dict[Any, Any]:
    plain: dict[Any, Any] = {}
    for key, value in items.items():
        with suppress(NotPlainError):
            plain |= to_plain({key: value}, "")
    return plain


def _encode(trajectory: Trajectory, values: ValueWriter) -> bytes:
    packed = pack_trajectory(
        trajectory,
        values.write,
        lambda messages: [pack_message(each, values.write) for each in messages],
    )
    return encoder.encode(packed)


def unpack_end(
    packed: bytes, prompt: Prompt | None, decode: Callable[[Sequence[int]], str]
) -> Trajectory:
    """Unpack a trajectory; its images and videos are without their contents.

    Args:
        prompt: What it started from.
        decode: Its ids to text, for who prints it.
    """
    return unpack_trajectory(
        _trajectory_decoder.decode(packed),
        prompt,
        lambda messages: Messages(list(map(unpack_message, messages)), decode),
    )
