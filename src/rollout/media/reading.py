"""Reads images and videos within limits, and opens nothing that is not allowed.

All of it is for a thread: decoding, hashing and files take milliseconds.
"""

from __future__ import annotations

import binascii
import io
import os
import stat
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from rollout.errors import MediaError
from rollout.lazy import import_extra
from rollout.media.limits import check_decoded, check_limit, check_pixels, explain_faults
from rollout.media.parts import LOADING, is_image, is_pixels
from rollout.media.video import decode_video, read_frames, read_video
from rollout.medium import Media

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from rollout.config import MediaConfig
    from rollout.media.parts import MediaSource

#: Formats of pictures that are read, as Pillow calls them, and MIME types do too.
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
#: Two pictures and more in one JPEG, as cameras write them: the first is seen.
_CAMERA_JPEG = "MPO"
#: Pixels of more than 8 bits, which converting to RGB would clip.
_DEEP_MODES = ("I", "F")
#: Characters of base64 that are decoded at once, whole groups of 4: others wait for so long.
_BASE64_PIECE = 1 << 20
#: What an encoder of URLs writes in the place of characters of base64, and of white space.
_ESCAPED = {"%2B": "+", "%2F": "/", "%3D": "=", "%0A": "", "%0D": "", "%20": ""}
_CANNOT_DECODE = "a picture that cannot be decoded"
#: Types that stand for any.
_ANY_MIME = ("", "application/octet-stream", "binary/octet-stream")
_SAME_MIME = {"image/jpg": "image/jpeg", "image/pjpeg": "image/jpeg", "image/x-png": "image/png"}

_import_pillow = partial(import_extra, extra="media", user="a picture", kind=MediaError)


def decode(media: Media) -> npt.NDArray[np.uint8]:
    """The pixels, RGB: (H, W, 3) uint8 of an image, (T, H, W, 3) of the frames of a video.

    Work of milliseconds: call it in a thread.

    Raises:
        MediaError: It cannot be decoded, or what is needed for that is not installed.
    """
    if media.kind == "video":
        return decode_video(media)
    import numpy as np

    return np.asarray(_convert_to_rgb(_open_image(media.content)))


def find_url(source: MediaSource) -> str | None:
    """The http(s) address that a source names; None of any other."""
    value = source.value
    if source.is_base64 or not isinstance(value, str):
        return None
    return value if value[:8].lower().startswith(("http://", "https://")) else None


def read_media(source: MediaSource, limits: MediaConfig) -> Media:
    """Read a medium and check it: it can be decoded, is what it says, and within `limits`.

    Raises:
        MediaError: It is not; the message names the part, and the field of a limit.
    """
    try:
        return _read(source, limits)
    except MediaError as error:
        raise MediaError(f"{source.where}: {error}") from None
    except Exception as error:  # whatever a format's reader or a foreign object raises
        raise MediaError(f"{source.where}: cannot be read: {error!r:.200}") from None


def _read(source: MediaSource, limits: MediaConfig) -> Media:
    value, mime = source.value, source.mime
    if isinstance(value, os.PathLike):
        value = _read_file(os.fspath(value), limits)
    elif isinstance(value, str):
        value, mime = _read_text(source, limits)
    if isinstance(value, bytes | bytearray | memoryview):
        check_limit(limits, "max_bytes", len(value), f"it has {len(value)} bytes")
        return _check_file(bytes(value), mime, source, limits)
    if source.kind == "video":
        is_list = isinstance(value, list | tuple)
        frames = _stack_frames(value, limits) if is_list else value
        return read_frames(frames, source.fps, limits)
    return _encode_pixels(value, limits)


