"""What rows with images and videos are trained with beside their ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload
from weakref import WeakValueDictionary

from rollout.errors import RolloutError

if TYPE_CHECKING:
    from torch import Tensor

    from rollout.media.processor import MediaProcessor
    from rollout.medium import PlacedMedia


class RowInputs(dict[str, Any]):
    """Tensors by their names, e.g. ``pixel_values`` and ``image_grid_thw``."""


class MultiModalInputs(Sequence["dict[str, Tensor]"]):
    """Of each row what its model is given beside ids: made when it is asked for.

    ``inputs[row]`` decodes and processes all media of the row, in one call of the model's
    processor: some 100 ms for an image of a megapixel. Rows that show the same share one answer as
    long as anybody holds it; then it is let go. {} of a row without media.

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
        self._inputs: WeakValueDictionary[tuple[str, ...], RowInputs] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self.media)

    @overload
    def __getitem__(self, row: int) -> dict[str, Tensor]: ...
    @overload
    def __getitem__(self, row: slice) -> list[dict[str, Tensor]]: ...
    def __getitem__(self, row: int | slice) -> dict[str, Tensor] | list[dict[str, Tensor]]:
        if isinstance(row, slice):
            return [self[each] for each in range(*row.indices(len(self)))]
        media = [each.medium for each in self.media[row]]
        if not media:
            return {}
        if self._processor is None:
            raise RolloutError(
                "multi_modal_inputs: no processor is known; give collate or RolloutBatch.load "
                "processor=rollout.chat.load_media_processor(MODEL)"
            )
        key = tuple(medium.digest for medium in media)
        inputs = self._inputs.get(key)
        if inputs is None:
            inputs = self._inputs[key] = RowInputs(self._processor.features(media))
        return inputs
