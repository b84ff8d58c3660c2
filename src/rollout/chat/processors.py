"""Images and videos in tokens and tensors, by the processor of the model in transformers.

Torch, transformers and torchvision are imported once a processor is loaded. All that is here takes
milliseconds or more: call it in a thread.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from rollout.chat.encoding import WrittenText
from rollout.chat.processor_inputs import (
    blank_medium,
    blank_pixels,
    pixels_of,
    shape_of,
    video_metadata,
)
from rollout.chat.rope_positions import has_rope_positions, rope_positions_of
from rollout.errors import MediaError, TemplateError
from rollout.lazy import importing
from rollout.media import Media, PlacedMedia
from rollout.media.torchvision_operators import declare_missing_operators
from rollout.model_repository import model_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from rollout.chat.encoding import Place
    from rollout.chat.processor_inputs import Shape
    from rollout.media import MediaKind

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
_MOST_SIZES = 1024


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
        self._rope = None if config is None else rope_positions_of(config)
        self.position_rows = 1 if self._rope is None else 3
        self._expanded = lru_cache(_MOST_SIZES)(self._expand)
        self._grids = lru_cache(_MOST_SIZES)(self._measure)
        self._is_independent: bool | None = None

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
        self, written: WrittenText, media: Sequence[Media], before: Sequence[Media] = ()
    ) -> WrittenText:
        """A text with all the placeholders of `media`, as the processor writes them.

        Args:
            written: What the chat template makes of messages with `media` in it.
            media: In the order of the messages.
            before: Media that stand before the text already.

        Raises:
            TemplateError: The template writes fewer or more of them, or the processor writes those
                before otherwise once these follow.
            MediaError: The processor refuses one.
        """
        parts = list(self._replacements(media, before))
        waiting = {kind: [text for k, text in parts if k == kind] for kind in self.tokens}
        found = Counter(kind for kind, _, _ in self._placeholders(written))
        for kind in ("image", "video"):
            wanted = sum(medium.kind == kind for medium in media)
            if found[kind] != wanted:
                raise TemplateError(
                    f"the chat template writes {found[kind]} {kind} placeholders "
                    f"({self.tokens.get(kind)!r}) for {wanted} in the messages"
                )
        pieces: list[str] = []
        moves: list[tuple[int, int]] = []  # from this place on, by so many characters
        at = moved = 0
        for kind, start, stop in self._placeholders(written):
            replacement = waiting[kind].pop(0)
            pieces += (written.text[at:start], replacement)
            moved += len(replacement) - (stop - start)
            moves.append((stop, moved))
            at = stop
        return WrittenText("".join((*pieces, written.text[at:])), _moved(written.plain, moves))

    def places(self, ids: npt.ArrayLike, media: Sequence[Media]) -> tuple[PlacedMedia, ...]:
        """Where each of `media` stands among ids that hold their placeholders, and no others.

        Raises:
            TemplateError: There are other numbers of placeholders.
        """
        row = np.asarray(ids, dtype=np.int64)
        at = {kind: np.flatnonzero(row == token) for kind, token in self.placeholder_ids.items()}
        taken = dict.fromkeys(at, 0)
        placed = []
        for medium, (kind, text) in zip(media, self._replacements(media), strict=True):
            begin = taken[kind]
            taken[kind] += text.count(self.tokens[kind])
            own = at[kind][begin : taken[kind]]
            if begin + len(own) < taken[kind] or not len(own):
                raise TemplateError(f"{medium!r} has {len(own)} of {text.count(self.tokens[kind])}")
            placed.append(PlacedMedia(medium, int(own[0]), int(own[-1] - own[0]) + 1))
        left = {kind: len(at[kind]) - taken[kind] for kind in at if len(at[kind]) != taken[kind]}
        if left:
            raise TemplateError(f"placeholders that stand for nothing: {left}")
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

        wanted = {"num_frames": getattr(videos, "num_frames", None), "fps": videos.fps}
        if wanted["num_frames"] is not None:
            del wanted["fps"]
        try:
            taken = videos.sample_frames(metadata=VideoMetadata(**video_metadata(medium)), **wanted)
        except Exception as error:
            raise MediaError(f"{self.name} refuses a video: {error}") from None
        indices = tuple(map(int, taken))
        return msgspec.structs.replace(medium, indices=indices, digest="")

    def features(self, media: Sequence[Media]) -> dict[str, Tensor]:
        """What the model is given beside the ids of a row: pixel values, grids and the like.

        They are those of one call of the processor on all of the row's media.

        Raises:
            MediaError: One cannot be decoded.
        """
        if not media:
            return {}
        given = self._call(media, [pixels_of(medium) for medium in media])
        return {name: value for name, value in given.items() if name not in _OF_TEXT}

    def position_ids(
        self,
        ids: npt.ArrayLike,
        placed: Sequence[PlacedMedia],
        features: Mapping[str, Tensor] | None = None,
    ) -> npt.NDArray[np.int64]:
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
        inside = [each for each in placed if each.start + each.count <= len(row)]
        kinds = self.kinds_of_ids(row, inside)
        if features is None or len(inside) < len(placed):
            features = self.grids([each.medium for each in inside])
        return self._rope(row, kinds, features)

    def kinds_of_ids(
        self, ids: npt.ArrayLike, placed: Sequence[PlacedMedia]
    ) -> npt.NDArray[np.int64]:
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

    def grids(self, media: Sequence[Media]) -> dict[str, Tensor]:
        """`features` as they are for blank media of these sizes: enough for positions."""
        return self._grids(tuple(map(shape_of, media))) if media else {}

    def _measure(self, shapes: tuple[Shape, ...]) -> dict[str, Tensor]:
        blank = list(map(blank_medium, shapes))
        given = self._call(blank, list(map(blank_pixels, shapes)))
        return {n: v for n, v in given.items() if n not in _OF_TEXT and "pixel" not in n}

    def _placeholders(self, written: WrittenText) -> Iterator[tuple[MediaKind, int, int]]:
        """Where the template wrote them: what messages spell is theirs."""
        kind_of = {token: kind for kind, token in self.tokens.items()}
        pattern = re.compile("|".join(map(re.escape, kind_of)) or r"(?!)")
        plain = iter(written.plain)
        own = next(plain, None)
        for match in pattern.finditer(written.text):
            while own is not None and own[1] <= match.start():
                own = next(plain, None)
            if own is None or match.end() <= own[0]:
                yield kind_of[match[0]], match.start(), match.end()

    def _replacements(
        self, media: Sequence[Media], before: Sequence[Media] = ()
    ) -> Iterator[tuple[MediaKind, str]]:
        for medium in media:
            if medium.kind not in self.tokens:
                reads = " and ".join(("text", *(f"{kind}s" for kind in sorted(self.kinds))))
                raise MediaError(f"the model reads {reads}, no {medium.kind}s ({self.name})")
        shapes = tuple(map(shape_of, (*before, *media)))
        if self.is_independent:
            texts = [self._expanded((shape,))[0] for shape in shapes]
        else:
            texts = list(self._expanded(shapes))
            known = self._expanded(shapes[: len(before)]) if before else ()
            if tuple(texts[: len(before)]) != tuple(known):
                raise TemplateError(
                    f"{self.name} writes earlier images in other tokens once more follow (a single "
                    "one in tiles, several without), and a transcript never changes: none can be "
                    "appended; show all in the prompt, or use a model of another family "
                    "(Qwen2.5-VL, Qwen3-VL)"
                )
        yield from zip([m.kind for m in media], texts[len(before) :], strict=True)

    @property
    def is_independent(self) -> bool:
        """Whether what stands for a medium is the same whatever else is in the conversation.

        It is not of LLaVA-OneVision, which cuts a single image into tiles and none of several.
        """
        if self._is_independent is None:
            shapes: tuple[Shape, ...] = (
                ("image", 640, 320, (), 0, 0.0),
                ("image", 320, 640, (), 0, 0.0),
            )
            if "image" not in self.tokens:
                self._is_independent = True
            else:
                alone = tuple(self._expand((shape,))[0] for shape in shapes)
                self._is_independent = self._expand(shapes) == alone
        return self._is_independent

    def _expand(self, shapes: tuple[Shape, ...]) -> tuple[str, ...]:
        """What the processor writes for media of these sizes: it never looks at their pixels."""
        if not shapes:
            return ()
        blank = list(map(blank_medium, shapes))
        heard = _Listening(self.processor.tokenizer)
        self._call(blank, [blank_pixels(shape) for shape in shapes], heard)
        texts = heard.text.split(_BETWEEN)
        assert len(texts) == len(shapes), heard.text[:200]
        return tuple(texts)

    def _call(
        self, media: Sequence[Media], pixels: Sequence[Any], tokenizer: Any = None
    ) -> Mapping[str, Any]:
        """One call of the processor on all of them, as a conversation of one turn has them."""
        import copy

        processor = self.processor
        if tokenizer is not None:
            processor = copy.copy(processor)
            processor.tokenizer = tokenizer
        given: dict[str, Any] = {}
        images = [p for m, p in zip(media, pixels, strict=True) if m.kind == "image"]
        videos = [p for m, p in zip(media, pixels, strict=True) if m.kind == "video"]
        if images:
            given["images"] = [images]
        if videos:
            metadata = [video_metadata(medium) for medium in media if medium.kind == "video"]
            given |= {"videos": videos, "video_metadata": metadata, "do_sample_frames": False}
        text = _BETWEEN.join(self.tokens[medium.kind] for medium in media)
        try:
            called: Mapping[str, Any] = processor(text=[text], return_tensors="pt", **given)
        except Exception as error:  # e.g. of an aspect ratio that the model cannot take
            sizes = ", ".join(f"{medium.width}x{medium.height}" for medium in media)
            raise MediaError(f"{self.name} refuses media of {sizes}: {error}") from None
        return called


class _Listening:
    """A tokenizer that remembers the text which a processor gives it, placeholders written out."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.text = ""

    def __call__(self, text: Any, **options: Any) -> Any:
        (self.text,) = [text] if isinstance(text, str) else text
        return self._tokenizer(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def has_processor(model: str, revision: str | None = None) -> bool:
    """Whether a model directory, or a repository of the hub, says how it reads media.

    Raises:
        MediaError: The repository cannot be looked at.
    """
    try:
        return any(model_file(model, name, revision) is not None for name in PROCESSOR_FILES)
    except (OSError, ValueError) as error:
        raise MediaError(f"the processor of {model} cannot be looked for: {error}") from None


def load_media_processor(
    model: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> MediaProcessor | None:
    """That of a model directory or hub name; None where the model reads text only.

    Raises:
        MediaError: It cannot be loaded: the message says what is missing.
    """
    if not has_processor(model, revision):
        return None
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
    if loaded.kinds and config is None and has_rope_positions(loaded.name):
        raise MediaError(
            f"the positions of what {loaded.name} shows are by config.json, which is not in "
            f"{model}: expected it beside the processor"
        )
    return loaded if loaded.kinds else None


def _moved(places: Sequence[Place], moves: Sequence[tuple[int, int]]) -> tuple[Place, ...]:
    """Places of a text after pieces before them have changed their length."""
    moved = []
    for start, stop in places:
        by = max((by for by in moves if by[0] <= start), default=(0, 0))[1]
        moved.append((start + by, stop + by))
    return tuple(moved)
