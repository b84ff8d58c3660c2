"""What a conversation is told by others than the model."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rollout.agents.conversation_view import ConversationView
from rollout.agents.openings import begun
from rollout.agents.places import check_ids
from rollout.agents.trajectory_state import SettlingLimits
from rollout.agents.wording import Worded, no_room
from rollout.chat.reasoning import opens_reasoning
from rollout.chat.result_order import message_ids, result_order
from rollout.chat.reward_values import finite_number
from rollout.chat.trajectory import MAIN
from rollout.errors import AgentError
from rollout.types import without_padding

if TYPE_CHECKING:
    from rollout.agents.conversation_log import ConversationLog
    from rollout.agents.identity import Identity
    from rollout.agents.trajectory_state import TrajectoryState
    from rollout.agents.turn import AssistantTurn
    from rollout.agents.wording import Given, Wording
    from rollout.engine.pool.generation import Generation


class ListeningConversation(ConversationView):
    """The part of a `Conversation` that takes what the model reads and did not write."""

    __slots__ = (
        "_cut_by",
        "_generation",
        "_is_closed",
        "_known_tokens",
        "_settles_lengths",
        "_state",
        "_unsettled",
        "_user_turns",
    )

    def __init__(
        self,
        state: TrajectoryState,
        log: ConversationLog,
        identity: Identity,
        wording: Wording,
    ) -> None:
        super().__init__(log, identity, wording, history=state.config.history)
        self._user_turns = 0
        self._cut_by: str | None = None
        self._state = state
        self._generation: Generation | None = None  # under way
        self._is_closed = False
        self._known_tokens = 0
        self._unsettled: tuple[Given | array[int], ...] = ()
        self._settles_lengths = self.purpose == MAIN

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the model has sampled in it, with those of a generation under way."""
        under_way = 0 if self._generation is None else self._generation.count
        return under_way + sum(row.transcript.generated_length for row in self.rows)

    @property
    def user_turns(self) -> int:
        """Answers of tools or users so far."""
        return self._user_turns

    @property
    def cut_by(self) -> str | None:
        """As `AssistantTurn.cut_by`, of the last generation."""
        return self._cut_by

    @property
    def room(self) -> int:
        """Tokens that may still be appended, those that are kept free apart."""
        return max(0, self._wording.room(self.transcript)[0])

    def keep_room(self, tokens: int) -> None:
        """Keep so many tokens free, from now on: turns and observations have that much less room.

        While any are kept, a length that the conversation runs into raises `LimitExceeded` and is
        its agent's to judge.

        Args:
            tokens: 0 keeps none.
        """
        self._wording = self._wording.keeping(tokens)
        self._settles_lengths = self.purpose == MAIN and not tokens

    async def compact(self, messages: Given) -> None:
        """Continue with these messages in place of all that was said: the next row begins so.

        It is a segment of purpose "compaction", which departs from the last row where their tokens
        do. What was said before stays in that row.

        Args:
            messages: At least one; as long as a prompt, or longer where the model has spoken in
                them.

        Raises:
            LimitExceeded: They are more than fits; nothing has changed.
            AgentError: They cannot be rendered, or it is generating or has not begun.
        """
        self._check_idle("compact")
        await self._settle()
        with self._settling_limits:
            worded = await begun("compact", self._wording, messages)
        self.end_turn()
        self._log.begin_again(worded, self._wording.reader, self._wording.prompt_room)
        self._known_tokens = 0

    def reward_turn(self, value: float) -> None:
        """Give the last turn a reward, at its last token; several add up.

        Raises:
            AgentError: It has no turn.
            BadRewardError: It is no finite number.
        """
        number = finite_number(value, "reward_turn")
        if not self._log.reward_turn(number):
            raise AgentError(f"reward_turn: {self.session_id} has no turn in its last row")

    async def answer(self, messages: Given, *, is_ordered: bool = False) -> None:
        """Append what tools or a user answer to the model's turn; it counts as a turn of theirs.

        Args:
            messages: As for `observe`.
            is_ordered: Results of tools stand in the order of their calls, and none is refused.

        Raises:
            LimitExceeded: It would leave no room for one more token; nothing is appended.
            TemplateError: As `observe`.
        """
        self._check_idle("answer")
        if self._unsettled:
            await self._settle()
        await self._observe(messages if is_ordered else self._ordered(without_padding(messages)))
        self._user_turns += 1

    def observe(self, messages: Given) -> None:
        """Append messages that the model reads and did not write.

        Give all that come before the next turn at once: where nothing was generated since the last
        ones, a turn without words stands between. A text of more than 16,000 characters is encoded
        beside the event loop: `settle` and whatever else of the conversation is awaited append it.

        Results of tools that name their calls are put into the order of the calls. Null keys are
        dropped as from a prompt's messages.

        Raises:
            LimitExceeded: They would leave no room for one more token; nothing is appended. Of a
                long text `settle` may find that out.
            TemplateError: They are malformed, or the template refuses them; or results name a call
                that the turn has not, one that has its result, or not all of the others. Nothing
                is appended.
        """
        self._check_idle("observe")
        messages = self._ordered(without_padding(messages))
        given: Worded | Given = messages
        if not self._unsettled:
            with self._settling_limits:
                given = self._wording.observation_now(
                    messages, self.transcript, self._log.last_turn
                )
        if isinstance(given, Worded):
            self.end_turn()
            self._log.observe(given)
        else:
            self._unsettled += (given,)

    def observe_ids(self, ids: Sequence[int]) -> None:
        """Append tokens that the model reads and did not sample, as they are.

        Nothing is added to them: the end of the model's turn and the opening of the next are yours.
        They are in no message, so that from then on the history is not rendered again, nor
        compared with a full rendering.

        Args:
            ids: In the engines' vocabulary; none at all changes nothing.

        Raises:
            LimitExceeded: They would leave no room for one more token; nothing is appended.
            AgentError: They are no such ids.
        """
        self._check_idle("observe_ids")
        packed = check_ids(ids, self._state.services.engines.info.vocab_size)
        if self._unsettled:
            self._unsettled += (packed,)
        else:
            self._observe_ids(packed)

    async def settle(self) -> None:
        """Append what `observe` has left to be encoded.

        Raises:
            LimitExceeded: It would leave no room for one more token, and is dropped.
        """
        self._check_idle("settle", is_begun=False)
        await self._settle()

    def end_turn(self) -> None:
        """An open turn that nobody continues is what there is of it."""
        if self._log.open_turn is not None:
            self._say()

    def close(self) -> None:
        """Take no more of it; what was said stays."""
        if self._generation is None:
            self.end_turn()
        self._is_closed = True

    def _ordered(self, messages: Given, *, is_checked: bool = True) -> Given:
        """The messages with results of tools in the order of the calls of the turn before them.

        Raises:
            TemplateError: As `result_order`.
        """
        if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
            return messages  # they are refused where they are converted
        given = messages if isinstance(messages, Sequence) else list(messages)
        ids = [message_ids(message) for message in given]
        if not any(each.answers for each in ids):
            return given
        calls = self._log.calls
        for waiting in self._unsettled:
            if not isinstance(waiting, array):
                calls = calls.after(map(message_ids, waiting))
        order = result_order(ids, calls, is_checked=is_checked)
        return given if order is None else [given[at] for at in order]

    @property
    def _settling_limits(self) -> SettlingLimits:
        return SettlingLimits(self._state, settles_lengths=self._settles_lengths)

    def _check_idle(self, what: str, *, is_begun: bool = True) -> None:
        if self._is_closed and is_begun:
            raise AgentError(f"{what}: {self.session_id} is closed: its block was left")
        if self._generation is not None:
            raise AgentError(f"{what}: {self.session_id} is generating; wait for its turn")
        if is_begun and not self.transcript:
            raise AgentError(f"{what}: {self.session_id} has not begun")

    async def _settle(self) -> None:
        while self._unsettled:
            first, *rest = self._unsettled
            self._unsettled = tuple(rest)
            if isinstance(first, array):
                self._observe_ids(first)
            else:
                await self._observe(first)

    async def _observe(self, messages: Given) -> None:
        self.end_turn()
        log, wording = self._log, self._wording
        try:
            log.observe(await wording.observation(messages, log.transcript, log.last_turn))
        except BaseException as error:
            self._settling_limits.settle(error)
            raise

    def _observe_ids(self, ids: array[int]) -> None:
        room, source = self._wording.room(self.transcript)
        with self._settling_limits:
            if len(ids) >= room:
                raise no_room(source, str(len(ids)))
        if ids:
            self.end_turn()
            text = self._state.services.template.decode(ids)
            self._log.observe_ids(ids, in_reasoning=opens_reasoning(text))

    def _say(self) -> AssistantTurn:
        return self._log.end_turn(self._wording.reader, self._cut_by)
