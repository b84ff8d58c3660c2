"""From the bytes of a medium to its pixels: the same on the driver's side and on the engine's."""

from __future__ import annotations

import io
import struct
import zlib
from typing import TYPE_CHECKING, Any

from rollout.errors import MediaError
from rollout.medium import FRAMES_MIME

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from rollout.medium import Media

    Pixels = npt.NDArray[np.uint8]

#: Formats of pictures that are read, as pillow calls them, and their MIME types.
IMAGE_FORMATS = {
    "PNG": "image/png",
    "JPEG": "image/jpeg",
    "WEBP": "image/webp",
    "GIF": "image/gif",
    "BMP": "image/bmp",
    "TIFF": "image/tiff",
}
#: Two pictures and more in one JPEG, as cameras write them: the first is seen.
_CAMERA_JPEG = "MPO"
#: Pixels of more than 8 bits, which converting to RGB would clip.
_DEEP_MODES = ("I", "F", "I;")
#: Formats of videos that are read, as FFmpeg calls them. Others name further files and addresses,
#: which FFmpeg would open (playlists, lists of files, descriptions of streams).
_VIDEO_FORMATS = (
    *("mov", "matroska", "webm", "avi", "gif", "apng", "flv", "mpegts", "mpeg", "mpegvideo"),
    *("ogg", "asf", "ivf", "m4v", "h264", "hevc", "obu", "yuv4mpegpipe"),
)
#: Nothing but the bytes at hand is opened, whatever a file of these formats may name.
_ONLY_THE_BYTES = {
    "format_whitelist": ",".join(_VIDEO_FORMATS),
    "protocol_whitelist": "none",
}
#: Frames, height and width of packed frames.
_FRAMES_HEAD = struct.Struct("<III")


def decode(media: Media) -> Pixels:
    """The pixels, RGB: (H, W, 3) uint8 of an image, (T, H, W, 3) of the frames of a video.

    Work of milliseconds: call it in a thread.

    Raises:
        MediaError: It cannot be decoded, or what is needed for that is not installed.
    """
    import numpy as np

    if media.kind == "image":
        return np.asarray(rgb_of(open_image(media.content)))
    if media.mime == FRAMES_MIME:
        return _unpacked(media)
    return _frames_of(media.content, media.indices, media.total_frames)


def open_image(content: bytes) -> Any:
    """A PIL image whose header is read and whose pixels are not.

    Raises:
        MediaError: It is no picture of a known format.
    """
    pillow = _pillow()
    if not content:
        raise MediaError("no bytes at all; expected a picture")
    try:
        return pillow.open(io.BytesIO(content), formats=tuple(IMAGE_FORMATS))
    except pillow.UnidentifiedImageError:
        raise MediaError(f"expected a picture ({', '.join(IMAGE_FORMATS)}): it is none") from None
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise MediaError(f"{error}; media.max_pixels bounds images") from None
    except Exception as error:  # a broken header ends in whatever the format's reader raises
        formats = ", ".join(IMAGE_FORMATS)
        raise MediaError(f"expected a picture ({formats}): {_shown(error)}") from None


def mime_of(image: Any) -> str:
    """The MIME type of a PIL image that `open_image` gave."""
    return IMAGE_FORMATS["JPEG" if image.format == _CAMERA_JPEG else image.format]


def is_animated(image: Any) -> bool:
    """Whether a PIL image has frames that follow each other."""
    return image.format != _CAMERA_JPEG and bool(getattr(image, "is_animated", False))


def rgb_of(image: Any) -> Any:
    """A PIL image in RGB, upright.

    Raises:
        MediaError: Its pixels cannot be decoded.
    """
    pillow = _pillow()
    from PIL import ImageOps

    if image.mode.startswith(_DEEP_MODES):
        raise MediaError(
            f"a picture of mode {image.mode!r}: expected 8 bits for each channel; scale it before"
        )
    try:
        image.load()
        upright = ImageOps.exif_transpose(image)
        return upright if upright.mode == "RGB" else upright.convert("RGB")
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise MediaError(f"{error}; media.max_pixels bounds images") from None
    except Exception as error:
        raise MediaError(f"a picture that cannot be decoded: {_shown(error)}") from None


def pack_frames(frames: Pixels) -> bytes:
    """(T, H, W, 3) uint8 as bytes, without loss."""
    head = _FRAMES_HEAD.pack(*frames.shape[:3])
    return head + zlib.compress(frames.tobytes(), 1)


def frames_size(content: bytes) -> tuple[int, int, int]:
    """Frames, height and width of packed frames."""
    count, height, width = _FRAMES_HEAD.unpack_from(content)
    return count, height, width


def _unpacked(media: Media) -> Pixels:
    import numpy as np

    try:
        shape = (*frames_size(media.content), 3)
        size = shape[0] * shape[1] * shape[2] * 3
        if shape[1:3] != (media.height, media.width):
            raise ValueError(f"frames of {shape[2]}x{shape[1]}")
        reader = zlib.decompressobj()
        packed = reader.decompress(media.content[_FRAMES_HEAD.size :], size)
        every = np.frombuffer(packed, np.uint8).reshape(shape)
        return every[list(media.indices)]
    except (ValueError, IndexError, struct.error, zlib.error) as error:
        raise MediaError(f"packed frames that cannot be read: {_shown(error)}") from None


def _frames_of(content: bytes, indices: Sequence[int], total: int) -> Pixels:
    """Those frames of a video file; of the others nothing is kept."""
    import numpy as np

    places: dict[int, list[int]] = {}
    for place, index in enumerate(indices):
        places.setdefault(index, []).append(place)
    every: Pixels | None = None
    left = len(places)
    try:
        with open_video(content) as container:
            for at, frame in enumerate(container.decode(video=0)):
                if at in places:
                    pixels = frame.to_ndarray(format="rgb24")
                    if every is None:  # once: stacked afterwards, all would be there twice
                        every = np.empty((len(indices), *pixels.shape), np.uint8)
                    every[places[at]] = pixels
                    left -= 1
                if not left:
                    break
    except MediaError:
        raise
    except Exception as error:  # av raises an error of its own for each fault of a file
        raise MediaError(f"a video that cannot be decoded: {_shown(error)}") from None
    if left or every is None:
        raise MediaError(f"a video of fewer frames than the {total} that were counted")
    return every


def open_video(content: bytes) -> Any:
    """An av container.

    Raises:
        MediaError: It is no video of a known format, or av is not installed.
    """
    try:
        import av
    except ImportError:
        raise MediaError("videos need av: pip install 'rollout-rl[media]'") from None
    try:
        container = av.open(
            io.BytesIO(content), metadata_errors="ignore", container_options=_ONLY_THE_BYTES
        )
    except Exception as error:
        raise MediaError(
            f"expected a video (MP4, MOV, WebM, MKV, AVI, GIF, FLV, MPEG, OGG, ASF, IVF): "
            f"{_shown(error)}"
        ) from None
    if not container.streams.video:
        container.close()
        raise MediaError("expected a video; the file has no picture in it")
    container.streams.video[0].thread_count = 1  # our threads are bounded; its own are not
    return container


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise MediaError("images need pillow: pip install 'rollout-rl[media]'") from None
    return Image


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]
