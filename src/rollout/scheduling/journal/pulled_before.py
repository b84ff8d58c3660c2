"""A group that an earlier process pulled, as its journal has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from rollout.scheduling.journal.entries import Key
from rollout.scheduling.journal.packed_prompt import STRUCTS

if TYPE_CHECKING:
    from rollout.scheduling.journal.entries import PromptEntry
    from rollout.types import Prompt


_encode = msgspec.msgpack.encode


class PulledBefore(NamedTuple):
    """What there is of it.

    Attributes:
        number: Its place among all that were pulled.
        prompt: With the name that it had.
        entry: What the journal says of it.
        step: Of the call that gave it to its caller; None where none did.
        version: Of the oldest weights that sampled for it, where that counts; None where none
            did, and where its caller had it: in time, when it did.
        row: What sorts it among the rows of its call, where that is not its number.
    """

    number: int
    prompt: Prompt
    entry: PromptEntry
    step: int | None
    version: int | None
    row: int | None = None

    @property
    def key(self) -> Key:
        """Of its first member."""
        return Key(self.entry.step, self.entry.uid, 0, self.entry.validate, self.entry.call)


def name_at(prompt: Prompt, place: int) -> str:
    """As what a journal knows a prompt that its source gave after so many others."""
    return prompt.uid or f"prompt-{place}"


def content_of(fields: bytes) -> dict[str, bytes]:
    """The fields of a packed prompt, each in the same bytes whatever the order of keys in it."""
    unpacked = msgspec.msgpack.decode(fields, type=dict[str, Any], ext_hook=_unrestored)
    return {name: _in_order(value) for name, value in unpacked.items()}


def _unrestored(code: int, data: memoryview) -> Any:
    """A `Message`, or what is in it, as its fields: a mapping that has them says the same."""
    if code in STRUCTS:
        return msgspec.msgpack.decode(data, ext_hook=_unrestored)
    return msgspec.msgpack.Ext(code, bytes(data))


def _in_order(value: Any) -> bytes:
    try:
        return _encode(value, order="deterministic")
    except TypeError:  # keys of several types have no order
        return _encode(value)
