"""Images and videos of a request as SGLang takes them beside token ids. No SGLang here.

SGLang reads media that come as files itself, and for that turns ids into text and back: those of
videos always, those of images before 0.5.23. What has gone through the model's processor already it
takes as it is, with ids that hold all placeholders: the prompt stays token for token, and the
pixels are those of the training row. SGLang then puts a hash of the features in the place of the
placeholders, so that its prefix cache tells images apart.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

from rollout.errors import MediaError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.engine.core import GenerationRequest
    from rollout.media.processor import MediaProcessor
    from rollout.medium import Media

#: Models by the type in their configuration, with media that SGLang takes in this way.
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "qwen2_5_vl": ("image", "video"),
    "qwen3_vl": ("image", "video"),
    "qwen3_vl_moe": ("image", "video"),
}
#: Families whose encoder attends across the frames of a video in SGLang, and within each in
#: transformers. Told of each frame as a video of its own, it computes the same.
FRAME_BY_FRAME = ("qwen2_5_vl",)
#: Of the features cached for the next turns of their trajectories.
CACHE_BYTES = 512 * 1024 * 1024


class MediaInputs:
    """Reads media by the model's processor; called in threads.

    Args:
        is_frame_by_frame: See `FRAME_BY_FRAME`.
        cache_bytes: Of features that are cached.
    """

    def __init__(
        self,
        processor: MediaProcessor,
        *,
        is_frame_by_frame: bool = False,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._processor = processor
        self._is_frame_by_frame = is_frame_by_frame
        self._cache_bytes = cache_bytes
        self._cached: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def fields(self, request: GenerationRequest) -> dict[str, Any]:
        """Those of SGLang's `GenerateReqInput` that carry the media of a request."""
        import torch

        ids = np.frombuffer(request.prompt_ids, dtype="<i4")
        media = [each.medium for each in request.media]
        placed = self._processor.places(ids, media)
        features = self._features(media)
        positions = self._processor.position_ids(ids, placed, features)
        delta = int(positions.max()) + 1 - len(ids)
        if self._is_frame_by_frame and "video_grid_thw" in features:
            features["video_grid_thw"] = _split_frames(features["video_grid_thw"])
        item = {
            "format": "processor_output",
            **features,
            "mrope_positions": torch.from_numpy(positions),
            "mrope_position_delta": torch.tensor([[delta]]),
        }
        has_image = any(medium.kind == "image" for medium in media)
        return {"image_data" if has_image else "video_data": [item]}

    def _features(self, media: Sequence[Media]) -> dict[str, Any]:
        import torch

        parts: dict[str, list[Any]] = {}
        for medium in media:
            for name, value in self._read(medium).items():
                parts.setdefault(name, []).append(torch.as_tensor(value))
        return {name: torch.cat(values) for name, values in parts.items()}

    def _read(self, medium: Media) -> dict[str, Any]:
        with self._lock:
            known = self._cached.get(medium.digest)
            if known is not None:
                self._cached.move_to_end(medium.digest)
                return known
        read = {
            name: value
            for name, value in self._processor.features([medium]).items()
            if "metadata" not in name
        }
        with self._lock:
            if medium.digest not in self._cached:
                self._cached[medium.digest] = read
                self._bytes += _count_bytes(read)
            while self._bytes > self._cache_bytes and len(self._cached) > 1:
                self._bytes -= _count_bytes(self._cached.popitem(last=False)[1])
        return read


def _split_frames(grids: Any) -> Any:
    """(F, 3) grids of single frames for (videos, 3) of whole videos: the same patches in order."""
    frames = grids.repeat_interleave(grids[:, 0], dim=0)
    frames[:, 0] = 1
    return frames


def open_media_inputs(
    family: str, path: str, *, revision: str | None, trust_remote_code: bool
) -> tuple[MediaInputs | None, tuple[str, ...], str]:
    """What reads a model's media, their kinds, and why a kind is missing; blocks."""
    if family not in FAMILIES:
        return None, (), f"SGLang is given media of {', '.join(FAMILIES)} only, not of {family}"
    from rollout.media.processor import load_media_processor

    try:
        processor = load_media_processor(
            path, revision=revision, trust_remote_code=trust_remote_code
        )
    except MediaError as error:
        return None, (), str(error)
    if processor is None:
        return None, (), f"{path} has no processor beside the model"
    kinds = tuple(kind for kind in FAMILIES[family] if kind in processor.kinds)
    return MediaInputs(processor, is_frame_by_frame=family in FRAME_BY_FRAME), kinds, ""


def _count_bytes(features: Mapping[str, Any]) -> int:
    return sum(getattr(value, "nbytes", 0) for value in features.values())
