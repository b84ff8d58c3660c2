"""OpenEnv's own server is played: seeds, errors, room."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
import pytest

pytest.importorskip("openenv", reason="OpenEnv is not installed here: .venv-openenv has it")

import uvicorn
from openenv.core import env_server  # type: ignore[import-not-found, unused-ignore]

from open_env_runs import act_by_text, act_by_tool, prompts, step
from rollout import Outcome
from rollout.environments import OpenEnv

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["trio", "asyncio"])]


class EchoAction(env_server.Action):  # type: ignore[misc, name-defined, unused-ignore]
    text: str


class EchoObservation(env_server.Observation):  # type: ignore[misc, name-defined, unused-ignore]
    text: str = ""


class Echo(env_server.Environment):  # type: ignore[misc, name-defined, unused-ignore]
    """Echoes in capitals; `boom` fails, `bye` ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    state = property(lambda self: env_server.State())
    open = most = 0

    def __init__(self) -> None:
        super().__init__()
        self.is_open = False

    def reset(self, seed: int | None = None, fault: str = "", **row: Any) -> Any:
        if fault:
            raise ValueError(fault)
        self.is_open = True
        Echo.open += 1
        Echo.most = max(Echo.most, Echo.open)
        return EchoObservation(text=f"seed={seed}")

    def step(self, action: Any, **_: Any) -> Any:
        if action.text == "boom":
            raise ValueError("boom")
        text = action.text
        return EchoObservation(text=text.upper(), reward=len(text) / 10, done=text == "bye")

    def close(self) -> None:
        Echo.open -= self.is_open
        self.is_open = False


@asynccontextmanager
async def served(room: int = 2) -> AsyncIterator[str]:
    """The URL of a server of the package."""
    app = env_server.create_fastapi_app(Echo, EchoAction, EchoObservation, max_concurrent_envs=room)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            await anyio.sleep(0.05)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(thread.join)


async def test_openenv_server_is_played_by_text_and_by_a_tool() -> None:
    async with served() as url:
        (by_text,) = await act_by_text(OpenEnv(url), "abc", "bye")
        (by_tool,) = await act_by_tool(OpenEnv(url), step("abc"), step("bye"), "never")
    for trajectory in (by_text, by_tool):
        assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 0.6)


async def test_openenv_seed_is_the_prompts_or_one_for_its_group() -> None:
    async with served(room=8) as url:
        (own,) = await act_by_tool(OpenEnv(url), step("bye"), given=prompts(seed=3))
        played = await act_by_tool(OpenEnv(url), step("bye"), given=prompts(2), samples=2)
    assert own.messages[0].content == "Echo.\n\nseed=3"
    seeds = [each.messages[0].content for each in played]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]


async def test_openenv_errors_are_told_to_the_model_or_fail_the_trajectory() -> None:
    async with served() as url:
        (told,) = await act_by_tool(OpenEnv(url), step("boom"), step("bye"))
        (failed,) = await act_by_text(OpenEnv(url), "boom")
        (never,) = await act_by_tool(OpenEnv(url), "abc", given=prompts(fault="no such task"))
        wrong = OpenEnv(url, action_field="txt")
        (invalid,) = await act_by_text(wrong, "abc")
    said = [each.content for each in told.messages if each.role == "tool"]
    assert "EXECUTION_ERROR" in said[0]
    assert (said[1], told.reward) == ("BYE", 0.3)
    for trajectory, text in (
        (failed, "EXECUTION_ERROR: boom"),
        (never, "EXECUTION_ERROR: no such task"),
        (invalid, "VALIDATION_ERROR: "),
    ):
        assert trajectory.outcome == Outcome.FAILED
        assert trajectory.cause is not None
        assert text in trajectory.cause.message


async def test_openenv_server_without_room_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    Echo.open = Echo.most = 0
    async with served() as url:
        played = await act_by_tool(OpenEnv(url), step("abc"), step("bye"), given=prompts(8))
    assert [each.reward for each in played] == [0.6] * 8
    assert 1 <= Echo.most <= 2
    assert sum("CAPACITY_REACHED" in each.message for each in caplog.records) == 1
