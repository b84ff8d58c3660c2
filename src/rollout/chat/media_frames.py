"""Videos: files of which some frames are seen, and frames that are given one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.errors import MediaError
from rollout.lazy import derives_from
from rollout.media import Media
from rollout.media.decoding import open_video, pack_frames
from rollout.medium import FRAMES_MIME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollout.config import MediaConfig

#: Frames a second of frames that come without: transformers assumes it too.
ASSUMED_FPS = 24.0
#: Times as many bytes as a video may have, that its frames may have once decoded.
_PACKED = 64


def video_medium(content: bytes, mime: str, limits: MediaConfig) -> Media:
    """A medium of a video file: decoded once, frame by frame, of which none is kept.

    Raises:
        MediaError: It is none, is broken, or past a limit.
    """
    with open_video(content) as container:
        stream = container.streams.video[0]
        context = stream.codec_context
        width, height = context.width, context.height
        _check_size(width, height, limits)
        _check_whole(stream, len(content))
        _check_length(stream.frames, stream.duration, stream.time_base, limits)
        rate = stream.average_rate or stream.guessed_rate
        name = container.format.name.partition(",")[0]
        total, seconds = _counted(container, (width, height), limits)
    fps = float(rate) if rate else (total / seconds if seconds else ASSUMED_FPS)
    if total / fps > limits.max_seconds:
        raise _too_long(limits, total / fps)
    return Media(
        kind="video",
        content=content,
        mime=mime if mime.startswith("video/") else f"video/{name}",
        width=width,
        height=height,
        indices=_sampled(total, fps, limits),
        total_frames=total,
        fps=fps,
    )


def _counted(container: Any, size: tuple[int, int], limits: MediaConfig) -> tuple[int, float]:
    """How many frames there are and how long they take; each is decoded, and dropped."""
    total, last = 0, 0.0
    try:
        for frame in container.decode(video=0):
            total += 1
            last = frame.time or last
            if total > limits.max_frames:
                raise _too_many_frames(limits, "more")
            if last > limits.max_seconds:
                raise _too_long(limits, last)
            if (frame.width, frame.height) != size:
                raise MediaError("a video whose frames change their size")
    except MediaError:
        raise
    except Exception as error:  # av raises an error of its own for each fault of a file
        raise MediaError(f"a video that cannot be decoded: {error}") from None
    if not total:
        raise MediaError("a video without frames")
    return total, last


def _sampled(total: int, fps: float, limits: MediaConfig) -> tuple[int, ...]:
    """Which frames the model sees: evenly spread, an even number where there are two."""
    wanted = min(round(total / fps * limits.video_fps), limits.video_frames, total)
    wanted = max(wanted - wanted % 2, min(2, total, limits.video_frames))
    return tuple(at * total // wanted for at in range(wanted))


def frames_medium(value: Any, fps: float | None, limits: MediaConfig) -> Media:
    """A medium of frames: an array (T, H, W, 3) of uint8, or images and arrays of one size.

    Raises:
        MediaError: They are no such frames, or past a limit.
    """
    import numpy as np

    is_rate = isinstance(fps, int | float) and not isinstance(fps, bool)
    if fps is not None and not (is_rate and 0 < fps <= 1000):
        raise MediaError(f"fps = {fps!r}: expected frames a second, above 0")
    rate = ASSUMED_FPS if fps is None else float(fps)
    if isinstance(value, list | tuple):
        value = _stacked(value, limits)
    shape = tuple(getattr(value, "shape", ()))
    if len(shape) != 4 or shape[3] != 3 or str(value.dtype) != "uint8" or not shape[0]:
        given = f"{value.dtype} {shape}" if shape else type(value).__name__
        raise MediaError(
            f"{given}: expected a video file, or frames: uint8 of (T, H, W, 3), or a list of images"
        )
    _check_frames(len(value), shape[2], shape[1], limits)
    if len(value) / rate > limits.max_seconds:
        raise _too_long(limits, len(value) / rate)
    content = pack_frames(np.ascontiguousarray(value))
    if len(content) > limits.max_bytes:
        raise MediaError(f"media.max_bytes = {limits.max_bytes}: it has {len(content)} bytes")
    return Media(
        kind="video",
        content=content,
        mime=FRAMES_MIME,
        width=shape[2],
        height=shape[1],
        indices=tuple(range(len(value))),
        total_frames=len(value),
        fps=rate,
    )


def _stacked(frames: Sequence[Any], limits: MediaConfig) -> Any:
    import numpy as np

    if not frames:
        raise MediaError("a video without frames")
    if len(frames) > limits.max_frames:
        raise _too_many_frames(limits, str(len(frames)))
    arrays: list[Any] = []
    for at, given in enumerate(frames):
        frame = given
        if derives_from(type(frame), "PIL.Image", "Image"):
            if not at:
                _check_frames(len(frames), frame.width, frame.height, limits)
            frame = np.asarray(frame.convert("RGB"))
        if getattr(frame, "ndim", 0) != 3 or frame.shape != (arrays or [frame])[0].shape:
            kind = getattr(frame, "shape", type(frame).__name__)
            raise MediaError(f"frame {at} is {kind}; expected images of one size, (H, W, 3)")
        arrays.append(frame)
    return np.stack(arrays)


def _check_frames(count: int, width: int, height: int, limits: MediaConfig) -> None:
    _check_size(width, height, limits)
    if count > limits.max_frames:
        raise _too_many_frames(limits, str(count))
    size = count * width * height * 3
    if size > limits.max_bytes * _PACKED:
        raise MediaError(f"media.max_bytes = {limits.max_bytes}: its frames have {size} decoded")


def _check_size(width: int, height: int, limits: MediaConfig) -> None:
    if width < 1 or height < 1:
        raise MediaError(f"a video of {width} x {height} pixels; expected some")
    if width * height > limits.max_pixels:
        raise MediaError(
            f"media.max_pixels = {limits.max_pixels}: frames of {width} x {height} are "
            f"{width * height}"
        )


def _check_whole(stream: Any, size: int) -> None:
    """Refuse a file that ends before the frames that its index names (MP4, MOV)."""
    for entry in getattr(stream, "index_entries", ()):
        stop = entry.pos + entry.size
        if stop > size:
            raise MediaError(f"a video that breaks off: {size} bytes of at least {stop}")


def check_decoded(medium: Media, limits: MediaConfig) -> None:
    """Refuse frames that take too much memory once they are decoded.

    Raises:
        MediaError: They do.
    """
    size = medium.frames * medium.width * medium.height * 3
    if size > limits.max_bytes * _PACKED:
        raise MediaError(
            f"media.max_bytes = {limits.max_bytes}: the {medium.frames} frames that the model sees "
            f"have {size} decoded"
        )


def _check_length(frames: int, duration: int | None, time_base: Any, limits: MediaConfig) -> None:
    """What the header says, before anything is decoded."""
    if frames > limits.max_frames:
        raise _too_many_frames(limits, str(frames))
    if duration and time_base and float(duration * time_base) > limits.max_seconds:
        raise _too_long(limits, float(duration * time_base))


def _too_many_frames(limits: MediaConfig, count: str) -> MediaError:
    return MediaError(f"media.max_frames = {limits.max_frames}: it has {count}")


def _too_long(limits: MediaConfig, seconds: float) -> MediaError:
    return MediaError(f"media.max_seconds = {limits.max_seconds}: it takes {seconds:.1f} s")
