"""Where a conversation's rows depart from each other, and what may be said of them."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, overload

import msgspec
import numpy as np

from rollout.chat.trajectory import Parent, Segment
from rollout.chat.transcript import Transcript
from rollout.errors import AgentError
from rollout.types import Message
from rollout.utf8 import is_name

if TYPE_CHECKING:
    from collections.abc import Iterable


class Row(msgspec.Struct, eq=False, gc=False):
    """The tokens of a conversation up to where its history is written otherwise.

    Attributes:
        parent, position: What it departs from, and where.
        seeds: Of the generations in it, packed int64.
        messages: What was said up to its end; None where the conversation has it still.
        token_rewards: Rewards of single tokens, by their positions.
    """

    transcript: Transcript
    purpose: str
    parent: Row | None = None
    position: int = 0
    seeds: bytes = b""
    messages: Sequence[Message] | None = None
    token_rewards: dict[int, float] | None = None


class Rows(Protocol):
    """A conversation as a part of the tree; see `Conversation`."""

    trainable: bool | None
    reward: float | None

    @property
    def rows(self) -> Sequence[Row]:
        """Its rows in order."""

    @property
    def session_id(self) -> str:
        """Of its requests."""

    @property
    def messages(self) -> Sequence[Message]:
        """What was said in it."""


class Mark(NamedTuple):
    """A place from which a conversation can be continued otherwise.

    Attributes:
        position: Tokens before it.
        messages: Messages before it.
        in_reasoning: Whether a turn that begins there begins inside reasoning.
        ends_turn: Whether what stands before it is the model's.
    """

    position: int
    messages: int
    in_reasoning: bool
    ends_turn: bool


_MARK = struct.Struct("=ii??")


def packed_mark(*mark: int) -> bytes:
    """A `Mark` of these fields, as `Marks` read it."""
    return _MARK.pack(*mark)


class Marks(Sequence[Mark]):
    """Marks in their order, read from where a conversation keeps them packed."""

    __slots__ = ("_packed",)

    def __init__(self, packed: bytes) -> None:
        self._packed = packed

    def __len__(self) -> int:
        return len(self._packed) // _MARK.size

    @overload
    def __getitem__(self, at: int) -> Mark: ...
    @overload
    def __getitem__(self, at: slice) -> list[Mark]: ...
    def __getitem__(self, at: int | slice) -> Mark | list[Mark]:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        return Mark._make(_MARK.unpack_from(self._packed, _MARK.size * range(len(self))[at]))


def mark_at(position: Any, marks: Sequence[Mark], length: int) -> tuple[Mark, list[Mark]]:
    """The last mark up to `position`, and all up to that one.

    Raises:
        AgentError: A conversation of `length` tokens cannot be continued there.
    """
    if not isinstance(position, int) or isinstance(position, bool) or not 1 <= position <= length:
        raise AgentError(f"branch: position = {position!r}: expected an integer from 1 to {length}")
    count = sum(mark.position <= position for mark in marks)
    is_within = not count or marks[count - 1].position < position
    if is_within and (not count or (count < len(marks) and not marks[count].ends_turn)):
        raise AgentError(
            f"branch: position = {position}: expected the end of a prompt, of a turn or of what "
            "answered it, or a place within a turn"
        )
    return marks[count - 1], list(marks[:count])


def check_purpose(purpose: Any) -> None:
    """Let a purpose pass that a segment can have.

    Raises:
        AgentError: It is none.
    """
    if not is_name(purpose):
        raise AgentError(f"purpose = {purpose!r:.80}: expected a non-empty string in UTF-8")


def check_ids(ids: Any, vocab_size: int, what: str = "observe_ids") -> array[int]:
    """Token ids, packed.

    Args:
        vocab_size: 0 where nobody knows it.
        what: Who was given them, for messages.

    Raises:
        AgentError: They are no sequence of integers, or outside the vocabulary.
    """
    try:
        values = np.asarray(ids)
    except (ValueError, TypeError) as error:
        raise AgentError(f"{what}: {error}; expected a sequence of token ids") from error
    if values.size == 0:
        return array("i")
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise AgentError(
            f"{what}: {values.ndim} dimensions of {values.dtype}; expected a sequence of token ids"
        )
    wrong = np.flatnonzero((values < 0) | (values >= (vocab_size or 2**31)))
    if len(wrong):
        raise AgentError(
            f"{what}: id {values[wrong[0]]} at {wrong[0]} is outside the engine's vocabulary "
            f"of {vocab_size} ids"
        )
    return array("i", values.astype(np.int32).tobytes())


def segments_of(conversations: Iterable[Rows]) -> list[Segment]:
    """The tree of their rows; each conversation stands after the one that it departs from."""
    rows = [(each, row) for each in conversations for row in each.rows]
    places = {id(row): at for at, (_, row) in enumerate(rows)}
    return [
        Segment(
            transcript=row.transcript,
            parent=None if row.parent is None else Parent(places[id(row.parent)], row.position),
            purpose=row.purpose,
            trainable=each.trainable,
            reward=each.reward,
            session_id=each.session_id,
            seeds=list(array("q", row.seeds)),
            messages=each.messages if row.messages is None else row.messages,
            token_rewards=_token_rewards(row),
        )
        for each, row in rows
    ]


def _token_rewards(row: Row) -> array[float] | None:
    """One for each token after the prompt; None where no token has any."""
    if not row.token_rewards:
        return None
    values = array("f", bytes(4 * row.transcript.response_length))
    for position, value in row.token_rewards.items():
        values[position - row.transcript.prompt_length] = value
    return values
