"""Records that a replay finds and follows: of twins, of odd calls, of several calls."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import anyio
import pytest

import rollout
from journal_material import config_of, prompts, run
from rollout import AgentLoop, ConfigError, Prompt, function_tool
from rollout.agents import AgentContext, register_agent
from rollout.config import AgentConfig
from rollout.runtime.replaying import Replayed, find_record, replay
from rollout.testing import Scenario, run_virtual
from rollout.types import ToolCall


def replayed(path: Path, uid: str) -> Replayed:
    record = find_record(path, uid, 0)

    async def act() -> Replayed:
        return await replay(record)

    return anyio.run(act, backend="trio")


def told(trajectory: Any) -> list[Any]:
    return [
        (segment.session_id, message.content)
        for segment in trajectory.segments
        for message in segment.messages
        if message.role == "tool"
    ]


def test_replay_gives_conversations_that_are_alike_each_its_own_answer(tmp_path: Path) -> None:
    numbers = count()

    @function_tool(stateful=False)
    async def ask() -> str:
        """Answer something new; the first is done last."""
        number = next(numbers)
        await anyio.sleep(0.5 if number else 2.0)
        return f"answer {number}"

    @register_agent("journal_twins")
    class _Twins(AgentLoop):
        async def run(self, context: AgentContext) -> None:
            await context.generate()
            start = [{"role": "user", "content": "same"}]
            twins = [await context.subagent(start) for _ in range(2)]

            async def work(twin: Any, wait_s: float) -> None:
                await anyio.sleep(wait_s)
                await twin.generate()
                await twin.call_tools([ToolCall(name="ask", arguments={})])
                await twin.generate()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(work, twins[0], 0.0)
                tasks.start_soon(work, twins[1], 0.3)

    scenario = Scenario(seed=1).reply("same", "hi there").reply("", "hi", filler=5)
    config = config_of(tmp_path / "j", scenario, agent=AgentConfig(name="journal_twins"))
    whole = run(config, prompts("x"), tools=[ask], reward=None)
    again = replayed(tmp_path / "j", "x")
    assert (again.departure, again.is_beyond) == ("", False)
    assert told(again.trajectory) == told(whole.trajectories[0])


def test_record_of_a_name_that_several_calls_have_is_refused_until_one_is_named(
    tmp_path: Path,
) -> None:
    path = tmp_path / "j"

    async def act() -> None:
        async with rollout.open_rollout(config_of(path)) as runtime:
            for text, validate in (("train", False), ("again", False), ("validation", True)):
                given = Prompt(messages=[{"role": "user", "content": text}], uid="a")
                await runtime.generate([given], samples=1, step=0, validate=validate)

    run_virtual(act)

    def text(**which: Any) -> Any:
        return find_record(path, "a", 0, **which).prompt.messages[0]["content"]

    with pytest.raises(ConfigError) as refused:
        text(step=0)
    assert str(refused.value) == (
        f"--trajectory a/0: is in {path} 2 times; add --step 0 --call 0 or --step 0 --call 1"
    )
    assert [text(call=0), text(call=1), text(validate=True)] == ["train", "again", "validation"]
