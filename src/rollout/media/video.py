"""Videos: files of which some frames are seen, and frames that are given one by one."""

from __future__ import annotations

import io
import struct
import zlib
from typing import TYPE_CHECKING, Any

from rollout.errors import MediaError
from rollout.media.parts import is_image
from rollout.medium import FRAMES_MIME, Media

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from rollout.config import MediaConfig

    Pixels = npt.NDArray[np.uint8]

#: Frames a second of frames that come without: transformers assumes it too.
ASSUMED_FPS = 24.0
#: Times as many bytes as a video may have, that its frames may have once decoded.
_DECODED = 64
#: Formats of videos that are read, as FFmpeg calls them. Others name further files and addresses,
#: which FFmpeg would open (playlists, lists of files, descriptions of streams).
_VIDEO_FORMATS = (
    *("mov", "matroska", "webm", "avi", "gif", "apng", "flv", "mpegts", "mpeg", "mpegvideo"),
    *("ogg", "asf", "ivf", "m4v", "h264", "hevc", "obu", "yuv4mpegpipe"),
)
#: Nothing but the bytes at hand is opened, whatever a file of these formats may name.
_ONLY_THE_BYTES = {"format_whitelist": ",".join(_VIDEO_FORMATS), "protocol_whitelist": "none"}
#: Frames, height and width of packed frames.
_FRAMES_HEAD = struct.Struct("<III")


def read_video(content: bytes, mime: str, limits: MediaConfig) -> Media:
    """The medium of a video file: decoded once, frame by frame, of which none is kept.

    Raises:
        MediaError: It is none, is broken, or past a limit.
    """
    with _open_video(content) as container:
        stream = container.streams.video[0]
        size = stream.codec_context.width, stream.codec_context.height
        _check_size(*size, limits)
        for entry in getattr(stream, "index_entries", ()):  # of MP4 and MOV
            if entry.pos + entry.size > len(content):
                stop = entry.pos + entry.size
                raise MediaError(
                    f"a video that breaks off: {len(content)} bytes of at least {stop}"
                )
        _check_count(stream.frames, limits)  # as the header says, before anything is decoded
        if stream.duration and stream.time_base:
            _check_seconds(float(stream.duration * stream.time_base), limits)
        rate = stream.average_rate or stream.guessed_rate
        name = container.format.name.partition(",")[0]
        total, seconds = _count_frames(container, size, limits)
    fps = float(rate) if rate else (total / seconds if seconds else ASSUMED_FPS)
    _check_seconds(total / fps, limits)
    return Media(
        kind="video",
        content=content,
        mime=mime if mime.startswith("video/") else f"video/{name}",
        width=size[0],
        height=size[1],
        indices=_sample_indices(total, fps, limits),
        total_frames=total,
        fps=fps,
    )


def _count_frames(container: Any, size: tuple[int, int], limits: MediaConfig) -> tuple[int, float]:
    """How many frames there are and how long they take; each is decoded, and dropped."""
    total, last = 0, 0.0
    try:
        for frame in container.decode(video=0):
            total += 1
            last = frame.time or last
            _check_count(total, limits, "more")
            _check_seconds(last, limits)
            if (frame.width, frame.height) != size:
                raise MediaError("a video whose frames change their size")
    except MediaError:
        raise
    except Exception as error:  # av raises an error of its own for each fault of a file
        raise MediaError(f"a video that cannot be decoded: {error}") from None
    if not total:
        raise MediaError("a video without frames")
    return total, last


