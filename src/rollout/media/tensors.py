"""What rows with images and videos are trained with beside their ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

from rollout.errors import RolloutError

if TYPE_CHECKING:
    from torch import Tensor

    from rollout.media.processor import MediaProcessor
    from rollout.medium import Media, PlacedMedia


class MultiModalInputs(Sequence["dict[str, Tensor]"]):
    """Of each row what its model is given beside ids: made when it is asked for.

    ``inputs[row]`` decodes and processes all media of the row, in one call of the model's
    processor: some 100 ms for an image of a megapixel. The last answer is kept for the rows after
    it that show the same, as the members of a group do. {} of a row without media.

    Args:
        media: Of each row, in order.
        processor: The model's; None where it is not known.
    """

    def __init__(
        self,
        media: Sequence[Sequence[PlacedMedia]] = (),
        processor: MediaProcessor | None = None,
    ) -> None:
        self.media = [tuple(each) for each in media]
        self._processor = processor
        self._last: tuple[tuple[Media, ...], dict[str, Tensor]] = ((), {})

    def __len__(self) -> int:
        return len(self.media)

    @overload
    def __getitem__(self, row: int) -> dict[str, Tensor]: ...
    @overload
    def __getitem__(self, row: slice) -> list[dict[str, Tensor]]: ...
    def __getitem__(self, row: int | slice) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        if isinstance(row, slice):
            return [self[each] for each in range(*row.indices(len(self)))]
        media = tuple(each.medium for each in self.media[row])
        if not media:
            return {}
        if self._processor is None:
            raise RolloutError(
                "multi_modal_inputs: no processor is known; give collate or RolloutBatch.load "
                "processor=rollout.chat.load_media_processor(MODEL)"
            )
        last = self._last
        if media != last[0]:
            last = self._last = media, self._processor.features(media)
        return last[1]
