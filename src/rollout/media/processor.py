"""Images and videos in tokens and tensors, by the processor of the model in transformers.

Torch, transformers and torchvision are imported once a processor is loaded. All that is here takes
milliseconds or more: call it in a thread.
"""

from __future__ import annotations

import copy
import inspect
import re
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from rollout.errors import MediaError, TemplateError
from rollout.lazy import importing
from rollout.media.reading import decode
from rollout.media.torchvision_operators import declare_missing_operators
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

    def blank_pixels(self) -> Any:
        """Black pixels of this shape, as processors take them."""
        if self.kind == "video":
            return np.zeros((len(self.indices), self.height, self.width, 3), np.uint8)
        from PIL import Image

        return Image.new("RGB", (self.width, self.height))

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
        self._expanded = lru_cache(_MAX_SIZES)(self._expand)
        self._grids = lru_cache(_MAX_SIZES)(self._measure)

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
            TemplateError: The template writes fewer or more of them, or the processor writes those
                before otherwise once these follow.
            MediaError: The processor refuses one.
        """
        waiting: dict[MediaKind, list[str]] = {"image": [], "video": []}
        for medium, replacement in zip(media, self._replacements(media, before), strict=True):
            waiting[medium.kind].append(replacement)
        found = self._find_placeholders(text, plain)
        for kind, replacements in waiting.items():
            count = sum(each == kind for each, _, _ in found)
            if count != len(replacements):
                raise TemplateError(
                    f"the chat template writes {count} {kind} placeholders "
                    f"({self.tokens.get(kind)!r}) for {len(replacements)} in the messages"
                )
        pieces, moves, at, moved = [], [(0, 0)], 0, 0  # moves: from a place on, by how much
        for kind, start, stop in found:
            replacement = waiting[kind].pop(0)
            pieces += [text[at:start], replacement]
            moved += len(replacement) - (stop - start)
            moves.append((stop, moved))
            at = stop
        shifts = [max(move for move in moves if move[0] <= start)[1] for start, _ in plain]
        shifted = ((start + by, stop + by) for (start, stop), by in zip(plain, shifts, strict=True))
        return "".join((*pieces, text[at:])), tuple(shifted)

    def places(self, ids: npt.ArrayLike, media: Sequence[Media]) -> tuple[PlacedMedia, ...]:
        """Where each of `media` stands among ids that hold their placeholders, and no others.

        Raises:
            TemplateError: There are other numbers of placeholders.
        """
        row = np.asarray(ids, dtype=np.int64)
        left = {kind: np.flatnonzero(row == token) for kind, token in self.placeholder_ids.items()}
        placed = []
        for medium, text in zip(media, self._replacements(media), strict=True):
            count = text.count(self.tokens[medium.kind])
            own, left[medium.kind] = np.split(left[medium.kind], [count])
            if len(own) < count or not count:
                raise TemplateError(f"{medium!r} has {len(own)} of {count}")
            placed.append(PlacedMedia(medium, int(own[0]), int(own[-1] - own[0]) + 1))
        if any(map(len, left.values())):
            rest = {kind: len(each) for kind, each in left.items() if len(each)}
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
        if not media:
            return {}
        given = self._call(list(map(_Shape.read, media)), list(map(_decode_for_processor, media)))
        return {name: value for name, value in given.items() if name not in _OF_TEXT}

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
            shapes = tuple(_Shape.read(each.medium) for each in inside)
            features = self._grids(shapes) if shapes else {}
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

    def _find_placeholders(
        self, text: str, plain: Sequence[Place]
    ) -> list[tuple[MediaKind, int, int]]:
        """Where the template wrote them; what messages spell, in `plain` places, is theirs."""
        kind_of = {token: kind for kind, token in self.tokens.items()}
        found = []
        spelled = list(reversed(plain))
        for match in re.finditer("|".join(map(re.escape, kind_of)) or r"(?!)", text):
            while spelled and spelled[-1][1] <= match.start():
                spelled.pop()
            if not spelled or match.end() <= spelled[-1][0]:
                found.append((kind_of[match[0]], match.start(), match.end()))
        return found

    def _replacements(self, media: Sequence[Media], before: Sequence[Media] = ()) -> Sequence[str]:
        """What the processor writes for each of `media`."""
        for medium in media:
            if medium.kind not in self.tokens:
                reads = " and ".join(("text", *(f"{kind}s" for kind in sorted(self.kinds))))
                raise MediaError(f"the model reads {reads}, no {medium.kind}s ({self.name})")
        shapes = tuple(map(_Shape.read, media))
        if self._is_independent:
            return [self._expanded((shape,))[0] for shape in shapes]
        earlier = tuple(map(_Shape.read, before))
        texts = self._expanded((*earlier, *shapes))
        if texts[: len(earlier)] != self._expanded(earlier):
            raise TemplateError(
                f"{self.name} writes earlier images in other tokens once more follow (a single "
                "one in tiles, several without), and a transcript never changes: none can be "
                "appended; show all in the prompt, or use a model of another family "
                "(Qwen2.5-VL, Qwen3-VL)"
            )
        return texts[len(earlier) :]

    @cached_property
    def _is_independent(self) -> bool:
        """Whether what stands for a medium is the same whatever else is in the conversation.

        It is not of LLaVA-OneVision, which cuts a single image into tiles and none of several.
        """
        if "image" not in self.tokens:
            return True
        shapes = (_Shape("image", 640, 320), _Shape("image", 320, 640))
        return self._expand(shapes) == (*self._expand(shapes[:1]), *self._expand(shapes[1:]))

    def _expand(self, shapes: tuple[_Shape, ...]) -> tuple[str, ...]:
        """What the processor writes for media of these sizes: it never looks at their pixels."""
        if not shapes:
            return ()
        recorder = _TextRecorder(self.processor.tokenizer)
        self._call(shapes, [shape.blank_pixels() for shape in shapes], recorder)
        texts = recorder.text.split(_BETWEEN)
        assert len(texts) == len(shapes), recorder.text[:200]
        return tuple(texts)

    def _measure(self, shapes: tuple[_Shape, ...]) -> dict[str, Tensor]:
        """`features` as they are for blank media of these sizes: enough for positions."""
        given = self._call(shapes, [shape.blank_pixels() for shape in shapes])
        return {n: v for n, v in given.items() if n not in _OF_TEXT and "pixel" not in n}

    def _call(
        self, shapes: Sequence[_Shape], pixels: Sequence[Any], tokenizer: Any = None
    ) -> Mapping[str, Any]:
        """One call of the processor on all of them, as a conversation of one turn has them."""
        processor = self.processor
        if tokenizer is not None:
            processor = copy.copy(processor)
            processor.tokenizer = tokenizer
        given: dict[str, Any] = {}
        images = [p for shape, p in zip(shapes, pixels, strict=True) if shape.kind == "image"]
        videos = [p for shape, p in zip(shapes, pixels, strict=True) if shape.kind == "video"]
        if images:
            given["images"] = [images]
        if videos:
            metadata = [shape.metadata() for shape in shapes if shape.kind == "video"]
            given |= {"videos": videos, "video_metadata": metadata, "do_sample_frames": False}
        text = _BETWEEN.join(self.tokens[shape.kind] for shape in shapes)
        try:
            called: Mapping[str, Any] = processor(text=[text], return_tensors="pt", **given)
        except Exception as error:  # e.g. of an aspect ratio that the model cannot take
            sizes = ", ".join(f"{shape.width}x{shape.height}" for shape in shapes)
            raise MediaError(f"{self.name} refuses media of {sizes}: {error}") from None
        return called


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


def _decode_for_processor(medium: Media) -> Any:
    """Pixels; of an image by Pillow, so that no processor guesses which axis is colour."""
    pixels = decode(medium)
    if medium.kind == "video":
        return pixels
    from PIL import Image

    return Image.fromarray(pixels)


def _make_rope_model(config: Any) -> Any:
    """A model without weights, whose `get_rope_index` reads its configuration; None without any."""
    import torch
    from transformers import AutoModel

    known = AutoModel._model_mapping
    kind: Any = known.get(type(config), None)
    if not hasattr(kind, "get_rope_index"):
        return None
    model = kind.__new__(kind)
    torch.nn.Module.__init__(model)
    model.config = config
    return model


def _has_rope_positions(processor: str) -> bool:
    """Whether some model that has a processor of this class has positions of M-RoPE."""
    from transformers import AutoModel
    from transformers.models.auto import processing_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    names: Mapping[str, str] = vars(processing_auto)["PROCESSOR_MAPPING_NAMES"]
    models = [name for name, own in names.items() if own == processor]
    configs = [CONFIG_MAPPING[name] for name in models if name in CONFIG_MAPPING]
    known = AutoModel._model_mapping
    return any(hasattr(known[each], "get_rope_index") for each in configs if each in known)


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
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        with importing:
            declare_missing_operators()
            from transformers import AutoConfig, AutoProcessor

        processor = AutoProcessor.from_pretrained(  # type: ignore[no-untyped-call]
            model, **options
        )
        has_config = model_file(model, "config.json", revision) is not None
        config = AutoConfig.from_pretrained(model, **options) if has_config else None
    except Exception as error:  # loaders raise almost anything, and name packages that are missing
        raise MediaError(f"the processor of {model} cannot be loaded: {error}") from None
    loaded = MediaProcessor(processor, config)
    if loaded.kinds and config is None and _has_rope_positions(loaded.name):
        raise MediaError(
            f"the positions of what {loaded.name} shows are by config.json, which is not in "
            f"{model}: expected it beside the processor"
        )
    return loaded if loaded.kinds else None
