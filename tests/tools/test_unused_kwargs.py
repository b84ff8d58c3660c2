"""`tools_kwargs` that nothing here takes: ignored, with one warning for a runtime."""

from __future__ import annotations

from typing import Any

import pytest

import rollout
from executors import call, executor_of, run
from rollout import Outcome, Prompt, function_tool
from rollout.config import SchedulingConfig
from rollout.testing import Scenario
from rollout.testing import tool_call as said_call
from rollout.tools import ToolContext, ToolExecutor, ToolResult
from rollout.types import ToolCall
from rollout.worker_threads import WorkerThreads

pytestmark = pytest.mark.anyio
VERL = {
    "create_kwargs": {"ground_truth": "4"},
    "execute_kwargs": {},
    "calc_reward_kwargs": {},
    "release_kwargs": {},
}


@function_tool
async def add(a: int, b: int = 1) -> int:
    """Add.

    Args:
        a: A number.
        b: Another.
    """
    return a + b


@function_tool
async def peek(context: ToolContext) -> str:
    """Tell what it was made with."""
    return str(dict(context.create_kwargs))


@function_tool
async def made(create_kwargs: dict[str, str]) -> str:
    """Tell what it was given.

    Args:
        create_kwargs: It is given this.
    """
    return str(create_kwargs)


async def answers(executor: ToolExecutor, *calls: ToolCall, **options: Any) -> list[ToolResult]:
    session = executor.open_session(uid="p", member=0, **options)
    try:
        return await run(session, *calls)
    finally:
        await session.close()


async def test_create_kwargs_that_a_tool_takes_reach_it_without_a_warning(
    threads: WorkerThreads, caplog: pytest.LogCaptureFixture
) -> None:
    built = executor_of([peek, made], threads)
    kwargs = {name: {"create_kwargs": {"k": "v"}} for name in built.names}
    peeked, given = await answers(built, call("peek"), call("made"), tools_kwargs=kwargs)
    assert (peeked.text, given.text) == ("{'k': 'v'}", "{'k': 'v'}")
    assert caplog.messages == []


async def test_kwargs_with_another_name_are_still_an_error(threads: WorkerThreads) -> None:
    built = executor_of([add], threads)
    (answer,) = await answers(built, call("add", a=1), tools_kwargs={"add": {"bb": 1, **VERL}})
    assert answer.text == (
        "could not open 'add': tools_kwargs of 'add' name no parameter of it: bb; expected some "
        "of: a, b"
    )


async def test_rows_with_kwargs_of_tools_that_are_not_there_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scenario = Scenario(seed=1).reply("sum", said_call("add", a=2, b=2)).then("4")
    config = scenario.config(scheduling=SchedulingConfig(samples_per_prompt=2))
    asked = [{"role": "user", "content": "sum"}]
    kwargs = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "4"}}, "add": VERL}
    prompts = [Prompt(messages=asked, tools_kwargs=kwargs) for _ in range(5)]
    async with rollout.open_rollout(config, [add]) as runtime:
        batch = await runtime.generate(prompts)
    assert {sample.outcome for sample in batch.samples} == {Outcome.COMPLETED}
    assert all(sample.metrics["tool_errors"] == 0 for sample in batch.samples)
    (warning,) = caplog.messages
    assert warning.startswith("tools_kwargs['calc_gsm8k_reward'] are ignored: it is no tool here")
