"""`isolation="process"`: a tool that cannot be stopped from within is killed from without."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest

import isolated_tools
from executors import call, executor_of, run
from rollout.errors import ToolError
from rollout.tools import ToolContext, ToolResult, TrajectoryTools, function_tool
from rollout.worker_threads import WorkerThreads
from slow_cases import slow_after

pytestmark = [pytest.mark.anyio, pytest.mark.process]
INC = {"type": "function", "function": {"name": "inc", "parameters": {}}}


@pytest.fixture(params=slow_after(1, ["trio", "asyncio"]))
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def opened(threads: WorkerThreads) -> AsyncIterator[Callable[..., TrajectoryTools]]:
    executors = []

    def build(*tools: Any, tool_s: float = 60.0) -> TrajectoryTools:
        executor = executor_of(tools, threads, tool_s=tool_s, max_processes=2)
        executors.append(executor)
        return executor.open_session(uid="p", member=0)

    yield build
    for executor in executors:
        await executor.close()
    assert not [
        process
        for process in psutil.Process().children(recursive=True)
        if "rollout.tools.function_tools" in process.as_dict(["cmdline"], ad_value=[])["cmdline"]
    ]


async def ended(pid: int) -> bool:
    with anyio.move_on_after(30):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            await anyio.sleep(0.01)
        return True
    return False


async def test_isolated_tool_runs_elsewhere_and_its_process_is_used_again(opened: Any) -> None:
    tools = opened(
        isolated_tools.whoami,
        isolated_tools.asynchronous,
        isolated_tools.flaky,
        isolated_tools.die,
        isolated_tools.rest,
        function_tool("inc", schema=INC, isolation="process")(isolated_tools.plain),
    )
    (first,) = await run(tools, call("whoami", text="é"))
    (second,) = await run(tools, call("whoami"))
    assert first.data["text"] == "é"
    assert first.data["pid"] == second.data["pid"] != psutil.Process().pid
    results = await run(
        tools, call("asynchronous"), call("flaky", kind="x"), call("flaky", kind="transient")
    )
    assert results == [
        ToolResult("async", reward=0.5),
        ToolResult("ValueError: no such row", is_error=True),
        ToolResult("try later (after 2 attempts)", is_error=True),
    ]
    assert await run(tools, call("whoami", text=3), call("die")) == [
        ToolResult(
            "invalid arguments for 'whoami': text: 3 is not of type \"string\"",
            is_error=True,
        ),
        ToolResult("the process of 'die' ended with exit code 7", is_error=True),
    ]
    assert (await run(tools, call("whoami")))[0].data["text"] == "me"
    assert (await run(tools, call("rest", a=1, b=[2])))[0].data == {"a": 1, "b": [2]}
    assert await run(tools, call("inc", x=1)) == [ToolResult("2")]  # it has no decorator there


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_isolated_tool_that_holds_the_interpreter_is_killed_with_its_group(
    opened: Any, tmp_path: Path
) -> None:
    marker = tmp_path / "pids"
    tools = opened(isolated_tools.hold_the_interpreter)
    async with anyio.create_task_group() as group:
        group.start_soon(run, tools, call("hold_the_interpreter", marker=str(marker)))
        with anyio.fail_after(60):
            while not (marker.exists() and marker.read_text()):
                await anyio.sleep(0.01)
        group.cancel_scope.cancel()
    for pid in marker.read_text().split():
        assert await ended(int(pid))


DRIVER = """
import anyio, isolated_tools
from rollout.child_processes import ChildProcesses
from rollout.tools import ToolContext
from rollout.types import ToolCall

async def main():
    processes = ChildProcesses("rollout.tools.function_tools", max_processes=1, cleanup_s=5.0)
    context = ToolContext(uid="p", member=0, threads=None, processes=processes)
    session = await isolated_tools.hold_the_interpreter.open(context)
    await session.execute(ToolCall(name="", arguments={"marker": %r}))

anyio.run(main, backend="trio")
"""


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_isolated_tool_does_not_outlive_a_driver_that_was_killed(tmp_path: Path) -> None:
    marker = tmp_path / "pids"
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    command = [sys.executable, "-c", DRIVER % str(marker)]
    async with await anyio.open_process(command, env={**os.environ, "PYTHONPATH": paths}) as driver:
        with anyio.fail_after(60):
            while not (marker.exists() and marker.read_text()):
                await anyio.sleep(0.01)
        driver.kill()
    for pid in marker.read_text().split():
        assert await ended(int(pid))


@pytest.mark.slow
async def test_isolated_tool_past_its_limit_is_killed(opened: Any, tmp_path: Path) -> None:
    tools = opened(isolated_tools.hold_the_interpreter, tool_s=0.5)
    assert await run(tools, call("hold_the_interpreter", marker=str(tmp_path / "pids"))) == [
        ToolResult("timed out after 0.5 s (limits.tool_s)", is_error=True)
    ]


async def test_isolated_function_whose_name_leads_elsewhere_is_refused_before_its_first_call(
    threads: WorkerThreads,
) -> None:
    tool = function_tool("inc", schema=INC, isolation="process")(isolated_tools.plain_and_loud)
    executor = executor_of([isolated_tools.whoami, tool], threads)
    with pytest.raises(ToolError) as caught:
        await executor.prepare()
    assert str(caught.value).startswith(
        "function tool 'inc': isolation = 'process' needs a function that its process finds by its "
        "name: isolated_tools.plain leads to plain (isolated_tools, line "
    )


def nested_is_refused() -> None:
    @function_tool(isolation="process")
    def inner() -> None:
        """Do it."""


def wants_context(context: ToolContext) -> None:
    """Do it."""


@pytest.mark.parametrize(
    ("define", "message"),
    [
        (
            nested_is_refused,
            "function tool 'inner': isolation = 'process' needs a function that its process can "
            "import: move nested_is_refused.<locals>.inner to the top level of a module",
        ),
        (
            lambda: function_tool(isolation="process")(wants_context),
            "function tool 'wants_context': isolation = 'process' cannot hand over the "
            "ToolContext: remove the parameter 'context'",
        ),
    ],
)
def test_isolated_function_that_cannot_be_is_refused(
    define: Callable[[], Any], message: str
) -> None:
    with pytest.raises(ToolError) as caught:
        define()
    assert str(caught.value) == message
