"""The order in which calls of one turn begin and run does not depend on the schedule."""

from __future__ import annotations

from functools import partial
from typing import Any

import anyio
import pytest

from executors import executor_of
from rollout.errors import LimitExceeded
from rollout.limits import Clock, Deadline
from rollout.testing.schedule import run_virtual
from rollout.tools import Tool, ToolContext, ToolPolicy, ToolSession
from rollout.types import ToolCall
from rollout.worker_threads import WorkerThreads

Log = list[tuple[str, float]]


class Notes(Tool):
    """Writes down when each of its calls begins and ends."""

    def __init__(
        self, name: str, log: Log, serial: object | None = None, policy: ToolPolicy | None = None
    ) -> None:
        self.name = name
        self.schema = {"type": "function", "function": {"name": name}}
        self.log = log
        self.serial = serial
        if policy is not None:
            self.policy = policy

    async def open(self, context: ToolContext) -> ToolSession:
        return NotesSession(self)


class NotesSession(ToolSession):
    def __init__(self, tool: Notes) -> None:
        self.tool = tool
        self.serial = tool.serial

    async def execute(self, call: ToolCall) -> Any:
        self.tool.log.append((f"{call.id} begins", anyio.current_time()))
        if call.id == "breaks":
            raise ValueError("no")
        await anyio.sleep(float(call.arguments["s"]))
        self.tool.log.append((f"{call.id} ends", anyio.current_time()))
        return call.id


async def run(
    tools: list[Notes], calls: list[tuple[str, str, float]], turn_s: float = 100.0
) -> list[str]:
    threads = WorkerThreads(max_threads=1, max_abandoned=1)
    session = executor_of(tools, threads).open_session(uid="p", member=0)
    made = [ToolCall(name=name, arguments={"s": s}, id=id_) for name, id_, s in calls]
    try:
        limit = Clock(Deadline.after(turn_s, "limits.turn_s"))
        results = await session.run(made, limit=limit)
        return [result.text for result in results]
    finally:
        await session.close()
        threads.close()


BACKENDS = [("asyncio", 0), *(("trio", seed) for seed in range(3))]


def everywhere(backend: str, seed: int, main: Any) -> Any:
    if backend == "asyncio":
        return anyio.run(main)
    return run_virtual(main, seed=seed)


@pytest.mark.parametrize(("backend", "seed"), BACKENDS)
def test_calls_of_serial_sessions_run_one_after_another_as_written(backend: str, seed: int) -> None:
    log: Log = []
    shared = object()
    tools = [Notes("a", log, shared), Notes("b", log, shared, ToolPolicy(max_concurrency=2))]
    calls = [("b", "1", 0.003), ("a", "2", 0.001), ("a", "breaks", 0), ("b", "3", 0.002)]
    texts = everywhere(backend, seed, partial(run, tools, calls))
    assert texts == ["1", "2", "ValueError: no", "3"]
    assert [event for event, _ in log] == [
        *("1 begins", "1 ends", "2 begins", "2 ends"),
        *("breaks begins", "3 begins", "3 ends"),
    ]


@pytest.mark.parametrize(("backend", "seed"), BACKENDS)
def test_calls_of_one_turn_begin_in_their_order(backend: str, seed: int) -> None:
    log: Log = []
    tools = [Notes("a", log), Notes("b", log, object())]
    calls = [(name, f"{name}{n}", 0.02) for n in range(3) for name in "ab"]
    everywhere(backend, seed, partial(run, tools, calls))
    begun = [event.split()[0] for event, _ in log if event.endswith("begins")]
    assert [id_ for id_ in begun if id_[0] == "a"] == ["a0", "a1", "a2"]
    assert [id_ for id_ in begun if id_[0] == "b"] == ["b0", "b1", "b2"]


def test_serial_calls_have_their_own_time_each_and_run_beside_others() -> None:
    log: Log = []
    tools = [Notes("a", log, object()), Notes("b", log)]
    calls = [("a", "1", 60.0), ("a", "2", 9.0), ("b", "3", 9.0)]
    texts = run_virtual(partial(run, tools, calls))
    assert texts == ["timed out after 10 s (limits.tool_s)", "2", "3"]
    assert sorted(log) == [
        *(("1 begins", 0.0), ("2 begins", 10.0), ("2 ends", 19.0)),
        *(("3 begins", 0.0), ("3 ends", 9.0)),
    ]


def test_serial_calls_do_not_begin_after_the_turns_deadline() -> None:
    log: Log = []
    tools = [Notes("a", log, object()), Notes("b", log)]
    calls = [("a", "1", 9.0), ("a", "2", 9.0), ("b", "3", 1.0)]
    with pytest.raises(LimitExceeded, match=r"^limits\.turn_s = 5 s is over$"):
        run_virtual(partial(run, tools, calls, 5.0))
    assert "2 begins" not in dict(log)
