"""The embedded engine with images and videos: the tokens of transformers, whatever else runs."""

from __future__ import annotations

import copy
import itertools
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import media_material
import vision_models
from vision_models import picture, png

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from rollout.chat.processors import MediaProcessor
from rollout.media import Media, PlacedMedia, decode
from test_transformers_core import asked, collect, collect_all, opened

pytest.importorskip("torchvision", reason="processors of transformers for videos need it")
pytestmark = pytest.mark.anyio
FAMILIES = (*vision_models.FAMILIES, "llava_onevision")
VIDEO_FAMILIES = ("qwen2_5_vl", "qwen3_vl")


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Real time: the model works in a real thread."""
    return request.param


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The directory of each family's small model, made when it is first asked for."""
    made: dict[str, str] = {}

    def directory(family: str) -> str:
        if family not in made:
            if family == "smolvlm":
                pytest.importorskip("num2words", reason="SmolVLM's processor needs it")
            folder = tmp_path_factory.mktemp(family)
            if family == "llava_onevision":
                made[family] = str(media_material.write_model(family, folder, with_weights=True))
            else:
                made[family] = vision_models.save(family, folder)
        return made[family]

    return directory


def image(number: int, width: int = 80, height: int = 60) -> Media:
    content = png(number, width, height)
    return Media(kind="image", content=content, mime="image/png", width=width, height=height)


def video(number: int, frames: int = 6, width: int = 64, height: int = 48) -> Media:
    from rollout.media.decoding import pack_frames
    from rollout.medium import FRAMES_MIME

    pixels = np.stack([np.asarray(picture(number * 100 + n, width, height)) for n in range(frames)])
    return Media(
        kind="video",
        content=pack_frames(pixels),
        mime=FRAMES_MIME,
        width=width,
        height=height,
        indices=tuple(range(frames)),
        total_frames=frames,
        fps=4.0,
    )


class Reference:
    """What the model's own processor and `generate` of transformers say."""

    def __init__(self, directory: str) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
        self.processor = AutoProcessor.from_pretrained(directory)

    def inputs(self, *parts: str | Media) -> dict[str, torch.Tensor]:
        """One user's message of texts and media, rendered and read in one call."""
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": part.kind}
            for part in parts
        ]
        text = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        media = [part for part in parts if isinstance(part, Media)]
        from PIL import Image

        given: dict[str, Any] = {}
        images = [Image.fromarray(decode(each)) for each in media if each.kind == "image"]
        videos = [each for each in media if each.kind == "video"]
        if images:
            given["images"] = [images]
        if videos:
            given["videos"] = [decode(each) for each in videos]
            given["video_metadata"] = [
                {
                    "total_num_frames": v.total_frames,
                    "fps": v.fps,
                    "frames_indices": list(v.indices),
                }
                for v in videos
            ]
            given["do_sample_frames"] = False
        return dict(self.processor(text=[text], return_tensors="pt", **given))

    def greedy(self, inputs: dict[str, torch.Tensor], count: int) -> list[int]:
        length = inputs["input_ids"].shape[1]
        tokens = self.model.generate(
            **copy.deepcopy(inputs), max_new_tokens=count, do_sample=False, eos_token_id=[]
        )
        return tokens[0, length:].tolist()

    def ratios(self, inputs: dict[str, torch.Tensor], media: Any, answer: Any) -> np.ndarray:
        """Of the probabilities that were answered, to those of a plain forward pass over the row.

        Random weights may sample a placeholder, which no forward pass takes: it ends before.
        """
        reader = MediaProcessor(self.processor, self.model.config)
        placeholders = set(reader.placeholder_ids.values())
        ids = list(itertools.takewhile(lambda token: token not in placeholders, answer.ids))
        prompt = inputs["input_ids"][0].tolist()
        row = np.array(prompt + ids)
        positions = reader.position_ids(row, reader.places(prompt, media))
        plain = {k: v for k, v in inputs.items() if k not in ("input_ids", "attention_mask")}
        plain.pop("mm_token_type_ids", None)
        with torch.inference_mode():
            where = torch.from_numpy(positions)
            logits = self.model(
                input_ids=torch.from_numpy(row)[None],
                attention_mask=torch.ones((1, len(row)), dtype=torch.int64),
                position_ids=where[:, None] if len(where) == 3 else where,
                **plain,
            ).logits[0]
        scores = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        wanted = scores[torch.arange(len(ids)), torch.tensor(ids, dtype=torch.int64)].numpy()
        return np.exp(np.array(answer.log_probs[: len(ids)]) - wanted)


def ask(
    reference: Reference,
    inputs: dict[str, torch.Tensor],
    *media: Media,
    count: int = 16,
    said: Sequence[int] = (),
) -> Any:
    """A request about a prompt with media, and what was said after it."""
    ids = inputs["input_ids"][0].tolist()
    request = asked([*ids, *said], max_new_tokens=count, ignore_eos=True)
    request.media = MediaProcessor(reference.processor).places(ids, media)
    return request


