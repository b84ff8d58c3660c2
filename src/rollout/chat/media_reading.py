"""Reads images and videos that somebody gave: within limits, and nothing that is not allowed.

All of it is for a thread: decoding, hashing and files take milliseconds.
"""

from __future__ import annotations

import binascii
import io
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from rollout.chat.media_frames import frames_medium, video_medium
from rollout.chat.media_parts import is_pixels
from rollout.errors import MediaError
from rollout.lazy import derives_from
from rollout.media import Media
from rollout.media.decoding import is_animated, mime_of, open_image, rgb_of

if TYPE_CHECKING:
    from rollout.chat.media_parts import MediaSource
    from rollout.config import MediaConfig

#: Characters in which the head of a data URL must end.
_DATA_HEAD = 256
#: Characters of base64 that are decoded at once: others wait for so long.
_PIECE = 1 << 20
#: How SVG begins, and other texts that are no pictures of pixels.
_MARKUP = (b"<svg", b"<?xml", b"<!doctype", b"<html")
#: Types that stand for any.
_ANY_MIME = ("", "application/octet-stream", "binary/octet-stream")
_SAME_MIME = {"image/jpg": "image/jpeg", "image/pjpeg": "image/jpeg", "image/x-png": "image/png"}


def url_of(source: MediaSource) -> str | None:
    """The http(s) address that a source names; None of any other."""
    value = source.value
    if isinstance(value, str) and not source.is_base64:
        return value if value[:8].lower().startswith(("http://", "https://")) else None
    return None


def read_media(source: MediaSource, limits: MediaConfig) -> Media:
    """The medium, checked: it can be decoded, is what it is said to be, and within `limits`.

    Raises:
        MediaError: It is not; the message names the part, and the field of a limit.
    """
    try:
        return _read(source, limits)
    except MediaError as error:
        raise MediaError(f"{source.where}: {error}") from None
    except (MemoryError, OSError) as error:
        raise MediaError(f"{source.where}: cannot be read: {error}") from None


def _read(source: MediaSource, limits: MediaConfig) -> Media:
    value, mime = source.value, source.mime
    if isinstance(value, os.PathLike):
        value = _from_file(os.fspath(value), limits)
    if isinstance(value, str):
        value, mime = _content_of(source, limits)
    if isinstance(value, bytes | bytearray | memoryview):
        if len(value) > limits.max_bytes:
            raise _too_many_bytes(limits, f"{len(value)} bytes")
        return _of_file(bytes(value), mime, source, limits)
    if source.kind == "video":
        return frames_medium(value, source.fps, limits)
    return _of_pixels(value, limits)


def _content_of(source: MediaSource, limits: MediaConfig) -> tuple[bytes, str]:
    """The bytes that a text holds or names, and their type."""
    text: str = source.value
    if source.is_base64:
        return _from_base64(text, 0, limits), source.mime
    if text[:5].lower() == "data:":
        return _from_data_url(text, limits)
    if text[:7].lower() == "file://":
        text = _path_of(text)
    elif url_of(source) is not None:
        raise MediaError("a URL, and no media_fetcher was given to open_rollout; none is opened")
    return _from_file(text, limits), source.mime


