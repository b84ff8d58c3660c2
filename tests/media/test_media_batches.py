"""Batches of rows with images and videos: their tensors, positions, and files."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest
import torch

import rollout
from media_material import CALL, config_of, frames, image, picture, template_of
from rollout import Prompt, RolloutBatch, RolloutError, ToolResult, function_tool, load_trajectories
from rollout.batch import collate
from rollout.chat.messages import as_messages
from rollout.config import MediaConfig

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not find_spec("torchvision"), reason="torchvision is not installed"),
]


@pytest.fixture
def anyio_backend() -> str:
    """The machine's own clock: media are read in threads."""
    return "trio"


@function_tool
async def show() -> Any:
    """Show."""
    return ToolResult("see", images=[picture(33, 81)], videos=[frames(4)])


async def made(folder: Path, samples: int = 2, **media: Any) -> RolloutBatch:
    config = attrs.evolve(config_of(folder, (CALL, "I see")), media=MediaConfig(**media))
    contents: list[Any] = [image(picture()), "words alone"]
    prompts = [Prompt(messages=[{"role": "user", "content": each}]) for each in contents]
    async with rollout.open_rollout(config, tools=[show]) as runtime:
        return await runtime.generate(prompts, samples=samples)


async def test_row_has_the_inputs_of_its_media(folder: Path) -> None:
    batch = await made(folder)
    processor = template_of(folder).processor
    assert processor is not None
    assert len(batch.multi_modal_inputs) == len(batch) == 4
    for row, trajectory in enumerate(batch.trajectories):
        media = [each.medium for each in trajectory.transcript.media]
        assert [medium.kind for medium in media] == ["image"] * (2 if row < 2 else 1) + ["video"]
        inputs = batch.multi_modal_inputs[row]
        expected = processor.features(media)
        assert inputs.keys() == expected.keys() >= {"pixel_values", "video_grid_thw"}
        for name, value in expected.items():
            assert np.array_equal(np.asarray(value), np.asarray(inputs[name]))
    first, second = batch.multi_modal_inputs[:2]
    assert first is second  # members that saw the same share it


@pytest.mark.parametrize("count", [3, 4])
async def test_positions_are_those_of_the_model(folder: Path, count: Any) -> None:
    batch = await made(folder, position_rows=count)
    processor = template_of(folder).processor
    assert processor is not None
    trajectories, lengths = batch.trajectories, config_of(folder).lengths
    options: Any = {"processor": processor, "position_rows": count}
    packed = collate(trajectories, lengths, 0, "packed", **options).tensors
    padded = batch.tensors["position_ids"]
    assert padded.shape == (4, count, 512 + 512)
    for row, trajectory in enumerate(trajectories):
        transcript = trajectory.transcript
        is_token = batch.tensors["attention_mask"][row].bool()
        assert not padded[row][:, ~is_token].any()
        assert packed["input_ids"][row].tolist() == transcript.ids().tolist()
        own = processor.position_ids(transcript.ids(), transcript.media)
        for found in (padded[row][:, is_token].numpy(), packed["position_ids"][row].numpy().T):
            assert np.array_equal(found[-3:], own)
            if count == 4:
                assert found[0].tolist() == list(range(len(transcript)))


async def test_saved_batch_has_each_medium_once_and_is_loaded_whole(
    folder: Path, tmp_path: Path
) -> None:
    batch = await made(folder)
    batch.save(tmp_path)
    contents = {
        each.medium.digest: each.medium.content
        for trajectory in batch.trajectories
        for each in trajectory.transcript.media
    }
    size = sum(map(len, contents.values()))
    saved = (tmp_path / "media.safetensors").stat().st_size
    assert size < saved < size + 2000
    assert (tmp_path / "trajectories.jsonl").stat().st_size < 60_000
    processor = template_of(folder).processor
    loaded = RolloutBatch.load(tmp_path, processor=processor)
    for row, (one, other) in enumerate(zip(batch.trajectories, loaded.trajectories, strict=True)):
        assert one.transcript.media == other.transcript.media
        assert [tuple(m.parts) for m in one.messages] == [tuple(m.parts) for m in other.messages]
        begun = other.messages[: len(other.prompt.messages)]
        assert [as_messages([m]) for m in other.prompt.messages] == [[m] for m in begun]
        shown = [p.content for m in begun for p in m.parts if not isinstance(p, str)]
        assert all(shown)
        assert bool(shown) == (row < 2)
        assert [each.medium.content for each in other.transcript.media] == [
            contents[each.medium.digest] for each in one.transcript.media
        ]
        inputs = loaded.multi_modal_inputs[row]
        assert all(
            torch.equal(torch.as_tensor(inputs[n]), torch.as_tensor(v))
            for n, v in batch.multi_modal_inputs[row].items()
        )
    with pytest.raises(RolloutError, match="no processor is known; give collate or RolloutBatch"):
        RolloutBatch.load(tmp_path).multi_modal_inputs[0]
    bare = collate(load_trajectories(tmp_path), config_of(folder).lengths, 0)
    with pytest.raises(RolloutError, match="the batch lacks the content of <Media image"):
        bare.save(tmp_path / "bare")
    assert not (tmp_path / "bare").exists()
    path = tmp_path / "media.safetensors"
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 1
    path.write_bytes(changed)
    with pytest.raises(RolloutError, match=r"media\.safetensors is not the file that meta.json"):
        RolloutBatch.load(tmp_path)
    collate([], config_of(folder).lengths, 0).save(tmp_path, overwrite=True)
    assert not path.exists()
