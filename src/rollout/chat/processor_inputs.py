"""What a processor of transformers is called with: the pixels of media, or blank ones of a size."""

from __future__ import annotations

from typing import Any

import numpy as np

from rollout.media import Media, decode

#: What the number of placeholders depends on: a medium without its pixels.
Shape = tuple[str, int, int, tuple[int, ...], int, float]


def shape_of(medium: Media) -> Shape:
    """Its kind and sizes, as `blank_medium` takes them."""
    facts = (medium.indices, medium.total_frames, medium.fps)
    return (medium.kind, medium.width, medium.height, *facts)


def blank_medium(shape: Shape) -> Media:
    """A medium of this shape that has no content."""
    kind, width, height, indices, total, fps = shape
    return Media(
        kind=kind,  # type: ignore[arg-type]
        content=b"",
        mime="",
        width=width,
        height=height,
        indices=indices,
        total_frames=total,
        fps=fps,
        digest="blank",
    )


def blank_pixels(shape: Shape) -> Any:
    """Black pixels of this shape, as `pixels_of` gives them."""
    kind, width, height, indices, _, _ = shape
    if kind == "video":
        return np.zeros((len(indices), height, width, 3), np.uint8)
    from PIL import Image

    return Image.new("RGB", (width, height))


def pixels_of(medium: Media) -> Any:
    """As processors take them: an image by pillow, so that none guesses which axis is colour.

    Raises:
        MediaError: It cannot be decoded.
    """
    pixels = decode(medium)
    if medium.kind == "video":
        return pixels
    from PIL import Image

    return Image.fromarray(pixels)


def video_metadata(medium: Media) -> dict[str, Any]:
    """What transformers knows of a video whose frames are sampled; processors may change it."""
    return {
        "total_num_frames": medium.total_frames,
        "fps": medium.fps,
        "width": medium.width,
        "height": medium.height,
        "duration": medium.total_frames / medium.fps,
        "frames_indices": list(medium.indices),
    }
