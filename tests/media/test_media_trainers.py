"""Rows with images and videos in the fields of trainers, or refused by name."""

from __future__ import annotations

import math
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest
import torch

from media_material import encoded, frames, picture, template_of
from rollout import Outcome, PromptError, RolloutError, Trajectory
from rollout.chat import Transcript
from rollout.config import LengthsConfig, MediaConfig
from rollout.integrations.openrlhf.response import prompt_of_arguments, response_of
from rollout.integrations.prompt_media import with_media
from rollout.integrations.row_media import images_of, videos_of
from rollout.integrations.skyrl.output import generator_output
from rollout.integrations.slime.samples import fill, prompts_of
from rollout.integrations.trainer_rows import TrainerRow, trainer_rows
from rollout.integrations.trl.prompt_images import refuse_other_media
from rollout.integrations.verifiers.samples import training_samples
from rollout.media.parts import MediaSource
from rollout.media.reading import read_media

if TYPE_CHECKING:
    from pathlib import Path

    from rollout.chat import ChatTemplate, MediaProcessor
    from rollout.media import Media

pytestmark = pytest.mark.skipif(not find_spec("torchvision"), reason="torchvision is not installed")


@pytest.fixture
def template(folder: Path) -> ChatTemplate:
    return template_of(folder)


@pytest.fixture
def processor(template: ChatTemplate) -> MediaProcessor:
    assert template.processor is not None
    return template.processor


def medium(kind: Any, value: Any) -> Media:
    return read_media(MediaSource(kind, value), MediaConfig())


def row_of(template: ChatTemplate, *tool_media: Media) -> TrainerRow:
    """A row that shows a picture in its prompt, and these after its first turn."""
    shown = medium("image", picture())
    asked = [{"role": "user", "content": [{"type": "image", "image": shown}, "what?"]}]
    transcript = Transcript()
    ids = template.prompt_ids(asked)
    transcript.append_prompt(ids, media=template.places_of(ids, [shown]))
    said = [*template.text_ids("ok"), *template.end_ids()]
    for turn in range(2):
        transcript.append_generated(
            said, [-0.5] * len(said), versions=[(1, len(said))], finish_reason="stop"
        )
        if tool_media and not turn:
            parts = [{"type": each.kind, each.kind: each} for each in tool_media]
            told = [{"role": "tool", "content": [*parts, "see"]}]
            ids = template.observation_ids(told, after=said, before=[shown])
            transcript.append_observation(ids, media=template.places_of(ids, tool_media))
    trajectory = Trajectory(
        uid="p", group=0, member=0, outcome=Outcome.COMPLETED, transcript=transcript, reward=1.0
    )
    (row,) = trainer_rows([trajectory], eos_token_id=0).rows
    return row


