"""What of images and videos is taken."""

# Annotations stay evaluated: they carry the rules that the fields are checked by.
from typing import Annotated, ClassVar

import attrs

from rollout.config.checks import Count, Positive, Rule, Texts
from rollout.config.section_type import Section

PositionRows = Annotated[int, Rule("3 or 4", lambda n: n in (3, 4))]


@attrs.frozen(kw_only=True)
class MediaConfig(Section):
    """Images and videos in prompts and tools' answers; ``docs/media.md`` explains them."""

    section: ClassVar[str] = "media"
    #: Directories below which parts of messages may name files. None by default: then no path is
    #: opened. Symbolic links are followed before they are judged.
    roots: Texts = ()
    #: Images and videos of a conversation.
    max_count: Count | None = 64
    #: Bytes of one image or video, encoded.
    max_bytes: Count = 64 * 1024 * 1024
    #: Pixels of an image, or of a frame of a video; judged by the header, before decoding.
    max_pixels: Count = 32 * 1024 * 1024
    #: Frames of a video as it is given.
    max_frames: Count = 4096
    #: Length of a video.
    max_seconds: Positive = 300.0
    #: Frames of a video file that the model sees for each second. Frames that are given one by one
    #: are all seen.
    video_fps: Positive = 2.0
    #: Frames of a video file that the model sees at most, evenly spread.
    video_frames: Count = 128
    #: Threads that read and decode; further media wait.
    max_threads: Count = 2
    #: How long a fetcher may take for one URL.
    fetch_s: Positive = 30.0
    #: Rows of `position_ids` of M-RoPE families: 3 as the model's `get_rope_index` gives them, or 4
    #: with the positions of a text-only row before them, as verl wants them.
    position_rows: PositionRows = 3
