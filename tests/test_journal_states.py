"""Stateful tools of resumed trajectories go on from the state that they had."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from rollout import AgentLoop, Outcome, Tool, ToolResult, ToolSession
from rollout.agents import AgentContext, register_agent
from rollout.config import AgentConfig
from rollout.scheduling.journal.entries import AnswersEntry, EndEntry
from rollout.testing import Scenario
from rollout.tools import ToolContext
from rollout.types import ToolCall
from test_journal import Ran, config_of, content, cut_before_last_answers, prompts, run

SCENARIO = (
    Scenario(seed=1).reply("slow", "hi", filler=200).reply("", "hi", filler=5).timing(base_s=0.01)
)
OPEN: list[ToolSession] = []


class Digits(ToolSession):
    """Its state is the digits that it was called with; the answer to a 2 is no plain data."""

    def __init__(self, unplain: Sequence[int]) -> None:
        self._digits, self._unplain = "", unplain

    async def execute(self, call: ToolCall) -> ToolResult:
        digit = call.arguments["a"]
        self._digits += str(digit)
        return ToolResult(self._digits, data=object() if digit in self._unplain else None)

    async def snapshot(self) -> Any:
        return self._digits

    async def restore(self, state: Any) -> None:
        assert self._digits == "", "it is called for a new session"
        self._digits = state

    async def calc_reward(self) -> float:
        return float(self._digits)

    async def close(self) -> None:
        OPEN.remove(self)


PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
SCHEMA = {"type": "function", "function": {"name": "digits", "parameters": PARAMETERS}}


class DigitsTool(Tool):
    name = "digits"
    schema = SCHEMA

    def __init__(self, *unplain: int, session: type[Digits] = Digits) -> None:
        self._unplain, self._session = unplain, session

    async def open(self, context: ToolContext) -> ToolSession:
        OPEN.append(self._session(self._unplain))
        return OPEN[-1]


@register_agent("journal_digits")
class _InOrder(AgentLoop):
    async def run(self, context: AgentContext) -> None:
        for digit in (1, 2, 3, 4):
            await context.generate()
            await context.call_tools([ToolCall(name="digits", arguments={"a": digit})])


def ran(path: Path, tool: Tool, agent: str, *, resume: bool = False) -> Ran:
    config = config_of(path, SCENARIO, agent=AgentConfig(name=agent))
    found = run(config, prompts("x"), tools=[tool], reward=None, resume=resume, samples=1)
    assert OPEN == []
    return found


def answers(found: Ran) -> list[Any]:
    [trajectory] = found.trajectories
    assert trajectory.outcome is Outcome.COMPLETED
    messages = [each for segment in trajectory.segments for each in segment.messages]
    return [each.content for each in messages if each.role == "tool"]


@pytest.mark.parametrize("before", [AnswersEntry, EndEntry])
def test_tool_called_again_between_recorded_answers_has_the_state_after_the_last(
    tmp_path: Path, before: type
) -> None:
    path = tmp_path / "journal"
    whole = ran(path, DigitsTool(2), "journal_digits")
    half = cut_before_last_answers(path, before)
    resumed = ran(half, DigitsTool(2), "journal_digits", resume=True)
    assert answers(resumed) == answers(whole) == ["1", "12", "123", "1234"]
    assert resumed.trajectories[0].tool_rewards == [1234.0]


@register_agent("journal_digits_beside")
class _SideBySide(AgentLoop):
    async def run(self, context: AgentContext) -> None:
        await context.generate()
        starts = [[{"role": "user", "content": text}] for text in ("slow", "quick")]
        one, other = [await context.subagent(start) for start in starts]

        async def work(conversation: Any, digit: int) -> None:
            await conversation.generate()
            await conversation.call_tools([ToolCall(name="digits", arguments={"a": digit})])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work, one, 2)
            tasks.start_soon(work, other, 1)
        await context.generate()
        await context.call_tools([ToolCall(name="digits", arguments={"a": 3})])


def test_state_of_a_tool_of_conversations_side_by_side_is_that_of_the_last_recorded_answer(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal"
    whole = ran(path, DigitsTool(), "journal_digits_beside")
    half = cut_before_last_answers(path, AnswersEntry)
    resumed = ran(half, DigitsTool(), "journal_digits_beside", resume=True)
    assert resumed.statistics.recalled == 6
    assert sorted(answers(resumed)) == sorted(answers(whole)) == ["1", "12", "123"]


class Unrestorable(Digits):
    async def restore(self, state: Any) -> None:
        raise ValueError("too old")


class Slow(Digits):
    async def restore(self, state: Any) -> None:
        await anyio.sleep_forever()


@pytest.mark.parametrize("session", [Unrestorable, Slow])
@pytest.mark.parametrize("before", [AnswersEntry, EndEntry])
def test_tool_that_cannot_be_restored_begins_its_trajectory_from_the_start(
    tmp_path: Path, session: type[Digits], before: type
) -> None:
    path = tmp_path / "journal"
    whole = ran(path, DigitsTool(session=session), "journal_digits")
    half = cut_before_last_answers(path, before)
    resumed = ran(half, DigitsTool(session=session), "journal_digits", resume=True)
    assert answers(resumed) == answers(whole) == ["1", "12", "123", "1234"]
    assert (resumed.statistics.continued, resumed.statistics.restarted) == (0, 1)
    again = ran(half, DigitsTool(session=session), "journal_digits", resume=True)
    assert content(again.trajectories[0]) == content(resumed.trajectories[0])


class InLine(Digits):
    """Whose calls of one turn are made one after the other; a 2 takes long."""

    def __init__(self, unplain: Sequence[int]) -> None:
        super().__init__(unplain)
        self.serial = self

    async def execute(self, call: ToolCall) -> ToolResult:
        if call.arguments["a"] == 2:
            await anyio.sleep(5)
        return await super().execute(call)


class OpensOnce(DigitsTool):
    is_opened = False

    async def open(self, context: ToolContext) -> ToolSession:
        if self.is_opened:
            raise OSError("no more machines")
        self.is_opened = True
        return await super().open(context)


@register_agent("journal_digits_in_line")
class _InLine(AgentLoop):
    async def run(self, context: AgentContext) -> None:
        await context.generate()
        start = [{"role": "user", "content": "quick"}]
        one, other = [await context.subagent(start) for _ in range(2)]

        async def work(conversation: Any, *digits: int) -> None:
            await conversation.call_tools(
                [ToolCall(name="digits", arguments={"a": digit}) for digit in digits]
            )

        async def work_after_turn() -> None:
            await one.generate()
            await work(one, 2, 3)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work_after_turn)
            await anyio.sleep(0.005)  # before the turn is over; when it is resumed, after it
            await work(other, 1)
            await work(other, 4)


def test_calls_end_in_their_session_where_another_conversation_replaces_it(tmp_path: Path) -> None:
    path, agent = tmp_path / "journal", "journal_digits_in_line"
    whole = ran(path, OpensOnce(2, 4, session=InLine), agent)
    assert answers(whole) == ["142", "1423", "1", "14"]
    half = cut_before_last_answers(path, EndEntry)
    resumed = ran(half, OpensOnce(2, 4, session=InLine), agent, resume=True)
    assert answers(resumed)[:3] == ["2", "23", "1"]
    assert "no more machines" in answers(resumed)[3]
