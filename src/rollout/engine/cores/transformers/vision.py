"""Images and videos of a prompt as the language model of a vision-language model takes them.

A medium is read once, by the model's own processor and encoder; its rows take the places of its
placeholders, whichever steps these are computed in. Rows are kept while there is room for them, and
computed again from the medium where they are not there any more.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.chat.processors import MediaProcessor
    from rollout.engine.cores.transformers.slots import Ids
    from rollout.media import Media

#: Models by the type in their configuration, and the media that they are run with here. What is not
#: listed may mix media into the text in ways of its own (attention in both directions, for one).
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "qwen2_vl": ("image", "video"),
    "qwen2_5_vl": ("image", "video"),
    "qwen3_vl": ("image", "video"),
    "qwen3_vl_moe": ("image", "video"),
    "smolvlm": ("image",),
    "idefics3": ("image",),
}
#: Of the rows of all media that are kept.
FEATURE_BYTES = 512 * 1024 * 1024
#: Media whose grids are remembered.
MAX_GRIDS = 65536

Positions = npt.NDArray[np.int64]


class MediaRows(NamedTuple):
    """What a medium becomes.

    Attributes:
        rows: (n, H), one for each of its placeholders.
        deep: (layers, n, H) added after the first layers; empty where the model has none.
    """

    rows: Tensor
    deep: tuple[Tensor, ...]

    @property
    def bytes(self) -> int:
        """Of memory."""
        return sum(each.numel() * each.element_size() for each in (self.rows, *self.deep))


class VisionPrompt(NamedTuple):
    """The media of one prompt.

    Attributes:
        media: In their order.
        places: For each, the positions of its placeholders in the prompt, ascending.
        positions: (rows, P) of the prompt's tokens; None where they are 0, 1, 2, …
        keys: (P,) int64: the prompt's ids, with what stands for its medium at each placeholder.
            Two prompts have the same computed beginning where these agree.
    """

    media: tuple[Media, ...]
    places: tuple[Positions, ...]
    positions: Positions | None
    keys: Positions

    def positions_of(self, start: int, stop: int) -> Positions:
        """(rows, stop - start) of tokens of the prompt or after it."""
        assert self.positions is not None
        length = self.positions.shape[1]
        if stop <= length:
            return self.positions[:, start:stop]
        first = int(self.positions.max()) + 1
        after = np.arange(max(start, length), stop) - length + first
        later = np.broadcast_to(after, (len(self.positions), len(after)))
        return np.concatenate([self.positions[:, start:length], later], axis=1)


class StepMedia(NamedTuple):
    """Rows of media for one step.

    Attributes:
        at: Which tokens of the step they stand for, ascending.
    """

    at: Positions
    rows: Tensor
    deep: tuple[Tensor, ...]


class MediaReader:
    """The processor of a model, and what it has read.

    Args:
        max_bytes: Of the rows that are kept.
    """

    def __init__(self, processor: MediaProcessor, max_bytes: int = FEATURE_BYTES) -> None:
        self._processor = processor
        self._max_bytes = max_bytes
        self._bytes = 0
        self._rows: OrderedDict[str, MediaRows] = OrderedDict()
        self._grids: OrderedDict[str, dict[str, Tensor]] = OrderedDict()

    def forget(self) -> None:
        """Keep no rows: they are of other weights, or their memory is wanted."""
        self._rows.clear()
        self._bytes = 0

    def is_read(self, medium: Media) -> bool:
        """Whether a prompt with it can be laid out without reading it."""
        return medium.digest in self._grids

    def rows_of(self, model: Any, medium: Media) -> MediaRows:
        """What the model makes of a medium.

        Raises:
            MediaError: It cannot be decoded, or the processor refuses it.
        """
        known = self._rows.get(medium.digest)
        if known is not None:
            self._rows.move_to_end(medium.digest)
            return known
        features = self._processor.features([medium])
        grids = {name: value for name, value in features.items() if "pixel" not in name}
        self._grids[medium.digest] = grids
        if len(self._grids) > MAX_GRIDS:
            self._grids.popitem(last=False)
        found = self._rows[medium.digest] = _encoded(model, medium, features)
        self._bytes += found.bytes
        while self._bytes > self._max_bytes and len(self._rows) > 1:
            _, oldest = self._rows.popitem(last=False)
            self._bytes -= oldest.bytes
        return found

    def lay_out(self, prompt: Ids, media: tuple[Media, ...]) -> VisionPrompt:
        """Where the media of a prompt stand, once each `is_read`.

        Raises:
            TemplateError: The placeholders in the prompt are not those of its media.
        """
        processor = self._processor
        placed = processor.places(prompt, media)
        places = []
        keys = prompt.astype(np.int64)
        for each in placed:
            own = np.arange(each.start, each.start + each.count)
            own = own[prompt[own] == processor.placeholder_ids[each.medium.kind]]
            keys[own] = -1 - int(each.medium.digest[:15], 16)
            places.append(own)
        positions = None
        if processor.position_rows > 1:
            positions = processor.position_ids(prompt, placed, self._grids_of(media))
        return VisionPrompt(media, tuple(places), positions, keys)

    def _grids_of(self, media: Sequence[Media]) -> dict[str, Tensor]:
        parts: dict[str, list[Tensor]] = {}
        for medium in media:
            for name, value in self._grids[medium.digest].items():
                parts.setdefault(name, []).append(torch.as_tensor(value))
        return {name: torch.cat(values) for name, values in parts.items()}

    def step_media(
        self, model: Any, prompt: VisionPrompt, start: int, stop: int, offset: int
    ) -> StepMedia | None:
        """The rows for tokens ``[start, stop)`` of a prompt, which begin at `offset` in the step.

        Raises:
            MediaError: See `rows_of`.
        """
        at, rows, deep = [], [], []
        for medium, places in zip(prompt.media, prompt.places, strict=True):
            first, last = np.searchsorted(places, (start, stop))
            if first < last:
                found = self.rows_of(model, medium)
                at.append(places[first:last] - start + offset)
                rows.append(found.rows[first:last])
                deep.append([each[first:last] for each in found.deep])
        if not at:
            return None
        return joined([StepMedia(np.concatenate(at), torch.cat(rows), _by_layer(deep))])


def joined(parts: Sequence[StepMedia]) -> StepMedia:
    """Those of a whole step."""
    if len(parts) == 1:
        return parts[0]
    return StepMedia(
        np.concatenate([part.at for part in parts]),
        torch.cat([part.rows for part in parts]),
        _by_layer([part.deep for part in parts]),
    )


def _by_layer(parts: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(layer) for layer in zip(*parts, strict=True))


def _encoded(model: Any, medium: Media, features: Mapping[str, Any]) -> MediaRows:
    """One pass of the model's encoder over a medium."""
    encode = model.get_image_features if medium.kind == "image" else model.get_video_features
    taken = inspect.signature(encode).parameters
    given = {
        name: value.to(model.device) if isinstance(value, Tensor) else value
        for name, value in features.items()
        if name in taken
    }
    output = encode(**given, return_dict=True)
    deep = getattr(output, "deepstack_features", None) or ()
    dtype = model.get_input_embeddings().weight.dtype
    return MediaRows(
        _flat(output.pooler_output).to(dtype), tuple(_flat(each).to(dtype) for each in deep)
    )


def _flat(rows: Any) -> Tensor:
    """(n, H), whether the encoder gives one tensor or one for each image."""
    whole = rows if isinstance(rows, Tensor) else torch.cat(tuple(rows))
    return whole.reshape(-1, whole.shape[-1])
