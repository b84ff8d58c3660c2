"""Videos: files of which some frames are seen, and frames that are given one by one."""

from __future__ import annotations

import io
import struct
import zlib
from typing import TYPE_CHECKING, Any

from rollout.errors import MediaError
from rollout.lazy import import_extra
from rollout.media.limits import check_decoded, check_limit, check_pixels, explain_faults
from rollout.medium import FRAMES_MIME, Media

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from rollout.config import MediaConfig

    Pixels = npt.NDArray[np.uint8]

#: Frames a second of frames that come without: transformers assumes it too.
ASSUMED_FPS = 24.0
#: Formats of videos that are read, as FFmpeg calls them. Others name further files and addresses,
#: which FFmpeg would open (playlists, lists of files, descriptions of streams).
_VIDEO_FORMATS = (
    *("mov", "matroska", "webm", "avi", "gif", "apng", "flv", "mpegts", "mpeg", "mpegvideo"),
    *("ogg", "asf", "ivf", "m4v", "h264", "hevc", "obu", "yuv4mpegpipe"),
)
#: Nothing but the bytes at hand is opened, whatever a file of these formats may name.
_ONLY_THE_BYTES = {"format_whitelist": ",".join(_VIDEO_FORMATS), "protocol_whitelist": "none"}
_CANNOT_DECODE = "a video that cannot be decoded"
#: Frames, height and width of packed frames.
_FRAMES_HEAD = struct.Struct("<III")


def read_video(content: bytes, mime: str, limits: MediaConfig) -> Media:
    """The medium of a video file: decoded once, frame by frame, of which none is kept.

    Raises:
        MediaError: It is none, is broken, or past a limit.
    """
    with _open_video(content) as container:
        stream = container.streams.video[0]
        width, height = stream.codec_context.width, stream.codec_context.height
        check_pixels(limits, width, height)
        stop = max((e.pos + e.size for e in getattr(stream, "index_entries", ())), default=0)
        if stop > len(content):  # of MP4 and MOV
            raise MediaError(f"a video that breaks off: {len(content)} bytes of at least {stop}")
        # As the header says, before anything is decoded.
        check_limit(limits, "max_frames", stream.frames, f"it has {stream.frames}")
        if stream.duration and stream.time_base:
            _check_seconds(float(stream.duration * stream.time_base), limits)
        total, seconds = 0, 0.0
        with explain_faults(_CANNOT_DECODE):
            for frame in container.decode(video=0):
                total += 1
                seconds = frame.time or seconds
                check_limit(limits, "max_frames", total, "it has more")
                _check_seconds(seconds, limits)
                if (frame.width, frame.height) != (width, height):
                    raise MediaError("a video whose frames change their size")
        if not total:
            raise MediaError("a video without frames")
        rate = stream.average_rate or stream.guessed_rate
        name = container.format.name.partition(",")[0]
    fps = float(rate) if rate else (total / seconds if seconds else ASSUMED_FPS)
    _check_seconds(total / fps, limits)
    return Media(
        kind="video",
        content=content,
        mime=mime if mime.startswith("video/") else f"video/{name}",
        width=width,
        height=height,
        indices=_sample_indices(total, fps, limits),
        total_frames=total,
        fps=fps,
    )


def _sample_indices(total: int, fps: float, limits: MediaConfig) -> tuple[int, ...]:
    """Which frames the model sees: evenly spread, an even number where there are two."""
    wanted = min(round(total / fps * limits.video_fps), limits.video_frames, total)
    wanted = max(wanted - wanted % 2, min(2, total, limits.video_frames))
    return tuple(at * total // wanted for at in range(wanted))


def read_frames(value: Any, fps: float | None, limits: MediaConfig) -> Media:
    """The medium of frames: an array (T, H, W, 3) of uint8.

    Raises:
        MediaError: They are no such frames, or past a limit.
    """
    import numpy as np

    is_rate = isinstance(fps, int | float) and not isinstance(fps, bool)
    if fps is not None and not (is_rate and 0 < fps <= 1000):
        raise MediaError(f"fps = {fps!r}: expected frames a second, above 0")
    rate = ASSUMED_FPS if fps is None else float(fps)
    shape = tuple(getattr(value, "shape", ()))
    if len(shape) != 4 or shape[3] != 3 or str(value.dtype) != "uint8" or not shape[0]:
        given = f"{value.dtype} {shape}" if shape else type(value).__name__
        raise MediaError(
            f"{given}: expected a video file, or frames: uint8 of (T, H, W, 3), or a list of images"
        )
    count, height, width = shape[:3]
    check_pixels(limits, width, height)
    check_limit(limits, "max_frames", count, f"it has {count}")
    check_decoded(limits, count, width, height)
    _check_seconds(count / rate, limits)
    content = pack_frames(np.ascontiguousarray(value))
    check_limit(limits, "max_bytes", len(content), f"it has {len(content)} bytes")
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


def _check_seconds(seconds: float, limits: MediaConfig) -> None:
    check_limit(limits, "max_seconds", seconds, f"it takes {seconds:.1f} s")


def decode_video(media: Media) -> Pixels:
    """(T, H, W, 3) uint8: the frames that the model sees.

    Raises:
        MediaError: It cannot be decoded, or av is not installed.
    """
    if media.mime == FRAMES_MIME:
        return _unpack_frames(media)
    import numpy as np

    indices, left = np.asarray(media.indices), len(media.indices)
    pixels = np.empty((left, media.height, media.width, 3), np.uint8)
    with explain_faults(_CANNOT_DECODE), _open_video(media.content) as container:
        for index, frame in enumerate(container.decode(video=0)):
            places = indices == index
            if places.any():
                pixels[places] = frame.to_ndarray(format="rgb24")
                left -= int(places.sum())
            if not left:
                break
    if left:
        total = media.total_frames
        raise MediaError(f"a video of fewer frames than the {total} that were counted")
    return pixels


def pack_frames(frames: Pixels) -> bytes:
    """(T, H, W, 3) uint8 as bytes, without loss."""
    return _FRAMES_HEAD.pack(*frames.shape[:3]) + zlib.compress(frames.tobytes(), 1)


def _unpack_frames(media: Media) -> Pixels:
    import numpy as np

    with explain_faults("packed frames that cannot be read"):
        count, height, width = _FRAMES_HEAD.unpack_from(media.content)
        if (height, width) != (media.height, media.width):
            raise ValueError(f"frames of {width}x{height}")
        size = count * height * width * 3
        packed = zlib.decompressobj().decompress(media.content[_FRAMES_HEAD.size :], size)
        frames = np.frombuffer(packed, np.uint8).reshape(count, height, width, 3)
        return frames[list(media.indices)]


def _open_video(content: bytes) -> Any:
    """An av container."""
    av = import_extra("av", "media", "a video", MediaError)
    formats = "MP4, MOV, WebM, MKV, AVI, GIF, APNG, FLV, MPEG, OGG, ASF, IVF"
    with explain_faults(f"expected a video ({formats})"):
        container = av.open(
            io.BytesIO(content), metadata_errors="ignore", container_options=_ONLY_THE_BYTES
        )
    if not container.streams.video:
        container.close()
        raise MediaError("expected a video; the file has no picture in it")
    container.streams.video[0].thread_count = 1  # our threads are bounded; its own are not
    return container
