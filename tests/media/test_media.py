"""Images, video and audio where only text can stand yet: refused, wherever they come from."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pydantic
import pytest
from PIL import Image

import rollout
from executors import call, executor_of, run
from rollout import (
    Interaction,
    InteractionTurn,
    MediaError,
    Outcome,
    Prompt,
    Trajectory,
    function_tool,
)
from rollout.chat.messages import template_messages
from rollout.config import AgentConfig
from rollout.testing import Scenario
from rollout.tools import ToolResult, normalise_result
from rollout.worker_threads import WorkerThreads

if TYPE_CHECKING:
    from collections.abc import Sequence

TEXT_ONLY = "here the model reads text only"


def picture() -> Image.Image:
    return Image.new("RGB", (4, 4))


def png() -> bytes:
    file = io.BytesIO()
    picture().save(file, "png")
    return file.getvalue()


URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
#: Contents of a message, and what is said of them after its place.
CONTENTS: dict[str, tuple[Any, str]] = {
    "image_url": (
        [{"type": "text", "text": "Look:"}, URL],
        f": content[1]: only parts of type 'text' are understood, not 'image_url': {TEXT_ONLY}",
    ),
    "PIL": (picture(), f": content is a PIL image; expected text: {TEXT_ONLY}"),
    "array": (
        np.zeros((4, 4, 3), np.uint8),
        f": content is an array of uint8; expected text: {TEXT_ONLY}",
    ),
    "bytes part": ((b"\x89PNG",), f": content[0] is bytes; expected text: {TEXT_ONLY}"),
}


def test_message_with_text_parts_and_empty_lists_of_media_is_text() -> None:
    parts = np.array([{"type": "text", "text": "a"}, "b"], dtype=object)
    (message,) = template_messages([{"role": "user", "content": parts, "images": []}])
    assert message["content"] == "ab"


def test_message_with_images_beside_its_content_is_refused() -> None:
    with pytest.raises(MediaError, match=r"messages\[0\]\.images is list; expected text: "):
        template_messages([{"role": "user", "content": "x", "images": [picture()]}])


async def play(*prompts: Prompt, interactions: Any = (), **agent: Any) -> Sequence[Trajectory]:
    config = Scenario(seed=1).reply("", "ok").config(agent=AgentConfig(**agent))
    async with rollout.open_rollout(config, interactions=interactions) as runtime:
        return (await runtime.generate(prompts)).trajectories


def check_refused(found: Sequence[Trajectory], outcome: Outcome, reason: str, at: str) -> None:
    """Trajectories with each of the contents, in their order, tell of what stands at this place."""
    for (_, said), trajectory in zip(CONTENTS.values(), found, strict=True):
        assert (trajectory.outcome, trajectory.reason) == (outcome, reason)
        assert trajectory.cause is not None
        assert (trajectory.cause.type, trajectory.cause.message) == ("MediaError", at + said)


@pytest.mark.anyio
async def test_prompt_with_media_is_rejected() -> None:
    asked = [[{"role": "user", "content": content}] for content, _ in CONTENTS.values()]
    found = await play(*[Prompt(messages=messages) for messages in asked])
    check_refused(found, Outcome.REJECTED, "bad_message", "messages[0] (user)")


@pytest.mark.anyio
async def test_user_who_shows_media_fails_the_trajectory() -> None:
    class Shower(Interaction):
        name = "shower"

        async def respond(self, messages: Any) -> InteractionTurn:
            return InteractionTurn(CONTENTS[messages[0]["content"]][0])

    prompts = [Prompt(name) for name in CONTENTS]
    found = await play(*prompts, interactions=[Shower], interaction="shower")
    check_refused(found, Outcome.FAILED, "agent", "interaction 'shower'")


class Block(pydantic.BaseModel):
    type: str
    data: str


@dataclass
class Shot:
    title: str
    pixels: Image.Image


#: What tools answer, and what of it is no text.
ANSWERS: dict[str, tuple[Any, str]] = {
    "nested": ({"screen": {"parts": (URL,)}}, "a part of type 'image_url'"),
    "model": ([Block(type="image", data="iVBO")], "a part of type 'image'"),
    "record": (Shot("a", picture()), "a PIL image"),
    "text": (ToolResult([URL]), "a part of type 'image_url'"),  # type: ignore[arg-type]
}


@pytest.mark.anyio
@pytest.mark.parametrize(("value", "kind"), ANSWERS.values(), ids=ANSWERS)
async def test_tool_that_answers_with_media_is_an_error_observation(
    value: Any, kind: str, threads: WorkerThreads
) -> None:
    @function_tool
    async def show() -> Any:
        """Show."""
        return value

    session = executor_of([show], threads).open_session(uid="p", member=0)
    (result,) = await run(session, call("show"))
    place = "ToolResult.text" if isinstance(value, ToolResult) else "the tool's answer"
    assert result == ToolResult(
        f"{place} holds {kind}; return text, or ToolResult(images=…, videos=…)", is_error=True
    )
    await session.close()


def test_tool_that_answers_about_media_is_understood() -> None:
    described = [{"type": "image", "title": "A photo of a lake", "url": "https://host/lake"}]
    for value in (described, {"type": "file", "name": "a.txt", "size": 3}, np.arange(4)):
        assert not normalise_result(value).is_error
