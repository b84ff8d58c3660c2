"""Images and videos of a prompt as the language model of a vision-language model takes them.

A medium is read once, by the model's own processor and encoder; its rows take the places of its
placeholders, whichever steps these are computed in. Rows are kept while there is room for them, and
computed again from the medium where they are not there any more. Families that read an image
otherwise where others stand beside it (LLaVA-OneVision) are given all of a prompt at once.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollout.errors import TemplateError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollout.chat.processors import MediaProcessor
    from rollout.engine.cores.transformers.slots import Ids
    from rollout.medium import Media, PlacedMedia

#: Models by the type in their configuration, and the media that they are run with here. What is not
#: listed may mix media into the text in ways of its own (attention in both directions, for one).
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "qwen2_vl": ("image", "video"),
    "qwen2_5_vl": ("image", "video"),
    "qwen3_vl": ("image", "video"),
    "qwen3_vl_moe": ("image", "video"),
    "smolvlm": ("image",),
    "idefics3": ("image",),
    "llava_onevision": ("image",),
}
#: Of the rows of all media that are kept.
FEATURE_BYTES = 512 * 1024 * 1024
#: Media whose grids are remembered.
MAX_GRIDS = 65536

Positions = npt.NDArray[np.int64]
#: Media that are read together.
Unit = tuple["Media", ...]


class MediaRows(NamedTuple):
    """What a unit becomes.

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
        units: In their order.
        places: For each, the positions of its placeholders in the prompt, ascending.
        positions: (rows, P) of the prompt's tokens; None where they are 0, 1, 2, …
        keys: (P,) int64: the prompt's ids, with what stands for its medium at each placeholder.
            Two prompts have the same computed beginning where these agree.
    """

    units: tuple[Unit, ...]
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


class _Grid(NamedTuple):
    """What stays known of a unit.

    Attributes:
        placeholders: As many as it has rows.
        features: What positions depend on.
    """

    placeholders: int
    features: dict[str, Tensor]


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
        self._grids: OrderedDict[str, _Grid] = OrderedDict()

    def forget(self) -> None:
        """Keep no rows: they are of other weights, or their memory is wanted."""
        self._rows.clear()
        self._bytes = 0

    def units_of(self, placed: tuple[PlacedMedia, ...]) -> tuple[Unit, ...]:
        """Which media of a prompt are read together."""
        media = tuple(each.medium for each in placed)
        if self._processor.is_independent:
            return tuple((medium,) for medium in media)
        return (media,)

    def is_read(self, unit: Unit) -> bool:
        """Whether a prompt with it can be laid out without reading it."""
        return _key(unit) in self._grids

    def rows_of(self, model: Any, unit: Unit) -> MediaRows:
        """What the model makes of media that are read together.

        Raises:
            MediaError: One cannot be decoded, or the processor refuses it.
        """
        key = _key(unit)
        known = self._rows.get(key)
        if known is not None:
            self._rows.move_to_end(key)
            return known
        features = self._processor.features(unit)
        found = self._rows[key] = _encoded(model, unit[0].kind, features)
        small = {name: each for name, each in features.items() if "pixel" not in name}
        self._grids[key] = _Grid(len(found.rows), small)
        if len(self._grids) > MAX_GRIDS:
            self._grids.popitem(last=False)
        self._bytes += found.bytes
        while self._bytes > self._max_bytes and len(self._rows) > 1:
            _, oldest = self._rows.popitem(last=False)
            self._bytes -= oldest.bytes
        return found

    def lay_out(self, prompt: Ids, placed: tuple[PlacedMedia, ...]) -> VisionPrompt:
        """Where the media of a prompt stand, once each unit `is_read`.

        Raises:
            TemplateError: The placeholders in the prompt are not those of its media.
        """
        processor, units = self._processor, self.units_of(placed)
        of_each = iter(placed)
        places = []
        keys = prompt.astype(np.int64)
        for unit in units:
            own = np.concatenate([self._places_of(prompt, next(of_each)) for _ in unit])
            expected = self._grids[_key(unit)].placeholders
            if len(own) != expected:
                raise TemplateError(
                    f"{len(own)} placeholders in the prompt for {unit}; expected {expected}"
                )
            keys[own] = -1 - int(_key(unit)[:15], 16)
            places.append(own)
        positions = None
        if processor.position_rows > 1:
            positions = processor.position_ids(prompt, placed, self._grids_of(units))
        return VisionPrompt(units, tuple(places), positions, keys)

    def _places_of(self, prompt: Ids, placed: PlacedMedia) -> Positions:
        within = prompt[placed.start : placed.start + placed.count]
        token = self._processor.placeholder_ids[placed.medium.kind]
        return np.flatnonzero(within == token) + placed.start

    def _grids_of(self, units: Sequence[Unit]) -> dict[str, Tensor]:
        parts: dict[str, list[Tensor]] = {}
        for unit in units:
            for name, value in self._grids[_key(unit)].features.items():
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
        for unit, places in zip(prompt.units, prompt.places, strict=True):
            first, last = np.searchsorted(places, (start, stop))
            if first < last:
                found = self.rows_of(model, unit)
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


def _key(unit: Unit) -> str:
    """Hexadecimal digits that no other unit has."""
    if len(unit) == 1:
        return unit[0].digest
    return sha256("".join(medium.digest for medium in unit).encode()).hexdigest()


def _encoded(model: Any, kind: str, features: Mapping[str, Any]) -> MediaRows:
    """One pass of the model's encoder."""
    encode = model.get_image_features if kind == "image" else model.get_video_features
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
