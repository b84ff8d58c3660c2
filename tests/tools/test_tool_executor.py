"""`ToolExecutor`: every call is answered, in order, in time, and no tool reaches its siblings."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import trio
import trio.testing

from executors import call, executor_of, run
from rollout.containment import open_containment
from rollout.errors import LimitExceeded, ToolError
from rollout.limits import Clock, Deadline
from rollout.tools import (
    Tool,
    ToolContext,
    ToolExecutor,
    ToolResult,
    ToolSession,
    TrajectoryTools,
    function_tool,
)
from rollout.types import InvalidToolCall, Outcome, ToolCall
from rollout.worker_threads import WorkerThreads


@pytest.fixture
def anyio_backend() -> Any:
    return "trio", {"clock": trio.testing.MockClock(autojump_threshold=0)}


real_clock = pytest.mark.parametrize("anyio_backend", ["trio", "asyncio"])


Open = Callable[..., ToolExecutor]


@pytest.fixture
def executor(threads: WorkerThreads) -> Open:
    return lambda *tools, **settings: executor_of(tools, threads, **settings)


def opened(executor: ToolExecutor, **settings: Any) -> TrajectoryTools:
    return executor.open_session(uid="p", member=1, **settings)


def turn(seconds: float | None = 100.0) -> Clock:
    return Clock(Deadline.after(seconds, "limits.turn_s"))


def failed(text: str) -> ToolResult:
    return ToolResult(text, is_error=True)


class Recorder(Tool):
    """A tool with sessions, which writes down what happens to it and does as it is told."""

    def __init__(self, name: str, log: list[str], **actions: Any) -> None:
        self.name = name
        self.schema = {"type": "function", "function": {"name": name}}
        self.log = log
        self.actions = actions
        self.contexts: list[ToolContext] = []

    async def act(self, event: str, default: Any = None) -> Any:
        self.log.append(f"{self.name}.{event}")
        action = self.actions.get(event)
        return default if action is None else await action()

    async def open(self, context: ToolContext) -> ToolSession:
        self.contexts.append(context)
        session: ToolSession = await self.act("open", RecorderSession(self))
        return session


class RecorderSession(ToolSession):
    def __init__(self, tool: Recorder) -> None:
        self.tool = tool

    async def execute(self, call: ToolCall) -> Any:
        return await self.tool.act("execute", f"{self.tool.name} done")

    async def calc_reward(self) -> float | None:
        reward: float | None = await self.tool.act("reward")
        return reward

    async def close(self) -> None:
        await self.tool.act("close")


def raising(error: BaseException) -> Callable[[], Any]:
    async def action() -> Any:
        raise error

    return action


def returning(value: Any, after_s: float = 0.0) -> Callable[[], Any]:
    async def action() -> Any:
        await anyio.sleep(after_s)
        return value

    return action


@function_tool
async def wait(seconds: float, text: str = "done") -> str:
    """Wait.

    Args:
        seconds: How long.
        text: What to say then.
    """
    await anyio.sleep(seconds)
    return text


@function_tool
async def forever() -> None:
    """Never return."""
    await anyio.sleep_forever()


# Construction and schemas


def test_executor_unusable_tool_is_refused(executor: Open) -> None:
    tool = Recorder("a", [])
    tool.schema = {"function": {"name": "b"}}
    with pytest.raises(ToolError, match=r"Recorder.name = 'a': its schema is of \{'function'"):
        executor(tool)


def test_executor_unknown_names_are_refused_with_the_known_ones(executor: Open) -> None:
    built = executor(wait, forever)
    with pytest.raises(ToolError, match=r"^unknown tools: 'x', 'y'; known: 'wait', 'forever'$"):
        opened(built, names=["x", "wait", "y"])
    with pytest.raises(ToolError, match=r"^tools_kwargs\['wait'\] = 3; expected a mapping$"):
        opened(built, tools_kwargs={"wait": 3})


# Answers


@pytest.mark.anyio
async def test_run_results_stand_in_the_order_of_the_calls(executor: Open) -> None:
    tools = opened(executor(wait))
    started = anyio.current_time()
    results = await run(tools, call("wait", seconds=3, text="a"), call("wait", seconds=1, text="b"))
    assert anyio.current_time() - started == 3
    assert results == [ToolResult("a"), ToolResult("b")]
    assert (tools.calls, tools.errors, tools.seconds) == (2, 0, 4)
    assert await tools.run([], limit=turn()) == []


@pytest.mark.anyio
async def test_run_faulty_calls_are_answered_and_siblings_do_not_notice(executor: Open) -> None:
    log: list[str] = []
    tools = opened(executor(wait, Recorder("bad", log, execute=raising(ValueError("no such row")))))
    results = await run(
        tools,
        call("wait", seconds=2),
        call("bad"),
        call("nope"),
        InvalidToolCall(raw="<tool_call>{", reason="it is not JSON"),
        call("wait", seconds="2"),
        call("wait", text="x"),
    )
    assert results == [
        ToolResult("done"),
        failed("ValueError: no such row"),
        failed("unknown tool 'nope'; known tools: 'wait', 'bad'"),
        failed("invalid tool call: it is not JSON"),
        failed('invalid arguments for \'wait\': seconds: "2" is not of type "number"'),
        failed("invalid arguments for 'wait': missing 'seconds'"),
    ]
    assert (tools.calls, tools.errors) == (6, 5)


@pytest.mark.anyio
async def test_run_tool_not_offered_to_the_prompt_is_unknown(executor: Open) -> None:
    tools = opened(executor(wait, forever), names=["wait"])
    assert [schema["function"]["name"] for schema in tools.schemas] == ["wait"]
    assert await run(tools, call("forever")) == [
        failed("unknown tool 'forever'; known tools: 'wait'")
    ]
    assert await run(opened(executor(wait), names=[]), call("wait")) == [
        failed("unknown tool 'wait'; known tools: none")
    ]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("k"), "KeyError: 'k'"),
        (ToolError("the sandbox is gone"), "the sandbox is gone"),
        (SystemExit(3), "SystemExit: 3"),
        (TimeoutError("slow"), "TimeoutError: slow"),
        (ValueError("x" * 1000), "ValueError: " + "x" * 500 + "…"),
        (
            ExceptionGroup("outer", [ExceptionGroup("inner", [OSError("a")]), ValueError("b")]),
            "OSError: a",
        ),
    ],
)
async def test_run_exception_of_a_tool_is_an_error_result(
    executor: Open, error: BaseException, text: str
) -> None:
    tools = opened(executor(Recorder("bad", [], execute=raising(error)), wait))
    results = await run(tools, call("bad"), call("wait", seconds=1))
    assert results == [failed(text), ToolResult("done")]


@pytest.mark.anyio
async def test_run_calls_past_the_cap_are_answered_unexecuted(executor: Open) -> None:
    log: list[str] = []
    tools = opened(executor(Recorder("a", log), max_parallel_calls=2))
    results = await run(tools, *[call("a")] * 4)
    refused = failed(
        "not executed: at most 2 calls per turn (agent.max_parallel_calls); call it again"
    )
    assert results == [ToolResult("a done"), ToolResult("a done"), refused, refused]
    assert log == ["a.open", "a.execute", "a.execute"]
    assert (tools.calls, tools.errors) == (4, 2)


@pytest.mark.anyio
async def test_run_long_text_is_truncated_and_errors_too(executor: Open) -> None:
    huge = "a" * 5_000_000 + "b" * 5_000_000
    answering = Recorder("huge", [], execute=returning(huge))
    failing = Recorder("bad", [], execute=returning(failed(huge)))
    tools = opened(executor(answering, failing, max_response_length=10))
    cut = "aaaaa...(truncated)...bbbbb"
    assert await run(tools, call("huge"), call("bad")) == [ToolResult(cut), failed(cut)]


@pytest.mark.anyio
async def test_run_half_a_surrogate_pair_is_replaced(executor: Open) -> None:
    tools = opened(executor(Recorder("odd", [], execute=returning("a\ud83d|\ud83d\ude00é"))))
    assert await run(tools, call("odd")) == [ToolResult("a\ufffd|😀é")]


@pytest.mark.anyio
async def test_run_numbers_that_tools_measure_are_summed(executor: Open) -> None:
    measured = {"hits": 2, "s": 0.5, "is_hit": True, "note": "x", "bad": math.nan}
    metrics: Any = [measured, {"hits": 3}, {}]
    results = iter([ToolResult("a", metrics=each) for each in metrics])

    async def answer() -> Any:
        return next(results)

    tools = opened(executor(Recorder("find", [], execute=answer)))
    for _ in range(3):
        await run(tools, call("find"), call("unknown"))
    assert tools.metrics == {
        "tools/find/hits": 5.0,
        "tools/find/s": 0.5,
        "tools/find/is_hit": 1.0,
    }


@pytest.mark.anyio
async def test_run_context_reaches_tools_and_functions(executor: Open, threads: Any) -> None:
    async def note(text: str, context: ToolContext) -> str:
        """Note it.

        Args:
            text: Text.
        """
        context.state.setdefault("notes", []).append(text)
        return f"{context.uid}/{context.member} {context.extra['k']} {context.state['notes']}"

    recorder = Recorder("a", [])
    built = executor(note, recorder)
    extra = {"k": "v"}
    tools = opened(built, tools_kwargs={"a": {"x": 1}, "note": {"text": "fixed"}}, extra=extra)
    (noted,) = await run(tools, call("note", text="model's"))
    assert noted == ToolResult("p/1 v ['fixed']")
    await run(tools, call("a"))
    (context,) = recorder.contexts
    assert context.kwargs == {"x": 1}
    assert context.extra is extra
    assert context.state == {"notes": ["fixed"]}
    assert context.threads is threads

    other = opened(built, extra=extra)
    assert await run(other, call("note", text="b")) == [ToolResult("p/1 v ['b']")]


# Deadlines


@pytest.mark.anyio
async def test_run_call_past_its_limit_times_out_alone(executor: Open) -> None:
    tools = opened(executor(forever, wait))
    started = anyio.current_time()
    results = await run(tools, call("forever"), call("wait", seconds=9), call("forever"))
    assert anyio.current_time() - started == 10
    timeout = failed("timed out after 10 s (limits.tool_s)")
    assert results == [timeout, ToolResult("done"), timeout]
    assert tools.seconds == 29


@pytest.mark.anyio
async def test_run_turn_deadline_ends_every_call(executor: Open) -> None:
    ended: list[str] = []

    async def slow() -> None:
        """Take long to end."""
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("slow")

    tools = opened(executor(slow, wait))
    started = anyio.current_time()
    limit = turn(4)
    with pytest.raises(LimitExceeded) as caught:
        await tools.run([call("slow"), call("wait", seconds=1)], limit=limit)
    assert anyio.current_time() - started == 4
    assert ended == ["slow"]
    assert str(caught.value) == "limits.turn_s = 4 s is over"
    assert (caught.value.source, caught.value.reason, caught.value.outcome) == (
        "limits.turn_s",
        "turn",
        Outcome.DEADLINE,
    )
    # The trajectory may continue where its agent has another turn.
    assert await run(tools, call("wait", seconds=1)) == [ToolResult("done")]


@pytest.mark.anyio
async def test_run_tool_that_answers_its_cancellation_with_an_error_timed_out(
    executor: Open,
) -> None:
    async def stubborn() -> None:
        """Turn cancellation into an error."""
        try:
            await anyio.sleep_forever()
        except BaseException:
            raise ValueError("interrupted") from None

    tools = opened(executor(stubborn))
    assert await run(tools, call("stubborn")) == [failed("timed out after 10 s (limits.tool_s)")]
    with pytest.raises(LimitExceeded, match=r"^limits\.turn_s = 3 s is over$"):
        await tools.run([call("stubborn")], limit=turn(3))


# Cancellation


@pytest.mark.anyio
@pytest.mark.parametrize("event", ["open", "execute"])
async def test_run_callers_cancellation_passes_and_opened_sessions_can_still_be_closed(
    executor: Open, event: str
) -> None:
    log: list[str] = []
    tools = opened(executor(Recorder("a", log, **{event: anyio.sleep_forever}), forever))
    started = anyio.current_time()
    with anyio.move_on_after(3) as scope:
        await run(tools, call("a"), call("forever"))
    assert scope.cancelled_caught
    assert anyio.current_time() - started == 3
    await tools.close()
    assert log == (["a.open"] if event == "open" else ["a.open", "a.execute", "a.close"])


def test_run_asyncio_tool_that_cancels_itself_is_an_error_result(executor: Open) -> None:
    import asyncio  # noqa: TID251  (what a tool on asyncio may do)

    async def cancels_inner() -> None:
        """Await a cancelled task."""
        inner = asyncio.ensure_future(asyncio.sleep(60))
        inner.cancel()
        await inner

    async def main() -> None:
        tools = opened(executor(cancels_inner, wait))
        assert await run(tools, call("cancels_inner"), call("wait", seconds=0)) == [
            failed("CancelledError"),
            ToolResult("done"),
        ]

    anyio.run(main, backend="asyncio")


def test_run_keyboard_interrupt_passes_as_itself(executor: Open) -> None:
    async def main() -> None:
        tools = opened(executor(Recorder("a", [], execute=raising(KeyboardInterrupt())), forever))
        await run(tools, call("a"), call("forever"))

    with pytest.raises(KeyboardInterrupt):
        anyio.run(main, backend="trio")


# Sessions


@pytest.mark.anyio
async def test_session_opens_once_at_first_use_and_closes_once(executor: Open) -> None:
    log: list[str] = []
    tools = opened(executor(Recorder("a", log), Recorder("b", log), Recorder("c", log)))
    assert log == []
    await run(tools, call("b"), call("a"), call("b"))
    assert log[:2] == ["b.open", "a.open"]
    assert sorted(log[2:]) == ["a.execute", "b.execute", "b.execute"]
    del log[:]
    await run(tools, call("a"))
    assert log == ["a.execute"]
    del log[:]
    await tools.close()
    await tools.close()
    assert sorted(log) == ["a.close", "b.close"]
    with pytest.raises(ToolError, match=r"^the tools of this trajectory are closed$"):
        await run(tools, call("a"))
    assert await tools.calc_rewards() == []


@pytest.mark.anyio
async def test_session_open_failure_answers_the_calls_and_is_tried_again(executor: Open) -> None:
    log: list[str] = []
    recorder = Recorder("a", log, open=raising(OSError("no port")))
    tools = opened(executor(recorder, wait))
    results = await run(tools, call("a"), call("wait", seconds=1), call("a"))
    refused = failed("could not open 'a': OSError: no port")
    assert results == [refused, ToolResult("done"), refused]
    assert log == ["a.open"]
    recorder.actions.clear()
    assert await run(tools, call("a")) == [ToolResult("a done")]
    assert (tools.calls, tools.errors) == (4, 2)
    await tools.close()


@pytest.mark.anyio
async def test_session_open_that_never_returns_meets_the_limits(executor: Open) -> None:
    tools = opened(executor(Recorder("a", [], open=anyio.sleep_forever), wait))
    started = anyio.current_time()
    assert await run(tools, call("a"), call("wait", seconds=1)) == [
        failed("could not open 'a': timed out after 10 s (limits.tool_s)"),
        ToolResult("done"),
    ]
    assert anyio.current_time() - started == 11
    with pytest.raises(LimitExceeded, match=r"^limits\.turn_s = 4 s is over$"):
        await tools.run([call("a"), call("wait", seconds=1)], limit=turn(4))
    assert anyio.current_time() - started == 15


@pytest.mark.anyio
async def test_session_that_a_cancelled_open_returns_is_closed_at_once(executor: Open) -> None:
    log: list[str] = []

    async def shielded() -> ToolSession:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(11)
        return RecorderSession(recorder)

    async def close() -> None:
        await anyio.sleep(1)
        log.append("closed")

    recorder = Recorder("a", log, open=shielded, close=close)
    async with open_containment(5.0):
        tools = opened(executor(recorder))
        assert await run(tools, call("a")) == [
            failed("could not open 'a': timed out after 10 s (limits.tool_s)")
        ]
        assert log == ["a.open", "a.close", "closed"]
        await tools.close()
    assert log == ["a.open", "a.close", "closed"]


@pytest.mark.anyio
async def test_session_rewards_come_in_order_of_first_use(
    executor: Open, caplog: pytest.LogCaptureFixture
) -> None:
    log: list[str] = []
    names_and_actions = {
        "late": returning(0.25, after_s=3),
        "none": returning(None),
        "bad": raising(ValueError("no judge")),
        "hangs": anyio.sleep_forever,
        "int": returning(1),
        "unused": returning(9.0),
    }
    tools = opened(
        executor(*[Recorder(name, log, reward=a) for name, a in names_and_actions.items()])
    )
    await run(tools, *[call(name) for name in list(names_and_actions)[:-1]])
    started = anyio.current_time()
    assert await tools.calc_rewards() == [0.25, 1.0]
    assert anyio.current_time() - started == 13  # one after another
    assert sorted(record.getMessage() for record in caplog.records) == [
        "tool 'bad': calc_reward failed: ValueError: no judge",
        "tool 'hangs': calc_reward failed: timed out after 10 s (limits.tool_s)",
    ]


@pytest.mark.anyio
async def test_session_close_is_bounded_shielded_and_never_raises(
    executor: Open, caplog: pytest.LogCaptureFixture
) -> None:
    log: list[str] = []
    tools = opened(
        executor(
            Recorder("hangs", log, close=anyio.sleep_forever),
            Recorder("bad", log, close=raising(SystemExit(1))),
            Recorder("slow", log, close=returning(None, after_s=4)),
        )
    )
    await run(tools, *[call(name) for name in ("hangs", "bad", "slow")])
    started = anyio.current_time()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await tools.close()
    assert anyio.current_time() - started == 9  # one after another, the last opened first
    assert log[-3:] == ["slow.close", "bad.close", "hangs.close"]
    assert [record.getMessage() for record in caplog.records] == [
        "tool 'bad': close failed: SystemExit: 1",
        "tool 'hangs': close failed: timed out after 5 s (limits.cleanup_s)",
    ]


# Sync functions: real threads, the real clock, and events in place of time


@real_clock
@pytest.mark.anyio
async def test_sync_function_runs_in_a_thread_and_calls_meet(executor: Open) -> None:
    barrier = threading.Barrier(3)
    main = threading.get_ident()

    def meet(name: str) -> Any:
        """Meet the others.

        Args:
            name: Who.
        """
        barrier.wait(timeout=30)
        return {"name": name, "in_main": threading.get_ident() == main}

    tools = opened(executor(meet))
    results = await run(tools, *[call("meet", name=name) for name in "abc"])
    assert [result.data for result in results] == [
        {"name": name, "in_main": False} for name in "abc"
    ]


@real_clock
@pytest.mark.anyio
async def test_sync_function_past_its_limit_is_abandoned_and_then_fails_fast(
    executor: Open, threads: WorkerThreads
) -> None:
    release = threading.Event()

    def stuck() -> str:
        """Never return."""
        release.wait(timeout=60)
        return "late"

    tools = opened(executor(stuck, wait, tool_s=0.5))
    try:
        timeout = failed("timed out after 0.5 s (limits.tool_s)")
        results = await run(tools, call("stuck"), call("wait", seconds=0), call("stuck"))
        assert results == [timeout, ToolResult("done"), timeout]
        assert threads.abandoned == {"stuck": 2}
        assert await run(tools, call("stuck")) == [
            failed(
                "stuck: 2 abandoned threads are still running (tools.max_abandoned_threads = 2); "
                "not called"
            )
        ]
        await tools.close()
    finally:
        release.set()
