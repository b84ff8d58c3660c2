"""What has been said in a conversation: its tokens, its messages, and which belong together."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import msgspec

from rollout.agents.kept_messages import SILENCE, KeptMessages
from rollout.agents.message_log import MessageLog
from rollout.agents.places import Marks, Row, mark_at, packed_mark
from rollout.chat.result_order import NO_CALLS, TurnCalls, message_ids
from rollout.chat.trajectory import COMPACTION
from rollout.chat.transcript import Transcript, append_split, common_length
from rollout.types import ToolCall

if TYPE_CHECKING:
    from array import array

    from rollout.agents.kept_messages import TurnReader
    from rollout.agents.turn import AssistantTurn
    from rollout.agents.wording import Worded
    from rollout.engine.pool.generation import Generation


_SEED = struct.Struct("=q")


class ConversationLog(msgspec.Struct, eq=False):
    """Tokens and messages of a conversation, which only ever grow.

    Attributes:
        row: The last of its rows, which is written.
        message_log: Its messages.
        in_reasoning: Whether the next turn begins inside reasoning.
        has_raw_ids: Whether it has tokens that are not what the template makes of its messages.
    """

    row: Row
    message_log: MessageLog
    in_reasoning: bool = False
    has_raw_ids: bool = False
    _earlier: tuple[Row, ...] = ()
    _marks: bytes = b""  # see `Marks`
    _open_from: int | None = None
    _last_turn: tuple[int, int] = (0, -1)  # where it begins and ends
    _calls: TurnCalls | None = None  # None: as the messages have them

    @classmethod
    def of(cls, row: Row, reader: TurnReader) -> ConversationLog:
        """Of no messages yet, of which turns are read so."""
        return cls(row, MessageLog(KeptMessages(reader)))

    @property
    def transcript(self) -> Transcript:
        """The tokens of the last row."""
        return self.row.transcript

    @property
    def rows(self) -> tuple[Row, ...]:
        """All of them; those before the last are where the history was rendered again since."""
        return (*self._earlier, self.row)

    @property
    def open_turn(self) -> array[int] | None:
        """The ids of a turn that was not parsed yet, if only of none; None where there is none."""
        return None if self._open_from is None else self.transcript.prefix.slice(self._open_from)

    @property
    def last_turn(self) -> array[int] | None:
        """The ids of the model's turn that nothing has answered yet; None where there is none."""
        start, stop = self._last_turn
        return self.transcript.prefix.slice(start) if stop == len(self.transcript) else None

    @property
    def calls(self) -> TurnCalls:
        """The calls that the next results answer; none where a turn was not parsed yet."""
        if self._open_from is not None:
            return NO_CALLS
        if self._calls is None:
            self._calls = self._last_calls()
        return self._calls

    def _last_calls(self) -> TurnCalls:
        """Those of the last turn of the assistant's, whoever gave it."""
        messages, found = self.message_log.messages, []
        said = set(messages.said)
        for at in range(len(messages) - 1, -1, -1):
            if at in said and messages.turn(at) is SILENCE:
                continue
            found.append(message_ids(messages[at]))
            if found[-1].role == "assistant":
                break
        return NO_CALLS.after(reversed(found))

    @property
    def may_be_rendered_again(self) -> bool:
        """Whether all of it is in messages, and the model has said something."""
        is_whole = self._open_from is None and not self.has_raw_ids
        return is_whole and bool(self.message_log.messages.said)

    def begin(self, worded: Worded, prompt_room: int | None = None) -> None:
        """The prompt; what of it is past `prompt_room` tokens is an observation."""
        ids = worded.ids
        if prompt_room is None or len(ids) <= prompt_room:
            self.transcript.append_prompt(ids, media=worded.media)
        else:
            append_split(self.transcript, ids, worded.media, prompt_room)
        self.message_log.begin(worded.messages, self.transcript.prefix)
        self.in_reasoning, self.has_raw_ids = worded.opens_reasoning, worded.is_raw
        self._mark()

    def take(self, generation: Generation, finish_reason: str, seed: int) -> None:
        """Tokens that an engine sampled: of a turn that begins with them, or is open."""
        prefix = self.transcript.prefix
        had = prefix.length
        if self._open_from is None:
            self._open_from = had
        self.transcript.append_generated(
            *generation.packed(),
            versions=generation.versions,
            finish_reason=finish_reason,
            top=generation.top(),
        )
        if prefix.checked == had and generation.last_part:  # each was looked at as it came
            prefix.checked = prefix.length
        experts = generation.experts()
        if experts is not None:
            self.transcript.append_routed_experts(experts)
        self.row.seeds += _SEED.pack(seed)

    def end_turn(self, reader: TurnReader, cut_by: str | None) -> AssistantTurn:
        """Parse the open turn and record it."""
        turn, ids = None, self.open_turn
        assert ids is not None
        try:
            turn = reader.turn(ids, cut_by, in_reasoning=self.in_reasoning)
        finally:
            self._say(turn)
        return turn

    def _say(self, turn: AssistantTurn | None) -> None:
        """The open turn is over; None: it could not be parsed and is in no message."""
        assert self._open_from is not None
        start, self._open_from = self._open_from, None
        self._last_turn = (start, self.transcript.prefix.length)
        self._calls = NO_CALLS
        if turn is not None:
            tokens, messages = self.transcript.prefix, self.message_log.messages
            messages.say(turn, tokens, start, in_reasoning=self.in_reasoning)
            ids = tuple([each.id for each in turn.calls if isinstance(each, ToolCall)])
            self._calls = TurnCalls(ids) if ids else NO_CALLS
        self._mark(ends_turn=True)

    def observe(self, worded: Worded) -> None:
        """What answers the model's turn."""
        messages, start = self.message_log.messages, len(self.transcript)
        if self._last_turn[1] != start:
            messages.stay_silent()  # the template opens a turn there, which ends at once
        self.transcript.append_observation(worded.ids, media=worded.media)
        messages.hear(worded.messages, self.transcript.prefix, start, worded.found)
        if self._calls is not None:
            self._calls = self._calls.after(map(message_ids, worded.messages))
        self.in_reasoning = worded.opens_reasoning
        self._mark()

    def observe_ids(self, ids: array[int], *, in_reasoning: bool) -> None:
        """Tokens that are in no message."""
        self.transcript.append_observation(ids)
        self.in_reasoning, self.has_raw_ids = in_reasoning, True
        self._mark()

    def render_again(self, transcript: Transcript, purpose: str = COMPACTION) -> bool:
        """Open another row with this transcript, unless it says what the last one does."""
        if transcript.ids_bytes() == self.transcript.ids_bytes():
            return False
        shared = common_length(transcript.prefix.ids, self.transcript.prefix.ids)
        self._add(Row(transcript, purpose, self.row, shared))
        self._mark()
        return True

    def begin_again(self, worded: Worded, reader: TurnReader, prompt_room: int) -> None:
        """Open another row that begins with these messages, in place of all that was said."""
        last = self.row
        last.messages = self.message_log.messages
        shared = common_length(worded.ids, self.transcript.prefix.ids)
        self._add(Row(Transcript(), COMPACTION, last, shared))
        self.message_log, self.has_raw_ids = MessageLog(KeptMessages(reader)), False
        self._calls = None
        self.begin(worded, prompt_room)

    def _add(self, row: Row) -> None:
        self._earlier, self.row = self.rows, row
        self._marks, self._last_turn = b"", (0, -1)

    def reward_turn(self, value: float) -> bool:
        """Add to the reward of the last turn's last token; False where the row has no turn."""
        row, (start, stop) = self.row, self._last_turn
        if not row.seeds:
            return False
        if start < stop:  # else the turn has no token
            row.token_rewards = row.token_rewards or {}
            row.token_rewards[stop - 1] = row.token_rewards.get(stop - 1, 0.0) + value
        return True

    def fork(self, position: int, purpose: str) -> ConversationLog:
        """One that begins with the first `position` tokens of this one's last row, as context.

        Raises:
            AgentError: It cannot be continued there.
        """
        own = Marks(self._marks)
        mark, marks = mark_at(position, own, len(self.transcript))
        row = Row(self.transcript.fork(position), purpose, self.row, position)
        forked = ConversationLog(row, self.message_log.fork(mark.messages))
        forked.in_reasoning, forked.has_raw_ids = mark.in_reasoning, self.has_raw_ids
        forked._marks = b"".join(packed_mark(*each) for each in marks)
        is_past_all = len(marks) == len(own) and self._open_from is None
        if mark.position < position and is_past_all:
            forked.has_raw_ids = True  # tokens that an agent appended by itself
        elif mark.position < position:
            forked._open_from = mark.position
        elif mark.ends_turn:
            forked._last_turn = (marks[-2].position, position)
        return forked

    def _mark(self, *, ends_turn: bool = False) -> None:
        length, count = len(self.transcript), len(self.message_log.messages)
        self._marks += packed_mark(length, count, self.in_reasoning, ends_turn)
