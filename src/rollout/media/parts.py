"""Images and videos among the parts of a content, in the forms of those who write them.

Also what finds them where messages and the answers of tools must hold text alone.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import msgspec

from rollout.errors import MediaError
from rollout.lazy import derives_from
from rollout.medium import Media, MediaKind

#: Types of parts and what they hold: those of chat templates, of OpenAI's two interfaces, of
#: Anthropic's and of MCP.
_KINDS: dict[str, MediaKind] = {
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
}
_AUDIO = frozenset(("audio", "audio_url", "input_audio"))
#: Types of the parts of a content that are no text.
PART_TYPES = frozenset((*_KINDS, *_AUDIO, "file", "input_file"))
#: Keys of a message under which data sets keep media.
FIELDS = frozenset(("image", "images", "video", "videos", "audio", "audios"))
#: Where a part keeps what it holds, beside its type's own key.
_HOLDERS = ("url", "path", "base64", "bytes", "data", "source", "file")
#: How files of images, video and audio begin.
_FILE_STARTS = (
    *(b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM", b"II*\x00", b"MM\x00*", b"OggS"),
    *(b"ID3", b"fLaC", b"\x1aE\xdf\xa3"),
)
#: Held while somebody's PIL image is read: loaded in two threads at once it becomes another one.
LOADING = threading.Lock()
#: Values of an answer that are searched; the text of more is cut in any case.
_MAX_SEARCHED = 10_000

NO_AUDIO = "audio is not supported; images and videos are"
TEXT_ONLY = "here the model reads text only"


class MediaSource(msgspec.Struct, frozen=True):
    """An unread image or video.

    Attributes:
        kind: What it is said to be.
        value: Bytes, text (a data URL, another URL or a path), a PIL image, an array, or frames.
        mime: What it is said to be encoded as; "" where nobody says.
        fps: Of frames that are given one by one, how many there are for each second.
        is_base64: Whether a text is the content itself.
        where: Names the part in errors.
    """

    kind: MediaKind
    value: Any
    mime: str = ""
    fps: float | None = None
    is_base64: bool = False
    where: str = ""


def media_part(where: str, part: object) -> MediaSource | Media | None:
    """Find what a part of a content holds; None of a text, or of what is nothing known.

    Raises:
        MediaError: It is audio, or says that it is an image or video and holds none.
    """
    if isinstance(part, Media):
        return part
    if kind_of_media(part) is not None or is_pixels(part):
        return MediaSource("image", part, where=where)
    if not isinstance(part, Mapping):
        return None
    kind = part.get("type")
    if kind is None:
        kind = next((name for name in ("image", "video", "image_url") if name in part), None)
    if not isinstance(kind, str):
        return None
    if kind in _AUDIO:
        raise MediaError(f"{where} is a part of type {kind!r}: {NO_AUDIO}")
    return _read_part(where, kind, part) if kind in _KINDS else None


def _read_part(where: str, kind: str, part: Mapping[str, Any]) -> MediaSource | Media:
    name = next((key for key in (kind, *_KINDS, *_HOLDERS) if part.get(key) is not None), None)
    value = None if name is None else part[name]
    mime = part.get("mimeType") or part.get("mime_type") or part.get("media_type") or ""
    is_base64 = name in ("base64", "data") and isinstance(value, str)
    if isinstance(value, Mapping):  # {"url": …} of OpenAI, {"type": "base64", …} of Anthropic
        mime = value.get("media_type") or mime
        is_base64 = value.get("type") == "base64"
        value = next((value[key] for key in _HOLDERS if value.get(key) is not None), None)
    if isinstance(value, Media):
        if value.kind != _KINDS[kind]:
            raise MediaError(f"{where} is a part of type {kind!r} that holds a {value.kind}")
        return value
    if value is None:
        raise MediaError(
            f"{where} is a part of type {kind!r} that holds nothing; expected "
            f"{{'type': 'image', 'image': …}}, {{'type': 'video', 'video': …}} or an image_url"
        )
    return MediaSource(_KINDS[kind], value, str(mime), part.get("fps"), is_base64, where)


def is_image(value: object) -> bool:
    """Whether it is a PIL image; Pillow is not imported to find out."""
    return derives_from(type(value), "PIL.Image", "Image")


def is_pixels(value: object) -> bool:
    """Whether it is an array of numbers."""
    return getattr(getattr(value, "dtype", None), "kind", "O") in "uifb"


def kind_of_media(value: object) -> str | None:
    """Name what `value` is, where no text can stand for it; None of anything else."""
    if isinstance(value, bytes | bytearray | memoryview):
        return "bytes"
    return "a PIL image" if is_image(value) else None


def is_media_file(content: bytes | bytearray) -> bool:
    """Whether this is how a file of an image, a video or audio begins."""
    is_one = content.startswith(_FILE_STARTS) or content[4:8] == b"ftyp"
    return is_one and b"\0" in content[:1024]  # texts have no zero


def is_media_part(item: Mapping[Any, Any]) -> bool:
    """Whether it is a part of a content that holds an image, a video, audio or a file.

    Some answers of tools only have the type in common with such a part.
    """
    kind = item.get("type")
    holds = not item.keys().isdisjoint((*PART_TYPES, "source", "data"))
    return holds and isinstance(kind, str) and kind in PART_TYPES


def check_answer(where: str, value: object) -> None:
    """Look for media in lists and mappings, at whatever depth.

    Raises:
        MediaError: There are some.
    """
    waiting = [value]
    for _ in range(_MAX_SEARCHED):
        if not waiting:
            return
        item = waiting.pop()
        kind = kind_of_media(item)
        if isinstance(item, Mapping):
            if is_media_part(item):
                kind = f"a part of type {item['type']!r}"
            waiting += item.values()
        elif isinstance(item, list | tuple):
            waiting += item
        if kind is not None:
            raise MediaError(
                f"{where} holds {kind}; return text, or ToolResult(images=…, videos=…)"
            )