def _read_text(source: MediaSource, limits: MediaConfig) -> tuple[bytes, str]:
    """The bytes that a text holds or names, and their type."""
    text: str = source.value
    if source.is_base64:
        return _decode_base64(text, 0, limits), source.mime
    if text[:5].lower() == "data:":
        comma = text.find(",", 0, 256)
        head = text[5 : max(comma, 5)].lower().split(";")
        if comma < 0 or "base64" not in head[1:]:
            raise MediaError("a data URL that is not of the form data:TYPE;base64,DATA")
        return _decode_base64(text, comma + 1, limits), head[0]
    if text[:7].lower() == "file://":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise MediaError(f"{text:.200}: a file of another machine ({parts.netloc:.80})")
        text = unquote(parts.path)
    elif find_url(source) is not None:
        raise MediaError("a URL, and no media_fetcher was given to open_rollout; none is opened")
    return _read_file(text, limits), source.mime


def _decode_base64(text: str, start: int, limits: MediaConfig) -> bytes:
    size = (len(text) - start) * 3 // 4
    check_limit(limits, "max_bytes", size - 3, f"it has about {size} bytes")  # 3 of padding
    text = text[start:]
    for escaped, character in _ESCAPED.items() if "%" in text else ():
        text = text.replace(escaped, character).replace(escaped.lower(), character)
    try:
        data = text.encode("ascii").translate(None, b" \t\r\n\v\f")  # in lines, as in mails
        if 0 <= data.find(b"=") < len(data) - 2:
            raise ValueError("data after its padding")
        return b"".join(
            binascii.a2b_base64(data[at : at + _BASE64_PIECE], strict_mode=True)
            for at in range(0, len(data), _BASE64_PIECE)
        )
    except ValueError as error:
        raise MediaError(f"not valid base64: {error}") from None


def _read_file(name: str, limits: MediaConfig) -> bytes:
    """The content of a file below one of the roots.

    It is opened once, what was opened is judged, and then read: a link that is changed meanwhile
    leads nowhere else.
    """
    if not limits.roots:
        raise MediaError(f"a path ({name:.80}), and media.roots names no directory; none is opened")
    if "\0" in name:
        raise MediaError("a path with a zero byte in it")
    roots = [Path(os.path.realpath(root)) for root in limits.roots]

    def check(path: Path) -> None:
        if not any(path.is_relative_to(root) for root in roots):
            raise MediaError(f"{name:.200} is not below one of media.roots = {list(limits.roots)}")

    def open_at_once(path: str, flags: int) -> int:
        # Without waiting for the other end of a pipe, and not through a link put there since.
        return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)

    real = Path(os.path.realpath(name))
    check(real)
    try:
        with open(real, "rb", opener=open_at_once) as file:
            if Path("/proc/self/fd").is_dir():
                check(Path(os.path.realpath(f"/proc/self/fd/{file.fileno()}")))
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise IsADirectoryError
            content = file.read(limits.max_bytes + 1)
    except IsADirectoryError:
        raise MediaError(f"{name:.200} is no file") from None
    except OSError as error:
        raise MediaError(f"{name:.200} cannot be opened: {error.strerror}") from None
    check_limit(limits, "max_bytes", len(content), "it has more")
    return content


def _check_file(content: bytes, mime: str, source: MediaSource, limits: MediaConfig) -> Media:
    """The medium of an encoded file that is what it is said to be."""
    said = mime.lower().partition(";")[0].strip()
    said = _SAME_MIME.get(said, said)
    is_markup = content[:64].lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<")
    if said == "image/svg+xml" or (is_markup and b"<svg" in content[:4096].lower()):
        raise MediaError("an SVG: expected a picture of pixels (PNG, JPEG, WEBP, GIF, BMP, TIFF)")
    is_gif = said == "image/gif" and source.kind == "video"
    if said not in _ANY_MIME and not said.startswith(f"{source.kind}/") and not is_gif:
        raise MediaError(f"said to be {said}; expected {source.kind}/…")
    if source.kind == "video":
        return read_video(content, said, limits)
    image = _open_image(content)
    mime = "image/jpeg" if image.format == _CAMERA_JPEG else f"image/{image.format.lower()}"
    if said not in _ANY_MIME and said != mime:
        raise MediaError(f"said to be {said}, and is {mime}")
    check_pixels(limits, image.width, image.height)
    if _is_animated(image):
        raise MediaError(
            f"an animated {image.format} where one picture is expected; a video part may have "
            f"media.max_frames = {limits.max_frames} frames"
        )
    upright = _convert_to_rgb(image)
    return Media(
        kind="image", content=content, mime=mime, width=upright.width, height=upright.height
    )


