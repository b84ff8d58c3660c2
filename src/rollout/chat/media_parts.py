"""Images and videos among the parts of a content, in the forms of those who write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.errors import MediaError
from rollout.lazy import derives_from
from rollout.media import Media, MediaKind

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Types of parts and what they hold: those of chat templates, of OpenAI's two interfaces, of
#: Anthropic's and of MCP.
_KINDS: dict[str, MediaKind] = {
    **dict.fromkeys(("image", "image_url", "input_image"), "image"),
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
}
_AUDIO = frozenset(("audio", "audio_url", "input_audio"))
#: Where a part keeps what it holds, beside its type's own key.
_HOLDERS = ("url", "path", "base64", "bytes", "data", "source", "file")
NO_AUDIO = "audio is not supported; images and videos are"


class MediaSource(msgspec.Struct, frozen=True):
    """An image or a video as somebody gave it, unread.

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
    """What a part of a content holds; None of a text, or of what is nothing known.

    Raises:
        MediaError: It is audio, or says that it is an image or video and holds none.
    """
    if isinstance(part, Media):
        return part
    if derives_from(type(part), "PIL.Image", "Image") or is_pixels(part):
        return MediaSource("image", part, where=where)
    if isinstance(part, bytes | bytearray | memoryview):
        return MediaSource("image", bytes(part), where=where)
    if not isinstance(part, Mapping):
        return None
    kind = part.get("type")
    if kind is None:
        kind = next((name for name in ("image", "video", "image_url") if name in part), None)
    if not isinstance(kind, str):
        return None
    if kind in _AUDIO:
        raise MediaError(f"{where} is a part of type {kind!r}: {NO_AUDIO}")
    return _held(where, kind, part) if kind in _KINDS else None


def is_pixels(value: object) -> bool:
    """Whether it is an array of numbers."""
    return getattr(getattr(value, "dtype", None), "kind", "O") in "uifb"


def _held(where: str, kind: str, part: Mapping[str, Any]) -> MediaSource | Media:
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


def sources_of(where: str, content: Sequence[object]) -> list[MediaSource | Media | None]:
    """`media_part` of each part of a content."""
    return [media_part(f"{where}: content[{at}]", part) for at, part in enumerate(content)]
