"""The images and videos of rows, in the forms that trainers take. Imports no trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.errors import RolloutError
from rollout.media import decode

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from rollout.integrations.trainer_row import TrainerRow
    from rollout.media.processor import MediaProcessor
    from rollout.medium import Media


def images_of(media: Sequence[Media]) -> list[Any]:
    """The images among `media` as PIL images, in their order."""
    from PIL import Image

    return [Image.fromarray(decode(each)) for each in media if each.kind == "image"]


def videos_of(media: Sequence[Media]) -> list[tuple[Any, dict[str, Any]]]:
    """The frames of each video, (T, 3, H, W) uint8, and what transformers knows of them."""
    import torch

    return [
        (torch.from_numpy(decode(each).transpose(0, 3, 1, 2).copy()), _metadata(each))
        for each in media
        if each.kind == "video"
    ]


def _metadata(medium: Media) -> dict[str, Any]:
    return {
        "fps": medium.fps,
        "frames_indices": list(medium.indices),
        "total_num_frames": medium.total_frames,
    }


def media_of(row: TrainerRow) -> list[Media]:
    """Those among the row's tokens."""
    return [each.medium for each in row.media]


def features_of(row: TrainerRow, processor: MediaProcessor | None) -> dict[str, Any] | None:
    """What the model is given for a row beside its ids; None where it has no media.

    Raises:
        RolloutError: Nobody knows the processor.
    """
    if not row.media:
        return None
    if processor is None:
        raise RolloutError(f"{named(row)} has images or videos; the model's processor is not known")
    return processor.features(media_of(row))


def refuse_others(
    features: dict[str, Any] | None, known: Collection[str], row: TrainerRow, trainer: str
) -> None:
    """Refuse what a trainer has no field for, rather than to leave it out.

    Raises:
        RolloutError: There is some; names it.
    """
    others = sorted((features or {}).keys() - set(known))
    if others:
        raise RolloutError(
            f"{named(row)} has {', '.join(others)}, for which {trainer} has no field; it takes "
            f"{', '.join(sorted(known))}"
        )


def named(row: TrainerRow) -> str:
    """The row's trajectory, for messages."""
    return f"{row.trajectory.uid!r} member {row.trajectory.member}"
