"""An agent that looks at a picture, zooms in where it must, and names a colour.

python examples/image_tool/run.py                 (a simulated engine, which looks at nothing)
python examples/image_tool/run.py --model PATH    (a vision-language model, such as Qwen2.5-VL,
                                                   on SGLang and a GPU)

Needs the extra `media`, and torchvision: docs/media.md.
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path

import anyio
import numpy as np
from PIL import Image
from tiny_processor import write_processor
from zoom import ZoomTool, reward

import rollout
from rollout.config import (
    AgentConfig,
    LengthsConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    SGLangEngine,
)
from rollout.testing import Scenario

COLOURS = {"red": (220, 0, 0), "green": (0, 160, 0), "blue": (0, 0, 220), "yellow": (230, 220, 0)}
QUESTION = "Somewhere in this picture is a small square. Which colour has it? Zoom in if you must."


def picture(number: int) -> tuple[Image.Image, str]:
    """Grey noise with a small square in it, and the square's colour."""
    chance = np.random.default_rng(number)
    grey = chance.integers(90, 160, (240, 320, 1), dtype=np.uint8)
    image = Image.fromarray(grey.repeat(3, axis=2))
    colour = sorted(COLOURS)[chance.integers(len(COLOURS))]
    place = (int(chance.integers(300)), int(chance.integers(220)))
    image.paste(COLOURS[colour], (*place, place[0] + 12, place[1] + 12))
    return image, colour


def prompt(number: int) -> rollout.Prompt:
    """The question about one picture, which the tool finds in `extra`."""
    image, colour = picture(number)
    content = [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]
    return rollout.Prompt(
        messages=[{"role": "user", "content": content}], ground_truth=colour, extra={"image": image}
    )


PART = '{"left": 0, "top": 0, "width": 160, "height": 120}'
ZOOM = f'<tool_call>\n{{"name": "zoom", "arguments": {PART}}}\n</tool_call>'


async def main(model: Path, *, is_simulated: bool) -> None:
    settings = {
        "model": ModelConfig(path=str(model)),
        "lengths": LengthsConfig(prompt=2048, response=1024),
        "agent": AgentConfig(max_assistant_turns=4),
        "sampling": SamplingConfig(temperature=1.0),
    }
    if is_simulated:
        config = Scenario().reply("", ZOOM).then("It is red.").config(**settings)
    else:
        config = RolloutConfig(engine=SGLangEngine(), **settings)
    async with rollout.open_rollout(config, tools=[ZoomTool()], reward=reward) as runtime:
        batch = await runtime.generate([prompt(number) for number in range(2)], samples=2)
    for row, trajectory in enumerate(batch.trajectories):
        inputs = {name: tuple(each.shape) for name, each in batch.multi_modal_inputs[row].items()}
        shown = len(trajectory.transcript.media)
        print(f"{trajectory.uid}/{trajectory.member}: {trajectory.outcome}, {shown} pictures, "
              f"reward {trajectory.reward}, {inputs}")  # fmt: skip
    print(f"position_ids {tuple(batch.tensors['position_ids'].shape)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    model = parser.parse_args().model
    with tempfile.TemporaryDirectory() as folder:
        path = model or write_processor(Path(folder))
        anyio.run(partial(main, path, is_simulated=model is None))
