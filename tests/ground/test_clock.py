"""The limits of a trajectory: a tree, each with its source, that can stand still."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import anyio
import pytest

import rollout
from rollout import (
    AgentContext,
    AgentLoop,
    Outcome,
    Prompt,
    ToolCall,
    function_tool,
    register_agent,
)
from rollout.config import LimitsConfig
from rollout.containment import open_containment
from rollout.errors import LimitExceeded, ToolError
from rollout.limits import NEVER, Clock, Deadline, Limit, paused_call
from rollout.testing import Scenario
from rollout.tools import ToolPolicy
from rollout.tools.calls import attempt

pytestmark = pytest.mark.anyio


async def end_of(limit: Limit, body: Callable[[], Awaitable[object]] = anyio.sleep_forever) -> str:
    """Which limit ended a block, and when."""
    try:
        with limit:
            await body()
    except LimitExceeded as error:
        return f"{error.source} {anyio.current_time():g}"
    return f"no limit {anyio.current_time():g}"


@pytest.fixture
async def clock() -> Clock:
    """Twenty seconds for a trajectory."""
    return Clock(Deadline.after(20, "trajectory"))


@pytest.mark.parametrize(
    ("turn_s", "generation_s", "expected"),
    [
        (10, 5, "generation 5"),
        (4, 5, "turn 4"),
        (5, 5, "turn 5"),
        (20, None, "trajectory 20"),
    ],
)
async def test_nested_limits_the_first_one_is_named_of_equal_ones_the_outer(
    clock: Clock, turn_s: float | None, generation_s: float | None, expected: str
) -> None:
    limit = clock.open(turn_s, "turn").open(generation_s, "generation")
    assert await end_of(limit) == expected


async def test_pause_all_that_is_within_stands_still_what_is_around_goes_on(clock: Clock) -> None:
    turn, ended = clock.open(10, "turn"), {}
    calls = {"one": turn.open(3, "one"), "two": turn.open(5, "two"), "none": turn.open(None, "")}

    async def run(name: str) -> None:
        ended[name] = await end_of(calls[name])

    async with anyio.create_task_group() as tasks:
        for name in calls:
            tasks.start_soon(run, name)
        await anyio.sleep(1)
        calls["two"].pause()
        await anyio.sleep(1)
        turn.pause()
        await anyio.sleep(7)
        assert clock.deadline.at == 20
        turn.resume()
        calls["two"].resume()
    assert ended == {"one": "one 10", "two": "two 13", "none": "turn 17"}


async def test_pauses_of_two_that_overlap_count_once(clock: Clock) -> None:
    limit = clock.open(5, "turn")
    clock.pause()
    await anyio.sleep(3)
    clock.pause()
    await anyio.sleep(2)
    clock.resume()
    assert limit.deadline == NEVER
    await anyio.sleep(1)
    clock.resume()
    assert (limit.deadline.at, clock.deadline.at) == (5 + 6, 20 + 6)


async def test_limit_opened_while_paused_has_all_of_its_time_afterwards(clock: Clock) -> None:
    clock.pause()
    await anyio.sleep(2)
    limit = clock.open(5, "turn")
    await anyio.sleep(2)
    clock.resume()
    assert await end_of(limit) == "turn 9"


async def test_limit_that_fires_as_it_is_paused_has_fired(clock: Clock) -> None:
    ended: list[str] = []

    async def wait(limit: Limit) -> None:
        ended.append(await end_of(limit))

    async def pause(limit: Limit) -> None:
        await anyio.sleep_until(1)
        limit.pause()

    async with anyio.create_task_group() as tasks:
        for _ in range(16):  # which of the two is first differs
            limit = clock.open(1, "generation")
            tasks.start_soon(wait, limit)
            tasks.start_soon(pause, limit)
    assert ended == ["generation 1"] * 16


async def test_carried_the_trajectory_gets_its_deadline_and_turns_go_on_from_where_they_stood(
    clock: Clock,
) -> None:
    limit = clock.open(5, "turn")
    await anyio.sleep(2)
    clock.carry()
    assert clock.deadline.at == limit.deadline.at == NEVER.at
    await anyio.sleep(1000)
    clock.continue_carried(Deadline.after(50, "trajectory"))
    assert (limit.deadline.at, clock.deadline.at) == (1005, 1052)
    assert clock.carried_s(anyio.current_time()) == 1000


async def test_call_without_a_limit_that_closing_ends_blames_none() -> None:
    failures: list[Exception] = []

    async def call() -> None:
        try:
            await attempt(anyio.sleep_forever, limit=Clock(), what="tool")
        except Exception as error:
            failures.append(error)

    async with anyio.create_task_group() as tasks:
        async with open_containment(1.0):
            tasks.start_soon(call)
            await anyio.sleep(1)
    assert [(type(each), str(each)) for each in failures] == [
        (ToolError, "tool was cancelled: the runtime is closing")
    ]


async def test_waiting_for_a_sandbox_is_not_the_calls_time_but_the_turns(clock: Clock) -> None:
    async def queue(seconds: float) -> str:
        with paused_call():
            await anyio.sleep(seconds)
        await anyio.sleep(1)
        return "done"

    turn = clock.open(10, "turn")
    assert await attempt(partial(queue, 7.0), limit=turn.open(2, "tool"), what="tool") == "done"
    with pytest.raises(LimitExceeded, match="turn = 10 s"):
        await attempt(partial(queue, 7.0), limit=turn.open(2, "tool"), what="tool")


# --- through the runtime, in virtual time, and on asyncio at a thousandth


def tools(unit: float) -> list[rollout.tools.Tool]:
    """Two that never end by themselves, with limits of two and four units."""

    def make(name: str, units: float) -> rollout.tools.Tool:
        async def wait() -> str:
            """Wait for ever."""
            await anyio.sleep_forever()
            return "done"

        return function_tool(wait, name=name, policy=ToolPolicy(timeout_s=units * unit))

    return [make("two", 2), make("four", 4)]


class Parallel(AgentLoop):
    """Calls two tools while a segment generates; notes what ended each of them, and when."""

    async def run(self, context: AgentContext) -> None:
        await context.generate()
        unit = float(context.prompt.extra["unit"])
        began, ended = anyio.current_time(), context.extra.setdefault("ended", {})

        def note(name: str, text: str) -> None:
            ended[name] = text, round((anyio.current_time() - began) / unit, 3)

        async def call(name: str) -> None:
            (result,) = await context.run_tools([ToolCall(name=name, arguments={})])
            note(name, result.text)

        async def generate() -> None:
            async with context.open_segment([{"role": "user", "content": "talk"}]) as child:
                try:
                    await child.generate()
                except LimitExceeded as error:
                    note("talk", error.source)

        async with anyio.create_task_group() as tasks:
            for name in ("two", "four"):
                tasks.start_soon(call, name)
            tasks.start_soon(generate)


def scenario(unit: float) -> rollout.RolloutConfig:
    replies = Scenario(seed=1).reply("go", "ok").reply("talk", filler=100_000)
    units = {"generation_s": 6, "turn_s": 20, "trajectory_s": 100, "batch_s": 1000, "tool_s": 10}
    limits = LimitsConfig(**{name: count * unit for name, count in units.items()})
    timed = replies.timing(base_s=unit / 100, slope_s=0.0, prefill_tokens_per_s=None)
    lengths = rollout.LengthsConfig(prompt=2048, response=200_000)
    return timed.config(limits=limits, lengths=lengths)


async def run_parallel(unit: float, pause_s: float) -> rollout.Trajectory:
    register_agent("parallel_limits")(Parallel)
    prompt = Prompt(messages="go", agent_name="parallel_limits", extra={"unit": unit})
    async with rollout.open_rollout(scenario(unit), tools(unit)) as runtime:

        async def sleep_engines() -> None:
            await anyio.sleep(1.5 * unit)
            await runtime.sleep()
            await anyio.sleep(pause_s)
            await runtime.wake_up()

        async with anyio.create_task_group() as tasks:
            if pause_s:
                tasks.start_soon(sleep_engines)
            (trajectory,) = (await runtime.generate([prompt])).trajectories
    return trajectory


@pytest.mark.parametrize("pause_s", [0.0, 50.0])
async def test_parallel_calls_and_segments_each_ends_by_its_own_limit_a_pause_stops_all(
    pause_s: float,
) -> None:
    trajectory = await run_parallel(1.0, pause_s)
    ended = trajectory.extra["ended"]
    assert {name: text for name, (text, _) in ended.items()} == {
        "two": "timed out after 2 s (timeout_s of 'two')",
        "four": "timed out after 4 s (timeout_s of 'four')",
        "talk": "limits.generation_s",
    }
    seconds = {name: at - pause_s for name, (_, at) in ended.items()}
    assert seconds == pytest.approx({"two": 2, "four": 4, "talk": 6}, abs=0.1)
    assert (trajectory.outcome, trajectory.limit_source) == (
        Outcome.DEADLINE,
        "limits.generation_s",
    )


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_parallel_calls_and_segments_on_asyncio_each_ends_by_its_own_limit() -> None:
    trajectory = await run_parallel(0.05, 0.0)
    ended = {name: text for name, (text, _) in trajectory.extra["ended"].items()}
    assert ended == {
        "two": "timed out after 0.1 s (timeout_s of 'two')",
        "four": "timed out after 0.2 s (timeout_s of 'four')",
        "talk": "limits.generation_s",
    }
    assert trajectory.limit_source == "limits.generation_s"
