"""What TRL makes of images: pixel values of those in its prompts, and of no others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollout.errors import RolloutError
from rollout.integrations.row_media import named

if TYPE_CHECKING:
    from rollout.integrations.trainer_row import TrainerRow


def refuse_other_media(row: TrainerRow, prompt: Any) -> None:
    """Refuse a row that shows more than the images of its prompt.

    Of what a rollout function returns TRL takes no images: it computes pixel values of the images
    in its data set's ``image`` or ``images`` column, which it has put into the prompt. A row with
    others would be trained without them.

    Raises:
        RolloutError: There are others: in an answer of a tool, or videos.
    """
    others = [
        each
        for each in row.media
        if each.medium.kind != "image" or each.start >= len(row.prompt_ids)
    ]
    if others:
        what = "videos" if others[0].medium.kind == "video" else "images after its prompt"
        raise RolloutError(
            f"{named(row)} has {what}, for which TRL has no field: a rollout_func may show images "
            "in prompts only"
        )
    shown = sum(_images_in(message) for message in prompt) if _is_messages(prompt) else 0
    if row.media and shown != len(row.media):
        raise RolloutError(
            f"{named(row)} shows {len(row.media)} images and TRL's prompt has {shown}: expected "
            "the same"
        )


def _is_messages(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and not isinstance(prompt, str)


def _images_in(message: Any) -> int:
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = content if isinstance(content, Sequence) and not isinstance(content, str) else ()
    return sum(isinstance(part, Mapping) and part.get("type") == "image" for part in parts)
