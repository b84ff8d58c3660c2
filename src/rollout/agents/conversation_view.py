"""What there is of a conversation: its tokens, its rows, its messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterator, Sequence
    from typing import Self

    from rollout.agents.conversation_log import ConversationLog
    from rollout.agents.identity import Identity
    from rollout.agents.kept_messages import KeptMessages
    from rollout.agents.places import Row
    from rollout.agents.wording import Wording
    from rollout.chat.drift import Drift
    from rollout.chat.transcript import Transcript
    from rollout.limits import Limit


class ConversationView:
    """The part of a `Conversation` that changes nothing.

    Attributes:
        history: As `agent.history`; assign before the first generation to change it.
    """

    __slots__ = (
        "_identity",
        "_log",
        "_opened",
        "_session_id",
        "_turn",
        "_wording",
        "history",
    )

    def __init__(
        self, log: ConversationLog, identity: Identity, wording: Wording, *, history: str
    ) -> None:
        self.history = history
        self._log = log
        self._identity = identity
        self._session_id = identity.session_id
        self._wording = wording
        self._opened: tuple[Self, ...] = ()
        self._turn: Limit

    @property
    def transcript(self) -> Transcript:
        """The exact tokens so far; those of the last row, where the history is rendered again."""
        return self._log.transcript

    @property
    def rows(self) -> Sequence[Row]:
        """Its rows in order; one, unless its history was rendered again."""
        return self._log.rows

    @property
    def messages(self) -> KeptMessages:
        """The conversation so far, decoded as it is read."""
        return self._log.message_log.messages

    @property
    def purpose(self) -> str:
        """Of its segment: "main", "branch", "subagent", or what its agent calls it."""
        return self._log.rows[0].purpose

    @property
    def session_id(self) -> str:
        """Names it to the router and the engines."""
        return self._session_id

    @property
    def opened(self) -> tuple[Self, ...]:
        """The conversations opened from it, in their order."""
        return self._opened

    @property
    def wording(self) -> Wording:
        """Renders, encodes and reads what is said in it."""
        return self._wording

    @property
    def in_reasoning(self) -> bool:
        """Whether its last turn began, or the next one begins, inside reasoning."""
        return self._log.in_reasoning

    @property
    def open_turn(self) -> array[int] | None:
        """The ids of a turn that the next generation continues; None where it begins one."""
        return self._log.open_turn

    def all(self) -> Iterator[Self]:
        """It and those opened from it, each before its own, in the order of their opening."""
        yield self
        for each in self._opened:
            yield from each.all()

    async def check_tokens(self) -> Drift | None:
        """How the transcript differs from its conversation rendered again.

        None if nothing was said, and where that tells nothing: the history is rendered again in any
        case, or ids were observed.

        Raises:
            TemplateError: The template refuses the conversation.
        """
        said = self._log.message_log.said
        if not said or self.history != "append_only" or self._log.has_raw_ids:
            return None
        return await self._wording.drift(self.transcript, self.messages, said)
