"""What verl's own worker makes of a row with images and videos: the tensors of our row."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if not find_spec("torchvision"):
    pytest.skip("processors of transformers need torchvision", allow_module_level=True)

from verl_side import AgentLoopOutput, AgentLoopWorker, torch

import vision_models
from rollout import Outcome, Trajectory
from rollout.chat import Transcript, load_chat_template, load_media_processor
from rollout.config import LengthsConfig, MediaConfig
from rollout.integrations.trainer_row import row_of
from rollout.integrations.verl.data_proto import _padded, _tensors
from rollout.integrations.verl.outputs import _multi_modal_data
from rollout.media.parts import MediaSource
from rollout.media.reading import read_media

if TYPE_CHECKING:
    from pathlib import Path

    from rollout.chat import ChatTemplate


def trajectory_of(template: ChatTemplate) -> Trajectory:
    """An image and a video in the prompt, an image in a tool's answer, and two turns."""
    config = MediaConfig()
    pixels = [vision_models.picture(n, 64, 48) for n in range(6)]
    image = read_media(MediaSource("image", vision_models.picture(1)), config)
    video = read_media(MediaSource("video", pixels, fps=4.0), config)
    shown = read_media(MediaSource("image", vision_models.picture(2, 130, 50)), config)
    asked = [{"role": "user", "content": [image, "what? ", video]}]
    transcript = Transcript()
    ids = template.prompt_ids(asked)
    transcript.append_prompt(ids, media=template.places_of(ids, [image, video]))
    said = [*template.text_ids("ok"), *template.end_ids()]
    for turn in range(2):
        transcript.append_generated(
            said, [-0.5] * len(said), versions=[(1, len(said))], finish_reason="stop"
        )
        if not turn:
            told = [{"role": "tool", "content": [shown, "see"]}]
            ids = template.observation_ids(told, after=said, before=[image, video])
            transcript.append_observation(ids, media=template.places_of(ids, [shown]))
    return Trajectory(
        uid="p", group=0, member=0, outcome=Outcome.COMPLETED, transcript=transcript, reward=1.0
    )


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_verls_worker_makes_the_inputs_and_positions_of_our_row(
    tmp_path: Path, family: str
) -> None:
    from transformers import AutoModelForImageTextToText
    from verl.utils import hf_processor

    directory = vision_models.save(family, tmp_path)
    processor = load_media_processor(directory)
    assert processor is not None
    trajectory = trajectory_of(load_chat_template(directory, processor=processor))
    row = row_of(trajectory, 0, is_last=True)
    worker: Any = object.__new__(AgentLoopWorker)
    worker.processor = hf_processor(directory)
    worker.tokenizer = worker.processor.tokenizer
    worker.config = SimpleNamespace(data={})
    output = AgentLoopOutput.model_construct(
        prompt_ids=row.prompt_ids.tolist(),
        response_ids=row.response_ids.tolist(),
        response_mask=row.sampled.astype(int).tolist(),
        multi_modal_data=_multi_modal_data(row),
        mm_processor_kwargs={},
        num_turns=4,
        metrics=None,
        extra_fields={},
    )
    tensors = _tensors([row], LengthsConfig(prompt=400, response=200), pad=0)
    padded = _padded(worker, row, output, tensors)
    media = [each.medium for each in row.media]
    expected = processor.features(media)
    inputs = dict(padded.multi_modal_inputs)
    for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
        assert torch.equal(inputs[name], expected[name]), name
    kept = tensors["attention_mask"][0].bool()
    ids = tensors["input_ids"][0][kept]
    positions = processor.position_ids(ids.numpy(), row.media)
    assert torch.equal(padded.position_ids[0, 1:][:, kept], torch.from_numpy(positions))
    assert padded.position_ids[0, 0][kept].tolist() == list(range(len(ids)))
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    taken = {name: inputs[name] for name in expected if name in inputs and "second" not in name}
    with torch.inference_mode():
        whole = model(
            input_ids=tensors["input_ids"],
            attention_mask=tensors["attention_mask"],
            position_ids=padded.position_ids[:, 1:].transpose(0, 1),
            **taken,
        ).logits[0, kept]
        ours = model(
            input_ids=ids[None],
            position_ids=torch.from_numpy(positions)[:, None],
            **{name: expected[name] for name in taken},
        ).logits[0]
    assert torch.allclose(whole, ours, atol=1e-4)
