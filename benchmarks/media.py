"""Images in trajectories: what they cost the event loop, the wire to an engine, and memory.

64 trajectories at once begin with an image of a megapixel each, and a tool shows another one in
each of seven turns: JPEG files, all different. An engine in another process answers at once, on one
replica. Then a group of 8 begins with one PNG of a megapixel, and so does a member alone; of both,
all that is held for a trainer is added up: rows, media, pixel values. Progress goes to stderr.

    python benchmarks/media.py [--quick]

The last line is the result as JSON:

    loop_block_ms_max    longest delay of the driver's event loop by what the process did
    bytes_on_wire_ratio  bytes of media that the replica was sent, over those of distinct media
    group_memory_ratio   memory of the group of 8 over that of the member alone
    details              starved_ms_max: longest delay because the machine was busy elsewhere;
                         trajectories, turns, seconds, and megabytes of distinct media and of the
                         member alone
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
import time  # noqa: TID251  (what a run takes)
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import anyio
import numpy as np
from PIL import Image

import rollout
import vision_models
from rollout import Prompt, function_tool
from rollout.chat import load_chat_template
from rollout.config import (
    AgentConfig,
    CustomEngine,
    LengthsConfig,
    LocalProcessPlacement,
    ModelConfig,
    RolloutConfig,
    SchedulingConfig,
)
from rollout.tools import ToolResult

if TYPE_CHECKING:
    from rollout import RolloutBatch

WIDTH, HEIGHT = 1024, 1024
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
GROUP = 8
#: What is to be reached, at most.
PROMISED = {"loop_block_ms_max": 20.0, "bytes_on_wire_ratio": 1.1, "group_memory_ratio": 1.5}


def picture(number: int, kind: str) -> bytes:
    """The file of a picture of its own for each number, a megapixel."""
    rng = np.random.default_rng(number)
    coarse = rng.integers(0, 256, (HEIGHT // 16, WIDTH // 16, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(coarse).resize((WIDTH, HEIGHT)).save(buffer, kind, quality=90)
    return buffer.getvalue()


def config_of(folder: str, turns: int) -> RolloutConfig:
    """An engine in a process of its own that calls the tool in all turns but the last."""
    template = load_chat_template(folder)
    texts = [*[CALL] * (turns - 1), "done"]
    return RolloutConfig(
        model=ModelConfig(path=folder),
        engine=CustomEngine(
            core="media_core:ScriptedCore",
            options={
                "replies": [template.text_ids(text + "<|im_end|>") for text in texts],
                "vocab_size": template.vocab_size,
            },
        ),
        placement=LocalProcessPlacement(),
        lengths=LengthsConfig(prompt=2048, response=4096),
        agent=AgentConfig(tool_format="hermes", max_assistant_turns=turns),
        scheduling=SchedulingConfig(samples_per_prompt=1),
    )


def prompt_of(uid: str, content: bytes) -> Prompt:
    """One that begins with an image."""
    parts = [{"type": "text", "text": "Look: "}, {"type": "image", "image": content}]
    return Prompt(messages=[{"role": "user", "content": parts}], uid=uid)


async def loop_and_wire(folder: str, count: int, turns: int) -> dict[str, Any]:
    """What trajectories with an image in every turn cost."""
    files = [picture(number, "JPEG") for number in range((count + 2) * turns)]
    shown = iter(files[count:])

    @function_tool
    async def look() -> ToolResult:
        """Look again."""
        return ToolResult("Here:", images=[next(shown)])

    async with rollout.open_rollout(config_of(folder, turns), tools=[look]) as runtime:
        for uid in ("first", "second"):  # what is imported late has been imported then
            await runtime.generate([prompt_of(uid, picture(10**6, "JPEG"))])
        before = media_bytes(runtime)
        used: set[bytes] = set()
        started = time.perf_counter()
        batch = await runtime.generate([prompt_of(str(n), files[n]) for n in range(count)])
        seconds = time.perf_counter() - started
        sent = media_bytes(runtime) - before
        for trajectory in batch.trajectories:
            assert trajectory.outcome.value == "completed", trajectory
            own = [placed.medium.content for placed in trajectory.transcript.media]
            assert len(own) == turns, len(own)
            used.update(own)
    distinct = sum(map(len, used))
    return {
        "loop_block_ms_max": round(1000 * batch.metrics["loop_lag_s/max"], 2),
        "bytes_on_wire_ratio": round(sent / distinct, 4),
        "details": {
            "starved_ms_max": round(1000 * batch.metrics.get("loop_starved_s/max", 0.0), 1),
            "trajectories": count,
            "turns": turns,
            "seconds": round(seconds, 1),
            "media_mb": round(distinct / 1e6, 1),
        },
    }


def media_bytes(runtime: Any) -> int:
    """That the replica has been sent."""
    return sum(replica.media_bytes for replica in runtime.engines.statistics())


async def group_memory(folder: str) -> dict[str, Any]:
    """Bytes that a group which shares an image holds, over those of a member alone."""
    held: dict[int, int] = {}
    content = picture(7, "PNG")
    async with rollout.open_rollout(config_of(folder, 1)) as runtime:
        for samples in (1, GROUP):
            batch = await runtime.generate([prompt_of("group", content)], samples=samples)
            held[samples] = bytes_of(batch)
    return {
        "group_memory_ratio": round(held[GROUP] / held[1], 3),
        "details": {"member_mb": round(held[1] / 1e6, 1)},
    }


def bytes_of(batch: RolloutBatch) -> int:
    """Of all that a trainer holds of a batch; what is shared counts once."""
    rows = [batch.multi_modal_inputs[row] for row in range(len(batch.samples))]
    tensors = [*batch.tensors.values(), *(value for row in rows for value in row.values())]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if hasattr(tensor, "untyped_storage")
    }
    media = {
        id(placed.medium.content): len(placed.medium.content)
        for trajectory in batch.trajectories
        for placed in trajectory.transcript.media
    }
    return sum(storages.values()) + sum(media.values())


async def measure(count: int, turns: int) -> dict[str, Any]:
    """All figures."""
    with tempfile.TemporaryDirectory() as scratch:
        small = vision_models.save("qwen2_5_vl", Path(scratch, "small"))
        whole = vision_models.save("qwen2_5_vl", Path(scratch, "whole"), max_pixels=WIDTH * HEIGHT)
        print("loop and wire …", file=sys.stderr, flush=True)
        figures = await loop_and_wire(small, count, turns)
        print("memory of a group …", file=sys.stderr, flush=True)
        memory = await group_memory(whole)
    details = figures.pop("details") | memory.pop("details")
    return {**figures, **memory, "details": details}


def main() -> None:
    """Measure, and say what was promised and not reached."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="16 trajectories of 3 turns")
    options = parser.parse_args()
    count, turns = (16, 3) if options.quick else (64, 8)
    figures = anyio.run(measure, count, turns, backend="trio")
    for name, most in PROMISED.items():
        if figures[name] > most:
            print(f"{name}: {figures[name]}; promised {most} at most", file=sys.stderr)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