def _encode_pixels(value: Any, limits: MediaConfig) -> Media:
    """The medium of a PIL image or an array, as PNG."""
    if is_pixels(value):
        value = _convert_array(value)
    elif not is_image(value):
        raise MediaError(
            f"{type(value).__name__}: expected a PIL image, an array, bytes, a data URL, a path "
            "below media.roots or a URL for the media_fetcher"
        )
    check_pixels(limits, value.width, value.height)
    with LOADING:
        if _is_animated(value):
            raise MediaError("an animated picture where a single one is expected")
        image, file = _convert_to_rgb(value), io.BytesIO()
    with explain_faults(_CANNOT_DECODE):  # one that is read while it is saved may be broken
        image.save(file, "png", compress_level=1)
    content = file.getvalue()
    check_limit(limits, "max_bytes", len(content), f"it has {len(content)} bytes as PNG")
    return Media(
        kind="image", content=content, mime="image/png", width=image.width, height=image.height
    )


def _stack_frames(frames: Sequence[Any], limits: MediaConfig) -> Any:
    """(T, H, W, 3) of images and arrays of one size."""
    import numpy as np

    count, arrays = len(frames), []
    check_limit(limits, "max_frames", count, f"it has {count}")
    with explain_faults("expected frames that are images of one size, (H, W, 3)"):
        for frame in frames:
            width, height = frame.size if is_image(frame) else frame.shape[1::-1]
            check_pixels(limits, width, height)
            check_decoded(limits, count, width, height)
            with LOADING:
                arrays.append(np.asarray(_convert_to_rgb(frame) if is_image(frame) else frame))
        return np.stack(arrays)


def _convert_array(value: Any) -> Any:
    """A PIL image of (H, W), (H, W, 1), (H, W, 3) or (H, W, 4) uint8."""
    import numpy as np

    shape = tuple(value.shape)
    is_grey = len(shape) == 2 or (len(shape) == 3 and shape[2] == 1)
    if str(value.dtype) != "uint8" or not (is_grey or (len(shape) == 3 and shape[2] in (3, 4))):
        raise MediaError(
            f"an array of {value.dtype} {shape}; expected uint8 of (H, W), (H, W, 1), (H, W, 3) "
            f"or (H, W, 4)"
        )
    pixels = np.ascontiguousarray(value)
    return _import_pillow("PIL.Image").fromarray(pixels.reshape(shape[:2]) if is_grey else pixels)


def _open_image(content: bytes) -> Any:
    """A PIL image whose header is read and whose pixels are not."""
    pillow = _import_pillow("PIL.Image")
    expected = f"expected a picture ({', '.join(IMAGE_FORMATS)})"
    if not content:
        raise MediaError("no bytes at all; expected a picture")
    with explain_faults(expected):  # a broken header ends in whatever the format's reader raises
        try:
            return pillow.open(io.BytesIO(content), formats=IMAGE_FORMATS)
        except pillow.UnidentifiedImageError:
            raise MediaError(f"{expected}: it is none") from None


def _is_animated(image: Any) -> bool:
    return image.format != _CAMERA_JPEG and bool(getattr(image, "is_animated", False))


def _convert_to_rgb(image: Any) -> Any:
    """A PIL image in RGB, upright."""
    if image.mode.startswith(_DEEP_MODES):
        raise MediaError(
            f"a picture of mode {image.mode!r}: expected 8 bits for each channel; scale it before"
        )
    with explain_faults(_CANNOT_DECODE):
        image.load()
        upright = _import_pillow("PIL.ImageOps").exif_transpose(image)
        return upright if upright.mode == "RGB" else upright.convert("RGB")