def _sample_indices(total: int, fps: float, limits: MediaConfig) -> tuple[int, ...]:
    """Which frames the model sees: evenly spread, an even number where there are two."""
    wanted = min(round(total / fps * limits.video_fps), limits.video_frames, total)
    wanted = max(wanted - wanted % 2, min(2, total, limits.video_frames))
    return tuple(at * total // wanted for at in range(wanted))


def read_frames(value: Any, fps: float | None, limits: MediaConfig) -> Media:
    """The medium of frames: an array (T, H, W, 3) of uint8, or images and arrays of one size.

    Raises:
        MediaError: They are no such frames, or past a limit.
    """
    import numpy as np

    is_rate = isinstance(fps, int | float) and not isinstance(fps, bool)
    if fps is not None and not (is_rate and 0 < fps <= 1000):
        raise MediaError(f"fps = {fps!r}: expected frames a second, above 0")
    rate = ASSUMED_FPS if fps is None else float(fps)
    if isinstance(value, list | tuple):
        value = _stack_frames(value, limits)
    shape = tuple(getattr(value, "shape", ()))
    if len(shape) != 4 or shape[3] != 3 or str(value.dtype) != "uint8" or not shape[0]:
        given = f"{value.dtype} {shape}" if shape else type(value).__name__
        raise MediaError(
            f"{given}: expected a video file, or frames: uint8 of (T, H, W, 3), or a list of images"
        )
    count, height, width = shape[:3]
    _check_frames(count, width, height, limits)
    _check_seconds(count / rate, limits)
    content = pack_frames(np.ascontiguousarray(value))
    if len(content) > limits.max_bytes:
        raise MediaError(f"media.max_bytes = {limits.max_bytes}: it has {len(content)} bytes")
    return Media(
        kind="video",
        content=content,
        mime=FRAMES_MIME,
        width=width,
        height=height,
        indices=tuple(range(count)),
        total_frames=count,
        fps=rate,
    )


def _stack_frames(frames: Sequence[Any], limits: MediaConfig) -> Any:
    import numpy as np

    if not frames:
        raise MediaError("a video without frames")
    _check_count(len(frames), limits)
    arrays: list[Any] = []
    for at, frame in enumerate(frames):
        if is_image(frame):
            if not at:
                _check_frames(len(frames), frame.width, frame.height, limits)
            frame = np.asarray(frame.convert("RGB"))  # noqa: PLW2901
        if getattr(frame, "ndim", 0) != 3 or frame.shape != (arrays or [frame])[0].shape:
            kind = getattr(frame, "shape", type(frame).__name__)
            raise MediaError(f"frame {at} is {kind}; expected images of one size, (H, W, 3)")
        arrays.append(frame)
    return np.stack(arrays)


def decode_video(media: Media) -> Pixels:
    """(T, H, W, 3) uint8: the frames that the model sees.

    Raises:
        MediaError: It cannot be decoded, or av is not installed.
    """
    if media.mime == FRAMES_MIME:
        return _unpack_frames(media)
    import numpy as np

    at_index: dict[int, list[int]] = {}
    for place, index in enumerate(media.indices):
        at_index.setdefault(index, []).append(place)
    pixels: Pixels | None = None
    left = len(at_index)
    try:
        with _open_video(media.content) as container:
            for index, frame in enumerate(container.decode(video=0)):
                if index in at_index:
                    one = frame.to_ndarray(format="rgb24")
                    if pixels is None:  # once: stacked afterwards, all would be there twice
                        pixels = np.empty((len(media.indices), *one.shape), np.uint8)
                    pixels[at_index[index]] = one
                    left -= 1
                if not left:
                    break
    except MediaError:
        raise
    except Exception as error:  # av raises an error of its own for each fault of a file
        raise MediaError(f"a video that cannot be decoded: {show_fault(error)}") from None
    if left or pixels is None:
        total = media.total_frames
        raise MediaError(f"a video of fewer frames than the {total} that were counted")
    return pixels


def pack_frames(frames: Pixels) -> bytes:
    """(T, H, W, 3) uint8 as bytes, without loss."""
    return _FRAMES_HEAD.pack(*frames.shape[:3]) + zlib.compress(frames.tobytes(), 1)


def _unpack_frames(media: Media) -> Pixels:
    import numpy as np

    try:
        count, height, width = _FRAMES_HEAD.unpack_from(media.content)
        if (height, width) != (media.height, media.width):
            raise ValueError(f"frames of {width}x{height}")
        size = count * height * width * 3
        packed = zlib.decompressobj().decompress(media.content[_FRAMES_HEAD.size :], size)
        frames = np.frombuffer(packed, np.uint8).reshape(count, height, width, 3)
        return frames[list(media.indices)]
    except (ValueError, IndexError, struct.error, zlib.error) as error:
        raise MediaError(f"packed frames that cannot be read: {show_fault(error)}") from None


def _open_video(content: bytes) -> Any:
    """An av container."""
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
            f"{show_fault(error)}"
        ) from None
    if not container.streams.video:
        container.close()
        raise MediaError("expected a video; the file has no picture in it")
    container.streams.video[0].thread_count = 1  # our threads are bounded; its own are not
    return container


def check_decoded(count: int, width: int, height: int, limits: MediaConfig) -> None:
    """Refuse frames that take too much memory once they are decoded.

    Raises:
        MediaError: They do.
    """
    size = count * width * height * 3
    if size > limits.max_bytes * _DECODED:
        raise MediaError(
            f"media.max_bytes = {limits.max_bytes}: {count} frames have {size} decoded"
        )


def _check_frames(count: int, width: int, height: int, limits: MediaConfig) -> None:
    _check_size(width, height, limits)
    _check_count(count, limits)
    check_decoded(count, width, height, limits)


def _check_size(width: int, height: int, limits: MediaConfig) -> None:
    if width < 1 or height < 1:
        raise MediaError(f"a video of {width} x {height} pixels; expected some")
    if width * height > limits.max_pixels:
        raise MediaError(
            f"media.max_pixels = {limits.max_pixels}: frames of {width} x {height} are "
            f"{width * height}"
        )


def _check_seconds(seconds: float, limits: MediaConfig) -> None:
    if seconds > limits.max_seconds:
        raise MediaError(f"media.max_seconds = {limits.max_seconds}: it takes {seconds:.1f} s")


def _check_count(count: int, limits: MediaConfig, shown: str = "") -> None:
    if count > limits.max_frames:
        raise MediaError(f"media.max_frames = {limits.max_frames}: it has {shown or count}")


def show_fault(error: BaseException) -> str:
    """A library's error, shortened for ours."""
    return f"{type(error).__name__}: {error}"[:300]
