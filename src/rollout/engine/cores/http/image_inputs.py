"""Images of a request as SGLang's HTTP server takes them beside token ids.

The server reads files itself. From 0.5.23 on it keeps the ids that it is given, each image as one
placeholder, and writes out as many as its processor makes of the image. Of videos it does not, nor
where it was started with SGLANG_MM_AVOID_RETOKENIZE=0, or its processor fails to count: the prompt
then passes through text, which the number of its tokens gives away as a rule.
"""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.errors import MediaError
from rollout.media.decoding import open_image, rgb_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollout.engine.core import GenerationRequest
    from rollout.medium import Media

#: Models by the type in their configuration; each image is one run of placeholders in them.
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
#: The first version that was seen to keep the ids.
FIRST_VERSION = (0, 5, 23)
#: EXIF's tag of how a picture is turned.
_ORIENTATION = 0x0112
_UPRIGHT = 1
NO_VIDEOS = "SGLang's HTTP server turns the ids of a prompt with videos into text and back"


def image_fault(family: str, facts: Mapping[str, Any]) -> str:
    """Why a server is sent no images; empty where it is.

    Args:
        family: The type in the model's configuration.
        facts: What the server says of itself.
    """
    version = str(facts.get("version") or "of a version that it does not name")
    if family not in FAMILIES:
        return f"SGLang's HTTP server is sent images of {', '.join(FAMILIES)} only, not of {family}"
    if _numbers(version) < FIRST_VERSION:
        first = ".".join(map(str, FIRST_VERSION))
        return (
            f"SGLang {version} turns the ids of a prompt with images into text and back; expected "
            f"{first} or later"
        )
    if facts.get("skip_tokenizer_init"):
        return "the server was started with --skip-tokenizer-init, and reads no images then"
    wants_precise = family.startswith("qwen3_vl")
    if wants_precise and not facts.get("enable_precise_embedding_interpolation"):
        return (
            "the server computes other embeddings of images than transformers; start it with "
            "--enable-precise-embedding-interpolation"
        )
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:3]
    return tuple(int(part) for part in parts) if all(map(str.isdecimal, parts)) else ()


def image_fields(request: GenerationRequest) -> dict[str, Any]:
    """The ids with one placeholder for each image, and the images; takes milliseconds.

    Raises:
        MediaError: What stands for one is no single run of placeholders.
    """
    ids = np.frombuffer(request.prompt_ids, dtype="<i4")
    kept = np.ones(len(ids), dtype=np.bool_)
    for each in request.media:
        own = slice(each.start, each.start + each.count)
        if (ids[own] != ids[each.start]).any():
            raise MediaError(f"{each.medium!r}: its placeholders are in several pieces")
        kept[own.start + 1 : own.stop] = False
    return {
        "input_ids": ids[kept].tolist(),
        "image_data": [_data_url(each.medium) for each in request.media],
    }


def _data_url(medium: Media) -> str:
    """The file as it is where any reader makes the same pixels of it, else those as PNG."""
    content, mime = medium.content, medium.mime
    image = open_image(content)
    if image.mode != "RGB" or image.getexif().get(_ORIENTATION, _UPRIGHT) != _UPRIGHT:
        file = io.BytesIO()
        rgb_of(image).save(file, "png", compress_level=1)
        content, mime = file.getvalue(), "image/png"
    return f"data:{mime};base64,{base64.b64encode(content).decode('ascii')}"
