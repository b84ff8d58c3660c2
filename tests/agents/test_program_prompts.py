"""What of a prompt stands in a program's command and environment for ``{prompt}``."""

from __future__ import annotations

import base64
import json
import sys
from typing import Any

import attrs
import pytest

import rollout
from fake_gateway import FakeGateway, fake_gateway
from media_material import config_of, encoded, picture, write_model
from rollout import (
    Message,
    Outcome,
    ProgramAgent,
    Prompt,
    RolloutConfig,
    Trajectory,
    register_agent,
)
from rollout.config import SandboxConfig
from rollout.testing import Scenario

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.usefixtures("own_temporary_directory"),
    pytest.mark.parametrize("anyio_backend", ["asyncio"]),
    pytest.mark.process,
]
SCENARIO = Scenario().reply("", "Well.")
#: Prints its argument and a variable.
ECHO = [
    sys.executable,
    "-c",
    "import json, os, sys; print(json.dumps([sys.argv[1], os.environ['P']]))",
    "<{prompt}>",
]
IMAGE_URL = "data:image/png;base64," + base64.b64encode(encoded(picture())).decode()
IMAGE = {"type": "image_url", "image_url": {"url": IMAGE_URL}}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


@pytest.fixture(autouse=True)
def gateway(monkeypatch: pytest.MonkeyPatch) -> FakeGateway:
    return fake_gateway(monkeypatch)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> RolloutConfig:
    """Of a model that takes images."""
    pytest.importorskip("torchvision")
    return config_of(write_model("qwen2_5_vl", tmp_path_factory.mktemp("vl")))


async def ran(
    *messages: Any, config: RolloutConfig | None = None, **options: Any
) -> list[Trajectory]:
    register_agent("a_program")(ProgramAgent(ECHO, env={"P": "{prompt}"}, **options))
    asked = [Prompt(messages=[message], agent_name="a_program") for message in messages]
    config = attrs.evolve(config or SCENARIO.config(), sandbox=SandboxConfig(provider="none"))
    async with rollout.open_rollout(config) as runtime:
        return list((await runtime.generate(asked)).trajectories)


#: Messages, and their text.
SHOWN: list[tuple[Any, str]] = [
    ({"role": "user", "content": "go"}, "go"),
    ({"role": "user", "content": [text("Look "), text("here")]}, "Look here"),
    ({"role": "user", "content": ""}, ""),
    (
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}],
        },
        "",
    ),
    (Message(role="user", content="", parts=("Look ", "here")), "Look here"),
]


async def test_prompt_placeholder_is_the_text_of_the_last_message() -> None:
    trajectories = await ran(*[message for message, _ in SHOWN])
    for trajectory, (_, words) in zip(trajectories, SHOWN, strict=True):
        assert "program" in trajectory.extra, trajectory.cause
        told = json.loads(trajectory.extra["program"]["output"])
        assert told == [f"<{words}>", words]


async def test_last_message_without_content_is_refused_and_no_argument() -> None:
    for trajectory in await ran({"role": "user"}, {"role": "user", "content": None}):
        assert (trajectory.outcome, trajectory.reason) == (Outcome.REJECTED, "bad_message")
        assert trajectory.cause is not None
        assert "content must be a string, not None" in trajectory.cause.message


async def test_prompt_placeholder_for_an_image_is_refused_where_nothing_else_tells_it(
    seeing: RolloutConfig,
) -> None:
    asked = {"role": "user", "content": [text("What is it? "), IMAGE]}
    (trajectory,) = await ran(asked, config=seeing)
    assert (trajectory.outcome, trajectory.trainable) == (Outcome.FAILED, False)
    assert trajectory.cause is not None
    message = trajectory.cause.message
    assert message.startswith("ProgramAgent: {prompt}: the last message shows an image")
    assert "files=lambda task:" in message
    assert "base64" not in message


async def test_prompt_placeholder_beside_a_function_of_the_task_is_the_text_alone(
    seeing: RolloutConfig,
) -> None:
    (trajectory,) = await ran(
        {"role": "user", "content": [text("What "), IMAGE, text("is it?")]},
        config=seeing,
        files=lambda task: {"messages.json": json.dumps(task.messages)},
        collect=["messages.json"],
    )
    told = json.loads(trajectory.extra["program"]["output"])
    assert told == ["<What is it?>", "What is it?"]
    [seen] = json.loads(trajectory.extra["files"]["messages.json"])
    assert [part["type"] for part in seen["content"]] == ["text", "image_url", "text"]
