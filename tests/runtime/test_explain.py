"""What trajectories wait for, as `RolloutRuntime.explain` says it."""

from __future__ import annotations

import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import rollout
from gateway_clients import SETTINGS, TRIALS, ask, user
from rollout import AgentConfig, Prompt, SchedulingConfig, function_tool
from rollout.cli.explain_signal import STARTING, explaining_at_signal
from rollout.config import GatewayConfig
from rollout.observe.explanation import Explanation, TrajectoryWaits
from rollout.scopes import open_task_group
from rollout.testing import Scenario

SEARCH = '<tool_call>\n{"name": "search", "arguments": {"query": "boats"}}\n</tool_call>'


@function_tool
async def search(query: str) -> str:
    """Search slowly.

    Args:
        query: For what.
    """
    await anyio.sleep(60)
    return "found"


def prompts(count: int = 1) -> list[Prompt]:
    return [
        Prompt(messages=[{"role": "user", "content": "Q"}], uid=f"task-{at}") for at in range(count)
    ]


def scenario() -> Scenario:
    """Turns of a token in 0.05 s, the first of which calls the tool."""
    return Scenario(seed=1).reply("Q", SEARCH).then("Done.").timing(base_s=0.05)


@asynccontextmanager
async def explained_after(
    seconds: float,
    *,
    count: int = 1,
    samples: int = 1,
    tools: Any = (search,),
    agent: str = "tool_agent",
    call: Callable[[Any], Any] | None = None,
    scheduling: dict[str, Any] | None = None,
    capacity: dict[str, Any] | None = None,
    **opened: Any,
) -> AsyncIterator[Explanation]:
    """What a runtime says so many seconds after a call of it began; it is cancelled then."""
    config = (
        scenario()
        .capacity(**(capacity or {}))
        .config(
            agent=AgentConfig(name=agent, tool_format="hermes"),
            scheduling=SchedulingConfig(samples_per_prompt=samples, **(scheduling or {})),
        )
    )
    async with rollout.open_rollout(config, tools, **opened) as runtime:
        async with open_task_group() as tasks:
            began = anyio.current_time()
            tasks.start_soon(call or runtime.generate, prompts(count) if call is None else runtime)
            await anyio.sleep_until(began + seconds)
            yield runtime.explain()
            tasks.cancel_scope.cancel()


def only(explanation: Explanation) -> TrajectoryWaits:
    (call,) = explanation.calls
    (row,) = call.trajectories
    return row


pytestmark = pytest.mark.anyio


async def test_explain_while_a_turn_is_generated_names_the_replica() -> None:
    async with explained_after(1.0) as explanation:
        row = only(explanation)

    (wait,) = row.waits
    assert (wait.kind, wait.name, wait.seconds) == ("generation", "engine-0", pytest.approx(1.0))
    assert wait.note.endswith(" tokens so far")
    assert row.seconds == pytest.approx(1.0)
    assert "└─ member 0, for 1.0 s: generation on engine-0, for 1.0 s, " in str(explanation)
    assert "engine-0: serving, 1 in flight" in str(explanation)


async def test_explain_while_a_tool_runs_names_it() -> None:
    async with explained_after(30.0) as explanation:
        (wait,) = only(explanation).waits

    assert (wait.kind, wait.name) == ("tool", "'search'")
    assert 20 < wait.seconds < 28
    assert "tool 'search', for " in str(explanation)


async def test_explain_without_a_place_counts_them_together() -> None:
    scheduling = {"max_in_flight": 2}
    async with explained_after(1.5, count=3, samples=4, scheduling=scheduling) as explanation:
        rows = explanation.calls[0].trajectories

    assert [row.waits[0].kind for row in rows].count("place") == 10
    assert {round(row.waits[0].seconds, 6) for row in rows if row.is_unstarted} == {1.5}
    assert "10 × a place, for 1.5 s: task-0/2, task-0/3, task-1/0, … task-2/3" in str(explanation)
    assert "12 trajectories not ended (10 without a place, 2 generating)" in str(explanation)


async def test_explain_where_the_engine_is_full_says_its_queue() -> None:
    async with explained_after(1.0, samples=3, capacity={"max_running": 1}) as explanation:
        rows = explanation.calls[0].trajectories

    kinds = [row.waits[0].kind for row in rows]
    assert kinds.count("generation") + kinds.count("queue") == 3
    assert kinds.count("generation") >= 1


