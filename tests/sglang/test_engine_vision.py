"""Images and videos through the real SGLang on a CPU: token for token what transformers says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))
from asking import asked, collect
from test_engine_core import has_sglang, opened

import vision_models
from rollout.media.processor import MediaProcessor
from vision_reference import Reference, image, video

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.engine.cores.sglang import SGLangCore
    from rollout.media import Media

pytestmark = [pytest.mark.anyio, has_sglang]


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(family: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return vision_models.save(family, tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def reference(model: str) -> Reference:
    return Reference(model)


@pytest.fixture(scope="module")
async def core(model: str) -> AsyncIterator[SGLangCore]:
    async with opened(model, max_running=8, stream_interval=4) as core:
        yield core


def ask(
    reference: Reference, inputs: dict[str, torch.Tensor], *media: Media, count: int = 16
) -> Any:
    ids = inputs["input_ids"][0].tolist()
    placed = MediaProcessor(reference.processor).places(ids, media)
    return asked(ids, request={"media": placed}, max_new_tokens=count, ignore_eos=True)


async def test_core_images_greedy_gives_tokens_of_generate(
    core: SGLangCore, reference: Reference
) -> None:
    a, b = image(1), image(2, 130, 50)
    many = tuple(image(n, 40 + 8 * n, 100) for n in range(12))
    for parts, media in (
        (("Look: ", a, " and ", b, " Which?"), (a, b)),
        (("Look: ", b, " and ", a, " Which?"), (b, a)),
        (("Only words",), ()),
        (many, many),
    ):
        inputs = reference.inputs(*parts)
        answer = await collect(core, ask(reference, inputs, *media))
        assert answer.ids == reference.greedy(inputs, 16)
        assert np.abs(reference.ratios(inputs, media, answer) - 1).max() < 1e-3


async def test_core_videos_beside_images_greedy_gives_tokens_of_generate(
    core: SGLangCore, reference: Reference
) -> None:
    """SGLang's encoder of Qwen2.5-VL attends across the frames that it is told are one video."""
    assert core.info.capabilities.modalities == ("image", "video")
    a, b, c = video(1), image(3), video(2, 10, 90, 70)
    for parts, media in (
        ((a, "?"), (a,)),
        (("First ", a, " then ", b, "?"), (a, b)),
        (("First ", c, " then ", a, " and ", b, " and ", c, "?"), (c, a, b, c)),
        (("First ", b, " then ", video(4, 2), video(5, 2)), (b, video(4, 2), video(5, 2))),
    ):
        inputs = reference.inputs(*parts)
        answer = await collect(core, ask(reference, inputs, *media))
        assert answer.ids == reference.greedy(inputs, 16), answer.last.error
        assert np.abs(reference.ratios(inputs, media, answer) - 1).max() < 1e-3


async def test_core_same_placeholders_of_another_image_share_no_prefix(
    core: SGLangCore, reference: Reference
) -> None:
    a, b = image(21), image(22)
    of_a, of_b = (reference.inputs("words that come before: ", each, "?") for each in (a, b))
    first = await collect(core, ask(reference, of_a, a))
    other = await collect(core, ask(reference, of_b, b))
    again = await collect(core, ask(reference, of_a, a))
    assert first.ids == again.ids == reference.greedy(of_a, 16)
    assert other.ids == reference.greedy(of_b, 16) != first.ids
    assert again.last.cached_tokens > other.last.cached_tokens


async def test_core_placeholder_that_stands_for_nothing_ends_its_request_only(
    core: SGLangCore, reference: Reference
) -> None:
    inputs = reference.inputs(image(1), "?")
    request = ask(reference, inputs, image(1))
    sampled = MediaProcessor(reference.processor).placeholder_ids["image"]
    ids = [*inputs["input_ids"][0].tolist(), sampled, 5]
    more = asked(ids, request={"media": request.media})
    answer = await collect(core, more)
    assert answer.last.finish_reason == "error"
    assert "media of the prompt: placeholders that stand for nothing" in answer.last.error
