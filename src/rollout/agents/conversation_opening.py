"""How other conversations are opened from one: branches of it, and those of sub-agents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollout.agents.conversation_calling import CallingConversation
from rollout.agents.openings import begun, opened_log
from rollout.agents.places import check_ids, check_purpose
from rollout.chat.trajectory import BRANCH, SUBAGENT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Self

    from rollout.agents.conversation_log import ConversationLog
    from rollout.agents.identity import Identity
    from rollout.agents.trajectory_state import TrajectoryState
    from rollout.agents.wording import Given, Schemas, Wording
    from rollout.engine.core import SamplingParams


class OpeningConversation(CallingConversation):
    """The part of a `Conversation` that opens others, which take over its settings."""

    __slots__ = ("_asked_for", "_group_id", "_sampling")

    def __init__(
        self,
        state: TrajectoryState,
        log: ConversationLog,
        sampling: SamplingParams,
        identity: Identity,
        wording: Wording,
        *,
        group_id: str = "",
    ) -> None:
        super().__init__(state, log, identity, wording)
        self._sampling = sampling
        self._group_id = group_id
        self._turn = state.limit
        self._asked_for = 0

    @property
    def sampling(self) -> SamplingParams:
        """How the next generation is sampled; assign to change it.

        Its `max_new_tokens` is lowered to what the lengths leave, its `seed` set for each turn. A
        mapping gives fields as a prompt's `sampling` does: what it leaves out is what the prompt
        and the configuration say, and not what was assigned before.

        Raises:
            AgentError: What is assigned has a name that is no field, or a value that cannot be.
        """
        return self._sampling

    @sampling.setter
    def sampling(self, sampling: SamplingParams | Mapping[str, Any]) -> None:
        self._sampling = self._state.sampling_given("sampling", sampling)

    async def branch(
        self,
        position: int | None = None,
        *,
        purpose: str = BRANCH,
        messages: Given | None = None,
        is_ordered: bool = False,
    ) -> Self:
        """A conversation that continues this one otherwise, from its end or from an earlier place.

        Its transcript begins with this one's first tokens, which are context there: mask 0.

        Args:
            position: How many tokens; None: all there are. The end of a prompt, of a turn or of
                what answered it, or a place within a turn, which the branch then continues.
            purpose: Of its segment.
            messages: What the model is told there first, as by `answer`.
            is_ordered: As for `answer`.

        Raises:
            AgentError: There is no such place.
            LimitExceeded: The messages leave no room for one more token; nothing is opened.
            TemplateError: As `answer`; nothing is opened.
        """
        check_purpose(purpose)
        identity = self._next_identity()
        if self._generation is None:
            self._check_idle("branch")
            await self._settle()
        log = self._log.fork(len(self.transcript) if position is None else position, purpose)
        group_id = self._group_id or self._session_id
        opened = self._opened_with(log, identity, self._wording, group_id)
        if messages is not None:
            await opened.answer(messages, is_ordered=is_ordered)
        self._opened += (opened,)
        return opened

    async def subagent(
        self,
        messages: Given,
        *,
        purpose: str = SUBAGENT,
        tools: Schemas | None = None,
    ) -> Self:
        """A conversation of its own, which begins with these messages.

        Where the model has spoken in them, they may be longer than a prompt. A "branch" or a
        "compaction" departs from this one where their tokens do, all others from its end.

        Args:
            messages: At least one.
            purpose: Of its segment.
            tools: Schemas offered in place of the trajectory's tools; None: this one's.

        Raises:
            LimitExceeded: They are more than fits.
            AgentError: They cannot be rendered.
        """
        check_purpose(purpose)
        identity = self._next_identity()
        wording = self._wording if tools is None else self._state.wording_of(tools)
        worded = await begun("subagent", wording, messages)
        log = opened_log(self.rows[-1], wording, worded, purpose)
        return self._opened_beside(log, identity, wording)

    def subagent_ids(self, prompt_ids: Sequence[int], *, purpose: str = SUBAGENT) -> Self:
        """As `subagent`, with tokens in place of messages; `generate_ids` continues it.

        Raises:
            LimitExceeded: They are more than fits.
            AgentError: They are no ids.
        """
        check_purpose(purpose)
        vocab_size = self._state.services.engines.info.vocab_size
        worded = self._wording.raw_opening(check_ids(prompt_ids, vocab_size, "subagent_ids"))
        log = opened_log(self.rows[-1], self._wording, worded, purpose)
        return self._opened_beside(log, self._next_identity(), self._wording)

    def _next_identity(self) -> Identity:
        """Of the next conversation that is opened from here."""
        self._asked_for += 1
        return self._identity.opened(self._asked_for - 1)

    def _opened_beside(self, log: ConversationLog, identity: Identity, wording: Wording) -> Self:
        opened = self._opened_with(log, identity, wording, "")
        self._opened += (opened,)
        return opened

    def _opened_with(
        self, log: ConversationLog, identity: Identity, wording: Wording, group_id: str
    ) -> Self:
        opened = type(self)(self._state, log, self.sampling, identity, wording, group_id=group_id)
        opened.history, opened._turn = self.history, self._turn
        return opened