@pytest.mark.parametrize("family", FAMILIES)
async def test_core_images_greedy_gives_tokens_of_generate(models: Any, family: str) -> None:
    reference = Reference(models(family))
    a, b = image(1), image(2, 130, 50)
    inputs = reference.inputs("Look: ", a, " and ", b, " Which?")
    async with opened(models(family)) as core:
        assert "image" in core.info.modalities
        answer = await collect(core, ask(reference, inputs, a, b))
    assert answer.ids == reference.greedy(inputs, 16)
    ratios = reference.ratios(inputs, (a, b), answer)
    assert abs(ratios.mean() - 1) < 1e-4
    assert np.abs(ratios - 1).max() < 1e-3


@pytest.mark.parametrize("family", VIDEO_FAMILIES)
async def test_core_video_and_image_greedy_gives_tokens_of_generate(
    models: Any, family: str
) -> None:
    reference = Reference(models(family))
    a, b = video(1), image(3)
    inputs = reference.inputs("First ", a, " then ", b, "?")
    async with opened(models(family)) as core:
        assert core.info.modalities == ("image", "video")
        answer = await collect(core, ask(reference, inputs, a, b))
    assert answer.ids == reference.greedy(inputs, 16)
    assert np.abs(reference.ratios(inputs, (a, b), answer) - 1).max() < 1e-3


@pytest.mark.parametrize("family", FAMILIES)
async def test_core_many_prompts_at_once_each_gives_its_own_tokens(
    models: Any, family: str
) -> None:
    """Text beside images, prompts in several parts, the same image in two of them."""
    reference = Reference(models(family))
    big = image(4, 400, 300)
    cases = [
        (("only text " * 30,), ()),
        (("x" * 300, image(1), "y" * 300), (image(1),)),
        ((image(1), "same picture first"), (image(1),)),
        ((image(2), image(1), image(2)), (image(2), image(1), image(2))),
        ((big, "big"), (big,)),
    ]
    prompts = [(reference.inputs(*parts), media) for parts, media in cases]
    async with opened(models(family), max_running=3) as core:
        answers = await collect_all(
            core, [ask(reference, inputs, *media) for inputs, media in prompts]
        )
    for (inputs, _), answer in zip(prompts, answers, strict=True):
        assert answer.ids == reference.greedy(inputs, 16)


@pytest.mark.parametrize("family", FAMILIES)
async def test_core_next_turn_reuses_prefix_and_another_image_does_not(
    models: Any, family: str
) -> None:
    """Two images have the same placeholder ids: what was computed of one is not the other's."""
    reference = Reference(models(family))
    a, b = image(5), image(6)
    of_a = reference.inputs("words before it, long enough to share: ", a, " What?")
    of_b = reference.inputs("words before it, long enough to share: ", b, " What?")
    assert torch.equal(of_a["input_ids"], of_b["input_ids"])
    async with opened(models(family)) as core:
        first = await collect(core, ask(reference, of_a, a))
        other = await collect(core, ask(reference, of_b, b))
        again = await collect(core, ask(reference, of_a, a))
        placeholder = MediaProcessor(reference.processor).placeholder_ids["image"]
        said = [*first.ids, placeholder, 40, 41, 42]  # the model sampled one, which shows nothing
        later = await collect(core, ask(reference, of_a, a, said=said))
    assert first.ids == again.ids == reference.greedy(of_a, 16)
    assert other.ids == reference.greedy(of_b, 16)
    assert other.log_probs != first.log_probs
    for inputs, medium, answer in ((of_a, a, again), (of_b, b, other)):
        assert np.abs(reference.ratios(inputs, (medium,), answer) - 1).max() < 1e-3
    length = of_a["input_ids"].shape[1]
    at = int(np.flatnonzero(of_a["input_ids"][0] == placeholder)[0])
    assert other.last.cached_tokens <= at
    assert again.last.cached_tokens == length - 1
    assert later.last.cached_tokens >= length - 1
    assert later.last.finish_reason == "length"


async def test_core_bad_media_end_their_own_request_only(models: Any) -> None:
    reference = Reference(models("qwen2_5_vl"))
    a = image(1)
    inputs = reference.inputs(a, "What?")
    broken = Media(
        kind="image", content=png(1)[:200], mime="image/png", width=80, height=60, digest="b" * 64
    )
    async with opened(models("qwen2_5_vl")) as core:
        good, cut, few, none = await collect_all(
            core,
            [
                ask(reference, inputs, a),
                ask(reference, inputs, broken),
                short(ask(reference, inputs, a)),
                asked(inputs["input_ids"][0].tolist(), ignore_eos=True),
            ],
        )
    assert good.ids == reference.greedy(inputs, 16)
    assert cut.last.finish_reason == "error"
    assert "media of the prompt: a picture that cannot be decoded" in cut.last.error
    assert few.last.finish_reason == "error"
    assert "media of the prompt: 3 placeholders in the prompt for" in few.last.error
    assert none.last.finish_reason == "length"  # placeholders are ids like others, where none is


