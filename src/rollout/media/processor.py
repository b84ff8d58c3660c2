"""Images and videos in tokens and tensors, by the processor of the model in transformers.

Torch, transformers and torchvision are imported once a processor is loaded. All that is here takes
milliseconds or more: call it in a thread.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections import Counter
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from rollout.errors import MediaError, TemplateError
from rollout.lazy import importing
from rollout.media.reading import decode
from rollout.medium import Media, PlacedMedia
from rollout.model_repository import model_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from rollout.medium import MediaKind

    Ids = npt.NDArray[np.int64]
    #: Where a piece of a text begins and ends.
    Place = tuple[int, int]

#: Files of a model directory of which one at least says how it reads media.
PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
#: What processors give beside the features of media.
_OF_TEXT = frozenset(("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"))
#: Stands between placeholders where a processor expands them; no processor's own.
_BETWEEN = "\nrolloutMediumEnd\n"
#: Sizes of media whose placeholders are remembered.
_MAX_SIZES = 1024


class _Shape(NamedTuple):
    """What the number of placeholders depends on: a medium without its pixels."""

    kind: MediaKind
    width: int
    height: int
    indices: tuple[int, ...] = ()
    total_frames: int = 0
    fps: float = 0.0

    @classmethod
    def read(cls, medium: Media) -> _Shape:
        """The shape of a medium."""
        return cls(*(getattr(medium, name) for name in cls._fields))

    def blank_pixels(self) -> npt.NDArray[np.uint8]:
        """Black pixels of this shape."""
        frames = (len(self.indices),) if self.kind == "video" else ()
        return np.zeros((*frames, self.height, self.width, 3), np.uint8)

    def metadata(self) -> dict[str, Any]:
        """What transformers knows of a video whose frames are sampled; processors may change it."""
        return {
            "total_num_frames": self.total_frames,
            "fps": self.fps,
            "width": self.width,
            "height": self.height,
            "duration": self.total_frames / self.fps,
            "frames_indices": list(self.indices),
        }


class _TextRecorder:
    """A tokenizer that remembers the text which a processor gives it, placeholders written out."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.text = ""

    def __call__(self, text: Any, **options: Any) -> Any:
        (self.text,) = [text] if isinstance(text, str) else text
        return self._tokenizer(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class MediaProcessor:
    """How one model reads images and videos.

    Safe to use from several threads.

    Args:
        processor: A processor of transformers.
        config: The model's configuration in transformers; None where nothing needs it.

    Attributes:
        processor: As given.
        tokens: What the chat template writes for an image or a video, by kind.
        placeholder_ids: The id that stands for it, by kind.
        position_rows: Rows of its position ids: 3 of M-RoPE families, 1 of all others.
    """

    def __init__(self, processor: Any, config: Any = None) -> None:
        self.processor = processor
        self.tokens: dict[MediaKind, str] = {}
        self.placeholder_ids: dict[MediaKind, int] = {}
        kinds: tuple[MediaKind, ...] = ("image", "video")
        for kind in kinds:
            token = getattr(processor, f"{kind}_token", None)
            if isinstance(token, str) and getattr(processor, f"{kind}_processor", None) is not None:
                self.tokens[kind] = token
                self.placeholder_ids[kind] = processor.tokenizer.convert_tokens_to_ids(token)
        self._rope = None if config is None else _make_rope_model(config)
        self.position_rows = 1 if self._rope is None else 3
        self._process_blank = lru_cache(_MAX_SIZES)(self._process_blank_media)

    @property
    def name(self) -> str:
        """The processor's class."""
        return type(self.processor).__name__

    @property
    def chat_template(self) -> str | None:
        """Its own; None where it has none, or several."""
        own = getattr(self.processor, "chat_template", None)
        return own if isinstance(own, str) else None

    @property
    def kinds(self) -> frozenset[MediaKind]:
        """What the model reads beside text."""
        return frozenset(self.tokens)

    def expand(
        self,
        text: str,
        plain: Sequence[Place],
        media: Sequence[Media],
        before: Sequence[Media] = (),
    ) -> tuple[str, tuple[Place, ...]]:
        """A text with all the placeholders of `media`, as the processor writes them.

        Args:
            text: What the chat template makes of messages with `media` in it.
            plain: Places in it that stay plain text, in order: placeholders there are the
                messages' own.
            media: In the order of the messages.
            before: Media that stand before the text already.

        Returns:
            The text, and the same places in it.

        Raises:
            TemplateError: The template writes fewer or more of them, or there are some before of
                a family whose processor writes those otherwise once these follow.
            MediaError: The processor refuses one.
        """
        waiting: dict[str, list[str]] = {token: [] for token in self.tokens.values()}
        for medium, replacement in zip(media, self._list_replacements(media, before), strict=True):
            waiting[self.tokens[medium.kind]].append(replacement)
        found: Counter[str] = Counter()

        def replace(match: re.Match[str]) -> str:
            token = match[0]
            found[token] += 1
            return waiting[token][found[token] - 1] if found[token] <= len(waiting[token]) else ""

        pattern = "|".join(map(re.escape, waiting)) or r"(?!)"
        pieces, places, at, length = [], [], 0, 0
        for start, stop in (*plain, (len(text), len(text))):
            pieces += [re.sub(pattern, replace, text[at:start]), text[start:stop]]
            length += len(pieces[-2]) + stop - start
            places.append((length - (stop - start), length))
            at = stop
        for kind, token in self.tokens.items():
            if found[token] != len(waiting[token]):
                raise TemplateError(
                    f"the chat template writes {found[token]} {kind} placeholders ({token!r}) for "
                    f"{len(waiting[token])} in the messages"
                )
        return "".join(pieces), tuple(places[:-1])

    def places(self, ids: npt.ArrayLike, media: Sequence[Media]) -> tuple[PlacedMedia, ...]:
        """Where each of `media` stands among ids that hold their placeholders, and no others.

        Raises:
            TemplateError: There are other numbers of placeholders.
        """
        row = np.asarray(ids, dtype=np.int64)
        left = {kind: np.flatnonzero(row == token) for kind, token in self.placeholder_ids.items()}
        placed = []
        for medium, text in zip(media, self._list_replacements(media), strict=True):
            count = text.count(self.tokens[medium.kind])
            own, left[medium.kind] = np.split(left[medium.kind], [count])
            if len(own) < count or not count:
                raise TemplateError(f"{medium!r} has {len(own)} of {count}")
            placed.append(PlacedMedia(medium, int(own[0]), int(own[-1] - own[0]) + 1))
        if rest := {kind: len(each) for kind, each in left.items() if len(each)}:
            raise TemplateError(f"placeholders that stand for nothing: {rest}")
        return tuple(placed)

    def sampled(self, medium: Media) -> Media:
        """A video with the frames that the processor would take; as it is where it takes all.

        Raises:
            MediaError: It refuses the video.
        """
        videos: Any = getattr(self.processor, "video_processor", None)
        if medium.kind != "video" or not getattr(videos, "do_sample_frames", False):
            return medium
        from transformers.video_utils import VideoMetadata

        count = getattr(videos, "num_frames", None)
        wanted = {"fps": videos.fps} if count is None else {"num_frames": count}
        metadata = VideoMetadata(**_Shape.read(medium).metadata())
        try:
            taken = videos.sample_frames(metadata=metadata, **{"num_frames": None, **wanted})
        except Exception as error:
            raise MediaError(f"{self.name} refuses a video: {error}") from None
        return msgspec.structs.replace(medium, indices=tuple(map(int, taken)), digest="")

    def features(self, media: Sequence[Media]) -> dict[str, Tensor]:
        """What the model is given beside the ids of a row: pixel values, grids and the like.

        They are those of one call of the processor on all of the row's media.

        Raises:
            MediaError: One cannot be decoded.
        """
        return self._process(list(map(_Shape.read, media)), list(map(decode, media)))[0]

    def position_ids(
        self,
        ids: npt.ArrayLike,
        placed: Sequence[PlacedMedia],
        features: Mapping[str, Tensor] | None = None,
    ) -> Ids:
        """(position_rows, T) the positions of a row without padding.

        Those of an M-RoPE family are what the model's own `get_rope_index` gives; of others, (1, T)
        0, 1, 2, …

        Args:
            ids: (T,) the row's.
            placed: Its media; those past its end are left out.
            features: Of its media, where they are at hand; only grids and times are read.
        """
        row = np.asarray(ids, dtype=np.int64)
        if self._rope is None or not placed:
            return np.broadcast_to(np.arange(len(row)), (self.position_rows, len(row))).copy()
        import torch

        inside = [each for each in placed if each.start + each.count <= len(row)]
        if features is None or len(inside) < len(placed):
            _, features = self._process_blank(tuple(_Shape.read(each.medium) for each in inside))
        known: dict[str, Any] = {
            **features,
            "input_ids": torch.from_numpy(row)[None],
            "mm_token_type_ids": torch.from_numpy(self.kinds_of_ids(row, inside))[None],
            "attention_mask": torch.ones((1, len(row)), dtype=torch.int64),
        }
        taken = inspect.signature(self._rope.get_rope_index).parameters
        found, _ = self._rope.get_rope_index(**{n: v for n, v in known.items() if n in taken})
        positions: Ids = found[:, 0].numpy().astype(np.int64)
        return positions

    def kinds_of_ids(self, ids: npt.ArrayLike, placed: Sequence[PlacedMedia]) -> Ids:
        """(T,) 1 at the placeholders of images, 2 at those of videos, else 0.

        What transformers calls ``mm_token_type_ids``; a placeholder that the model sampled by
        itself stands for nothing and is 0.
        """
        row = np.asarray(ids, dtype=np.int64)
        kinds = np.zeros(len(row), dtype=np.int64)
        for each in placed:
            own = slice(each.start, each.start + each.count)
            number = 1 if each.medium.kind == "image" else 2
            kinds[own][row[own] == self.placeholder_ids[each.medium.kind]] = number
        return kinds

    def _list_replacements(
        self, media: Sequence[Media], before: Sequence[Media] = ()
    ) -> Sequence[str]:
        """What the processor writes for each of `media`."""
        for medium in media:
            if medium.kind not in self.tokens:
                reads = " and ".join(("text", *(f"{kind}s" for kind in sorted(self.kinds))))
                raise MediaError(f"the model reads {reads}, no {medium.kind}s ({self.name})")
        shapes = tuple(map(_Shape.read, media))
        if self._is_independent:
            return [self._process_blank((shape,))[0][0] for shape in shapes]
        if before and media:
            raise TemplateError(
                f"{self.name} writes earlier images in other tokens once more follow (a single "
                "one in tiles, several without), and a transcript never changes: none can be "
                "appended; show all in the prompt, or use a model of another family "
                "(Qwen2.5-VL, Qwen3-VL)"
            )
        return self._process_blank(shapes)[0]

    @cached_property
    def _is_independent(self) -> bool:
        """Whether what stands for a medium is the same whatever else is in the conversation.

        It is not of LLaVA-OneVision, which cuts a single image into tiles and none of several.
        """
        shapes = (_Shape("image", 640, 320), _Shape("image", 320, 640))
        alone = [self._process_blank((shape,))[0][0] for shape in shapes if "image" in self.tokens]
        return not alone or list(self._process_blank(shapes)[0]) == alone

    def _process_blank_media(
        self, shapes: tuple[_Shape, ...]
    ) -> tuple[tuple[str, ...], dict[str, Tensor]]:
        """Process black media of these sizes, since placeholders and positions depend on no pixel.

        Returns:
            What is written for each of them, and their features but for pixels: grids and times.
        """
        features, text = self._process(shapes, [shape.blank_pixels() for shape in shapes])
        texts = text.split(_BETWEEN) if shapes else []
        assert len(texts) == len(shapes), text[:200]
        return tuple(texts), {name: v for name, v in features.items() if "pixel" not in name}

    def _process(
        self, shapes: Sequence[_Shape], pixels: Sequence[Any]
    ) -> tuple[dict[str, Tensor], str]:
        """Call the processor once on all of them, as a conversation of one turn has them.

        Returns:
            The features, and the text that the processor writes.
        """
        if not shapes:
            return {}, ""
        from PIL import Image

        processor = copy.copy(self.processor)
        processor.tokenizer = recorder = _TextRecorder(processor.tokenizer)
        kinds = [shape.kind for shape in shapes]
        given: dict[str, Any] = {}
        if "image" in kinds:  # of Pillow, so that no processor guesses which axis is colour
            pairs = zip(kinds, pixels, strict=True)
            given["images"] = [[Image.fromarray(p) for kind, p in pairs if kind == "image"]]
        if "video" in kinds:
            given["videos"] = [p for kind, p in zip(kinds, pixels, strict=True) if kind == "video"]
            metadata = [shape.metadata() for shape in shapes if shape.kind == "video"]
            given |= {"video_metadata": metadata, "do_sample_frames": False}
        text = _BETWEEN.join(self.tokens[kind] for kind in kinds)
        try:
            found = processor(text=[text], return_tensors="pt", **given)
        except Exception as error:  # e.g. of an aspect ratio that the model cannot take
            sizes = ", ".join(f"{shape.width}x{shape.height}" for shape in shapes)
            raise MediaError(f"{self.name} refuses media of {sizes}: {error}") from None
        return {n: v for n, v in found.items() if n not in _OF_TEXT}, recorder.text


def _make_rope_model(config: Any) -> Any:
    """A model without weights, whose `get_rope_index` reads its configuration; None without any."""
    import torch
    from transformers import AutoModel

    kind: Any = AutoModel._model_mapping.get(type(config), None)
    if not hasattr(kind, "get_rope_index"):
        return None
    model = kind.__new__(kind)
    torch.nn.Module.__init__(model)
    model.config = config
    return model


def load_media_processor(
    model: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> MediaProcessor | None:
    """That of a model directory or hub name; None where the model reads text only.

    Raises:
        MediaError: It cannot be loaded: the message says what is missing.
    """
    try:
        if all(model_file(model, name, revision) is None for name in PROCESSOR_FILES):
            return None
    except (OSError, ValueError) as error:
        raise MediaError(f"the processor of {model} cannot be looked for: {error}") from None
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        with importing:
            from transformers import AutoConfig, AutoProcessor

        auto: Any = AutoProcessor  # its methods have no types
        processor = auto.from_pretrained(model, **options)
        loaded = MediaProcessor(processor, AutoConfig.from_pretrained(model, **options))
    except Exception as error:  # loaders raise almost anything, and name packages that are missing
        raise MediaError(f"the processor of {model} cannot be loaded: {error}") from None
    return loaded if loaded.kinds else None
