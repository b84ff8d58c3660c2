"""How a conversation has the calls of the model's turns answered by tools."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rollout.agents.conversation_listening import ListeningConversation
from rollout.agents.turn import answer, read_calls
from rollout.tools.call_events import CallEvents

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from rollout.agents.conversation_log import ConversationLog
    from rollout.agents.identity import Identity
    from rollout.agents.trajectory_state import TrajectoryState
    from rollout.agents.wording import Given, Wording
    from rollout.tools import ToolResult
    from rollout.types import InvalidToolCall, ToolCall


class CallingConversation(ListeningConversation):
    """The part of a `Conversation` that calls tools."""

    __slots__ = ("_assistant_turns", "_errors_in_a_row")

    def __init__(
        self, state: TrajectoryState, log: ConversationLog, identity: Identity, wording: Wording
    ) -> None:
        super().__init__(state, log, identity, wording)
        self._assistant_turns = 0
        self._errors_in_a_row = 0

    @property
    def assistant_turns(self) -> int:
        """Generations so far."""
        return self._assistant_turns

    async def call_tools(
        self, calls: Sequence[ToolCall | InvalidToolCall | Mapping[str, Any]]
    ) -> list[ToolResult]:
        """Run the calls side by side and append what they answer; results in the order of calls.

        Args:
            calls: Of a turn; or dicts, ``{"name": …, "arguments": …}`` or as OpenAI writes them,
                with arguments that are a mapping or JSON of one.

        Raises:
            LimitExceeded: A deadline fired, or the answers leave no room for another token.
            SandboxError: The trajectory's sandbox could not be opened, or was lost.
            AgentError: A call is none; nothing has run.
        """
        calls = read_calls("call_tools", calls)
        results = await self.run_tools(calls)
        told: Given = [answer(call, r) for call, r in zip(calls, results, strict=True)]
        if len(told) > 1:
            told = self._ordered(told, is_checked=False)
        await self.answer(told, is_ordered=True)
        return results

    async def run_tools(
        self, calls: Sequence[ToolCall | InvalidToolCall | Mapping[str, Any]]
    ) -> list[ToolResult]:
        """Run the calls side by side; nothing is appended. Results in the order of calls.

        Args:
            calls: As for `call_tools`.

        Raises:
            LimitExceeded: A deadline fired.
            SandboxError: The trajectory's sandbox could not be opened, or was lost.
            AgentError: A call is none; nothing has run.
        """
        calls = read_calls("run_tools", calls)
        self._check_idle("run_tools")
        if self._unsettled:
            await self._settle()
        state = self._state
        try:
            state.count_calls(len(calls))
            results = await self._answers_to(calls)
            state.check_sandbox()
            rewards = [r.reward for r in results if r.reward is not None]
            if rewards:
                state.tool_rewards += rewards
            self._errors_in_a_row = state.count_errors(results, self._errors_in_a_row)
        except BaseException as error:
            self._settling_limits.settle(error)
            raise
        return results

    @contextmanager
    def answering(self) -> Iterator[None]:
        """The block answers the last turn, within the turn's deadline.

        While the trajectory is carried to another call the block runs on, and its time does not
        count.

        Raises:
            LimitExceeded: The deadline passed.
        """
        with self._turn.open(None, ""):
            yield

    async def _answers_to(self, calls: Sequence[ToolCall | InvalidToolCall]) -> list[ToolResult]:
        """What the tools answer, or have answered when the trajectory came here before."""
        state, log, offered = self._state, self._state.log, self._offered
        asked = None if log is None else log.asked(self._log.row.transcript.prefix, calls)
        if asked is not None and log is not None and log.has_answers:
            known = await log.recall_answers(asked, self._session_id)
            if known is not None:
                return state.tools.recall(calls, known, offered)
        tools, events, heard = state.tools, state.services.events, None
        before = tools.seconds
        if events.is_on:
            who = self._identity
            heard = CallEvents(events, who.number, self.assistant_turns - 1, who.path)
        results = await tools.run(calls, limit=self._turn, offered=offered, events=heard)
        if any(result.has_media for result in results):
            results = await self._seen(calls, results)
        if asked is not None and log is not None:
            took_s = tools.seconds - before
            stateful = tools.find_stateful(calls)
            session, turns = self._session_id, self.assistant_turns
            if log.note_answers(asked, session, turns, results, took_s, stateful):
                await log.room()
        return results

    async def _seen(
        self, calls: Sequence[ToolCall | InvalidToolCall], results: list[ToolResult]
    ) -> list[ToolResult]:
        """What tools answered with its images and videos read, within the turn's time."""
        own: list[ToolResult] = []
        count = len(self.transcript.media)
        with self.answering():
            for call, result in zip(calls, results, strict=True):
                name = getattr(call, "name", "tool")
                own.append(await self._state.services.media.seen(name, result, count))
                if own[-1].is_error and not result.is_error:
                    self._state.tools.note_refused_media(name)
                count += len(own[-1].images) + len(own[-1].videos)
        return own

    @property
    def _offered(self) -> set[str] | None:
        """Names of its tools, where they are not all of the trajectory's."""
        if self._wording.reader is self._state.wording.reader:
            return None
        return {str(schema["function"]["name"]) for schema in self._wording.reader.schemas}
