"""The history of a conversation: its messages, and the tokens that they stand for."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from rollout.agents.turn import make_message
from rollout.chat.messages import Messages, template_messages, with_results_as_user
from rollout.chat.result_order import MessageIds, message_ids
from rollout.chat.reward_values import finite_number
from rollout.chat.trajectory import BRANCH, COMPACTION
from rollout.chat.transcript import Transcript, append_split, common_length
from rollout.errors import AgentError
from rollout.types import Message
from rollout.utf8 import encodable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollout.agents.turn import AssistantTurn, TurnReader
    from rollout.engine.pool.generation import Generation
    from rollout.media import PlacedMedia


class Rendered(NamedTuple):
    """Messages in tokens.

    Attributes:
        ids: What they add to a transcript.
        messages: The messages themselves.
        opens_reasoning: Whether the turn after them begins inside reasoning.
        is_raw: The ids are not what the template makes of the messages.
        cut_tokens: Tokens that a prompt has lost at its beginning.
        media: Images and videos with their positions among the ids.
    """

    ids: array[int]
    messages: list[Message]
    opens_reasoning: bool
    is_raw: bool = False
    cut_tokens: int = 0
    media: tuple[PlacedMedia, ...] = ()


class Mark(NamedTuple):
    """A position from which a conversation can be continued differently.

    Attributes:
        position: Tokens before it.
        messages: Messages before it.
        in_reasoning: Whether a turn that begins there begins inside reasoning.
        turn_start: Where the turn begins that ends there; None where none does.
        reasoning: That of the turn.
    """

    position: int
    messages: int
    in_reasoning: bool = False
    turn_start: int | None = None
    reasoning: str | None = None


#: Stands for a turn without words, between two observations that followed each other: the template
#: writes an empty turn there.
SILENT = Mark(0, 0, turn_start=0)


class Row(msgspec.Struct, eq=False):
    """The tokens of a conversation up to where its history is rendered differently.

    Attributes:
        parent, position: The row that it departs from, and after how many of its tokens.
        seeds: Of the generations in it.
        messages: The conversation that it is of, up to a compaction; None where that still goes on.
        token_rewards: Positions of single tokens, each with a reward; several of one add up.
    """

    transcript: Transcript
    purpose: str
    parent: Row | None = None
    position: int = 0
    seeds: tuple[int, ...] = ()
    messages: Sequence[Message] | None = None
    token_rewards: tuple[tuple[int, float], ...] = ()

    def spread_rewards(self) -> array[float] | None:
        """One reward for each token after the prompt; None where no token has any."""
        if not self.token_rewards:
            return None
        values = array("f", bytes(4 * self.transcript.response_length))
        for position, value in self.token_rewards:
            values[position - self.transcript.prompt_length] += value
        return values


class History:
    """The messages and tokens of a conversation, which only ever grow.

    Attributes:
        rows: Its rows; the last one is written, those before it are from where the history was
            rendered again since.
        transcript: The tokens of the last row.
        messages: All of them; after a compaction those since then.
        turns: Where the model's turns end, by position in `messages`; `SILENT` ones too.
        in_reasoning: Whether the next turn begins inside reasoning.
        has_raw_ids: Whether it has tokens that are not what the template makes of its messages.
        turn_start: Where the turn begins that the next generation continues; None: it begins one.
    """

    def __init__(self, row: Row, reader: TurnReader) -> None:
        self.rows, self.transcript = [row], row.transcript
        self._reader = reader
        self._added: list[Message] = []
        self.messages = Messages(self._added, reader.decode)
        self.turns: dict[int, Mark] = {}
        self.in_reasoning = self.has_raw_ids = False
        self.turn_start: int | None = None
        self._marks: list[Mark] = []  # of the last row
        self._opening_ids, self._opening_messages = b"", 0  # what it began with

    @property
    def unanswered_ids(self) -> array[int] | None:
        """The ids of the model's turn at the end; None where something follows the last turn."""
        last = self._marks[-1]
        if last.turn_start is None or last.position != self.transcript.prefix.length:
            return None
        return self.transcript.prefix.slice(last.turn_start)

    @property
    def last_calls(self) -> Sequence[Any]:
        """The calls of the last message."""
        return self._added[-1].tool_calls if self._added else ()

    @property
    def last_turn(self) -> list[MessageIds]:
        """The last turn, whoever gave it, and what follows: its calls the next results answer."""
        if self.turn_start is not None:
            return []
        silent = {at for at, turn in self.turns.items() if turn is SILENT}
        last = len(self._added) - 1
        while last > 0 and (last in silent or self._added[last].role != "assistant"):
            last -= 1
        spoken = (at for at in range(last, len(self._added)) if at not in silent)
        return [message_ids(self._added[at]) for at in spoken]

    def decode_turns(self) -> dict[int, str]:
        """The text that the model sampled, by position in `messages`."""
        piece, decode, turns = self.transcript.prefix.slice, self._reader.decode, self.turns.items()
        return {at: decode(piece(turn.turn_start or 0, turn.position)) for at, turn in turns}

    def begin(self, rendered: Rendered, prompt_room: int) -> None:
        """Append the prompt; what of it is past `prompt_room` tokens is an observation.

        A row of purpose "branch" or "compaction" departs from its parent where their tokens do.
        """
        row = self.rows[-1]
        if row.parent is not None and row.purpose in (BRANCH, COMPACTION):
            row.position = common_length(rendered.ids, row.parent.transcript.prefix.ids)
        append_split(self.transcript, rendered.ids, rendered.media, prompt_room)
        self._added += rendered.messages
        self._opening_ids = self.transcript.prefix.packed()
        self._opening_messages = len(self._added)
        self.in_reasoning, self.has_raw_ids = rendered.opens_reasoning, rendered.is_raw
        self._mark()

    def append_generated(self, generation: Generation, finish_reason: str, seed: int) -> None:
        """Append tokens that an engine sampled; `end_turn` adds the message of their turn."""
        transcript, prefix = self.transcript, self.transcript.prefix
        had = prefix.length
        if self.turn_start is None:
            self.turn_start = had
        transcript.append_generated(
            *generation.packed(),
            versions=generation.versions,
            finish_reason=finish_reason,
            top=generation.top(),
        )
        if prefix.checked == had and generation.last_part:  # each was looked at as it came
            prefix.checked = prefix.length
        experts = generation.experts()
        if experts is not None:
            transcript.append_routed_experts(experts)
        self.rows[-1].seeds += (seed,)

    def end_turn(self, cut_by: str | None) -> AssistantTurn:
        """Parse the turn at the end and add its message; one that cannot be parsed is in none."""
        assert self.turn_start is not None
        start, self.turn_start, reasoning = self.turn_start, None, None
        try:
            ids = self.transcript.prefix.slice(start)
            turn = self._reader.read_ids(ids, cut_by, in_reasoning=self.in_reasoning)
            self._added.append(make_message(turn))
            reasoning = turn.reasoning
        finally:
            self._mark(start, reasoning)
        self.turns[len(self._added) - 1] = self._marks[-1]
        return turn

    def observe(self, rendered: Rendered) -> None:
        """Append what answers the model's turn."""
        if self.unanswered_ids is None and not rendered.is_raw:
            self.turns[len(self._added)] = SILENT
            self._added.append(Message(role="assistant", content=""))
        prefix = self.transcript.prefix
        is_checked = prefix.checked == prefix.length
        self.transcript.append_observation(rendered.ids, media=rendered.media)
        if is_checked:  # engines are refused that lack a token of the tokenizer
            prefix.checked = prefix.length
        self._added += rendered.messages
        self.in_reasoning = rendered.opens_reasoning
        self.has_raw_ids |= rendered.is_raw
        self._mark()

    def split_again(
        self, ids: Sequence[int], media: Sequence[PlacedMedia], longest: int
    ) -> Transcript:
        """Make the transcript of a further row, of the conversation rendered again.

        Its prompt is what it shares with the first prompt, so that it fits where that one fits (at
        most `longest` tokens where they share nothing); the rest is an observation.
        """
        transcript, shared = Transcript(), common_length(ids, array("i", self._opening_ids))
        append_split(transcript, ids, media, shared or min(longest, len(ids)))
        return transcript

    def add_row(self, transcript: Transcript) -> bool:
        """Begin another row with this transcript, unless its tokens are those of the last one."""
        if transcript.ids_bytes() == self.transcript.ids_bytes():
            return False
        self._open_row(transcript)
        self._mark()
        return True

    def compact(self, rendered: Rendered, prompt_room: int) -> None:
        """Begin another row with these messages, in place of all before."""
        for row in self.rows:
            row.messages = self.messages if row.messages is None else row.messages
        self._open_row(Transcript())
        self._added, self.turns = [], {}
        self.messages = Messages(self._added, self._reader.decode)
        self.begin(rendered, prompt_room)

    def _open_row(self, transcript: Transcript) -> None:
        shared = common_length(transcript.prefix.ids, self.transcript.prefix.ids)
        self.rows.append(Row(transcript, COMPACTION, self.rows[-1], shared))
        self.transcript, self._marks = transcript, []

    def reward_turn(self, value: float) -> bool:
        """Add to the reward of the last turn's last token; False where the row has no turn."""
        row, turns = self.rows[-1], [mark for mark in self._marks if mark.turn_start is not None]
        if row.seeds and turns and turns[-1].position > (turns[-1].turn_start or 0):
            last = turns[-1].position - 1  # else the turn has no token
            given = [each for at, each in row.token_rewards if at == last]
            finite_number(sum(given, value), "reward_turn")
            row.token_rewards += ((last, value),)
        return bool(row.seeds)

    def fork(self, position: Any, purpose: str) -> History:
        """One that begins with the first `position` tokens of the last row, as context.

        Raises:
            AgentError: It cannot be continued there.
        """
        length, what = len(self.transcript), f"branch: position = {position!r:.80}: expected"
        if type(position) is not int or not 1 <= position <= length:
            raise AgentError(f"{what} an integer from 1 to {length}")
        marks = [mark for mark in self._marks if mark.position <= position]
        after = self._marks[len(marks) :]
        is_within = not marks or marks[-1].position < position
        if is_within and (not marks or (after and after[0].turn_start is None)):
            raise AgentError(
                f"{what} the end of a prompt, of a turn or of what answered it, or a position "
                "within a turn"
            )
        mark = marks[-1]
        row = Row(self.transcript.fork(position), purpose, self.rows[-1], position)
        forked = History(row, self._reader)
        forked._marks, forked.in_reasoning = marks, mark.in_reasoning
        forked.has_raw_ids = self.has_raw_ids
        forked._added += self._added[: mark.messages]
        forked.turns = {at: turn for at, turn in self.turns.items() if at < mark.messages}
        forked._opening_ids = self._opening_ids
        forked._opening_messages = min(self._opening_messages, mark.messages)
        if is_within and not after and self.turn_start is None:
            forked.has_raw_ids = True  # tokens that an agent appended by itself
        elif is_within:
            forked.turn_start = mark.position
        return forked

    def serve_messages(self, *, in_words: bool) -> list[Message | Mapping[str, Any]]:
        """The messages as a serving stack gets them: text, reasoning and calls of a turn apart.

        Args:
            in_words: Write calls as the text that they are, and tools' answers as a user's words.
        """
        served: list[Message | Mapping[str, Any]] = list(self._added)
        for at, turn in self.turns.items():
            content, calls = self._added[at].content, list(self._added[at].tool_calls)
            if in_words:
                texts = filter(None, [content, *(call.raw for call in calls)])
                content, calls = encodable("\n".join(texts)), []
            served[at] = {
                "role": "assistant",
                "content": content,
                "reasoning_content": turn.reasoning,
                "tool_calls": calls,
            }
        if not in_words:
            return served
        first = self._opening_messages
        return [*served[:first], *with_results_as_user(template_messages(served[first:]))]

    def _mark(self, turn_start: int | None = None, reasoning: str | None = None) -> None:
        length, count = self.transcript.prefix.length, len(self._added)
        self._marks.append(Mark(length, count, self.in_reasoning, turn_start, reasoning))