def short(request: Any) -> Any:
    """With a place that is too small for its medium."""
    (placed,) = request.media
    request.media = (PlacedMedia(placed.medium, placed.start, 3),)
    return request


async def test_core_aborted_before_its_media_are_read_says_so(models: Any) -> None:
    reference = Reference(models("qwen2_5_vl"))
    pictures = [image(n, 300, 200) for n in range(10, 20)]
    requests = [ask(reference, reference.inputs(each, "?"), each, count=500) for each in pictures]
    async with opened(models("qwen2_5_vl"), stream_interval=1) as core:
        import anyio

        answers: list[Any] = []

        async def one(request: Any) -> None:
            answers.append(await collect(core, request))

        async with anyio.create_task_group() as tasks:
            for request in requests:
                tasks.start_soon(one, request)
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            for request in requests:
                core.abort_nowait(request.request_id)
    assert {answer.last.finish_reason for answer in answers} == {"abort"}


async def test_core_other_weights_read_media_again(models: Any, tmp_path: Path) -> None:
    from rollout.engine.weights import DiskWeights

    other = vision_models.save("qwen2_5_vl", tmp_path / "other", seed=5)
    a = image(1)
    reference = Reference(models("qwen2_5_vl"))
    inputs = reference.inputs(a, "What?")
    async with opened(models("qwen2_5_vl")) as core:
        before = await collect(core, ask(reference, inputs, a))
        await core.update_weights(7, DiskWeights(other))
        after = await collect(core, ask(reference, inputs, a))
    assert after.ids == Reference(other).greedy(inputs, 16) != before.ids
    assert after.last.weight_version == 7


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache of the hub, of which nothing is outside; see conftest for being offline."""
    import huggingface_hub.constants

    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.setenv(name, str(tmp_path))
        monkeypatch.setattr(huggingface_hub.constants, name, str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def cached_in(hub: Path, name: str, directory: str) -> str:
    """The files of a directory under a hub name; returns the name."""
    import shutil

    repository, commit = hub / f"models--{name.replace('/', '--')}", "0" * 40
    shutil.copytree(directory, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    return name


async def test_core_and_driver_read_media_of_a_model_that_is_in_the_hubs_cache(
    models: Any, hub: Path
) -> None:
    from rollout.config import ModelConfig, RolloutConfig
    from rollout.engine.pool.model_template import load_model_template

    name = cached_in(hub, "owner/tiny-vl", models("qwen2_5_vl"))
    reference = Reference(models("qwen2_5_vl"))
    a = image(1)
    inputs = reference.inputs("Look: ", a, "?")
    template = load_model_template(RolloutConfig(model=ModelConfig(path=name)))
    assert template.processor is not None
    assert template.processor.kinds == {"image", "video"}
    assert template.processor.position_rows == 3
    async with opened(name) as core:
        assert core.info.modalities == ("image", "video")
        answer = await collect(core, ask(reference, inputs, a))
    assert answer.ids == reference.greedy(inputs, 16)


def test_processor_whose_positions_need_a_configuration_is_refused_without_one(
    models: Any, tmp_path: Path
) -> None:
    from rollout import MediaError
    from rollout.chat.processors import load_media_processor

    for name, needs in (("qwen2_5_vl", True), ("llava_onevision", False)):
        bare = tmp_path / name
        shutil.copytree(models(name), bare, ignore=lambda *_: ["config.json"])
        if not needs:
            assert load_media_processor(str(bare)) is not None
            continue
        with pytest.raises(MediaError, match=r"by config\.json, which is not in"):
            load_media_processor(str(bare))


async def test_driver_text_model_in_the_hubs_cache_has_no_processor(
    tmp_path: Path, hub: Path
) -> None:
    import transformers

    from rollout.chat import load_media_processor
    from test_transformers_core import TINY, saved

    text = saved(transformers.LlamaConfig(**TINY), tmp_path / "text")
    assert load_media_processor(cached_in(hub, "owner/text", text)) is None


async def test_core_text_model_says_that_it_takes_no_images(tmp_path: Path) -> None:
    import transformers

    from test_transformers_core import TINY, saved

    directory = saved(transformers.LlamaConfig(**TINY), tmp_path)
    async with opened(directory) as core:
        assert core.info.modalities == ()
        request = asked([5, 6, 7])
        request.media = (PlacedMedia(image(1), 0, 1),)
        answer = await collect(core, request)
    assert answer.last.finish_reason == "error"
    assert answer.last.error == (
        "transformers takes no images; it takes text only: the model reads text only"
    )
