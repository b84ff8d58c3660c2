"""Engines without a kind of media: prompts are rejected with that reason, tools' answers told."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

import rollout
import vision_models
from media_material import frames, picture
from rollout import Outcome, Prompt, Trajectory, function_tool
from rollout.config import (
    AgentConfig,
    InProcessPlacement,
    LengthsConfig,
    ModelConfig,
    RolloutConfig,
    SimulatedEngine,
)
from rollout.engine.cores.simulated.vocabulary import SPECIAL_TOKENS
from rollout.engine.cores.transformers import TransformersCore
from rollout.errors import EngineError
from rollout.testing import Scenario
from rollout.tools import ToolResult

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not find_spec("torchvision"), reason="torchvision is not installed"),
    pytest.mark.process,
]
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


@pytest.fixture
def anyio_backend() -> str:
    """The machine's own clock: media are read in threads."""
    return "trio"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Processor and configuration of Qwen2.5-VL over the simulated engine's vocabulary."""
    folder = tmp_path_factory.mktemp("vl")
    processor = vision_models.processor("qwen2_5_vl")
    processor.tokenizer = simulated_words(processor.tokenizer)
    processor.save_pretrained(folder)
    vision_models.config("qwen2_5_vl").save_pretrained(folder)
    return folder


def simulated_words(words: Any) -> Any:
    """The simulated vocabulary; marks of media have the ids of bytes that no text has."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from rollout.chat.tokenizer_backend import BYTE_LETTERS

    letters = list(BYTE_LETTERS)
    marks = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    letters[0xF8 : 0xF8 + len(marks)] = marks
    backend = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    named = (*SPECIAL_TOKENS, *marks)
    backend.add_special_tokens([AddedToken(token, special=True) for token in named])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=words.chat_template,
    )


@function_tool
async def look() -> ToolResult:
    """Look."""
    return ToolResult("Here:", images=[picture(80, 60)])


def config_of(folder: Path, engine: Any) -> RolloutConfig:
    return RolloutConfig(
        model=ModelConfig(path=str(folder)),
        engine=engine,
        placement=InProcessPlacement(),
        lengths=LengthsConfig(prompt=512, response=768),
        agent=AgentConfig(name="tool_agent", tool_format="hermes"),
    )


def simulated(modalities: Sequence[str]) -> SimulatedEngine:
    scenario = Scenario(modalities=modalities).reply("", CALL).then("ok")
    return SimulatedEngine(scenario=scenario.to_dict())


async def play(config: RolloutConfig) -> list[Trajectory]:
    """A prompt with an image, one with a video, and one without, whose tool shows an image."""
    contents: list[Any] = [
        [{"type": "text", "text": "Look:"}, {"type": "image", "image": picture(80, 60)}],
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
    assert trajectory.metrics["tool_errors"] == trajectory.metrics["tool/look/errors"] == 1


async def test_text_only_engine_rejects_media_and_tells_the_model_of_a_tools(folder: Path) -> None:
    image, video, tool = await play(config_of(folder, simulated(())))
    check_rejected(image, "simulated takes no images; it takes text only")
    check_rejected(video, "simulated takes no videos; it takes text only")
    check_told(tool, "look: images[0]: simulated takes no images; it takes text only")


async def test_engine_of_images_rejects_videos_alone(folder: Path) -> None:
    image, video, tool = await play(config_of(folder, simulated(("image",))))
    assert image.outcome is Outcome.COMPLETED, image.cause
    assert len(image.transcript.media) == 2  # the prompt's, and the tool's
    check_rejected(video, "simulated takes no videos; it takes images")
    assert tool.outcome is Outcome.COMPLETED
    assert len(tool.transcript.media) == 1


async def test_embedded_engine_refuses_a_model_that_reads_images_by_name(tmp_path: Path) -> None:
    vision_models.save("qwen2_5_vl", tmp_path)
    core = TransformersCore(model=str(tmp_path))
    said = "qwen2_5_vl reads more than text, which the embedded engine does not; serve it with"
    with pytest.raises(EngineError, match=said):
        await core.start()
    await core.aclose()