@pytest.mark.parametrize("is_group", [False, True])
async def test_explain_while_a_reward_is_computed_says_so(*, is_group: bool) -> None:
    async def slow(_: Any) -> Any:
        await anyio.sleep(100)

    name = "group_reward" if is_group else "reward"
    async with explained_after(20.0, tools=(), agent="single_turn", **{name: slow}) as explanation:
        (wait,) = only(explanation).waits

    assert wait.kind == "reward"
    assert wait.name == (" of its group" if is_group else "")
    assert 0 < wait.seconds < 18


async def test_explain_one_that_has_ended_waits_for_its_group() -> None:
    class Uneven(rollout.AgentLoop):
        async def run(self, context: Any) -> None:
            await anyio.sleep(5 + 50 * context.identity.member)

    async def reward(group: Any) -> list[float]:
        return [0.0 for _ in group.trajectories]

    rollout.register_agent("uneven")(Uneven)
    async with explained_after(15.0, samples=2, agent="uneven", group_reward=reward) as explanation:
        ended, running = explanation.calls[0].trajectories

    assert (ended.waits[0].kind, ended.waits[0].seconds) == ("group", pytest.approx(10.0))
    (wait,) = running.waits
    assert (wait.kind, wait.name, wait.seconds) == ("code", "agent Uneven", pytest.approx(15.0))
    assert "test_explain.py:" in wait.note


async def test_explain_names_the_user_that_is_waited_for() -> None:
    class Slow(rollout.Interaction):
        name = "slow"

        async def start(self, context: Any) -> None: ...

        async def respond(self, messages: Any) -> Any:
            await anyio.sleep(100)

        async def finish(self) -> None: ...

    async def call(runtime: Any) -> None:
        prompt = Prompt(
            messages=[{"role": "user", "content": "hello"}],
            uid="task-0",
            extra={"interaction_kwargs": {"name": "slow"}},
        )
        await runtime.generate([prompt])

    async with explained_after(30.0, tools=(), call=call, interactions=[Slow]) as explanation:
        (wait,) = only(explanation).waits

    assert wait.kind == "user"
    assert 0 < wait.seconds < 30


async def test_explain_tells_conversations_of_one_trajectory_apart() -> None:
    class Two(rollout.AgentLoop):
        async def run(self, context: Any) -> None:
            await context.begin()
            other = await context.subagent([{"role": "user", "content": "Q"}])
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(context.generate)
                tasks.start_soon(other.generate)

    rollout.register_agent("two")(Two)
    async with explained_after(1.0, agent="two", tools=()) as explanation:
        waits = only(explanation).waits

    assert [(wait.kind, wait.path) for wait in waits] == [("generation", ""), ("generation", "0")]
    assert "generation on engine-0 in conversation 0" in str(explanation)


async def test_explain_names_what_an_agent_behind_the_gateway_asked_for() -> None:
    async def trial(session: Any, context: Any) -> None:
        await ask(session, user("Q"))

    async def call(runtime: Any) -> None:
        TRIALS["it"] = trial
        SETTINGS.append(GatewayConfig())
        prompt = Prompt(messages=[{"role": "user", "content": "-"}], extra={"trial": "it"})
        try:
            await runtime.generate([prompt])
        finally:
            SETTINGS.pop()

    async with explained_after(1.0, tools=(), agent="through_gateway", call=call) as explanation:
        (wait,) = only(explanation).waits

    assert (wait.kind, wait.name) == ("generation", "engine-0")
    assert 0 < wait.seconds <= 1.0


async def test_explain_an_idle_runtime_says_that_nothing_runs() -> None:
    async with rollout.open_rollout(scenario().config()) as runtime:
        assert runtime.explain().calls == ()
        assert str(runtime.explain()).startswith("nothing runs\nengines\n└─ engine-0: serving")


def test_explain_of_a_blocking_runtime_answers_any_thread() -> None:
    with rollout.open_rollout_blocking(scenario().config()) as runtime:
        assert str(runtime.explain()).startswith("nothing runs")


def test_signal_prints_what_is_waited_for(capfd: pytest.CaptureFixture[str]) -> None:
    explanation = Explanation((), replicas=("engine-0: serving, 0 in flight",))

    with explaining_at_signal(lambda: explanation):
        signal.raise_signal(signal.SIGUSR1)

    assert capfd.readouterr().err == f"\n{explanation}\n"


def test_signals_in_a_row_are_answered_once_each(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    patience_s = 0.01
    monkeypatch.setattr("rollout.cli.explain_signal.PATIENCE_S", patience_s)
    asked: list[None] = []
    with explaining_at_signal(lambda: asked.append(None)):
        for count in range(1, 4):
            signal.raise_signal(signal.SIGUSR1)
            assert len(asked) == count
            # A thread answers those that the main one does not.
            threading.Event().wait(3 * patience_s)
    assert len(asked) == 3
    assert capfd.readouterr().err.count(STARTING) == 3
