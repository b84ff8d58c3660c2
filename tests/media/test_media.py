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
    AgentLoop,
    Interaction,
    InteractionTurn,
    MediaError,
    Outcome,
    Prompt,
    TemplateError,
    ToolError,
    Trajectory,
    function_tool,
    register_agent,
)
from rollout.chat.messages import template_messages
from rollout.config import AgentConfig
from rollout.interactions import VerlInteraction
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
    "audio": (
        [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}],
        f": content[0]: only parts of type 'text' are understood, not 'input_audio': {TEXT_ONLY}",
    ),
    "bytes": (png(), f": content is bytes; expected text: {TEXT_ONLY}"),
    "PIL": (picture(), f": content is a PIL image; expected text: {TEXT_ONLY}"),
    "array": (
        np.zeros((4, 4, 3), np.uint8),
        f": content is an array of uint8; expected text: {TEXT_ONLY}",
    ),
    "PIL part": (["Look:", picture()], f": content[1] is a PIL image; expected text: {TEXT_ONLY}"),
    "bytes part": ((b"\x89PNG",), f": content[0] is bytes; expected text: {TEXT_ONLY}"),
}


@pytest.mark.parametrize(("content", "said"), CONTENTS.values(), ids=CONTENTS)
def test_message_with_media_is_refused_by_place_and_kind(content: Any, said: str) -> None:
    with pytest.raises(MediaError) as caught:
        template_messages(
            [{"role": "system", "content": "x"}, {"role": "user", "content": content}]
        )
    assert str(caught.value) == f"messages[1] (user){said}"
    assert isinstance(caught.value, TemplateError)
    assert isinstance(caught.value, ToolError)


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("images", [picture()], "list"),
        ("image", "http://host/a.png", "str"),
        ("thumbnail", png(), "bytes"),
        ("pixels", np.zeros(3), "an array of float64"),
    ],
)
def test_message_with_media_beside_its_content_is_refused(
    field: str, value: Any, kind: str
) -> None:
    with pytest.raises(MediaError) as caught:
        template_messages([{"role": "user", "content": "x", field: value}])
    assert str(caught.value) == f"messages[0].{field} is {kind}; expected text: {TEXT_ONLY}"


def test_message_with_text_parts_and_empty_lists_of_media_is_text() -> None:
    parts = np.array([{"type": "text", "text": "a"}, "b"], dtype=object)
    (message,) = template_messages([{"role": "user", "content": parts, "images": []}])
    assert message["content"] == "ab"


@register_agent("shows")
class Shows(AgentLoop):
    """Observes what the prompt's `extra` has."""

    async def run(self, context: rollout.AgentContext) -> None:
        await context.generate()
        context.observe([{"role": "user", "content": context.extra["content"]}])
        await context.generate()


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
async def test_agent_that_observes_media_fails() -> None:
    prompts = [Prompt("q", extra={"content": content}) for content, _ in CONTENTS.values()]
    found = await play(*prompts, name="shows")
    check_refused(found, Outcome.FAILED, "agent", "messages[0] (user)")


@pytest.mark.anyio
@pytest.mark.parametrize("is_verl", [False, True])
async def test_user_who_shows_media_fails_the_trajectory(is_verl: bool) -> None:
    class Shower(Interaction):
        name = "shower"

        async def respond(self, messages: Any) -> InteractionTurn:
            return InteractionTurn(CONTENTS[messages[0]["content"]][0])

    class VerlShower:
        async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
            return False, CONTENTS[messages[0]["content"]][0], 0.0, {}

    user = VerlInteraction(VerlShower(), name="shower") if is_verl else Shower
    prompts = [Prompt(name) for name in CONTENTS]
    found = await play(*prompts, interactions=[user], interaction="shower")
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
    "file": ([{"type": "file", "data": "iVBO"}], "a part of type 'file'"),
    "model": ([Block(type="image", data="iVBO")], "a part of type 'image'"),
    "bytes within": ({"file": b"abc"}, "bytes"),
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
    with pytest.raises(MediaError):
        normalise_result(value)
    await session.close()


@pytest.mark.parametrize(
    "value",
    [
        [{"type": "image", "title": "A photo of a lake", "url": "https://host/lake"}],
        {"type": "file", "name": "a.txt", "size": 3},
        {"type": ["image_url"], "image_url": 1},
        np.arange(4),
        {"board": np.zeros((2, 2), np.uint8)},
        b"BMW and RIFF are words",
        b"caf\xc3\xa9",
    ],
    ids=str,
)
def test_tool_that_answers_about_media_is_understood(value: Any) -> None:
    assert not normalise_result(value).is_error
