"""What the processes of ``isolation="process"`` do: they run one call after another."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.child_processes import MAX_ANSWER, resolve_outcome
from rollout.config.media_section import MediaConfig
from rollout.errors import MediaError, ToolError
from rollout.media import Media
from rollout.media.parts import MediaSource
from rollout.media.reading import read_media
from rollout.medium import FRAMES_MIME
from rollout.tools.attempt import describe
from rollout.tools.function_tools import FunctionTool
from rollout.tools.parameters import Parameters
from rollout.tools.policy import ToolPolicy, TransientError
from rollout.tools.results import normalise_result

if TYPE_CHECKING:
    from collections.abc import Callable


def answer(found: Any, body: bytes) -> bytes:
    """The fields of the `ToolResult` of a call; its images and videos are encoded files.

    Args:
        found: The function, or the `FunctionTool` around it.
        body: The name of the tool, and its arguments.

    Raises:
        ToolError: The function raised; a `TransientError` where its policy says so.
    """
    name, arguments = msgspec.msgpack.decode(body)
    function, parameters, policy = _read_tool(found, name)
    try:
        result = normalise_result(resolve_outcome(function(**parameters.check(arguments))))
        fields = msgspec.structs.asdict(result)
        for kind in ("images", "videos", "audio"):
            if media := fields.pop(kind):
                fields[kind] = [_write_file(each) for each in media]
    except BaseException as error:
        kind_of_error = TransientError if policy.is_transient(error) else ToolError
        raise kind_of_error(describe(error)) from None
    try:
        return msgspec.msgpack.encode(fields)
    except Exception:  # data that only this process can hold stays here; the text has its words
        return msgspec.msgpack.encode(fields | {"data": None, "metrics": {}})


@functools.cache
def _read_tool(found: Any, name: str) -> tuple[Callable[..., Any], Parameters, ToolPolicy]:
    if isinstance(found, FunctionTool):
        return found.function, found.parameters, found.policy
    return found, Parameters(found, name, is_documented=False), ToolPolicy()


def _write_file(medium: Any) -> Any:
    """A picture in pixels, or frames, as the file that the driver reads."""
    if isinstance(medium, bytes | bytearray | str | dict):
        return medium
    if not isinstance(medium, Media):
        is_frames = isinstance(medium, list | tuple) or getattr(medium, "ndim", 0) == 4
        source = MediaSource("video" if is_frames else "image", medium, where="the tool's answer")
        medium = read_media(source, MediaConfig(max_bytes=MAX_ANSWER))
    if medium.mime == FRAMES_MIME:
        raise MediaError("frames do not leave the process of an isolated tool: return a video file")
    return medium.content