def assert_same(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.array_equal(np.asarray(value), np.asarray(found[name])), name


def test_skyrl_gets_pixel_values_and_grids(
    template: ChatTemplate, processor: MediaProcessor
) -> None:
    row = row_of(template, medium("image", picture(33, 81)))
    words = attrs.evolve(row, media=())
    output = generator_output([row, words], None, [0, 1], {}, processor=processor)
    expected = processor.features([each.medium for each in row.media])
    assert torch.equal(output["pixel_values"][0], expected["pixel_values"])
    assert output["image_grid_thw"][0].shape == (2, 3)
    assert output["pixel_values"][1] is None
    assert generator_output([words], None, [0], {})["pixel_values"] is None
    with pytest.raises(RolloutError, match="video_grid_thw, for which SkyRL has no field"):
        filmed = row_of(template, medium("video", frames(4)))
        generator_output([filmed], None, [0], {}, processor=processor)


class Sample(SimpleNamespace):
    """As slime's, in what `fill` uses of it."""

    Status = {"COMPLETED": "completed"}  # noqa: RUF012

    def append_response_tokens(self, **_: Any) -> None:
        """Nothing of interest."""


def sample(**fields: Any) -> Any:
    given = {"prompt": "<image>what?", "metadata": {}, "label": None, "group_index": 0, "index": 0}
    return Sample(**{**given, "multimodal_inputs": None, "rollout_id": None, **fields})


def test_slime_gets_media_and_their_inputs(
    template: ChatTemplate, processor: MediaProcessor
) -> None:
    row = row_of(template, medium("video", frames(4)))
    given = sample(multimodal_inputs={"images": [picture()]})
    filled = fill(given, row, template.decode, processor=processor)
    (shown,) = filled.multimodal_inputs["images"]
    assert np.array_equal(np.asarray(shown), np.asarray(picture()))
    ((film, facts),) = filled.multimodal_inputs["videos"]
    assert np.array_equal(film.numpy().transpose(0, 2, 3, 1), frames(4))
    assert facts["frames_indices"] == [0, 1, 2, 3]
    assert_same(
        filled.multimodal_train_inputs, processor.features([each.medium for each in row.media])
    )
    (prompt,) = prompts_of([given], {}).prompts
    content: Any = prompt.messages[0]["content"]  # type: ignore[index]
    assert content == [
        {"type": "image", "image": picture()},
        {"type": "text", "text": "what?"},
    ]
    with pytest.raises(PromptError, match="audio is not supported"):
        prompts_of([sample(multimodal_inputs={"audio": [b""]})], {})


def test_openrlhf_gets_the_inputs_of_media(
    template: ChatTemplate, processor: MediaProcessor
) -> None:
    row = row_of(template, medium("image", picture(33, 81)))
    response = response_of(
        row, prompt="p", label=None, images=["x"], has_log_probs=True, processor=processor
    )
    expected = processor.features([each.medium for each in row.media])
    assert_same(response["mm_train_inputs"], expected)
    params = SimpleNamespace(temperature=1.0)
    prompt = prompt_of_arguments("what?", None, params, None, [encoded(picture())])
    parts: Any = prompt.messages[0]["content"]  # type: ignore[index]
    assert [each["type"] for each in parts] == ["image", "text"]


def test_prime_rl_gets_tensors_and_kinds_of_ids(
    template: ChatTemplate, processor: MediaProcessor
) -> None:
    types = SimpleNamespace(TrainingSample=SimpleNamespace, EncodedTensor=SimpleNamespace)
    row = row_of(template, medium("video", frames(4)))
    (made,) = training_samples([row], env_name="e", types=types, processor=processor)
    expected = processor.features([each.medium for each in row.media])
    for name, value in expected.items():
        held = made.mm_kwargs[name]
        found = np.frombuffer(held.data, held.dtype).reshape(held.shape)
        assert np.array_equal(found, np.asarray(value))
    kinds = made.mm_token_type_ids
    assert len(kinds) == len(made.token_ids)
    for kind, number in (("image", 1), ("video", 2)):
        places = [at for at, each in enumerate(kinds) if each == number]
        token = processor.placeholder_ids[kind]  # type: ignore[index]
        assert places == [at for at, each in enumerate(made.token_ids) if each == token]


def test_trl_shows_images_of_its_prompts_alone(template: ChatTemplate) -> None:
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    refuse_other_media(row_of(template), asked)
    for kind, value, said in (
        ("image", picture(), "images after its prompt, for which TRL has no field"),
        ("video", frames(4), "videos, for which TRL has no field"),
    ):
        with pytest.raises(RolloutError, match=said):
            refuse_other_media(row_of(template, medium(kind, value)), asked)
    with pytest.raises(RolloutError, match="shows 1 images and TRL's prompt has 0"):
        refuse_other_media(row_of(template), "what?")


def test_verl_gets_media_as_its_own_loops_give_them(template: ChatTemplate) -> None:
    media = [each.medium for each in row_of(template, medium("video", frames(4))).media]
    (shown,), ((film, facts),) = images_of(media), videos_of(media)
    assert np.array_equal(np.asarray(shown), np.asarray(picture()))
    assert film.shape == (4, 3, 56, 56)
    assert facts == {"fps": 24.0, "frames_indices": [0, 1, 2, 3], "total_num_frames": 4}


def test_row_that_would_be_cut_in_a_picture_is_refused(template: ChatTemplate) -> None:
    row = row_of(template)
    lengths = LengthsConfig(prompt=len(row.prompt_ids) - 1, response=99)
    with pytest.raises(RolloutError, match="has images or videos and cannot be cut to"):
        trainer_rows([row.trajectory], eos_token_id=0, lengths=lengths)
    shorter = LengthsConfig(prompt=999, response=3)
    (cut,) = trainer_rows(
        [row_of(template, medium("image", picture())).trajectory], eos_token_id=0, lengths=shorter
    ).rows
    assert len(cut.media) == 1
    assert not math.isnan(cut.reward)


def test_media_of_columns_stand_where_the_prompt_has_places() -> None:
    one, two = picture(), picture(28, 28)
    image = [{"type": "image", "image": each} for each in (one, two)]
    words = [{"type": "text", "text": each} for each in ("a", "b")]
    assert with_media("a", [one]) == [{"role": "user", "content": [image[0], words[0]]}]
    assert with_media([{"role": "user", "content": "<image>a<image>b"}], [one, two]) == [
        {"role": "user", "content": [image[0], words[0], image[1], words[1]]}
    ]
    empty = [{"role": "user", "content": [words[0], {"type": "image"}, words[1]]}]
    assert with_media(empty, [two]) == [{"role": "user", "content": [words[0], image[1], words[1]]}]
    assert with_media("a", []) == "a"
    with pytest.raises(PromptError, match="the prompt has 2 places for 1 images"):
        with_media("<image><image>", [one])
