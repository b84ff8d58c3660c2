"""What is no text, found where messages and the answers of tools must hold text alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.errors import MediaError
from rollout.lazy import derives_from

#: Types of the parts of a content that are no text, as OpenAI, Anthropic, MCP and chat templates
#: call them.
PART_TYPES = frozenset(
    (
        *("image", "image_url", "input_image", "video", "video_url", "input_video"),
        *("audio", "audio_url", "input_audio", "file", "input_file"),
    )
)
#: Keys of a message under which data sets keep media.
FIELDS = frozenset(("image", "images", "video", "videos", "audio", "audios"))
#: What such a part has beside its type: some answers of tools only have the type in common with it.
_CONTENTS = frozenset((*PART_TYPES, "source", "data"))
#: How files of images, video and audio begin.
_BEGINNINGS = (
    *(b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM", b"II*\x00", b"MM\x00*", b"OggS"),
    *(b"ID3", b"fLaC", b"\x1aE\xdf\xa3"),
)
#: Bytes of a file that are looked at: texts have no zero among them.
_HEAD = 1024
#: Values of an answer that are looked at; the text of more is cut in any case.
_LOOKED_AT = 10_000

TEXT_ONLY = "here the model reads text only"


def kind_of_media(value: object) -> str | None:
    """What `value` is, where no text can stand for it; None of anything else."""
    if isinstance(value, bytes | bytearray | memoryview):
        return "bytes"
    if derives_from(type(value), "PIL.Image", "Image"):
        return "a PIL image"
    return None


def is_media_file(content: bytes | bytearray) -> bool:
    """Whether this is how a file of an image, a video or audio begins."""
    is_one = content.startswith(_BEGINNINGS) or content[4:8] == b"ftyp"
    return is_one and b"\0" in content[:_HEAD]


def is_media_part(item: Mapping[Any, Any]) -> bool:
    """Whether it is a part of a content that holds an image, a video, audio or a file."""
    named = item.get("type")
    return isinstance(named, str) and named in PART_TYPES and bool(_CONTENTS & item.keys())


def check_answer(where: str, value: object) -> None:
    """Look for media in lists and mappings, at whatever depth.

    Raises:
        MediaError: There are some.
    """
    waiting = [value]
    for _ in range(_LOOKED_AT):
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
