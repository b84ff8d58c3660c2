"""Calls of functions with ``isolation="process"``, which run in child processes.

The driver's side is `run_isolated`, a child's is `answer`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import msgspec

from rollout.child_processes import (
    MAX_ANSWER,
    ChildDiedError,
    ChildProcesses,
    ChildRaisedError,
    resolve_outcome,
)
from rollout.config.media_section import MediaConfig
from rollout.errors import MediaError, ToolError
from rollout.media import Media
from rollout.media.parts import MediaSource
from rollout.media.reading import read_media
from rollout.medium import FRAMES_MIME
from rollout.tools.attempt import describe
from rollout.tools.parameters import Parameters
from rollout.tools.policy import ToolPolicy, TransientError
from rollout.tools.results import ToolResult, normalise_result
from rollout.tools.tool import Tool

if TYPE_CHECKING:
    from rollout.function_refs import FunctionRef


async def run_isolated(
    processes: ChildProcesses, name: str, function: FunctionRef, arguments: dict[str, Any]
) -> ToolResult:
    """Run a call in a process, which cancellation kills with the process's group.

    Raises:
        ToolError: The function raised, or its process died.
        TransientError: It raised what its policy calls transient.
    """
    try:
        body = msgspec.msgpack.encode((name, arguments))
    except (TypeError, ValueError, OverflowError) as error:  # tools_kwargs hold any object
        raise ToolError(f"{name}: its arguments are not plain data: {error}") from error
    try:
        async with processes.worker() as child:
            return ToolResult(**msgspec.msgpack.decode(await child.ask(function, body)))
    except ChildDiedError as error:
        raise ToolError(f"the process of {name!r} {error}") from None
    except ChildRaisedError as error:
        is_transient = error.cause.type == TransientError.__qualname__
        raise (TransientError if is_transient else ToolError)(error.cause.message) from None


def answer(found: Any, body: bytes) -> bytes:
    """The fields of a call's `ToolResult`, its images and videos as encoded files.

    Raises:
        ToolError: The function raised; a `TransientError` where its policy says so.
    """
    name, arguments = msgspec.msgpack.decode(body)
    function, parameters, policy = _read_tool(found, name)
    try:
        value = resolve_outcome(function(**parameters.check(arguments)))
        fields = msgspec.structs.asdict(normalise_result(value))
        for kind in ("images", "videos", "audio"):
            if media := fields.pop(kind):
                fields[kind] = [_write_file(each) for each in media]
    except BaseException as error:
        is_transient = policy.is_transient(error)
        raise (TransientError if is_transient else ToolError)(describe(error)) from None
    try:
        return msgspec.msgpack.encode(fields)
    except Exception:  # data that only this process can hold stays here; the text has its words
        return msgspec.msgpack.encode(fields | {"data": None, "metrics": {}})


@functools.cache
def _read_tool(found: Any, name: str) -> tuple[Any, Parameters, ToolPolicy]:
    """The function to call, which is `found` itself or within a `FunctionTool`."""
    if isinstance(found, Tool):
        tool: Any = found
        return tool.function, tool.parameters, tool.policy
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
