"""Environments behind OpenEnv's WebSocket, against a server of the same messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio
import pytest

import rollout
from open_env_runs import act_by_text, act_by_tool, prompts, step
from open_env_server import SCHEMA, EchoServer, serving
from rollout import Outcome
from rollout.config import LimitsConfig
from rollout.environments import OpenEnv, OpenEnvError

pytestmark = pytest.mark.anyio
both = pytest.mark.parametrize("anyio_backend", ["trio", "asyncio"])


@pytest.fixture
def anyio_backend() -> str:
    """Real time, for a real server."""
    return "asyncio"


@pytest.fixture
def echo() -> EchoServer:
    return EchoServer()


@pytest.fixture
def url(echo: EchoServer) -> Iterator[str]:
    with serving(echo) as url:
        yield url


@both
async def test_open_env_is_played_by_text_to_its_end(echo: EchoServer, url: str) -> None:
    given = prompts(task="x", seed=3, secret=object())
    (trajectory,) = await act_by_text(OpenEnv(url), "abc", "bye", given=given)
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    assert [m.content for m in trajectory.messages] == ["Echo.", "hello x", "abc", "ABC", "bye"]
    assert trajectory.turn_scores == [0.3, 0.3]
    assert trajectory.reward == 0.6
    assert echo.messages[0] == {"type": "reset", "data": {"task": "x", "seed": 3}}


async def test_open_env_is_played_by_a_tool_to_its_end(url: str) -> None:
    (trajectory,) = await act_by_tool(OpenEnv(url), step("abc"), step("bye"), "never")
    assert (trajectory.outcome, trajectory.cause) == (Outcome.COMPLETED, None)
    assert [m.content for m in trajectory.messages if m.role != "assistant"] == [
        "Echo.\n\nhello ",
        "ABC",
        "BYE",
    ]
    assert trajectory.reward == 0.6
    async with OpenEnv(url) as (tool,):
        parameters = tool.schema["function"]["parameters"]
    assert parameters["properties"] == {"text": {"type": "string"}}


async def test_open_env_seed_is_the_prompts_and_shared_by_its_group(
    echo: EchoServer, url: str
) -> None:
    await act_by_tool(OpenEnv(url), "done", given=prompts(2), samples=2)
    seeds = [m["data"]["seed"] for m in echo.messages if m["type"] == "reset"]
    assert len(seeds) == 4
    assert len(set(seeds)) == 2


async def test_open_env_refused_action_is_told_to_the_model_and_the_session_goes_on(
    url: str,
) -> None:
    (trajectory,) = await act_by_tool(OpenEnv(url), step("boom"), step("bye"))
    told = [m.content for m in trajectory.messages if m.role == "tool"]
    assert told == [f"OpenEnv {url}: EXECUTION_ERROR: boom", "BYE"]
    assert trajectory.reward == 0.3


async def test_open_env_error_fails_what_plays_by_text(url: str) -> None:
    (trajectory,) = await act_by_text(OpenEnv(url), "boom")
    assert (trajectory.outcome, trajectory.reason) == (Outcome.FAILED, "agent")
    assert trajectory.cause is not None
    assert trajectory.cause.type == "OpenEnvError"
    assert trajectory.cause.message == f"OpenEnv {url}: EXECUTION_ERROR: boom"


@pytest.mark.parametrize("act", [act_by_text, act_by_tool])
async def test_open_env_reset_that_fails_fails_the_trajectory(act: Any, url: str) -> None:
    (trajectory,) = await act(OpenEnv(url), "abc", given=prompts(fault="no such task"))
    assert trajectory.outcome == Outcome.FAILED
    assert "EXECUTION_ERROR: no such task" in trajectory.cause.message


@both
async def test_open_env_lost_connection_fails_the_trajectory(url: str) -> None:
    (by_text,) = await act_by_text(OpenEnv(url), "drop")
    (by_tool,) = await act_by_tool(OpenEnv(url), step("drop"), "never")
    for trajectory in (by_text, by_tool):
        assert trajectory.outcome == Outcome.FAILED
        assert trajectory.cause is not None
        assert "lost during step: " in trajectory.cause.message


async def test_open_env_reward_that_is_no_number_fails_the_trajectory(url: str) -> None:
    (by_text,) = await act_by_text(OpenEnv(url), "odd")
    (by_tool,) = await act_by_tool(OpenEnv(url), step("odd"), "never")
    for trajectory in (by_text, by_tool):
        assert (trajectory.outcome, trajectory.reward) == (Outcome.FAILED, None)
        assert trajectory.cause is not None
        assert "'0.5'; expected a number" in trajectory.cause.message


@both
async def test_open_env_silence_fails_the_trajectory(url: str) -> None:
    server = OpenEnv(url, timeout_s=0.2)
    (by_text,) = await act_by_text(server, "mute")
    assert by_text.cause is not None
    assert by_text.cause.message.endswith("TIMEOUT: no answer to step within 0.2 s")


@both
async def test_open_env_deadline_ends_a_step_and_its_session(echo: EchoServer, url: str) -> None:
    limits = LimitsConfig(
        generation_s=0.3, tool_s=0.3, turn_s=0.6, trajectory_s=0.9, batch_s=5, cleanup_s=3
    )
    (trajectory,) = await act_by_text(OpenEnv(url), "mute", limits=limits)
    assert trajectory.outcome == Outcome.DEADLINE


async def test_open_env_without_room_is_asked_again(echo: EchoServer, url: str) -> None:
    trajectories = await act_by_tool(OpenEnv(url), step("abc"), step("bye"), given=prompts(8))
    assert [each.reward for each in trajectories] == [0.6] * 8
    assert echo.refused > 0
    with anyio.fail_after(5):
        while echo.open:
            await anyio.sleep(0.01)


async def test_open_env_that_is_not_there_is_named() -> None:
    server = OpenEnv("http://127.0.0.1:9", action_field="text")
    (trajectory,) = await act_by_text(server, "abc")
    assert trajectory.cause is not None
    assert trajectory.cause.message.startswith("OpenEnv http://127.0.0.1:9: CONNECTION: ")
    with pytest.raises(OpenEnvError, match="CONNECTION: GET /schema"):
        await act_by_tool(OpenEnv("http://127.0.0.1:9"), "abc")


async def test_open_env_action_of_several_fields_needs_one_named() -> None:
    schema = {**SCHEMA, "properties": {"x": {"type": "string"}, "y": {"type": "string"}}}
    schema["required"] = ["x", "y"]
    with serving(EchoServer(schema=schema)) as url:
        (trajectory,) = await act_by_text(OpenEnv(url), "abc")
    assert trajectory.cause is not None
    assert "needs the fields ['x', 'y']; expected action_field" in trajectory.cause.message


async def test_open_env_wrong_arguments_say_why() -> None:
    with pytest.raises(rollout.ToolError, match="expected an http or https URL"):
        OpenEnv("localhost:8000")
    with pytest.raises(rollout.ToolError, match="expected a number > 0"):
        OpenEnv("http://localhost", timeout_s=0)
