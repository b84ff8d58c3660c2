"""`ToolPolicy`: time limits, places, pace, retries, cache and breaker, all in virtual time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import anyio
import pytest
import trio.testing

import rollout
from executors import call, executor_of, run
from rollout.errors import LimitExceeded, ToolError
from rollout.testing import Scenario, tool_call
from rollout.tools import (
    Tool,
    ToolContext,
    ToolExecutor,
    ToolPolicy,
    ToolResult,
    ToolSession,
    TrajectoryTools,
    TransientError,
    function_tool,
)
from rollout.types import InvalidToolCall
from rollout.worker_threads import WorkerThreads

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> Any:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


@pytest.fixture
def executor(threads: WorkerThreads) -> Callable[..., ToolExecutor]:
    return lambda *tools, **settings: executor_of(tools, threads, **settings)


def opened(executor: ToolExecutor, **settings: Any) -> TrajectoryTools:
    return executor.open_session(uid="p", member=0, **settings)


def failed(text: str) -> ToolResult:
    return ToolResult(text, is_error=True)


class Script:
    """A tool function that does what its script says, call by call, and notes when."""

    def __init__(self, *steps: Any, **policy: Any) -> None:
        self.steps = list(steps)
        self.times: list[float] = []

        @function_tool("scripted", policy=ToolPolicy(**policy))
        async def scripted(text: str = "") -> Any:
            """Follow the script.

            Args:
                text: Ignored.
            """
            self.times.append(anyio.current_time())
            step = self.steps.pop(0) if self.steps else "done"
            if isinstance(step, int | float):
                await anyio.sleep(step)
                return "done"
            if isinstance(step, BaseException):
                raise step
            return step

        self.tool = scripted


DONE = ToolResult("done")


# Time limits


async def test_policy_timeout_replaces_the_general_one(executor: Any) -> None:
    short, long = Script(60, timeout_s=2), Script(15, timeout_s=20)
    started = anyio.current_time()
    assert await run(opened(executor(short.tool)), call("scripted")) == [
        failed("timed out after 2 s (timeout_s of 'scripted')")
    ]
    assert anyio.current_time() - started == 2
    assert await run(opened(executor(long.tool)), call("scripted")) == [DONE]
    assert anyio.current_time() - started == 17
    with pytest.raises(LimitExceeded, match=r"^limits\.turn_s = 3 s is over$"):
        await run(opened(executor(Script(60, timeout_s=20).tool)), call("scripted"), turn_s=3)


# Places and pace


async def test_policy_concurrency_is_shared_by_trajectories_and_waiting_is_free(
    executor: Any,
) -> None:
    script = Script(*[6] * 4, max_concurrency=2, timeout_s=7)
    built = executor(script.tool)
    results: list[ToolResult] = []

    async def trajectory() -> None:
        results.extend(await run(opened(built), call("scripted"), call("scripted")))

    started = anyio.current_time()
    async with anyio.create_task_group() as group:
        group.start_soon(trajectory)
        group.start_soon(trajectory)
    assert results == [DONE] * 4
    assert [at - started for at in script.times] == [0, 0, 6, 6]


async def test_policy_wait_for_a_place_meets_the_turns_deadline(executor: Any) -> None:
    script = Script(9, 1, max_concurrency=1)
    tools = opened(executor(script.tool))
    with pytest.raises(LimitExceeded, match=r"^limits\.turn_s = 4 s is over$"):
        await run(tools, call("scripted"), call("scripted"), turn_s=4)
    assert len(script.times) == 1
    assert await run(tools, call("scripted")) == [DONE]  # the place was given back


async def test_policy_pace_spaces_the_starts_of_calls(executor: Any) -> None:
    script = Script(rate_limit_per_s=2)
    tools = opened(executor(script.tool))
    started = anyio.current_time()
    assert await run(tools, *[call("scripted")] * 4) == [DONE] * 4
    assert [at - started for at in script.times] == [0, 0.5, 1, 1.5]
    await anyio.sleep(10)  # what was not used is not saved up
    assert await run(tools, *[call("scripted")] * 2) == [DONE] * 2
    assert script.times[5] - script.times[4] == 0.5


async def test_policy_pace_callers_that_are_cancelled_take_no_turn(executor: Any) -> None:
    script = Script(rate_limit_per_s=0.1)
    built = executor(script.tool, tool_s=None)
    started = anyio.current_time()
    await run(opened(built), call("scripted"))
    with anyio.move_on_after(5):
        await run(opened(built), *[call("scripted")] * 8)
    await run(opened(built), call("scripted"))
    assert [at - started for at in script.times] == [0, 10]


# Retries


async def test_policy_transient_failures_are_tried_again_with_backoff(executor: Any) -> None:
    script = Script(
        ConnectionError("refused"), TransientError("busy"), retries=3, transient=(ConnectionError,)
    )
    started = anyio.current_time()
    assert await run(opened(executor(script.tool)), call("scripted")) == [DONE]
    assert [at - started for at in script.times] == [0, 0.5, 1.5]


async def test_policy_retries_end_with_their_number_and_with_the_time(executor: Any) -> None:
    refused = [ConnectionError("refused")] * 9
    script = Script(*refused, retries=2, transient=(OSError,))
    assert await run(opened(executor(script.tool)), call("scripted")) == [
        failed("ConnectionError: refused (after 3 attempts)")
    ]
    script = Script(*refused, retries=9, transient=(OSError,), backoff_s=4, timeout_s=10)
    started = anyio.current_time()
    assert await run(opened(executor(script.tool)), call("scripted")) == [
        failed("ConnectionError: refused (after 2 attempts)")
    ]
    assert anyio.current_time() - started == 4  # the next pause would outlast the limit


# Cache


async def test_policy_cache_answers_equal_calls_of_any_trajectory(executor: Any) -> None:
    script = Script("first", "second", "third", "fourth", cache_size=2)
    built = executor(script.tool)

    async def ask(text: str) -> str:
        return (await run(opened(built), call("scripted", text=text)))[0].text

    assert [await ask(text) for text in "aabab"] == ["first", "first", "second", "first", "second"]
    assert [await ask(text) for text in "cab"] == ["third", "fourth", "done"]  # of two, the oldest


async def test_policy_cache_keeps_no_errors_and_knows_the_prompts_kwargs(executor: Any) -> None:
    script = Script(ValueError("x"), failed("bad"), "good", "other", cache_size=8)
    built = executor(script.tool)
    for expected in (failed("ValueError: x"), failed("bad"), ToolResult("good")):
        assert await run(opened(built), call("scripted")) == [expected]
    assert await run(opened(built), call("scripted")) == [ToolResult("good")]
    tools = opened(built, tools_kwargs={"scripted": {"text": "fixed"}})
    assert await run(tools, call("scripted")) == [ToolResult("other")]


# Breaker


async def test_breaker_refuses_calls_of_a_tool_that_keeps_failing(
    executor: Any, caplog: pytest.LogCaptureFixture
) -> None:
    down = ConnectionError("down")
    script = Script(down, 60, down, down, breaker_failures=3, breaker_s=30)
    built = executor(script.tool)
    for _ in range(3):
        await run(opened(built), call("scripted"))
    assert len(script.times) == 3
    refused = failed(
        "'scripted' is not available: its last 3 calls failed (the last one: ConnectionError: "
        "down); not called"
    )
    assert await run(opened(built), *[call("scripted")] * 2) == [refused] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "tool 'scripted': 3 calls in a row failed, the last with: ConnectionError: down; calls "
        "are refused for 30 s"
    ]
    assert caplog.records[0].levelno == logging.WARNING

    await anyio.sleep(30)  # a call is let through, fails, and others are refused for longer
    results = [(await run(opened(built), call("scripted")))[0] for _ in range(3)]
    assert [result.text for result in results] == [
        "ConnectionError: down",
        *[refused.text.replace("last 3", "last 4")] * 2,
    ]
    assert len(script.times) == 4
    await anyio.sleep(29)
    assert (await run(opened(built), call("scripted")))[0].is_error
    assert len(script.times) == 4
    await anyio.sleep(1)
    assert await run(opened(built), call("scripted")) == [DONE]
    assert await run(opened(built), *[call("scripted")] * 8) == [DONE] * 8


async def test_breaker_answers_and_wrong_arguments_are_no_failures(executor: Any) -> None:
    script = Script(
        ValueError("1"), failed("no result"), ValueError("2"), "fine", breaker_failures=2
    )
    built = executor(script.tool)
    for _ in range(4):
        await run(opened(built), call("scripted", text=3))
        await run(opened(built), call("scripted"))
    assert len(script.times) == 4


async def test_breaker_trial_that_is_cancelled_leaves_room_for_another(executor: Any) -> None:
    script = Script(ValueError("1"), 60, breaker_failures=1, breaker_s=5)
    built = executor(script.tool)
    await run(opened(built), call("scripted"))
    await anyio.sleep(5)
    with anyio.move_on_after(1):
        await run(opened(built), call("scripted"))
    assert await run(opened(built), call("scripted")) == [DONE]


# Wrong policies


def test_policy_every_value_out_of_bounds_is_named() -> None:
    with pytest.raises(ToolError) as caught:
        ToolPolicy(
            timeout_s=0,
            max_concurrency=0,
            transient=(int,),  # type: ignore[arg-type]
            cache_size=-1,
        )
    assert str(caught.value) == (
        "ToolPolicy: timeout_s = 0: expected a number > 0 or None; max_concurrency = 0: expected "
        "an integer ≥ 1 or None; transient = (<class 'int'>,): expected a tuple of exception "
        "types; cache_size = -1: expected an integer ≥ 0"
    )


# Opening and closing


@pytest.mark.parametrize("backend", ["trio", "asyncio"])
def test_session_with_a_task_group_from_open_to_close_is_opened_and_closed_in_one_task(
    backend: str,
) -> None:
    log: list[str] = []

    class Grouping(Tool):
        name = "grouping"
        schema = {  # noqa: RUF012
            "type": "function",
            "function": {"name": "grouping", "description": "x", "parameters": {"type": "object"}},
        }

        async def open(self, context: ToolContext) -> ToolSession:
            stack = AsyncExitStack()
            tasks = await stack.enter_async_context(anyio.create_task_group())
            tasks.start_soon(anyio.sleep_forever)
            return GroupingSession(stack, tasks)

    class GroupingSession(ToolSession):
        def __init__(self, stack: AsyncExitStack, tasks: Any) -> None:
            self._stack, self._tasks = stack, tasks

        async def execute(self, call: Any) -> ToolResult:
            return ToolResult("fine")

        async def close(self) -> None:
            self._tasks.cancel_scope.cancel()
            await self._stack.aclose()
            log.append("closed")

    async def main() -> rollout.RolloutBatch:
        scenario = Scenario(seed=1).timing(base_s=0.001)
        scenario = scenario.reply("", tool_call("grouping")).then("Done.")
        async with rollout.open_rollout(scenario.config(), [Grouping()]) as runtime:
            return await runtime.generate([rollout.Prompt("go")], samples=3)

    batch = anyio.run(main, backend=backend)
    assert [each.outcome for each in batch.trajectories] == [rollout.Outcome.COMPLETED] * 3
    assert log == ["closed"] * 3


# Invalid calls


async def test_run_invalid_calls_in_a_row_are_counted(executor: Any) -> None:
    tools = opened(executor(Script().tool, max_parallel_calls=2))
    invalid = InvalidToolCall(raw="{", reason="it is not JSON")
    await run(tools, invalid, call("nope"))
    assert tools.invalid_in_a_row == 2
    await run(tools, call("scripted", txt="x"), invalid, call("nope"))
    assert tools.invalid_in_a_row == 4  # the third call of the turn was not looked at
    await run(tools, call("nope"), call("scripted"))
    assert tools.invalid_in_a_row == 0