def _path_of(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise MediaError(f"{url:.200}: a file of another machine ({parts.netloc:.80})")
    return unquote(parts.path)


def _from_data_url(text: str, limits: MediaConfig) -> tuple[bytes, str]:
    comma = text.find(",", 0, _DATA_HEAD)
    head = text[5 : max(comma, 5)].lower().split(";")
    if comma < 0 or "base64" not in head[1:]:
        raise MediaError("a data URL that is not of the form data:TYPE;base64,DATA")
    return _from_base64(text, comma + 1, limits), head[0]


def _from_base64(text: str, start: int, limits: MediaConfig) -> bytes:
    if (len(text) - start) * 3 // 4 > limits.max_bytes + 3:
        raise _too_many_bytes(limits, f"about {(len(text) - start) * 3 // 4} bytes")
    if text.find("%", start) >= 0:
        text, start = unquote(text[start:]), 0
    decoded, rest, is_over = bytearray(), "", False
    try:
        for at in range(start, len(text), _PIECE):
            piece = rest + "".join(text[at : at + _PIECE].split())  # broken into lines, as in mails
            if piece and is_over:
                raise ValueError("data after its padding")
            cut = len(piece) // 4 * 4
            decoded += binascii.a2b_base64(piece[:cut], strict_mode=True)
            is_over, rest = is_over or piece[:cut].endswith("="), piece[cut:]
        if rest:
            raise ValueError("Incorrect padding")
    except ValueError as error:
        raise MediaError(f"not valid base64: {error}") from None
    return bytes(decoded)


def _from_file(name: str, limits: MediaConfig) -> bytes:
    """The content of a file below one of the roots.

    It is opened once, what was opened is judged, and then read: a link that is changed meanwhile
    leads nowhere else.
    """
    if not limits.roots:
        raise MediaError(f"a path ({name:.80}), and media.roots names no directory; none is opened")
    if "\0" in name:
        raise MediaError("a path with a zero byte in it")
    real = Path(os.path.realpath(name))
    roots = [Path(os.path.realpath(root)) for root in limits.roots]
    if not any(real.is_relative_to(root) for root in roots):
        raise MediaError(f"{name:.200} is not below one of media.roots = {list(limits.roots)}")
    try:
        # Without waiting for the other end of a pipe, and not through a link put there since.
        handle = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise MediaError(f"{name:.200} cannot be opened: {error.strerror}") from None
    try:
        opened = Path(os.path.realpath(f"/proc/self/fd/{handle}"))
        is_inside = any(opened.is_relative_to(root) for root in roots)
        if Path("/proc/self/fd").is_dir() and not is_inside:
            raise MediaError(f"{name:.200} is not below one of media.roots = {list(limits.roots)}")
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise MediaError(f"{name:.200} is no file")
        with os.fdopen(handle, "rb", closefd=False) as file:
            content = file.read(limits.max_bytes + 1)
    finally:
        os.close(handle)
    if len(content) > limits.max_bytes:
        raise _too_many_bytes(limits, "more")
    return content


def _of_file(content: bytes, mime: str, source: MediaSource, limits: MediaConfig) -> Media:
    """A medium of an encoded file."""
    said = mime.lower().partition(";")[0].strip()
    said = _SAME_MIME.get(said, said)
    start = content[:64].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if said == "image/svg+xml" or (start.startswith(_MARKUP) and b"<svg" in content[:4096].lower()):
        raise MediaError("an SVG: expected a picture of pixels (PNG, JPEG, WEBP, GIF, BMP, TIFF)")
    family = source.kind + "/"
    if said not in _ANY_MIME and not said.startswith(family):
        is_gif = said == "image/gif" and source.kind == "video"
        if not is_gif:
            raise MediaError(f"said to be {said}; expected {family}…")
    if source.kind == "video":
        return video_medium(content, said, limits)
    return _of_picture(content, said, limits)


def _of_picture(content: bytes, said: str, limits: MediaConfig) -> Media:
    image = open_image(content)
    own = mime_of(image)
    if said not in _ANY_MIME and said != own:
        raise MediaError(f"said to be {said}, and is {own}")
    check_pixels(image.width, image.height, limits)
    if is_animated(image):
        raise MediaError(
            f"an animated {image.format} where one picture is expected; a video part may have "
            f"media.max_frames = {limits.max_frames} frames"
        )
    upright = rgb_of(image)
    return Media(
        kind="image", content=content, mime=own, width=upright.width, height=upright.height
    )


def _of_pixels(value: Any, limits: MediaConfig) -> Media:
    """A medium of a PIL image or an array, as PNG."""
    if derives_from(type(value), "PIL.Image", "Image"):
        check_pixels(value.width, value.height, limits)
        if is_animated(value):
            raise MediaError("an animated picture where a single one is expected")
        image = rgb_of(value)
    elif is_pixels(value):
        image = _image_of_array(value, limits)
    else:
        kind = type(value).__name__
        raise MediaError(
            f"{kind}: expected a PIL image, an array, bytes, a data URL, a path below media.roots "
            f"or a URL for the media_fetcher"
        )
    file = io.BytesIO()
    try:
        image.save(file, "png", compress_level=1)
    except Exception as error:  # an image that is read while it is saved may be broken
        raise MediaError(f"a picture that cannot be decoded: {error}") from None
    content = file.getvalue()
    if len(content) > limits.max_bytes:
        raise _too_many_bytes(limits, f"{len(content)} bytes as PNG")
    return Media(
        kind="image", content=content, mime="image/png", width=image.width, height=image.height
    )


def _image_of_array(value: Any, limits: MediaConfig) -> Any:
    import numpy as np
    from PIL import Image

    shape = tuple(value.shape)
    is_grey = len(shape) == 2 or (len(shape) == 3 and shape[2] == 1)
    if str(value.dtype) != "uint8" or not (is_grey or (len(shape) == 3 and shape[2] in (3, 4))):
        raise MediaError(
            f"an array of {value.dtype} {shape}; expected uint8 of (H, W), (H, W, 1), (H, W, 3) "
            f"or (H, W, 4)"
        )
    check_pixels(shape[1], shape[0], limits)
    pixels = np.ascontiguousarray(value)
    return Image.fromarray(pixels.reshape(shape[:2]) if is_grey else pixels).convert("RGB")


def check_pixels(width: int, height: int, limits: MediaConfig) -> None:
    """Refuse what has too many pixels, or none.

    Raises:
        MediaError: It has.
    """
    if width < 1 or height < 1:
        raise MediaError(f"a picture of {width} x {height} pixels; expected some")
    if width * height > limits.max_pixels:
        raise MediaError(
            f"media.max_pixels = {limits.max_pixels}: {width} x {height} are {width * height}"
        )


def _too_many_bytes(limits: MediaConfig, count: str) -> MediaError:
    return MediaError(f"media.max_bytes = {limits.max_bytes}: it has {count}")
