"""Engines without a kind of media: prompts are rejected with that reason, tools' answers told."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import attrs
import pytest

import rollout
import vision_models
from media_material import CALL, config_of, frames, image, picture
from rollout import Outcome, Prompt, Trajectory, function_tool
from rollout.engine.cores.simulated.simulated_core import SimulatedCore
from rollout.engine.cores.transformers import TransformersCore
from rollout.errors import EngineError
from rollout.testing import Scenario
from rollout.tools import ToolResult

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not find_spec("torchvision"), reason="torchvision is not installed"),
    pytest.mark.process,
]


@pytest.fixture
def anyio_backend() -> str:
    """The machine's own clock: media are read in threads."""
    return "trio"


@function_tool("show")
async def look() -> ToolResult:
    """Look."""
    return ToolResult("Here:", images=[picture(80, 60)])


async def play(folder: Path, *modalities: str) -> list[Trajectory]:
    """A prompt with an image, one with a video, and one without, whose tool shows an image."""
    config = config_of(folder, (CALL, "ok"))
    engine: Any = config.engine
    options = {**engine.options, "modalities": modalities}
    config = attrs.evolve(config, engine=attrs.evolve(engine, options=options))
    contents: list[Any] = [
        image(picture(80, 60)),
        [{"type": "text", "text": "Look:"}, {"type": "video", "video": frames(4)}],
        "go",
    ]
    prompts = [Prompt(messages=[{"role": "user", "content": each}]) for each in contents]
    async with rollout.open_rollout(config, tools=[look]) as runtime:
        return list((await runtime.generate(prompts)).trajectories)


def check_rejected(trajectory: Trajectory, said: str) -> None:
    assert (trajectory.outcome, trajectory.reason) == (Outcome.REJECTED, "bad_message")
    assert trajectory.cause is not None
    assert trajectory.cause.type == "MediaError"
    assert trajectory.cause.message.startswith(f"messages[0]: content[1]: {said}")


def check_told(trajectory: Trajectory, said: str) -> None:
    """The model reads the reason in the place of the picture, and speaks again."""
    assert trajectory.outcome in (Outcome.COMPLETED, Outcome.LENGTH), trajectory.cause
    assert trajectory.transcript.turns == 2
    assert not trajectory.transcript.media
    answer = trajectory.messages[2]
    assert answer.role == "tool"
    assert str(answer.content).startswith(said)
    assert trajectory.metrics["tool_errors"] == trajectory.metrics["tool/show/errors"] == 1


async def test_text_only_engine_rejects_media_and_tells_the_model_of_a_tools(folder: Path) -> None:
    shown, video, tool = await play(folder)
    check_rejected(shown, "scripted takes no images; it takes text only")
    check_rejected(video, "scripted takes no videos; it takes text only")
    check_told(tool, "show: images[0]: scripted takes no images; it takes text only")


async def test_engine_of_images_rejects_videos_alone(folder: Path) -> None:
    shown, video, tool = await play(folder, "image")
    assert shown.outcome is Outcome.COMPLETED, shown.cause
    assert len(shown.transcript.media) == 2  # the prompt's, and the tool's
    check_rejected(video, "scripted takes no videos; it takes images")
    assert tool.outcome is Outcome.COMPLETED
    assert len(tool.transcript.media) == 1


def test_simulated_engine_takes_the_media_that_its_scenario_says() -> None:
    core = SimulatedCore(**Scenario(modalities=("image",)).reply("", "ok").to_dict())
    assert core.info.capabilities.modalities == ("image",)


async def test_embedded_engine_refuses_a_model_that_reads_images_by_name(tmp_path: Path) -> None:
    vision_models.save("qwen2_5_vl", tmp_path)
    core = TransformersCore(model=str(tmp_path))
    said = "qwen2_5_vl reads more than text, which the embedded engine does not; serve it with"
    with pytest.raises(EngineError, match=said):
        await core.start()
    await core.aclose()
