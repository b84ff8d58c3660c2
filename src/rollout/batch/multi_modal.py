"""What rows with images and videos are trained with beside their ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from rollout.errors import RolloutError

if TYPE_CHECKING:
    from torch import Tensor

    from rollout.chat.processors import MediaProcessor
    from rollout.chat.trajectory import Trajectory
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
        self._held: WeakValueDictionary[tuple[str, ...], RowInputs] = WeakValueDictionary()

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
        key = tuple(medium.digest for medium in media)
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = RowInputs(self._process(media))
        return held

    def _process(self, media: Sequence[Any]) -> dict[str, Tensor]:
        if self._processor is None:
            raise RolloutError(
                "multi_modal_inputs: no processor is known; give collate or RolloutBatch.load "
                "processor=rollout.chat.load_media_processor(MODEL)"
            )
        return self._processor.features(media)


def list_media(trajectories: Sequence[Trajectory]) -> list[list[PlacedMedia]]:
    """The media among the tokens of each row: what nothing was generated after is left out."""
    transcripts = [each for trajectory in trajectories for each in trajectory.transcripts]
    return [
        [
            each
            for each in transcript.media
            if each.start + each.count <= len(transcript) - transcript.trailing_observation_length
        ]
        for transcript in transcripts
    ]


class RowPositions:
    """Position ids of an M-RoPE family.

    Args:
        processor: The model's.
        media: Of each row.
        count: 3, or 4 with the positions of a text-only row before them.

    Attributes:
        count: Rows of positions.
    """

    def __init__(
        self, processor: MediaProcessor, media: Sequence[Sequence[PlacedMedia]], count: int
    ) -> None:
        self.count = count
        self._processor = processor
        self._media = media

    def read_positions(self, row: int, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """(count, T) of one row's ids."""
        own = self._processor.position_ids(ids, self._media[row])
        if self.count == len(own):
            return own
        return np.concatenate([np.arange(len(ids), dtype=np.int64)[np.newaxis], own])
